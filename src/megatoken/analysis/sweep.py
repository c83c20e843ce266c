"""The document of a sweep: its points, the knee, the highest load within the limits, and intervals of repeats."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from megatoken.analysis.comparison import UNSTATED
from megatoken.analysis.limits import PERCENTS, Answer, within
from megatoken.analysis.lookup import read_runs
from megatoken.analysis.machine import accelerator_name, contentions, made_up, simulated_gpu
from megatoken.analysis.repeats import interval, shared_notes, worst_verdict
from megatoken.analysis.seen_tokens import STALL_RULE
from megatoken.analysis.statistics import PERCENTILE_METHOD, samples_needed
from megatoken.analysis.sweep_point import OVERLOADED_RULE, STEADY_RULE, parts_of, point_figures
from megatoken.errors import UsageError
from megatoken.files import new_document
from megatoken.runs.reasons import CAUSES, Reason, reason
from megatoken.runs.run import Run, Verdict
from megatoken.text import precise

SWEEP = "sweep.json"
LOAD_FACTS = ("arrivals", "burstiness", "seed", "source", "of", "stages")
WITHIN_SHARE = 0.99  # of the requests due that must keep both limits
WITHIN_RULE = (
    f"none of your limits is broken, or without any at least {100 * WITHIN_SHARE:g} % of the requests due kept both"
    f" limits of the benchmark; fewer requests than the percentile needs (p99: {samples_needed(100 * WITHIN_SHARE)},"
    " repeats together) show neither"
)
GAIN, FLAT_POINTS = 0.03, 2  # a closed loop is saturated after so many points without so much more output
KNEE_RULE = (
    "the load at which output tokens/s over the median end-to-end latency is highest (Kleinrock's power): beyond it"
    " latency grows by a larger factor than throughput; none of fewer than three loads, nor where that is the highest;"
    " loads of which over 10 % of the answers were cut off do not count, as their median latency is not known"
)
KNEE_UNENDED_SHARE = 0.1
SHOWN = ("name", "load_kind", "load_unit", "model", "precision", "data_set", "hostname", "points", "found")
COMPARED = ("model", "precision", "data_set", "ttft_limit_seconds", "tpot_limit_seconds")  # and all of the load
RATIOS = {
    "output": ("output_tokens_per_second", None),
    "ttft_p50": ("ttft_seconds", "p50"),
    "ttft_p99": ("ttft_seconds", "p99"),
    "tpot_p99": ("tpot_seconds", "p99"),
    "latency_p50": ("latency_seconds", "p50"),
}
UNITS = {
    "concurrency": "requests at once",
    "rate": "requests/s",
    "users": "users",
    "speed": "times the trace's speed",
    "stages": "stage",
}
ISOLATION_RULE = (
    "the smallest of three ratios, at most 1: output next to the neighbour over output alone, p99 of the time to first"
    " token alone over that next to the neighbour, and the same of the time per output token; 1: the neighbour costs"
    " nothing, 0.5: one of the three is twice as bad"
)
ISOLATED = ("output", "ttft_p99", "tpot_p99")  # of RATIOS


def summarise_sweep(runs: Sequence[Run], name: str) -> dict[str, Any]:
    """The document of a sweep from the run folders of its points, in the order in which they ran.

    Loads that ended before their window are no points. ``notes`` lists them with the reason, most often requests that
    failed; unless they were interrupted, they make the sweep INVALID.
    """
    first = runs[0]
    whole = [run for run in runs if parts_of(run)]
    # An Offline run, which rules may ask for, has no place on a curve.
    alike = [run for run in whole if run.result["load"]["kind"] == first.result["load"]["kind"]]
    neighbours = [run.result["load"].get("neighbour") for run in alike]
    points, shared = (
        [
            point_figures(part)
            for run, other in zip(alike, neighbours, strict=True)
            if (other is not None) is with_other
            for part in parts_of(run)
        ]
        for with_other in (False, True)
    )
    subject = " ".join(str(part) for part in (first.result.get("model"), first.result.get("precision")) if part)
    kind = first.result["load"]["kind"]
    left_out = [run for run in runs if run not in whole]
    early = [run for run in left_out if run.verdict is not Verdict.INTERRUPTED]
    verdict = worst_verdict(runs)
    return new_document(
        "sweep",
        title=f"Sweep of {subject} by {kind}",
        inputs=[run.path for run in runs],
        notes=[
            *shared_notes(runs, leaving_out="SWEEP_POINT"),
            *(f"{run.path.name} is left out: {no_window(run)['message']}" for run in left_out),
            *_unjudged(points + shared),
            *_too_few(points),
            *contentions(runs),
        ],
        verdict=Verdict.INVALID if early and verdict is not Verdict.INTERRUPTED else verdict,
        reasons=[
            {"run": run.path.name, **one}
            for run in runs
            for one in (*run.reasons, *([no_window(run)] if run in early else []))
        ],
        name=name,
        load_kind=kind,
        load_unit=UNITS[kind],
        load={key: first.result["load"].get(key) for key in LOAD_FACTS},
        model=first.result.get("model"),
        precision=first.result.get("precision"),
        data_set=first.result.get("data_set"),
        route=(first.result.get("target") or {}).get("api"),
        hostname=first.environment.get("hostname"),
        simulated_gpu=simulated_gpu(first),
        made_up=next(filter(None, map(made_up, runs)), None),
        accelerator=accelerator_name(first) if points and points[0]["accelerators"] else None,
        ttft_limit_seconds=first.result.get("ttft_limit_seconds"),
        tpot_limit_seconds=first.result.get("tpot_limit_seconds"),
        points=points,
        repeats=_repeats(points),
        found=found(points),
        **(
            {
                "neighbour": next(other for other in neighbours if other is not None),
                "shared_points": shared,
                "isolation": isolation(by_load(points), by_load(shared)),
            }
            if shared
            else {}
        ),
        rules={
            "steady": STEADY_RULE,
            "overloaded": OVERLOADED_RULE,
            **({} if kind == "stages" else {"knee": KNEE_RULE, "within_limits": WITHIN_RULE}),
            "stall": STALL_RULE,
            **({"isolation": ISOLATION_RULE} if shared else {}),
            "percentiles": PERCENTILE_METHOD,
        },
    )


def no_window(run: Run) -> Reason:
    """Why a load of a sweep has nothing to count; most often a server that has gone."""
    early = run.result["load"]["ended_by"]  # of empty answers it says that they failed, and a reason how
    causes = [early, *(one for one in run.reasons if one["code"] == "NO_OUTPUT")] if early else run.reasons
    failures = [note for note in run.result["notes"] if note["code"] in CAUSES]
    why = "; ".join(cause["message"] for cause in (*causes, *failures))
    return reason("NO_WINDOW", why=why or "no request came in time")


def made_up_note(document: Mapping[str, Any]) -> list[str]:
    """The note of a sweep whose tokens no model computed; empty for any other sweep."""
    return [note["message"]] if (note := document.get("made_up")) else []


def _unjudged(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """A note on the loads whose latencies a longer window would show; none where all are known."""
    loads = by_load([point for point in points if point.get("unjudged")])
    if not loads:
        return []
    (first, *_), named = next(iter(loads.values())), ", ".join(f"{load:g}" for load in loads)
    return [f"latencies, limits and the steady rate are unknown at load {named}: {first['unjudged']}"]


def _too_few(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """A note on the loads whose limits more requests would decide; none where all are decided."""
    if not (unknown := _limits_unknown(points)):
        return []
    value, (had, needed) = max(unknown.items(), key=lambda item: _shortage(item[1]))
    first = next(point for point in points if point["value"] == value)
    longer = "replay a longer trace"
    if first["kind"] != "speed":
        start, end = first["window_seconds"]
        longer = f"raise --window to {math.ceil((end - start) * _shortage((had, needed))):,}"
    named = ", ".join(f"{load:g}" for load in unknown)
    return [
        f"too few requests to judge the limits at load {named}: load {value:g} had {had:,} of the {needed:,} that the"
        f" percentile needs; {longer}"
    ]


def compare_sweeps(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The document of several sweeps side by side, from those of ``summarise_sweep``.

    Raises:
        UsageError: they have different kinds of load.
    """
    first = documents[0]
    for other in documents[1:]:
        kind, wanted = _kind(other), _kind(first)
        if kind != wanted:
            raise UsageError(
                f"{other['name']}: a sweep by {kind}, and {first['name']} is one by {wanted};"
                " compare sweeps of one kind"
            )
    settings = [
        {
            **{key: document[key] for key in COMPARED},
            "route": document["route"] or "without HTTP",
            **document["load"],
            "stages": _as_given(document["load"]["stages"]),
        }
        for document in documents
    ]
    labels = _labels(documents)
    differing = {
        key: {label: known.get(key) for label, known in zip(labels, settings, strict=True)}
        for key in settings[0]
        if any(known.get(key) != settings[0][key] for known in settings)
    }
    return new_document(
        "sweep_comparison",
        title="Comparison of sweeps",
        inputs=[name for document in documents for name in document["inputs"]],
        notes=[
            f"not like for like: {key.replace('_', ' ')} {'differ' if key == 'stages' else 'differs'} ({_each(values)})"
            for key, values in differing.items()
        ]
        + [
            f"{label}: {note}"
            for label, one in zip(labels, documents, strict=True)
            for note in (*made_up_note(one), *_unproved(one), *_unjudged(one["points"]), *_too_few(one["points"]))
        ],
        sweeps=[{key: document[key] for key in SHOWN} for document in documents],
        ratios=_ratios(documents),
    )


