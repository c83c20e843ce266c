"""The answers of a run folder, judged again with the functions that judged them: scores, targets and TEST06."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatoken.accuracy.decoding import AnswerDecoder
from megatoken.accuracy.evaluate import Scores
from megatoken.accuracy.files import TEXT
from megatoken.accuracy.gate import Judgement, accuracy_judgement, compliance_judgement, reference_gate
from megatoken.accuracy.judge import scored
from megatoken.accuracy.targets import BY_SENTENCES, FOLDER, Target, Targets, numbers
from megatoken.accuracy.verify import cut_samples
from megatoken.audit.differences import differences
from megatoken.audit.discovery import Tree, below
from megatoken.audit.documents import json_values
from megatoken.datasets.references import HELD_OUT, References, load_references
from megatoken.engine.config import REFERENCE, SHAPES, end_token_ids, model_folder
from megatoken.errors import MegatokenError
from megatoken.files import UnreadableError, mapping, open_regular, plain, read_json_object, read_text
from megatoken.mlperf.accuracy_log import ACCURACY_LOG, Answers, read_accuracy_scores, read_answers
from megatoken.mlperf.compliance import DOCUMENT, ComplianceResult, check_test06
from megatoken.runs.run import MLPERF, RESULT, SCHEMA_VERSION, Run

SCORES, SCORE_TEXT = f"{FOLDER}/accuracy.json", f"{FOLDER}/{TEXT}"
TESTED, VERIFIED = f"compliance/TEST06/{DOCUMENT}", "compliance/TEST06/verify_accuracy.txt"
MOST_LOG_BYTES = MOST_REFERENCES_BYTES = 2**30
MOST_SCORED_BYTES = 2_000_000  # of token ids; the scores of 500,000 take a minute or two of a core
SCORE = 6e-5  # relative: references keep four decimals
_NOT_COMPARED = {"log", "references", "notes", "reasons", "schema_version"}  # paths, sentences for people, forms


class UnknownError(Exception):
    """What a field follows from is not here; the message says why."""


class Rejudged(NamedTuple):
    """What the answers of a run show when they are judged again."""

    judged: Judgement | None  # what the verdict of the run depends on; None where that is not known here
    # every stored score, count, target and line that differs; None without logged answers
    problems: list[str] | None = None
    unknown: str = ""  # why they cannot be judged here
    other_ends: str = ""  # how the end tokens that TEST06 was verified with differ from those of the run


def judged_again(tree: Tree, path: str, run: Run, *, compliance: bool) -> Rejudged:
    """The logged answers of a run folder, judged again.

    Args:
        tree: All files.
        path: The folder.
        run: Its contents.
        compliance: Whether TEST06 judged the answers; else an evaluation, if the run measured accuracy.
    """
    if not compliance and run.result.get("mode") != "accuracy":
        return Rejudged(Judgement({}, ()))
    try:
        if below(path, f"{MLPERF}/{ACCURACY_LOG}") not in tree.files:
            return Rejudged(None)
        answers = _logged_answers(tree.path(below(path, f"{MLPERF}/{ACCURACY_LOG}")))
        return (_compliance if compliance else _accuracy)(tree, path, run, answers)
    except UnknownError as error:
        return Rejudged(None, [], str(error))
    except Exception as error:  # fields of a type that no run writes can break any step
        return Rejudged(None, [not_computed(error)])


def not_computed(error: Exception) -> str:
    """Why something cannot be recomputed."""
    why = f"{error.args[0]} is missing" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
    return f"cannot be computed: {why}"


def _logged_answers(file: Path) -> Answers:
    if file.stat().st_size > MOST_LOG_BYTES:
        raise UnknownError(f"{ACCURACY_LOG} has more than {MOST_LOG_BYTES:,} bytes")
    try:
        answers = read_answers(file)
        answers.token_ids()
    except MegatokenError as error:
        raise UnknownError(str(error).replace(str(file), ACCURACY_LOG)) from None
    return answers


def _accuracy(tree: Tree, path: str, run: Run, answers: Answers) -> Rejudged:
    """Raises UnknownError: the expected answers or the tokenizer are not here, or scores would take too long."""
    document, judged, problems = json_values(tree, below(path, SCORES)), Judgement({}, ()), []
    stored = run.result.get("accuracy")
    if _is_gated(run):
        references = _references(tree, path, run, {})
        rows = len(references.texts)
        gate = reference_gate(references.content_hash, min(len(answers.records), rows))
        if gate is None:
            raise UnknownError("the gate of the reference model is of another data set")
        again, _ = _scored(answers, references, run, gate.targets)
        judged = accuracy_judgement(again)
        problems += _unlike(f"{RESULT} accuracy", stored, judged.facts["accuracy"], references)
        if run.result.get("data_set_rows") != rows:
            problems.append(f"{RESULT} data_set_rows {run.result.get('data_set_rows')}, the data set has {rows}")
        problems += [f"no {name}" for name in (SCORES, SCORE_TEXT) if below(path, name) not in tree.files]
    elif stored is not None:
        problems.append(f"{RESULT} accuracy, though nothing judges the answers of such a run")
    try:
        problems += _evaluation(tree, path, run, answers, document) if document is not None else ()
    except UnknownError:
        if not problems:
            raise
    return Rejudged(judged, problems)


def _evaluation(tree: Tree, path: str, run: Run, answers: Answers, document: Mapping[str, Any]) -> Iterator[str]:
    """``accuracy.json`` and ``accuracy.txt``, which ``megatoken accuracy`` may have written later."""
    digest, asked = str(document.get("references_sha256")), str(run.result.get("data_set_sha256"))
    codes = {mapping(note).get("code") for note in document.get("notes") or ()}
    if digest != asked and "OTHER_REFERENCES" not in codes and document.get("schema_version") != 1:
        yield f"{SCORES} references_sha256 {digest[:16]}, the run had {asked[:16]}"
    references, targets = _references(tree, path, run, document), _targets(document.get("targets"))
    again, scores = _scored(answers, references, run, targets)
    yield from _unlike(SCORES, document, again, references)
    given, wanted = ([str(mapping(one).get("code")) for one in of.get("reasons") or ()] for of in (document, again))
    if given != wanted and not any(target.name in BY_SENTENCES for target in (targets.targets if targets else ())):
        yield f"{SCORES} reasons {', '.join(given) or 'none'}, recomputed {', '.join(wanted) or 'none'}"
    if below(path, SCORE_TEXT) in tree.files:
        try:
            stated = read_accuracy_scores(tree.path(below(path, SCORE_TEXT))).scores
        except UnreadableError as error:
            yield f"{SCORE_TEXT} {error}"
            return
        yield from _unlike(
            SCORE_TEXT, stated, {name.lower(): value for name, value in numbers(scores).items()}, references
        )


def _compliance(tree: Tree, path: str, run: Run, answers: Answers) -> Rejudged:
    """Raises UnknownError: the model's end tokens are not here, and nothing differs by those that the run names."""
    stored, document = mapping(run.result.get("compliance")), json_values(tree, below(path, TESTED))
    known, named = _end_tokens(run), _named(stored)
    ends, later = named if known is None else known, _named(mapping(document))
    outcome = _tested(run, answers, ends or ())
    problems = _unlike_test(run, f"{RESULT} compliance", run.result.get("compliance"), outcome)
    again = outcome if later is None else _tested(run, answers, later)  # verified with other end tokens, if asked to
    if document is not None:
        problems += _unlike_test(run, TESTED, document, again)
    if below(path, VERIFIED) in tree.files:
        try:
            lines = read_text(tree.path(below(path, VERIFIED)))[0].splitlines()
        except UnreadableError as error:
            lines = [str(error)]
        problems += [f"{VERIFIED}: no line {line}" for line in again.lines if line not in lines]
    if not problems and known is None:
        raise UnknownError("the model's end tokens are not known here; by those that the run names, nothing differs")
    other = ""
    if later is not None and ends is not None and set(later) != set(ends):
        other = f"{TESTED} looked for {', '.join(map(str, later))}, the run for {', '.join(map(str, ends))}"
    return Rejudged(compliance_judgement(outcome), problems, other_ends=other)


