"""A published table of micro-benchmarks next to a qualification: each row with our value in its unit, or why not.

The table has the columns sku, benchmark, parameter (``name=value`` with ``;`` between), value and unit, as the Azure
AI-benchmarking-guide's results are collected in ``data/azure_guide_microbenchmarks.csv``.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from megatoken.analysis.qualified import Machine, machine_of, measured_values, predict
from megatoken.engine.config import SHAPES, EngineConfig
from megatoken.errors import MegatokenError, UsageError
from megatoken.files import cause
from megatoken.hardware.qualify.document import CORE_CLOCK
from megatoken.text import is_number

AZURE = "azure"
TABLE = Path(__file__).parents[1] / "data" / "azure_guide_microbenchmarks.csv"
COLUMNS = ("sku", "benchmark", "parameter", "value", "unit")
UNITS = {
    "TFLOPS": ("operations/s", 1e12),
    "TFLOP/s": ("operations/s", 1e12),
    "GFLOP/s": ("operations/s", 1e9),
    "TB/s": ("bytes/s", 1e12),
    "GB/s": ("bytes/s", 1e9),
    "MB/s": ("bytes/s", 1e6),
    "reads/s": ("bytes/s", 4096.0),
    "writes/s": ("bytes/s", 4096.0),
    "tokens/s": ("tokens/s", 1.0),
}
"""What a unit measures, and how much of it is one. Our random reads and writes are of 4 KiB."""
FORMATS = {"FP8": "fp8", "FP16": "bf16", "BF16": "bf16", "FP32": "fp32"}
ALL_CORES = "_all_cores"
"""How names of a processor's products end."""
SAME_RATE = {"FP16": "bf16 has the same rate as fp16"}
STREAM = {"copy": "copy", "mul": "copy", "add": "triad", "triad": "triad", "dot": "read"}
SAME_BYTES = {"mul": "copy moves the same bytes", "add": "triad moves the same bytes"}
COPIES = {"h2d": "copy_to_gpu", "d2h": "copy_from_gpu", "d2d_bidirectional_read": "p2p_both_ways"}
DISK = {
    "sequential_read": ("disk_sequential_read", "1M"),
    "sequential_write": ("disk_sequential_write", "1M"),
    "random_read": ("disk_random_read_32", "4k"),
    "random_write": ("disk_random_write_32", "4k"),
}
MODELS = {"llama3.1-8b": "llama3.1-8b", "llama3-8b": "llama3.1-8b", "llama2-70b": "llama2-70b"}
OFFLINE, ALL_REDUCE = "llm_offline", "allreduce_busbw"
"""How names of benchmarks begin, and end."""
BANDWIDTHS = ("hbm_stream", "cpu_stream", "nvbandwidth", "transferbench", "fio")
MOST_REQUESTS = 1000
MOST_TOKENS = 1_000_000


@dataclass(frozen=True, slots=True)
class Counterpart:
    """Our value for a row of a table: its name in the qualification, or None and why; and what differs."""

    name: str | None
    note: str = ""


def compare_with(document: Mapping[str, Any], table: str) -> dict[str, Any]:
    """The field ``comparison`` of a qualification: every row of a table (``azure``, or a CSV file) next to our value.

    Raises:
        UsageError: the file cannot be read, or is another table.
    """
    path, table_rows = table_of(table)
    values = measured_values(document)
    machine = machine_of(document, "this qualification")
    predicted = cache(partial(_rate, machine))
    processor = machine.gpu is None and any(name.endswith((CORE_CLOCK, ALL_CORES)) for name in values)
    rows = []
    for row in table_rows:
        parameters = _parameters(row)
        found = _prediction(parameters) if row["benchmark"].startswith(OFFLINE) else None
        entry: dict[str, Any] = {name: row[name] for name in ("sku", "benchmark", "parameter", "unit")}
        entry |= {"theirs": float(row["value"]), "ours": None, "ratio": None}
        unit = _unit(row)
        if found is not None:
            rate, note = predicted(*found) if not isinstance(found, str) else (None, found)
            entry |= {"ours": rate, "name": "predicted rate", "note": note}
        else:
            counterpart = counterpart_of(row["benchmark"], parameters, processor=processor)
            value = values.get(counterpart.name) if counterpart.name else None
            note = counterpart.note
            if counterpart.name and value is None:
                note = f"{counterpart.name} was not measured by these tests" + (f"; {note}" if note else "")
            if value is not None:
                entry["ours"] = converted(value["median"], str(value.get("unit")), unit)
            entry |= {"name": counterpart.name, "note": note}
        if is_number(entry["ours"]) and entry["theirs"]:
            entry["ratio"] = entry["ours"] / entry["theirs"]
        rows.append(entry)
    return {
        "table": path.name,
        "rows": rows,
        "measured": sum(row["ours"] is not None for row in rows),
        "same_part": sum(row["sku"] == document["device"] and row["ours"] is not None for row in rows),
    }


