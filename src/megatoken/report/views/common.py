"""Parts that the views of all documents share: tables from lists of objects, states, inputs, notes, other values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatoken.report.blocks import Badge, Block, Cell, Column, Facts, Points, Section, Table, View, Words, text_of
from megatoken.report.documents import Document
from megatoken.report.words import WEAK, aligned, figure_text, labelled, plain_text, sentence
from megatoken.text import ABSENT, is_number, precise, rounded

COMMON_KEYS = ("kind", "schema_version", "created_at", "title", "inputs", "notes")
INPUT_KEYS = {"name", "value", "unit", "state", "source", "low", "high"}
TONES = {"verified": "good", "measured": "good", "given": "quiet", "interrupted run": "bad", "invalid run": "bad"}
FOOTER = "Made by megatoken from the JSON document next to this page; megatoken report rebuilds the page from it."
LEGIBLE_ROWS = 500
WIDE = 6  # columns; a wider table moves values that all rows share into its note
LONG_TEXT = 60  # characters, which need their own line on a phone
FEW = 5  # objects; with more than WIDE keys they become columns; a terminal shows as many lines of a plain list


def view(
    document: Document,
    subject: str,
    summary: Iterable[Block],
    sections: Iterable[Section],
    brief: tuple[Table, ...] = (),
    *,
    derived: Iterable[str] = (),
    notes_last: bool = False,
) -> View:
    """A document's view; values that neither summary nor sections asked for are shown too, so that nothing is lost.

    ``derived``: keys of values that follow from what is shown. With ``notes_last``, the notes stand after the
    sections and not above them.
    """
    notes = document.texts("notes")
    points = (Points("" if notes_last else "Notes:", tuple(("", note) for note in notes)),) if notes else ()
    summary, sections = tuple(summary), tuple(sections)
    rest = document.without([*COMMON_KEYS, *document.asked, *derived])
    created = document.text("created_at").replace("T", " ").replace("Z", " UTC")
    evidence = [*_inputs(document), *([Facts("Further values", rest)] if rest else [])]
    return View(
        title=document.text("title", sentence(document.text("kind"))),
        subject=subject,
        summary=summary if notes_last else (*summary, *points),
        sections=(*sections, *([Section("Notes", points)] if notes_last else []), Section("Inputs", tuple(evidence))),
        footer=FOOTER + (f" The document was written {created}." if created else ""),
        brief=brief,
    )


@dataclass(frozen=True, slots=True)
class Field:
    """A column of a table, and its cell for an item: a text, a badge, or a number, which stands to the right."""

    name: str
    cell: Callable[[Any], Cell | float | None]
    unit: str = ""
    numeric: bool = False


def figure(name: str, key: str, unit: str = "", scale: float = 1.0) -> Field:
    """The number under a key, times ``scale``."""
    return Field(name, lambda one: _scaled(one.number(key), scale), unit, numeric=True)


def word(name: str, key: str) -> Field:
    """The text under a key."""
    return Field(name, lambda one: one.text(key))


def table_of(caption: str, items: Iterable[Any], fields: Sequence[Field], **more: Any) -> Table:
    """A row for each item and a column for each field; ``more`` are fields of the table."""
    columns = tuple(Column(field.name, field.unit, numeric=field.numeric) for field in fields)
    rows = tuple(tuple(_shown(field.cell(item)) for field in fields) for item in items)
    return Table(caption, columns, rows, **more)


def _scaled(value: float | None, scale: float) -> float | None:
    return value if value is None or scale == 1 else scale * value


def _shown(cell: Cell | float | None) -> Cell:
    return precise(cell) if cell is None or isinstance(cell, int | float) else cell


def state_cell(state: str) -> Cell:
    """The state of a figure, if one is given; one that is neither reviewed nor measured is a warning."""
    return Badge(state, TONES.get(state, "warn")) if state else ""


def records_table(
    caption: str, objects: Sequence[Document | Mapping[str, Any]], *, without: Iterable[str] = (), note: str = ""
) -> Table:
    """A row for each object and a column for each key; a few objects with many keys become columns instead."""
    records = [one.values if isinstance(one, Document) else one for one in objects]
    left_out = frozenset(without)
    keys = [
        key
        for key in dict.fromkeys(key for record in records for key in record)
        if key not in left_out and any(record.get(key) not in (None, "", [], {}) for record in records)
    ]
    shown = records[:LEGIBLE_ROWS]
    same = _said_once(keys, records)
    keys = [key for key in keys if key not in same]
    notes = [note] if note else []
    if len(shown) < len(records):
        notes.append(f"The first {LEGIBLE_ROWS:,} of {len(records):,} rows; all are in the JSON document")
    if same:
        notes.append(f"The same for all: {plain_text(same)}")
    note = ". ".join(notes)
    numeric = {key: all(record.get(key) is None or is_number(record[key]) for record in records) for key in keys}
    cells = {key: [_cell(key, record.get(key)) for record in shown] for key in keys}
    columns = {key: aligned(texts) if numeric[key] else texts for key, texts in cells.items()}
    heads = {key: _head(key, records) for key in keys}
    if len(keys) > WIDE and len(shown) <= FEW:
        return _upright(caption, heads, columns, note)
    long = any(len(cell) > LONG_TEXT for texts in columns.values() for cell in texts if isinstance(cell, str))
    return Table(
        caption,
        tuple(Column(*heads[key], numeric=numeric[key]) for key in keys),
        tuple(zip(*columns.values(), strict=True)),
        stacked=len(keys) > 3 and (long or sum(not numeric[key] for key in keys) > 3),
        note=note,
    )


def _said_once(keys: Sequence[str], records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of a wide table's keys but the first, those under which all objects have the same value."""
    if len(keys) <= WIDE or len(records) < 2:
        return {}
    first, *others = records
    return {key: first[key] for key in keys[1:] if all(other.get(key) == first.get(key) for other in others)}


