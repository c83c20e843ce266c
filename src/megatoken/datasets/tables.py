"""Read data sets of MLPerf: pandas pickles, JSON, and the Parquet files converted from them."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatoken.datasets.catalog import MlperfDataSet, Role, Sums, catalog, missing
from megatoken.datasets.dataframe_pickle import read_columns
from megatoken.datasets.lines import refuse_compressed, unreadable
from megatoken.datasets.parquet import file_sum, read_parquet
from megatoken.errors import DatasetError
from megatoken.files import open_input
from megatoken.text import count_of

SUFFIXES = (".pkl", ".json", ".parquet")
_PICKLED = ("llama3.1-405b", "llama2-70b")  # in this order: the first whose own columns a pickle has


@dataclass(frozen=True, slots=True, eq=False)
class PromptTable:
    """A data set of MLPerf, by row; the row is LoadGen's sample index."""

    path: Path  # the file
    data_set: MlperfDataSet  # the data set; also for its calibration file, or a part of it
    # the requested columns that the file has. Only ``token_lists`` and ``texts`` check the cells.
    columns: Mapping[Role, Sequence[object]]
    content_hash: str  # SHA-256 of the file of MLCommons, also if this file was converted from it
    converted_from: Sums  # checksums of that file; empty if this is that file
    size_bytes: int  # size of this file

    @property
    def fix(self) -> str:
        """What to do with a damaged file."""
        return f"fetch MLPerf's {self.data_set.name} data set again"

    @property
    def other_sum(self) -> str | None:
        """The message that the checksum is not that of the catalogue; None if it is."""
        for algorithm, expected in self.data_set.sums.items():
            found = self.converted_from.get(algorithm) or file_sum(self.path, algorithm)
            if found != expected:
                return (
                    f"{self.path}: the {algorithm} sum is {found}, expected {expected} for MLPerf's "
                    f"{self.data_set.name} ({self.data_set.sums_source})"
                )
        return None

    def token_lists(self) -> Iterator[tuple[str, list[int]]]:
        """Yield (place for error messages, token ids) of every row; does not check ids against a vocabulary.

        Raises:
            DatasetError: A cell is not a list of whole numbers, or has another length than the table states.
        """
        name = self.data_set.columns["tokens"]
        counts = self.columns.get("token_count", ())
        total = 0
        for row, cell in enumerate(self._column("tokens")):
            place = f"{self.path}, row {row}"
            if isinstance(cell, np.ndarray) and cell.dtype.kind in "iu":
                cell = cell.tolist()
            if not isinstance(cell, list) or not set(map(type, cell)) <= {int}:
                raise DatasetError(f"{place}: {name} is not a list of token ids; {self.fix}")
            count = counts[row] if row < len(counts) else None
            if counts and not (isinstance(count, int) and count == len(cell)):
                says = f"{self.data_set.columns['token_count']} says otherwise"
                raise DatasetError(f"{place}: {name} has {count_of(len(cell), 'token')} but {says}; {self.fix}")
            total += len(cell)
            if not self.converted_from and total > self.size_bytes:
                # Rows of a pickle may share one list, so a small file could claim any amount of memory.
                raise DatasetError(f"{place}: the rows repeat each other beyond the file's size; {self.fix}")
            yield place, cell

    def token_ids(self, row: int) -> list[int]:
        """The ids of one row that ``token_lists`` has checked."""
        ids: list[int] = np.asarray(self.columns["tokens"][row]).tolist()
        return ids

    def texts(self, role: Role) -> list[str]:
        """The cells of a text column. Raises DatasetError if a cell is not text."""
        cells = self._column(role)
        for row, cell in enumerate(cells):
            if not isinstance(cell, str):
                raise DatasetError(f"{self.path}, row {row}: {self.data_set.columns[role]} is not text; {self.fix}")
        return [str(cell) for cell in cells]

    def _column(self, role: Role) -> Sequence[object]:
        if role not in self.columns:
            raise DatasetError(f"{self.path}: the table has no column {self.data_set.columns[role]}; {self.fix}")
        return self.columns[role]


def read_table(path: Path, roles: Collection[Role]) -> PromptTable:
    """Read the columns of a data set of MLPerf (``.pkl``, ``.json``, ``.parquet``) that hold ``roles``.

    Missing ones are left out. Executes nothing in a pickle.

    Raises:
        DatasetError: The file cannot be read, is no such table, was changed after conversion, or its row
            labels are not 0, 1, 2 and so on: MLPerf's references look answers up by label and prompts by position.
    """
    if path.suffix.lower() == ".parquet":
        data_set, columns, sums = read_parquet(path, roles)
        return PromptTable(path, data_set, columns, sums["sha256"], sums, path.stat().st_size)
    try:
        with open_input(path) as file:
            data = file.read()
    except FileNotFoundError:
        raise missing(path) from None
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    refuse_compressed(path, data)
    if path.suffix.lower() == ".json":
        data_set, columns = _read_json(data, roles, path)
    else:
        data_set, columns = _read_pickle(data, roles, path)
    return PromptTable(path, data_set, columns, hashlib.sha256(data).hexdigest(), {}, len(data))


