"""Verifies the log of a compliance test and writes the file that a submission carries: ``megatoken verify``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatoken.accuracy.answer_log import find_log
from megatoken.accuracy.files import make_folder
from megatoken.accuracy.judge import run_of, sampled_by
from megatoken.accuracy.targets import read_result
from megatoken.engine.config import SHAPES, end_token_ids, model_folder
from megatoken.errors import UsageError
from megatoken.files import UnreadableError
from megatoken.mlperf.accuracy_log import WHOLE_RUN, read_answers
from megatoken.mlperf.compliance import TEST06_RUN, ComplianceResult, check_test06, check_test07, check_test09
from megatoken.mlperf.detail_log import DETAIL_LOG, read_detail_log
from megatoken.runs.run import RESULT, Run

if TYPE_CHECKING:
    import pyarrow as pa

FOLDER = "compliance"  # of a run folder


def verify(
    test: str, path: Path, *, model: str | Path | None = None, end_tokens: str | None = None
) -> tuple[ComplianceResult, Path]:
    """Checks one test and writes its file into the run folder's ``compliance/TEST..``, or next to the log.

    Args:
        test: TEST06, TEST07 (from the ``accuracy.json`` of the same run) or TEST09.
        path: A run folder, LoadGen's output folder or accuracy log.
        model: TEST06: the model whose end tokens count; by default those that the run was judged by.
        end_tokens: TEST06: comma-separated end token ids instead of a model.

    Raises UsageError: A file cannot be read; StorageError: The file cannot be written.
    """
    log = find_log(path)
    run = run_of(log)
    if test != "TEST06" and (sampled := sampled_by(run)) is not None:
        raise UsageError(f"{path}: a run of {sampled} logs only some answers; {test} needs all: {WHOLE_RUN}")
    if test == "TEST07":
        result = check_test07(*_exact_match(log, log.parent if run is None else run.path))
    elif test == "TEST09":
        result = check_test09(read_answers(log))
    else:
        answers, offline = read_answers(log, TEST06_RUN), _scenario(log) == "Offline"
        ends, cut = _end_token_ids(run, model, end_tokens, log), None if run is None else cut_samples(run.requests)
        result = check_test06(answers, offline=offline, end_token_ids=ends, cut_samples=cut)
    if run is not None:
        return result, write_result(result, run.path)
    make_folder(log.parent)
    return result, result.write(log.parent)


def write_result(result: ComplianceResult, run_folder: Path) -> Path:
    """Writes the file that a submission carries, and our own, into a run folder. Raises StorageError."""
    folder = run_folder / FOLDER / result.test
    make_folder(folder)
    return result.write(folder)


def cut_samples(requests: pa.Table) -> set[int]:
    """The samples whose answers ended at their limit."""
    samples, reasons = (requests[name].to_pylist() for name in ("sample_id", "finish_reason"))
    return {sample for sample, reason in zip(samples, reasons, strict=True) if reason == "length"}


def _scenario(log: Path) -> str:
    detail = log.with_name(DETAIL_LOG)
    try:
        scenario = read_detail_log(detail).text("effective_scenario")
    except UnreadableError as error:
        raise UsageError(f"{detail}: {error}; it states the scenario, so keep it next to the accuracy log") from None
    if scenario is None:
        raise UsageError(f"{detail}: does not state the scenario; copy it again")
    return scenario


def _end_token_ids(run: Run | None, model: str | Path | None, given: str | None, log: Path) -> Sequence[int]:
    if given is not None:
        ids = [part.strip() for part in given.split(",")]
        if not all(part.isascii() and part.isdigit() and len(part) < 11 for part in ids):
            raise UsageError(f"--end-tokens {given}: expected comma-separated token ids, such as 128001,128009")
        return [int(part) for part in ids]
    place = log if model is None else f"--model {model}"
    if model is None and run is not None:
        stated = run.result.get("compliance")
        if isinstance(stated, dict) and stated.get("end_token_ids") is not None:
            return end_token_ids({"eos_token_id": stated["end_token_ids"]}, run.path / RESULT)
        model = str(run.config.get("model"))
    folder = None if model is None else model_folder(model)
    if folder is not None and folder.is_dir():
        from megatoken.engine.checkpoint import read_config  # imports PyTorch, which takes a while

        return read_config(folder).end_token_ids
    if str(model) in SHAPES:
        return SHAPES[str(model)].end_token_ids
    raise UsageError(f"{place}: the model's end tokens are unknown; give --model DIR or --end-tokens")


def _exact_match(log: Path, folder: Path) -> tuple[float, int]:
    """``exact_match`` of the evaluation of ``log`` in ``folder``, and its number of answers."""
    try:
        file, document = read_result(folder)
    except UsageError:
        read_answers(log)  # a log without answers is the first thing to fix
        raise
    try:
        return float(document["metrics"]["exact_match"]["value"]), int(document["gen_num"])
    except (KeyError, TypeError, ValueError):
        fix = f"run megatoken accuracy {folder} --references FILE, JSON lines with the expected answers as reference"
        raise UsageError(f"{file}: has no exact_match, which TEST07 needs; {fix}") from None
