"""Replicas on nodes through Ray: placement, one shared queue, heartbeats, clocks.

Ray only starts and ends processes. Samples and answers go over our own TCP connections (``wire``), which are cheap and
show a lost replica within seconds.
"""
