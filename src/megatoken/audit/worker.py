"""A process that examines runs: ``python -m megatoken.audit.worker FD`` takes jobs and gives what it saw of each.

It starts with a message of its own, so that a process that cannot start is told from one that died of a run, and ends
when nobody listens any more.
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

from megatoken.audit.examine import examine


def serve(connection: Connection) -> None:
    """Examines what comes until there is nobody to tell."""
    try:
        connection.send(None)
        while True:
            connection.send(examine(connection.recv()))
    except (EOFError, OSError):
        return


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