def _scored(
    answers: Answers, references: References, run: Run, targets: Targets | None
) -> tuple[dict[str, Any], Scores]:
    size = sum(len(record.data) for record in answers.records)
    if size > MOST_SCORED_BYTES:
        raise UnknownError("scores of so many answers take minutes; megatoken accuracy computes them")
    try:
        decoder = AnswerDecoder(model_folder(str(run.config.get("model"))))
        document, scores = scored(answers, references, decoder, targets, partial=True, processes=1)
    except MegatokenError as error:
        raise UnknownError(str(error)) from None
    return plain(document), scores


def _unlike(file: str, stored: Any, again: Mapping[str, Any], references: References) -> list[str]:
    """Scores that need sentences differ by the release of NLTK, and so are left out."""
    if not isinstance(stored, Mapping):
        return [f"no {file}"]
    left_out = {"rougeLsum", "rougelsum", "gen_len"}
    if not set(references.scorings) <= {"exact", "summary", "rouge"}:
        left_out.add("exact_match")
    found = differences(stored, again, relative=SCORE, ignoring=_NOT_COMPARED | left_out)
    return [f"{file} {one}" for one in found]


def _unlike_test(run: Run, file: str, stored: Any, outcome: ComplianceResult) -> list[str]:
    if not isinstance(stored, Mapping):
        return [f"no {file}"]
    again = plain(outcome.to_document())
    if run.result["schema_version"] < SCHEMA_VERSION or not isinstance(stored.get("findings"), list):
        again.pop("findings")  # sentences, which named paths
    return [f"{file} {one}" for one in differences(stored, again, ignoring={"message"})]


