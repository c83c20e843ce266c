"""Check a data set file before anything runs on it, and convert one to Parquet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatoken.datasets.catalog import MlperfDataSet, Role, catalog
from megatoken.datasets.lengths import load_lengths
from megatoken.datasets.parquet import TEXTS, check_replaceable, write_parquet
from megatoken.datasets.prompts import load_prompts
from megatoken.datasets.tables import SUFFIXES, PromptTable, check_tokenizer, read_table
from megatoken.engine.checkpoint import read_config
from megatoken.engine.tokenizer import Tokenizer
from megatoken.errors import DatasetError

_NO_LIMIT = 2**31 - 1
LARGEST_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Checked:
    """A data set file without errors."""

    path: Path  # the file
    data_set: MlperfDataSet | None  # which of MLPerf's; None for prompts and lengths of the user
    input_tokens: NDArray[np.int64]  # prompt length of each row, int64 [rows]
    content_hash: str  # SHA-256 of the file, for a converted file that of the original
    notes: tuple[str, ...]  # what was compared, and what could not be

    def to_document(self) -> dict[str, Any]:
        """Plain JSON."""
        lengths = self.input_tokens
        return {
            "file": str(self.path),
            "rows": len(lengths),
            "input_tokens": {"mean": float(lengths.mean()), "min": int(lengths.min()), "max": int(lengths.max())},
            **({"data_set": self.data_set.name} if self.data_set else {}),
            "sha256": self.content_hash,
            "notes": list(self.notes),
        }


def locate(name_or_path: str, folder: Path) -> Path:
    """The path of a file, or of an MLPerf data set in ``folder``, converted or not.

    Raises:
        DatasetError: No such file; for a data set of MLPerf, with the way to get it.
    """
    if entry := catalog().get(name_or_path):
        place = folder / entry.file
        converted = place.with_suffix(".parquet")
        if not place.exists() and not converted.exists():
            raise DatasetError(f"{place}: MLPerf's {entry.name} data set is missing; {entry.how_to_get(place)}")
        return place if place.exists() else converted
    path = Path(name_or_path)
    if not path.exists() and not path.suffix:
        raise DatasetError(
            f"{name_or_path}: no such file and no such MLPerf data set; the data sets are {', '.join(catalog())}"
        )
    return path


def check(path: Path, model: Path | None = None) -> Checked:
    """Read a data set whole and check it: an MLPerf data set, a CSV of lengths, or prompts as JSON lines.

    The rows must fit vocabulary, context and tokenizer of the checkpoint folder ``model``, without which prompts cannot
    be checked.

    Raises:
        DatasetError: The first error found, with its place.
    """
    config = read_config(model) if model is not None else None
    has_tokenizer = model is not None and (model / "tokenizer.json").is_file()
    tokenizer = Tokenizer(model / "tokenizer.json") if model is not None and has_tokenizer else None
    vocabulary_size = config.vocabulary_size if config else _NO_LIMIT
    max_length = config.max_positions if config else _NO_LIMIT
    if path.suffix.lower() in SUFFIXES:
        return _check_table(path, vocabulary_size, max_length, tokenizer.decode if tokenizer else None)
    if path.suffix.lower() == ".csv":
        data_set = load_lengths(path, vocabulary_size=vocabulary_size, max_length=max_length)
    elif config is None:
        raise DatasetError(f"{path}: prompts can only be checked against a model; give --model DIR")
    else:
        encode = tokenizer.encode if tokenizer else None
        data_set = load_prompts(path, encode=encode, vocabulary_size=vocabulary_size, max_length=max_length)
    return Checked(path, None, data_set.input_tokens, data_set.content_hash, data_set.notes)


def _check_table(
    path: Path, vocabulary_size: int, max_length: int, decode: Callable[[list[int]], str] | None
) -> Checked:
    roles: tuple[Role, ...] = ("tokens", "token_count", *TEXTS)
    table = read_table(path, roles)
    data_set = table.data_set
    lengths = []
    for place, ids in table.token_lists():
        largest = max(ids, default=0)
        if not ids or min(ids) < 0:
            raise DatasetError(f"{place}: no tokens, or a token id below 0; {table.fix}")
        if largest >= vocabulary_size:
            raise DatasetError(
                f"{place}: token id {largest} is outside the vocabulary of {vocabulary_size:,}; the data set is "
                f"tokenized for {data_set.tokenizer}, use a model with that tokenizer"
            )
        if len(ids) >= max_length:
            raise DatasetError(
                f"{place}: a prompt of {len(ids):,} tokens leaves no room for an answer in the context of "
                f"{max_length:,}; use a model with a longer one"
            )
        lengths.append(len(ids))
    for role in TEXTS:
        if role in data_set.columns:
            table.texts(role)
    if len(lengths) not in (data_set.rows, data_set.calibration_rows):
        raise DatasetError(
            f"{path}: {len(lengths):,} rows; MLPerf's {data_set.name} has {data_set.rows:,}, its calibration file "
            f"{data_set.calibration_rows:,}; {table.fix}"
        )
    notes = [_sum_note(table, len(lengths))]
    if decode is not None:
        compared = check_tokenizer(table, decode)
        notes.append(f"token ids of {compared} rows decode to their text")
    return Checked(path, data_set, np.array(lengths, np.int64), table.content_hash, tuple(notes))


def _sum_note(table: PromptTable, rows: int) -> str:
    """Compare the file with the checksums of the catalogue; DatasetError if they differ."""
    data_set = table.data_set
    if rows != data_set.rows:
        return "no checksum of the calibration file is published"
    if (other := table.other_sum) is not None:
        raise DatasetError(f"{other}; {table.fix}")
    return f"the checksum agrees ({data_set.sums_source})"


@dataclass(frozen=True, slots=True)
class Converted:
    """What was written."""

    path: Path
    data_set: str
    rows: int
    source: Path
    source_sha256: str
    content_sha256: str

    def to_document(self) -> dict[str, Any]:
        """Plain JSON."""
        values = asdict(self)
        return {"file": str(values.pop("path")), **values, "source": str(self.source)}


def convert(source: Path, target: Path) -> Converted:
    """Write the tokens, texts, expected answers and metrics of ``source`` to the Parquet file ``target``.

    Raises:
        DatasetError: ``source`` is not a data set of MLPerf, is damaged, or its rows are not labelled in order.
        UsageError: ``target`` exists and was not written by this function.
        StorageError: ``target`` cannot be written.
    """
    if source.suffix.lower() == ".parquet":
        raise DatasetError(f"{source}: already converted; check it with megatoken dataset check")
    check_replaceable(target)
    roles: tuple[Role, ...] = ("tokens", "token_count", *TEXTS)
    table = read_table(source, roles)
    token_lists = []
    for place, ids in table.token_lists():
        if ids and not 0 <= min(ids) <= max(ids) <= LARGEST_ID:
            raise DatasetError(f"{place}: a token id is negative or above {LARGEST_ID:,}; {table.fix}")
        token_lists.append(np.array(ids, np.int32))
    texts = {role: table.texts(role) for role in TEXTS if role in table.columns}
    content = write_parquet(target, table.data_set, token_lists, texts, source)
    return Converted(target, table.data_set.name, len(token_lists), source, table.content_hash, content)
