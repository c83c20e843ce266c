"""The bracket of a rate search: which rate to try next, and when the highest valid one is known."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

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
    repeat: bool = field(default=False, compare=False)  # of a try that failed


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a try."""

    valid: bool  # whether the limits were kept, or would be at full length
    surely: bool = False  # of an invalid probe: a run of full length could not be valid either
    lasted_share: float = 1.0  # share of its length that it lasted before it was found invalid
    capacity: float | None = None  # samples per second that were served while others waited, if known


class RateSearch:
    """Narrows a bracket with probes, then with runs of full length until the rest is within the resolution.

    What disturbs a machine makes a try fail, not pass. So a probe that failed although a rate as high or higher passed
    is repeated, and so is the try that set the upper end, before the search settles. So is the first run of full length
    that failed at a rate which a probe passed, while no rate is found. The second result counts.

    It ends after at most ``MOST_PROBES`` probes and ``MOST_FULL_LENGTHS`` runs of full length. ``found`` is the highest
    rate that was valid at full length, ``too_high`` the lowest above it that is certainly not.
    """

    def __init__(self, first_rate: float) -> None:
        self._likely = 0.0  # highest that a probe found valid
        self._unlikely = math.inf  # lowest that a probe did not
        self._next_probe = first_rate
        self._next_full_length: float | None = None
        self._probes = self._full_lengths = 0
        self._passed: list[float] = []  # rates that any try found valid
        self._failed: dict[Try, Verdict] = {}
        self._repeated: set[Try] = set()
        self.found: float | None = None

    @property
    def too_high(self) -> float:
        """The lowest rate above ``found`` that is certainly not valid; infinite if none is known."""
        sure = (tried.rate for tried, verdict in self._failed.items() if tried.full_length or verdict.surely)
        return min((rate for rate in sure if rate > (self.found or 0.0)), default=math.inf)

    def next(self) -> Try | None:
        """The next try; None when the rate is known to the resolution, or given up."""
        if self._full_lengths >= MOST_FULL_LENGTHS:
            return None
        if (again := self._to_repeat()) is not None:
            return again
        if self._next_full_length is not None:
            return None if self._known() else Try(self._next_full_length, full_length=True)
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
        if self._known():
            return f"within {100 * RESOLUTION:.0f} % of the lowest rate that is too high, in {tries}"
        return f"the highest rate found valid; {tries} did not find how close a rate that is too high is"

    def note_undecided(self, tried: Try) -> None:
        """Counts a try that showed nothing."""
        if tried.full_length:
            self._full_lengths += 1
        else:
            self._probes += 1

    def note(self, tried: Try, verdict: Verdict) -> None:
        """Takes the result of a try."""
        if tried.repeat:
            self._repeated.add(tried)
        if verdict.valid:
            self._passed.append(tried.rate)
            self._failed.pop(tried, None)
        else:
            self._failed[tried] = verdict
        if tried.full_length:
            self._full_lengths += 1
            self._note_full_length(tried.rate, verdict)
            return
        self._probes += 1
        if not tried.repeat:
            self._note_probe(tried.rate, verdict)
        elif verdict.valid and tried.rate < self.too_high:
            self._probe_above()

    def _known(self) -> bool:
        return self.found is not None and self.too_high <= self.found * (1 + RESOLUTION)

    def _to_repeat(self) -> Try | None:
        probes = self._probes < MOST_PROBES
        passed = max(self._passed, default=0.0)
        passed_above = [tried for tried in self._failed if tried.rate <= passed and not tried.full_length]
        upper_end = [tried for tried in self._failed if tried.rate == self.too_high and self._known()]
        full_lengths = [tried for tried in self._failed if tried.full_length and tried.rate <= passed]
        first_below = [] if self.found is not None or any(one.full_length for one in self._repeated) else full_lengths
        for tried in (*passed_above, *first_below[:1], *upper_end):
            if tried not in self._repeated and (tried.full_length or probes):
                return replace(tried, repeat=True)
        return None

    def _probe_above(self) -> None:
        """Narrows again from the highest rate that passed, since a probe that was an upper end did not stand."""
        self._likely = max(rate for rate in self._passed if rate < self.too_high)
        self._unlikely = min((tried.rate for tried in self._failed if tried.rate > self._likely), default=math.inf)
        self._next_full_length = None
        self._next_probe = min(self._likely * PROBE_STEP, math.sqrt(self._likely * self._unlikely))

    def _note_full_length(self, rate: float, verdict: Verdict) -> None:
        if verdict.valid:
            self.found = max(self.found or 0.0, rate)
        above = 0.0
        if self.found is not None:
            above = min(self.found * (1 + FULL_STEP_UP), math.sqrt(self.found * self.too_high))
        if verdict.valid:
            self._next_full_length = above
            return
        step = next(step for share, step in FULL_STEPS_DOWN if verdict.lasted_share >= share)
        step *= 1.5 ** max(0, self._full_lengths - PATIENCE)
        if verdict.capacity is not None:
            step = max(step, 1 - verdict.capacity / rate)
        self._next_full_length = max(above, rate * (1 - min(step, LARGEST_STEP_DOWN)))

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
