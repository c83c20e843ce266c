"""Charts of named values, one row each: bars, a waterfall, a tornado, dots. Inline SVG as in ``curves``.

Every row has its name and number as text above or next to the drawing, so that no reader depends on a colour, length or
pattern.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatoken.report.blocks import Column, Figure, Table
from megatoken.report.scales import WIDTH, box, rule, shortened, text, tick_text, ticks
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
    """A value and how sure it is: ``state`` is verified, measured, unverified, assumed or the like, or empty."""

    name: str
    value: float
    state: str = ""


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
        length = max(bar.value, 0.0) / top * BAR_ROOM
        parts += _row(row, bar.name, bar.state)
        parts += [_bar(row, 0.0, length, _style(bar.state)), _value(row, length, precise(bar.value))]
    return Figure(
        title=title,
        unit=unit,
        drawing="".join(parts),
        height=ROW * len(bars),
        description="; ".join(f"{bar.name}: {precise(bar.value)} {unit} {bar.state}".rstrip() for bar in bars),
        data=_data(title, unit, bars),
        legend=_legend(bars),
    )


def waterfall(title: str, unit: str, steps: Sequence[Bar], total: str) -> Figure:
    """Parts that add up, each bar starting where the one above ended, and their sum under the name ``total``."""
    reached = [0.0]
    for step in steps:
        reached.append(reached[-1] + step.value)
    low, top = min(0.0, *reached), max(0.0, *reached)
    span = (top - low) or 1.0

    def ends(start: float, end: float) -> list[float]:
        return [(edge - low) / span * BAR_ROOM for edge in sorted((start, end))]

    parts = []
    for row, (step, start, end) in enumerate(zip(steps, reached, reached[1:], strict=False)):
        left, right = ends(start, end)
        share = f" · {precise(100 * step.value / reached[-1])} %" if reached[-1] > 0 else ""
        parts += _row(row, step.name, step.state)
        parts += [_bar(row, left, right - left, _style(step.state)), _value(row, right, precise(step.value) + share)]
    left, right = ends(0.0, reached[-1])
    parts += _row(len(steps), total, "", strong=True)
    parts += [_bar(len(steps), left, right - left, "bar sum"), _value(len(steps), right, precise(reached[-1]))]
    return Figure(
        title=title,
        unit=unit,
        drawing="".join(parts),
        height=ROW * (len(steps) + 1),
        description="; ".join(f"{step.name}: {precise(step.value)} {unit}" for step in steps)
        + f"; {total}: {precise(reached[-1])} {unit}",
        data=_data(title, unit, [*steps, Bar(total, reached[-1])]),
        legend=_legend(steps),
    )


def tornado(title: str, unit: str, base: float, swings: Sequence[Swing]) -> Figure:
    """The inputs that move a result most, widest first: the result at the low and high value of each, from ``base``.

    The widest ten are drawn; the numbers behind the chart have all.
    """
    swings = sorted(swings, key=lambda swing: -abs(swing.result_high - swing.result_low))
    ends = [base, *(result for swing in swings for result in (swing.result_low, swing.result_high))]
    low, span = min(ends), (max(ends) - min(ends)) or 1.0

    def x_at(value: float) -> float:
        return MARGIN + (value - low) / span * (WIDTH - 2 * MARGIN)

    parts = []
    drawn = swings[:DRAWN_SWINGS]
    for row, swing in enumerate(drawn):
        parts += _row(row, swing.name, f"{swing.low} … {swing.high}")
        for result, style in ((swing.result_low, "bar hatched"), (swing.result_high, "bar")):
            start, end = sorted((x_at(base), x_at(result)))
            parts.append(_bar(row, start, end - start, style))
        least, most = sorted((swing.result_low, swing.result_high))
        parts.append(text(x_at(min(least, base)) - 5, ROW * row + 28, precise(least), "tick end"))
        parts.append(text(x_at(max(most, base)) + 5, ROW * row + 28, precise(most)))
        parts.append(rule(x_at(base), ROW * row + 15, x_at(base), ROW * row + 33, "mark"))
    height = ROW * len(drawn) + 20
    parts.append(text(x_at(base), height - 3, f"{precise(base)} at the planned inputs", "tick middle"))
    rows = tuple(
        (swing.name, swing.low, swing.high, precise(swing.result_low), precise(swing.result_high)) for swing in swings
    )
    columns = (Column("Input"), Column("Low"), Column("High"))
    results = (Column("Result at low", unit, numeric=True), Column("Result at high", unit, numeric=True))
    return Figure(
        title=title,
        unit=unit,
        drawing="".join(parts),
        height=height,
        description=f"{precise(base)} {unit} at the planned inputs; "
        + "; ".join(f"{s.name}: {precise(s.result_low)} to {precise(s.result_high)} {unit}" for s in swings),
        data=Table(f"{title}, {unit}", (*columns, *results), rows),
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
    apart = [dot for dot in dots if dot.apart]
    columns = (Column("Node"), Column("Value", unit, numeric=True))
    data = Table(f"{title}, {unit}", columns, tuple((dot.name, precise(dot.value)) for dot in dots))
    if apart:
        groups = tuple((dot.name, precise(dot.value), "slow" if dot.apart else "") for dot in dots)
        data = Table(data.caption, (*columns, Column("Group")), groups)
    return Figure(
        title=title,
        unit=unit,
        drawing="".join(parts),
        height=floor + 22,
        description=f"{len(dots)} from {precise(min(d.value for d in dots))} to {precise(max(d.value for d in dots))}"
        f" {unit}" + (f"; slow group: {', '.join(dot.name for dot in apart)}" if apart else ""),
        data=data,
        legend=(
            *((("keydot", "node"), ("keydot apart", "slow group")) if apart else ()),
            *((f"keymark keymark{index}", f"{name} {precise(value)}") for index, (name, value) in enumerate(marks)),
        ),
    )


def _row(row: int, name: str, aside: str, strong: bool = False) -> list[str]:
    """The line above a bar: a name to the left, something short to the right."""
    y, weight = ROW * row + 12, " strong" if strong else ""
    return [
        text(0, y, shortened(name, max(ROW_LETTERS - len(aside), 12)), f"name{weight}"),
        text(WIDTH, y, aside, "value end"),
    ]


def _value(row: int, x: float, words: str) -> str:
    """A number behind the end of its bar."""
    return text(x + 5, ROW * row + 28, words, "value")


def _bar(row: int, x: float, width: float, style: str) -> str:
    return box(x, ROW * row + 18, width, BAR, style)


def _style(state: str) -> str:
    return STATE_KEYS.get(state, "bar outlined") if state else "bar"


def _legend(bars: Sequence[Bar]) -> tuple[tuple[str, str], ...]:
    styles = {_style(bar.state) for bar in bars if bar.state}
    return tuple(words for style, words in KEYS.items() if style in styles)


def _data(title: str, unit: str, bars: Sequence[Bar]) -> Table:
    columns = (Column("Name"), Column("Value", unit, numeric=True))
    if not any(bar.state for bar in bars):
        return Table(f"{title}, {unit}", columns, tuple((bar.name, precise(bar.value)) for bar in bars))
    rows = tuple((bar.name, precise(bar.value), bar.state) for bar in bars)
    return Table(f"{title}, {unit}", (*columns, Column("State")), rows)
