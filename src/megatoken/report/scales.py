"""Positions and axis labels of charts.

A chart is drawn on a canvas 400 wide, so that its letters stay readable when a phone shows it at 320 pixels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape

import numpy as np
from numpy.typing import NDArray

from megatoken.report.words import clean
from megatoken.text import precise

WIDTH, WIDE = 400, 640  # a wide chart has the whole width of the page; on a phone its letters are larger
LEFT, WIDE_LEFT, RIGHT = 48, 68, 16
SMALLEST_SHARE = 1e-9
SMALLEST_SPAN = 1e-300  # below it arithmetic underflows

Floats = NDArray[np.float64]


def ticks(low: float, top: float) -> list[float]:
    """Four to seven round values that enclose ``low`` to ``top``, in steps of 1, 2, 2.5 or 5 times a power of ten."""
    span, size = top - low, max(abs(low), abs(top))
    if span <= SMALLEST_SHARE * size:  # equal values but for rounding
        span = size
    span = span if span > SMALLEST_SPAN else 1.0
    magnitude = 10.0 ** math.floor(math.log10(span / 4))
    step = next(magnitude * factor for factor in (1, 2, 2.5, 5, 10) if span / (magnitude * factor) <= 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(max(top, low + step) / step - 1e-9)
    return [step * index for index in range(first, last + 1)]


def tick_text(value: float) -> str:
    """A short label: thousands and millions as k and M, no trailing zeros."""
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.5g}{letter}"
    return precise(value)


def top_of(columns: Iterable[Floats]) -> float:
    """The largest value, or 1 where all are zero."""
    return max(float(column.max()) for column in columns) or 1.0


def text(x: float, y: float, words: str, style: str = "tick") -> str:
    """SVG text at a point."""
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(clean(words))}</text>'


def rule(x1: float, y1: float, x2: float, y2: float, style: str = "grid") -> str:
    """SVG line between two points."""
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def box(x: float, y: float, width: float, height: float, style: str) -> str:
    """SVG rectangle, at least 0.8 wide, so that a small value stays visible."""
    return f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.8):.1f}" height="{height:.1f}"/>'


def shortened(words: str, letters: int, *, keep_end: bool = False) -> str:
    """``words`` cut to fit a place of so many letters; the names of nodes differ at their ends."""
    if len(words) <= letters:
        return words
    return f"…{words[1 - letters :]}" if keep_end else f"{words[: letters - 1].rstrip()}…"
