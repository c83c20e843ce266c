"""Which rate to try next, and when the highest valid one is known."""

from __future__ import annotations

import math
from dataclasses import dataclass

RESOLUTION = 0.01  # of the rate; the bracket is narrowed to this
STEP = 1.25  # up or down, while only one end of the bracket is known
MOST_TRIES = 40
MOST_CONFIRMATIONS = 6


@dataclass(frozen=True, slots=True)
class Try:
    """A rate in samples per second, probed or run at full length."""

    rate: float
    full_length: bool


class RateSearch:
    """Narrows a bracket between a valid and an invalid rate with probes, then confirms its lower end at full length.

    A confirmation that fails is the new upper end; the next is at a lower rate, by steps that double.
    ``found`` is the confirmed rate.
    """

    def __init__(self, first_rate: float, resolution: float = RESOLUTION) -> None:
        self._next = first_rate
        self._resolution = resolution
        self._valid = 0.0
        self._invalid = math.inf
        self._tries = self._refused = 0
        self.found: float | None = None

    @property
    def bracket(self) -> tuple[float, float]:
        """Highest rate that a probe found valid (0: none), lowest that was not (infinity: none)."""
        return self._valid, self._invalid

    def next(self) -> Try | None:
        """What to try; None when the rate is found or given up."""
        if self.found is not None or self._tries >= MOST_TRIES or self._refused >= MOST_CONFIRMATIONS:
            return None
        return Try(self._next, self._full_length)

    def note(self, tried: Try, valid: bool, capacity: float | None = None) -> None:
        """Takes the outcome of a try.

        Args:
            tried: what ``next`` gave.
            valid: whether the limits were kept.
            capacity: samples per second that were served while there were more, if known.
        """
        self._tries += 1
        if tried.full_length:
            if valid:
                self.found = tried.rate
                return
            self._invalid = min(self._invalid, tried.rate)
            self._refused += 1
            self._next = tried.rate * (1 - self._resolution * 2 ** (self._refused - 1))
            self._valid = min(self._valid, self._next)
            return
        if valid:
            self._valid = max(self._valid, tried.rate)
        else:
            self._invalid = min(self._invalid, tried.rate)
        self._valid = min(self._valid, self._invalid)
        if capacity is not None and capacity * (1 + self._resolution) > tried.rate:
            capacity = None  # all was served, if late
        self._next = self._valid if self._full_length else self._choose(capacity)

    @property
    def _full_length(self) -> bool:
        return self._refused > 0 or (self._valid > 0 and self._invalid <= self._valid * (1 + self._resolution))

    def _choose(self, capacity: float | None) -> float:
        low, high = self._valid, self._invalid
        if math.isinf(high):
            return low * STEP
        if not low:
            return max(capacity, high / STEP**3) if capacity else high / STEP
        if capacity and low * (1 + self._resolution) < capacity < high / (1 + self._resolution):
            return capacity
        return math.sqrt(low * high)
