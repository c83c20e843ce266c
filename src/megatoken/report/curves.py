"""Line charts as inline SVG: no library, no script, colours from the page's style sheet (light, dark, paper)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatoken.report.blocks import Column, Figure, Table
from megatoken.report.scales import (
    LEFT,
    RIGHT,
    WIDE,
    WIDE_LEFT,
    WIDTH,
    Floats,
    box,
    rule,
    text,
    tick_text,
    ticks,
    top_of,
)
from megatoken.text import number, precise

HEIGHT, TOP, BOTTOM = 230, 12, 40
MAX_POINTS = 240
DATA_ROWS = 20
SHARES = (0, 5, 10, 25, 50, 75, 90, 95, 99, 100)


@dataclass(frozen=True, slots=True)
class Line:
    """One curve: ``x`` and ``y`` [N] of equal length."""

    name: str
    x: Floats
    y: Floats


@dataclass(frozen=True, slots=True)
class Between:
    """The area from ``low`` to ``high`` [N] over ``x`` [N], such as from the slowest to the fastest node."""

    name: str
    x: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True, slots=True)
class Label:
    """Words next to a point of a curve."""

    x: float
    y: float
    text: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A straight reference: at a height, or ``upright`` at a place of the x axis."""

    name: str
    at: float
    upright: bool = False


def time_chart(
    title: str,
    unit: str,
    lines: Sequence[Line],
    *,
    y_max: float | None = None,
    between: Between | None = None,
    window: tuple[float, float] | None = None,
    marks: Sequence[Mark] = (),
    wide: bool = False,
) -> Figure:
    """Values in ``unit`` over seconds since the start; ``window`` shades the steady part of the run."""
    spans = np.linspace(0, top_of([line.x for line in lines]), DATA_ROWS + 1)
    curves = [*lines, *([Line(f"{between.name}, least", between.x, between.low)] if between else [])]
    curves += [Line(f"{between.name}, most", between.x, between.high)] if between else []
    columns = [_means(line, spans) for line in curves]
    data = Table(
        caption=f"{title}: means over {DATA_ROWS} spans of equal length",
        columns=(Column("Until", "s", numeric=True), *(Column(line.name, unit, numeric=True) for line in curves)),
        rows=tuple(
            (precise(float(end)), *(precise(float(column[row])) for column in columns))
            for row, end in enumerate(spans[1:])
        ),
    )
    return line_chart(
        title,
        unit,
        "seconds since the start",
        lines,
        data,
        x_range=(0.0, float(spans[-1])),
        y_max=y_max,
        between=between,
        window=window,
        marks=marks,
        wide=wide,
    )


