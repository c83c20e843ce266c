"""Replicas on nodes through Ray: placement, one shared queue, heartbeats, clocks.

Ray starts and ends processes. Samples and answers go over connections of our own (``wire``), so that a loss is known
soon and carrying them costs little.
"""
