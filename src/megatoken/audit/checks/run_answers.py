"""What a megatoken run folder says of its answers, computed again from the answers that LoadGen logged.

Scores need the answers expected, which ship with the package or lie where the configuration says; what TEST06 asks of
end tokens needs those of the model. Where they are not at hand the answer is unknown.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatoken.audit.answers import LoggedAnswer, Rescored, find_references, read_logged_answers, rescore
from megatoken.audit.checks.accuracy import TEST06_SAMPLES
from megatoken.audit.discovery import Tree, below
from megatoken.audit.evidence import Where
from megatoken.audit.finding import Observation, Severity, shown
from megatoken.audit.view import observe
from megatoken.engine.config import REFERENCE, SHAPES, end_token_ids, model_folder
from megatoken.errors import MegatokenError
from megatoken.files import UnreadableError, mapping, read_json_object, read_text
from megatoken.mlperf.accuracy_log import read_accuracy_scores
from megatoken.mlperf.detail_log import DetailLog
from megatoken.runs.run import MLPERF, RESULT, Run, Verdict
from megatoken.text import count_of

LOG, TEXT, DOCUMENT = f"{MLPERF}/mlperf_log_accuracy.json", "accuracy/accuracy.txt", "accuracy/accuracy.json"
VERIFIED, OWN_VERDICT = "compliance/TEST06/verify_accuracy.txt", "compliance/TEST06/compliance.json"
GATE_SHARE = 0.99  # of what the reference model scores in fp32
LENGTH_TOLERANCE = 0.1  # of the tokens of a mean answer
SAME = 6e-5  # of a score: four decimals are the fewest that any reference keeps
_MISSED_TARGET = re.compile(r"(?:no )?(\w+)\b")  # how a reason names it
_OTHER_REFERENCES = "is another file than the prompts of the run"


def check_answers(
    tree: Tree, folder: Run, log: DetailLog, path: str, where: tuple[Where, ...]
) -> Iterator[Observation]:
    """Scores of an accuracy run and the outcome of TEST06.

    Args:
        tree: all files.
        folder: the run, which came to its end.
        log: LoadGen's detail log of it.
        path: the folder in the tree.
        where: its result.json and what else names the places of these checks.
    """
    accuracy = folder.result.get("mode") == "accuracy"
    tested = folder.config.get("compliance") is not None or "compliance" in folder.result
    if (not accuracy and not tested) or below(path, LOG) not in tree.files:
        return
    check = "accuracy.recomputed" if accuracy else "compliance.recomputed"
    expected = "what the answers in LoadGen's log give"
    try:
        answers = read_logged_answers(tree.path(below(path, LOG)))
    except UnreadableError as error:
        yield observe(check, None, expected, shown(f"{LOG} {error}"), where)
        return
    if not answers:
        return
    if accuracy:
        yield from _scores(tree, folder, answers, path, where)
    else:
        yield from _test06(tree, folder, log, answers, path, where)


def _scores(
    tree: Tree, folder: Run, answers: Sequence[LoggedAnswer], path: str, where: tuple[Where, ...]
) -> Iterator[Observation]:
    result, stated = folder.result, mapping(folder.result.get("accuracy"))
    document, text = _document(tree, below(path, DOCUMENT)), _text_scores(tree, below(path, TEXT))
    problems = [*_needed(folder, document, text)]
    if not stated and document is None and text is None:
        problems += _unfounded(RESULT, folder.reasons, ())
        if problems:
            yield observe("accuracy.recomputed", False, "scores of such a run", shown("; ".join(problems)), where)
        return
    document = document or {}
    tokens = sum(len(answer.ids) for answer in answers)
    mean = round(tokens / len(answers), 1)
    counts = {"gen_num": len(answers), "gen_tok_len": tokens, "tokens_per_sample": mean}
    own = {RESULT: stated, DOCUMENT: document, TEXT: text or {}}
    for file, values in own.items():
        for name, value in counts.items():
            if name in values and not _near(values[name], value, 1e-9):
                problems.append(f"{file} {name} {values[name]}, the log gives {value}")
    digest = str(document.get("references_sha256") or result.get("data_set_sha256"))
    foreign = any(_OTHER_REFERENCES in str(note) for note in document.get("notes") or ())
    if digest != result.get("data_set_sha256") and not foreign:
        problems.append(f"{DOCUMENT} references_sha256 {digest[:16]}, the run's {result.get('data_set_sha256')}")
    if foreign:
        own.pop(RESULT)  # scored again, against other answers
    again = _again(tree, folder, answers, document, path, digest)
    if isinstance(again, Rescored):
        if not foreign and result.get("data_set_rows") != again.rows:
            problems.append(f"{RESULT} data_set_rows {result.get('data_set_rows')}, the data set has {again.rows}")
        for file, values in own.items():
            problems += _differing(file, values, again)
    problems += _judged(folder, stated, document, counts)
    left_out = again if isinstance(again, str) else again.left_out
    compared = len(again.metrics) if isinstance(again, Rescored) else 0
    yield observe(
        "accuracy.recomputed",
        not problems if problems or compared else None,
        "scores, tokens and targets that the logged answers give",
        shown("; ".join(problems))
        or f"{count_of(compared, 'score')} of {count_of(len(answers), 'answer')} computed again, all the same"
        + (f"; not computed: {left_out}" if left_out else ""),
        where,
    )


def _needed(folder: Run, document: Mapping[str, Any] | None, text: Mapping[str, float] | None) -> Iterator[str]:
    """Runs of the reference model over its own data set are always scored, and judged where all of it was answered."""
    result, config = folder.result, folder.config
    named = any(config.get(name) for name in ("prompts", "lengths"))
    if config.get("model") != REFERENCE or config.get("random_weights") is True or named:
        return
    stated = result.get("accuracy")
    for file, there in ((f"{RESULT} accuracy", stated), (DOCUMENT, document), (TEXT, text)):
        if not there:
            yield f"no {file}"
    rows = result.get("data_set_rows")
    if isinstance(stated, Mapping) and stated.get("targets") is None and len(folder.requests) == rows:
        yield f"no targets of a run that answered all {rows} rows"


def _again(
    tree: Tree, folder: Run, answers: Sequence[LoggedAnswer], document: Mapping[str, Any], path: str, digest: str
) -> Rescored | str:
    """The scores, or why there are none."""
    names = [document.get("references"), folder.config.get("prompts")]
    given = [Path(name) for name in names if isinstance(name, str) and name]
    beside = [tree.path(name) for name in (below(path, one.name) for one in given) if name in tree.files]
    references = find_references([*beside, *given], digest)
    if references is None:
        return f"the answers expected, SHA-256 {digest[:16]}, are not at hand"
    model = str(folder.config.get("model"))
    try:
        return rescore(answers, references, model_folder(model) / "tokenizer.json")
    except UnreadableError as error:
        return f"{model}: {error}"


def _differing(file: str, values: Mapping[str, Any], again: Rescored) -> Iterator[str]:
    flat = values.get("metrics") is None
    stated = values if flat else mapping(values["metrics"])
    for name, (value, error, answers) in again.metrics.items():
        told = stated.get(name.lower() if flat else name)
        if told is None and (values or not flat):
            yield f"{file} has no {name}, computed again {value:.7g}"
        elif flat and told is not None and not _near(told, value, SAME):
            yield f"{file} {name} {told}, computed again {value:.7g}"
        elif not flat:
            yield from _differing_mean(f"{file} {name}", told, value, error, answers)
    for task, metrics in again.by_task.items() if isinstance(values.get("by_task"), Mapping) else ():
        for name, (value, error, answers) in metrics.items():
            told = mapping(values["by_task"].get(task)).get(name)
            yield from _differing_mean(f"{file} {task} {name}", told, value, error, answers)


def _differing_mean(place: str, told: Any, value: float, error: float, answers: int) -> Iterator[str]:
    mean = mapping(told)
    if not _near(mean.get("value"), value, SAME):
        yield f"{place} {mean.get('value')}, computed again {value:.7g}"
    elif not math.isnan(error) and not _near(mean.get("standard_error"), error, SAME):
        yield f"{place} ± {mean.get('standard_error')}, computed again {error:.7g}"
    elif mean.get("answers") != answers:
        yield f"{place} of {mean.get('answers')} answers, there are {answers}"


def _judged(
    folder: Run, stated: Mapping[str, Any], document: Mapping[str, Any], counts: Mapping[str, float]
) -> Iterator[str]:
    """Targets as they were set, and a verdict that follows from them."""
    for file, values, verdict, reasons in (
        (RESULT, stated, folder.verdict, folder.reasons),
        (DOCUMENT, document, document.get("verdict"), document.get("reasons")),
    ):
        targets = values.get("targets")
        if not isinstance(targets, Mapping):
            yield from _unfounded(file, reasons, ())
            continue
        metrics = mapping(values.get("metrics"))
        scores = {name: mapping(mean).get("value") for name, mean in metrics.items()} | dict(counts)
        listed = [target for target in targets.get("targets") or () if isinstance(target, Mapping)]
        missed = [str(one.get("name")) for one in listed if not _reached(one, scores)]
        if targets.get("rows") != counts["gen_num"]:
            missed.append("rows")
        if bool(missed) and verdict != Verdict.INVALID:
            yield f"{file} {verdict}, though {', '.join(missed)} miss their targets"
        elif file == DOCUMENT and verdict == Verdict.INVALID and not reasons:
            yield f"{file} {verdict}, for no reason"
        yield from _unfounded(file, reasons, missed)
        # A run has no other; accuracy.json may be of a later evaluation, by other targets.
        if file == RESULT or str(targets.get("source")).startswith("the reference model's gate"):
            yield from _gate(file, listed)
    mine, theirs = mapping(stated.get("targets")), mapping(document.get("targets"))
    if mine and mine != theirs and mine.get("source") == theirs.get("source"):
        yield f"targets of {RESULT} are not those of {DOCUMENT}"


def _unfounded(file: str, reasons: object, missed: Collection[str]) -> Iterator[str]:
    """Reasons to be INVALID that the answers do not give."""
    for reason in map(mapping, reasons if isinstance(reasons, list) else ()):
        code, message = reason.get("code"), str(reason.get("message"))
        name = _MISSED_TARGET.match(message)
        target = "rows" if code == "ANSWERS" else name.group(1) if name else message
        if code in ("ANSWERS", "ACCURACY") and target not in (*missed, "gen_len"):
            yield f"{file} {code} {message}, though no such target is missed"


def _reached(target: Mapping[str, Any], scores: Mapping[str, Any]) -> bool:
    value, least, most = scores.get(str(target.get("name"))), target.get("at_least"), target.get("at_most")
    if not isinstance(value, int | float):
        return str(target.get("name")) == "gen_len"  # characters of texts, of which ids do not tell
    low = isinstance(least, int | float) and value < least
    return not low and not (isinstance(most, int | float) and value > most)


def _gate(file: str, listed: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The bounds of the reference model's gate follow from the baseline that ships with it."""
    baseline = json.loads((model_folder(REFERENCE) / "baseline.json").read_bytes())
    told = {str(target.get("name")): target for target in listed}
    for name, mean in baseline["metrics"].items():
        least = mapping(told.get(name)).get("at_least")
        if not _near(least, GATE_SHARE * mean["value"], SAME):
            yield f"{file} asks for {name} of {least}, the model's gate for {GATE_SHARE * mean['value']:.7g}"
    tokens, bounds = baseline["tokens_per_sample"], mapping(told.get("tokens_per_sample"))
    for name, share in (("at_least", 1 - LENGTH_TOLERANCE), ("at_most", 1 + LENGTH_TOLERANCE)):
        if not _near(bounds.get(name), share * tokens, SAME):
            yield f"{file} asks for tokens_per_sample {name} {bounds.get(name)}, the model's gate {share * tokens:.7g}"


