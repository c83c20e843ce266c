"""The answer of ``--find-rate``: the highest valid rate, the lowest that failed and why, and every rate tried.

Charts show the p99 latencies of all tries over their rates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from megatoken.report.blocks import Column, Figure, Table
from megatoken.report.curves import line_chart
from megatoken.report.plots import Line, Mark
from megatoken.report.scales import top_of
from megatoken.report.views.goodput import Limits
from megatoken.report.words import clean
from megatoken.text import precise

_WORDS = {True: "valid", False: "too high", None: "undecided"}


def search_answer(result: Mapping[str, Any]) -> str | None:
    """The answer as a sentence; None of a run that searched no rate."""
    search = result.get("rate_search")
    if not isinstance(search, Mapping):
        return None
    found = search.get("samples_per_second")
    failed = [
        one for one in _stands(search) if one.get("valid") is False and one["samples_per_second"] > (found or 0.0)
    ]
    of_client = search.get("limited_by_client")
    least = "at least " if of_client else ""
    answer = "no valid rate found" if found is None else f"highest valid rate {least}{precise(found)} samples/s"
    if of_client:
        answer += ": the client, not the server, was the limit"
    if failed:
        lowest = min(float(one["samples_per_second"]) for one in failed)
        tries = [one for one in failed if one["samples_per_second"] == lowest]
        word = "failed twice" if any(one.get("repeat") for one in tries) else "failed"
        reasons = dict.fromkeys(str(one.get("reason")) for one in tries)
        answer += f"; {precise(lowest)} samples/s {word}: {', then '.join(reasons)}"
    for one in _tried(search):
        if one.get("repeat") and one.get("valid"):
            answer += f"; {precise(one['samples_per_second'])} samples/s failed at first and was valid when repeated"
    tried = _tried(search)
    if found is not None and tried and tried[-1].get("valid") is None:  # else the reason of the verdict says it
        answer += f"; {search.get('outcome')}"
    return clean(answer)


def search_blocks(result: Mapping[str, Any], limits: Sequence[Limits]) -> Iterator[Figure | Table]:
    """Latencies over the rates tried, and a row for each of them, from the lowest; nothing where none was searched."""
    if search_answer(result) is None:
        return
    yield from _latency_figures(_tried(result["rate_search"]), limits)
    tried = sorted(_tried(result["rate_search"]), key=lambda one: float(one["samples_per_second"]))
    rows = tuple(
        (
            precise(one["samples_per_second"]),
            ("full" if one.get("full_length") else "probe") + (", repeated" if one.get("repeat") else ""),
            _WORDS[one.get("valid")],
            clean(str(one.get("reason") or "")),
        )
        for one in tried
    )
    columns = (Column("Rate", "samples/s", numeric=True), Column("Length"), Column("Result"), Column("Why"))
    yield Table("Rates tried", columns, rows, stacked=True)


def _stands(search: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The tries without those that failed at first and were valid when repeated."""

    def key(one: Mapping[str, Any]) -> tuple[float, bool]:
        return one["samples_per_second"], bool(one.get("full_length"))

    withdrawn = {key(one) for one in _tried(search) if one.get("repeat") and one.get("valid")}
    return [one for one in _tried(search) if one.get("valid") or key(one) not in withdrawn]


def _latency_figures(tried: Sequence[Mapping[str, Any]], limits: Sequence[Limits]) -> Iterator[Figure]:
    """The p99 latencies of tries, valid and too high ones apart, with the limits."""
    for title, unit, scale, key, known in (
        ("TTFT p99 of completed samples", "s", 1, "ttft_p99_seconds", [(one.name, one.ttft_seconds) for one in limits]),
        (
            "TPOT p99 of completed samples",
            "ms",
            1000,
            "tpot_p99_seconds",
            [(one.name, one.tpot_seconds) for one in limits],
        ),
    ):
        lines, rows = [], []
        for word in _WORDS.values():
            points = sorted(
                (float(one["samples_per_second"]), scale * float(one[key]))
                for one in tried
                if _WORDS[one.get("valid")] == word and isinstance(one.get(key), int | float)
            )
            if points:
                lines.append(Line(word, *(np.array(column) for column in zip(*points, strict=True))))
                rows += [(word, precise(rate), precise(latency)) for rate, latency in points]
        if len(rows) < 2:
            continue
        columns = (Column("Result"), Column("Rate", "samples/s", numeric=True), Column("p99", unit, numeric=True))
        yield line_chart(
            title,
            unit,
            "samples/s offered",
            lines,
            Table(f"{title}, at every rate tried", columns, tuple(rows)),
            x_range=(0.0, top_of([line.x for line in lines])),
            marks=[Mark(f"{name}, {scale * value:g} {unit}", scale * value) for name, value in known if value],
            dots=True,
        )


def _tried(search: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [one for one in search.get("probes") or () if isinstance(one.get("samples_per_second"), int | float)]
