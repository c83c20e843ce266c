"""Service levels: limits on time to first token and time per output token, and whether a run kept them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megatoken.analysis.goodput import goodput
from megatoken.analysis.series import Floats
from megatoken.analysis.statistics import Samples, leading_rates, samples_needed
from megatoken.text import count_of

if TYPE_CHECKING:
    from megatoken.runs.run import Run

PERCENT = 99


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """Latency limits that 99 % of the requests must keep."""

    ttft_seconds: float
    tpot_seconds: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a run kept a service level.

    ``kept`` is None if the run does not show it. ``good`` requests kept every limit that applies; their share is of
    all scheduled requests, failed ones included. ``bound_output_tokens_per_second`` is the rate of a run that kept the
    level, so a rate that the level allows; otherwise no such rate is known and the field is None.
    """

    kept: bool | None
    why: str
    ttft_mean_seconds: float | None
    tpot_mean_seconds: float | None
    ttft_p99_seconds: float | None
    tpot_p99_seconds: float | None
    good_share: float | None
    good_requests_per_second: float | None
    good_output_tokens_per_second: float | None
    bound_output_tokens_per_second: float | None


def judge_run(run: Run, level: ServiceLevel) -> Verdict:
    """Whether ``run``, which completed at least one sample, kept ``level``."""
    result = run.result
    seconds = result["output_tokens"] / leading_rates(result)["output_tokens_per_second"]
    return judge(Samples.of(run.requests), level, offline=result.get("scenario") == "offline", seconds=seconds)


def judge(samples: Samples, level: ServiceLevel, *, offline: bool, seconds: float) -> Verdict:
    """Whether samples kept ``level``; at least one must be completed. Rates are per ``seconds``.

    In Offline all samples are due at once, so the time to first token does not apply: it is not judged, and ``kept`` is
    None if the other limit was kept.
    """
    done = samples.only(samples.completed)
    good = goodput(
        samples,
        ttft_seconds=None if offline else level.ttft_seconds,
        tpot_seconds=level.tpot_seconds,
        duration_seconds=seconds,
    )
    tpot_mean, tpot_p99 = _mean_and_p99(done.tpot)
    ttft_mean, ttft_p99 = (None, None) if offline else _mean_and_p99(done.ttft)
    kept, why = _kept(good.share, len(samples), offline, level)
    return Verdict(
        kept=kept,
        why=why,
        ttft_mean_seconds=ttft_mean,
        tpot_mean_seconds=tpot_mean,
        ttft_p99_seconds=ttft_p99,
        tpot_p99_seconds=tpot_p99,
        good_share=None if offline else good.share,
        good_requests_per_second=None if offline else good.samples_per_second,
        good_output_tokens_per_second=None if offline else good.output_tokens_per_second,
        bound_output_tokens_per_second=float(done.output_tokens.sum() / seconds) if kept else None,
    )


def how_well_kept(verdict: Verdict) -> tuple[int, float]:
    """A sorting key: broken levels first, then unknown ones, then kept ones."""
    return (0 if verdict.kept is False else 1 if verdict.kept is None else 2, verdict.good_share or 0.0)


def _kept(good_share: float, requests: int, offline: bool, level: ServiceLevel) -> tuple[bool | None, str]:
    limits = f"first token within {level.ttft_seconds:g} s, {level.tpot_seconds:g} s per further token"
    if offline:
        limits = f"{level.tpot_seconds:g} s per further token"
    enough = good_share >= PERCENT / 100
    if not enough:
        why = f"only {100 * good_share:.2f} % of {count_of(requests, 'request')} kept {limits}; {PERCENT} % must"
        return False, f"{why}: this rate breaks the service level; a lower rate that keeps it is not known"
    if requests < samples_needed(PERCENT):
        few = f"{count_of(requests, 'request')} {'is' if requests == 1 else 'are'} too few"
        return None, f"{few} to judge {PERCENT} % of requests; at least {samples_needed(PERCENT)} are needed"
    if offline:
        return None, (
            f"{100 * good_share:.2f} % kept {limits}, but time to first token does not apply to Offline; run the Server"
            " scenario"
        )
    return True, f"{100 * good_share:.2f} % of {count_of(requests, 'request')} kept {limits}"


def _mean_and_p99(values: Floats) -> tuple[float, float] | tuple[None, None]:
    values = values[np.isfinite(values)]
    return (float(values.mean()), float(np.percentile(values, PERCENT))) if len(values) else (None, None)