def _test06(
    tree: Tree,
    folder: Run,
    log: DetailLog,
    answers: Sequence[LoggedAnswer],
    path: str,
    where: tuple[Where, ...],
) -> Iterator[Observation]:
    """TEST06's rules and our own about end tokens."""
    offline = log.text("effective_scenario") == "Offline"
    stated, own = mapping(folder.result.get("compliance")), _document(tree, below(path, OWN_VERDICT)) or {}
    known = _end_tokens(folder)
    ends = _named_end_tokens(stated) if known is None else known
    named = _named_end_tokens(own)
    later = ends if named is None else named  # the file may have been made anew, as somebody asked for it
    samples, reasons = (folder.requests[name].to_pylist() for name in ("sample_id", "finish_reason"))
    cut = {sample for sample, reason in zip(samples, reasons, strict=True) if reason == "length"}
    outcome = _tested(answers, offline, ends, cut)
    again = outcome if later == ends else _tested(answers, offline, later, cut)
    problems = [] if stated else [f"{RESULT} says nothing of compliance"]
    for file, told, tested in ((RESULT, stated, outcome), (OWN_VERDICT, own, again)):
        for name, value in (("passed", tested.passed), ("sound", tested.sound)) if told else ():
            if value is not None and told.get(name) is not value:
                problems.append(f"{file} {name} {told.get(name)}, the log gives {value}")
    if known is not None and stated.get("end_token_ids", list(known)) != list(known):
        problems.append(f"{RESULT} end_token_ids {stated['end_token_ids']}, the model has {list(known)}")
    if stated and bool(stated.get("findings")) is (stated.get("passed") is True and stated.get("sound") is True):
        problems.append(f"{RESULT} passed {stated['passed']}, sound {stated['sound']}, findings {stated['findings']}")
    if (outcome.passed is False or outcome.sound is False) and folder.verdict is not Verdict.INVALID:
        problems.append(f"{folder.verdict}, though the log does not pass")
    problems += _verified(tree, path, again)
    by = "taken as the run names them" if ends is not None else "so nothing was said of them"
    unknown = "" if known is not None else f"; the model's end tokens are not known here, {by}"
    yield observe(
        "compliance.recomputed",
        not problems if problems or known is not None else None,
        "first token, end tokens and lengths as the logged answers give them",
        shown("; ".join(problems)) or f"{count_of(len(answers), 'answer')} tested again, the same{unknown}",
        where,
    )
    if ends is not None and later is not None and set(later) != set(ends):
        expected = f"verified by the end tokens of the run: {', '.join(map(str, ends))}"
        found = shown(f"{OWN_VERDICT} looked for {', '.join(map(str, later))}")
        yield Observation("compliance.end_tokens", Severity.NOTE, expected, found, where)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """TEST06 of some answers; None where no end tokens are known."""

    first: bool | None  # None: the scenario reports no first tokens
    eos: bool | None
    length: bool
    sound: bool | None

    @property
    def passed(self) -> bool | None:
        if self.first is False or not self.length:
            return False
        return self.eos

    @property
    def lines(self) -> dict[str, str | None]:
        """Of the file that a submission carries."""
        return {
            "First token check pass": "Skipped" if self.first is None else str(self.first),
            "EOS check pass": None if self.eos is None else str(self.eos),
            "Sample length check pass": str(self.length),
        }


