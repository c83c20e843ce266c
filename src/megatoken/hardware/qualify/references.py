"""What a value is compared with: bands of published values, and an earlier qualification of the same machine."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from megatoken.engine.gpus import gpus
from megatoken.errors import UsageError
from megatoken.files import UnreadableError, read_json_object
from megatoken.hardware.qualify.catalog import Device
from megatoken.hardware.qualify.judge import Band, Earlier, Verdict, overall, verdict_of_test, waited
from megatoken.hardware.qualify.values import SPEEDS
from megatoken.text import is_number

TABLE = Path(__file__).parents[2] / "data" / "qualify_references.csv"
BELOW_LOWEST, ABOVE_HIGHEST = 0.95, 1.03
"""A band reaches from this share of the lowest published value to this share of the highest."""
KIND, SCHEMA_VERSION = "qualify", 1
CORE_CLOCK = "core_clock"
"""A value of every qualification of a processor, and of none of a GPU."""
CLOCK_SHARE = 0.25
CORE_SHARE = 1 - (1 - 0.5) * (1 - CLOCK_SHARE)
"""Of a speed, that other virtual machines on the same host may take, which no counter shows: load on other cores lowers
the clock by up to the first, and what runs on the other thread of a core takes up to half of the rest."""
OF_THE_HOST = (
    *("kernel_launch", "kernel_round_trip", "operation_start", "thread_round_trip", "sleep_lateness"),
    *("disk_", "decode_step", "mixed_step"),
)
"""How the names of speeds begin that cores and disk of the host decide, next to a GPU."""
SHORT_COLLECTIVES = (f"_{2**14}", f"_{2**20}")
"""How those end of collectives between GPUs whose time the host decides."""
SPREAD, MARK = "spread", "@"
"""The test that compares like parts, see ``parts``, and what stands before a part in the names of its tests."""
MEDIAN_ERROR = 1e-6
"""Relative: how far a stored median may be from that of its windows."""


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
    return CORE_SHARE if name.startswith(OF_THE_HOST) or name.endswith(SHORT_COLLECTIVES) else 0.0


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
    check_document(document, f"{flag} {path}")
    return document


def check_document(document: Mapping[str, Any], where: str) -> None:
    """Refuse a ``qualify.json`` whose machine, tests or values are not what a qualification writes.

    Absent and null fields pass, except verdicts and what a measured value needs to be used. A speed is above zero. A
    median is that of its windows. A value that counts errors fails. The verdict of a test follows from those of its
    values, and that of the document from those of its tests.

    Raises:
        UsageError: the message begins with ``where`` and names the field.
    """
    problem = _damage(document)
    if problem is not None:
        raise UsageError(f"{where}: {problem}; the file is damaged or was edited: repeat megatoken qualify")


def _damage(document: Mapping[str, Any]) -> str | None:
    """What is wrong with a document, with the place in it; None if it is whole."""
    if isinstance(version := document.get("schema_version"), bool):
        return f"schema_version is {version}, not a number"
    if not isinstance(device := document.get("device"), str):
        return "device is not a text"
    if not isinstance(machine := document.get("machine"), Mapping):
        return "machine is not an object"
    if not isinstance(memory := machine.get("memory") or {}, Mapping):
        return "machine: memory is not an object"
    if not _number_or_none(memory.get("available_bytes")):
        return "machine: memory: available_bytes is not a number"
    if not isinstance(tests := document.get("tests"), list):
        return "tests is not a list"
    names: list[str | None] = []
    for number, test in enumerate(tests):
        if not isinstance(test, Mapping):
            return f"tests[{number}] is not an object"
        name = None if test.get("name") is None else str(test["name"])
        # A rack of nodes with several GPUs has two: of the GPUs of its first node, and of its nodes.
        if name in names and name not in (None, SPREAD):
            return f"tests[{number}]: name is {name!r:.80}, which an earlier test has"
        names.append(name)
        if not isinstance(values := test.get("values"), list):
            return f"tests[{number}]: values is not a list"
        for index, value in enumerate(values):
            if not isinstance(value, Mapping):
                return f"tests[{number}]: values[{index}] is not an object"
            of_parts = (name or "").partition(MARK)[0] == SPREAD
            if (problem := _damage_of_value(value) or _damage_of_count(value, of_parts=of_parts)) is not None:
                return f"tests[{number}]: values[{index}]: {problem}"
            if value["name"] == CORE_CLOCK and device in gpus():
                return f"device is the GPU {device}, but tests[{number}]: values[{index}] is a processor's {CORE_CLOCK}"
        if (verdict := verdict_of_test(test)) != test.get("verdict"):
            return f"tests[{number}]: verdict is {test.get('verdict')!r:.80}, but its values give {verdict}"
    if (verdict := overall(tests)) != document.get("verdict"):
        return f"verdict is {document.get('verdict')!r:.80}, but its tests give {verdict}"
    return None


def _damage_of_value(value: Mapping[str, Any]) -> str | None:
    if not isinstance(value.get("name"), str):
        return "name is not a text"
    if value.get("verdict") not in list(Verdict):
        return f"verdict is none of {', '.join(Verdict)}"
    for name in ("title", "unit", "better"):
        if not isinstance(value.get(name, ""), str):
            return f"{name} is not a text"
    for name in ("median", "spread", "drift", "core_wait_share"):
        if not _number_or_none(value.get(name)):
            return f"{name} is not a number"
    if (median := value.get("median")) is None:
        return None
    windows = value.get("windows")
    if not isinstance(windows, list) or not all(map(_number_or_none, windows)):
        return "windows is not a list of numbers"
    if value.get("better", SPEEDS[0]) in SPEEDS and median <= 0:
        return f"median is {median}, which no speed is"
    if None in windows:  # what was not finite is stored as null
        return None
    if not windows or not math.isclose(median, statistics.median(windows), rel_tol=MEDIAN_ERROR):
        return f"median is {median}, but that of its windows is {statistics.median(windows) if windows else None}"
    return None


def _damage_of_count(value: Mapping[str, Any], *, of_parts: bool) -> str | None:
    """What is wrong with the verdict on a count of errors, of which a single one fails.

    ``of_parts``: the value is of a test that compares like parts, where slow ones may be MARGINAL.
    """
    windows = value.get("windows")
    if value.get("better") != "zero" or not isinstance(windows, list):
        return None
    known = [one for one in windows if is_number(one)]
    fitting = [Verdict.FAIL, Verdict.MARGINAL] if of_parts and value["name"].startswith("slow_") else [Verdict.FAIL]
    if max(known, default=0) > 0 and value["verdict"] not in fitting:
        return f"verdict is {value['verdict']}, but windows counts {max(known)} where any error is a FAIL"
    return None


def _number_or_none(value: Any) -> bool:
    return value is None or is_number(value)


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
    numbers = [one for one in value["windows"] if one is not None]
    return (max if value.get("better") == "lower" else min)(numbers, default=None)
