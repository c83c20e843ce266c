"""A line on stderr that shows how far a run is: redrawn in place on a terminal, elsewhere a new line now and then."""

from __future__ import annotations

import math
import shutil
import sys
import time
from contextlib import suppress

from megatoken.engine.state import ReplicaState

PLAIN_PERIOD_SECONDS = 5.0


class Progress:
    """Live line of a run. With ``quiet``, nothing is written unless stderr is a terminal.

    Errors of stderr are ignored: a measurement goes on when its terminal has closed.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._terminal = sys.stderr.isatty()
        self._silent = quiet and not self._terminal
        self._next = 0.0
        self._width = 0

    def stage(self, text: str) -> None:
        """Shows what is being done before there is anything to count."""
        self._write(text)

    def note(self, text: str) -> None:
        """Writes a message that stays on the screen."""
        self.clear()
        if not self._silent:
            _put(f"{text}\n")

    def running(
        self,
        elapsed_seconds: float,
        left_seconds: float | None,
        done_share: float,
        tokens_per_second: float,
        state: ReplicaState,
    ) -> None:
        """Shows how far the run is; without a terminal only if the last line is ``PLAIN_PERIOD_SECONDS`` old.

        ``left_seconds`` is infinite while it is unknown, and None while the last samples drain.
        """
        now = time.monotonic()
        if not self._terminal and now < self._next:
            return
        self._next = now + PLAIN_PERIOD_SECONDS
        if left_seconds is None:
            way = "draining"
        else:
            way = f"{f'{left_seconds:.0f} s' if math.isfinite(left_seconds) else '?'} left  {100 * done_share:.0f} %"
        pages = f"  {state.pages - state.pages_free:,} of {state.pages:,} pages" if state.pages else ""
        self._write(
            f"{elapsed_seconds:.0f} s, {way}  {tokens_per_second:,.0f} tokens/s  {state.in_flight:,} in flight{pages}"
        )

    def clear(self) -> None:
        """Removes the live line from the terminal."""
        if self._terminal and self._width:
            _put(f"\r{' ' * self._width}\r")
            self._width = 0

    def _write(self, text: str) -> None:
        if self._silent:
            return
        if self._terminal:
            text = text[: shutil.get_terminal_size().columns - 1]
            _put(f"\r{text.ljust(self._width)}")
            self._width = len(text)
        else:
            _put(f"{text}\n")


def _put(text: str) -> None:
    with suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()