def _tested(
    answers: Sequence[LoggedAnswer], offline: bool, ends: Collection[int] | None, cut: Collection[int]
) -> _Outcome:
    trailing = [_trailing(answer, ends or ()) for answer in answers]
    return _Outcome(
        first=None if offline else all(_begins(answer) for answer in answers),
        eos=None if ends is None else max(trailing) < 2,
        length=all(answer.counted == len(answer.ids) for answer in answers),
        sound=None if ends is None else _sound(answers, trailing, ends, cut),
    )


def _verified(tree: Tree, path: str, outcome: _Outcome) -> Iterator[str]:
    """The file that a submission carries."""
    if below(path, VERIFIED) not in tree.files:
        return
    try:
        lines = read_text(tree.path(below(path, VERIFIED)))[0].splitlines()
    except UnreadableError as error:
        yield f"{VERIFIED} {error}"
        return
    told = dict(line.split(": ", 1) for line in lines if ": " in line)
    for name, value in outcome.lines.items():
        if value is not None and told.get(name) != value:
            yield f"{VERIFIED} {name} {told.get(name)}, the log gives {value}"
    passed = outcome.passed
    if passed is not None and f"TEST06 verification {'complete' if passed else 'failed'}" not in lines:
        yield f"{VERIFIED} {lines[-1] if lines else 'is empty'}, the log {'passes' if passed else 'fails'}"


