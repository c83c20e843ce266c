"""What a value is compared with: bands of published values, and an earlier qualification of the same machine."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from megatoken.errors import UsageError
from megatoken.hardware.qualify.catalog import Device
from megatoken.hardware.qualify.document import CORE_CLOCK, read_document
from megatoken.hardware.qualify.judge import Band, Earlier, waited
from megatoken.text import is_number

TABLE = Path(__file__).parents[2] / "data" / "qualify_references.csv"
BELOW_LOWEST, ABOVE_HIGHEST = 0.95, 1.03
"""A band reaches from this share of the lowest published value to this share of the highest."""
CLOCK_SHARE = 0.25
CORE_SHARE = 1 - (1 - 0.5) * (1 - CLOCK_SHARE)
"""Of a speed, that other virtual machines on the same host may take, which no counter shows: load on other cores lowers
the clock by up to the first, and what runs on the other thread of a core takes up to half of the rest."""
OF_THE_HOST = (
    *("kernel_launch", "kernel_round_trip", "operation_start", "thread_round_trip", "sleep_lateness"),
    *("disk_", "decode_step", "mixed_step"),
)
"""How the names of speeds begin that cores and disk of the host decide, next to a GPU."""
LINK_SHARE = 0.05
"""Of copies between a GPU and its host: with and without those of other GPUs, 53.2 to 55.5 GB/s were seen."""
SHORT_COLLECTIVES = (f"_{2**14}", f"_{2**20}")
"""How those end of collectives between GPUs whose time the host decides."""


@cache
def _published() -> dict[tuple[str, str, str], list[tuple[float, str]]]:
    rows: dict[tuple[str, str, str], list[tuple[float, str]]] = {}
    with TABLE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            rows.setdefault((row["part"], row["name"], row["unit"]), []).append((float(row["value"]), row["source"]))
    return rows


def band(part: str, name: str, unit: str) -> Band | None:
    """The band of a value on a part, such as H200; None where nothing is published."""
    rows = _published().get((part, name, unit))
    if rows is None:
        return None
    values = [value for value, _ in rows]
    sources = tuple(dict.fromkeys(source for _, source in rows))
    return Band(BELOW_LOWEST * min(values), ABOVE_HIGHEST * max(values), sources)


def taken_share(device: Device | None, name: str) -> float:
    """Of the speed of this name: what other machines on the host of a virtual machine may take of it.

    ``device``: which form of the tests measured it; None on a real machine.
    """
    if device is None:
        return 0.0
    if device == "cpu":
        return CLOCK_SHARE if name == CORE_CLOCK else CORE_SHARE
    if name.startswith(("copy_from_gpu", "copy_to_gpu")):
        return LINK_SHARE
    return CORE_SHARE if name.startswith(OF_THE_HOST) or name.endswith(SHORT_COLLECTIVES) else 0.0


def read_baseline(path: Path, device: str) -> dict[tuple[str, str, str], Earlier]:
    """The values of an earlier ``qualify.json`` of the same device, by name, title and unit.

    A title has precision and sizes, so that a value is compared with the same measurement only.

    Raises:
        UsageError: it cannot be read, is another document, is about another device, or has no measured value.
    """
    document = read_document(path, "--baseline")
    if (other := document.get("device")) != device:
        raise UsageError(f"--baseline {path}: is about {other}, this is {device}; give one of this machine")
    found = {
        (value["name"], str(value.get("title")), str(value.get("unit"))): Earlier(
            value["median"],
            value["spread"],
            test["runs"] if is_number(test.get("runs")) else 1,
            _slowest(value),
            value.get("noisy") is True,
            waited(value.get("core_wait_share")),
        )
        for test in document["tests"]
        for value in test["values"]
        if value.get("median") is not None and value.get("spread") is not None
    }
    if not found:
        raise UsageError(f"--baseline {path}: has no measured value; give the file of a full run")
    return found


def _slowest(value: Mapping[str, Any]) -> float | None:
    return (max if value.get("better") == "lower" else min)(value["windows"], default=None)
