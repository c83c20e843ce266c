"""Charts as inline SVG: no library, no script, colours from the page's style sheet (light, dark, paper).

A chart is drawn on 400 x 230 units, so that its letters stay readable when a phone shows it at 340 pixels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

WIDTH, HEIGHT = 400, 230
LEFT, RIGHT, TOP, BOTTOM = 48, 16, 12, 40
MAX_POINTS = 240

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Line:
    """One curve: ``x`` and ``y`` [N] of equal length."""

    name: str
    x: Floats
    y: Floats


@dataclass(frozen=True, slots=True)
class Mark:
    """A horizontal reference with its words above it."""

    name: str
    y: float


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    x_from_zero: bool = True,
    y_max: float | None = None,
    band: tuple[float, float] | None = None,
    mark: Mark | None = None,
    identifier: str,
) -> str:
    """A figure with one curve or two, an optional shaded ``band`` of x and a reference ``mark``."""
    x_low, x_top = 0.0, _top(line.x for line in lines)
    x_ticks = ticks(x_low, x_top)
    if not x_from_zero:
        x_ticks = ticks(min(float(line.x.min()) for line in lines), x_top)
        x_low, x_top = x_ticks[0], x_ticks[-1]
    y_ticks = ticks(0.0, y_max or max(_top(line.y for line in lines), mark.y if mark else 0.0))
    y_top = y_max or y_ticks[-1]
    x_pixels, y_pixels = (WIDTH - LEFT - RIGHT) / (x_top - x_low), (HEIGHT - TOP - BOTTOM) / y_top

    def x_at(value: float) -> str:
        return f"{LEFT + (value - x_low) * x_pixels:.1f}"

    def y_at(value: float) -> str:
        return f"{HEIGHT - BOTTOM - value * y_pixels:.1f}"

    parts = []
    if band:
        parts.append(
            f'<rect class="band" x="{x_at(band[0])}" y="{TOP}" width="{(band[1] - band[0]) * x_pixels:.1f}"'
            f' height="{HEIGHT - TOP - BOTTOM}"/>'
        )
    for value in (tick for tick in y_ticks if tick <= y_top):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y_at(value)}" y2="{y_at(value)}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 6}" y="{y_at(value)}" dy="0.35em">{tick_text(value)}</text>')
    for value in (tick for tick in x_ticks if tick <= x_top):
        parts.append(
            f'<text class="tick middle" x="{x_at(value)}" y="{HEIGHT - BOTTOM + 16}">{tick_text(value)}</text>'
        )
    for number, line in enumerate(lines):
        points = " ".join(f"{x_at(x)},{y_at(min(y, y_top))}" for x, y in zip(line.x, line.y, strict=True))
        parts.append(f'<polyline class="curve curve{number}" points="{points}"/>')
    if mark:
        parts.append(f'<line class="mark" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y_at(mark.y)}" y2="{y_at(mark.y)}"/>')
    parts.append(f'<text class="tick end" x="{WIDTH - RIGHT}" y="{HEIGHT - 6}">{escape(x_label)}</text>')
    description = "; ".join(f"{line.name}: {_range(line.y)} {y_label}" for line in lines)
    return (
        f'<figure><figcaption id="{identifier}">{escape(title)}'
        f' <span class="unit">{escape(y_label)}</span></figcaption>'
        f"{_legend(lines, band, mark)}"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{identifier} {identifier}-text">'
        f'<desc id="{identifier}-text">{escape(description)}</desc>{"".join(parts)}</svg></figure>'
    )


def distribution(name: str, values: Floats) -> Line:
    """Share of ``values`` [N] at or below x, in percent, as a curve of at most 201 points."""
    shares = np.linspace(0, 100, 201)
    return Line(name, np.percentile(values, shares), shares)


def rate(name: str, times: Floats, totals: Floats) -> Line:
    """Growth per second of running ``totals`` [N], as a staircase over at most ``MAX_POINTS`` spans."""
    times, totals = np.append(0.0, times), np.append(0.0, totals)
    edges = np.unique(np.linspace(0, len(times) - 1, MAX_POINTS + 1).round().astype(int))
    times, totals = times[edges], totals[edges]
    lengths = np.diff(times)
    growth = np.divide(np.diff(totals), lengths, out=np.zeros_like(lengths), where=lengths > 0)
    return Line(name, np.repeat(times, 2)[1:-1], np.repeat(growth, 2))


def level(name: str, times: Floats, values: Floats) -> Line:
    """``values`` [N] over ``times`` [N], each drawn point the mean of its span when there are more than MAX_POINTS."""
    starts = np.unique(np.linspace(0, len(times), MAX_POINTS, endpoint=False).astype(int))
    counts = np.diff(np.append(starts, len(times)))
    return Line(name, *(np.add.reduceat(column, starts) / counts for column in (times, values)))


def ticks(low: float, top: float) -> list[float]:
    """Four to seven round values that enclose ``low`` to ``top``, in steps of 1, 2, 2.5 or 5 times a power of ten."""
    span = top - low if top > low else abs(top) or 1.0
    magnitude = 10.0 ** math.floor(math.log10(span / 4))
    step = next(magnitude * factor for factor in (1, 2, 2.5, 5, 10) if span / (magnitude * factor) <= 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(max(top, low + step) / step - 1e-9)
    return [step * index for index in range(first, last + 1)]


def tick_text(value: float) -> str:
    """A short label: thousands and millions as k and M, no trailing zeros."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"


def _top(columns: Iterable[Floats]) -> float:
    return max(float(column.max()) for column in columns) or 1.0


def _range(values: Floats) -> str:
    return f"from {values.min():.4g} to {values.max():.4g}"


def _legend(lines: Sequence[Line], band: tuple[float, float] | None, mark: Mark | None) -> str:
    """Names of what is drawn; none for a single unmarked curve, whose name the title is."""
    entries = [(f"key{number}", line.name) for number, line in enumerate(lines)]
    if mark:
        entries.append(("keymark", mark.name))
    if band:
        entries.append(("keyband", "steady window"))
    if len(entries) == 1:
        return ""
    items = "".join(f'<li><span class="key {key}"></span>{escape(name)}</li>' for key, name in entries)
    return f'<ul class="legend">{items}</ul>'
