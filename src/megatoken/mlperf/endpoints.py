"""MLPerf Endpoints: its rules, the regions of a curve, and the verdicts of a point and of a curve.

A point is a closed loop at one concurrency, or the Offline run. Facts: ``data/endpoints_rules.yaml``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np

from megatoken.analysis.series import numbers
from megatoken.analysis.statistics import Samples
from megatoken.analysis.sweep import summarise_sweep
from megatoken.errors import UsageError
from megatoken.mlperf.endpoints_window import Requests, Window, find_window, lower_percentile
from megatoken.runs.reasons import Reason, reason, shortfall
from megatoken.yaml_files import load_yaml

if TYPE_CHECKING:
    import pyarrow as pa

    from megatoken.runs.run import Run

VERSION = "endpoints-v1.0"
ULTRA_LOW, LOW, MEDIUM, HIGH, MARGIN = (
    *("low_latency", "low_concurrency", "med_concurrency", "high_concurrency"),
    "margin",
)
OFFLINE = "offline"
REGION_TITLES = {ULTRA_LOW: "Ultra Low", LOW: "Low", MEDIUM: "Medium", HIGH: "High", MARGIN: "margin above C_max"}
CHOSEN_POINTS = 8  # of a curve without a list: one for each doubling would be too many for a large C_max


@dataclass(frozen=True, slots=True)
class Regions:
    """Bounds of the regions of a curve, both inclusive; a region whose end is below its start is empty."""

    c_min: int
    c_max: int
    low: tuple[int, int]
    medium: tuple[int, int]
    high: tuple[int, int]
    margin_end: int

    def of(self, concurrency: int) -> str | None:
        """The region of a concurrency, by the reference algorithm; None above the margin."""
        bounds = {
            ULTRA_LOW: (1, self.c_min),
            LOW: self.low,
            MEDIUM: self.medium,
            HIGH: self.high,
            MARGIN: (self.c_max + 1, self.margin_end),
        }
        return next((name for name, (start, end) in bounds.items() if start <= concurrency <= end), None)


@cache
def endpoint_rules(version: str = VERSION) -> Mapping[str, Any]:
    """The rules of a version. Raises UsageError if it is unknown."""
    text = files("megatoken").joinpath("data", "endpoints_rules.yaml").read_text(encoding="utf-8")
    known: dict[str, Any] = load_yaml(text)
    if version not in known:
        raise UsageError(f"--rules {version}: a sweep knows the rules {', '.join(known)}; those of LoadGen are for run")
    rules: Mapping[str, Any] = known[version]
    return rules


def regions(c_min: int, c_max: int) -> Regions:
    """Three equal parts of log2(c_max - c_min), rounded half to even (section 5.5).

    Raises:
        UsageError: ``c_min`` is not Ultra Low, or ``c_max`` is.
    """
    rules = endpoint_rules()
    limit = rules["ultra_low_concurrency"]
    if not 1 <= c_min <= limit:
        raise UsageError(f"the lowest concurrency is {c_min}; MLPerf Endpoints needs one from 1 to {limit}")
    if c_max <= limit:
        raise UsageError(f"the highest concurrency is {c_max}; MLPerf Endpoints needs one above {limit}")
    part = math.log2(c_max - c_min) / 3
    low_end, medium_end = round(c_min + 2**part), round(c_min + 2 ** (2 * part))
    margin_end = math.ceil((1 + rules["margin_above_c_max"]) * c_max)
    return Regions(c_min, c_max, (c_min + 1, low_end), (low_end + 1, medium_end), (medium_end + 1, c_max), margin_end)


def chosen_points(c_max: int, c_min: int = 1) -> tuple[int, ...]:
    """Concurrencies from ``c_min`` to ``c_max`` that cover every region, about evenly in log2."""
    steps = np.geomspace(c_min, c_max, CHOSEN_POINTS)
    chosen = {round(float(step)) for step in steps}
    bounds = regions(c_min, c_max)
    for start, end in (bounds.low, bounds.medium, bounds.high):
        if start <= end and not any(start <= one <= end for one in chosen):
            chosen.add(end)
    return tuple(sorted(chosen))


def min_seconds(concurrency: int, *, offline: bool = False) -> float:
    """The issue time that a steady-state window of a point must have."""
    rules = endpoint_rules()
    low = not offline and concurrency <= rules["ultra_low_concurrency"]
    return float(rules["min_seconds"]["ultra_low" if low else "other"])


def drawn_rows(rows: int, seed: int) -> Iterator[int]:
    """Endless rows of a data set, drawn with replacement as the reference client draws them."""
    draws = random.Random(seed)
    while True:
        yield draws.randint(0, rows - 1)


def passes_in_order(rows: int, seed: int) -> Iterator[int]:
    """Endless passes over a data set, each in its own order: of the Offline run, where a pass must stay together."""
    draws = random.Random(seed)
    order = list(range(rows))
    while True:
        draws.shuffle(order)
        yield from order


@dataclass(frozen=True, slots=True)
class PointRules:
    """What the rules ask of one point, and how it was run; the field ``rules`` of a point's ``load``."""

    version: str  # of the rules
    offline: bool  # whether it is the Offline run
    concurrency: int  # requests at once; the rows of the data set of the Offline run
    region: str | None  # of the curve; None of the Offline run, and above the margin
    rows: int  # of the data set
    required_rows: int | None  # of the benchmark's; None of a model that is none
    min_seconds: float  # of the window
    seed_set: str | None  # published set, by its id
    salted: bool  # whether every prompt begins with a salt of its own
    token_count: str  # what output tokens were counted with: the model's tokenizer, or what the target reports
    streamed: bool  # whether answers came as streams
    over_http: bool  # whether the target is a server
    most_open: int | None  # requests that the client keeps open at most; None: as many as asked for


