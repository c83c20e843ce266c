"""Whether a rate is more than a target can serve within its limits, as early as that can be told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatoken.harness.benchmarks import PERCENTILE, LatencyLimits
from megatoken.results import SampleRow
from megatoken.results.early_stopping import most_over

Floats = NDArray[np.float64]

BLOCKS = 8
SAMPLES_OF_A_BLOCK = 10
TREND_DEVIATIONS = 5.0  # a slope this many times its standard error is no accident
SLACK_DEVIATIONS = 3.0  # of the number of samples over a limit, before a probe is given up


@dataclass(frozen=True, slots=True)
class Saturation:
    """Why a rate is too high: a stable code and a sentence with the numbers."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a probe that ran to its end says of the full length.

    Attributes:
        life_seconds: median time from due to end.
        judged: samples due after the ramp, which lasts as long as a sample lives: before, load is lighter.
        over: those of them over one of the limits, of the two limits the worse.
        allowed_share: most that may be over at full length.
    """

    life_seconds: float
    judged: int
    over: int
    allowed_share: float

    @property
    def valid(self) -> bool:
        """Whether the full length may be expected to keep the limits."""
        return self.judged > 0 and self.over <= self.allowed_share * self.judged


class SaturationWatch:
    """Follows one probe. Times are seconds since its start.

    Two things end a probe early. Too many samples are over a limit already, those included that still wait for their
    first token and have waited longer; or one of the latencies grows, and would pass its limit within the full length.
    """

    def __init__(self, limits: LatencyLimits, samples: int, full_samples: int, full_seconds: float) -> None:
        """Prepares a probe of ``samples`` for a run of ``full_samples`` in ``full_seconds``."""
        self._limits = limits
        self._full_seconds = full_seconds
        self.allowed_share = max(most_over(full_samples, PERCENTILE) / full_samples, 0.0) or 1 - PERCENTILE
        expected = self.allowed_share * samples
        self._most_over = expected + SLACK_DEVIATIONS * math.sqrt(expected) + 1
        self._rows: list[tuple[float, float, float, float]] = []  # due, first, TPOT, last

    def add_samples(self, rows: Sequence[SampleRow]) -> None:
        """Takes samples that have ended; failed ones count as over both limits."""
        for row in rows:
            if row.first_token_seconds is None or row.last_token_seconds is None:
                self._rows.append((row.scheduled_seconds, math.inf, math.inf, math.inf))
                continue
            gaps = max(row.output_tokens - 1, 1)
            tpot = (row.last_token_seconds - row.first_token_seconds) / gaps
            self._rows.append((row.scheduled_seconds, row.first_token_seconds, tpot, row.last_token_seconds))

    def look(self, now: float, due: Floats, first: Floats) -> Saturation | None:
        """What speaks against the rate so far.

        Args:
            now: when this is.
            due: of every sample issued and not ended, when it was due [N].
            first: its first token, NaN where there is none yet [N].
        """
        ended = self._ended()
        all_due, all_first = np.append(ended[:, 0], due), np.append(ended[:, 1], first)
        ttft = np.where(np.isnan(all_first), now, all_first) - all_due
        over = {
            "TTFT": int((ttft > self._limits.ttft_seconds).sum()),
            "TPOT": int((ended[:, 2] > self._limits.tpot_seconds).sum()),
        }
        for name, count in over.items():
            if count > self._most_over:
                return Saturation(
                    "OVER_LIMIT",
                    f"{count:,} samples over the limit on {name} after {now:.1f} s, more than can be made up for",
                )
        begun = np.isfinite(all_first)
        if not begun.any():
            return None
        known = all_due <= all_due[begun].max()  # those due later have not had their chance
        ramp = self._life(ended)
        for name, at, values, limit in (
            ("TTFT", all_due[known], ttft[known], self._limits.ttft_seconds),
            ("TPOT", ended[:, 3], ended[:, 2], self._limits.tpot_seconds),
        ):
            later = (at > ramp) & np.isfinite(values)
            reaches = _trend(at[later], values[later], self._full_seconds)
            if reaches is not None and reaches > limit:
                return Saturation(
                    "GROWS",
                    f"{name} grows: at the pace of the first {now:.1f} s it passes its limit of {limit:g} s "
                    f"within {self._full_seconds:.0f} s",
                )
        return None

    def result(self) -> ProbeResult:
        """Of a probe whose samples have all ended."""
        ended = self._ended()
        life = self._life(ended)
        due, first, tpot, _ = ended[ended[:, 0] >= min(life, ended[:, 0].max() / 2)].T
        over = max((first - due > self._limits.ttft_seconds).sum(), (tpot > self._limits.tpot_seconds).sum())
        return ProbeResult(life, len(due), int(over), self.allowed_share)

    def capacity(self) -> float | None:
        """Samples per second that ended in the later half of the time since the first did; None before."""
        ends = np.sort(self._ended()[:, 3])
        ends = ends[np.isfinite(ends)]
        later = ends[len(ends) // 2 :]
        return (len(later) - 1) / (later[-1] - later[0]) if len(later) > 1 and later[-1] > later[0] else None

    def _ended(self) -> Floats:
        return np.array(self._rows, np.float64).reshape(-1, 4)

    @staticmethod
    def _life(ended: Floats) -> float:
        return float(np.median(ended[:, 3] - ended[:, 0])) if len(ended) else math.inf


def _trend(at: Floats, values: Floats, until: float) -> float | None:
    """What a growing mean comes to at ``until``; None where it does not grow beyond doubt, or samples are few.

    A line through the means of blocks of equally many samples: neighbours are alike, block means hardly.
    """
    if len(at) < BLOCKS * SAMPLES_OF_A_BLOCK:
        return None
    order = np.argsort(at)
    x = np.array([block.mean() for block in np.array_split(at[order], BLOCKS)])
    y = np.array([block.mean() for block in np.array_split(values[order], BLOCKS)])
    spread = x - x.mean()
    slope = float(spread @ y / (spread @ spread))
    if slope <= 0:
        return None
    rest = y - y.mean() - slope * spread
    error = math.sqrt(float(rest @ rest) / (BLOCKS - 2) / float(spread @ spread))
    return float(y.mean() + slope * (until - x.mean())) if slope > TREND_DEVIATIONS * error else None
