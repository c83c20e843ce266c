"""A view as one HTML page that needs nothing but itself: no script, no font, no image, no request."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from itertools import groupby
from typing import Any

from megatoken.report.blocks import (
    Badge,
    Block,
    Cell,
    Column,
    Facts,
    Figure,
    Fold,
    Headline,
    Points,
    Section,
    Table,
    Terms,
    Verdict,
    View,
    Words,
)
from megatoken.report.scales import WIDTH
from megatoken.report.style import HATCH, SIGNS, STYLE
from megatoken.report.words import clean, plain_text

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
MANY_SECTIONS = 4
LONG_TEXT = 60
FITTING_COLUMNS = 3  # on a phone


def page(view: View) -> str:
    """The whole page as text. It is well-formed XML after its first line."""
    title = " · ".join(filter(None, (view.title, view.subject, "megatoken")))
    return (
        "<!DOCTYPE html>\n"
        f'<html lang="en"><head><meta charset="utf-8"/><title>{_text(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"/>'
        f'<link rel="icon" href="data:,"/><style>{STYLE}</style></head>\n<body>\n'
        f"{HATCH}{''.join(_body(view))}</body></html>\n"
    )


def _body(view: View) -> Iterator[str]:
    pen = _Pen()
    size = "" if any(isinstance(block, Headline) for block in view.summary) else ' class="large"'
    yield f"<header><h1{size}>{_text(view.title)}</h1>{''.join(pen.blocks(view.summary))}</header>\n"
    sections = [(pen.identifier(section.title), section) for section in view.sections if section.blocks]
    if len(sections) >= MANY_SECTIONS:
        links = "".join(f'<li><a href="#{name}">{_text(section.title)}</a></li>' for name, section in sections)
        yield f'<nav aria-label="Sections"><ul>{links}</ul></nav>\n'
    yield "<main>\n"
    for name, section in sections:
        yield f'<section aria-labelledby="{name}"><h2 id="{name}">{_text(section.title)}</h2>'
        yield from pen.section(section)
        yield "</section>\n"
    yield f"</main>\n<footer>{_text(view.footer)}</footer>\n"


class _Pen:
    """Writes blocks as HTML, keeps identifiers apart, and hides captions that only repeat the heading above."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._heading = ""

    def identifier(self, words: str) -> str:
        name = re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-") or "part"
        free, number = name, 2
        while free in self._taken:
            free, number = f"{name}-{number}", number + 1
        self._taken.add(free)
        return free

    def section(self, section: Section) -> Iterator[str]:
        self._heading = section.title
        yield from self.blocks(section.blocks)

    def blocks(self, blocks: Iterable[Block]) -> Iterator[str]:
        """Consecutive figures and narrow tables share a grid."""
        for shared, group in groupby(blocks, key=_stands_beside):
            parts = "".join(self.block(block) for block in group)
            yield f'<div class="shelf">{parts}</div>' if shared else parts

    def block(self, block: Block) -> str:
        if isinstance(block, Figure):
            return self.figure(block)
        if isinstance(block, Table):
            return self.table(block)
        if isinstance(block, Facts):
            return _facts(block)
        if isinstance(block, Headline):
            quiet = f'<p class="quiet">{_text(block.quiet)}</p>' if block.quiet else ""
            unit = f' <span class="unit">{_text(block.unit)}</span>' if block.unit else ""
            return f'<p class="headline">{_text(block.value)}{unit}</p>{quiet}'
        if isinstance(block, Verdict):
            badges = " ".join(_badge(badge) for badge in block.badges)
            return f'<div class="verdict">{badges} <span>{_text(block.meaning)}</span></div>'
        if isinstance(block, Points):
            items = "".join(f"<li>{_code(code)}{_text(words)}</li>" for code, words in block.points)
            title = f"<p>{_text(block.title)}</p>" if block.title else ""
            return f'{title}<ul class="points">{items}</ul>'
        if isinstance(block, Terms):
            terms = (f"<dt>{_text(term)}</dt><dd>{_text(meaning)}</dd>" for term, meaning in block.terms.items())
            return f"<dl>{''.join(terms)}</dl>"
        raise TypeError(f"{type(block).__name__} is no block")

    def figure(self, figure: Figure) -> str:
        name = self.identifier(figure.title)
        keys = "".join(f'<li><span class="key {key}"></span>{_text(words)}</li>' for key, words in figure.legend)
        unit = f' <span class="unit">{_text(figure.unit)}</span>' if figure.unit else ""
        return (
            f'<figure><figcaption id="{name}">{_text(figure.title)}{unit}</figcaption>'
            + (f'<ul class="legend">{keys}</ul>' if keys else "")
            + f'<svg viewBox="0 0 {WIDTH} {figure.height}" role="img" aria-labelledby="{name} {name}-text">'
            f'<desc id="{name}-text">{_text(figure.description)}</desc>{figure.drawing}</svg>'
            f'<details class="data"><summary>Numbers<span class="unseen"> of {_text(figure.title)}</span></summary>'
            f"{self.table(figure.data)}</details></figure>"
        )

    def table(self, table: Table) -> str:
        name = self.identifier(table.caption)
        heads = "".join(_head(column, named=index == 0) for index, column in enumerate(table.columns))
        rows = "".join(_row(table, index) for index in range(len(table.rows)))
        style, roles = ("stacked", ' role="table"') if table.stacked else ("", "")
        widths = _widths(table)
        style = " ".join(filter(None, (style, "fixed" if widths else "")))
        repeats = ' class="unseen"' if table.caption == self._heading else ""
        body, head = (' role="rowgroup"', ' role="row"') if table.stacked else ("", "")
        grid = (
            f'<table class="{style}"{roles}><caption id="{name}"{repeats}><span>{_text(table.caption)}</span></caption>'
            f"{widths}<thead{body}><tr{head}>{heads}</tr></thead><tbody{body}>{rows}</tbody></table>"
        )
        if not widths:
            # What is likely to be scrolled must take the focus, or the keyboard could not scroll it.
            focus = (
                f' role="region" tabindex="0" aria-labelledby="{name}"' if len(table.columns) > FITTING_COLUMNS else ""
            )
            grid = f'<div class="scroll"{focus}>{grid}</div>'
        note = f'<p class="quiet">{_text(table.note)}</p>' if table.note else ""
        if table.kinds:
            return f'<div class="chosen">{self.choice(table)}{grid}{_shown(len(table.rows))}{note}</div>'
        return f"<div>{grid}{note}</div>" if note else grid

    def choice(self, table: Table) -> str:
        """A box to tick for each kind of row; the style sheet hides the rows of a box that is not ticked."""
        boxes = []
        for kind in dict.fromkeys(table.kinds):
            name = self.identifier(f"show {kind.word}")
            ticked = "" if kind.word in table.hidden else ' checked="checked"'
            boxes.append(
                f'<label for="{name}"><input type="checkbox" id="{name}" class="show-{_class(kind.word)}"{ticked}/>'
                f" {_badge(kind)} {table.kinds.count(kind)}</label>"
            )
        return f"<fieldset><legend>Show</legend>{''.join(boxes)}</fieldset>"


