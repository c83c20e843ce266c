"""What a report is made of, before anyone decides whether a page or a terminal shows it."""

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


@dataclass(frozen=True, slots=True)
class Fold:
    """Further lines of a cell that are shown when asked for; on a terminal and on paper only the ``title``."""

    title: str
    words: tuple[Words, ...]


Cell: TypeAlias = str | Badge | tuple[Words | Badge | Fold, ...]


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
    ``beside`` lets it stand beside a figure or another such table where the page is wide: for a few short columns.
    """

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    kinds: tuple[Badge, ...] = ()
    hidden: frozenset[str] = frozenset()
    stacked: bool = False
    beside: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart: SVG elements on a canvas of 400 x ``height``, what they say in words, and the numbers behind them.

    A terminal prints those numbers where no other table has them: ``told``.
    """

    title: str
    unit: str
    drawing: str
    height: int
    description: str
    data: Table
    legend: tuple[tuple[str, str], ...] = ()  # class of the key, name
    told: bool = False


@dataclass(frozen=True, slots=True)
class Headline:
    """The number that the report is about, and below it a quiet line that says of what."""

    value: str
    unit: str
    quiet: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Badges in a row and what they mean."""

    badges: tuple[Badge, ...]
    meaning: str


@dataclass(frozen=True, slots=True)
class Points:
    """A list of sentences, each behind its code, if it has one; a terminal shows the first ``most``, 0: all."""

    title: str
    points: tuple[tuple[str, str], ...]
    most: int = 0


@dataclass(frozen=True, slots=True)
class Terms:
    """Words and what they mean here; for the page only."""

    terms: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values, nested as they come; behind a fold on the page, and not on a terminal, when ``folded``."""

    title: str
    facts: Mapping[str, Any]
    folded: bool = True


Block: TypeAlias = Headline | Verdict | Points | Table | Figure | Terms | Facts


@dataclass(frozen=True, slots=True)
class Section:
    """Blocks under one heading. Figures that follow each other stand side by side where there is room."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class View:
    """A whole report: its title, what must be seen first, then the sections that are not empty."""

    title: str
    subject: str  # one word for the window's title, such as the verdict
    summary: tuple[Block, ...]
    sections: tuple[Section, ...] = field(default=())
    footer: str = ""


def text_of(cell: Cell) -> str:
    """A cell in plain words, its lines apart by line feeds."""
    if isinstance(cell, str):
        return clean(cell)
    if isinstance(cell, Badge):
        return clean(cell.word)
    return "\n".join(clean(part_text(part)) for part in cell)


def part_text(part: Words | Badge | Fold) -> str:
    """What a part of a cell says on one line."""
    if isinstance(part, Badge):
        return part.word
    return part.title if isinstance(part, Fold) else part.text