def _unproved(document: Mapping[str, Any]) -> Iterator[str]:
    """That a sweep's verdict says that its figures prove nothing."""
    if (verdict := document.get("verdict")) and not Verdict(verdict).stands:
        points = document["points"]
        loads = {one["value"] for one in points if one["verdict"] and not Verdict(one["verdict"]).stands}
        at = f" at load {', '.join(map(precise, sorted(loads)))}" if loads else ""
        yield f"{verdict}: its figures{at} prove nothing, nor do ratios with them"


def _kind(document: Mapping[str, Any]) -> str:
    """What a sweep changes from load to load; of stages also what they are of."""
    of = document["load"]["of"]
    return str(document["load_kind"]) if of is None else f"{document['load_kind']} of {of}"


def _as_given(stages: Sequence[Mapping[str, float]] | None) -> str | None:
    """Stages as ``--concurrency`` and ``--rates`` take them."""
    if stages is None:
        return None
    loads = [f"{one['first']:g}" + (f"-{one['last']:g}" if one["last"] != one["first"] else "") for one in stages]
    return ",".join(f"{load}@{one['seconds']:g}" for load, one in zip(loads, stages, strict=True))


def _labels(documents: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the sweeps, with their place where several have one name."""
    names = [document["name"] for document in documents]
    return [name if names.count(name) == 1 else f"{name} ({place})" for place, name in enumerate(names, 1)]


def _each(values: Mapping[str, Any]) -> str:
    return "; ".join(f"{name}: {UNSTATED if value is None else value}" for name, value in values.items())


def _ratios(documents: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """At every load that all have: output of each sweep over that of the first, and its latencies over the first's.

    A window in which no request ended may lie in the ramp, so the output of such a point is compared with none.
    Stages are numbered, so that equal numbers are equal loads only where the stages are equal too.
    """
    all_loads, labels = [by_load(document["points"]) for document in documents], _labels(documents)
    rows = []
    for value in sorted(set.intersection(*map(set, all_loads))):
        base, *others = (loads[value] for loads in all_loads)
        if any(group[0].get("stage") != base[0].get("stage") for group in others):
            continue
        for label, group in zip(labels[1:], others, strict=True):
            row: dict[str, Any] = {"value": value, "of": label, "to": labels[0]}
            for name, (key, percentile) in RATIOS.items():
                of, to = (
                    _mean(points, key) if percentile is None else _mean([point[key] for point in points], percentile)
                    for points in (group, base)
                )
                row[name] = of / to if to else None
            row["unreliable"] = _unreliable(RATIOS, [*group, *base])
            if any(point.get("unjudged") for point in (*group, *base)):
                row["output"] = None
            rows.append(row)
    return rows


def _unreliable(names: Iterable[str], points: Sequence[Mapping[str, Any]]) -> list[str]:
    """Those of ``names``, keys of ``RATIOS``, whose percentile too few requests of a point show."""
    keys = {name: RATIOS[name] for name in names}
    return [name for name, (key, of) in keys.items() if of and any(of in point[key]["unreliable"] for point in points)]


def found(points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a sweep shows: knee, highest load within the limits, highest output, and why it ended early, if it did.

    Stages are numbered, so that of them only the highest output is known.
    """
    loads = by_load(points)
    ordered = not points or points[0]["kind"] != "stages"
    rates = {value: _mean(group, "output_tokens_per_second") for value, group in loads.items()}
    power = {
        value: rates[value] / latency
        for value, group in loads.items()
        if all(shows_median(point["requests"], point["requests_unended"]) for point in group)
        and (latency := _mean([point["latency_seconds"] for point in group], "p50"))
    }
    knee = max(power, key=lambda value: power[value]) if len(power) > 2 and ordered else None
    unknown = _limits_unknown(points)
    kept, met = (
        [value for value, group in loads.items() if value not in unknown and all(map(holds, group))]
        for holds in (keeps_limits, limits_met)
    )
    # What was reached while requests failed, in a ramp or before an interruption is no rate to plan with, unless no
    # load is better.
    sound = [value for value, group in loads.items() if not any(map(_unsound, group))]
    peak = max(sound or rates, key=lambda value: rates[value], default=None)
    early = next((point["ended_by"] for point in points if point["ended_by"]), None)
    return {
        "knee": None if knee == max(power, default=None) else knee,  # the highest load shows no knee: it may lie above
        "highest_within_limits": max(kept, default=None) if ordered else None,
        "highest_limits_met": max(met, default=None) if ordered else None,
        "limits_unknown": list(unknown),
        "peak": peak,
        "peak_output_tokens_per_second": rates[peak] if peak is not None else None,
        "saturated": saturated(points),
        "ended_early_by": early,
    }


def shows_median(requests: float, unended: float) -> bool:
    """Whether so few answers were cut off that those that ended show the median latency."""
    return unended <= KNEE_UNENDED_SHARE * requests


def _unsound(point: Mapping[str, Any]) -> bool:
    return bool(point.get("requests_failed") or point.get("unjudged") or _interrupted(point))


def _interrupted(point: Mapping[str, Any]) -> bool:
    return point.get("verdict") == Verdict.INTERRUPTED


def keeps_limits(point: Mapping[str, Any]) -> bool:
    """Whether the requests of a point kept the limits and its target kept up.

    Of the user's own limits none may be broken; without them 99 % of the requests keep both limits of the benchmark.
    An interrupted point keeps none: its slowest requests are missing.
    """
    if point["overloaded"] or point["ended_by"] or point.get("unjudged") or _interrupted(point):
        return False
    if own := point.get("limits"):
        return all(one["answer"] != Answer.NOT_MET and within(one) for one in own)
    good = point["goodput"]
    return bool(good and good["share"] >= WITHIN_SHARE)


def _limits_unknown(points: Sequence[Mapping[str, Any]]) -> dict[float, tuple[int, int]]:
    """The loads that broke no limit and have too few requests to show that they keep them, with both numbers.

    Of each the requests that there were and those that the percentile needs, of the limit that is furthest from it. A
    stage is no load to plan with, so that nothing is said of stages.
    """
    unknown = {}
    for value, group in by_load(points).items():
        if "stage" in group[0] or not all(map(keeps_limits, group)):
            continue
        if short := [(had, needed) for had, needed in _counted(group) if had < needed]:
            unknown[value] = max(short, key=_shortage)
    return unknown


def _shortage(pair: tuple[int, int]) -> float:
    """How many times as many requests as there were are needed; where there were none, as if there had been one."""
    had, needed = pair
    return needed / max(1, had)


def _counted(group: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, int]]:
    """Requests, or gaps between tokens, of a load behind each limit on a percentile, and how many that one needs.

    Answers that were cut off within a limit are not among them.
    """
    own = [one for point in group for one in point.get("limits") or ()]
    for key in dict.fromkeys(one["key"] for one in own):
        percent = PERCENTS.get(key.partition(".")[2])
        if percent is not None:
            yield sum(one["samples"] or 0 for one in own if one["key"] == key), samples_needed(percent)
    if not any(point.get("limits") for point in group):
        judged = sum(point["requests"] - point["requests_unended"] for point in group)
        yield judged, samples_needed(100 * WITHIN_SHARE)


