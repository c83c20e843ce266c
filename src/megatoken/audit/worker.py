"""A process that examines runs: ``python -m megatoken.audit.worker FD`` takes jobs and returns what it found.

Its first message says that it has started, so that a process that cannot start is not mistaken for one that a run
killed. It ends when the connection is closed.
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

from megatoken.audit.examine import examine


def serve(connection: Connection) -> None:
    """Examines jobs until the connection is closed."""
    try:
        connection.send(None)
        while True:
            connection.send(examine(connection.recv()))
    except (EOFError, OSError):
        return


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