def _stands_beside(block: Block) -> bool:
    return isinstance(block, Figure) or (isinstance(block, Table) and block.narrow)


def _row(table: Table, index: int) -> str:
    kind = f' class="is-{_class(table.kinds[index].word)}"' if table.kinds else ""
    first, *others = table.rows[index]
    row, head, cell = (' role="row"', ' role="rowheader"', ' role="cell"') if table.stacked else ("", "", "")
    cells = "".join(
        f"<td{cell}{_cell_class(column, content)}{_column_name(column, table.stacked)}>{_cell(content)}</td>"
        for column, content in zip(table.columns[1:], others, strict=True)
    )
    return f'<tr{row}{kind}><th scope="row"{head}>{_cell(first)}</th>{cells}</tr>'


def _widths(table: Table) -> str:
    if not any(column.width_percent for column in table.columns):
        return ""
    return "".join(f'<col style="width: {column.width_percent}%"/>' for column in table.columns)


def _cell_class(column: Column, content: Cell) -> str:
    if column.numeric:
        return ' class="number"'
    return ' class="long"' if isinstance(content, str) and len(content) > LONG_TEXT else ""


def _column_name(column: Column, stacked: bool) -> str:
    name = ", ".join(filter(None, (column.name, column.unit)))
    return f' data-column="{_text(name)}"' if stacked and name else ""


def _head(column: Column, *, named: bool) -> str:
    unit = f' <span class="unit">{_text(column.unit)}</span>' if column.unit else ""
    style = ' class="number"' if column.numeric and not named else ""
    return f'<th scope="col"{style}>{_text(column.name)}{unit}</th>'


def _cell(cell: Cell) -> str:
    if isinstance(cell, str):
        return _breakable(cell)
    if isinstance(cell, Badge):
        return _badge(cell)
    return "".join(f"<div>{_part(part)}</div>" for part in cell)


def _part(part: Words | Badge | Fold) -> str:
    if isinstance(part, Badge):
        return _badge(part)
    if isinstance(part, Fold):
        lines = "".join(f"<div>{_words(words)}</div>" for words in part.words)
        return f'<details class="data"><summary>{_text(part.title)}</summary>{lines}</details>'
    return _words(part)


def _words(words: Words) -> str:
    if words.style == "code":
        return f"<code>{_text(words.text).replace('/', '/<wbr/>')}</code>"
    if words.style == "strong":
        return f"<strong>{_text(words.text)}</strong>"
    return f'<span class="quiet">{_breakable(words.text)}</span>' if words.style else _breakable(words.text)


def _breakable(words: str) -> str:
    """Text whose long names may break where a reader would break them."""
    return re.sub(r"\S{18,}", lambda name: re.sub(r"([_/(])(?=\w)", r"\1<wbr/>", name.group()), _text(words))


def _badge(badge: Badge) -> str:
    sign = SIGNS.get(badge.tone, "")
    mark = f'<span aria-hidden="true">{sign}</span> ' if sign else ""
    return f'<span class="badge {badge.tone}">{mark}{_text(badge.word)}</span>'


def _shown(rows: int) -> str:
    return f'<p class="quiet" aria-hidden="true"><span class="count"></span> of {rows} shown</p>'


def _facts(facts: Facts) -> str:
    rows = "".join(
        f'<tr><th scope="row">{_text(name)}</th><td>{_text(value)}</td></tr>' for name, value in flat(facts.facts)
    )
    title = _text(facts.title)
    table = f'<table class="facts"><caption class="unseen">{title}</caption><tbody>{rows}</tbody></table>'
    return f'<details class="facts"><summary>{title}</summary>{table}</details>' if facts.folded else table


def flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Nested mappings and lists of them as dotted names."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from flat(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
        for index, item in enumerate(value):
            yield from flat(item, f"{name}.{index}")
    else:
        yield name, plain_text(value) if isinstance(value, list) or value in (None, {}) else str(value)


def _code(code: str) -> str:
    return f"<code>{_text(code)}</code> " if code else ""


def _class(word: str) -> str:
    return word.replace(" ", "-")


def _text(words: str) -> str:
    return escape(clean(words))
