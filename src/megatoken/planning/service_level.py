"""Service levels: limits on time to first token and time per output token, and whether a run kept them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from megatoken.analysis.goodput import Goodput, Span, counted_span, goodput
from megatoken.analysis.limits import WHY_TPOT_UNKNOWN, why_unjudged
from megatoken.analysis.series import Floats
from megatoken.analysis.statistics import Samples, leading_rates, samples_needed
from megatoken.runs.run import Run
from megatoken.runs.run import Verdict as RunVerdict
from megatoken.text import count_of

PERCENT = 99


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """Latency limits that 99 % of the requests must keep."""

    ttft_seconds: float
    tpot_seconds: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a run kept a service level.

    ``kept`` is None if the run does not show it. ``good`` requests kept every limit that applies, see ``goodput``;
    their output tokens are a part of the rate that stands for the run. ``bound_output_tokens_per_second`` is that rate
    of a run that kept the level, so a rate that the level allows; otherwise no such rate is known and the field is
    None.
    """

    kept: bool | None
    why: str
    ttft_mean_seconds: float | None = None
    tpot_mean_seconds: float | None = None
    ttft_p99_seconds: float | None = None
    tpot_p99_seconds: float | None = None
    good_share: float | None = None
    good_requests_per_second: float | None = None
    good_output_tokens_per_second: float | None = None
    bound_output_tokens_per_second: float | None = None


def judge_run(run: Run, level: ServiceLevel) -> Verdict:
    """Whether ``run``, which completed at least one sample, kept ``level``; an interrupted one can only break it."""
    result = run.result
    rate = leading_rates(result)["output_tokens_per_second"]
    span = counted_span(run, Samples.of(run.requests), result["output_tokens"] / rate)
    if span is None:
        return Verdict(None, why_unjudged(result["load"]))
    verdict = judge(span, level, offline=result.get("scenario") == "offline", rate=rate)
    if verdict.kept and run.verdict is RunVerdict.INTERRUPTED:
        why = "the run was interrupted, so its slowest requests are missing"
        return replace(verdict, kept=None, why=why, bound_output_tokens_per_second=None)
    return verdict


def judge(span: Span, level: ServiceLevel, *, offline: bool, rate: float) -> Verdict:
    """Whether the requests of a span kept ``level``; ``rate`` of output tokens stands for the run.

    In Offline all samples are due at once, so the time to first token does not apply: it is not judged, and ``kept`` is
    None if the other limit was kept. It is None, too, where answers came in one piece
    and seem to have no time per output token, unless the others break the level.
    """
    good = goodput(span, ttft_seconds=None if offline else level.ttft_seconds, tpot_seconds=level.tpot_seconds)
    if good is None:
        return Verdict(None, "all its requests were cut off, within the limits until then")
    done = span.samples.only(span.due & span.samples.completed)
    tpot_mean, tpot_p99 = _mean_and_p99(done.known_tpot)
    ttft_mean, ttft_p99 = (None, None) if offline else _mean_and_p99(done.ttft)
    kept, why = _kept(good, offline, level)
    if span.tpot_unknown:  # broken only if it is even where all of those answers are within the limit
        kept, why = (False, f"{why}; {WHY_TPOT_UNKNOWN}") if kept is False else (None, WHY_TPOT_UNKNOWN)
    shown = None if offline or (span.tpot_unknown and kept is None) else good
    return Verdict(
        kept=kept,
        why=why,
        ttft_mean_seconds=ttft_mean,
        tpot_mean_seconds=tpot_mean,
        ttft_p99_seconds=ttft_p99,
        tpot_p99_seconds=tpot_p99,
        good_share=shown.share if shown else None,
        good_requests_per_second=shown.samples_per_second if shown else None,
        good_output_tokens_per_second=rate * shown.output_tokens_share if shown else None,
        bound_output_tokens_per_second=rate if kept else None,
    )


def how_well_kept(verdict: Verdict) -> tuple[int, float]:
    """A sorting key: broken levels first, then unknown ones, then kept ones."""
    return (0 if verdict.kept is False else 1 if verdict.kept is None else 2, verdict.good_share or 0.0)


def _kept(good: Goodput, offline: bool, level: ServiceLevel) -> tuple[bool | None, str]:
    limits = f"first token within {level.ttft_seconds:g} s, {level.tpot_seconds:g} s per further token"
    if offline:
        limits = f"{level.tpot_seconds:g} s per further token"
    requests = count_of(good.judged, "request") + (f" ({good.cut_off:,} more were cut off)" if good.cut_off else "")
    share = f"{100 * good.share:.2f} %"
    if good.share < PERCENT / 100:
        why = f"only {share} of {requests} kept {limits}; {PERCENT} % must"
        return False, f"{why}: this rate breaks the service level; a lower rate that keeps it is not known"
    if good.judged < samples_needed(PERCENT):
        few = f"{requests} {'is' if good.judged == 1 else 'are'} too few"
        return None, f"{few} to judge {PERCENT} % of requests; at least {samples_needed(PERCENT)} are needed"
    if offline:
        why = "time to first token does not apply to Offline; run the Server scenario"
        return None, f"{share} kept {limits}, but {why}"
    return True, f"{share} of {requests} kept {limits}"


def _mean_and_p99(values: Floats) -> tuple[float, float] | tuple[None, None]:
    values = values[np.isfinite(values)]
    return (float(values.mean()), float(np.percentile(values, PERCENT))) if len(values) else (None, None)
