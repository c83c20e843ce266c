"""Reports on the terminal: of a run one table and its verdict, of a document the tables that its page has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from megatoken.analysis.limits import answer_for
from megatoken.planning.run_price import judge_run, request_price
from megatoken.report.blocks import (
    Badge,
    Cell,
    Column,
    Facts,
    Figure,
    Headline,
    Points,
    Section,
    Table,
    View,
    Words,
    on_terminal,
    part_text,
    text_of,
)
from megatoken.report.blocks import Verdict as VerdictBlock
from megatoken.report.documents import Document, checked
from megatoken.report.metrics import (
    NOT_VERIFIED,
    PERCENTILES,
    ROUGE_2_NOTE,
    UNRELIABLE_NOTE,
    MetricRow,
    causes,
    has_rouge_2,
    has_unreliable,
    loadgen_result,
    meaning,
    metric_rows,
    names_mlperf,
    on_prediction,
    other_notes,
    verdict_badge,
    why_no_steady_rate,
)
from megatoken.report.views import document_view
from megatoken.report.views.limits import answer_badge
from megatoken.report.views.rate_search import search_answer
from megatoken.report.words import clean, plain_text
from megatoken.runs.run import Run
from megatoken.text import precise

WIDTH_OF_FULL_TABLE = 80
NARROWEST_TEXT = 14
WIDEST_NAME = 32  # of a first column: a name within it is not broken in mid-word
TALLEST_CELL = 7  # lines
GAP, NARROW_GAP = 3, 2  # characters between columns; the second where a table has no room for the first
TONES = {"good": "bold green", "bad": "bold red", "warn": "bold yellow", "plain": "bold cyan", "quiet": "bold"}


def show(subject: Run | Document | Mapping[str, Any], console: Console | None = None, *, full: bool = False) -> None:
    """Print a run or a document on ``console``, by default on standard output; colour only where that is a terminal.

    A document whose report is long is shown in brief unless ``full``.
    """
    console = console or Console(highlight=False)
    if isinstance(subject, Run):
        _show_run(subject, console)
    else:
        _show_view(document_view(subject if isinstance(subject, Document) else checked(subject)), console, full)


def show_table(table: Table, console: Console | None = None) -> None:
    """Print one table and its note; as records, lines of cells with their names, where the terminal is too narrow."""
    console = console or Console(highlight=False)
    gap = next((gap for gap in (GAP, NARROW_GAP) if _fits(table, console.width, gap)), None)
    if table.kinds or gap is None:
        for indent, line in _records(table, console.width):
            _print_line(line, indent, console)
    else:
        console.print(_grid(table, console.width, gap))
    if table.note:
        console.print(Text(clean(table.note), style="dim"), soft_wrap=True)


def _print_line(line: Text, indent: int, console: Console) -> None:
    """Wrapped and indented on a terminal; one searchable line where the output is a file."""
    if console.is_terminal:
        console.print(Padding(line, (0, 0, 0, indent)))
    else:
        console.print(Text(" " * indent) + line, soft_wrap=True)


def _show_run(run: Run, console: Console) -> None:
    rows = metric_rows(run)
    notes = [
        note for note, applies in ((UNRELIABLE_NOTE, has_unreliable), (ROUGE_2_NOTE, has_rouge_2)) if applies(rows)
    ]
    if console.width < WIDTH_OF_FULL_TABLE:
        rows = list(_one_value_each(rows))
    if console.width < _least_metrics_width(rows):
        for row in rows:
            console.print(f"{row.label}: {row.value} {row.unit}".rstrip(), markup=False, soft_wrap=True)
    else:
        console.print(_grid(_metrics_table(rows), console.width))
    for line in lines(run, notes):
        console.print(line, soft_wrap=True)  # a path or a message stays one line when the output goes to a file


def lines(run: Run, notes: Sequence[str]) -> Iterator[Text]:
    """The lines below the table; ``notes`` explain marks in it."""
    yield from (Text(note, style="dim") for note in notes)
    yield Text.assemble((run.verdict, TONES[verdict_badge(run.verdict).tone]), f": {meaning(run)}")
    if answers := judge_run(run):
        badge = answer_badge(str(answer_for(run.verdict, answers)))
        yield Text.assemble((badge.word, TONES[badge.tone]), ": your limits")
        for one in answers:
            yield Text.assemble("  ", (one.answer, "bold"), f" {one.label}: {one.why}")
    if answer := search_answer(run.result):
        yield Text(f"Rate search: {answer}", "bold")
    if result := loadgen_result(run):
        yield Text(result)
    for reason in (*run.reasons, *causes(run)):
        yield Text.assemble("  ", (reason["code"], "bold"), f" {reason['message']}")
    if run.rules_unmet:  # none were claimed
        codes = dict.fromkeys(unmet["code"] for unmet in run.rules_unmet)
        yield Text(f"MLPerf rules not met (none claimed): {', '.join(codes)}")
    if names_mlperf(run):
        yield Text(NOT_VERIFIED)
    if price := request_price(run):
        yield Text(f"Dollars per request: ${precise(price.dollars)} = {price.formula}")
    if run.doubts:
        yield Text("Doubts about the measurement:")
    for doubt in run.doubts:
        yield Text.assemble("  ", (doubt["code"], "bold"), f" {doubt['message']}")
    for note in other_notes(run):
        yield Text(f"Note: {note['message']}")
    yield from map(Text, filter(None, (why_no_steady_rate(run), on_prediction(run))))
    yield Text(f"Run folder: {run.path}")


def _metrics_table(rows: list[MetricRow]) -> Table:
    """One line per metric; columns for percentiles where a row has them."""
    percentiles = PERCENTILES if any(row.percentiles for row in rows) else ()
    columns = (Column(name, numeric=True) for name in ("Value", *percentiles))
    none = ("",) * len(percentiles)
    cells: tuple[tuple[Cell, ...], ...] = tuple(
        (row.label, (Words(row.unit, "quiet"),), row.value, *(row.percentiles if row.percentiles else none))
        for row in rows
    )
    return Table("", (Column("Metric"), Column("Unit"), *columns), cells)


def _one_value_each(rows: list[MetricRow]) -> Iterator[MetricRow]:
    """For a narrow terminal: a row for each percentile."""
    for row in rows:
        if row.percentiles:
            for percentile, value in zip(PERCENTILES, row.percentiles, strict=True):
                yield MetricRow(f"{row.label} {percentile}", row.unit, value)
        else:
            yield row


def _least_metrics_width(rows: list[MetricRow]) -> int:
    """Characters below which a table of rows with one value each has no room for their names."""
    return NARROWEST_TEXT + 6 + max(len(row.unit) for row in rows) + max(len(row.value) for row in rows)


def _show_view(view: View, console: Console, full: bool) -> None:
    console.print(Text(clean(view.title), style="bold"), soft_wrap=True)
    for block in view.summary:
        _show_block(block, console)
    if not view.brief or full:
        for section in view.sections:
            _show_section(section, console)
        if console.is_terminal:
            _show_answer_again(view, console)
        return
    for table in view.brief:
        _show_section(Section(table.caption, (table,)), console)
    console.print("\nEverything else: --full prints it, --out DIR makes a page of it.")


def _show_answer_again(view: View, console: Console) -> None:
    """The headline with its verdict below a long report, whose first lines have left the screen."""
    answer = [block for block in view.summary if isinstance(block, Headline | VerdictBlock)]
    if any(isinstance(block, Headline) for block in answer):
        console.print()
        console.print(Text(clean(view.title), style="bold"), soft_wrap=True)
        for block in answer:
            _show_block(block, console)


def _show_section(section: Section, console: Console) -> None:
    blocks = (block.data if isinstance(block, Figure) and block.on_terminal else block for block in section.blocks)
    shown = [block for block in blocks if isinstance(block, Table | Points)]
    if shown:
        console.print()
        console.print(Text(clean(section.title), style="bold underline"))
    for block in shown:
        if isinstance(block, Table) and block.caption != section.title:
            console.print(Text(clean(block.caption), style="dim"), soft_wrap=True)
        _show_block(block, console)


def _show_block(block: object, console: Console) -> None:
    """Print a block; definitions and folded facts are for the page alone."""
    if isinstance(block, Headline):
        parts = (f"{block.value} {block.unit}".rstrip(), "bold cyan")
        console.print(Text.assemble(parts, f"  {clean(block.quiet)}"), soft_wrap=True)
    elif isinstance(block, VerdictBlock):
        badges = [part for badge in block.badges for part in ((clean(badge.word), TONES[badge.tone]), "  ")]
        console.print(Text.assemble(*badges, clean(block.meaning)), soft_wrap=True)
    elif isinstance(block, Points):
        if block.title:
            console.print(Text(clean(block.title)), soft_wrap=True)
        for code, words in block.points[: block.most or None]:
            console.print(Text(f"  {clean(code)} {clean(words)}" if code else f"  {clean(words)}"), soft_wrap=True)
        if block.most and (more := len(block.points) - block.most) > 0:
            console.print(Text(f"  and {more:,} more: all {len(block.points):,} are on the page and in the document"))
    elif isinstance(block, Facts) and not block.folded:
        for name, value in block.facts.items():
            console.print(Text(f"  {clean(name)}: {plain_text(value)}"), soft_wrap=True)
    elif isinstance(block, Table):
        show_table(_shortened(_chosen(block)), console)


def _chosen(table: Table) -> Table:
    """Without the rows that are hidden at first; the note gives their number."""
    if not table.hidden:
        return table
    kept = [index for index, kind in enumerate(table.kinds) if kind.word not in table.hidden]
    counts = Counter(kind.word for kind in table.kinds if kind.word in table.hidden)
    hidden = ", ".join(f"{counts[word]} {word}" for word in sorted(counts))
    return replace(
        table,
        rows=tuple(table.rows[index] for index in kept),
        kinds=tuple(table.kinds[index] for index in kept),
        note=" ".join(filter(None, (f"Not shown: {hidden}." if hidden else "", table.note))),
    )


def _shortened(table: Table) -> Table:
    """The first rows of the table, with a note on how many more the page has."""
    more = len(table.rows) - table.most
    if more <= 0:
        return table
    note = " ".join(filter(None, (f"{more:,} more rows: see the page or the JSON document.", table.note)))
    return replace(table, rows=table.rows[: table.most], kinds=table.kinds[: table.most], note=note)


def _grid(table: Table, width: int, gap: int = GAP) -> RichTable:
    grid = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=gap < GAP)
    natural = sum(_natural_width(table, index) + gap for index in range(len(table.columns))) - gap
    for index, column in enumerate(table.columns):
        head = "\n".join(filter(None, (clean(column.name), clean(column.unit))))
        if column.numeric:
            grid.add_column(head, justify="right", no_wrap=True)
        else:
            names = _longest_name(table) if index == 0 and natural > width else 0
            grid.add_column(head, overflow="fold", width=names if names > NARROWEST_TEXT else None)
    for row in table.rows:
        grid.add_row(*(_rich(cell) for cell in row))
    return grid


def _rich(cell: Cell) -> Text:
    if isinstance(cell, Badge):
        return Text(clean(cell.word), style=TONES[cell.tone])
    if isinstance(cell, str):
        return Text(clean(cell))
    styles = {"strong": "bold", "quiet": "dim", "code": "dim"}
    lines = [
        _rich(part)
        if isinstance(part, Badge)
        else Text(clean(part_text(part)), style=styles.get(part.style, "") if isinstance(part, Words) else "dim")
        for part in on_terminal(cell)
    ]
    return Text("\n").join(lines)


def _records(table: Table, width: int) -> Iterator[tuple[int, Text]]:
    """Each row as indented lines: its first cell, next to it the title in the second where rows have kinds, the rest.

    Where rows have no kinds, short cells of the rest share a line as far as the ``width`` reaches.
    """
    for first, *others in table.rows:
        head = _rich(first)
        if table.columns[0].numeric:  # a number alone says nothing
            head = Text(f"{clean(table.columns[0].name)} ") + head
        if isinstance(first, str):
            head.stylize("bold")
        title, *lines = head.split()
        if table.kinds and others:
            of_second, *lines = _rich(others.pop(0)).split()
            title = Text("  ").join([head, of_second])
        yield 0, title
        yield from ((2, line) for line in lines)
        cells = []
        for column, cell in zip(table.columns[-len(others) :] if others else (), others, strict=True):
            if words := " · ".join(filter(None, text_of(cell).splitlines())):
                cells.append(f"{clean(column.name)}: {words}" + (f" {clean(column.unit)}" if column.unit else ""))
        yield from ((2, Text(line)) for line in (cells if table.kinds else _packed(cells, width - 2)))


def _packed(texts: list[str], width: int) -> Iterator[str]:
    """Texts in order, as many on a line of ``width`` characters as fit; a longer text gets its own line."""
    line = ""
    for text in texts:
        if line and len(line) + len(text) + 2 > width:
            yield line
            line = ""
        line = f"{line}; {text}" if line else text
    if line:
        yield line


def _fits(table: Table, width: int, gap: int) -> bool:
    """Whether a grid of ``width`` characters is readable: columns fit, and no cell becomes a tower of short lines."""
    widths = [_column_width(table, index) for index in range(len(table.columns))]
    gaps = gap * (len(widths) - 1)
    if sum(widths) + gaps > width:
        return False
    texts = [index for index, column in enumerate(table.columns) if not column.numeric]
    room = width - gaps - sum(widths[index] for index in range(len(widths)) if index not in texts)
    longest = [max((_longest_line(row[index]) for row in table.rows), default=0) for index in texts]
    return not longest or max(longest) <= TALLEST_CELL * max(room / len(texts), room - sum(sorted(longest)[:-1]))


def _column_width(table: Table, index: int) -> int:
    column, natural = table.columns[index], _natural_width(table, index)
    if column.numeric:
        return natural
    return max(min(natural, NARROWEST_TEXT), _longest_name(table) if index == 0 else 0)


def _natural_width(table: Table, index: int) -> int:
    """Characters of the longest line of a column, its head included."""
    column = table.columns[index]
    longest = max((_longest_line(row[index]) for row in table.rows), default=0)
    return max(longest, len(column.name), len(column.unit))


def _longest_name(table: Table) -> int:
    """Characters of the longest word in the first column, at most ``WIDEST_NAME``."""
    words = (len(word) for row in table.rows for word in text_of(row[0]).split())
    return min(max(words, default=0), WIDEST_NAME)


def _longest_line(cell: Cell) -> int:
    return max((len(line) for line in text_of(cell).splitlines()), default=0)
