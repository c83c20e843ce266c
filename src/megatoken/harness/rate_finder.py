"""The search for the highest valid rate as a sequence of probes: the length and the verdict of each, and what follows.

The caller runs the probes, so that tests can search simulated targets in no time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatoken.analysis.early_stopping import queries_needed
from megatoken.harness.rate_search import RESOLUTION, RateSearch, Try, Verdict
from megatoken.harness.saturation import Saturation, SaturationWatch
from megatoken.mlperf.benchmarks import PERCENTILE, LatencyLimits
from megatoken.mlperf.draws import PoissonSchedule
from megatoken.runs.reasons import OF_CLIENT
from megatoken.text import count_of, precise

PROBE_SAMPLES = 1000  # the 99th percentile of fewer samples is too uncertain
SHORTEST_PROBE_SECONDS = 5.0
LIVES_OF_A_PROBE = 3.0  # lives of the median sample: the load is full only after one
# Codes of a try that say no more than that the measurement itself is in doubt.
OF_MEASUREMENT = {*OF_CLIENT, "LOADGEN_DISAGREES", "WALL_CLOCK"}
# Load is not what makes samples fail where at least ``ALIKE`` of the share that fails at one rate fails at a much lower
# one too: at most ``LOWER`` of it, and at most what the server served there. One that cannot keep up would serve all.
LOWER, ALIKE = 0.55, 0.75
LONGER = 2.0  # factor, at least, by which a probe that was too short is repeated: a growing queue lengthens lives too


@dataclass(frozen=True, slots=True)
class Probe:
    """One test to run."""

    rate: float  # samples per second to offer
    seconds: float | None  # how long; None: the full length
    watch: SaturationWatch  # sees every sample, and ends the probe early


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a probe."""

    name: str  # of its run folder
    saturation: Saturation | None  # why it was ended early, if it was
    # codes that invalidate it whatever the latencies: of the client, and unless it was ended early of failed samples,
    # and at full length of LoadGen's verdict
    broken: tuple[str, ...] = ()
    ttft_p99_seconds: float | None = None  # of its completed samples
    tpot_p99_seconds: float | None = None
    failure: str | None = None  # how its samples failed, if any did
    served: bool = True  # False: samples failed, and none was served
    failed_share: float = 0.0  # of the samples that failed or were served

    @property
    def failed(self) -> bool:
        """Whether failed samples, not latencies, made it invalid."""
        return "FAILED_SAMPLES" in (self.broken if self.saturation is None else (self.saturation.reason["code"],))

    @property
    def by_client(self) -> bool:
        """Whether what broke it says nothing against the server."""
        if self.failed:
            return False
        doubted = bool(self.broken) and self.saturation is None and set(self.broken) <= OF_MEASUREMENT
        return doubted or any(code in OF_CLIENT for code in self.broken)

    @property
    def failed_how(self) -> str | None:
        """How samples failed, or that none had an answer; None where latencies or the client made it invalid."""
        if self.failed:
            return self.failure
        if self.saturation is not None and "unanswered" in self.saturation.reason and not self.by_client:
            return self.saturation.reason["message"]
        return None


@dataclass(frozen=True, slots=True)
class Goal:
    """The goal of a search."""

    limits: LatencyLimits  # that a valid rate keeps
    full_length: Callable[[float], tuple[int, float]]  # samples and seconds of a run of full length at a rate
    schedule_seed: int  # of the arrivals
    probe_seconds: float | None = None  # length of every probe; None: derived


def too_few(rate: float, samples: int, seconds: float) -> str | None:
    """Why a run of ``samples`` in ``seconds`` cannot show a 99th percentile, with the fix; None if it can."""
    needed = queries_needed(0, PERCENTILE)
    if samples >= needed:
        return None
    return (
        f"{count_of(samples, 'sample')} come{'s' * (samples == 1)} due in {seconds:.3g} s at {rate:.3g} samples/s, "
        f"but only {needed} or more show a p99; give --min-duration "
        f"{math.ceil(1.5 * seconds * needed / samples)} or a faster target"
    )


