"""What a noisy neighbour costs: the points of a sweep next to another load, against the same points alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

ISOLATION_RULE = (
    "the smallest of three ratios, at most 1: output next to the neighbour over output alone, p99 of the time to first"
    " token alone over that next to the neighbour, and the same of the time per output token; 1: the neighbour costs"
    " nothing, 0.5: one of the three is twice as bad"
)
FIGURES = {
    "output": ("output_tokens_per_second", None),
    "ttft_p99": ("ttft_seconds", "p99"),
    "tpot_p99": ("tpot_seconds", "p99"),
}


def isolation(
    alone: Mapping[float, Sequence[Mapping[str, Any]]], shared: Mapping[float, Sequence[Mapping[str, Any]]]
) -> list[dict[str, Any]]:
    """A row for each load that ran both ways, with means over its repeats, the three ratios and the score.

    A ratio whose figures are unknown is None and does not count.
    """
    rows = []
    for value in sorted(alone.keys() & shared.keys()):
        row: dict[str, Any] = {"value": value}
        for name, (key, of) in FIGURES.items():
            before, after = (_mean(points, key, of) for points in (alone[value], shared[value]))
            row[f"{name}_alone"], row[f"{name}_shared"] = before, after
            better, worse = (after, before) if name == "output" else (before, after)
            row[f"{name}_ratio"] = None if better is None or not worse else better / worse
        ratios = {name: row[f"{name}_ratio"] for name in FIGURES if row[f"{name}_ratio"] is not None}
        row["score"] = min(1.0, *ratios.values()) if ratios else None
        row["worst"] = min(ratios, key=lambda name: ratios[name]) if ratios else None
        rows.append(row)
    return rows


def _mean(points: Sequence[Mapping[str, Any]], key: str, of: str | None) -> float | None:
    values = [point[key] if of is None else point[key][of] for point in points]
    return None if None in values else fmean(values)
