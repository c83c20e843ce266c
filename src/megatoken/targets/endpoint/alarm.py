"""A timer of the kernel as a file descriptor, because timers of the event loop are whole milliseconds."""

from __future__ import annotations

import ctypes
import os
import sys
import time

_NON_BLOCKING, _CLOSE_ON_EXEC, _ABSOLUTE = os.O_NONBLOCK, os.O_CLOEXEC, 1
_library = ctypes.CDLL(None, use_errno=True)


class Alarm:
    """``descriptor`` can be read from ``due_ns`` on, until the alarm is set to another moment."""

    def __init__(self) -> None:
        """Creates the timer. Raises OSError."""
        self.descriptor: int = _library.timerfd_create(time.CLOCK_MONOTONIC, _NON_BLOCKING | _CLOSE_ON_EXEC)
        if self.descriptor < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self.due_ns = sys.maxsize

    def set(self, due_ns: int | None) -> None:
        """Rings at ``due_ns`` (``time.monotonic_ns()``) only; None: never."""
        self.due_ns = sys.maxsize if due_ns is None else due_ns
        seconds, rest = divmod(due_ns or 0, 1_000_000_000)  # 0 stops the timer
        times = (ctypes.c_long * 4)(0, 0, seconds, rest)  # struct itimerspec: interval, first time
        _library.timerfd_settime(self.descriptor, _ABSOLUTE, times, None)
