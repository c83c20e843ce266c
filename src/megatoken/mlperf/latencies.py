"""Times to first token and per output token of a finished run by LoadGen's definitions, from our own records."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatoken.analysis.early_stopping import most_over, queries_needed
from megatoken.analysis.statistics import Samples
from megatoken.mlperf.benchmarks import PERCENTILE, LatencyLimits


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
