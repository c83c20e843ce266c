"""Goodput: the work of samples that met every limit, over the whole run; failed and late samples count as bad."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatoken.analysis.statistics import Samples


@dataclass(frozen=True, slots=True)
class Goodput:
    """Work of a run within limits; the share is of all scheduled samples."""

    share: float
    samples_per_second: float
    output_tokens_per_second: float


def goodput(
    samples: Samples, *, ttft_seconds: float | None, tpot_seconds: float | None, duration_seconds: float
) -> Goodput:
    """Work of the samples of a run, failed ones included, within limits; ``duration_seconds`` is above zero.

    ``ttft_seconds`` is None in Offline, where all samples are due at once and it does not apply.
    """
    kept = samples.only(within_limits(samples, ttft_seconds, tpot_seconds))
    return Goodput(
        share=len(kept) / len(samples) if len(samples) else 0.0,
        samples_per_second=len(kept) / duration_seconds,
        output_tokens_per_second=float(kept.output_tokens.sum()) / duration_seconds,
    )


def within_limits(samples: Samples, ttft_seconds: float | None, tpot_seconds: float | None) -> NDArray[np.bool_]:
    """Which samples [N] were completed within the limits that are given.

    A sample of one token has no time per output token and meets any limit on it.
    """
    good = samples.completed
    if tpot_seconds is not None:
        good = good & ((samples.output_tokens < 2) | (samples.tpot <= tpot_seconds))
    if ttft_seconds is not None:
        good = good & (samples.ttft <= ttft_seconds)
    return good