def limits_met(point: Mapping[str, Any]) -> bool:
    """Whether a point meets every one of the user's limits, with confidence."""
    return keeps_limits(point) and all(one["answer"] == Answer.MET for one in point.get("limits") or ())


def saturated(points: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last loads of a closed loop gave no more output than those before them."""
    loads = by_load([point for point in points if not point.get("unjudged")])
    if len(loads) <= FLAT_POINTS or points[0]["kind"] != "concurrency":
        return False
    rates = [_mean(loads[value], "output_tokens_per_second") for value in sorted(loads)]
    return max(rates[-FLAT_POINTS:]) < (1 + GAIN) * max(rates[:-FLAT_POINTS])


def by_load(points: Sequence[Mapping[str, Any]]) -> dict[float, list[Mapping[str, Any]]]:
    """The points of each load, repeats together, by rising load."""
    ordered = sorted(points, key=lambda point: float(point["value"]))
    return {value: list(group) for value, group in groupby(ordered, key=lambda point: point["value"])}


def read_sweep(folder: Path) -> dict[str, Any] | None:
    """The document of a sweep's folder, from its run folders; None if it is no folder of a sweep.

    Raises:
        UsageError: a run folder is damaged.
    """
    if not (folder / SWEEP).is_file():
        return None
    return summarise_sweep(read_runs(folder), folder.name)


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
    """Mean of a figure over points that know it; 0 where none does."""
    known = [part[name] for part in parts if part[name] is not None]
    return statistics.fmean(known) if known else 0.0


def isolation(
    alone: Mapping[float, Sequence[Mapping[str, Any]]], shared: Mapping[float, Sequence[Mapping[str, Any]]]
) -> list[dict[str, Any]]:
    """A row for each load that ran both ways, with means over its repeats, the three ratios and the score.

    A ratio whose figures are unknown is None and does not count; ``unreliable`` names those of too few requests.
    """
    rows = []
    for value in sorted(alone.keys() & shared.keys()):
        row: dict[str, Any] = {"value": value}
        for name in ISOLATED:
            key, of = RATIOS[name]
            before, after = (_mean_of_all(points, key, of) for points in (alone[value], shared[value]))
            row[f"{name}_alone"], row[f"{name}_shared"] = before, after
            better, worse = (after, before) if name == "output" else (before, after)
            row[f"{name}_ratio"] = None if better is None or not worse else better / worse
        ratios = {name: row[f"{name}_ratio"] for name in ISOLATED if row[f"{name}_ratio"] is not None}
        row["score"] = min(1.0, *ratios.values()) if ratios else None
        row["worst"] = min(ratios, key=lambda name: ratios[name]) if ratios else None
        row["unreliable"] = _unreliable(ISOLATED, [*alone[value], *shared[value]])
        rows.append(row)
    return rows


def _mean_of_all(points: Sequence[Mapping[str, Any]], key: str, of: str | None) -> float | None:
    values = [point[key] if of is None else point[key][of] for point in points]
    return None if None in values else statistics.fmean(values)
