"""SQL queries over many run folders: DuckDB on tables in memory, without access to files."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatoken.analysis.lookup import read_runs
from megatoken.analysis.repeats import REPEATS
from megatoken.errors import UsageError, how_to_install
from megatoken.files import plain
from megatoken.runs.run import Run
from megatoken.text import count_of

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

TABLES = ("requests", "runs", "series")
# In this order: registered tables stay readable, external access ends, then the settings are locked.
LOCKS = (
    "SET temp_directory = ''",
    "SET python_enable_replacements = false",
    "SET enable_external_access = false",
    "SET lock_configuration = true",
)


def query(paths: Sequence[Path], sql: str) -> pa.Table:
    """Run one SELECT in DuckDB's dialect over run folders; it can read three tables and change nothing.

    ``runs`` has a row for each folder: ``run``, ``path``, ``repeats`` (the folder of the repeats it is one of), every
    field of ``result.json``, and ``environment`` and ``config`` as structs. ``requests`` and ``series`` are the Parquet
    tables of all folders behind a column ``run``.

    Raises:
        UsageError: DuckDB is missing, a folder cannot be read or holds no run, or the query cannot be answered.
    """
    try:
        import duckdb
    except ImportError as error:
        raise UsageError(f"queries need DuckDB, which is not installed; {how_to_install('report')}") from error
    try:
        sql.encode()
    except UnicodeEncodeError:  # surrogates stand for other bytes of a command line
        raise UsageError("query: not UTF-8 text") from None
    runs = {run.path: run for path in paths for run in read_runs(path)}
    tables = _tables(list(runs.values()))
    with duckdb.connect(":memory:") as connection:
        for name, table in tables.items():
            connection.register(name, table)
        for lock in LOCKS:
            connection.execute(lock)
        try:
            return _answer(connection, sql)
        except duckdb.InterruptException as error:
            raise KeyboardInterrupt from error
        except duckdb.Error as error:
            raise UsageError(f"query: {_explained(str(error))}") from error


def _answer(connection: duckdb.DuckDBPyConnection, sql: str) -> pa.Table:
    from duckdb import StatementType

    statements = connection.extract_statements(sql)
    if [statement.type for statement in statements] != [StatementType.SELECT]:
        several = f"holds {count_of(len(statements), 'statement')}" if statements else "is empty"
        wrong = "is not a SELECT" if len(statements) == 1 else several
        raise UsageError(f"query: {wrong}; give one SELECT over {', '.join(TABLES)}")
    return connection.sql(sql).to_arrow_table()


def _tables(runs: Sequence[Run]) -> dict[str, pa.Table]:
    import pyarrow as pa

    names = [plain(name) for name in _names(runs)]
    rows = [
        {
            "run": name,
            "path": plain(run.path),
            "repeats": plain(_repeats(run)),
            **run.result,
            "environment": run.environment,
            "config": run.config,
        }
        for name, run in zip(names, runs, strict=True)
    ]
    keys = dict.fromkeys(key for row in rows for key in row)
    return {
        "requests": pa.concat_tables(_named(run.requests, name) for name, run in zip(names, runs, strict=True)),
        "runs": pa.table({key: _column([row.get(key) for row in rows]) for key in keys}),
        "series": pa.concat_tables(_named(run.series, name) for name, run in zip(names, runs, strict=True)),
    }


def _names(runs: Sequence[Run]) -> list[str]:
    """Names of the run folders, after that of their repeats; the whole path where names are not unique."""
    names = [f"{folder}/{run.path.name}" if (folder := _repeats(run)) else run.path.name for run in runs]
    uses = Counter(names)
    return [name if uses[name] == 1 else str(run.path) for name, run in zip(names, runs, strict=True)]


def _repeats(run: Run) -> str | None:
    """Name of the folder of repeats that the run belongs to; None without one."""
    parent = run.path.absolute().parent
    return parent.name if (parent / REPEATS).is_file() else None


def _named(table: pa.Table, run: str) -> pa.Table:
    import pyarrow as pa

    return table.add_column(0, "run", pa.repeat(pa.scalar(run), len(table)))


def _column(values: list[Any]) -> pa.Array:
    """Values of any JSON as one column; as JSON text where their types cannot stand in one."""
    import pyarrow as pa

    try:
        return pa.array([_storable(value) for value in values])
    except (pa.ArrowException, OverflowError):
        return pa.array([None if value is None else json.dumps(value, default=str) for value in values])


def _storable(value: Any) -> Any:
    """Without empty objects, for which DuckDB has no type, and with text that UTF-8 can hold."""
    if isinstance(value, dict):
        return {str(key): _storable(item) for key, item in value.items()} or None
    if isinstance(value, str):
        return plain(value)
    return [_storable(item) for item in value] if isinstance(value, list) else value


def _explained(message: str) -> str:
    """DuckDB's message on one line, without its echo of the query and guesses at its own catalogue."""
    lines = re.sub(r"^\w+ Error: ", "", message.split("\nLINE ")[0]).splitlines()
    kept = [line.strip().removesuffix("!") for line in lines if line.strip() and 'Did you mean "pg_' not in line]
    text = "; ".join(kept)[:400]
    return f"{text}; the tables are {', '.join(TABLES)}" if "Table with name" in text else text