def _end_tokens(folder: Run) -> tuple[int, ...] | None:
    """Those of a published shape or of a model whose files are here; None where they are not."""
    model = str(folder.config.get("model"))
    if model in SHAPES and str(folder.result.get("weights")).startswith("random"):  # else a directory of that name
        return SHAPES[model].end_token_ids
    for name in ("generation_config.json", "config.json"):
        file = model_folder(model) / name
        try:
            return end_token_ids(read_json_object(file)[0], file)
        except (UnreadableError, MegatokenError):
            continue
    return None


def _named_end_tokens(compliance: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Those that a run says it looked for; None: it does not say."""
    named = compliance.get("end_token_ids")
    return tuple(named) if isinstance(named, list) and all(isinstance(one, int) for one in named) else None


def _begins(answer: LoggedAnswer) -> bool:
    if answer.first is None or not len(answer.first):
        return False
    common = min(len(answer.first), len(answer.ids))
    return bool((answer.ids[:common] == answer.first[:common]).all())


def _trailing(answer: LoggedAnswer, ends: Collection[int]) -> int:
    others = np.flatnonzero(~np.isin(answer.ids, list(ends)))
    return len(answer.ids) - (int(others[-1]) + 1 if len(others) else 0)


def _sound(
    answers: Sequence[LoggedAnswer], trailing: Sequence[int], ends: Collection[int], cut: Collection[int]
) -> bool:
    """100 answers; end tokens in some, nowhere but at their end; and those without one were cut at their limit."""
    inside = [
        int(np.isin(answer.ids, list(ends)).sum()) - at_end for answer, at_end in zip(answers, trailing, strict=True)
    ]
    ended = all(at_end or answer.sample in cut for answer, at_end in zip(answers, trailing, strict=True))
    return len(answers) == TEST06_SAMPLES and any(trailing) and not any(inside) and ended


def _document(tree: Tree, path: str) -> Mapping[str, Any] | None:
    if path not in tree.files:
        return None
    try:
        return read_json_object(tree.path(path))[0]
    except UnreadableError:
        return {}


def _text_scores(tree: Tree, path: str) -> Mapping[str, float] | None:
    if path not in tree.files:
        return None
    try:
        return read_accuracy_scores(tree.path(path)).scores
    except UnreadableError:
        return {}


def _near(told: Any, value: float, tolerance: float) -> bool:
    return isinstance(told, int | float) and abs(told - value) <= tolerance * max(1.0, abs(value) / 100)
