"""The signals that end a command. Imports almost nothing, because a command imports it first."""

from __future__ import annotations

import os
import signal

from megatoken.errors import ExitCode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any

    Handler = Callable[[int, FrameType | None], object] | signal.Handlers


def handle_stop_signals(handler: Handler) -> dict[signal.Signals, Any]:
    """Gives SIGINT, SIGTERM and SIGHUP to ``handler``; returns the handlers they had. Main thread only.

    SIGHUP only where it is not ignored: nohup ignores it so that the command outlives its terminal.
    """
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return {number: signal.signal(number, handler) for number in numbers}


def last_words(words: str) -> None:
    """Writes a line on standard error, on a terminal in place of a live line. Raises OSError."""
    erase = "\r\x1b[K\x1b[?25h" if os.isatty(2) else ""  # and with the cursor, which a progress bar hides
    os.write(2, f"{erase}megatoken: {words}\n".encode())


def leave_at_once(words: str) -> Callable[[int, FrameType | None], None]:
    """A handler that writes ``words`` as ``last_words`` and ends the process with exit code 130.

    It raises no exception: one raised inside an import is replaced by another, or printed as ignored.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        try:
            last_words(words)
        finally:  # standard error may be closed
            os._exit(ExitCode.INTERRUPTED)

    return leave
