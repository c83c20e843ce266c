"""Everything that can be known of a data set file before anything runs on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatoken.datasets.catalog import MlperfDataSet, Role, catalog
from megatoken.datasets.parquet import TEXTS
from megatoken.datasets.tables import PromptTable, read_table
from megatoken.datasets.tokenizer_check import check_tokenizer
from megatoken.errors import DatasetError


@dataclass(frozen=True, slots=True)
class Checked:
    """A data set file that holds what it should.

    Attributes:
        path: The file.
        data_set: Which of MLPerf's.
        rows: How many.
        input_tokens: Prompt length of each row, int64 [rows].
        content_hash: SHA-256 of the file as MLCommons gives it out.
        notes: What was compared, and what could not be.
    """

    path: Path
    data_set: MlperfDataSet
    rows: int
    input_tokens: NDArray[np.int64]
    content_hash: str
    notes: tuple[str, ...]


def locate(name_or_path: str, folder: Path) -> Path:
    """The file of a data set: a path as it is; the name of one of MLPerf's as its file in ``folder``, converted or not.

    Raises:
        DatasetError: It is neither; for a known data set that is not there, how to get it.
    """
    if entry := catalog().get(name_or_path):
        place = folder / entry.file
        converted = place.with_suffix(".parquet")
        if not place.exists() and not converted.exists():
            raise DatasetError(f"{place}: MLPerf's {entry.name} data set is not there; {entry.how_to_get(place)}")
        return place if place.exists() else converted
    path = Path(name_or_path)
    if not path.exists() and not path.suffix:
        raise DatasetError(
            f"{name_or_path}: no such file, and no data set of MLPerf's: those are {', '.join(catalog())}"
        )
    return path


def check(
    path: Path,
    *,
    vocabulary_size: int | None = None,
    max_length: int | None = None,
    decode: Callable[[list[int]], str] | None = None,
) -> Checked:
    """Reads a data set whole and holds it against the catalogue, and against a model where one is given.

    Args:
        path: Pickle, JSON or parquet.
        vocabulary_size: Of the model; ids run from 0 to one less.
        max_length: Of the model; longest prompt and answer together.
        decode: The model's token ids to text.

    Raises:
        DatasetError: Whatever is wrong with it, with its place.
    """
    roles: tuple[Role, ...] = ("tokens", "token_count", *TEXTS)
    table = read_table(path, roles)
    data_set = table.data_set
    lengths = []
    for place, ids in table.token_lists():
        largest = max(ids, default=0)
        if not ids or min(ids) < 0:
            raise DatasetError(f"{place}: no tokens, or a token id below 0; {table.mend}")
        if vocabulary_size is not None and largest >= vocabulary_size:
            raise DatasetError(
                f"{place}: token id {largest} is outside the vocabulary of {vocabulary_size:,}; the data set is "
                f"tokenized for {data_set.tokenizer}, take a model with that tokenizer"
            )
        if max_length is not None and len(ids) >= max_length:
            raise DatasetError(
                f"{place}: a prompt of {len(ids):,} tokens leaves no room for an answer in the context of "
                f"{max_length:,}; take a model with a longer one"
            )
        lengths.append(len(ids))
    for role in TEXTS:
        if role in data_set.columns:
            table.texts(role)
    if len(lengths) not in (data_set.rows, data_set.calibration_rows):
        raise DatasetError(
            f"{path}: {len(lengths):,} rows; MLPerf's {data_set.name} has {data_set.rows:,}, its calibration file "
            f"{data_set.calibration_rows:,}; {table.mend}"
        )
    notes = [_sum_note(table, len(lengths))]
    if decode is not None:
        compared = check_tokenizer(table, decode)
        notes.append(f"token ids of {compared} rows decode to their text")
    input_tokens = np.array(lengths, np.int64)
    return Checked(path, data_set, len(lengths), input_tokens, table.content_hash, tuple(notes))


def _sum_note(table: PromptTable, rows: int) -> str:
    """Holds the file against the sums of the catalogue; DatasetError if it is another one."""
    data_set = table.data_set
    if rows != data_set.rows:
        return "no sum of the calibration file is known"
    if (other := table.other_sum) is not None:
        raise DatasetError(f"{other}; {table.mend}")
    return f"the sum stated elsewhere for this file agrees ({data_set.sums_source})"
