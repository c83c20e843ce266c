"""Plans: users, machines, watts and money, with every input and its state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from megatoken.report.bars import Bar, Swing, bar_chart, tornado, waterfall
from megatoken.report.blocks import Block, Cards, Column, Figure, Headline, Section, Table, View, Words, section
from megatoken.report.curves import line_chart, stairs
from megatoken.report.documents import Document
from megatoken.report.views.common import given_tables, records_table, state_cell, view
from megatoken.report.words import DIVISORS, figure_text, label, plain_text, sentence
from megatoken.text import is_number, precise

COUNTED = ("racks", "nodes", "accelerators", "users")  # units with a singular
CARDS = 4
# The results of these plans that answer a buyer, if not simply the first ones.
ANSWERS = {
    "plan_buy": ("Cost per month", "Cost per million output tokens", "Mean utilisation", "Energy per month"),
    "plan_fleet": ("Nodes", "Accelerators", "Price", "Headroom at the peak"),
}
# Tables that are also drawn: the columns with the name, the length and the state of a bar.
BARS = {
    "efficiency": ("system", "output_tokens_per_joule", "power_state"),
    "derating": ("step", "output_tokens_per_second", "state"),
    "concurrency": ("profile", "users", "state"),
    "policies": ("policy", "price_dollars_per_hour", "state"),
}


def plan_view(document: Document) -> View:
    """The report on ``megatoken plan``: capacity, fleet, energy, cost or throughput."""
    results = document.parts("results")
    ranged = [result for result in results if result.number("low") is not None]
    sections = (
        section("Results", _ranges(ranged) if ranged else _results(results)),
        *_glance_and_detail(document, results, answer=bool(ranged)),
        section("Profiles", records_table("Workload profiles", document.parts("profiles"))),
    )
    numbers = [result for result in results if is_number(result.values.get("value"))]
    summary: list[Block] = []
    if numbers:
        included = _included(document.part("waterfall"))
        summary = [_headline(numbers[0], *included), *_cards(document.text("kind"), numbers[1:])]
    return view(document, document.text("kind").removeprefix("plan_"), summary, sections, notes_last=True)


def _included(waterfall: Document) -> Iterator[str]:
    """The lines that a cost adds up, so that none is in it unseen."""
    steps = [
        f"{step.text('name')} {figure_text(step.values.get('value'), step.text('state'))}"
        for step in waterfall.parts("steps")
    ]
    if steps:
        yield " + ".join(steps)


def _cards(kind: str, results: Sequence[Document]) -> Iterator[Cards]:
    """What a buyer reads next, each with its range or state."""
    by_name = {result.text("name"): result for result in results}
    chosen = [by_name[name] for name in ANSWERS.get(kind, by_name) if name in by_name][:CARDS]
    if chosen:
        yield Cards(tuple((one.text("name"), _amount(one), _how(one)) for one in chosen))


def _amount(result: Document) -> str:
    name, unit = result.text("name"), _unit(result)
    return _value(result) if name.lower().startswith(unit) else f"{_value(result)} {unit}"


def _how(result: Document) -> str:
    if result.number("low") is not None:
        return f"from {_value(result, 'low')} to {_value(result, 'high')}"
    return result.text("state")


def _glance_and_detail(document: Document, results: Sequence[Document], *, answer: bool) -> Iterator[Section]:
    """Pictures before tables; after an answer with ranges, what moves it most comes first."""
    glance = section("At a glance", *_figures(document, results))
    detail = section("What moves the answer, and what bounds it" if answer else "In detail", *given_tables(document))
    yield from (detail, glance) if answer else (glance, detail)


def _first_number(results: Sequence[Document]) -> Document | None:
    """The headline, which is also what the sensitivities move."""
    return next((result for result in results if is_number(result.values.get("value"))), None)


def _headline(result: Document, *included: str) -> Headline:
    name, unit = _said_once(result.text("name"), _unit(result))
    words = filter(None, (name, result.text("state"), *included))
    one = unit.removesuffix("s") if result.values.get("value") == 1 and unit in COUNTED else unit
    return Headline(_value(result), one, " · ".join(words))


def _said_once(name: str, unit: str) -> tuple[str, str]:
    """A name and the unit before it, without what both say: 5 racks, 3 $ and Cost per million output tokens."""
    if name.lower() == unit:
        return "", unit
    amount, _, of = unit.partition("/")
    if of and name.lower().endswith(f" per {of}"):
        return name, amount
    head, _, rest = name.partition(", ")
    noun = next((word for word, sign in DIVISORS.items() if sign == of), of)
    return (rest if rest and f"{amount} per {noun}".endswith(head.lower()) else name), unit


def _results(results: Sequence[Document]) -> Table:
    rows = tuple(
        (
            (
                Words(result.text("name"), "strong"),
                *([Words(result.text("formula"), "quiet", page_only=True)] if "formula" in result else []),
            ),
            _value(result),
            _unit(result),
            state_cell(result.text("state")),
        )
        for result in results
    )
    columns = (Column("Result"), Column("Value", numeric=True), Column("Unit"), Column("State"))
    return Table("Results", columns, rows, stacked=True)


def _ranges(results: Sequence[Document]) -> Table:
    """Low, expected and high of each result: the answer comes before the formulas, which are on the page."""
    rows = tuple(
        (result.text("name"), *(_value(result, key) for key in ("low", "value", "high")), _unit(result))
        for result in results
    )
    columns = (Column("Result"), *(Column(name, numeric=True) for name in ("Low", "Expected", "High")), Column("Unit"))
    return Table("Results", columns, rows, stacked=True)


def _value(result: Document, key: str = "value") -> str:
    value = result.values.get(key)
    if is_number(value):
        return figure_text(100 * value if result.text("unit") == "share" else value, result.text("state"))
    return plain_text(value)


def _unit(result: Document) -> str:
    return "%" if result.text("unit") == "share" else result.text("unit")


def _figures(document: Document, results: Sequence[Document]) -> Iterator[Figure]:
    yield from _waterfall(document.part("waterfall"))
    yield from _tornado(document, results)
    for table in document.parts("tables"):
        name, rows = table.text("name"), table.parts("rows")
        if name in BARS:
            yield from _bars(table.text("title", name), *BARS[name], rows, rounded=table.flag("rounded") is True)
        elif name == "curve":
            yield from _cycle(rows)


def _waterfall(part: Document) -> Iterator[Figure]:
    steps = [
        Bar(sentence(step.text("name")), value, step.text("state"), rounded=True)
        for step in part.parts("steps")
        if (value := step.number("value")) is not None
    ]
    if steps:
        title, total = part.text("title", "Parts of the whole"), part.text("total", "Total")
        yield waterfall(title, part.text("unit"), steps, total)


def _tornado(document: Document, results: Sequence[Document]) -> Iterator[Figure]:
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
    base = next((one for one in results if one.text("name") == document.text("headline")), _first_number(results))
    if swings and base:
        title = f"Sensitivity: {base.text('name')}"
        yield tornado(title, base.text("unit"), base.number("value") or 0.0, swings, base.text("state"))


def _bars(title: str, name: str, key: str, state: str, rows: Sequence[Document], *, rounded: bool) -> Iterator[Figure]:
    bars = [
        Bar(row.text(name), value, row.text(state), rounded) for row in rows if (value := row.number(key)) is not None
    ]
    if bars:
        measured, unit = label(key)
        yield bar_chart(title, f"{measured.lower()} {unit}".rstrip(), bars)


def _cycle(rows: Sequence[Document]) -> Iterator[Figure]:
    """The nodes that a curve of demand needs, hour by hour, or by the parts of an older document."""
    known = [(row.number("hour"), nodes) for row in rows if (nodes := row.number("nodes")) is not None]
    if known:
        hours = [float(part if hour is None else hour) for part, (hour, _) in enumerate(known)]
        step = hours[1] - hours[0] if len(hours) > 1 else 1.0
        edges, heights = np.array([*hours, hours[-1] + step]), np.array([nodes for _, nodes in known], dtype=float)
        line = stairs("nodes", edges, heights)
        cells = tuple((precise(hour), precise(nodes)) for hour, (_, nodes) in zip(hours, known, strict=True))
        data = Table("Nodes for each hour of the cycle", (Column("Hour"), Column("Nodes", numeric=True)), cells)
        x_range = (float(edges[0]), float(edges[-1]))
        yield line_chart("Nodes needed for the demand", "nodes", "hour", [line], data, x_range=x_range)