class RateFinder:
    """Searches until the rate is found or given up, or until ``measure`` returns None because it was interrupted."""

    def __init__(
        self,
        goal: Goal,
        first_rate: float,
        measure: Callable[[Try, Probe], Outcome | None],
        note: Callable[[str], None],
    ) -> None:
        """Prepares a search from ``first_rate``; ``note`` is called with a line about every probe."""
        self._goal = goal
        self._measure = measure
        self._note_words = note
        self._search = RateSearch(first_rate)
        self._arrivals = PoissonSchedule(goal.schedule_seed, 1.0)
        self._life_seconds = 0.0
        self._shortest_probe_seconds = SHORTEST_PROBE_SECONDS
        self._why_ended: str | None = None
        self._failure: str | None = None  # ``failed_how`` of the last try, with its rate
        self._failed: list[tuple[float, float]] = []  # rate and failed share of every try whose samples failed
        self._unmet: str | None = None  # the limit that the last try did not keep, and what was measured
        self.probes: list[dict[str, Any]] = []  # the outcome of each try, ready for ``result.json``

    @property
    def found(self) -> float | None:
        """The confirmed rate in samples per second."""
        return self._search.found

    @property
    def outcome(self) -> str:
        """The state of the search as text, with why it was ended early. That the client was the limit is a field."""
        return self._search.outcome + (f": {self._why_ended}" if self._why_ended else "")

    @property
    def limited_by_client(self) -> bool:
        """Whether no try at the lowest rate that is too high speaks against the server: ``found`` is a lower bound."""
        too_high = self._search.too_high
        ends = [one for one in self.probes if one["valid"] is False and one["samples_per_second"] == too_high]
        return bool(ends) and all(one["by_client"] for one in ends)

    def facts(self) -> dict[str, Any]:
        """Everything tried so far, ready for ``result.json``."""
        too_high = self._search.too_high
        return {
            "samples_per_second": self.found,
            "resolution": RESOLUTION,
            "too_high_samples_per_second": too_high if math.isfinite(too_high) else None,
            "limited_by_client": self.limited_by_client,
            "outcome": self.outcome,
            "probes": self.probes,
        }

    def run(self) -> str | None:
        """Probes and confirms; returns the name of the run at full length of the rate found, or None.

        It ends where no lower rate can show a p99, and where every sample of a try failed: a server that serves nothing
        fails at every other rate too. It also ends where as many samples fail at a much lower rate. If samples failed,
        none had an answer or a limit was not kept at the last rate, that is why it ended.
        """
        confirmed = None
        while (tried := self._search.next()) is not None:
            if (short := too_few(tried.rate, *self._goal.full_length(tried.rate))) is not None:
                unmet = f"{self._unmet}; no lower rate can be tried: " if self._unmet else ""
                self._why_ended = self._failure or unmet + short
                break
            probe = self._plan(tried)
            outcome = self._measure(tried, probe)
            if outcome is None:
                return None
            if not outcome.served:
                self._why_ended = f"no sample was served at {precise(tried.rate)} samples/s: {outcome.failure}"
                self._search.note_undecided(tried)
                self._note(tried, outcome, None, f"no sample was served: {outcome.failure}")
                break
            self._judge(tried, probe, outcome)
            if tried.full_length and self.found == tried.rate:
                confirmed = outcome.name
            if (alike := self._failed_alike(tried, outcome)) is not None:
                before = f"at {precise(alike[0])} samples/s {precise(100 * alike[1])} % failed too"
                self._why_ended = f"{self._failure}; {before}, so load is not the cause: look at the server"
                break
        else:
            self._why_ended = None if self.found else self._failure or self._unmet
        return confirmed

    def _failed_alike(self, tried: Try, outcome: Outcome) -> tuple[float, float] | None:
        """Rate and share of an earlier try that shows that samples fail whatever the rate."""
        if not outcome.failed or not outcome.failed_share or any(one["valid"] for one in self.probes):
            return None
        self._failed.append((tried.rate, outcome.failed_share))
        for rate, share in self._failed:
            if tried.rate <= min(LOWER, 1 - share) * rate and outcome.failed_share >= ALIKE * share:
                return rate, share
        return None

    def _unmet_limit(self, tried: Try, outcome: Outcome) -> str | None:
        limits = self._goal.limits
        for name, found, limit in (
            ("TTFT", outcome.ttft_p99_seconds, limits.ttft_seconds),
            ("TPOT", outcome.tpot_p99_seconds, limits.tpot_seconds),
        ):
            if found is not None and found > limit:
                where = f"at {precise(tried.rate)} samples/s"
                if tried.rate <= min((one["samples_per_second"] for one in self.probes), default=math.inf):
                    where = f"even {where}, the lowest rate tried,"
                return (
                    f"{where} the p99 of {name} was {precise(1000 * found)} ms; the limit is {precise(1000 * limit)} ms"
                )
        return None

    def _plan(self, tried: Try) -> Probe:
        """A probe whose mean arrival rate is that of the full length.

        Both are drawn from the same seed, and the mean of few arrivals is several percent off the rate by chance.
        """
        full_samples, full_seconds = self._goal.full_length(tried.rate)
        mean = self._arrivals.mean_rate(max(2, full_samples))
        watch = SaturationWatch(self._goal.limits, tried.rate * mean, full_samples, full_seconds)
        if tried.full_length:
            return Probe(tried.rate, None, watch)
        seconds = min(self._probe_seconds(tried.rate), full_seconds)
        samples = max(2, round(seconds * tried.rate))
        return Probe(tried.rate * mean / self._arrivals.mean_rate(samples), seconds, watch)

    def _probe_seconds(self, rate: float) -> float:
        if self._goal.probe_seconds is not None:
            return self._goal.probe_seconds
        return max(self._shortest_probe_seconds, PROBE_SAMPLES / rate, LIVES_OF_A_PROBE * self._life_seconds)

    def _judge(self, tried: Try, probe: Probe, outcome: Outcome) -> None:
        how, self._unmet = outcome.failed_how, None
        self._failure = None if how is None else f"at {precise(tried.rate)} samples/s, {how}"
        if outcome.failed:
            others = () if outcome.saturation else (code for code in outcome.broken if code != "FAILED_SAMPLES")
            valid, why = False, "; ".join((str(how), *others))
        elif outcome.saturation is not None:
            valid, why = False, "; ".join((outcome.saturation.reason["message"], *outcome.broken))
        elif outcome.broken:
            valid, why = False, ", ".join(outcome.broken)
        elif probe.seconds is None:
            valid, why = True, "kept its limits"
        else:
            result = probe.watch.result()
            self._life_seconds = result.life_seconds
            if probe.seconds < min(self._probe_seconds(tried.rate), self._goal.full_length(tried.rate)[1]):
                self._shortest_probe_seconds = LONGER * probe.seconds
                self._search.note_undecided(tried)
                self._note(tried, outcome, None, f"too short for samples that live {result.life_seconds:.1f} s")
                return
            valid = result.valid
            judged = count_of(result.judged, "sample")
            why = f"{result.over:,} of {judged} over a limit; {100 * result.allowed_share:.2f} % are allowed"
        if not valid and not outcome.failed and not outcome.by_client:
            self._unmet = self._unmet_limit(tried, outcome)
        surely = outcome.saturation is not None and outcome.saturation.surely
        capacity = probe.watch.capacity
        if capacity is not None:  # as a rate to ask for: by chance, the rate offered differs from it
            capacity *= tried.rate / probe.watch.rate
        self._search.note(tried, Verdict(valid, surely, probe.watch.lasted_share, capacity))
        self._note(tried, outcome, valid, why)

    def _note(self, tried: Try, outcome: Outcome, valid: bool | None, why: str) -> None:
        self.probes.append(
            {
                "run_folder": outcome.name,
                "samples_per_second": tried.rate,
                "full_length": tried.full_length,
                "repeat": tried.repeat,
                "valid": valid,
                "reason": why,
                "by_client": valid is False and outcome.by_client,
                "ttft_p99_seconds": outcome.ttft_p99_seconds,
                "tpot_p99_seconds": outcome.tpot_p99_seconds,
            }
        )
        word = {True: "valid", False: "too high", None: "undecided"}[valid]
        if valid is False and outcome.by_client:
            word = "too high for the client"
        again = ", repeated" if tried.repeat else ""
        self._note_words(f"{precise(tried.rate)} samples/s {word}{again}: {why}")