def distribution_chart(
    title: str,
    unit: str,
    samples: Sequence[tuple[str, Floats]],
    *,
    x_label: str,
    from_zero: bool = True,
    limits: Sequence[Mark] = (),
) -> Figure:
    """Share of samples at or below each value: one curve for each name and its values [N] in ``unit``.

    ``limits`` are drawn upright, and the axis reaches the last of them.
    """
    lines = [distribution(name, values) for name, values in samples]
    data = Table(
        caption=f"{title}: percentiles",
        columns=(Column("Share of samples", "%", numeric=True), *(Column(n, unit, numeric=True) for n, _ in samples)),
        rows=tuple(
            (str(share), *(precise(float(np.percentile(values, share))) for _, values in samples)) for share in SHARES
        ),
    )
    low = 0.0 if from_zero else min(float(line.x.min()) for line in lines)
    low = min([low, *(limit.at for limit in limits)])
    x_range = (low, max([top_of([line.x for line in lines]), *(limit.at for limit in limits)]))
    return line_chart(title, "% of samples at or below", x_label, lines, data, x_range=x_range, y_max=100, marks=limits)


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
    window: tuple[float, float] | None = None,
    marks: Sequence[Mark] = (),
    labels: Sequence[Label] = (),
    dots: bool = False,
    doubling: bool = False,
    wide: bool = False,
) -> Figure:
    """Curves of ``unit`` over ``x_label``, with labelled areas and references; ``data`` is the table behind them.

    ``dots`` draws the points of the curves. With ``doubling``, x are logarithms to the base of 2, and the axis shows
    the numbers.
    """
    x_ticks = [float(power) for power in range(math.floor(x_range[0]), math.ceil(x_range[1]) + 1)] if doubling else []
    x_ticks = x_ticks or ticks(*x_range)
    x_low, x_top = (0.0, x_range[1]) if x_range[0] == 0 else (x_ticks[0], x_ticks[-1])
    heights = [*(line.y for line in lines), *([between.high] if between else [])]
    level_marks = [mark.at for mark in marks if not mark.upright]
    y_ticks = ticks(0.0, y_max or max(top_of(heights), *level_marks, 0.0))
    y_top = y_max or y_ticks[-1]
    floor = HEIGHT - BOTTOM
    left, edge = (WIDE_LEFT, WIDE - RIGHT) if wide else (LEFT, WIDTH - RIGHT)

    def x_at(value: float) -> float:
        return left + (value - x_low) * (edge - left) / (x_top - x_low)

    def y_at(value: float) -> float:
        return floor - min(value, y_top) * (floor - TOP) / y_top

    def path(x: Floats, y: Floats) -> str:
        return " ".join(f"{x_at(a):.1f},{y_at(b):.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True))

    parts = []
    if window:
        start, end = (x_at(min(second, x_top)) for second in window)
        parts.append(box(start, TOP, end - start, floor - TOP, "window"))
    for value in (tick for tick in y_ticks if tick <= y_top):
        parts.append(rule(left, y_at(value), edge, y_at(value)))
        parts.append(text(left - 6, y_at(value) + 4, tick_text(value), "tick end"))
    parts += [
        text(x_at(value), floor + 16, tick_text(2**value if doubling else value), "tick middle")
        for value in x_ticks
        if value <= x_top
    ]
    if between:
        outline = f"{path(between.x, between.high)} {path(between.x[::-1], between.low[::-1])}"
        parts.append(f'<polygon class="between" points="{outline}"/>')
    for index, line in enumerate(lines):
        parts.append(f'<polyline class="curve curve{index}" points="{path(line.x, line.y)}"/>')
        if dots:
            parts += [_dot(x_at(x), y_at(y), index) for x, y in zip(line.x.tolist(), line.y.tolist(), strict=True)]
    for label in labels:
        right = x_at(label.x) > (edge + left) / 2
        offset, style = (-6, "tick end") if right else (6, "tick")
        parts.append(text(x_at(label.x) + offset, max(y_at(label.y) - 6, TOP + 8), label.text, style))
    for index, mark in enumerate(marks):
        style = f"mark mark{index}"
        if mark.upright:
            at = x_at(min(mark.at, x_top))
            parts.append(rule(at, TOP, at, floor, style))
        else:
            parts.append(rule(left, y_at(mark.at), edge, y_at(mark.at), style))
    parts.append(text(edge, HEIGHT - 6, x_label, "tick end"))
    return Figure(
        title=title,
        unit=unit,
        drawing="".join(parts),
        height=HEIGHT,
        description="; ".join(_range(line, unit, x_label) for line in lines),
        data=data,
        legend=_legend(lines, between, window, marks),
        wide=wide,
    )


def _dot(x: float, y: float, index: int) -> str:
    return f'<circle class="point{index}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>'


def _range(line: Line, unit: str, x_label: str) -> str:
    if unit.startswith("%") and line.y[-1] == 100:
        return f"{line.name}: from {number(float(line.x[0]))} to {number(float(line.x[-1]))} {x_label}"
    return f"{line.name}: from {number(float(line.y.min()))} to {number(float(line.y.max()))} {unit}"


def _legend(
    lines: Sequence[Line], between: Between | None, window: tuple[float, float] | None, marks: Sequence[Mark]
) -> tuple[tuple[str, str], ...]:
    """Names of what is drawn; none for a single unmarked curve, whose name the title is."""
    entries = [(f"key{index}", line.name) for index, line in enumerate(lines)]
    if between:
        entries.append(("keybetween", between.name))
    entries += [(f"keymark keymark{index}", mark.name) for index, mark in enumerate(marks)]
    if window:
        entries.append(("keywindow", "steady window"))
    return () if len(entries) == 1 else tuple(entries)
