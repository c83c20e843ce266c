"""Signals that end a run: a flag that the run checks between steps, and a deadline after which the process ends."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, Protocol, Self

from megatoken.errors import ExitCode
from megatoken.signals import handle_stop_signals, last_words

GRACE_SECONDS = 3.0
WRITES_IN_GRACE = 3  # one that has just begun, the last one, and one more for a busy disk


class Stop(Protocol):
    """Whether the run should end: ``received`` names why."""

    received: str | None


class StopSignals:
    """A context in which the first SIGINT, SIGTERM or SIGHUP only sets ``received``; main thread only.

    A second signal, or ``GRACE_SECONDS`` plus the time of some writes without leaving the context, ends the process at
    once with exit code 130. A thread does that, because the main thread may be inside one long step, where Python runs
    no signal handler. So everything that must survive has to be on the disk already. SIGHUP never counts as the second
    signal: when a terminal closes, its shell and the kernel send one each.

    Attributes:
        received: name of the first signal.
        parting_words: written to stderr when the process ends at once. Enter the context before anything is on the
            disk, so that no signal comes in between.
        write_seconds: how long writing all records takes; without the last write, a large rack would lose minutes.
    """

    def __init__(self) -> None:
        """Prepares the context."""
        self.received: str | None = None
        self.parting_words = "stopped at once; nothing was written"
        self.write_seconds: Callable[[], float] = float  # nothing to write, no time
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        """Replaces the signal handlers."""
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)
        self._previous_wakeup = signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        self._previous = handle_stop_signals(self._note)
        self._thread = threading.Thread(target=self._watch, name="stop-signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Restores the signal handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_wakeup)
        os.close(self._wake_writer)
        self._thread.join()
        os.close(self._wake_reader)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name

    def _watch(self) -> None:
        if self._next_signal() is None:
            return
        deadline = time.monotonic() + GRACE_SECONDS + WRITES_IN_GRACE * self.write_seconds()
        while select.select([self._wake_reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
            number = self._next_signal()
            if number is None:
                return
            if number != signal.SIGHUP:
                break
        with suppress(OSError):
            last_words(self.parting_words)
        os._exit(ExitCode.INTERRUPTED)

    def _next_signal(self) -> int | None:
        """Waits for one of these signals; None when the context has been left."""
        while byte := os.read(self._wake_reader, 1):
            if byte[0] in self._previous:
                return byte[0]
        return None
