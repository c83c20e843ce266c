"""Offsets of another machine's clocks from ours, by Cristian's algorithm (1989): the quickest of many round trips."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

ROUNDS_KEPT = 20  # one a second: the quickest may be 20 s old, in which clocks drift apart by 0.4 ms at 20 ppm


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """The other side's clocks minus ours, in seconds, each known to ``uncertainty_seconds``.

    The uncertainty is half of the quickest round trip: the other side read its clocks somewhere within it.
    """

    wall_seconds: float
    monotonic_seconds: float
    uncertainty_seconds: float
    rounds: int


class OffsetEstimate:
    """The offset from the latest round trips; old ones are dropped, since clocks drift."""

    def __init__(self) -> None:
        self._rounds: deque[tuple[int, int, int]] = deque(maxlen=ROUNDS_KEPT)  # round trip, monotonic, wall, all ns
        self.rounds = 0
        """Round trips so far."""
        self._best = (0, 0, 0)

    @property
    def monotonic_ns(self) -> int:
        """The other monotonic clock minus ours; 0 before the first round."""
        return self._best[1]

    def note(self, sent_ns: int, received_ns: int, wall_ns: int, their_monotonic_ns: int, their_wall_ns: int) -> None:
        """Takes one round trip.

        All times are in ns: ours when the question left and when the answer came, our wall clock then, and theirs when
        they answered.
        """
        trip = received_ns - sent_ns
        middle = sent_ns + trip // 2
        self._rounds.append((trip, their_monotonic_ns - middle, their_wall_ns - (wall_ns - trip // 2)))
        self.rounds += 1
        self._best = min(self._rounds)

    def offset(self) -> ClockOffset | None:
        """The best estimate; None before the first round."""
        if not self.rounds:
            return None
        trip, monotonic, wall = self._best
        return ClockOffset(wall / 1e9, monotonic / 1e9, trip / 2e9, self.rounds)
