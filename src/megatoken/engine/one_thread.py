"""A guard of what one thread at a time may use."""

from __future__ import annotations

import threading

from megatoken.errors import ThreadError


class OneThread:
    """Refuses a thread while another one is inside. The same thread may enter again; threads may take turns."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise ThreadError("two threads call one Engine at the same time; share it through an EngineThread")

    def __exit__(self, *_: object) -> None:
        self._lock.release()
