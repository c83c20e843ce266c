"""The document of a sweep: its points, the knee, the highest load within the limits, and intervals of repeats."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from megatoken.analysis.machine import accelerator_name, contentions, simulated_gpu
from megatoken.analysis.repeats import interval, shared_notes, worst_verdict
from megatoken.analysis.statistics import PERCENTILE_METHOD
from megatoken.analysis.sweep_point import STALL_RULE, STEADY_RULE, point_figures
from megatoken.files import plain
from megatoken.runs.run import Run
from megatoken.text import utc_now

SWEEP = "sweep.json"
SCHEMA_VERSION = 1
WITHIN_SHARE = 0.99  # of the requests due that must keep both limits
GAIN, FLAT_POINTS = 0.03, 2  # a closed loop is saturated after so many points without so much more output
KNEE_RULE = (
    "the load at which output tokens/s over the median end-to-end latency is highest (Kleinrock's power): beyond it"
    " latency grows by a larger factor than throughput"
)
UNITS = {"concurrency": "requests at once", "rate": "requests/s", "users": "users", "speed": "times the trace's speed"}


def summarise_sweep(runs: Sequence[Run], name: str) -> dict[str, Any]:
    """The document of a sweep from the run folders of its points, in the order in which they ran.

    Points that were interrupted before their window are listed in ``notes`` only.
    """
    whole = [run for run in runs if run.result["load"]["window_seconds"]]
    points = [point_figures(run) for run in whole]
    first = runs[0]
    subject = " ".join(str(part) for part in (first.result.get("model"), first.result.get("precision")) if part)
    kind = first.result["load"]["kind"]
    left_out = [run.path.name for run in runs if run not in whole]
    return {
        "kind": "sweep",
        "schema_version": SCHEMA_VERSION,
        "created_at": utc_now(),
        "title": f"Sweep of {subject} by {kind}",
        "inputs": [plain(run.path) for run in runs],
        "notes": [
            *shared_notes(runs),
            *([f"left out, because they ended before their window: {', '.join(left_out)}"] if left_out else []),
            *contentions(runs),
        ],
        "verdict": worst_verdict(runs),
        "reasons": [{"run": run.path.name, **reason} for run in runs for reason in run.reasons],
        "name": name,
        "load_kind": kind,
        "load_unit": UNITS[kind],
        "load": {key: first.result["load"].get(key) for key in ("arrivals", "burstiness", "seed", "source")},
        "model": first.result.get("model"),
        "precision": first.result.get("precision"),
        "data_set": first.result.get("data_set"),
        "hostname": first.environment.get("hostname"),
        "simulated_gpu": simulated_gpu(first),
        "accelerator": accelerator_name(first) if points and points[0]["accelerators"] else None,
        "ttft_limit_seconds": first.result.get("ttft_limit_seconds"),
        "tpot_limit_seconds": first.result.get("tpot_limit_seconds"),
        "points": points,
        "repeats": _repeats(points),
        "found": found(points),
        "rules": {
            "steady": STEADY_RULE,
            "knee": KNEE_RULE,
            "within_limits": f"at least {100 * WITHIN_SHARE:g} % of the requests due kept both limits",
            "stall": STALL_RULE,
            "percentiles": PERCENTILE_METHOD,
        },
    }


def found(points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a sweep shows: knee, highest load within the limits, highest output, and why it ended early, if it did."""
    loads = by_load(points)
    rates = {value: _mean(group, "output_tokens_per_second") for value, group in loads.items()}
    power = {
        value: rates[value] / latency
        for value, group in loads.items()
        if (latency := _mean([point["latency_seconds"] for point in group], "p50"))
    }
    within = [value for value, group in loads.items() if all(map(keeps_limits, group))]
    peak = max(rates, key=lambda value: rates[value], default=None)
    early = next((point["ended_by"] for point in points if point["ended_by"]), None)
    return {
        "knee": max(power, key=lambda value: power[value]) if len(power) > 2 else None,
        "highest_within_limits": max(within, default=None),
        "peak": peak,
        "peak_output_tokens_per_second": rates[peak] if peak is not None else None,
        "saturated": saturated(points),
        "ended_early_by": early,
    }


def keeps_limits(point: Mapping[str, Any]) -> bool:
    """Whether the requests of a point kept the limits and its target kept up."""
    good = point["goodput"]
    return bool(good and good["share"] >= WITHIN_SHARE and not point["overloaded"] and not point["ended_by"])


def saturated(points: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last loads of a closed loop gave no more output than those before them."""
    loads = by_load(points)
    if len(loads) <= FLAT_POINTS or points[0]["kind"] == "rate":
        return False
    rates = [_mean(loads[value], "output_tokens_per_second") for value in sorted(loads)]
    return max(rates[-FLAT_POINTS:]) < (1 + GAIN) * max(rates[:-FLAT_POINTS])


def by_load(points: Sequence[Mapping[str, Any]]) -> dict[float, list[Mapping[str, Any]]]:
    """The points of each load, repeats together, by rising load."""
    ordered = sorted(points, key=lambda point: float(point["value"]))
    return {value: list(group) for value, group in groupby(ordered, key=lambda point: point["value"])}


def are_points(runs: Sequence[Run]) -> bool:
    """Whether all are points of one sweep."""
    return bool(runs) and all("load" in run.result for run in runs)


def _repeats(points: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each load that ran more than once, the intervals of what repeats can be averaged over."""
    rows = []
    for value, group in by_load(points).items():
        if len(group) > 1:
            metrics = {
                "output_tokens_per_second": [point["output_tokens_per_second"] for point in group],
                "requests_per_second": [point["requests_per_second"] for point in group],
                "ttft_p50_seconds": [point["ttft_seconds"]["p50"] for point in group],
                "tpot_p50_seconds": [point["tpot_seconds"]["p50"] for point in group],
            }
            known = {name: values for name, values in metrics.items() if None not in values}
            rows.append({"value": value, "runs": len(group), **{name: interval(of) for name, of in known.items()}})
    return rows


def _mean(parts: Sequence[Mapping[str, Any]], name: str) -> float:
    known = [part[name] for part in parts if part[name] is not None]
    return statistics.fmean(known) if known else 0.0
