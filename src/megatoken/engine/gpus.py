"""Data-sheet facts of GPUs: ``megatoken/data/gpu_specs.csv``, where every row names its source."""

from __future__ import annotations

import csv
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megatoken.engine.config import Precision
from megatoken.engine.schemes import SCHEMES
from megatoken.errors import ConfigError

_TABLE = Path(__file__).parents[1] / "data" / "gpu_specs.csv"
_BYTES_PER_NOMINAL_GB = 150_754_820_096 / 141e9
"""An H200 of "141 GB" reports this many bytes: data sheets count in powers of two, less what the driver keeps."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU by its data sheet, dense figures.

    Attributes:
        operations_per_second: of matrix products, by precision of their inputs; absent if the GPU has no such units.
        published_operations_per_second: of a product with three sides of 16,384, measured and published, by precision.
        link_bytes_per_second: to other GPUs, in one direction; None: unknown.
    """

    name: str
    operations_per_second: Mapping[Precision, float]
    published_operations_per_second: Mapping[Precision, float]
    memory_bytes: int
    memory_bytes_per_second: float
    link_bytes_per_second: float | None
    power_limit_watts: float


@cache
def gpus() -> dict[str, Gpu]:
    """The table, by name."""
    with _TABLE.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return {row["gpu"]: _gpu(row) for row in rows}


def find_gpu(name: str) -> Gpu:
    """The GPU of that name, in any case. Raises ConfigError: unknown; the message has the nearest name."""
    known = {one.lower(): gpu for one, gpu in gpus().items()}
    if name.lower() in known:
        return known[name.lower()]
    nearest = difflib.get_close_matches(name.lower(), known, n=1)
    fix = f"did you mean {known[nearest[0]].name}?" if nearest else f"known are {', '.join(gpus())}"
    raise ConfigError(f"GPU {name!r} is not in gpu_specs.csv; {fix}")


def _gpu(row: Mapping[str, str]) -> Gpu:
    def scaled(column: str, unit: float) -> float | None:
        return float(row[column]) * unit if row[column] else None

    def rates(columns: Mapping[Precision, str | None]) -> dict[Precision, float]:
        found = {precision: scaled(column, 1e12) for precision, column in columns.items() if column is not None}
        return {precision: rate for precision, rate in found.items() if rate is not None}

    driver_bytes = scaled("driver_memory_mib", 2**20)
    both_directions = scaled("scale_up_gb_s_per_gpu_both_directions", 1e9)
    return Gpu(
        name=row["gpu"],
        operations_per_second=rates({scheme.precision: scheme.spec_column for scheme in SCHEMES}),
        published_operations_per_second=rates({scheme.precision: scheme.published_column for scheme in SCHEMES}),
        memory_bytes=round(driver_bytes or float(row["hbm_gb"]) * 1e9 * _BYTES_PER_NOMINAL_GB),
        memory_bytes_per_second=float(row["hbm_bandwidth_tb_s"]) * 1e12,
        link_bytes_per_second=None if both_directions is None else both_directions / 2,
        power_limit_watts=float(row["tdp_w"]),
    )
