"""Two charts of a qualification: the roofline with what was measured under it, and values against published bands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatoken.report.blocks import Column, Figure, Table
from megatoken.report.scales import RIGHT, WIDE, WIDE_LEFT, box, rule, shortened, text, tick_text
from megatoken.text import number, precise

HEIGHT, TOP, BOTTOM = 300, 14, 40
ROW, NAME_WIDTH, NAME_LETTERS = 22, 250, 38
BAND_LOW, BAND_TOP = 0.6, 1.2


@dataclass(frozen=True, slots=True)
class Point:
    """Work that was measured: operations for each byte that it moves, and operations/s."""

    name: str
    intensity: float
    operations_per_second: float


@dataclass(frozen=True, slots=True)
class Banded:
    """A measured value and the range of published ones."""

    name: str
    unit: str
    value: float
    lowest: float
    highest: float


def roofline_chart(
    title: str, bytes_per_second: float, roofs: Sequence[tuple[str, float]], points: Sequence[Point]
) -> Figure:
    """Operations/s over operations per byte, both axes logarithmic; ``roofs`` are rates of large products by format."""
    peak = max(rate for _, rate in roofs)
    intensities = [point.intensity for point in points] + [rate / bytes_per_second for _, rate in roofs]
    x_low, x_top = math.floor(math.log10(min(intensities))), math.ceil(math.log10(max(intensities)) + 0.2)
    rates = [point.operations_per_second for point in points]
    y_low = math.floor(math.log10(min([*rates, bytes_per_second * 10**x_low])))
    y_top = math.ceil(math.log10(max([*rates, peak])) + 0.1)
    floor, edge = HEIGHT - BOTTOM, WIDE - RIGHT

    def x_at(intensity: float) -> float:
        return WIDE_LEFT + (math.log10(intensity) - x_low) * (edge - WIDE_LEFT) / (x_top - x_low)

    def y_at(rate: float) -> float:
        return floor - (math.log10(rate) - y_low) * (floor - TOP) / (y_top - y_low)

    parts = []
    for power in range(y_low, y_top + 1):
        parts.append(rule(WIDE_LEFT, y_at(10.0**power), edge, y_at(10.0**power)))
        parts.append(text(WIDE_LEFT - 6, y_at(10.0**power) + 4, tick_text(10.0**power), "tick end"))
    parts += [
        text(x_at(10.0**power), floor + 16, tick_text(10.0**power), "tick middle") for power in range(x_low, x_top + 1)
    ]
    for index, (_, rate) in enumerate(roofs):
        corner = rate / bytes_per_second
        line = [(10.0**x_low, bytes_per_second * 10.0**x_low), (corner, rate), (10.0**x_top, rate)]
        path = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in line)
        parts.append(f'<polyline class="curve curve{index}" points="{path}"/>')
    for count, point in enumerate(points, 1):
        x, y = x_at(point.intensity), y_at(point.operations_per_second)
        parts.append(f'<circle class="point0" cx="{x:.1f}" cy="{y:.1f}" r="3.2"/>')
        parts.append(text(x + 6, y + 4, str(count)))
    parts.append(text(edge, HEIGHT - 6, "operations per byte", "tick end"))
    rows = []
    for count, point in enumerate(points, 1):
        roof = min(peak, bytes_per_second * point.intensity)
        share = f"{100 * point.operations_per_second / roof:.0f}"
        rows.append(
            (str(count), point.name, precise(point.intensity), number(point.operations_per_second / 1e9), share)
        )
    columns = (
        Column("Point"),
        Column("Work"),
        Column("Operations per byte", numeric=True),
        Column("GFLOP/s", numeric=True),
        Column("Of the roof", "%", numeric=True),
    )
    table = Table("Roofline: the points and their share of the roof", columns, tuple(rows))
    legend = [(f"key{index}", f"{name}, {number(rate / 1e9)} GFLOP/s") for index, (name, rate) in enumerate(roofs)]
    return Figure(
        title=title,
        unit="operations/s",
        drawing="".join(parts),
        height=HEIGHT,
        description="; ".join(f"{row[0]}: {row[1]}, {row[4]} % of the roof" for row in rows),
        data=table,
        legend=tuple(legend),
        wide=True,
    )


def band_chart(title: str, values: Sequence[Banded]) -> Figure:
    """Each value as a dot over the shaded range of published ones; the axis is a share of the middle of the range."""
    height = TOP + ROW * len(values) + BOTTOM
    left, edge, floor = NAME_WIDTH, WIDE - RIGHT, height - BOTTOM

    def x_at(share: float) -> float:
        return left + (min(max(share, BAND_LOW), BAND_TOP) - BAND_LOW) * (edge - left) / (BAND_TOP - BAND_LOW)

    parts, rows = [], []
    for tick in (0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2):
        parts.append(rule(x_at(tick), TOP, x_at(tick), floor))
        parts.append(text(x_at(tick), floor + 16, f"{100 * tick:.0f}", "tick middle"))
    for index, one in enumerate(values):
        middle, y = (one.lowest + one.highest) / 2, TOP + ROW * index
        start, end = x_at(one.lowest / middle), x_at(one.highest / middle)
        parts.append(box(start, y + 4, end - start, ROW - 8, "window"))
        parts.append(f'<circle class="point0" cx="{x_at(one.value / middle):.1f}" cy="{y + ROW / 2:.1f}" r="3.6"/>')
        parts.append(text(left - 8, y + ROW / 2 + 4, shortened(one.name, NAME_LETTERS), "tick end"))
        rows.append((one.name, one.unit, number(one.value), number(one.lowest), number(one.highest)))
    parts.append(text(edge, height - 6, "% of the middle of the published range", "tick end"))
    columns = (
        Column("Value"),
        Column("Unit"),
        Column("Measured", numeric=True),
        Column("Lowest", numeric=True),
        Column("Highest", numeric=True),
    )
    return Figure(
        title=title,
        unit="%",
        drawing="".join(parts),
        height=height,
        description="; ".join(
            f"{name}: {value} {unit}, published {low} to {high}" for name, unit, value, low, high in rows
        ),
        data=Table("Measured values and the range of published ones", columns, tuple(rows)),
        legend=(("keywindow", "published"), ("key0", "measured")),
        wide=True,
    )
