"""Panels of line charts as inline SVG: curves, areas, references and labels over a grid with its numbers.

A panel is one group of elements that states its axes, so that the script of the page can show the values under a
pointer: it reads them back from the positions of what is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape

from megatoken.report.scales import Floats, box, rule, text, tick_text, ticks, top_of
from megatoken.report.words import clean

PLOT = 'class="plot"'  # of a panel's group, by which the script finds it
PHONE_LETTERS, WIDE_PHONE_LETTERS = 14, 21  # heights on a phone, in units of the canvas; smaller on a desktop
SIGN_ROWS = 3  # of signs that would touch each other
SHORT = 120  # a lower panel has room for three numbers on its axis


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
    """A straight reference: at a height, or ``upright`` at a place of the x axis.

    ``sign`` is drawn next to it. An ``event`` is what happened then, other marks are limits and means.
    """

    name: str
    at: float
    upright: bool = False
    sign: str = ""
    event: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """The x axis from ``low`` to ``top`` between two places of the canvas.

    With ``doubling``, values are logarithms to the base of 2.
    """

    left: float
    right: float
    low: float
    top: float
    label: str
    wide: bool = False
    doubling: bool = False

    def at(self, value: float) -> float:
        """The place of a value."""
        return self.left + (value - self.low) * (self.right - self.left) / (self.top - self.low)

    @property
    def letters(self) -> int:
        """Height of a letter where it is largest."""
        return WIDE_PHONE_LETTERS if self.wide else PHONE_LETTERS


@dataclass(frozen=True, slots=True)
class Panel:
    """What one panel shows, in ``unit``; ``beyond`` are the names of limits that are too far away to be drawn.

    ``title`` stands above it; ``first_key`` is the number of its first curve among those of the chart. ``dots`` draws
    the points of the curves, ``filled`` the area below them.
    """

    unit: str
    lines: Sequence[Line]
    marks: Sequence[Mark] = ()
    labels: Sequence[Label] = ()
    between: Between | None = None
    y_max: float | None = None
    title: str = ""
    beyond: Sequence[str] = ()
    first_key: int = 0
    dots: bool = False
    filled: bool = False


def numbered(marks: Sequence[Mark]) -> list[Mark]:
    """The marks; two or more upright ones without a sign get numbers, which their names in the legend repeat."""
    open_signs = [mark for mark in marks if mark.upright and not mark.sign]
    if len(open_signs) < 2:
        return list(marks)
    numbers = {id(mark): str(number) for number, mark in enumerate(open_signs, 1)}
    return [
        replace(mark, sign=numbers[id(mark)], name=f"{numbers[id(mark)]}: {mark.name}") if id(mark) in numbers else mark
        for mark in marks
    ]


def plot(panel: Panel, axis: Axis, top: float, floor: float, window: tuple[float, float] | None = None) -> str:
    """One panel between two heights of the canvas; ``window`` shades a part of the x axis."""
    heights = [*(line.y for line in panel.lines), *([panel.between.high] if panel.between else [])]
    level_marks = [mark.at for mark in panel.marks if not mark.upright]
    y_ticks = ticks(0.0, panel.y_max or max(top_of(heights), *level_marks, 0.0))
    y_top = panel.y_max or y_ticks[-1]
    if floor - top < SHORT:
        y_ticks = [0.0, y_top / 2, y_top]

    def y_at(value: float) -> float:
        return floor - min(value, y_top) * (floor - top) / y_top

    def path(x: Floats, y: Floats) -> str:
        return " ".join(f"{axis.at(a):.1f},{y_at(b):.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True))

    parts = []
    if window:
        start, end = (axis.at(min(second, axis.top)) for second in window)
        parts.append(box(start, top, end - start, floor - top, "window"))
    for value in (tick for tick in y_ticks if tick <= y_top):
        parts.append(rule(axis.left, y_at(value), axis.right, y_at(value)))
        parts.append(text(axis.left - 6, y_at(value) + 4, tick_text(value), "tick end"))
    if panel.title:
        parts.append(text(axis.left, top - 8, panel.title, "tick strong"))
    if panel.between:
        between = panel.between
        outline = f"{path(between.x, between.high)} {path(between.x[::-1], between.low[::-1])}"
        parts.append(f'<polygon class="between" points="{outline}"/>')
    for key, line in enumerate(panel.lines, panel.first_key):
        points = path(line.x, line.y)
        if panel.filled:
            ends = f"{axis.at(float(line.x[-1])):.1f},{floor:.1f} {axis.at(float(line.x[0])):.1f},{floor:.1f}"
            parts.append(f'<polygon class="area area{key}" points="{points} {ends}"/>')
        parts.append(f'<polyline class="curve curve{key}" data-name="{_quoted(line.name)}" points="{points}"/>')
        if panel.dots:
            places = zip(line.x.tolist(), line.y.tolist(), strict=True)
            parts += [
                f'<circle class="point{key}" cx="{axis.at(x):.1f}" cy="{y_at(y):.1f}" r="2.6"/>' for x, y in places
            ]
    for label in panel.labels:
        right = axis.at(label.x) > (axis.right + axis.left) / 2
        offset, style = (-6, "tick end") if right else (6, "tick")
        parts.append(text(axis.at(label.x) + offset, max(y_at(label.y) - 6, top + 8), label.text, style))
    for index, mark in enumerate(panel.marks):
        if not mark.upright:
            parts.append(rule(axis.left, y_at(mark.at), axis.right, y_at(mark.at), f"mark mark{index}"))
            if mark.sign:
                parts.append(text(axis.right - 3, y_at(mark.at) - 4, mark.sign, "sign end"))
    parts += _uprights(panel.marks, axis, top, floor)
    facts = {
        "x": f"{axis.left:g} {axis.right:g} {axis.low!r} {axis.top!r}",
        "y": f"{floor:g} {top:g} {y_top!r}",
        "unit": panel.unit,
        "across": axis.label,
        **({"doubling": "1"} if axis.doubling else {}),
        **({"dots": "1"} if panel.dots else {}),
    }
    stated = "".join(f' data-{name}="{_quoted(value)}"' for name, value in facts.items())
    return f"<g {PLOT}{stated}>{''.join(parts)}</g>"


def _uprights(marks: Sequence[Mark], axis: Axis, top: float, floor: float) -> Iterator[str]:
    """Upright references with their signs, which stand lower where the one before them is near."""
    row, before = 0, axis.left - axis.right
    styles = {id(mark): "event" if mark.event else f"mark mark{index}" for index, mark in enumerate(marks)}
    for mark in sorted((mark for mark in marks if mark.upright), key=lambda mark: mark.at):
        at = axis.at(min(mark.at, axis.top))
        yield f'<line class="{styles[id(mark)]}" data-name="{_quoted(mark.name)}" x1="{at:.1f}" y1="{top:.1f}"' \
            f' x2="{at:.1f}" y2="{floor:.1f}"/>'  # fmt: skip
        if not mark.sign:
            continue
        room = axis.letters * (1 + len(mark.sign))
        row = (row + 1) % SIGN_ROWS if at - before < room else 0
        before = at
        offset, style = (-3, "sign end") if at + room > axis.right else (3, "sign")
        yield text(at + offset, top + axis.letters * (row + 0.8), mark.sign, style)


def axis_labels(axis: Axis, x_ticks: Sequence[float], floor: float, height: float) -> Iterator[str]:
    """The numbers and the name of the x axis, below the last panel."""
    for value in x_ticks:
        if value <= axis.top:
            yield text(axis.at(value), floor + 16, tick_text(2**value if axis.doubling else value), "tick middle")
    yield text(axis.right, height - 6, axis.label, "tick end")


def _quoted(words: str) -> str:
    return escape(clean(words))
