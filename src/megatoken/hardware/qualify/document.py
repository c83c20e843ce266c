"""A stored ``qualify.json``: read again, and refused if it is not what a qualification writes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatoken.engine.gpus import gpus
from megatoken.errors import UsageError
from megatoken.files import UnreadableError, read_json_object
from megatoken.hardware.qualify.judge import (
    IMPOSSIBLE_SHARE,
    Verdict,
    baseline_limit,
    graded,
    is_unsteady,
    overall,
    verdict_of_test,
)
from megatoken.hardware.qualify.values import COUNTS, SPEEDS, Value, share_of
from megatoken.hardware.specification import part_name
from megatoken.text import is_number, number

KIND, SCHEMA_VERSION = "qualify", 1
CORE_CLOCK = "core_clock"
"""A value of every qualification of a processor, and of none of a GPU."""
SPREAD, MARK = "spread", "@"
"""The test that compares like parts, see ``parts``, and what stands before a part in the names of its tests."""
ROUNDING = 1e-6
"""How far a stored median, spread or drift may be from that of its windows, relative and absolute."""


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

    Absent and null fields pass, except verdicts and what a measured value needs to be used. A speed is above zero.
    Median, spread and drift are those of the windows. A value that counts errors fails, and one that is behind its band
    or its baseline does not pass. The verdict of a test follows from those of its values, and that of the document from
    those of its tests.

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
    for place, test in enumerate(tests):
        if not isinstance(test, Mapping):
            return f"tests[{place}] is not an object"
        name = None if test.get("name") is None else str(test["name"])
        # A rack of nodes with several GPUs has two: of the GPUs of its first node, and of its nodes.
        if name in names and name not in (None, SPREAD):
            return f"tests[{place}]: name is {name!r:.80}, which an earlier test has"
        names.append(name)
        if not isinstance(values := test.get("values"), list):
            return f"tests[{place}]: values is not a list"
        for index, value in enumerate(values):
            if not isinstance(value, Mapping):
                return f"tests[{place}]: values[{index}] is not an object"
            of_parts = (name or "").partition(MARK)[0] == SPREAD
            if (
                problem := _damage_of_value(value)
                or _damage_of_count(value, of_parts=of_parts)
                or _damage_of_speed(value)
            ) is not None:
                return f"tests[{place}]: values[{index}]: {problem}"
            if value["name"] == CORE_CLOCK and part_name(device) in gpus():
                return f"device is the GPU {device}, but tests[{place}]: values[{index}] is a processor's {CORE_CLOCK}"
        if (verdict := verdict_of_test(test)) != test.get("verdict"):
            return f"tests[{place}]: verdict is {test.get('verdict')!r:.80}, but its values give {verdict}"
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
    windows = value.get("windows")
    lost = isinstance(windows, list) and None in windows  # what was not finite is stored as null
    if lost and value["verdict"] != Verdict.FAIL:
        return f"verdict is {value['verdict']}, but windows has null, which is a FAIL"
    if lost or (median := value.get("median")) is None:
        return None
    if not isinstance(windows, list) or not all(map(_number_or_none, windows)):
        return "windows is not a list of numbers"
    if value.get("better", SPEEDS[0]) in SPEEDS and median <= 0:
        return f"median is {median}, which no speed is"
    whole = Value(value["name"], "", "", windows)
    for name in ("median", "spread", "drift"):
        stored, computed = value.get(name), getattr(whole, name)
        if stored is not None and not (windows and math.isclose(stored, computed, rel_tol=ROUNDING, abs_tol=ROUNDING)):
            return f"{name} is {stored}, but that of its windows is {computed if windows else None}"
    return None


def _damage_of_count(value: Mapping[str, Any], *, of_parts: bool) -> str | None:
    """What is wrong with the verdict on a count of errors: a single one fails, and a rare one is MARGINAL.

    ``of_parts``: the value is of a test that compares like parts, where slow ones may be MARGINAL.
    """
    windows, better = value.get("windows"), value.get("better")
    if better not in COUNTS or not isinstance(windows, list):
        return None
    known = [one for one in windows if is_number(one)]
    least = Verdict.MARGINAL if better == "rare" or (of_parts and value["name"].startswith("slow_")) else Verdict.FAIL
    if max(known, default=0) > 0 and value["verdict"] not in (least, Verdict.FAIL):
        return f"verdict is {value['verdict']}, but windows counts {max(known)} where any error is a {least}"
    return None


def _damage_of_speed(value: Mapping[str, Any]) -> str | None:
    """What is wrong with a verdict on a speed that is better than its windows, bound, band and baseline allow."""
    median, verdict, better = value.get("median"), Verdict(value["verdict"]), value.get("better", "")
    if median is None or better not in SPEEDS or verdict is Verdict.FAIL:
        return None
    steady = value.get("noisy") is False
    if steady and is_unsteady(value.get("spread") or 0.0, value.get("drift") or 0.0, value.get("core_wait_share")):
        return "noisy is False, but its windows or its waits for cores are"
    bound = value.get("bound")
    if isinstance(bound, Mapping) and bound.get("certain") and is_number(most := bound.get("value")) and most > 0:
        share = share_of(median, most, better)
        if share is not None and share > IMPOSSIBLE_SHARE:
            return f"verdict is {verdict}, but {median} is {share:.0%} of its bound, which is a FAIL"
    limits = _limits(value, better)
    if verdict is Verdict.PASS and not limits:
        return "verdict is PASS, but it has neither a band nor a baseline"
    for name, limit in limits.items():
        due = graded(median, limit, better)
        if due is not Verdict.PASS and verdict is Verdict.PASS:
            return f"verdict is PASS, but {median} is behind {number(limit)}, which its {name} allows"
        if due is Verdict.FAIL and steady and not value.get("taken_share"):
            return f"verdict is {verdict}, but {median} is far behind {number(limit)}, which its {name} allows"
    return None


def _limits(value: Mapping[str, Any], better: str) -> dict[str, float]:
    """What the band and the baseline of a speed allow."""
    limits, band = {}, value.get("band")
    if isinstance(band, Mapping) and is_number(limit := band.get("highest" if better == "lower" else "lowest")):
        limits["band"] = limit
    before, allowed = value.get("baseline"), value.get("tolerance")
    # Older versions state what is allowed also where the baseline waited for cores, and then is no reference.
    if is_number(before) and is_number(allowed) and value["verdict"] != Verdict.NO_REFERENCE:
        limits["baseline"] = baseline_limit(before, allowed, better)
    return limits


def _number_or_none(value: Any) -> bool:
    return value is None or is_number(value)
