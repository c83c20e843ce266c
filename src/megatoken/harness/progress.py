"""A line on stderr that shows how far a run is: redrawn in place on a terminal, elsewhere a new line now and then."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

from megatoken.engine.state import ReplicaState

PLAIN_PERIOD_SECONDS = 5.0
SILENT_SECONDS = 3.0  # without a token or an error while requests are in flight, after which the line says so
ENDED_SHARE, PATIENCE_SECONDS = 0.01, 30.0  # of the samples or of the time, before which an estimate would be a guess
BAR_LETTERS = 20
ERASE = "\x1b[K"  # to the end of the line: also the ^C that a terminal shows behind it
HALF = 0.5  # of an answer is left at a random moment


@dataclass(slots=True)
class ExpectedWork:
    """The tokens that a run computes if its other answers become as long, next to their limits, as those that ended.

    Before one has ended, answers count with their limits.
    """

    prompt_tokens: int = 0
    open_limits: int = 0  # of issued samples that have not ended
    ended_limits: int = 0
    ended_tokens: int = 0

    def end(self, limit: int, output_tokens: int) -> None:
        """Counts a sample that ended after ``output_tokens`` of at most ``limit``."""
        self.open_limits -= limit
        self.ended_limits += limit
        self.ended_tokens += output_tokens

    def share(self, done_tokens: int) -> float:
        """Share of the work that ``done_tokens`` of prompts and answers are."""
        used = self.ended_tokens / self.ended_limits if self.ended_limits else 1.0
        still_open = self.open_limits * used
        # The last to end are the longest, so their tokens may exceed what was expected: half of an answer is then left.
        expected = max(self.prompt_tokens + self.ended_tokens + still_open, done_tokens + HALF * still_open)
        return done_tokens / expected if expected else 0.0


def seconds_left(elapsed_seconds: float, share: float, ended_share: float) -> float:
    """Time until all is done at the mean pace so far; infinite while too little has ended to know."""
    if not share or (ended_share < ENDED_SHARE and elapsed_seconds < PATIENCE_SECONDS):
        return math.inf
    return elapsed_seconds * (1 / share - 1)


class Progress:
    """Live line of a run. With ``quiet``, nothing is written unless stderr is a terminal.

    Errors of stderr are ignored: a measurement goes on when its terminal has closed.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._silent = quiet and not self._terminal
        self._next = 0.0
        self._drawn = False  # whether the line is on the screen

    def stage(self, text: str) -> None:
        """Shows what is being done before there is anything to count."""
        self._write(text)

    def waiting(self, text: str, in_flight: int, silent_seconds: float) -> None:
        """Shows ``text`` and how long no request of those in flight has been answered; to be called once a second.

        Before ``SILENT_SECONDS`` the line keeps the stage.
        """
        if silent_seconds >= SILENT_SECONDS and self._due():
            self._write(f"{text}: {_silence(in_flight, silent_seconds)}")

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
        silent_seconds: float = 0.0,
    ) -> None:
        """Shows how far the run is; without a terminal only if the last line is ``PLAIN_PERIOD_SECONDS`` old.

        ``left_seconds`` is infinite while it is unknown, and None while the last samples drain. ``silent_seconds``: how
        long no request of those in flight has been answered.
        """
        if not self._due():
            return
        if left_seconds is None:
            way = "draining"
        else:
            way = f"{duration(left_seconds) if math.isfinite(left_seconds) else '?'} left  {100 * done_share:.0f} %"
        pages = f"  {state.pages - state.pages_free:,} of {state.pages:,} pages" if state.pages else ""
        rate = f"{tokens_per_second:,.0f} tokens/s  {state.in_flight:,} in flight"
        if silent_seconds >= SILENT_SECONDS:
            rate = _silence(state.in_flight, silent_seconds)
        bar = f"{_bar(done_share)} " if self._terminal else ""
        self._write(f"{bar}{duration(elapsed_seconds)}, {way}  {rate}{pages}")

    def clear(self) -> None:
        """Removes the live line from the terminal."""
        if self._drawn:
            _put(f"\r{ERASE}")
            self._drawn = False

    def _due(self) -> bool:
        """Whether to show a line that comes once a second."""
        now = time.monotonic()
        if not self._terminal and now < self._next:
            return False
        self._next = now + PLAIN_PERIOD_SECONDS
        return True

    def _write(self, text: str) -> None:
        if self._silent:
            return
        if self._terminal:
            text = text[: shutil.get_terminal_size().columns - 1]
            _put(f"\r{text}{ERASE}")
            self._drawn = True
        else:
            _put(f"{text}\n")


def duration(seconds: float) -> str:
    """A time in its two largest units: 45 s, 12 min 5 s, 3 h 20 min."""
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {left} s" if minutes else f"{left} s"


def _silence(in_flight: int, seconds: float) -> str:
    return f"no answer for {duration(seconds)}  {in_flight:,} in flight"


def _bar(share: float) -> str:
    """A bar of which ``share`` is full, in letters that standard error can show."""
    full, empty = ("━", "─") if (sys.stderr.encoding or "").lower().startswith("utf") else ("#", "-")
    letters = round(share * BAR_LETTERS)
    return full * letters + empty * (BAR_LETTERS - letters)


def _put(text: str) -> None:
    with suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()
