"""Answers to queries: for a person, as CSV, as JSON."""

from __future__ import annotations

import csv
import io
import json
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from megatoken.report.blocks import Column, Table
from megatoken.report.words import aligned, plain_text
from megatoken.text import is_number

if TYPE_CHECKING:
    import pyarrow as pa

LEGIBLE_ROWS = 200


def answer_table(answer: pa.Table) -> Table:
    """The first rows of ``answer`` for reading; its note says how many more there are."""
    columns, rows = _columns(answer.slice(0, LEGIBLE_ROWS))
    numeric = [all(value is None or is_number(value) for value in column) for column in columns]
    texts = [[plain_text(value) for value in column] for column in columns]
    cells = [aligned(column) if numbers else column for column, numbers in zip(texts, numeric, strict=True)]
    more = len(answer) - len(rows)
    return Table(
        caption="Answer",
        columns=tuple(
            Column(name, numeric=numbers) for name, numbers in zip(answer.column_names, numeric, strict=True)
        ),
        rows=tuple(zip(*cells, strict=True)),
        note=f"{more:,} more rows; ask for fewer, or for all as CSV or JSON" if more else "",
    )


def answer_json(answer: pa.Table) -> str:
    """A list of objects; of columns with one name the last is kept, as JSON demands."""
    _, rows = _columns(answer)
    objects = [dict(zip(answer.column_names, row, strict=True)) for row in rows]
    return json.dumps(objects, indent=2, ensure_ascii=False, default=str) + "\n"


def answer_csv(answer: pa.Table) -> str:
    """A header and a line for each row; nested values as JSON."""
    _, rows = _columns(answer)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(answer.column_names)
    for row in rows:
        writer.writerow(json.dumps(value, default=str) if isinstance(value, list | dict) else value for value in row)
    return text.getvalue()


def _columns(answer: pa.Table) -> tuple[list[list[Any]], list[tuple[Any, ...]]]:
    """The values as columns and as rows."""
    columns = [[_plain(value) for value in column.to_pylist()] for column in answer.columns]
    return columns, list(zip(*columns, strict=True))


def _plain(value: Any) -> Any:
    """Sums of integers come as decimals, which neither JSON nor a reader expects; NaN and infinity have no JSON."""
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, float) and not is_number(value):
        return None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
