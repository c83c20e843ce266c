"""Line charts as inline SVG: no library, colours from the page's style sheet (light, dark, paper)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatoken.report.blocks import Column, Figure, Table
from megatoken.report.plots import Axis, Between, Label, Line, Mark, Panel, axis_labels, numbered, plot
from megatoken.report.scales import LEFT, RIGHT, WIDE, WIDE_LEFT, WIDTH, Floats, ticks, top_of
from megatoken.text import number, precise

HEIGHT, TOP, BOTTOM = 230, 12, 40
FIRST_PANEL, NEXT_PANELS, PANEL_TITLE = 190, 100, 42
MAX_POINTS = 240
DATA_ROWS = 20
BINS = 40
SINCE_START = "seconds since the start"
FAR_LIMIT = 2.0  # a limit so many times beyond the values is named instead of drawn
MARKED_SHARES = (50, 90, 99)
SHARES = (0, 5, 10, 25, 50, 75, 90, 95, 99, 100)


def time_chart(
    title: str,
    unit: str,
    lines: Sequence[Line],
    *,
    y_max: float | None = None,
    between: Between | None = None,
    marks: Sequence[Mark] = (),
) -> Figure:
    """Values in ``unit`` over seconds since the start."""
    curves = [*lines, *([Line(f"{between.name}, least", between.x, between.low)] if between else [])]
    curves += [Line(f"{between.name}, most", between.x, between.high)] if between else []
    spans, data = _spans(title, [(unit, curves)])
    return line_chart(
        title,
        unit,
        SINCE_START,
        lines,
        data,
        x_range=(0.0, float(spans[-1])),
        y_max=y_max,
        between=between,
        marks=marks,
    )


def panels_chart(
    title: str, panels: Sequence[Panel], *, window: tuple[float, float] | None, events: Sequence[Mark]
) -> Figure:
    """Panels below each other over one axis of seconds since the start, over the whole width of the page.

    ``window`` shades the steady part of the run. ``events`` are upright marks in every panel, with their signs in the
    first.
    """
    spans, data = _spans(title, [(panel.unit, panel.lines) for panel in panels])
    axis = Axis(WIDE_LEFT, WIDE - RIGHT, 0.0, float(spans[-1]), SINCE_START, wide=True)
    events = numbered(events)
    unsigned = [replace(event, sign="") for event in events]
    drawn, floor = [], 0.0
    for index, panel in enumerate(panels):
        top = floor + PANEL_TITLE
        floor = top + (NEXT_PANELS if index else FIRST_PANEL)
        marks = [*panel.marks, *(unsigned if index else events)]
        drawn.append(plot(replace(panel, marks=marks), axis, top, floor, window))
    height = int(floor) + BOTTOM
    legend = [
        *((f"key{key}", line.name) for panel in panels for key, line in enumerate(panel.lines, panel.first_key)),
        *((f"keymark keymark{key}", mark.name) for panel in panels for key, mark in enumerate(panel.marks)),
        *(("keymark", words) for panel in panels for words in panel.beyond),
        *(("keyevent", mark.name) for mark in events),
        *([("keywindow", "steady window")] if window else []),
    ]
    return Figure(
        title=title,
        unit="",
        drawing="".join([*drawn, *axis_labels(axis, ticks(0.0, axis.top), floor, height)]),
        height=height,
        description="; ".join(_range(line, panel.unit, SINCE_START) for panel in panels for line in panel.lines),
        data=data,
        legend=tuple(dict.fromkeys(legend)),
        wide=True,
    )


def _spans(title: str, groups: Sequence[tuple[str, Sequence[Line]]]) -> tuple[Floats, Table]:
    """The ends of equal spans of time, and the mean of each curve in each of them; each group has its unit."""
    lines = [line for _, curves in groups for line in curves]
    spans = np.linspace(0, top_of([line.x for line in lines]), DATA_ROWS + 1)
    means = [_means(line, spans) for line in lines]
    columns = (Column(line.name, unit, numeric=True) for unit, curves in groups for line in curves)
    return spans, Table(
        caption=f"{title}: means over {DATA_ROWS} spans of equal length",
        columns=(Column("Until", "s", numeric=True), *columns),
        rows=tuple(
            (precise(float(end)), *(precise(float(column[row])) for column in means))
            for row, end in enumerate(spans[1:])
        ),
    )


def distribution_chart(
    title: str, unit: str, samples: Sequence[tuple[str, Floats]], *, x_label: str, from_zero: bool = True
) -> Figure:
    """Share of samples at or below each value: one curve for each name and its values [N] in ``unit``."""
    lines = [distribution(name, values) for name, values in samples]
    x_range = (0.0 if from_zero else min(float(line.x.min()) for line in lines), top_of([line.x for line in lines]))
    return line_chart(
        title,
        "% of samples at or below",
        x_label,
        lines,
        _percentiles(title, unit, samples),
        x_range=x_range,
        y_max=100,
    )


def histogram_chart(
    title: str,
    unit: str,
    samples: Sequence[tuple[str, Floats]],
    *,
    x_label: str,
    from_zero: bool = True,
    limits: Sequence[Mark] = (),
) -> Figure:
    """How many samples have each value: one curve for each name and its values [N] in ``unit``.

    One curve alone has marks at its percentiles. ``limits`` are drawn upright; one that is further from zero than
    ``FAR_LIMIT`` times the largest value is only named.
    """
    all_values = np.concatenate([values for _, values in samples])
    far = [limit for limit in limits if limit.at > FAR_LIMIT * float(all_values.max())]
    near = [limit for limit in limits if limit not in far]
    low = 0.0 if from_zero else float(all_values.min())
    x_ticks = ticks(min([low, *(limit.at for limit in near)]), max([top_of([all_values]), *(one.at for one in near)]))
    edges = np.linspace(x_ticks[0], x_ticks[-1], BINS + 1)
    lines = [stairs(name, edges, np.histogram(values, edges)[0].astype(float)) for name, values in samples]
    marks = list(near)
    if len(samples) == 1:
        marks += [
            Mark(f"{name}, {number(at)} {unit}", at, upright=True, sign=name)
            for name, at in ((f"p{share}", float(np.percentile(all_values, share))) for share in MARKED_SHARES)
        ]
    axis = Axis(LEFT, WIDTH - RIGHT, x_ticks[0], x_ticks[-1], x_label)
    marks = numbered(marks)
    drawn = plot(Panel("samples", lines, marks, filled=True), axis, TOP, HEIGHT - BOTTOM)
    named = [(f"keymark keymark{index}", mark.name) for index, mark in enumerate(marks[: len(near)])]
    named += [("keymark", f"{mark.name}, beyond the axis") for mark in far]
    return Figure(
        title=title,
        unit="samples",
        drawing="".join([drawn, *axis_labels(axis, x_ticks, HEIGHT - BOTTOM, HEIGHT)]),
        height=HEIGHT,
        description="; ".join(
            f"{name}: from {number(float(values.min()))} to {number(float(values.max()))} {unit}, median"
            f" {number(float(np.median(values)))}"
            for name, values in samples
        ),
        data=_percentiles(title, unit, samples),
        legend=(*([(f"key{n}", line.name) for n, line in enumerate(lines)] if len(lines) > 1 else []), *named),
    )


def _percentiles(title: str, unit: str, samples: Sequence[tuple[str, Floats]]) -> Table:
    return Table(
        caption=f"{title}: percentiles",
        columns=(Column("Share of samples", "%", numeric=True), *(Column(n, unit, numeric=True) for n, _ in samples)),
        rows=tuple(
            (str(share), *(precise(float(np.percentile(values, share))) for _, values in samples)) for share in SHARES
        ),
    )


def distribution(name: str, values: Floats) -> Line:
    """Share of ``values`` [N] at or below x, in percent, as a curve of 201 points."""
    shares = np.linspace(0, 100, 201)
    return Line(name, np.percentile(values, shares), shares)


def rate(name: str, times: Floats, totals: Floats) -> Line:
    """Growth per second of running ``totals`` [N], as a staircase over at most ``MAX_POINTS`` spans.

    Where a total falls, as that of tokens does when a replica is lost with answers under way, the rate is zero.
    """
    times, totals = np.append(0.0, times), np.append(0.0, totals)
    edges = np.unique(np.linspace(0, len(times) - 1, MAX_POINTS + 1).round().astype(int))
    times, totals = times[edges], totals[edges]
    lengths = np.diff(times)
    growth = np.divide(np.diff(totals).clip(0), lengths, out=np.zeros_like(lengths), where=lengths > 0)
    return stairs(name, times, growth)


def stairs(name: str, edges: Floats, heights: Floats) -> Line:
    """A staircase of ``heights`` [N] between ``edges`` [N + 1]."""
    return Line(name, np.repeat(edges, 2)[1:-1], np.repeat(heights, 2))


def level(name: str, times: Floats, values: Floats) -> Line:
    """``values`` [N] over ``times`` [N], each drawn point the mean of its span when there are more than MAX_POINTS."""
    starts = np.unique(np.linspace(0, len(times), MAX_POINTS, endpoint=False).astype(int))
    counts = np.diff(np.append(starts, len(times)))
    return Line(name, *(np.add.reduceat(column, starts) / counts for column in (times, values)))


def _means(line: Line, edges: Floats) -> Floats:
    """Mean height of a curve within each span between ``edges`` [M]: [M - 1]."""
    areas = np.append(0.0, np.cumsum(np.diff(line.x) * (line.y[1:] + line.y[:-1]) / 2))
    reached = np.clip(edges, line.x[0], line.x[-1])
    lengths = np.diff(reached)
    means: Floats = np.divide(
        np.diff(np.interp(reached, line.x, areas)), lengths, out=np.full(len(lengths), np.nan), where=lengths > 0
    )
    return means


def line_chart(
    title: str,
    unit: str,
    x_label: str,
    lines: Sequence[Line],
    data: Table,
    *,
    x_range: tuple[float, float],
    y_max: float | None = None,
    between: Between | None = None,
    marks: Sequence[Mark] = (),
    labels: Sequence[Label] = (),
    dots: bool = False,
    doubling: bool = False,
) -> Figure:
    """Curves of ``unit`` over ``x_label``, with labelled areas and references; ``data`` is the table behind them.

    ``dots`` draws the points of the curves. With ``doubling``, x are logarithms to the base of 2, and the axis shows
    the numbers.
    """
    x_ticks = [float(power) for power in range(math.floor(x_range[0]), math.ceil(x_range[1]) + 1)] if doubling else []
    x_ticks = x_ticks or ticks(*x_range)
    x_low, x_top = (0.0, x_range[1]) if x_range[0] == 0 else (x_ticks[0], x_ticks[-1])
    axis, marks = Axis(LEFT, WIDTH - RIGHT, x_low, x_top, x_label, doubling=doubling), numbered(marks)
    panel = Panel(unit, lines, marks, labels, between, y_max, dots=dots)
    floor = HEIGHT - BOTTOM
    return Figure(
        title=title,
        unit=unit,
        drawing="".join([plot(panel, axis, TOP, floor), *axis_labels(axis, x_ticks, floor, HEIGHT)]),
        height=HEIGHT,
        description="; ".join(_range(line, unit, x_label) for line in lines),
        data=data,
        legend=_legend(lines, between, marks),
    )


def _range(line: Line, unit: str, x_label: str) -> str:
    if unit.startswith("%") and line.y[-1] == 100:
        return f"{line.name}: from {number(float(line.x[0]))} to {number(float(line.x[-1]))} {x_label}"
    return f"{line.name}: from {number(float(line.y.min()))} to {number(float(line.y.max()))} {unit}"


def _legend(lines: Sequence[Line], between: Between | None, marks: Sequence[Mark]) -> tuple[tuple[str, str], ...]:
    """Names of what is drawn; none for a single unmarked curve, whose name the title is."""
    entries = [(f"key{index}", line.name) for index, line in enumerate(lines)]
    if between:
        entries.append(("keybetween", between.name))
    entries += [(f"keymark keymark{index}", mark.name) for index, mark in enumerate(marks)]
    return () if len(entries) == 1 else tuple(entries)
