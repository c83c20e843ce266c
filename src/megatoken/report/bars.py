"""Charts of named values, one row each: bars, a waterfall, a tornado, dots. Inline SVG as in ``curves``.

Every row has its name and number as text above or next to the drawing, so that no reader depends on a colour, length or
pattern.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from megatoken.report.blocks import Column, Figure, Table
from megatoken.report.scales import WIDTH, box, rule, shortened, text, tick_text, ticks
from megatoken.report.words import WEAK, figure_text
from megatoken.text import precise

ROW, BAR = 40, 12
DOT_ROW = 17
DOT_LEFT, DOT_RIGHT = 126, 20
ROW_LETTERS, DOT_LETTERS = 50, 15
DRAWN_SWINGS = 10
BAR_ROOM = 262  # of the width; behind a bar stands its number
MARGIN = 62  # left and right of a tornado, for the results
STATE_KEYS = {"verified": "bar", "measured": "bar", "unverified": "bar hatched"}
KEYS = {
    "bar": ("keybar", "verified or measured"),
    "bar hatched": ("keyhatched", "unverified"),
    "bar outlined": ("keyoutlined", "estimate, nameplate, assumed, ..."),
}


@dataclass(frozen=True, slots=True)
class Bar:
    """A value and how sure it is: ``state`` is verified, measured, unverified, assumed or the like, or empty.

    ``rounded``: shown with three significant digits if its state is weak.
    """

    name: str
    value: float
    state: str = ""
    rounded: bool = False


@dataclass(frozen=True, slots=True)
class Swing:
    """The results at the ``low`` and ``high`` value of one input; the values are texts."""

    name: str
    low: str
    high: str
    result_low: float
    result_high: float


@dataclass(frozen=True, slots=True)
class Dot:
    """A node and its value; ``apart`` marks one that belongs to a slower group."""

    name: str
    value: float
    apart: bool = False


def bar_chart(title: str, unit: str, bars: Sequence[Bar]) -> Figure:
    """Values from zero up; solid, hatched or outlined bars and text show the state."""
    top = max(0.0, *(bar.value for bar in bars)) or 1.0
    parts = []
    for row, bar in enumerate(bars):
        parts += _bar_row(row, bar.name, bar.state, (0.0, max(bar.value, 0.0) / top * BAR_ROOM), _shown(bar))
    words = "; ".join(f"{bar.name}: {_shown(bar)} {unit} {bar.state}".rstrip() for bar in bars)
    return _bars_figure(title, unit, parts, bars, words)


def waterfall(title: str, unit: str, steps: Sequence[Bar], total: str) -> Figure:
    """Parts that add up, each bar starting where the one above ended, and their sum under the name ``total``."""
    reached = list(accumulate((step.value for step in steps), initial=0.0))
    low, whole = min(reached), reached[-1]
    span = (max(reached) - low) or 1.0

    def ends(start: float, end: float) -> tuple[float, float]:
        first, last = sorted((start, end))
        return (first - low) / span * BAR_ROOM, (last - low) / span * BAR_ROOM

    parts = []
    for row, (step, (start, end)) in enumerate(zip(steps, pairwise(reached), strict=True)):
        share = f" · {_shown(replace(step, value=100 * step.value / whole))} %" if whole > 0 else ""
        parts += _bar_row(row, step.name, step.state, ends(start, end), _shown(step) + share)
    weak = next((step.state for step in steps if step.rounded and step.state in WEAK), "")
    last = Bar(total, whole, weak, rounded=True)
    parts += _bar_row(len(steps), total, "", ends(0.0, whole), _shown(last), style="bar sum", weight=" strong")
    bars = [*steps, last]
    words = "; ".join(f"{bar.name}: {_shown(bar)} {unit}" for bar in bars)
    return _bars_figure(title, unit, parts, bars, words)


def tornado(title: str, unit: str, base: float, swings: Sequence[Swing], state: str = "") -> Figure:
    """The inputs that move a result most, widest first: the result at the low and high value of each, from ``base``.

    The widest ten are drawn; the numbers behind the chart have all. ``state`` is that of the results.
    """
    swings = sorted(swings, key=lambda swing: -abs(swing.result_high - swing.result_low))
    ends = [base, *(result for swing in swings for result in (swing.result_low, swing.result_high))]
    low, span = min(ends), (max(ends) - min(ends)) or 1.0

    def x_at(value: float) -> float:
        return MARGIN + (value - low) / span * (WIDTH - 2 * MARGIN)

    parts = []
    drawn = swings[:DRAWN_SWINGS]
    for row, swing in enumerate(drawn):
        parts += _head(row, swing.name, f"{swing.low} … {swing.high}")
        for result, style in ((swing.result_low, "bar hatched"), (swing.result_high, "bar")):
            start, end = sorted((x_at(base), x_at(result)))
            parts.append(_bar(row, start, end, style))
        least, most = sorted((swing.result_low, swing.result_high))
        parts.append(text(x_at(min(least, base)) - 5, ROW * row + 28, figure_text(least, state), "tick end"))
        parts.append(text(x_at(max(most, base)) + 5, ROW * row + 28, figure_text(most, state)))
        parts.append(rule(x_at(base), ROW * row + 15, x_at(base), ROW * row + 33, "mark"))
    height = ROW * len(drawn) + 20
    parts.append(text(x_at(base), height - 3, f"{figure_text(base, state)} at the planned inputs", "tick middle"))
    results = [tuple(figure_text(end, state) for end in (swing.result_low, swing.result_high)) for swing in swings]
    rows = tuple((swing.name, swing.low, swing.high, *ends) for swing, ends in zip(swings, results, strict=True))
    numeric = tuple(Column(f"Result at {end}", unit, numeric=True) for end in ("low", "high"))
    return Figure(
        title=title,
        unit=unit,
        drawing="".join(parts),
        height=height,
        description=f"{figure_text(base, state)} {unit} at the planned inputs; "
        + "; ".join(f"{name}: {low} to {high} {unit}" for name, _, _, low, high in rows),
        data=Table(f"{title}, {unit}", (Column("Input"), Column("Low"), Column("High"), *numeric), rows),
        legend=(("keyhatched", "input at its low value"), ("keybar", "input at its high value")),
        on_terminal=True,
    )


def dot_chart(title: str, unit: str, dots: Sequence[Dot], marks: Sequence[tuple[str, float]] = ()) -> Figure:
    """One dot a row on an axis that need not start at zero, with upright references such as mean and median."""
    values = [*(dot.value for dot in dots), *(value for _, value in marks)]
    steps = ticks(min(values), max(values))
    low, top = steps[0], steps[-1]
    floor = DOT_ROW * len(dots) + 8

    def x_at(value: float) -> float:
        return DOT_LEFT + (value - low) / (top - low) * (WIDTH - DOT_LEFT - DOT_RIGHT)

    parts = []
    for step in steps:
        parts.append(rule(x_at(step), 4, x_at(step), floor))
        parts.append(text(x_at(step), floor + 15, tick_text(step), "tick middle"))
    for index, (_, value) in enumerate(marks):
        parts.append(rule(x_at(value), 4, x_at(value), floor, f"mark mark{index}"))
    for row, dot in enumerate(dots):
        x, y = x_at(dot.value), DOT_ROW * row + 13
        parts.append(text(DOT_LEFT - 8, y + 4, shortened(dot.name, DOT_LETTERS, keep_end=True), "dotname end"))
        parts.append(
            f'<path class="dot apart" d="M{x:.1f} {y - 5.5:.1f}l5.5 5.5l-5.5 5.5l-5.5 -5.5z"/>'
            if dot.apart
            else f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
        )
    apart = [dot.name for dot in dots if dot.apart]
    least, most = (precise(choose(dot.value for dot in dots)) for choose in (min, max))
    groups = (("keydot", "node"), ("keydot apart", "slow group")) if apart else ()
    keys = ((f"keymark keymark{index}", f"{name} {precise(value)}") for index, (name, value) in enumerate(marks))
    return Figure(
        title=title,
        unit=unit,
        drawing="".join(parts),
        height=floor + 22,
        description=f"{len(dots)} from {least} to {most} {unit}"
        + (f"; slow group: {', '.join(apart)}" if apart else ""),
        data=_data(
            title,
            unit,
            "Node",
            [(dot.name, precise(dot.value)) for dot in dots],
            "Group",
            ["slow" if dot.apart else "" for dot in dots],
        ),
        legend=(*groups, *keys),
    )


def _shown(bar: Bar) -> str:
    return figure_text(bar.value, bar.state) if bar.rounded else precise(bar.value)


def _bar_row(
    row: int, name: str, state: str, ends: tuple[float, float], value: str, *, style: str = "", weight: str = ""
) -> list[str]:
    """A bar from one end to the other, its name and state above it, its value behind it."""
    return [
        *_head(row, name, state, weight),
        _bar(row, *ends, style or _style(state)),
        text(ends[1] + 5, ROW * row + 28, value, "value"),
    ]


def _head(row: int, name: str, aside: str, weight: str = "") -> list[str]:
    """The line above a bar: a name to the left, something short to the right."""
    name = shortened(name, max(ROW_LETTERS - len(aside), 12))
    return [text(0, ROW * row + 12, name, f"name{weight}"), text(WIDTH, ROW * row + 12, aside, "value end")]


def _bar(row: int, start: float, end: float, style: str) -> str:
    return box(start, ROW * row + 18, end - start, BAR, style)


def _style(state: str) -> str:
    return STATE_KEYS.get(state, "bar outlined") if state else "bar"


def _bars_figure(title: str, unit: str, parts: Sequence[str], bars: Sequence[Bar], description: str) -> Figure:
    states = {_style(bar.state) for bar in bars if bar.state}
    legend = tuple(words for style, words in KEYS.items() if style in states)
    data = _data(title, unit, "Name", [(bar.name, _shown(bar)) for bar in bars], "State", [bar.state for bar in bars])
    return Figure(title, unit, "".join(parts), ROW * len(bars), description, data, legend)


def _data(
    title: str, unit: str, name: str, values: Sequence[tuple[str, str]], more: str, words: Sequence[str]
) -> Table:
    """The numbers behind a chart, with the column ``more`` where it has any ``words``."""
    rows: list[tuple[str, ...]] = list(values)
    columns: tuple[Column, ...] = (Column(name), Column("Value", unit, numeric=True))
    if any(words):
        columns, rows = (*columns, Column(more)), [(*row, word) for row, word in zip(rows, words, strict=True)]
    return Table(f"{title}, {unit}", columns, tuple(rows))
