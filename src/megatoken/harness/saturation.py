"""Detects as early as possible that a rate is higher than a target can serve within its limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatoken.analysis.early_stopping import most_over
from megatoken.mlperf.benchmarks import PERCENTILE, LatencyLimits
from megatoken.runs.reasons import Reason, reason
from megatoken.runs.tables import SampleRow

Floats = NDArray[np.float64]

SLACK = 2.0  # times the share of samples that may be over at full length: a burst weighs more in a short probe
WAIT_SHARE = 0.1  # of the TTFT limit, beyond the shortest TTFT: a sample that waits this long found a queue
FEWEST_SERVED = 100
QUEUE_LIMITS, SHORTEST_QUEUE_SECONDS = 2.0, 2.0  # other processes may cause a queue shorter than twice the limit
DEVIATIONS = 3.0  # of the rate served, by which it must fall short of the rate offered


@dataclass(frozen=True, slots=True)
class Saturation:
    """Why a rate is too high; ``surely``: a run of full length at this rate could not be valid either."""

    reason: Reason
    surely: bool


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a probe that ran to its end predicts for the full length."""

    life_seconds: float  # median time from due to end
    judged: int  # samples due after the ramp, which lasts one median life and has less load
    over: int  # those of them over a limit, for the limit that more samples exceed
    allowed_share: float  # share of samples that may be over at full length

    @property
    def valid(self) -> bool:
        """Whether a run of full length is expected to keep the limits."""
        return self.judged > 0 and self.over <= SLACK * self.allowed_share * self.judged


class SaturationWatch:
    """Follows one test. Times are seconds since its start.

    A test ends early in two cases. (1) More samples are over a limit or failed than a run of full length may have over
    one in all, including those that have waited longer than the limit for their first token; a probe's arrivals are the
    first of the full length's. (2) While samples waited all the time, the rate served was so far below the rate offered
    that the wait would exceed its limit within the full length: the target was full then, so that is its capacity.
    """

    def __init__(self, limits: LatencyLimits, rate: float, full_samples: int, full_seconds: float) -> None:
        """Prepares a test.

        ``rate``: samples per second that come due on average. The last two are of a run of full length.
        """
        self._limits = limits
        self.rate = rate
        self._full_seconds = full_seconds
        self._most_over = max(0, most_over(full_samples, PERCENTILE))
        self._allowed_share = self._most_over / full_samples
        self._rows: list[tuple[float, float, float, float, float]] = []  # since the last look
        self._table = np.empty((0, 5))  # of the samples that ended before: due, first, TPOT, last, tokens
        self.lasted_share = 0.0
        """Of the full length, when this was last looked at."""
        self.capacity: float | None = None
        """Samples per second that were served while others waited, when that was last seen."""

    def add_samples(self, rows: Sequence[SampleRow]) -> None:
        """Takes samples that have ended; those that failed or are empty have endless times."""
        for row in rows:
            if row.first_token_seconds is None or row.last_token_seconds is None:
                self._rows.append((row.scheduled_seconds, math.inf, math.inf, math.inf, 0.0))
                continue
            gaps = max(row.output_tokens - 1, 1)
            tpot = (row.last_token_seconds - row.first_token_seconds) / gaps
            tokens = (row.input_tokens or 0) + row.output_tokens
            self._rows.append((row.scheduled_seconds, row.first_token_seconds, tpot, row.last_token_seconds, tokens))

    def look(self, now: float, due: Floats, first: Floats) -> Saturation | None:
        """Why the rate is too high, if that is known by now.

        ``due`` and ``first`` [N]: when every sample issued and not ended was due, and its first token, NaN without one.
        """
        self.lasted_share = now / self._full_seconds
        ended = self._ended()
        all_due, all_first = np.append(ended[:, 0], due), np.append(ended[:, 1], first)
        ttft = np.where(np.isnan(all_first), now, all_first) - all_due
        tpot = ended[:, 2]
        failed = int(np.isinf(tpot).sum())  # a failure is no latency, though it makes a rate as invalid
        over = {
            "TTFT": int((np.isfinite(ttft) & (ttft > self._limits.ttft_seconds)).sum()),
            "TPOT": int((np.isfinite(tpot) & (tpot > self._limits.tpot_seconds)).sum()),
        }
        for name, count in over.items():
            if count > self._most_over:
                fields = {"samples": count, "metric": name, "at_seconds": now, "allowed": self._most_over}
                if not np.isfinite(all_first).any():
                    fields["unanswered"] = len(all_due)
                return Saturation(reason("OVER_LIMIT", **fields), surely=True)
        if failed and failed + max(over.values()) > self._most_over:
            return Saturation(reason("FAILED_SAMPLES", failed=failed, samples=len(all_due)), surely=True)
        return self._falls_short(now, ended, all_due, all_first)

    def result(self) -> ProbeResult:
        """The prediction of a probe whose samples have all ended."""
        ended = self._ended()
        life = self._life(ended)
        if not len(ended):
            return ProbeResult(life, 0, 0, self._allowed_share)
        due, first, tpot = ended[ended[:, 0] >= min(life, ended[:, 0].max() / 2), :3].T
        over = max((first - due > self._limits.ttft_seconds).sum(), (tpot > self._limits.tpot_seconds).sum())
        return ProbeResult(life, len(due), int(over), self._allowed_share)

    def _falls_short(self, now: float, ended: Floats, due: Floats, first: Floats) -> Saturation | None:
        begun = np.isfinite(first)
        if len(ended) < FEWEST_SERVED or not begun.any():
            return None
        ttft = np.where(np.isnan(first), now, first) - due
        patience = np.quantile(ttft[begun], 0.05) + WAIT_SHARE * self._limits.ttft_seconds
        prompt = begun & (ttft <= patience)
        # There was a queue from the last sample that was served without a wait.
        last_due = due[prompt].max(initial=-math.inf)
        behind = due > last_due
        if not (behind & (ttft > patience)).any():
            return None
        start = float(first[prompt & (due == last_due)].max(initial=0.0))
        served = ended[(ended[:, 3] > start) & np.isfinite(ended[:, 3])]
        seconds = float(served[:, 3].max(initial=start)) - start
        long_enough = max(self._life(ended), QUEUE_LIMITS * self._limits.ttft_seconds, SHORTEST_QUEUE_SECONDS)
        if len(served) < FEWEST_SERVED or seconds < long_enough:
            return None
        tokens = ended[:, 4]
        capacity = float(served[:, 4].sum()) / seconds / float(tokens.mean())
        error = (float(tokens.std() / tokens.mean()) + 0.5) / math.sqrt(len(served))
        self.capacity = capacity
        excess = self.rate / capacity - 1
        if excess <= DEVIATIONS * error or excess * self._full_seconds <= self._limits.ttft_seconds:
            return None
        rates = {"served_samples_per_second": capacity, "offered_samples_per_second": self.rate}
        return Saturation(reason("FALLS_SHORT", **rates, seconds=seconds), surely=False)

    def _ended(self) -> Floats:
        if self._rows:
            self._table = np.concatenate((self._table, self._rows))
            self._rows = []
        return self._table

    @staticmethod
    def _life(ended: Floats) -> float:
        return float(np.median(ended[:, 3] - ended[:, 0])) if len(ended) else math.inf
