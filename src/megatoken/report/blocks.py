"""The parts of a report, the same for a page and a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from megatoken.report.words import clean


@dataclass(frozen=True, slots=True)
class Badge:
    """A word out of a closed set, such as a verdict. ``tone`` is good, bad, warn, plain or quiet.

    Each tone has a colour and a sign; both only repeat what the word says.
    """

    word: str
    tone: str


@dataclass(frozen=True, slots=True)
class Words:
    """Part of a cell on a line of its own. ``style`` is strong, quiet, code or empty."""

    text: str
    style: str = ""
    page_only: bool = False


@dataclass(frozen=True, slots=True)
class Fold:
    """Further lines of a cell, shown on demand; a terminal and paper show only the ``title``."""

    title: str
    words: tuple[Words, ...]


@dataclass(frozen=True, slots=True)
class Link:
    """Part of a cell that leads to another page, at ``address`` relative to this one."""

    text: str
    address: str


@dataclass(frozen=True, slots=True)
class Spark:
    """Part of a cell: a curve of a few values as SVG elements on a canvas of 120 x 24, and what it says in words."""

    drawing: str
    text: str


Part: TypeAlias = Words | Badge | Fold | Link | Spark
Cell: TypeAlias = str | Badge | tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Column:
    """Head of a column; numbers stand to the right. ``width_percent`` of the table, or 0 for what the cells need."""

    name: str
    unit: str = ""
    numeric: bool = False
    width_percent: int = 0


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of as many cells as there are columns; the first cell names the row.

    ``kinds``, one word per row, lets a reader of the page choose which rows are shown; those in ``hidden`` are not at
    first. ``stacked`` makes each row a block of lines where the page is narrow: for cells that hold sentences.
    ``narrow`` tables, with a few short columns, share a line with a figure or another such table on a wide page.
    ``sortable`` tables get buttons in their heads on the page. A terminal shows the first ``most`` rows.
    """

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    kinds: tuple[Badge, ...] = ()
    hidden: frozenset[str] = frozenset()
    stacked: bool = False
    narrow: bool = False
    note: str = ""
    sortable: bool = False
    most: int = 40


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart: SVG elements on a canvas of 400 x ``height``, what they say in words, and the numbers behind them.

    A ``wide`` one has a canvas of 640 and the whole width of the page.

    ``on_terminal``: a terminal prints these numbers, because no other table has them.
    """

    title: str
    unit: str
    drawing: str
    height: int
    description: str
    data: Table
    legend: tuple[tuple[str, str], ...] = ()  # class of the key, name
    on_terminal: bool = False
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Headline:
    """The number that the report is about, with a quiet line on what it covers."""

    value: str
    unit: str
    quiet: str = ""


@dataclass(frozen=True, slots=True)
class Cards:
    """A few figures side by side: the name of each, its value, and how it follows; on the page only."""

    cards: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Badges in a row and what they mean."""

    badges: tuple[Badge, ...]
    meaning: str


@dataclass(frozen=True, slots=True)
class Points:
    """A list of sentences, each after its code if it has one; a terminal shows the first ``most``, 0: all."""

    title: str
    points: tuple[tuple[str, str], ...]
    most: int = 0


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms and their definitions; on the page only."""

    terms: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values, possibly nested; when ``folded``, behind a fold on the page and not on a terminal."""

    title: str
    facts: Mapping[str, Any]
    folded: bool = True


@dataclass(frozen=True, slots=True)
class Download:
    """A file that the page carries; on the page only."""

    name: str
    content: str


Block: TypeAlias = Headline | Cards | Verdict | Points | Table | Figure | Terms | Facts | Download


@dataclass(frozen=True, slots=True)
class Section:
    """Blocks under one heading. Consecutive figures stand side by side where there is room."""

    title: str
    blocks: tuple[Block, ...]


def section(title: str, *blocks: Block | None) -> Section:
    """The section of these blocks without those that have no content: None, and tables without rows."""
    return Section(title, tuple(one for one in blocks if one and not (isinstance(one, Table) and not one.rows)))


@dataclass(frozen=True, slots=True)
class View:
    """A report: its title, a summary, then the sections that are not empty.

    A terminal shows ``brief``, if there is one, in place of the sections unless all of them are asked for.
    """

    title: str
    subject: str  # one word for the window's title, such as the verdict
    summary: tuple[Block, ...]
    sections: tuple[Section, ...] = field(default=())
    footer: str = ""
    brief: tuple[Table, ...] = ()


def text_of(cell: Cell) -> str:
    """A cell as plain text with line feeds between its lines."""
    if isinstance(cell, str):
        return clean(cell)
    if isinstance(cell, Badge):
        return clean(cell.word)
    return "\n".join(clean(part_text(part)) for part in on_terminal(cell))


def on_terminal(cell: tuple[Part, ...]) -> list[Part]:
    """The parts of a cell that a terminal shows too."""
    return [part for part in cell if not (isinstance(part, Words) and part.page_only)]


def part_text(part: Part) -> str:
    """A part of a cell as one line."""
    if isinstance(part, Badge):
        return part.word
    return part.title if isinstance(part, Fold) else part.text
