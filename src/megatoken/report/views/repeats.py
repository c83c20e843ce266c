"""Repeats of one test: the mean of each metric with its interval, and the value of each run."""

from __future__ import annotations

from collections.abc import Iterator

from megatoken.report.bars import Dot, dot_chart
from megatoken.report.blocks import Block, Cell, Column, Figure, Headline, Points, Table, Verdict, View, section
from megatoken.report.documents import Document
from megatoken.report.metrics import MEANING, of_simulated, verdict_badge
from megatoken.report.views.common import view
from megatoken.report.words import label
from megatoken.text import count_of, precise

RATE = "output_tokens_per_second"
RATES = {RATE: "Output rate", "steady_output_tokens_per_second": "Output rate when steady"}


def repeats_view(document: Document) -> View:
    """The report on ``megatoken run --repeat``, or on runs of one setting in one folder."""
    verdict = document.text("verdict")
    count, wanted = len(document.texts("runs")), document.number("runs_wanted")
    of_wanted = f" of {precise(wanted)} requested" if wanted and wanted != count else ""
    meaning = next((words for known, words in MEANING.items() if known == verdict), "nothing known here")
    simulated = f"{of_simulated(gpu)}; " if (gpu := document.text("simulated_gpu")) else ""
    reasons = [
        (reason.text("code"), f"{reason.text('run')}: {reason.text('message')}") for reason in document.parts("reasons")
    ]
    summary: tuple[Block, ...] = (
        *_headline(document),
        Verdict((verdict_badge(verdict),), f"{simulated}the worst of {count_of(count, 'run')}{of_wanted}: {meaning}"),
        *([Points("", tuple(reasons))] if reasons else []),
    )
    sections = (section("Numbers", _metrics(document)), section("Each run", *_figures(document), _runs(document)))
    return view(document, "repeats", summary, sections, derived=("seeds",))


def _headline(document: Document) -> Iterator[Headline]:
    rate = document.part("metrics").part(RATE)
    mean = rate.number("geometric_mean")
    if mean is None:
        return
    runs = f"geometric mean of {count_of(len(rate.values.get('values') or ()), 'run')}"
    low, high = rate.number("low"), rate.number("high")
    if low is not None and high is not None:
        runs += f", {_confidence(document)} between {precise(low)} and {precise(high)}"
    yield Headline(precise(mean), "output tokens/s", runs)


def _confidence(document: Document) -> str:
    return f"with {precise(100 * (document.number('confidence') or 0.0))} % confidence"


def _metrics(document: Document) -> Table:
    metrics = document.part("metrics")
    rows = []
    for key in metrics.values:
        part = metrics.part(key)
        name, unit = _label(key)
        numbers = (part.number(field) for field in ("geometric_mean", "low", "high", "mean"))
        rows.append((name, unit, *map(precise, numbers)))
    heads = ("Geometric mean", "Low", "High", "Mean")
    columns = (Column("Metric"), Column("Unit"), *(Column(head, numeric=True) for head in heads))
    note = f"Low and high {_confidence(document)}: {document.text('interval_formula')}. {document.text('seeds_note')}"
    return Table("Mean of the runs", columns, tuple(rows), note=note)


def _figures(document: Document) -> Iterator[Figure]:
    rate = document.part("metrics").part(RATE)
    values, names = rate.numbers("values"), _names_in_the_mean(document)
    mean = rate.number("geometric_mean")
    if len(values) > 1 and len(values) == len(names) and mean is not None:
        dots = [Dot(name, value) for name, value in zip(names, values, strict=True)]
        yield dot_chart("Rate of each run", "output tokens/s", dots, [("geometric mean", mean)])


def _runs(document: Document) -> Table:
    """A row for each run that counts, a column for each metric and percentile; percentiles are never averaged."""
    names, verdicts = document.texts("runs"), document.texts("verdicts")
    counted = _names_in_the_mean(document)
    columns, cells = [Column("Run"), Column("Verdict")], list[dict[str, str]]()
    for group in ("metrics", "percentiles"):
        part = document.part(group)
        for key in part.values:
            values = part.part(key).numbers("values")
            if len(values) == len(counted):
                columns.append(Column(*_label(key), numeric=True))
                cells.append(dict(zip(counted, map(precise, values), strict=True)))
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (name, verdict_badge(verdict), *(found.get(name, "") for found in cells))
        for name, verdict in zip(names, verdicts, strict=False)
    )
    return Table("What each run had", tuple(columns), rows)


def _names_in_the_mean(document: Document) -> list[str]:
    """The runs behind the values; older documents do not name them."""
    return document.texts("runs_in_the_mean") or document.texts("runs")


def _label(key: str) -> tuple[str, str]:
    name, unit = label(key)
    return ("Sample rate", "samples/s") if key == "samples_per_second" else (RATES.get(key, name), unit)