def converted(value: float, unit: str, wanted: str) -> float:
    """``value`` of ``unit`` in another unit of the same quantity.

    Raises:
        UsageError: a unit is unknown, or they measure different things.
    """
    for one in (unit, wanted):
        if one not in UNITS:
            raise UsageError(f"--compare: unknown unit {one}; known are {', '.join(UNITS)}")
    (quantity, factor), (other, divisor) = UNITS[unit], UNITS[wanted]
    if quantity != other:
        raise UsageError(f"--compare: {unit} and {wanted} measure different things")
    return value * factor / divisor


def counterpart_of(benchmark: str, parameters: Mapping[str, str], *, processor: bool = False) -> Counterpart:
    """Which value of a qualification, of a GPU or of a processor, measures the same as a row."""
    if benchmark.startswith("gemm"):
        dtype = parameters.get("dtype", "")
        sides = {parameters.get(name) for name in ("m", "n", "k")}
        if dtype not in FORMATS:
            return Counterpart(None, f"qualify multiplies no {dtype}")
        if len(sides) > 1:
            return Counterpart(None, "not a square; qualify measures squares and the products of decoder layers")
        product = f"gemm_{FORMATS[dtype]}_{sides.pop()}"
        if processor:  # where bf16 and fp16 may differ
            return Counterpart(f"{product}{ALL_CORES}", f"ours: {FORMATS[dtype]} on a processor")
        return Counterpart(product, SAME_RATE.get(dtype, ""))
    if benchmark in ("hbm_stream", "cpu_stream"):
        op = parameters.get("op", "")
        prefix = "hbm" if benchmark == "hbm_stream" else "memory"
        if op not in STREAM:
            return Counterpart(None, f"qualify has no op {op!r:.80}; it has those of {', '.join(STREAM)}")
        return Counterpart(f"{prefix}_{STREAM[op]}", SAME_BYTES.get(op, ""))
    if benchmark in ("nvbandwidth", "transferbench"):
        direction = parameters.get("direction", "")
        if direction not in COPIES:
            return Counterpart(None, f"qualify has no direction {direction!r:.80}; it has {', '.join(COPIES)}")
        return Counterpart(COPIES[direction])
    if benchmark == "fio":
        name, block = DISK.get(parameters.get("pattern", ""), (None, ""))
        size = parameters.get("block_size", "")
        if name is None:
            return Counterpart(None, "qualify has no such pattern of a disk")
        if size != block:
            return Counterpart(None, f"blocks of {size}; ours are of {block}")
        return Counterpart(name)
    if benchmark.endswith(ALL_REDUCE):
        ours = "ours: processes on a processor" if processor else "ours: the GPUs of this machine"
        return Counterpart(f"all_reduce_{parameters.get('message_bytes')}", ours)
    if benchmark == "attention":
        tokens = parameters.get("seqlen")
        return Counterpart(None, f"forward and backward of {tokens} tokens; ours is the forward of shorter prompts")
    return Counterpart(None, "fixed batches of one short answer; qualify has no such test")


