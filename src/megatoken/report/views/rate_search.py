"""The answer of ``--find-rate``: the highest valid rate, the lowest that failed and why, and every rate tried."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatoken.report.blocks import Column, Points, Table
from megatoken.report.words import clean
from megatoken.text import precise

_WORDS = {True: "valid", False: "too high", None: "undecided"}


def search_answer(result: Mapping[str, Any]) -> str | None:
    """The answer as a sentence; None of a run that searched no rate."""
    search = result.get("rate_search")
    if not isinstance(search, Mapping):
        return None
    found = search.get("samples_per_second")
    failed = [one for one in _tried(search) if one.get("valid") is False and one["samples_per_second"] > (found or 0.0)]
    answer = "no valid rate found" if found is None else f"highest valid rate {precise(found)} samples/s"
    if failed:
        lowest = min(failed, key=lambda one: float(one["samples_per_second"]))
        answer += f"; {precise(lowest['samples_per_second'])} samples/s failed: {lowest.get('reason')}"
    return clean(answer)


def search_blocks(result: Mapping[str, Any]) -> Iterator[Points | Table]:
    """The answer, and a row for each rate tried, from the lowest."""
    answer = search_answer(result)
    if answer is None:
        return
    yield Points("", (("", answer),))
    tried = sorted(_tried(result["rate_search"]), key=lambda one: float(one["samples_per_second"]))
    rows = tuple(
        (
            precise(one["samples_per_second"]),
            "full" if one.get("full_length") else "probe",
            _WORDS[one.get("valid")],
            clean(str(one.get("reason") or "")),
        )
        for one in tried
    )
    columns = (Column("Rate", "samples/s", numeric=True), Column("Length"), Column("Result"), Column("Why"))
    yield Table("Rates tried", columns, rows, stacked=True)


def _tried(search: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [one for one in search.get("probes") or () if isinstance(one.get("samples_per_second"), int | float)]
