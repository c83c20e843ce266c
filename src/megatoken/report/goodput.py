"""Goodput: the work of samples that met every limit, over the whole run; failed and late samples count as bad."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatoken.report.curves import MAX_POINTS, Line
from megatoken.report.scales import Floats
from megatoken.results.statistics import Samples


@dataclass(frozen=True, slots=True)
class Limits:
    """Longest time to first token and time per output token that a user is promised, in seconds."""

    name: str
    ttft_seconds: float
    tpot_seconds: float


# 99th-percentile limits of MLPerf Inference for llama2-70b (loadgen/mlperf.conf); here a yardstick for any model.
YARDSTICKS = (
    Limits("MLPerf Server, llama2-70b", 2.0, 0.2),
    Limits("MLPerf Interactive, llama2-70b", 0.45, 0.04),
)


@dataclass(frozen=True, slots=True)
class Goodput:
    """What is left of a run under limits; the share is of all scheduled samples."""

    share: float
    samples_per_second: float
    output_tokens_per_second: float


def goodput(samples: Samples, limits: Limits, duration_seconds: float, *, queued: bool) -> Goodput:
    """Work of the samples within ``limits``.

    Args:
        samples: all of the run, failed ones too.
        limits: what they must meet. A sample of one token has no time per output token and meets that limit.
        duration_seconds: of the run, above zero.
        queued: all samples were due at once (Offline), so that no user's wait for the first token is in them: only the
            time per output token counts.
    """
    good = samples.completed & (times_per_output_token(samples) <= limits.tpot_seconds)
    if not queued:
        good &= samples.first - samples.scheduled <= limits.ttft_seconds
    kept = samples.only(good)
    return Goodput(
        share=len(kept) / len(samples) if len(samples) else 0.0,
        samples_per_second=len(kept) / duration_seconds,
        output_tokens_per_second=float(kept.output_tokens.sum()) / duration_seconds,
    )


def goodput_curve(name: str, samples: Samples, duration_seconds: float, ttft_seconds: float | None) -> Line:
    """Output tokens per second of the samples within each limit on the time per output token, in milliseconds.

    Args:
        name: of the curve.
        samples: all of the run, failed ones too.
        duration_seconds: of the run, above zero.
        ttft_seconds: limit on the time to first token as well; None: no limit.
    """
    good = samples.completed & (samples.output_tokens > 1)
    if ttft_seconds is not None:
        good &= samples.first - samples.scheduled <= ttft_seconds
    kept = samples.only(good)
    milliseconds = 1000 * times_per_output_token(kept)
    order = np.argsort(milliseconds)
    rates = np.cumsum(kept.output_tokens[order]) / duration_seconds
    picked = np.unique(np.linspace(0, max(len(order) - 1, 0), MAX_POINTS).round().astype(int))[: len(order)]
    return Line(name, np.append(0.0, milliseconds[order][picked]), np.append(0.0, rates[picked]))


def times_per_output_token(samples: Samples) -> Floats:
    """Seconds [N] of each sample; zero for one token, NaN where it never came to a last token."""
    gaps = np.maximum(samples.output_tokens - 1, 1)
    return np.where(samples.output_tokens > 1, (samples.last - samples.first) / gaps, 0 * samples.last)
