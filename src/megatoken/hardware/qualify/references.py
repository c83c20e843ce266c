"""What a value is compared with: bands of published values, and an earlier qualification of the same machine."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megatoken.errors import UsageError
from megatoken.files import UnreadableError, mappings, read_json_object
from megatoken.text import is_number

TABLE = Path(__file__).parents[2] / "data" / "qualify_references.csv"
BELOW_LOWEST, ABOVE_HIGHEST = 0.95, 1.03
"""A band reaches from this share of the lowest published value to this share of the highest."""
KIND, SCHEMA_VERSION = "qualify", 1


@dataclass(frozen=True, slots=True)
class Band:
    """From ``lowest`` to ``highest``, in the unit of the value, and where the published values are from."""

    lowest: float
    highest: float
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Earlier:
    """A value of an earlier qualification: its median and relative spread, and how often its test ran.

    ``slowest``: the worst of its windows; None if it had none.
    """

    median: float
    spread: float
    runs: int = 1
    slowest: float | None = None


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


def read_document(path: Path, flag: str) -> Mapping[str, Any]:
    """A ``qualify.json``, which the user gave to a flag.

    Raises:
        UsageError: it cannot be read, or is another document.
    """
    try:
        document, _, _ = read_json_object(path)
    except (UnreadableError, OSError) as error:
        raise UsageError(f"{flag} {path}: {error}; give the qualify.json of a qualification") from error
    if document.get("kind") != KIND or document.get("schema_version") != SCHEMA_VERSION:
        raise UsageError(f"{flag} {path}: not a qualify.json of version {SCHEMA_VERSION}; give one")
    return document


def read_baseline(path: Path, device: str) -> dict[tuple[str, str, str], Earlier]:
    """The values of an earlier ``qualify.json`` of the same device, by name, title and unit.

    A title has precision and sizes, so that a value is compared with the same measurement only.

    Raises:
        UsageError: it cannot be read, is another document, or is about another device.
    """
    document = read_document(path, "--baseline")
    if (other := document.get("device")) != device:
        raise UsageError(f"--baseline {path}: is about {other}, this is {device}; give one of this machine")
    return {
        (str(value.get("name")), str(value.get("title")), str(value.get("unit"))): Earlier(
            value["median"], value["spread"], test["runs"] if is_number(test.get("runs")) else 1, _slowest(value)
        )
        for test in mappings(document.get("tests"))
        for value in mappings(test.get("values"))
        if is_number(value.get("median")) and is_number(value.get("spread"))
    }


def _slowest(value: Mapping[str, Any]) -> float | None:
    windows = value.get("windows")
    numbers = [one for one in windows if is_number(one)] if isinstance(windows, list) else []
    return (max if value.get("better") == "lower" else min)(numbers, default=None)
