"""Whether somebody set the wall clock during a run: LoadGen times by it, and its figures would be off by as much."""

from __future__ import annotations

import time

READINGS = 5
PROMPT_NS = 20_000  # two clocks read within this are taken as read at once


class WallClockSteps:
    """Watches the distance of the wall clock from the monotonic one. Both are slewed alike, so only steps change it.

    ``largest_seconds`` is the farthest it has been from where it was at first, up or down.
    """

    def __init__(self) -> None:
        """Takes the distance that others are held against."""
        self._first_ns = _distance_ns()
        self.largest_seconds = 0.0

    def look(self) -> None:
        """Compares once more."""
        seconds = (_distance_ns() - self._first_ns) / 1e9
        if abs(seconds) > abs(self.largest_seconds):
            self.largest_seconds = seconds


def _distance_ns() -> int:
    """Wall clock less monotonic clock, of the reading in which least time passed between the two."""
    best: tuple[int, int] | None = None
    for _ in range(READINGS):
        before_ns, wall_ns, after_ns = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        reading = (after_ns - before_ns, wall_ns - (before_ns + after_ns) // 2)
        best = min(best, reading) if best else reading
        if best[0] <= PROMPT_NS:
            break
    assert best is not None
    return best[1]