def _tested(run: Run, answers: Answers, ends: tuple[int, ...]) -> ComplianceResult:
    cut = cut_samples(run.requests)
    return check_test06(answers, offline=run.result["scenario"] == "offline", end_token_ids=ends, cut_samples=cut)


def _is_gated(run: Run) -> bool:
    """Whether the answers are those of the reference model to its own data set."""
    config = run.config
    named = config.get("prompts") or config.get("lengths")
    return config.get("model") == REFERENCE and config.get("random_weights") is not True and not named


def _references(tree: Tree, path: str, run: Run, document: Mapping[str, Any]) -> References:
    """The answers expected: those that ship, or a file that the run or its evaluation names, by its hash."""
    digest = str(document.get("references_sha256") or run.result.get("data_set_sha256"))
    named = [Path(name) for name in (document.get("references"), run.config.get("prompts")) if isinstance(name, str)]
    inside = [tree.path(name) for name in (below(path, one.name) for one in named) if name in tree.files]
    for file in (HELD_OUT, *inside, *named):
        try:
            open_regular(file).close()  # anyone may have named it: no pipe, nothing without an end
            if file.stat().st_size <= MOST_REFERENCES_BYTES:
                references = load_references(file)
                if references.content_hash == digest:
                    return references
        except (UnreadableError, MegatokenError, OSError, ValueError):
            continue
    raise UnknownError(f"the expected answers, SHA-256 {digest[:16]}, are not here")


def _targets(stored: Any) -> Targets | None:
    if not isinstance(stored, Mapping):
        return None
    return Targets(**{**stored, "targets": tuple(Target(**one) for one in stored["targets"])})


def _end_tokens(run: Run) -> tuple[int, ...] | None:
    """Those of a published shape, or of a model whose files are here."""
    model = str(run.config.get("model"))
    if model in SHAPES and run.result.get("random_weights"):  # otherwise it is a folder of that name
        return SHAPES[model].end_token_ids
    for name in ("generation_config.json", "config.json"):
        file = model_folder(model) / name
        try:
            return end_token_ids(read_json_object(file)[0], file)
        except (UnreadableError, MegatokenError):
            continue
    return None


def _named(stored: Mapping[str, Any]) -> tuple[int, ...] | None:
    named = stored.get("end_token_ids")
    return tuple(named) if isinstance(named, list) and all(isinstance(one, int) for one in named) else None
