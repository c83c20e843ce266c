"""Detects that the wall clock was set during a run: LoadGen uses it, so its figures would be off by as much."""

from __future__ import annotations

import time

READINGS = 5


class WallClockSteps:
    """Watches the difference between wall clock and monotonic clock. Both are slewed alike, so only steps change it.

    ``largest_seconds`` is the largest change of the difference since the start, with its sign.
    """

    def __init__(self) -> None:
        """Takes the first reading."""
        self._first_ns = _distance_ns()
        self.largest_seconds = 0.0

    def look(self) -> None:
        """Takes another reading."""
        seconds = (_distance_ns() - self._first_ns) / 1e9
        if abs(seconds) > abs(self.largest_seconds):
            self.largest_seconds = seconds


def _distance_ns() -> int:
    """Wall clock minus monotonic clock, from the reading that took the least time."""
    readings = []
    for _ in range(READINGS):
        before_ns, wall_ns, after_ns = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        readings.append((after_ns - before_ns, wall_ns - (before_ns + after_ns) // 2))
    return min(readings)[1]
