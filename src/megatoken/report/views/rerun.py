"""A re-run: whether everything that decides the run is equal, each difference, and whether the rates agree."""

from __future__ import annotations

from megatoken.report.blocks import Badge, Block, Column, Table, Verdict, View, section
from megatoken.report.documents import Document
from megatoken.report.views.common import facts_table, view
from megatoken.text import count_of


def rerun_view(document: Document) -> View:
    """The report on ``megatoken rerun``."""
    differences, rates = document.parts("differences"), document.part("rates")
    equal = Badge("equal", "good") if document.flag("equal") else Badge("different", "bad")
    meaning = "everything that decides the run is as it was"
    if unknown := document.text("unknown_edits"):
        meaning = f"here and now everything is as the run folder says; whether that was edited is unknown: {unknown}"
        equal = Badge("equal", "warn") if document.flag("equal") else equal
    if differences:
        meaning = f"{count_of(len(differences), 'difference')} in what decides the run"
    summary: list[Block] = [Verdict((equal,), meaning)]
    if (agree := rates.flag("agree")) is not None:
        badge = Badge("rates agree", "good") if agree else Badge("rates differ", "bad")
        summary.append(Verdict((badge,), rates.text("rule")))
    if why := rates.text("why_no_interval"):
        summary.append(Verdict((Badge("rates not judged", "warn"),), why))
    rows = tuple((one.text("key"), one.text("then") or "-", one.text("now") or "-") for one in differences)
    sections = (
        section("Differences", Table("Differences", (Column("What"), Column("Then"), Column("Now")), rows))
        if rows
        else None,
        section("Rates", facts_table("Rates", rates.without(["why_no_interval"]))) if rates.values else None,
        section("Plan", facts_table("Hash of the plan", document.part("plan_sha256").values)),
    )
    return view(document, "re-run", tuple(summary), tuple(one for one in sections if one is not None))
