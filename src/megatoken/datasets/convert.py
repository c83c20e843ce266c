"""Convert a data set of MLPerf: the file of MLCommons -> Parquet."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatoken.datasets.catalog import Role
from megatoken.datasets.parquet import TEXTS, check_replaceable, write_parquet
from megatoken.datasets.tables import read_table
from megatoken.errors import DatasetError

LARGEST_ID = 2**31 - 1


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
