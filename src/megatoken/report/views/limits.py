"""The user's limits on a page and a terminal: each with what was found and the answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatoken.analysis.limits import Answer, with_unit
from megatoken.report.blocks import Badge, Block, Cell, Column, Points, Table, Verdict, View, Words, section
from megatoken.report.documents import Document
from megatoken.report.views.common import view

TONES: dict[str, str] = {
    Answer.DOES_NOT_STAND: "bad",
    Answer.MET: "good",
    Answer.NOT_MET: "bad",
    Answer.CANNOT_TELL: "warn",
}
MEANING: dict[str, str] = {
    Answer.MET: "every limit is met",
    Answer.NOT_MET: "a limit is broken",
    Answer.CANNOT_TELL: "no limit is broken, and not every one can be judged",
}


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
        bound = f"{sign} {with_unit(values['limit'], unit)}"
        label: Cell = str(values["label"])
        if values.get("samples") is not None or found is None:
            label = (Words(str(values["label"])), Words(str(values["why"]), "quiet"))
        shown = "-" if found is None else with_unit(found, unit)
        rows.append((label, bound, shown, answer_badge(str(values["answer"]))))
    columns = (Column("Limit"), Column("Asked for"), Column("Found"), Column("Answer"))
    return Table(caption, columns, tuple(rows), stacked=True)


def check_view(document: Document) -> View:
    """The report on ``megatoken check``."""
    runs, answer = document.parts("runs"), document.text("answer")
    fallen = fallen_runs(runs)
    summary: tuple[Block, ...] = (Verdict((answer_badge(answer),), fallen or MEANING.get(answer, "")),)
    sections = (section("Limits", *_blocks(runs)),)
    return view(document, "limits", summary, sections)


def fallen_runs(runs: Sequence[Document]) -> str:
    """A sentence that names the runs whose numbers prove nothing; empty where all stand."""
    fallen = [run for run in runs if run.text("answer") == Answer.DOES_NOT_STAND]
    if not fallen:
        return ""
    names = "; ".join(f"{run.text('run')} is {run.text('verdict')}" for run in fallen)
    return f"{names}: {'its' if len(fallen) == 1 else 'their'} numbers prove nothing, whatever the limits say"


def _blocks(runs: Sequence[Document]) -> Iterator[Block]:
    for run in runs:
        if "unreadable" in run:
            yield Points("", (("CANNOT BE READ", run.text("unreadable")),))
            continue
        name = f"{run.text('run')} ({run.text('verdict')})"
        if run.text("answer") == Answer.DOES_NOT_STAND and run.parts("reasons"):
            yield Points(f"{name}:", tuple((one.text("code"), one.text("message")) for one in run.parts("reasons")))
        yield limits_table(run.parts("limits"), name)
