"""Filters of formulas over the published rows: ``round="v6.0", accelerator="GB300"``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatoken.analysis.published import PublishedResult, has_accelerator, model_of, published_results
from megatoken.claims.formula import FormulaError, Value
from megatoken.text import exact, nearest

FILTERS: dict[str, Callable[[PublishedResult, str], bool]] = {
    "round": lambda row, text: text in (row.round, row.round[1:]),
    "benchmark": lambda row, text: text in (row.benchmark, model_of(row.benchmark)),
    "scenario": lambda row, text: row.scenario.lower() == text.lower(),
    "division": lambda row, text: row.division == text,
    "submitter": lambda row, text: row.submitter.lower() == text.lower(),
    "accelerator": has_accelerator,
    "accelerators": lambda row, text: str(row.accelerators) == text,
}


def filtered_rows(filters: Mapping[str, Value]) -> list[PublishedResult]:
    """Published rows that pass all ``filters``, of the closed division unless they name another.

    A filter is one of ``FILTERS`` and a text or number; ``|`` separates alternatives: ``"Azure|Google"``.

    Raises:
        FormulaError: an unknown filter, or an alternative that no row of any round has.
    """
    rows = list(published_results())
    for name, value in ({"division": "closed"} | dict(filters)).items():
        if name not in FILTERS:
            meant = nearest(name, FILTERS)
            hint = f"did you mean {meant}?" if meant else f"known are {', '.join(FILTERS)}"
            raise FormulaError(f"unknown filter {name}; {hint}")
        if isinstance(value, tuple):
            raise FormulaError(f"filter {name} takes one text or number, not a list")
        texts = value.split("|") if isinstance(value, str) else [exact(value).replace(",", "")]
        for text in texts:
            if not any(FILTERS[name](row, text) for row in published_results()):
                raise FormulaError(f"no published row has {name} {text!r}")
        rows = [row for row in rows if any(FILTERS[name](row, text) for text in texts)]
    return rows
