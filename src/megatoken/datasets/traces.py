"""Recorded traces of real services: when each request came and how long it was, and which blocks of prompts it shared.

Three public formats, known by their first line.

- Mooncake (JSON lines): ``timestamp`` in milliseconds, ``input_length``, ``output_length``, ``hash_ids``: one id for
  each block of 512 tokens of the prompt; requests with the same id have the same block.
- BurstGPT (CSV): ``Timestamp`` in seconds, ``Request tokens``, ``Response tokens``; 0 response tokens mark a failure.
- Azure LLM inference (CSV, 2023 and 2024): ``TIMESTAMP`` as date and time, ``ContextTokens``, ``GeneratedTokens``.

No trace has text. Prompts are random ids of the recorded lengths; blocks of one hash id are the same ids.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatoken.datasets.lengths import RandomIds, fit_lengths
from megatoken.datasets.lines import read_lines
from megatoken.datasets.requests import Dataset, LazyRows
from megatoken.engine.request import Request
from megatoken.errors import DatasetError
from megatoken.text import count_of

MOONCAKE_BLOCK = 512  # tokens
COLUMNS = {  # time, prompt and answer in the CSV formats
    "BurstGPT": ("Timestamp", "Request tokens", "Response tokens"),
    "Azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
}
MOONCAKE = ("timestamp", "input_length", "output_length")
_KNOWN = (
    f"give JSON lines of Mooncake, each with {', '.join(MOONCAKE)}, or a CSV with the columns"
    f" {' or '.join(','.join(columns) for columns in COLUMNS.values())}"
)
_DATE = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d+)?(?:\+00:00|Z)?")  # Azure has seven digits of a second


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests by row, in the order of their times.

    Attributes:
        path: of the file.
        format: Mooncake, BurstGPT or Azure.
        due_seconds: since the first request, never falling [N].
        input_tokens, output_tokens: lengths [N].
        blocks: hash ids of the prompt's blocks, for each request; empty where the format has none.
        content_hash: SHA-256 of the file.
        skipped: rows without a prompt or an answer.
    """

    path: Path
    format: str
    due_seconds: NDArray[np.float64]
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    blocks: tuple[tuple[int, ...], ...]
    content_hash: str
    skipped: int

    def dataset(self, *, vocabulary_size: int, max_length: int, seed: int = 0) -> Dataset:
        """The requests as random ids below ``vocabulary_size``; what exceeds ``max_length`` is scaled down to it.

        The ids of a block depend on ``seed`` and its hash id alone, all others on ``seed`` and the row.
        """
        inputs, outputs, notes = fit_lengths(self.input_tokens, self.output_tokens, max_length)
        notes += (f"{count_of(self.skipped, 'row')} without a prompt or an answer left out",) if self.skipped else ()

        random_ids = RandomIds(vocabulary_size, seed)

        def make(row: int) -> Request:
            length = int(inputs[row])
            ids: list[int] = []
            for block in self.blocks[row] if self.blocks else ():
                ids += random_ids.draw(2 * block + 1, MOONCAKE_BLOCK)
            ids = ids[:length]
            ids += random_ids.draw(2 * row, length - len(ids)) if len(ids) < length else []
            return Request(prompt=ids, max_tokens=int(outputs[row]), ignore_end_token=True)

        return Dataset(
            name=self.path.name,
            source=f"{self.format} trace {self.path}",
            requests=LazyRows(len(inputs), make),
            content_hash=self.content_hash,
            input_tokens=inputs,
            output_limits=outputs,
            fills_limit=np.ones(len(outputs), dtype=np.bool_),
            notes=notes,
        )


def read_trace(path: Path) -> Trace:
    """Reads a trace.

    Raises:
        DatasetError: the file cannot be read, has another format, or a row has no number where it must have one.
    """
    digest = hashlib.sha256()
    lines = ((place, line) for place, line in read_lines(path, digest.update) if line.strip())
    first = next(lines, None)
    if first is None:
        raise DatasetError(f"{path}: the file holds no requests; give a trace")
    if first[1].lstrip().startswith(b"{"):
        name, rows = "Mooncake", _mooncake(first, lines)
    else:
        name, rows = _csv_rows(first, lines)
    found = list(rows)
    kept = [row for row in found if row[1] > 0 and row[2] > 0]
    if not kept:
        raise DatasetError(f"{path}: no request has a prompt and an answer; give a trace with both")
    kept.sort(key=lambda row: row[0])
    seconds, inputs, outputs, blocks = zip(*kept, strict=True)
    return Trace(
        path=path,
        format=name,
        due_seconds=np.array(seconds) - seconds[0],
        input_tokens=np.array(inputs, np.int64),
        output_tokens=np.array(outputs, np.int64),
        blocks=blocks if any(blocks) else (),
        content_hash=digest.hexdigest(),
        skipped=len(found) - len(kept),
    )


_Row = tuple[float, int, int, tuple[int, ...]]


def _mooncake(first: tuple[str, bytes], lines: Iterator[tuple[str, bytes]]) -> Iterator[_Row]:
    for place, line in (first, *lines):
        try:
            fields = json.loads(line)
            ids = tuple(fields.get("hash_ids") or ())
        except (ValueError, AttributeError, TypeError, RecursionError):
            raise DatasetError(f"{place}: not a JSON object, as in a trace of Mooncake; {_KNOWN}") from None
        if missing := [name for name in MOONCAKE if name not in fields]:
            raise DatasetError(f"{place}: not of a trace, for it has no {', '.join(missing)}; {_KNOWN}")
        if not all(isinstance(one, int) and 0 <= one < 2**62 for one in ids):
            raise DatasetError(f"{place}: hash_ids must be a list of whole numbers")
        numbers = [_number(place, name, fields.get(name)) for name in MOONCAKE]
        yield numbers[0] / 1000, _count(numbers[1]), _count(numbers[2]), ids


def _csv_rows(first: tuple[str, bytes], lines: Iterator[tuple[str, bytes]]) -> tuple[str, Iterator[_Row]]:
    head = next(csv.reader([first[1].decode(errors="replace").strip()]))
    name = next((name for name, columns in COLUMNS.items() if set(columns) <= set(head)), None)
    if name is None:
        raise DatasetError(f"{first[0]}: not a trace; {_KNOWN}")
    columns = COLUMNS[name]

    def rows() -> Iterator[_Row]:
        for place, line in lines:
            cells = dict(zip(head, next(csv.reader([line.decode(errors="replace").strip()])), strict=False))
            moment, prompt, answer = (cells.get(column, "") for column in columns)
            seconds = _seconds(place, moment) if name == "Azure" else _number(place, columns[0], moment)
            counts = [
                _count(_number(place, column, of)) for column, of in zip(columns[1:], (prompt, answer), strict=True)
            ]
            yield seconds, counts[0], counts[1], ()

    return name, rows()


def _seconds(place: str, text: str) -> float:
    found = _DATE.fullmatch(text.strip())
    if found is None:
        raise DatasetError(f"{place}: TIMESTAMP is {text[:40]!a}; it must be a date and time")
    try:
        whole = datetime.fromisoformat(found[1]).replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise DatasetError(f"{place}: TIMESTAMP is {text[:40]!a}; there is no such date") from None
    return whole + float(found[2] or 0)


def _number(place: str, name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number < 1e15:
        raise DatasetError(f"{place}: {name} is {str(value)[:40]!a}; it must be a number, 0 or more")
    return number


def _count(number: float) -> int:
    return min(int(number), 2**31 - 1)
