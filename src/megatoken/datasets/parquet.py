"""Data sets of MLPerf as Parquet: converted once from the file of MLCommons, checked by hash at every use."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatoken.datasets.catalog import Algorithm, MlperfDataSet, Role, Sums, catalog, missing
from megatoken.datasets.requests import LazyRows
from megatoken.errors import DatasetError, UsageError
from megatoken.files import open_input, write_atomically
from megatoken.runs.seal import refuse_sealed

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = "1"
TEXTS: tuple[Role, ...] = ("text", "reference", "metric")
_FACTS = ("format", "data_set", "source_file", "source_sha256", "source_md5", "content_sha256")
_FIX = "convert the file of MLCommons again with megatoken dataset convert"


def write_parquet(
    path: Path,
    data_set: MlperfDataSet,
    token_lists: Sequence[NDArray[np.int32]],
    texts: Mapping[Role, Sequence[str]],
    source: Path,
) -> str:
    """Write a table: token ids and cells of text by row; returns the SHA-256 of its content, also stored there.

    The sums of ``source``, the file that was converted, are recorded. ``path`` is replaced atomically.

    Raises:
        StorageError: The disk refuses.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {"tokens": pa.array(token_lists, pa.list_(pa.int32()))}
    columns |= {role: pa.array(texts[role], pa.string()) for role in TEXTS if role in texts}
    table = pa.table(columns)
    content = content_sha256(table)
    values = (FORMAT, data_set.name, source.name, file_sum(source, "sha256"), file_sum(source, "md5"), content)
    table = table.replace_schema_metadata({_key(name): value for name, value in zip(_FACTS, values, strict=True)})
    write_atomically(path, partial(pq.write_table, table, compression="zstd"))
    return content


def check_replaceable(path: Path) -> None:
    """Raise UsageError if ``path`` is a file that ``write_parquet`` did not write, or in a sealed folder."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    refuse_sealed(path)
    if not path.is_file():
        return
    try:
        ours = _key("format").encode() in (pq.read_schema(path).metadata or {})
    except (OSError, ValueError, pa.ArrowException):
        ours = False
    if not ours:
        raise UsageError(
            f"{path}: the file exists and is not a converted data set; move it away, or name another file with --out"
        )


def read_parquet(path: Path, roles: Collection[Role]) -> tuple[MlperfDataSet, dict[Role, Sequence[object]], Sums]:
    """The data set, its columns by role and the sums of the file that was converted.

    Raises:
        DatasetError: The file cannot be read, was not made by ``write_parquet``, or was changed since.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open_input(path) as file:
            table = pq.read_table(file)
    except FileNotFoundError:
        raise missing(path) from None
    except (OSError, ValueError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())[:120]
        raise DatasetError(f"{path}: cannot be read as parquet ({reason}); {_FIX}") from None
    stored = {
        key.decode("utf-8", "replace"): value.decode("utf-8", "replace")
        for key, value in (table.schema.metadata or {}).items()
    }
    facts = {name: stored.get(_key(name), "") for name in _FACTS}
    if facts["format"] != FORMAT or facts["data_set"] not in catalog():
        raise DatasetError(f"{path}: does not name the MLPerf data set it was converted from; {_FIX}")
    found = content_sha256(table) if _has_our_columns(table) else "that of other columns"
    if found != facts["content_sha256"]:
        raise DatasetError(
            f"{path}: changed since it was converted: the SHA-256 of its content is {found[:16]}, "
            f"recorded is {facts['content_sha256'][:16]}; {_FIX}"
        )
    columns: dict[Role, Sequence[object]] = {
        role: table[role].to_pylist() for role in TEXTS if role in roles and role in table.column_names
    }
    if "tokens" in roles:
        values, ends = _flat(table["tokens"])
        columns["tokens"] = LazyRows(len(ends) - 1, lambda row: values[ends[row] : ends[row + 1]])
    sums: Sums = {"sha256": facts["source_sha256"], "md5": facts["source_md5"]}
    return catalog()[facts["data_set"]], columns, sums


def file_sum(path: Path, algorithm: Algorithm) -> str:
    """The checksum of a file, hexadecimal."""
    with open_input(path) as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


def content_sha256(table: pa.Table) -> str:
    """SHA-256 over names, lengths and values of all columns: independent of compression and layout."""
    digest = hashlib.sha256()
    for name in sorted(table.column_names):
        digest.update(f"{name} {len(table)}\n".encode())
        if name == "tokens":
            values, ends = _flat(table[name])
            digest.update(np.diff(ends).astype("<i8").tobytes())
            digest.update(values.astype("<i4").tobytes())
        else:
            for cell in table[name].to_pylist():
                encoded = b"" if cell is None else cell.encode()
                digest.update(b"%d " % (-1 if cell is None else len(encoded)))
                digest.update(encoded)
    return digest.hexdigest()


def _key(name: str) -> str:
    return f"megatoken.{name}"


def _has_our_columns(table: pa.Table) -> bool:
    import pyarrow as pa

    def is_ours(field: pa.Field) -> bool:
        if field.name == "tokens":
            return bool(pa.types.is_list(field.type) and field.type.value_type == pa.int32())
        return bool(field.name in TEXTS and field.type == pa.string())

    return "tokens" in table.column_names and all(is_ours(field) for field in table.schema)


def _flat(column: pa.ChunkedArray) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """All ids end to end [tokens], and where each row ends, after a leading 0 [rows + 1]."""
    whole = column.combine_chunks()
    lengths = whole.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    values = whole.flatten().to_numpy(zero_copy_only=False)
    return values.astype(np.int32, copy=False), np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
