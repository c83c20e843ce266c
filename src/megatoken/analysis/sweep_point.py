"""One point of a sweep: every figure of its window, from the tables of its run folder.

The requests that count are those that were due within the window; those that failed or did not end count as outside of
every limit. Tokens count where they were seen: all tokens seen within the window, of any request that did not fail.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from megatoken.analysis.energy import run_energy
from megatoken.analysis.goodput import Span, goodput
from megatoken.analysis.limits import asked_limits, judge_limits, limit_documents, none_ended, why_unjudged
from megatoken.analysis.machine import run_accelerators
from megatoken.analysis.seen_tokens import SeenTokens
from megatoken.analysis.series import Floats, numbers
from megatoken.analysis.stability import theil_sen
from megatoken.analysis.statistics import Samples, percentiles
from megatoken.runs.run import Run

BACKLOG_SHARE, BACKLOG_DEVIATIONS = 0.1, 4.0
SPANS = 10  # of a window, whose rates show a trend
TREND_SHARE = 0.1  # of the rate, from the first to the last moment of the window
STEEP_SHARE = 0.3  # the same, where the rates of neighbouring spans are too alike to show it with confidence
MOST_BUCKETS = 6
TIMELINE_SPANS = 24
GOODPUT = ("share", "samples_per_second", "output_tokens_per_second")
LONGEST_STEP_SECONDS = 1.0  # by which the end of a window may be noticed late, or early by rounding
OVERLOADED_RULE = (
    f"the requests under way grew by more than {100 * BACKLOG_SHARE:g} % of those due and {BACKLOG_DEVIATIONS:g} times"
    " their square root; closed loops cannot be"
)
STEADY_RULE = (
    f"the output rates of {SPANS} spans of the window have no trend (Theil-Sen, 99 % confidence) that changes the rate"
    f" by more than {100 * TREND_SHARE:g} % over the window, nor one by more than {100 * STEEP_SHARE:g} % at any"
    " confidence, and in an open loop the requests under way do not grow by"
    f" more than {100 * BACKLOG_SHARE:g} % of those due and {BACKLOG_DEVIATIONS:g} times their square root"
)


def backlog_grows(before: int, after: int, due: int) -> bool:
    """Whether requests under way grew from ``before`` to ``after`` by more than chance while ``due`` became due."""
    return after - before > max(BACKLOG_SHARE * due, BACKLOG_DEVIATIONS * math.sqrt(due))


def parts_of(run: Run) -> list[Run]:
    """A run for each part of ``run`` that is a point of its own: its stages as far as they came, else the run.

    Empty if it ended before its window or its first stage was over.
    """
    load = run.result["load"]
    if load["window_seconds"] is None:
        return []
    if not (stages := load.get("stages")):
        return [run]
    begin, end = load["window_seconds"]
    parts = []
    for number, stage in enumerate(stages, 1):
        last = begin + stage["seconds"]
        if last > end + LONGEST_STEP_SECONDS:
            break
        own = {**load, "value": float(number), "stage": stage, "window_seconds": [begin, last]}
        parts.append(replace(run, result={**run.result, "load": own}))
        begin = last
    return parts


def point_figures(run: Run) -> dict[str, Any]:
    """The figures of a point; None for what is unknown. ``run`` has the field ``load`` with a window."""
    load, samples = run.result["load"], _sent_over_network(run)
    start, end = load["window_seconds"]
    length = end - start
    inside = samples.only((samples.scheduled >= start) & (samples.scheduled < end))
    done = inside.only(inside.completed)
    tokens = SeenTokens.of(run, samples)
    output_rate = tokens.within(start, end) / length
    accelerators = run_accelerators(run)
    tpot = percentiles(done.known_tpot)
    steady = _steadiness(samples, tokens, start, end, waits=load["waits"])
    unjudged = none_ended(samples, tokens, start, end)
    begun = done if unjudged else inside.only(inside.completed | inside.cut)
    limits = {f"{name}_seconds": run.result.get(f"{name}_limit_seconds") for name in ("ttft", "tpot")}
    judged = not unjudged and None not in limits.values() and not inside.in_one_piece.any()
    good = goodput(Span.of(samples, tokens, start, end), **limits) if judged else None
    energy = run_energy(run.series)
    return {
        "run": run.path.name,
        "verdict": run.verdict,
        "kind": load["kind"],
        "value": load["value"],
        **({"stage": load["stage"]} if "stage" in load else {}),
        "window_seconds": [start, end],
        **(steady | {"steady": None} if unjudged else steady),
        "unjudged": why_unjudged(load) if unjudged else None,
        "ended_by": load["ended_by"],
        "requests": len(inside),
        "requests_completed": len(done),
        "requests_failed": int(inside.failed.sum()),
        "requests_unended": len(inside) - len(done) - int(inside.failed.sum()),
        "requests_unanswered": int((~np.isfinite(inside.first) & ~inside.completed & ~inside.failed).sum()),
        "in_flight": _mean_under_way(samples, start, end),
        "offered_requests_per_second": len(inside) / length,
        "requests_per_second": int((samples.completed & (samples.last >= start) & (samples.last < end)).sum()) / length,
        "output_tokens_per_second": output_rate,
        **{f"{name}_tokens_per_request": _mean(getattr(done, f"{name}_tokens")) for name in ("input", "output")},
        "accelerators": accelerators,
        "output_tokens_per_second_per_gpu": output_rate / accelerators if accelerators else None,
        "user_tokens_per_second": {
            name: 1 / tpot[of] if tpot[of] else None for name, of in (("p50", "p50"), ("p10", "p90"), ("p1", "p99"))
        },
        "ttft_seconds": percentiles(begun.ttft),
        "ttft_from_send_seconds": percentiles(begun.first - begun.sent),
        "latency_seconds": percentiles(done.last - done.scheduled),
        "latency_from_send_seconds": percentiles(done.last - done.sent),
        "send_lag_seconds": percentiles(inside.sent - inside.scheduled),
        "tpot_seconds": tpot,
        **tokens.gap_figures(
            samples.completed & ~samples.in_one_piece & (samples.scheduled >= start) & (samples.scheduled < end)
        ),
        "ttft_by_input_tokens": _by_input(done),
        "requests_judged": good.judged if good else None,
        "requests_cut_off": good.cut_off if good else None,
        "goodput": good and {name: getattr(good, name) for name in GOODPUT},
        "limits": limit_documents(judge_limits(run, asked_limits(run.config), run.config.get("dollars_per_hour"))),
        "energy_joules_per_output_token": energy.joules_per_output_token,
        "timeline": _timeline(samples, tokens, *([start, end] if "stage" in load else _whole(samples))),
    }


def _mean(counts: Floats) -> float | None:
    """None if one is unknown."""
    return float(counts.mean()) if len(counts) and np.isfinite(counts).all() else None


def _sent_over_network(run: Run) -> Samples:
    """The samples of a run; where requests went over a network, they count as sent when their first byte did."""
    samples, sent = Samples.of(run.requests), numbers(run.requests["request_sent_seconds"])
    return replace(samples, sent=np.where(np.isfinite(sent), sent, samples.sent))


def _steadiness(samples: Samples, tokens: SeenTokens, start: float, end: float, *, waits: bool) -> dict[str, Any]:
    """Whether the point was steady by ``STEADY_RULE``, and the figures behind it."""
    edges = np.linspace(start, end, SPANS + 1)
    rates = np.array([tokens.within(*span) for span in pairwise(edges)]) / (edges[1] - edges[0])
    mean = float(rates.mean())
    trend = theil_sen(edges[:-1], rates)
    change = trend.slope * (end - start) / mean if mean else 0.0
    drifts = abs(change) > STEEP_SHARE or (abs(change) > TREND_SHARE and trend.low * trend.high > 0)
    due = int(((samples.scheduled >= start) & (samples.scheduled < end)).sum())
    grows = not waits and backlog_grows(_under_way(samples, start), _under_way(samples, end), due)
    return {"steady": bool(mean) and not drifts and not grows, "change_share": change, "overloaded": grows}


def _whole(samples: Samples) -> tuple[float, float]:
    """From the start of a point to the end of its last request."""
    return 0.0, float(max(np.nanmax(samples.last, initial=0.0), samples.scheduled.max(initial=0.0))) or 1.0


def _timeline(samples: Samples, tokens: SeenTokens, start: float, end: float) -> dict[str, Any]:
    """Output, mean requests under way, and latencies of the requests that were due, of spans of equal length.

    ``latencies`` has a row for each span in which a request was due that has completed, by the time of its middle.
    """
    spans = list(pairwise(np.linspace(start, end, TIMELINE_SPANS + 1).tolist()))
    length = (end - start) / TIMELINE_SPANS
    rows = []
    for low, high in spans:
        done = samples.only(samples.completed & (samples.scheduled >= low) & (samples.scheduled < high))
        if len(done):
            ttft, tpot = percentiles(done.ttft), percentiles(done.known_tpot)
            shown = {f"ttft_{of}_seconds": ttft[of] for of in ("p50", "p99")} | {"tpot_p50_seconds": tpot["p50"]}
            rows.append({"at_seconds": (low + high) / 2 - start, **shown})
    return {
        "span_seconds": length,
        "output_tokens_per_second": [tokens.within(*span) / length for span in spans],
        "in_flight": [_mean_under_way(samples, *span) for span in spans],
        "latencies": rows,
    }


def _under_way(samples: Samples, moment: float) -> int:
    ended = samples.last <= moment  # false where there is no last token
    return int(((samples.scheduled <= moment) & ~ended & ~samples.failed).sum())


def _mean_under_way(samples: Samples, start: float, end: float) -> float:
    """Requests between due and end, averaged over the window; one that never ended counts to the window's end."""
    until = np.clip(np.where(np.isfinite(samples.last), samples.last, end), start, end)
    spans = until - np.clip(samples.scheduled, start, end)
    return float(spans[~samples.failed].sum()) / (end - start)


def _by_input(done: Samples) -> list[dict[str, Any]]:
    """Times to first token by prompt length: buckets that begin at powers of two, rare ones joined to the one below."""
    lengths = done.input_tokens
    if not len(done) or not np.isfinite(lengths).all():
        return []
    powers = np.floor(np.log2(np.maximum(lengths, 1))).astype(int)
    powers = np.clip(powers, powers.max() - MOST_BUCKETS + 1, None)
    return [
        {
            "from_tokens": int(lengths[powers == power].min()),
            "to_tokens": int(lengths[powers == power].max()),
            "ttft_seconds": percentiles(done.ttft[powers == power]),
        }
        for power in np.unique(powers)
    ]
