"""The qualification in a run folder, against its own values, the run's facts and the rate that was measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from megatoken.analysis.machine import unix_seconds
from megatoken.analysis.qualified import Prediction, agreement, machine_of, predict_run
from megatoken.audit.differences import Doubt
from megatoken.audit.discovery import below
from megatoken.audit.documents import json_values
from megatoken.audit.folder import RunFolder, compared
from megatoken.errors import UsageError
from megatoken.files import mapping
from megatoken.hardware.qualify.document import KIND, check_document
from megatoken.hardware.qualify.judge import answer
from megatoken.runs.run import QUALIFICATION
from megatoken.text import is_number, precise

OLDEST_SECONDS = 86_400.0
IMPOSSIBLE_RATIO, SLOW_RATIO = 1.3, 0.6
"""Of the measured over the predicted rate: other work explains what is nearer."""
PREDICTION_ERROR = 1e-6


def _is_qualified(folder: RunFolder) -> bool:
    return "qualification" in folder.run.result or below(folder.path, QUALIFICATION) in folder.tree.files


@compared(
    "run_folder.qualification",
    "The machine was healthy and the rate is what it can do",
    "A stored qualification says what this machine can reach.",
    ("result.json", QUALIFICATION),
    _is_qualified,
)
def qualification(folder: RunFolder) -> Iterator[str]:
    """What contradicts the stored qualification, or what it says against the run."""
    run = folder.run
    document = json_values(folder.tree, below(folder.path, QUALIFICATION))
    if document is None or document.get("kind") != KIND:
        there = below(folder.path, QUALIFICATION) in folder.tree.files
        problem = "is damaged: it is not the JSON of a qualification" if there else "is missing"
        yield f"result.json names a qualification, and {QUALIFICATION} {problem}"
        return
    try:
        check_document(document, QUALIFICATION)
    except UsageError as error:
        yield str(error)
        return
    stated = run.result.get("qualification") or {}
    for name in ("created_at", "device", "verdict", "answer"):
        if stated.get(name) != document.get(name):
            yield f"qualification.{name} {stated.get(name)}, {QUALIFICATION} {document.get(name)}"
    machine = document["machine"]
    for name in ("hostname", "cpu"):
        if machine.get(name) != run.environment.get(name):
            yield f"{QUALIFICATION} is of another machine: {name} {machine.get(name)}, not {run.environment.get(name)}"
    tested, began = (unix_seconds(text) for text in (document.get("created_at"), run.result.get("started_at")))
    if tested is not None and began is not None and not 0 <= began - tested <= OLDEST_SECONDS:
        when = "after" if began < tested else "before"
        yield f"{QUALIFICATION} was made {precise(abs(began - tested))} s {when} the run"
    if document.get("verdict") == "FAIL":
        yield Doubt(f"the machine failed its qualification: {' '.join(map(str, document.get('answer') or []))}")
    if folder.finished:
        yield from _rate(folder, document)
    if (given := _answer(document)) != (said := document.get("answer")):
        other = next((one for one in said if one not in given), said) if isinstance(said, list) else said
        why = "an older version may have worded it or counted in another way"
        yield Doubt(f"{QUALIFICATION} says {other!r:.200}, and its values give another sentence: {why}")


def _answer(document: Mapping[str, Any]) -> list[str]:
    """What the values say; nothing where they lack what that needs."""
    try:
        return answer(document)
    except KeyError:
        return []


def _rate(folder: RunFolder, document: Mapping[str, Any]) -> Iterator[str]:
    """Peaks and predictions in the run that are not those computed from the values, and a rate far from predicted."""
    run = folder.run
    machine = machine_of(document, QUALIFICATION)
    found = predict_run(machine, run.result, run.config, run.requests)
    predicted = found.output_tokens_per_second if isinstance(found, Prediction) else None
    stated = mapping(run.result.get("prediction"))
    given: dict[str, tuple[Any, float | None]] = {}
    given["prediction.output_tokens_per_second"] = (stated.get("output_tokens_per_second"), predicted)
    if isinstance(found, Prediction):
        given["prediction.steps"] = (stated.get("steps"), found.steps)
        parts = mapping(stated.get("part_seconds"))
        given |= {f"prediction.part_seconds.{name}": (parts.get(name), one) for name, one in found.part_seconds.items()}
    peaks = mapping(run.result.get("peaks"))
    if peaks.get("source") == QUALIFICATION:
        most = machine.most_operations_per_second(str(run.result.get("precision")))
        given["peaks.operations_per_second"] = (peaks.get("operations_per_second"), most)
        given["peaks.memory_bytes_per_second"] = (peaks.get("memory_bytes_per_second"), machine.read_bytes_per_second)
    for name, (one, other) in given.items():
        if not _agree(one, other):
            yield f"{name} {one}, {QUALIFICATION} gives {other}"
    rate = run.result.get("output_tokens_per_second")
    if not predicted or not math.isfinite(predicted) or not is_number(rate):
        return
    if not SLOW_RATIO <= rate / predicted <= IMPOSSIBLE_RATIO:
        yield Doubt(agreement(rate, predicted))


def _agree(stated: Any, found: float | None) -> bool:
    if found is None or not is_number(stated):
        return stated is found
    return math.isclose(stated, found, rel_tol=PREDICTION_ERROR)
