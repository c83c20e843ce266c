"""Judges a run folder or a log of LoadGen by its answers: what ``megatoken accuracy`` does."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatoken.accuracy.answer_log import SCORES, find_log
from megatoken.accuracy.decoding import AnswerDecoder
from megatoken.accuracy.evaluate import Scores, evaluate
from megatoken.accuracy.files import document, write_results
from megatoken.accuracy.targets import FOLDER, Targets, missed, of_baseline, of_benchmark
from megatoken.datasets.references import HELD_OUT, References, load_references
from megatoken.engine.config import model_folder
from megatoken.errors import DatasetError, UsageError
from megatoken.mlperf.accuracy_log import WHOLE_RUN, AccuracyLogError, Answers, read_answers
from megatoken.runs.reasons import Reason, reason
from megatoken.runs.run import RESULT, Run, Verdict, read_run
from megatoken.text import count_of

_WORD = re.compile(r"[a-z0-9]+")  # as rouge-score splits texts


@dataclass(frozen=True, slots=True)
class Judged:
    """The content of ``accuracy.json`` and the folder it was written to."""

    document: dict[str, Any]
    folder: Path

    @property
    def verdict(self) -> Verdict:
        """Whether the targets were reached; MEASURED without any."""
        return Verdict(self.document["verdict"])


def judge(
    # A run folder, whose ``accuracy`` folder receives both files; or LoadGen's output folder or accuracy log, which get
    # the files next to the log
    path: Path,
    *,
    references: Path | None = None,  # file with the expected answers; by default the prompts of the run
    model: Path | None = None,  # folder of the model that answered, for its tokenizer; by default the model of the run
    benchmark: str | None = None,  # MLPerf benchmark whose targets must be reached
    baseline: Path | None = None,  # result of another evaluation; ``share`` of its metrics must be reached
    share: float = 0.99,  # of each metric of the baseline
    partial: bool = False,  # rows of the data set may have no answer
    # called with the number of answers scored so far, and of all answers
    progress: Callable[[int, int], None] | None = None,
) -> Judged:
    """Scores the answers of an accuracy run and writes ``accuracy.txt`` and ``accuracy.json``.

    Raises UsageError: A file cannot be read or does not fit; StorageError: The results cannot be written.
    """
    log = find_log(path)
    run = run_of(log)
    if not partial and (sampled := sampled_by(run)) is not None:
        fix = f"{WHOLE_RUN} logs all; with --partial, only the answered rows are scored"
        raise UsageError(f"{path}: a run of {sampled} logs only some answers; {fix}")
    expected = _references(run, references, log)
    decoder = AnswerDecoder(_model(run, model, log))
    if benchmark is not None and baseline is not None:
        raise UsageError("--benchmark and --baseline: give only one of them")
    folder = log.parent if run is None else run.path / FOLDER
    answers = read_answers(log)
    targets = None
    if benchmark is not None:
        targets = of_benchmark(benchmark, expected)
    elif baseline is not None:
        targets = of_baseline(baseline, share, expected, answers, replaces=folder / SCORES)
        if targets.rows != len(expected.texts) and not partial:
            what = f"scores {targets.rows:,} of {count_of(len(expected.texts), 'row')}, like a compliance test"
            fix = f"give a baseline of {WHOLE_RUN}, or add --partial"
            raise UsageError(f"--baseline {baseline}: {what} or a run with --samples; {fix}")
    notes = []
    if run is not None and references is not None and expected.content_hash != run.result.get("data_set_sha256"):
        notes.append(reason("OTHER_REFERENCES", references=str(expected.path)))
    result, scores = scored(answers, expected, decoder, targets, notes=notes, partial=partial, progress=progress)
    write_results(folder, answers, scores, result)
    return Judged(result, folder)


def scored(
    answers: Answers,
    references: References,
    decoder: AnswerDecoder,
    targets: Targets | None,
    *,
    notes: Sequence[Reason] = (),
    partial: bool = False,
    processes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[str, Any], Scores]:
    """The content of ``accuracy.json``, and the scores that ``accuracy.txt`` states.

    Arguments are those of ``evaluate``, with the targets that must be reached and further notes. Raises UsageError.
    """
    scores = evaluate(answers, references, decoder, partial=partial, processes=processes, progress=progress)
    reasons = [*missed(scores, targets)] if targets else []
    said = [*notes, *_notes(scores, references, targets)]
    return document(answers, references, scores, targets, reasons, said), scores


def run_of(log: Path) -> Run | None:
    """The run folder that holds a log; None if it is not in one. Raises AccuracyLogError if the run was interrupted."""
    root = log.parent.parent
    if log.parent.name != "mlperf" or not (root / RESULT).is_file():
        return None
    run = read_run(root)
    if run.verdict is Verdict.INTERRUPTED:
        raise AccuracyLogError(f"{root}: the run was interrupted, so its answers are incomplete; run it again")
    return run


def sampled_by(run: Run | None) -> str | None:
    """The compliance test of a run, which logs only some answers; None for any other run."""
    test = None if run is None else run.config.get("compliance")
    return None if test is None else f"compliance test {test}"


def _references(run: Run | None, given: Path | None, log: Path) -> References:
    if given is not None:
        return load_references(given)
    prompts = None if run is None else run.config.get("prompts")
    if run is not None and prompts is None:
        held_out = load_references(HELD_OUT)
        if held_out.content_hash == run.result.get("data_set_sha256"):
            return held_out
    if run is None or not isinstance(prompts, str):
        raise UsageError(f"{log}: the expected answers are unknown; name the data set with --references")
    references = load_references(Path(prompts))
    if references.content_hash != run.result.get("data_set_sha256"):
        hashes = f"expected SHA-256 {str(run.result.get('data_set_sha256'))[:16]}, got {references.content_hash[:16]}"
        raise DatasetError(f"{prompts}: changed since the run: {hashes}; restore the file or run again")
    return references


def _model(run: Run | None, given: Path | None, log: Path) -> Path:
    model = given or (model_folder(str(run.config.get("model"))) if run is not None else None)
    if model is None or not (model / "tokenizer.json" if model.is_dir() else model).is_file():
        where = log if model is None else model
        raise UsageError(f"{where}: no tokenizer.json; name the folder of the model that answered with --model")
    return model


def _notes(scores: Scores, references: References, targets: Targets | None) -> Iterator[Reason]:
    if scores.answers < len(references.texts):
        yield reason("PARTIAL_ANSWERS", answers=scores.answers, rows=len(references.texts))
    exact = [text for text, scoring in zip(references.texts, references.scorings, strict=True) if scoring == "exact"]
    if short := sum(len(_WORD.findall(text.lower())) < 2 for text in exact):
        yield reason("ONE_WORD_REFERENCES", found=short, references=len(exact))
    if scores.characters is None and references.data_set is not None:
        left_out = "rougeLsum and gen_len are left out" if "summary" in references.scorings else "gen_len is left out"
        unsplit = ", and exact_match compares texts that are not split" if "exact_match" in scores.metrics else ""
        yield reason("NO_SENTENCE_DATA", left_out=left_out + unsplit)
    if targets is not None and (unfailing := [one.name for one in targets.targets if not one.at_least > 0]):
        yield reason("UNFAILING_TARGETS", metrics=unfailing)
    if scores.empty:
        yield reason("EMPTY_ANSWERS", empty=scores.empty, right=scores.empty_and_right or None)
    if scores.identifiers_found is not None:
        yield reason("IDENTIFIERS_FOUND", found=scores.identifiers_found)
