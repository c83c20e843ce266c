"""A run over time: total and per-node rates, latencies, events, samples, engine utilisation, power and clocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from megatoken.analysis.series import gpu_errors, numbers, tokens_from_start, totals_over_time
from megatoken.analysis.statistics import Samples, leading_rates
from megatoken.files import mapping, mappings
from megatoken.hardware.nvml import HARMFUL_REASONS, words_of
from megatoken.report.blocks import Figure
from megatoken.report.curves import FAR_LIMIT, level, panels_chart, rate, stairs, time_chart
from megatoken.report.plots import Between, Line, Mark, Panel
from megatoken.report.scales import Floats
from megatoken.report.views.goodput import Limits
from megatoken.runs.run import Run
from megatoken.text import is_number, number

if TYPE_CHECKING:
    import pyarrow as pa

NAMED_NODES = 4
NODE_SPANS = 120
SENSORS = (
    ("Clock", "MHz", "clock_mhz"),
    ("Temperature", "°C", "temperature_celsius"),
    ("Memory temperature", "°C", "memory_temperature_celsius"),
    ("Power of the processors", "W", "package_power_watts"),
)
STALLS = (
    ("for a core", "cpu_stalled_share"),
    ("for memory", "memory_stalled_share"),
    ("for a disk", "disk_stalled_share"),
)
MOST_EVENTS = 8  # marked on the chart; tables have all of them
GROUP, MOST_GROUPS = 5, 60  # samples of a group at least, and groups on a chart
SHORTEST_PAUSE_SECONDS, USUAL_GAPS = 5.0, 4.0


def time_figures(run: Run, samples: Samples, limits: Sequence[Limits]) -> Iterator[Figure]:
    """Charts of ``series.parquet``; none where it has fewer than two rows."""
    if len(run.series) < 2:
        return
    columns = ["output_tokens", "in_flight", "waiting", "batched_tokens", "max_batched_tokens", "pages_free", "pages"]
    times, tokens, in_flight, waiting, tokens_of_step, budget, pages_free, pages = totals_over_time(run.series, columns)
    average = leading_rates(run.result)["output_tokens_per_second"]
    window = run.result.get("steady_window_seconds")
    output = Panel(
        "tokens/s",
        [rate("output tokens each second", times, tokens)],
        [Mark(f"completed samples, average {number(average)} tokens/s", average)] if average else [],
        title="Output, tokens/s",
    )
    happened = [*events(run.result), *pauses(times), *hardware_events(run.series)]
    yield panels_chart(
        "Throughput and latency over time",
        [output, *_latency_panels(samples, limits, offline=run.result.get("scenario") == "offline")],
        window=(window[0], window[1]) if window else None,
        events=sorted(happened, key=lambda mark: mark.at)[:MOST_EVENTS],
    )
    yield from _nodes(run.series)
    yield time_chart("Samples being computed", "samples", [level("samples", times, in_flight - waiting)])
    if np.isfinite(pages).any():  # an endpoint does not report its replicas
        yield time_chart(
            "Engine utilisation",
            "%",
            [
                level("token budget of a step", times, _percent(tokens_of_step, budget)),
                level("cache pages", times, _percent(pages - pages_free, pages)),
            ],
            y_max=100,
        )
    yield from _telemetry(run.series)


def _latency_panels(samples: Samples, limits: Sequence[Limits], *, offline: bool) -> Iterator[Panel]:
    """TTFT and TPOT of groups of completed samples, in the order in which they had their first or last token."""
    done = samples.only(samples.completed & np.isfinite(samples.first))
    latencies = [
        (
            "Time per output token",
            "ms",
            done.last,
            1000 * done.known_tpot,
            [(one.name, one.tpot_seconds) for one in limits],
        )
    ]
    if not offline:
        firsts = [(one.name, one.ttft_seconds) for one in limits]
        latencies.insert(0, ("Time to first token", "s", done.first, done.ttft, firsts))
    for title, unit, ends, values, known in latencies:
        scale = 1000 if unit == "ms" else 1
        there = np.isfinite(values)
        if (count := min(MOST_GROUPS, int(there.sum()) // GROUP)) < 2:
            continue
        order = np.argsort(ends[there], kind="stable")
        groups = list(zip(*(np.array_split(one[there][order], count) for one in (ends, values)), strict=True))
        x = np.array([float(group.mean()) for group, _ in groups])
        highest = np.array([float(group.max()) for _, group in groups])
        drawn, beyond = [], []
        for name, seconds in known:
            if seconds is not None:
                text = f"{scale * seconds:g} {unit}"
                if scale * seconds <= FAR_LIMIT * float(highest.max()):
                    drawn.append(Mark(f"{name}, {text}", scale * seconds, sign=f"limit {text}"))
                else:
                    beyond.append(f"{name}, {text}, beyond the axis")
        yield Panel(
            unit,
            [Line(f"{title}, median of a group", x, np.array([float(np.median(group)) for _, group in groups])),
             Line(f"{title}, highest of a group", x, highest)],
            drawn,
            title=f"{title}, {unit}",
            beyond=beyond,
            first_key=1,
        )  # fmt: skip


def events(result: Mapping[str, Any]) -> Iterator[Mark]:
    """What happened to the run, as marks on the axis of time: replicas lost and joined, a soak that went on later."""
    rack, stops = mapping(result.get("rack")), mappings(mapping(result.get("soak")).get("interruptions"))
    happened = [
        *((one, f"{one.get('node')} lost") for one in mappings(rack.get("lost"))),
        *((one, f"{one.get('node')} joined") for one in mappings(rack.get("joined"))),
        *((one, f"stopped, resumed after {number(one.get('gap_seconds'))} s") for one in stops),
    ]
    for one, name in happened:
        at = one.get("at_seconds")
        if is_number(at) and at >= 0:
            yield Mark(f"{name} at {number(float(at))} s", float(at), upright=True, event=True)


def pauses(times: Floats) -> Iterator[Mark]:
    """Gaps between the ``times`` [N] of readings, of which one is due each second: process or machine stood still."""
    gaps = np.diff(times)
    longest = max(SHORTEST_PAUSE_SECONDS, USUAL_GAPS * float(np.median(gaps))) if len(gaps) else 0.0
    for at, gap in zip(times[:-1].tolist(), gaps.tolist(), strict=True):
        if gap > longest:
            yield Mark(f"no reading for {number(gap)} s from {number(at)} s", at, upright=True, event=True)


def hardware_events(series: pa.Table) -> list[Mark]:
    """What the GPUs reported: when a harmful reason for low clocks began, and the first of each kind of error."""
    times, reasons = numbers(series["elapsed_seconds"]), numbers(series["clock_reasons"])
    began: dict[str, float] = {}
    for at, mask in sorted(zip(times, reasons, strict=True)):
        for words in words_of(int(mask) & HARMFUL_REASONS) if np.isfinite(mask) else ():
            began.setdefault(f"slowed down by {words}", float(at))
    for error in gpu_errors(series):
        began.setdefault(f"{error['kind']}, {error['replica']}", error["begins_seconds"])
    first = sorted(began.items(), key=lambda item: item[1])[:MOST_EVENTS]
    return [Mark(f"{name} from {number(at)} s", at, upright=True, event=True) for name, at in first]


def _nodes(series: pa.Table) -> Iterator[Figure]:
    """The rate of every node: a curve each, or the range from slowest to fastest where they are many."""
    by_node = _by_node(series)
    if len(by_node) < 2:
        return
    if len(by_node) <= NAMED_NODES:
        lines = [rate(name, *totals_over_time(rows, ["output_tokens"])) for name, rows in by_node.items()]
        yield time_chart("Output tokens of each node", "tokens/s", lines)
        return
    longest = max(float(numbers(rows["elapsed_seconds"]).max()) for rows in by_node.values())
    edges = np.linspace(0, longest, NODE_SPANS + 1)
    rates = np.array([_growth(rows, edges) for rows in by_node.values()])
    names = list(by_node)
    slowest = int(rates.mean(axis=1).argmin())
    all_nodes = stairs("least", edges, rates.min(axis=0))
    yield time_chart(
        "Output tokens of each node",
        "tokens/s",
        [
            stairs("median node", edges, np.median(rates, axis=0)),
            stairs(f"slowest: {names[slowest]}", edges, rates[slowest]),
        ],
        between=Between(f"all {len(names)} nodes", all_nodes.x, all_nodes.y, np.repeat(rates.max(axis=0), 2)),
    )


def _telemetry(series: pa.Table) -> Iterator[Figure]:
    """Power; the extremes of other sensors, because one slow GPU or node delays the others."""
    marks = hardware_events(series)
    sources = (("GPUs only", "power_watts"), ("whole system, meter", "system_power_watts"))
    powers = [(name, column, rows) for name, column in sources if len(rows := _known(series, column)) > 1]
    if powers:
        lines = [level(name, *totals_over_time(rows, [column])) for name, column, rows in powers]
        yield time_chart("Power", "W, all replicas", lines, marks=marks)
    for title, unit, column in SENSORS:
        known = _known(series, column)
        if len(known) > 1:
            times, least, most = _extremes(numbers(known["elapsed_seconds"]), numbers(known[column]))
            lines = [level("lowest", times, least), level("highest", times, most)]
            yield time_chart(title, unit, lines if (least != most).any() else [level(title, times, least)], marks=marks)
    stalled = [(name, column, _known(series, column)) for name, column in STALLS]
    lines = []
    for name, column, rows in stalled:
        if len(rows) > 1:
            times, _, most = _extremes(numbers(rows["elapsed_seconds"]), numbers(rows[column]))
            lines.append(level(name, times, 100 * most))
    if lines:
        yield time_chart("Time in which tasks of the node waited (PSI)", "%", lines, y_max=100)


def _extremes(times: Floats, values: Floats) -> tuple[Floats, Floats, Floats]:
    """Times [M], and the least and largest of ``values`` [N] at each, rows within one second taken together."""
    moments, starts = np.unique(np.sort(times).round(), return_index=True)
    ordered = values[np.argsort(times, kind="stable")]
    return moments, np.minimum.reduceat(ordered, starts), np.maximum.reduceat(ordered, starts)


def _growth(rows: pa.Table, edges: Floats) -> Floats:
    reached = np.interp(edges, *tokens_from_start(rows))
    growth: Floats = np.diff(reached).clip(0) / np.diff(edges)  # as ``rate`` draws it
    return growth


def _by_node(series: pa.Table) -> dict[str, pa.Table]:
    import pyarrow.compute as pc

    names = sorted(name for name in series["node"].unique().to_pylist() if name is not None)
    return {name: series.filter(pc.equal(series["node"], name)) for name in names}


def _known(series: pa.Table, column: str) -> pa.Table:
    return series.filter(series[column].is_valid())


def _percent(part: Floats, whole: Floats) -> Floats:
    share = np.zeros_like(part)
    np.divide(100 * part, whole, out=share, where=whole > 0)
    return share
