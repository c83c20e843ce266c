"""The files of an evaluation: ``accuracy.txt`` as MLPerf's tools write it, and ``accuracy.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatoken.accuracy.answer_log import SCORES
from megatoken.accuracy.evaluate import Scores
from megatoken.accuracy.targets import Targets, numbers
from megatoken.datasets.references import References
from megatoken.files import storage_error, to_json, write_text
from megatoken.mlperf.accuracy_log import Answers
from megatoken.runs.reasons import Reason
from megatoken.runs.run import Verdict

SCHEMA_VERSION = 2  # 1 had notes as plain sentences
TEXT = "accuracy.txt"


def document(
    answers: Answers,
    references: References,
    scores: Scores,
    targets: Targets | None,
    reasons: Sequence[Reason],
    notes: Sequence[Reason],
) -> dict[str, Any]:
    """``accuracy.json``: verdict, scores, and the files they come from. Without targets the verdict is MEASURED."""
    verdict = Verdict.MEASURED if targets is None else Verdict.INVALID if reasons else Verdict.VALID
    plain = asdict(scores)
    return {
        "kind": "accuracy",
        "schema_version": SCHEMA_VERSION,
        "verdict": verdict,
        "reasons": list(reasons),
        "metrics": plain["metrics"],
        "by_task": plain["by_task"],
        "gen_len": scores.characters,
        "gen_num": scores.answers,
        "gen_tok_len": scores.tokens,
        "tokens_per_sample": scores.tokens_per_sample,
        "identifiers_found": scores.identifiers_found,
        "empty_answers": scores.empty,
        "targets": None if targets is None else asdict(targets),
        "log": str(answers.path),
        "log_sha256": answers.sha256,
        "references": str(references.path),
        "references_sha256": references.content_hash,
        "data_set": references.data_set,
        "notes": list(notes),
    }


def write_results(folder: Path, answers: Answers, scores: Scores, result: Mapping[str, Any]) -> None:
    """Writes both files into ``folder``, which is created if missing. Raises StorageError."""
    make_folder(folder)
    line = ", ".join(f"'{name}': {_number(value)}" for name, value in numbers(scores).items())
    write_text(folder / TEXT, f"\nResults\n\n{{{line}}}\nhash={answers.sha256}\n", movable=False)
    write_text(folder / SCORES, to_json(result), movable=False)


def make_folder(folder: Path) -> None:
    """Creates a folder if it is missing. Raises StorageError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(folder, error, movable=False) from None


def _number(value: float) -> str:
    """A number as MLPerf's checker reads it: digits and one point."""
    if isinstance(value, int):
        return str(value)
    digits = f"{value:.10f}".rstrip("0")
    return f"{digits}0" if digits.endswith(".") else digits
