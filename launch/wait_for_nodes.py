"""Waits until a Ray cluster has all its nodes: ``python wait_for_nodes.py NODES [PROCESS_ID...]``.

The address is ``RAY_ADDRESS``. Ends with code 1 when one of the processes that start the nodes has ended, or
after five minutes.
"""

import os
import sys
import time
from pathlib import Path

SECONDS = 300
POLL_SECONDS = 1.0


def alive(process: int) -> bool:
    """Whether a process of the same parent still runs."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def nodes_of(address: str) -> int:
    """Nodes of the cluster that are alive; 0 while no cluster answers."""
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True)
    except (ConnectionError, RuntimeError):  # it is still starting
        return 0
    return sum(bool(node["Alive"]) for node in ray.nodes())


def main() -> int:
    """Waits; returns the exit code."""
    wanted, processes = int(sys.argv[1]), [int(number) for number in sys.argv[2:]]
    address, deadline, found = os.environ["RAY_ADDRESS"], time.monotonic() + SECONDS, 0
    while time.monotonic() < deadline and all(map(alive, processes)):
        found = nodes_of(address)
        if found >= wanted:
            return 0
        time.sleep(POLL_SECONDS)
    print(f"wait_for_nodes.py: {found} of {wanted} nodes joined {address}; see Ray's messages above", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
