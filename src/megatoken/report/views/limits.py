"""The user's limits on a page and a terminal: each with what was found and the answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatoken.analysis.limits import Answer
from megatoken.report.blocks import Badge, Block, Cell, Column, Table, Verdict, View, Words, section
from megatoken.report.documents import Document
from megatoken.report.views.common import view
from megatoken.text import precise

TONES: dict[str, str] = {Answer.MET: "good", Answer.NOT_MET: "bad", Answer.CANNOT_TELL: "warn"}
MEANING: dict[str, str] = {
    Answer.MET: "every limit is met",
    Answer.NOT_MET: "a limit is broken",
    Answer.CANNOT_TELL: "no limit is broken, and not every one can be judged",
}
KNOWN = ("answer", "runs")


def answer_badge(answer: str) -> Badge:
    """The badge of an answer to a limit, or to all of them."""
    return Badge(answer, TONES.get(answer, "warn"))


def limits_table(limits: Sequence[Document | Mapping[str, Any]], caption: str = "Your limits") -> Table:
    """A row for each limit: its bound, what was found, and the answer; why where that does not follow."""
    rows = []
    for one in limits:
        values = one.values if isinstance(one, Document) else one
        unit, sign = str(values["unit"]), "≤" if values["at_most"] else "≥"
        found = values.get("found")
        bound = f"{sign} {_shown(values['limit'], unit)}"
        label: Cell = str(values["label"])
        if values.get("samples") is not None or found is None:
            label = (Words(str(values["label"])), Words(str(values["why"]), "quiet"))
        shown = "-" if found is None else _shown(found, unit)
        rows.append((label, bound, shown, answer_badge(str(values["answer"]))))
    columns = (Column("Limit"), Column("Asked for"), Column("Found"), Column("Answer"))
    return Table(caption, columns, tuple(rows), stacked=True)


def check_view(document: Document) -> View:
    """The report on ``megatoken check``."""
    runs, answer = document.parts("runs"), document.text("answer")
    summary: tuple[Block, ...] = (Verdict((answer_badge(answer),), MEANING.get(answer, "")),)
    sections = (section("Limits", *_tables(runs)),)
    return view(document, "limits", summary, sections, KNOWN)


def _tables(runs: Sequence[Document]) -> Iterator[Table]:
    for run in runs:
        caption = f"{run.text('run')} ({run.text('verdict')})"
        yield limits_table(run.parts("limits"), caption)


def _shown(value: float, unit: str) -> str:
    return f"${precise(value)}" if unit == "$" else f"{precise(value)} {unit}"