def _read_pickle(
    data: bytes, roles: Collection[Role], path: Path
) -> tuple[MlperfDataSet, dict[Role, Sequence[object]]]:
    known = [catalog()[name] for name in _PICKLED]
    wanted = {column for data_set in known for role, column in data_set.columns.items() if role in roles}
    marks = {column for data_set in known for column in data_set.columns.values()}
    found = read_columns(data, wanted | marks, str(path))
    first, second = known
    own = set(first.columns.values()) - set(second.columns.values())
    data_set = first if own & found.keys() else second
    named = {role: found[column] for role, column in data_set.columns.items() if role in roles and column in found}
    return data_set, dict(named)


def _read_json(data: bytes, roles: Collection[Role], path: Path) -> tuple[MlperfDataSet, dict[Role, Sequence[object]]]:
    """CNN/DailyMail as the reference writes it: a list of objects; the position is the sample index."""
    entries = [entry for entry in catalog().values() if entry.file_format == "json"]
    try:
        records = json.loads(data, object_hook=_compact)
    except RecursionError:
        raise DatasetError(f"{path}: nested too deeply for {entries[0].name}; fetch it again") from None
    except json.JSONDecodeError as error:
        raise DatasetError(f"{path}, line {error.lineno}: not JSON ({error.msg}); fetch it again") from None
    except ValueError as error:
        problem = " ".join(str(error).split())[:120]
        raise DatasetError(f"{path}: not JSON in UTF-8 ({problem}); fetch it again") from None
    if not isinstance(records, list):
        raise DatasetError(f"{path}: not a list of articles as in MLPerf's {entries[0].file}; fetch it again")
    data_set = next((entry for entry in entries if entry.rows == len(records)), entries[0])
    columns = data_set.columns
    for row, record in enumerate(records):
        if not isinstance(record, dict) or columns["tokens"] not in record:
            fix = f"fetch MLPerf's {data_set.name} data set again, or name a file of JSON lines .jsonl"
            raise DatasetError(f"{path}, row {row}: no {columns['tokens']}; {fix}")
    present = {
        role: column
        for role, column in columns.items()
        if role in roles and (not records or any(column in record for record in records))
    }
    return data_set, {role: [record.get(column) for record in records] for role, column in present.items()}


def _compact(record: dict[str, Any]) -> dict[str, Any]:
    """Turn lists of whole numbers into arrays while the file is read: that takes an eighth of the memory."""
    for key, value in record.items():
        if isinstance(value, list) and value and set(map(type, value)) == {int}:
            with suppress(OverflowError):  # more than 64 bits: refused later, with its place
                record[key] = np.array(value, np.int64)
    return record


ROWS_DECODED = 32
LEAST_WORDS = 5  # too few to distinguish tokenizers
LEAST_SHARE = 0.8  # of a text's words that the decoded ids must contain; decoding leaves out special tokens
_WORD = re.compile(r"\w+")


def check_tokenizer(table: PromptTable, decode: Callable[[list[int]], str]) -> int:
    """Decode rows spread over the table and compare them with their text; returns how many were long enough to compare.

    The ids may hold more than the text (CNN/DailyMail: the instruction), but the text's words must be among theirs.
    ``decode`` leaves out special tokens; ``token_lists`` has checked the table. Without a text column nothing is
    compared.

    Raises:
        DatasetError: The ids of a row belong to another tokenizer.
    """
    if "text" not in table.columns:
        return 0
    texts = table.columns["text"]
    compared = 0
    for row in range(0, len(texts), max(1, len(texts) // ROWS_DECODED)):
        text = texts[row]
        words = Counter(_WORD.findall(text.lower())) if isinstance(text, str) else Counter()
        if words.total() < LEAST_WORDS:
            continue
        found = words & Counter(_WORD.findall(decode(table.token_ids(row)).lower()))
        share = found.total() / words.total()
        if share < LEAST_SHARE:
            columns = table.data_set.columns
            raise DatasetError(
                f"{table.path}, row {row}: {columns['tokens']} does not decode to {columns['text']}: "
                f"{100 * share:.0f} % of its"
                f" words match; the ids are of {table.data_set.tokenizer}, use a model with that tokenizer"
            )
        compared += 1
    return compared
