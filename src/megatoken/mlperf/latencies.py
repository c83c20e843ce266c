"""Times to first token and per output token by LoadGen's definitions; and whether latencies can be of one run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatoken.analysis.early_stopping import RANKS, most_over, queries_needed
from megatoken.analysis.statistics import Samples
from megatoken.mlperf.benchmarks import PERCENTILE, LatencyLimits

_ORDERED = ("min", *RANKS, "max")


@dataclass(frozen=True, slots=True)
class Latencies:
    """99th percentiles as LoadGen takes them, and queries over the limits."""

    queries: int  # completed samples
    ttft_p99_seconds: float  # of the time to first token, from when each sample was due
    tpot_p99_seconds: float  # of the time per output token after the first
    ttft_over: int  # queries over the limit on the time to first token
    tpot_over: int  # queries over the limit on the time per output token
    allowed_over: int  # how many of each early stopping allows; -1: too few queries for any
    needed: int  # the smallest number of queries that early stopping accepts
    tokens_after_first: float  # mean number of tokens of a query after the first

    def met(self, limits: LatencyLimits) -> bool:
        """Whether both percentiles are below their limits, shown with enough queries."""
        shown = max(self.ttft_over, self.tpot_over) <= self.allowed_over
        return shown and limits.kept_by(self.ttft_p99_seconds, self.tpot_p99_seconds)


def latencies(samples: Samples, limits: LatencyLimits) -> Latencies | None:
    """The latencies of all completed samples; None without any.

    LoadGen's definitions (results.cc, early_stopping.cc): the percentile of n values is the one at position
    floor(0.99 n) of the sorted values; TPOT is (completion - first token) / (tokens - 1), 0 for one token; over means
    larger than the limit.
    """
    done = samples.only(samples.completed)
    if not len(done):
        return None
    ttft, tpot = done.ttft, np.where(done.output_tokens > 1, done.tpot, 0.0)
    return Latencies(
        queries=len(done),
        ttft_p99_seconds=percentile(ttft),
        tpot_p99_seconds=percentile(tpot),
        ttft_over=int((ttft > limits.ttft_seconds).sum()),
        tpot_over=int((tpot > limits.tpot_seconds).sum()),
        allowed_over=most_over(len(done), PERCENTILE),
        needed=queries_needed(0, PERCENTILE),
        tokens_after_first=float((done.output_tokens - 1).mean()),
    )


def percentile(values: NDArray[np.float64]) -> float:
    """LoadGen's 99th percentile of ``values`` [N]."""
    return float(np.sort(values)[int(len(values) * PERCENTILE)])


def disorder(values: Mapping[str, float], unit: str = " s") -> str:
    """The first two of minimum, percentiles and maximum that are in the wrong order; empty if none are."""
    known = [(name, values[name]) for name in _ORDERED if name in values]
    for (lower, low), (upper, high) in itertools.pairwise(known):
        if low > high:
            return f"{lower} is {low:.9g}{unit}, {upper} is {high:.9g}{unit}"
    return ""


def impossible_mean(values: Mapping[str, float], samples: int | None, unit: str = " s", slack: float = 0.0) -> str:
    """The mean, if it is outside the bounds that the percentiles set; empty if not, or if some are not known.

    Args:
        values: Minimum, percentiles, maximum and mean.
        samples: How many values the percentiles are of.
        unit: As shown.
        slack: For percentiles that lie between samples.
    """
    if not samples or any(name not in values for name in (*_ORDERED, "mean")):
        return ""
    points = [values[name] for name in _ORDERED]
    ranks = [0, *(math.floor(samples * rank) for rank in RANKS.values()), samples]
    shares = [(b - a) / samples for a, b in itertools.pairwise(ranks)]
    low = sum(share * point for share, point in zip(shares, points, strict=False))
    high = sum(share * point for share, point in zip(shares, points[1:], strict=False))
    mean = values["mean"]
    # LoadGen's sum of nanoseconds overflows, or is below zero for answers of one token: then its mean is meaningless.
    if high * samples * 1e9 >= 2.0**63 or low < 0:
        return ""
    if low * (1 - 1e-9) - 1e-8 - slack <= mean <= high * (1 + 1e-9) + 1e-8 + slack:
        return ""
    return f"a mean of {mean:.9g}{unit}, though its percentiles put it between {low:.9g} and {high:.9g}{unit}"