def table_of(table: str) -> tuple[Path, list[dict[str, str]]]:
    """The file and the rows of ``azure`` or of a CSV file. Raises as ``read_table``."""
    path = TABLE if table == AZURE else Path(table)
    return path, read_table(path)


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a table. Raises UsageError: the file cannot be read, lacks a column, or a field cannot be used."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:  # Excel writes a byte order mark
            table = csv.DictReader(line for line in file if not line.startswith("#"))
            rows, names = list(table), table.fieldnames or ()
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"--compare {path}: cannot be read ({cause(error)}); give a CSV table, or azure") from error
    if any(name not in names for name in COLUMNS):
        raise UsageError(f"--compare {path}: expected the columns {', '.join(COLUMNS)}; give such a table, or azure")
    if not rows:
        raise UsageError(f"--compare {path}: has no row after its header; give a table with rows, or azure")
    for number, row in enumerate(rows, 1):
        if (problem := _damage(row)) is not None:
            raise UsageError(f"--compare {path}: row {number}: {problem}; correct it")
    return rows


def _damage(row: Mapping[str, str | None]) -> str | None:
    """What is wrong with a row, by field; None if nothing is."""
    known = {name: field for name in COLUMNS if (field := row[name]) is not None}  # None: the row is too short
    if missing := [name for name in COLUMNS if name not in known]:
        return f"{missing[0]} is missing"
    try:
        value = float(known["value"])
    except ValueError:
        value = math.nan
    if not is_number(value) or value < 0:
        return f"value {known['value']!r:.80} is no number from 0 on"
    if (unit := _unit(known)) not in UNITS:
        return f"unit {unit!r:.80} is unknown; known are {', '.join(UNITS)}"
    measured, benchmark = _quantity(known["benchmark"]), known["benchmark"]
    if measured not in (None, UNITS[unit][0]):
        return f"unit {unit} does not measure {benchmark}, which is in {measured}"
    if benchmark.startswith(OFFLINE):
        counts = {"requests": str(MOST_REQUESTS)} | _parameters(known)
        for name in ("isl", "osl", "requests"):
            if not (count := counts.get(name, "")).isdecimal() or not 0 < float(count) <= MOST_TOKENS:
                return f"parameter: {name} is {count!r:.80}, not a whole number from 1 to {MOST_TOKENS:,}"
    return None


def _parameters(row: Mapping[str, str]) -> dict[str, str]:
    return dict(part.split("=", 1) for part in row["parameter"].split(";") if "=" in part)


def _unit(row: Mapping[str, str]) -> str:
    """Without a remark, such as whole replica."""
    return row["unit"].strip().partition(" ")[0]


def _quantity(benchmark: str) -> str | None:
    """What our value for a benchmark measures, as in ``UNITS``; None if we have none."""
    if benchmark.startswith("gemm"):
        return "operations/s"
    if benchmark.startswith(OFFLINE):
        return "tokens/s"
    return "bytes/s" if benchmark in BANDWIDTHS or benchmark.endswith(ALL_REDUCE) else None


def _prediction(parameters: Mapping[str, str]) -> tuple[str, int, int, int] | str:
    """Model, prompt and answer tokens and requests of a row of rates, or why it cannot be predicted."""
    model = MODELS.get(parameters.get("model", ""))
    if model is None:
        return f"{parameters.get('model', 'a model without a name')} is no shape of one GPU"
    if (gpus := parameters.get("tp", "an unknown number of")) != "1":
        return f"{gpus} GPUs share the model there; qualify measures one"
    requests = min(MOST_REQUESTS, int(parameters.get("requests", MOST_REQUESTS)))
    return model, int(parameters["isl"]), int(parameters["osl"]), requests


def _rate(machine: Machine, model: str, prompt: int, answer: int, requests: int) -> tuple[float | None, str]:
    """The rate in fp8 that a machine should reach, and a note."""
    if machine.gpu is None:
        return None, "their rates are of fp8 on a GPU"
    config = EngineConfig(precision="fp8")
    try:
        shape = SHAPES[model]
        costs, memory = machine.costs(shape, config), machine.memory(shape, config)
        found = predict(costs, memory, [(prompt, answer)] * requests)
    except MegatokenError as error:
        return None, str(error)
    return found.output_tokens_per_second, "ours is predicted from the qualification"
