"""MLPerf's tables -> requests: tokenized prompts as they are, answers as long as the reference allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from megatoken.datasets.catalog import Role
from megatoken.datasets.requests import Dataset, RequestRows
from megatoken.datasets.tables import read_table
from megatoken.datasets.tokenizer_check import check_tokenizer
from megatoken.errors import DatasetError


def load_mlperf(
    path: Path,
    *,
    vocabulary_size: int,
    max_length: int,
    decode: Callable[[list[int]], str] | None = None,
    as_published: bool = False,
) -> Dataset:
    """Loads one of MLPerf's data sets; the row is the sample's index.

    Prompts are the tokenized column as it is; an answer may have the reference's ``max_new_tokens`` or what the context
    leaves.

    Args:
        path: Pickle, JSON or parquet.
        vocabulary_size: Ids run from 0 to one less.
        max_length: Most tokens, prompt and answer together, that one request may have.
        decode: The model's own, to find out a data set of another tokenizer; None if the model has none.
        as_published: Refuse a file of all the data set's rows that is not the published one; else a note says so.

    Raises:
        DatasetError: The file cannot be read, was changed, or a row cannot be served.
    """
    roles: tuple[Role, ...] = ("tokens", "token_count") if decode is None else ("tokens", "token_count", "text")
    table = read_table(path, roles)
    rows = RequestRows(path, vocabulary_size, max_length, table.data_set.max_new_tokens)
    for place, ids in table.token_lists():
        rows.add(place, ids)
    data_set = replace(rows.dataset(table.content_hash), default_used=False)  # it is the data set's own
    if len(data_set.requests) == table.data_set.rows and (other := table.other_sum) is not None:
        if as_published:
            raise DatasetError(f"{other}; {table.mend}, or claim no rules")
        data_set = replace(data_set, notes=(*data_set.notes, other))
    if decode is not None:
        check_tokenizer(table, decode)
    return data_set
