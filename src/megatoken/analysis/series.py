"""The time series of a run as arrays: replicas apart, totals over time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatoken.hardware.telemetry import ERROR_WORDS, ERRORS

if TYPE_CHECKING:
    import pyarrow as pa

Floats = NDArray[np.float64]


def replicas(series: pa.Table) -> Iterator[tuple[str, int, NDArray[np.intp]]]:
    """Node, number and rows of each replica of a table of ``SeriesRow``, in the order of time."""
    elapsed, replica = numbers(series["elapsed_seconds"]), numbers(series["replica"])
    for node, mask in masks(series["node"]).items():
        for number in np.unique(replica[mask]):
            rows = np.flatnonzero(mask & (replica == number))
            yield node, int(number), rows[np.argsort(elapsed[rows], kind="stable")]


def tokens_per_second_within(series: pa.Table, start: float, end: float) -> float | None:
    """Rate of the output tokens that were seen from ``start`` to ``end``, between rows of the series interpolated.

    Not from the samples: a step takes longer the more are generating, so tokens of a sample that outlasts the window
    are not evenly spaced. None when the series does not reach over the window.
    """
    times, tokens = tokens_from_start(series)
    if times[-1] < end or len(times) < 2:
        return None
    begun, ended = np.interp([start, end], times, tokens)
    return float((ended - begun) / (end - start))


def tokens_from_start(series: pa.Table) -> tuple[Floats, Floats]:
    """Times of all rows and the output tokens until then, from (0, 0) on."""
    times, tokens = totals_over_time(series, ["output_tokens"])
    return np.append(0.0, times), np.append(0.0, tokens)


def totals_over_time(series: pa.Table, columns: list[str]) -> list[Floats]:
    """Times of all rows, sorted, then each of ``columns`` summed over the replicas at those times.

    Between two rows of a replica its value is interpolated; after its last row it keeps the last value.
    """
    elapsed, *values = (numbers(series[name]) for name in ("elapsed_seconds", *columns))
    times = np.unique(elapsed)
    totals = [np.zeros(len(times)) for _ in columns]
    for _, _, rows in replicas(series):
        for total, value in zip(totals, values, strict=True):
            total += np.interp(times, elapsed[rows], value[rows])
    return [times, *totals]


def gpu_errors(series: pa.Table) -> list[dict[str, Any]]:
    """What the GPUs of a run counted: replica, field of ``SeriesRow``, kind in words, count, time of the first."""
    found = []
    for node, replica, rows in replicas(series):
        for name in ERRORS:
            counts = numbers(series[name])[rows]
            if (bad := np.flatnonzero(counts > 0)).size:
                found.append(
                    {
                        "replica": f"{node}/{replica}",
                        "field": name,
                        "kind": ERROR_WORDS[name],
                        "count": int(np.nanmax(counts)),
                        "begins_seconds": float(numbers(series["elapsed_seconds"])[rows][bad[0]]),
                    }
                )
    return found


def masks(column: pa.ChunkedArray) -> dict[str, NDArray[np.bool_]]:
    """A mask [N] for each distinct text of ``column`` [N], in order."""
    import pyarrow.compute as pc

    names = sorted(name for name in column.unique().to_pylist() if name is not None)
    return {name: pc.equal(column, name).fill_null(False).to_numpy() for name in names}


def numbers(column: pa.ChunkedArray) -> Floats:
    """A column as float64 [N], NaN for what is absent."""
    return np.asarray(column.to_numpy(), dtype=np.float64)
