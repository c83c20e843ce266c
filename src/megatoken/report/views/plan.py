"""Plans: what follows for users, machines, watts and money, with every input and how sure it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatoken.report.bars import Bar, Swing, tornado, waterfall
from megatoken.report.blocks import Column, Figure, Headline, Section, Table, View, Words
from megatoken.report.documents import Document
from megatoken.report.views.common import facts_table, given_tables, records_table, state_cell, view
from megatoken.report.words import is_number, plain_text, precise, sentence

KNOWN = ("profiles", "results", "tables", "sensitivities", "waterfall")
SUBJECTS = {
    "plan_capacity": "capacity",
    "plan_fleet": "fleet",
    "plan_energy": "energy",
    "plan_cost": "cost",
}


def plan_view(document: Document) -> View:
    """The report on ``megatoken plan``: capacity, fleet, energy or cost."""
    results = document.parts("results")
    sections = (
        Section("Results", tuple(_results(results))),
        Section("Where it goes, and what moves it", tuple(_figures(document, results))),
        Section("In detail", tuple(given_tables(document))),
        Section("Profiles", tuple(_profiles(document))),
    )
    first = next((result for result in results if is_number(result.values.get("value"))), None)
    summary = [_headline(first)] if first else []
    return view(document, SUBJECTS[document.text("kind")], summary, sections, KNOWN)


def _headline(result: Document) -> Headline:
    words = filter(None, (result.text("name"), result.text("state")))
    return Headline(precise(result.number("value")), result.text("unit"), " · ".join(words))


def _results(results: Sequence[Document]) -> Iterator[Table]:
    if not results:
        return
    rows = tuple(
        (
            (
                Words(result.text("name"), "strong"),
                *([Words(result.text("formula"), "quiet")] if "formula" in result else []),
            ),
            _value(result),
            result.text("unit"),
            state_cell(result.text("state")),
        )
        for result in results
    )
    columns = (Column("Result"), Column("Value", numeric=True), Column("Unit"), Column("State"))
    yield Table("Results", columns, rows)


def _value(result: Document) -> str:
    value = result.values.get("value")
    return precise(value) if is_number(value) else plain_text(value)


def _figures(document: Document, results: Sequence[Document]) -> Iterator[Figure]:
    yield from _waterfall(document.part("waterfall"))
    swings = [
        Swing(
            sentence(swing.text("input")),
            plain_text(swing.values.get("low")),
            plain_text(swing.values.get("high")),
            low,
            high,
        )
        for swing in document.parts("sensitivities")
        if (low := swing.number("result_low")) is not None and (high := swing.number("result_high")) is not None
    ]
    base = next((result for result in results if is_number(result.values.get("value"))), None)
    if swings and base:
        value = base.number("value") or 0.0
        yield tornado(f"What moves: {base.text('name')}", base.text("unit"), value, swings)


def _waterfall(part: Document) -> Iterator[Figure]:
    steps = [
        Bar(sentence(step.text("name")), value, step.text("state"))
        for step in part.parts("steps")
        if (value := step.number("value")) is not None
    ]
    if steps:
        yield waterfall(
            part.text("title", "Where the money goes"), part.text("unit"), steps, part.text("total", "Total")
        )


def _profiles(document: Document) -> Iterator[Table]:
    profiles = document.values.get("profiles")
    if isinstance(profiles, dict):
        profiles = [{"name": name, **values} for name, values in profiles.items() if isinstance(values, dict)]
    records = [profile for profile in profiles if isinstance(profile, dict)] if isinstance(profiles, list) else []
    if records:
        yield records_table("Workload profiles", records)
    elif isinstance(profiles, list) and profiles:
        yield facts_table("Workload profiles", {"profiles": profiles})