def judge_point(rules: PointRules, requests: pa.Table) -> dict[str, Any]:
    """The field ``ruled`` of a point's ``result.json``: its figures, its window, and the rules that it broke.

    ``requests``: table of ``SampleRow``.
    """
    issued = in_order_of_issue(requests)
    limits = endpoint_rules(rules.version)["steady_state"]
    window = None if rules.offline else find_window(issued, rules.rows, rules.min_seconds, limits)
    samples = Samples.of(requests)
    total = _figures(issued, _elapsed(samples), offline=rules.offline)
    status = _status(rules, window, limits) if window else None
    official = status == "windowable"
    steady = None
    if window is not None and window.passes:
        inside = issued.within(*(rules.rows * (at or 0) for at in (window.start, window.end)))
        steady = _figures(inside, window.seconds, offline=False)
    return {
        **asdict(rules),
        "status": status,
        "window": asdict(window) if window else None,
        "basis": "steady state" if official else "total",
        "official": steady if official else total,
        "total": total,
        "steady": steady,
        "requests_issued": len(samples),
        "requests_completed": int(samples.completed.sum()),
        "issue_seconds": float(issued.issued[-1] - issued.issued[0]) if len(issued.issued) else 0.0,
        "broken": _broken(rules, samples, window, status, total),
    }


def in_order_of_issue(requests: pa.Table) -> Requests:
    """The requests of a point with the times that the rules define: from issue, and per token after the first frame."""
    samples = Samples.of(requests)
    order = np.argsort(samples.sent, kind="stable")
    first_tokens = np.nan_to_num(numbers(requests["first_tokens"]), nan=1.0)
    later = samples.output_tokens - first_tokens
    tpot = np.full(len(samples), np.nan)
    np.divide(samples.last - samples.first, later, out=tpot, where=samples.completed & (later > 0))
    tpot[tpot <= 0] = np.nan
    values = (
        samples.sent,
        samples.first - samples.sent,
        tpot,
        samples.last - samples.sent,
        np.where(samples.completed, samples.output_tokens, 0),
    )
    return Requests(*(one[order] for one in values))


