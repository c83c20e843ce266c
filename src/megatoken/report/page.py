"""A view as one HTML page that needs nothing but itself: one short script, no font, no image, no request."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from itertools import groupby
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup, escape

from megatoken.report.blocks import Block, Cell, Figure, Table, View
from megatoken.report.plots import PLOT
from megatoken.report.scales import WIDE, WIDTH
from megatoken.report.words import clean, plain_text

DIGIT_SPACE, POINT_SPACE = "\u2007", "\u2008"  # as wide as a digit and as a point
_NUMBER = re.compile(r"[-−]?[\d,]+(\.(?P<decimals>\d+))?(?P<star>\*?)")
SIGNS = {"good": "✓", "bad": "✕", "warn": "!", "quiet": "?"}
SIZES = {"many_sections": 4, "long_text": 60, "fitting_columns": 3}  # columns that fit on a phone


def page(view: View) -> str:
    """The whole page as text. It is well-formed XML after its first line."""
    taken: set[str] = set()

    def identifier(words: str) -> str:
        """A name for ``words`` that no other element of the page has."""
        name = re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-") or "part"
        free, number = name, 2
        while free in taken:
            free, number = f"{name}-{number}", number + 1
        taken.add(free)
        return free

    def named_sections() -> list[tuple[str, Any]]:
        return [(identifier(section.title), section) for section in view.sections if section.blocks]

    blocks = [*view.summary, *(block for part in view.sections for block in part.blocks)]
    own_script = script(charts=any(isinstance(block, Figure) and PLOT in block.drawing for block in blocks))
    # The page's policy allows this script alone.
    digest = base64.b64encode(hashlib.sha256(own_script.encode()).digest()).decode()
    made = _template().render(
        script=own_script,
        script_hash=f"sha256-{digest}",
        view=view,
        identifier=identifier,
        named_sections=named_sections,
        shelves=_shelves,
        flat=flat,
        rows_of=rows_of,
    )
    return f"<!DOCTYPE html>\n{made}\n"


def style_sheet() -> str:
    """The style of all pages: system fonts, light and dark, phone and paper."""
    return re.sub(r"\s*\n\s*", "", re.sub(r"/\*.*?\*/", "", _read("page.css")))


def script(*, charts: bool) -> str:
    """The script of a page, with that of line ``charts``, without comments; a page without it shows the same values."""
    text = _read("page.js") + (_read("charts.js") if charts else "")
    return re.sub(r"^ *(//.*)?\n?", "", text, flags=re.MULTILINE)


def _read(name: str) -> str:
    return files("megatoken").joinpath("report", name).read_text(encoding="utf-8")


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, finalize=_clean)
    environment.filters |= {"breakable": _breakable, "kind": lambda value: type(value).__name__, "quoted": quote}
    environment.globals |= {"signs": SIGNS, "width": WIDTH, "wide": WIDE, "style": style_sheet(), **SIZES}
    return environment.from_string(re.sub(r"\n\s*", "", _read("page.html")))


def _clean(value: Any) -> Any:
    return clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _breakable(words: str, signs: str = "") -> Markup:
    """Text whose long names may break where a reader would break them: after each of ``signs``, else between words."""
    text = str(escape(clean(words)))
    if signs:
        return Markup(text.replace(signs, f"{signs}<wbr/>"))
    return Markup(re.sub(r"\S{18,}", lambda name: re.sub(r"([_/(])(?=\w)", r"\1<wbr/>", name.group()), text))


def _shelves(blocks: Iterable[Block]) -> Iterator[tuple[bool, list[Block]]]:
    """Consecutive figures and narrow tables, which share a grid, and other blocks."""
    for shared, group in groupby(blocks, _is_small):
        yield shared, list(group)


def _is_small(block: Block) -> bool:
    return (isinstance(block, Figure) and not block.wide) or (isinstance(block, Table) and block.narrow)


def rows_of(table: Table) -> list[tuple[Cell, ...]]:
    """The rows of a table; in columns of numbers, the points stand below each other."""
    if not table.rows:
        return []
    columns = [
        _below_each_other(cells) if column.numeric else cells
        for column, cells in zip(table.columns, zip(*table.rows, strict=True), strict=True)
    ]
    return list(zip(*columns, strict=True))


def _below_each_other(cells: tuple[Cell, ...]) -> list[Cell]:
    """Numbers with spaces behind them, as wide as the digits, point and star that the longest has and they lack."""
    parts = [_NUMBER.fullmatch(cell) if isinstance(cell, str) else None for cell in cells]
    decimals = max((len(part["decimals"] or "") for part in parts if part), default=0)
    starred = any(part["star"] for part in parts if part)
    padded: list[Cell] = []
    for cell, part in zip(cells, parts, strict=True):
        if part and isinstance(cell, str):
            missing = decimals - len(part["decimals"] or "")
            point = POINT_SPACE if decimals and not part["decimals"] else ""
            padded.append(cell + point + DIGIT_SPACE * (missing + (starred and not part["star"])))
        else:
            padded.append(cell)
    return padded


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
