"""A stored qualification as evidence: the machine was healthy shortly before, and the rate is what it can do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatoken.analysis.machine import unix_seconds
from megatoken.analysis.qualified import Prediction, machine_of, predict_run
from megatoken.audit.differences import Doubt
from megatoken.audit.discovery import below
from megatoken.audit.documents import json_values
from megatoken.audit.folder import RunFolder, compared
from megatoken.runs.run import QUALIFICATION
from megatoken.text import is_number, precise

OLDEST_SECONDS = 86_400.0
IMPOSSIBLE_RATIO, SLOW_RATIO = 1.3, 0.6
"""Of the measured over the predicted rate: predictions are within 15 % on a machine without other work."""
SAME = 1e-6


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
    if document is None or document.get("kind") != "qualify":
        yield f"result.json names a qualification, and {QUALIFICATION} is missing or cannot be read"
        return
    stated = run.result.get("qualification") or {}
    for name in ("created_at", "device", "verdict", "answer"):
        if stated.get(name) != document.get(name):
            yield f"qualification.{name} {stated.get(name)}, {QUALIFICATION} {document.get(name)}"
    machine = document.get("machine") or {}
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


def _rate(folder: RunFolder, document: Mapping[str, Any]) -> Iterator[str]:
    run = folder.run
    stated = (run.result.get("prediction") or {}).get("output_tokens_per_second")
    found = predict_run(machine_of(document, QUALIFICATION), run.result, run.config, run.requests)
    predicted = found.output_tokens_per_second if isinstance(found, Prediction) else None
    if is_number(stated) and (predicted is None or abs(stated / predicted - 1) > SAME):
        yield f"prediction.output_tokens_per_second {stated}, {QUALIFICATION} gives {predicted}"
    rate = run.result.get("output_tokens_per_second")
    if predicted is None or not is_number(rate):
        return
    if rate > IMPOSSIBLE_RATIO * predicted:
        yield Doubt(f"{precise(rate)} tokens/s; this machine should reach {precise(predicted)} by its qualification")
    elif rate < SLOW_RATIO * predicted:
        slow = f"{precise(rate)} tokens/s; this machine should reach {precise(predicted)} by its qualification"
        yield Doubt(f"{slow}: megatoken doctor says what kept it from that")
