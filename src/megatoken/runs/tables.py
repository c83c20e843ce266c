"""The two tables of a run folder: their rows as a harness gives them, their columns as Parquet keeps them.

pyarrow is imported inside the functions, so that importing the package stays cheap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from megatoken.runs import version_1

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa


class SampleRow(NamedTuple):
    """One sample that has ended. Times are seconds since the start of the measurement; None where it never happened.

    In order: it is due, the load generator sends it, the run gives it to the target, the target starts on it, its first
    and its last token are seen. ``tokenise_seconds`` and ``detokenise_seconds`` are durations; None where the run has
    no text in it. ``finish_reason`` is ``stop``, ``length`` or ``cancelled``. ``error`` is set only on one that failed.
    ``input_tokens`` is None if the prompt was not counted. ``request_sent_seconds`` is when the first byte of the
    request was given to the kernel; None where no request was sent over a network. ``first_tokens`` are those of the
    first frame of the answer, where a run counts them by the model's tokenizer.
    """

    sample_id: int
    sample_index: int
    scheduled_seconds: float
    sent_seconds: float | None
    first_token_seconds: float | None
    last_token_seconds: float | None
    input_tokens: int | None
    output_tokens: int
    finish_reason: str | None
    node: str
    replica: int = 0
    error: str | None = None
    submitted_seconds: float | None = None
    started_seconds: float | None = None
    tokenise_seconds: float | None = None
    detokenise_seconds: float | None = None
    request_sent_seconds: float | None = None
    first_tokens: int | None = None


class SeriesRow(NamedTuple):
    """One replica at one moment: its engine's ``ReplicaState``, and the ``Telemetry`` of its GPUs and its node.

    The totals of ``ReplicaState`` and counts of errors start with the measurement, all others are levels.
    None: the target does not report it, as an endpoint reports nothing of its replicas. ``system_power_watts`` is of
    the user's power meter, in the first row of each moment.
    """

    elapsed_seconds: float
    node: str
    replica: int
    output_tokens: int
    processed_tokens: int
    batched_tokens: int | None
    max_batched_tokens: int | None
    pages_free: int | None
    pages: int | None
    in_flight: int
    waiting: int
    preemptions: int | None
    power_watts: float | None = None
    clock_mhz: float | None = None
    temperature_celsius: float | None = None
    running: int | None = None
    steps: int | None = None
    decoded_tokens: int | None = None
    context_tokens: int | None = None
    recomputed_tokens: int | None = None
    computed_seconds: float | None = None
    prefix_cache_queries: int | None = None
    prefix_cache_hits: int | None = None
    memory_clock_mhz: float | None = None
    memory_temperature_celsius: float | None = None
    clock_reasons: int | None = None
    pcie_received_bytes_per_second: float | None = None
    pcie_sent_bytes_per_second: float | None = None
    ecc_corrected_errors: int | None = None
    ecc_uncorrected_errors: int | None = None
    rows_remapped: int | None = None
    pcie_replays: int | None = None
    nvlink_errors: int | None = None
    c2c_errors: int | None = None
    xid_errors: int | None = None
    last_xid: int | None = None
    package_power_watts: float | None = None
    cpu_stalled_share: float | None = None
    memory_stalled_share: float | None = None
    disk_stalled_share: float | None = None
    system_power_watts: float | None = None


TEXT_COLUMNS = ("node", "finish_reason", "error")
INT32_COLUMNS = ("replica", "input_tokens", "batched_tokens", "max_batched_tokens", "in_flight", "waiting", "running")
DURATIONS = ("tokenise_seconds", "detokenise_seconds")
MOMENTS = tuple(name for name in SampleRow._fields if name.endswith("_seconds") and name not in DURATIONS)
REAL_SUFFIXES = ("_seconds", "_watts", "_mhz", "_celsius", "_per_second", "_share")


def schema(row_type: type[SampleRow] | type[SeriesRow]) -> pa.Schema:
    """Arrow schema of a table of ``row_type``: text, float64 for what carries a physical unit, otherwise integers."""
    import pyarrow as pa

    def column_type(name: str) -> pa.DataType:
        if name in TEXT_COLUMNS:
            return pa.string()
        if name.endswith(REAL_SUFFIXES):
            return pa.float64()
        return pa.int32() if name in INT32_COLUMNS else pa.int64()

    return pa.schema([(name, column_type(name)) for name in row_type._fields])


def to_table(row_type: type[SampleRow] | type[SeriesRow], rows: Sequence[SampleRow] | Sequence[SeriesRow]) -> pa.Table:
    """Rows of ``row_type`` as an Arrow table; no rows give an empty table with every column."""
    import pyarrow as pa

    table_schema = schema(row_type)
    columns: list[Any] = list(zip(*rows, strict=True)) or [()] * len(table_schema)
    return pa.table(
        [pa.array(column, field.type) for column, field in zip(columns, table_schema, strict=True)], schema=table_schema
    )


def append(table: pa.Table, more: pa.Table) -> pa.Table:
    """Both tables as one contiguous one: a copy of memory, far cheaper than converting rows again."""
    import pyarrow as pa

    return pa.concat_tables([table, more]).combine_chunks()


def joined_runs(runs: Sequence[tuple[pa.Table, pa.Table, float]]) -> tuple[pa.Table, pa.Table]:
    """Requests and series of several runs as of one: times moved by each run's start, sample ids made distinct.

    A run is its requests, its series and the seconds from the common start to its own.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    all_requests, all_series, first_id = [], [], 0
    for requests, series, start in runs:
        changed = {name: pc.add(requests[name], start) for name in MOMENTS}
        changed["sample_id"] = pc.add(requests["sample_id"], first_id)
        first_id += len(requests)
        all_requests.append(_with_columns(requests, changed))
        all_series.append(_with_columns(series, {"elapsed_seconds": pc.add(series["elapsed_seconds"], start)}))
    series = pa.concat_tables(all_series).sort_by("elapsed_seconds")
    return pa.concat_tables(all_requests), series


def _with_columns(table: pa.Table, columns: dict[str, Any]) -> pa.Table:
    for name, column in columns.items():
        table = table.set_column(table.column_names.index(name), table.schema.field(name), column)
    return table


def write_parquet(table: pa.Table, path: Path) -> None:
    """Write ``table``. A dictionary pays only for the texts; on distinct times it doubles the work."""
    import pyarrow.parquet as pq

    pq.write_table(table, path, use_dictionary=[name for name in table.column_names if name in TEXT_COLUMNS])


def read_parquet(path: Path, row_type: type[SampleRow] | type[SeriesRow]) -> pa.Table:
    """Read a table of ``row_type``; unknown columns are dropped, missing ones raise ``KeyError``.

    Missing columns that may be empty become empty: an older run folder does not have columns that came later.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    table_schema = schema(row_type)
    # Opened once, because a run in progress may replace the file at any moment. With Arrow's own file object, because
    # Arrow's threads may still hold it when the process ends, and must not need the interpreter then.
    with pa.OSFile(str(path), "rb") as file:
        table = pq.ParquetFile(file).read()
    table = table.rename_columns([version_1.COLUMNS.get(name, name) for name in table.column_names])
    for name, default in row_type._field_defaults.items():
        if default is None and name not in table.column_names:
            table = table.append_column(table_schema.field(name), pa.nulls(len(table), table_schema.field(name).type))
    return table.select(table_schema.names).cast(table_schema)