def _elapsed(samples: Samples) -> float:
    ends = samples.last[np.isfinite(samples.last)]
    return float(ends.max() - samples.sent.min()) if len(ends) else 0.0


def _figures(requests: Requests, seconds: float, *, offline: bool) -> dict[str, float | None]:
    tpot, ttft = (lower_percentile(values, 0.9) for values in (requests.tpot, requests.ttft))
    known = not offline and math.isfinite(tpot)
    return {
        "system_tps": float(requests.output_tokens.sum()) / seconds if seconds > 0 else None,
        "tpot_p90_ms": 1000 * tpot if known else None,
        "tps_per_user": 1 / tpot if known and tpot > 0 else None,
        "ttft_p90_ms": 1000 * ttft if known and math.isfinite(ttft) else None,
        "seconds": seconds,
    }


def _status(rules: PointRules, window: Window, limits: Mapping[str, Any]) -> str:
    """Coverage by section 4.4."""
    if not window.super_passes:
        return "partial_dataset"
    if window.passes < limits["super_passes"]:
        return "insufficient_passes"
    needed = max(rules.min_seconds, window.needed_seconds)
    return "windowable" if window.seconds >= needed else "insufficient_duration"


def _broken(
    rules: PointRules, samples: Samples, window: Window | None, status: str | None, total: Mapping[str, float | None]
) -> list[Reason]:
    found: list[Reason] = []
    if window is None:
        seconds = total["seconds"] or 0.0
        if seconds < rules.min_seconds:
            found.append(shortfall("MIN_DURATION", seconds, rules.min_seconds))
        if rules.most_open is not None and rules.most_open < rules.rows:
            found.append(reason("OFFLINE_NOT_AT_ONCE", most_open=rules.most_open, rows=rules.rows))
    elif status == "insufficient_duration":
        needed = max(rules.min_seconds, window.needed_seconds)
        found.append(shortfall("SHORT_WINDOW", window.seconds, needed, super_passes=window.passes))
    elif status in ("insufficient_passes", "partial_dataset"):
        least = endpoint_rules(rules.version)["steady_state"]["super_passes"]
        what = {"super_passes": window.super_passes, "rows": rules.rows, "cropped": window.cropped}
        drifting = [name for name, state in (window.states or {}).items() if state != "Plateau"]
        found.append(reason("NO_STEADY_STATE", required=least, drifting=drifting or None, **what))
    if len(samples) % rules.rows or not len(samples):
        found.append(reason("PARTIAL_PASS", issued=len(samples), rows=rules.rows))
    if int(samples.completed.sum()) < rules.rows:
        found.append(shortfall("MIN_SAMPLES", int(samples.completed.sum()), rules.rows))
    if rules.required_rows is None:
        found.append(reason("NOT_A_BENCHMARK", models=list(endpoint_rules(rules.version)["models"])))
    elif rules.rows != rules.required_rows:
        found.append(shortfall("DATA_SET_SIZE", rules.rows, rules.required_rows))
    if rules.region is None and not rules.offline:
        found.append(reason("OUTSIDE_REGIONS", concurrency=rules.concurrency))
    if rules.seed_set is None:
        found.append(reason("SEED_SET"))
    if not rules.salted:
        found.append(reason("NOT_SALTED"))
    if rules.token_count != "tokenizer":
        found.append(reason("TOKENS_NOT_COUNTED"))
    if not rules.over_http:
        found.append(reason("NOT_AN_ENDPOINT"))
    if not rules.streamed and not rules.offline:
        found.append(reason("NOT_STREAMED"))
    if not rules.offline and total["tpot_p90_ms"] is None:
        found.append(reason("NO_TPOT"))
    return found


