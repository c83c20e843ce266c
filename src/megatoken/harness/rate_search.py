"""The bracket of a rate search: which rate to try next, and when the highest valid one is known."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatoken.text import count_of

RESOLUTION = 0.02  # between the rate that was valid at full length and the lowest that is certainly not
COARSE = 0.06  # how far probes narrow the bracket; bursts weigh more in a short probe than in a whole run
PROBE_STEP = 1.25  # up or down, while only one end of the bracket is known
FULL_STEP_UP = 0.04  # a valid run takes its whole length; one at too high a rate ends early
FULL_STEPS_DOWN = ((0.6, 0.02), (0.3, 0.03), (0.1, 0.05), (0.0, 0.08))  # by the share of its length that a run lasted
LARGEST_STEP_DOWN = 0.3
PATIENCE = 2  # runs of full length at too high a rate, after which steps down grow by half each time
MOST_PROBES = 30  # undecided ones included
MOST_FULL_LENGTHS = 10


@dataclass(frozen=True, slots=True)
class Try:
    """A rate in samples per second, probed or run at full length."""

    rate: float
    full_length: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a try."""

    valid: bool  # whether the limits were kept, or would be at full length
    surely: bool = False  # of an invalid probe: a run of full length could not be valid either
    lasted_share: float = 1.0  # share of its length that it lasted before it was found invalid
    capacity: float | None = None  # samples per second that were served while others waited, if known


class RateSearch:
    """Narrows a bracket with probes, then with runs of full length until the rest is within the resolution.

    It ends after at most ``MOST_PROBES`` probes and ``MOST_FULL_LENGTHS`` runs of full length. ``found`` is the highest
    rate that was valid at full length, ``too_high`` the lowest that is certainly not.
    """

    def __init__(self, first_rate: float) -> None:
        self._likely = 0.0  # highest that a probe found valid
        self._unlikely = math.inf  # lowest that a probe did not
        self._next_probe = first_rate
        self._next_full_length: float | None = None
        self._probes = self._full_lengths = 0
        self.found: float | None = None
        self.too_high = math.inf

    def next(self) -> Try | None:
        """The next try; None when the rate is known to the resolution, or given up."""
        if self._full_lengths >= MOST_FULL_LENGTHS:
            return None
        if self._next_full_length is not None:
            known = self.found is not None and self.too_high <= self.found * (1 + RESOLUTION)
            return None if known else Try(self._next_full_length, full_length=True)
        if self._probes < MOST_PROBES and (not self._likely or self._unlikely > self._likely * (1 + COARSE)):
            return Try(self._next_probe, full_length=False)
        if not self._likely:
            return None
        return Try(math.sqrt(self._likely * min(self._unlikely, self._likely * (1 + COARSE))), full_length=True)

    @property
    def outcome(self) -> str:
        """The state of the search as text."""
        tries = f"{count_of(self._probes, 'probe')} and {count_of(self._full_lengths, 'run')} of full length"
        if self.found is None:
            return f"no rate kept the limits in {tries}"
        if self.too_high <= self.found * (1 + RESOLUTION):
            return f"within {100 * RESOLUTION:.0f} % of the lowest rate that is too high, in {tries}"
        return f"the highest rate found valid; {tries} did not find how close a rate that is too high is"

    def note_undecided(self) -> None:
        """Counts a probe that showed nothing."""
        self._probes += 1

    def note(self, tried: Try, verdict: Verdict) -> None:
        """Takes the result of a try."""
        if not verdict.valid and (verdict.surely or tried.full_length):
            self.too_high = min(self.too_high, tried.rate)
        if tried.full_length:
            self._full_lengths += 1
            self._note_full_length(tried.rate, verdict)
        else:
            self._probes += 1
            self._note_probe(tried.rate, verdict)

    def _note_full_length(self, rate: float, verdict: Verdict) -> None:
        if verdict.valid:
            self.found = max(self.found or 0.0, rate)
        if self.found is not None:
            self._next_full_length = min(self.found * (1 + FULL_STEP_UP), math.sqrt(self.found * self.too_high))
            return
        step = next(step for share, step in FULL_STEPS_DOWN if verdict.lasted_share >= share)
        step *= 1.5 ** max(0, self._full_lengths - PATIENCE)
        if verdict.capacity is not None:
            step = max(step, 1 - verdict.capacity / rate)
        self._next_full_length = rate * (1 - min(step, LARGEST_STEP_DOWN))

    def _note_probe(self, rate: float, verdict: Verdict) -> None:
        if verdict.valid:
            self._likely = max(self._likely, rate)
        else:
            self._unlikely = min(self._unlikely, rate)
            self._likely = min(self._likely, self._unlikely)
        low, high, capacity = self._likely, self._unlikely, verdict.capacity
        if math.isinf(high):
            self._next_probe = low * PROBE_STEP
        elif capacity is not None and low * (1 + COARSE) < capacity < high / (1 + COARSE / 2):
            self._next_probe = max(capacity, high / PROBE_STEP**3)
        else:
            self._next_probe = math.sqrt(low * high) if low else high / PROBE_STEP
