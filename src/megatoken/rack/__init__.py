"""Replicas on nodes through Ray: placement, one shared queue, heartbeats, clocks. Ray starts and ends processes; samples
and answers go over connections of our own (``wire``), so that what is lost is known soon and costs little to carry.
"""