def _upright(caption: str, heads: Mapping[str, tuple[str, str]], columns: Mapping[str, list[Cell]], note: str) -> Table:
    """The same cells with a column for each object, so that many keys need no width."""
    (corner, names), *rest = columns.items()
    objects = tuple(Column(text_of(name)) for name in names)
    rows = tuple((", ".join(filter(None, heads[key])), *cells) for key, cells in rest)
    return Table(caption, (Column(heads[corner][0]), *objects), rows, note=note)


def given_tables(document: Document) -> Iterator[Table]:
    """The tables that a document carries ready made: ``name``, ``title``, ``note``, and ``rows`` of one shape."""
    for part in document.parts("tables"):
        title = part.text("title") or sentence(part.text("name"))
        rows: list[Document | dict[str, Any]] = list(part.parts("rows"))
        if part.flag("rounded"):
            rows = [_rounded(row) for row in part.parts("rows")]
        yield records_table(title, rows, note=part.text("note"))


def _rounded(row: Document) -> dict[str, Any]:
    """The row with three significant digits, unless its state is stronger than an estimate; counts keep theirs."""
    if row.text("state", WEAK[0]) not in WEAK:
        return dict(row.values)
    return {key: rounded(value) if isinstance(value, float) else value for key, value in row.values.items()}


def facts_table(caption: str, values: Mapping[str, Any]) -> Table:
    """Two columns: a name, and its value with unit."""
    rows = []
    for key, value in values.items():
        name, unit, text = labelled(key, value)
        rows.append((name, f"{text} {unit}".rstrip() if text != ABSENT else ABSENT))
    return Table(caption, (Column("Name"), Column("Value")), tuple(rows), narrow=True)


def _inputs(document: Document) -> Iterator[Block]:
    """The inputs: names of files, or figures with their states and sources."""
    inputs = document.values.get("inputs")
    if isinstance(inputs, list) and any(isinstance(item, dict) for item in inputs):
        parts = document.parts("inputs")
        if all(part.values.keys() <= INPUT_KEYS for part in parts):
            yield _figures(parts)
        else:
            yield records_table("Inputs", parts)
    elif inputs:
        yield Points("", tuple(("", text) for text in document.texts("inputs")), most=FEW)


def _figures(inputs: list[Document]) -> Table:
    """The input figures, each with its range, state and source."""
    rows = tuple(
        (
            (Words(one.text("name"), "strong"), Words(one.text("source"), "quiet")),
            _input_value(one),
            _range(one),
            one.text("unit"),
            state_cell(one.text("state")),
        )
        for one in inputs
    )
    heads = (Column("Value", numeric=True), Column("Range", numeric=True), Column("Unit"), Column("State"))
    return Table("Inputs", (Column("Input and source"), *heads), rows, stacked=True)


def _input_value(one: Document) -> str:
    value = one.values.get("value")
    return figure_text(value, one.text("state")) if is_number(value) else plain_text(value)


def _range(one: Document) -> str:
    low, high = one.number("low"), one.number("high")
    return f"{precise(low)} … {precise(high)}" if low is not None and high is not None else ""


def _head(key: str, records: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    value = next((record[key] for record in records if is_number(record.get(key))), None)
    name, unit, _ = labelled(key, value)
    return name, unit


def _cell(key: str, value: Any) -> Cell:
    if key == "state" and isinstance(value, str):
        return state_cell(value)
    if value is None or value == "":
        return ""
    return labelled(key, value)[2]