def judge_curve(points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What is asked of a curve as a whole: how many points, where they are, and the Offline run next to C_max.

    ``points``: the fields ``ruled`` of its points.

    Returns:
        ``regions`` (bounds and what each holds), ``reasons``, ``offline_share_of_c_max``.
    """
    rules = endpoint_rules(points[0]["version"])
    closed = [point for point in points if not point["offline"]]
    offline = [point for point in points if point["offline"]]
    levels = sorted({point["concurrency"] for point in closed})
    found: list[Reason] = []
    least = rules["fewest_points"] if offline else rules["fewest_points_without_offline_run"]
    count = len(levels) + len(offline)
    if count < least:
        found.append(shortfall("FEW_POINTS", count, least))
    if count > rules["most_points"]:
        found.append(shortfall("MANY_POINTS", count, rules["most_points"]))
    bounds = regions(levels[0], levels[-1]) if levels and _spans(levels, rules) else None
    if bounds is None:
        found.append(reason("CURVE_SPAN", limit=rules["ultra_low_concurrency"]))
    held = {region: [one for one in levels if bounds and bounds.of(one) == region] for region in REGION_TITLES}
    if bounds is not None:
        held[ULTRA_LOW] = [one for one in levels if one <= rules["ultra_low_concurrency"]]
        found += [
            reason("REGION_EMPTY", region=REGION_TITLES[region])
            for region in (ULTRA_LOW, LOW, MEDIUM, HIGH)
            if not held[region]
        ]
    share = None
    if len(offline) != 1:
        found.append(reason("OFFLINE_RUNS", found=len(offline)))
    elif closed:
        highest = [point for point in closed if point["concurrency"] == levels[-1]]
        top = max(point["official"]["system_tps"] or 0.0 for point in highest)
        share = (offline[0]["official"]["system_tps"] or 0.0) / top if top else None
        if share is None or share < rules["offline_share_of_c_max"]:
            found.append(shortfall("OFFLINE_BELOW_C_MAX", share or 0.0, rules["offline_share_of_c_max"]))
        if offline[0]["concurrency"] < levels[-1]:
            found.append(shortfall("OFFLINE_CONCURRENCY", offline[0]["concurrency"], levels[-1]))
    return {
        "rules": points[0]["version"],
        "c_min": levels[0] if levels else None,
        "c_max": levels[-1] if levels else None,
        "regions": asdict(bounds) if bounds else None,
        "held": held,
        "offline_share_of_c_max": share,
        "reasons": found,
    }


def _spans(levels: Sequence[int], rules: Mapping[str, Any]) -> bool:
    limit: int = rules["ultra_low_concurrency"]
    return levels[0] <= limit < levels[-1]


def judged_sweep(runs: Sequence[Run], name: str) -> dict[str, Any]:
    """The document of a sweep, as ``summarise_sweep``, with what the rules that its points claim ask of the curve."""
    document, results = summarise_sweep(runs, name), [run.result for run in runs]
    points = [result["ruled"] for result in results if result.get("ruled")]
    if not points:
        return document
    curve = judge_curve(points)
    more = [{"run": "the curve", **one} for one in curve["reasons"]]
    names = ("concurrency", "offline", "region", "status", "basis", "official", "min_seconds", "window")
    curve["points"] = [
        {name: point[name] for name in names} | {"verdict": result["verdict"], "run": name_of(result)}
        for point, result in zip(points, (one for one in results if one.get("ruled")), strict=True)
    ]
    verdict = "INVALID" if more and document["verdict"] in ("VALID", "MEASURED") else document["verdict"]
    return {**document, "verdict": verdict, "reasons": [*document["reasons"], *more], "endpoints": curve}


def name_of(result: Mapping[str, Any]) -> str:
    """What a point is called: its concurrency, or the Offline run."""
    load = result["load"]
    return OFFLINE if load["rules"]["offline"] else f"{load['value']:g}"
