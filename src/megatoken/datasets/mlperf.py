"""Data sets of MLPerf -> requests: the tokenized prompts, with the answer length of the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from megatoken.datasets.catalog import Role
from megatoken.datasets.requests import Dataset, RequestRows
from megatoken.datasets.tables import check_tokenizer, read_table
from megatoken.errors import DatasetError


def load_mlperf(
    path: Path,
    *,
    vocabulary_size: int,
    max_length: int,
    decode: Callable[[list[int]], str] | None = None,
    as_published: bool = False,
) -> Dataset:
    """Load a data set of MLPerf (pickle, JSON or parquet); the row is the sample index.

    Prompts are the unchanged tokenized column. The maximum answer length is the reference's ``max_new_tokens``, or what
    the context leaves. ``decode`` is of the model's tokenizer, to detect a data set of another one. A file that has all
    rows but is not the published one is refused if it must be ``as_published``; otherwise a note reports it.

    Raises:
        DatasetError: The file cannot be read, was changed, or a row cannot be served.
    """
    roles: tuple[Role, ...] = ("tokens", "token_count") if decode is None else ("tokens", "token_count", "text")
    table = read_table(path, roles)
    rows = RequestRows(path, vocabulary_size, max_length, table.data_set.max_new_tokens)
    for place, ids in table.token_lists():
        rows.add(place, ids)
    data_set = replace(rows.dataset(table.content_hash), default_used=False)  # the limit is the data set's own
    if len(data_set.requests) == table.data_set.rows and (other := table.other_sum) is not None:
        if as_published:
            raise DatasetError(f"{other}; {table.fix}, or claim no rules")
        data_set = replace(data_set, notes=(*data_set.notes, other))
    if decode is not None:
        check_tokenizer(table, decode)
    return data_set
