"""What scores must reach: a benchmark's published targets, or a share of what a baseline reached."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatoken.accuracy.answer_log import SCORES
from megatoken.accuracy.evaluate import Scores
from megatoken.accuracy.scores import SENTENCES_MEND, sentence_splitter
from megatoken.datasets.catalog import catalog
from megatoken.datasets.references import References
from megatoken.errors import UsageError
from megatoken.mlperf.accuracy_log import Answers
from megatoken.mlperf.benchmarks import benchmark_of
from megatoken.runs.reasons import Reason
from megatoken.text import count_of, nearest

FOLDER = "accuracy"  # of a run folder
BY_SENTENCES = frozenset(("rougeLsum", "gen_len", "exact_match"))  # of MLPerf's references, which split texts first
LENGTH_TOLERANCE = 0.1  # of the tokens a sample, as MLPerf allows around its reference


@dataclass(frozen=True, slots=True)
class Target:
    """Bounds of one number."""

    name: str
    at_least: float
    at_most: float | None = None


@dataclass(frozen=True, slots=True)
class Targets:
    """What must be reached, and whose targets they are. ``rows``: answers that must be there."""

    source: str
    targets: tuple[Target, ...]
    rows: int


def of_benchmark(name: str, references: References) -> Targets:
    """The targets that MLPerf's submission checker has for a benchmark, such as ``llama2-70b-99.9``.

    Args:
        name: Of the benchmark.
        references: Of the evaluation in hand; they must be those of the benchmark's data set.

    Raises:
        UsageError: No benchmark of that name is scored here, it is of another data set, or one of its scores needs
            NLTK's sentence data, which is not there.
    """
    benchmark = benchmark_of(name, None)
    scored = {known: entry for entry in catalog().values() for known in entry.benchmarks}
    if benchmark is None or benchmark.name not in scored:
        meant = nearest(name, scored)
        mend = f"did you mean {meant}? Known are" if meant else "known are"
        raise UsageError(f"--benchmark {name}: not scored here; {mend} {', '.join(scored)}")
    data_set = scored[benchmark.name].name
    if references.data_set != data_set:
        raise UsageError(
            f"--benchmark {name}: is of MLPerf's {data_set} data set, but {references.path} is "
            + (f"that of {references.data_set}" if references.data_set else "none of MLPerf's")
        )
    names = {"rougel": "rougeL", "rougelsum": "rougeLsum"}
    targets = [Target(names.get(metric, metric), at_least) for metric, at_least in benchmark.accuracy.items()]
    if benchmark.tokens_per_sample:
        targets.append(Target("tokens_per_sample", *benchmark.tokens_per_sample))
    if benchmark.gen_len:
        targets.append(Target("gen_len", *benchmark.gen_len))
    if any(target.name in BY_SENTENCES for target in targets) and sentence_splitter() is None:
        raise UsageError(f"--benchmark {name}: is judged by sentences too; {SENTENCES_MEND}")
    return Targets(f"MLPerf {benchmark.name}", tuple(targets), benchmark.accuracy_rows)


def of_baseline(
    path: Path, share: float, references: References, answers: Answers | None = None, *, replaces: Path | None = None
) -> Targets:
    """A share of every metric of another evaluation, and its tokens a sample within 10 %.

    Args:
        path: An ``accuracy.json``, or the folder that has one.
        share: Of each metric that must be reached.
        references: Of the evaluation in hand; the baseline's must be the same.
        answers: Of the evaluation in hand; the baseline's must be others.
        replaces: The file that will be written.

    Raises:
        UsageError: It cannot be read, is of other answers expected or of the same log, would be replaced, or asks for
            nothing.
    """
    file, document = read_result(path)
    try:
        metrics = {str(name): float(metric["value"]) for name, metric in document["metrics"].items()}
        tokens, rows, digest = (document[key] for key in ("tokens_per_sample", "gen_num", "references_sha256"))
        tokens, rows = float(tokens), int(rows)
        if not all(map(math.isfinite, (tokens, *metrics.values()))):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"{file}: no result of megatoken accuracy; make it anew") from None
    if digest != references.content_hash:
        raise UsageError(
            f"{file}: scored against other expected answers than {references.path}; make it anew with those"
        )
    if answers is not None and document.get("log_sha256") == answers.sha256:
        raise UsageError(
            f"{file}: scored from the very log that is to be judged, or a copy of it (SHA-256 {answers.sha256[:16]}), "
            "which would only be held against itself; give the evaluation of another run"
        )
    if replaces is not None and replaces.exists() and file.samefile(replaces):
        raise UsageError(f"{file}: would be replaced by what it is to judge; give it from another folder")
    targets = [Target(name, share * value) for name, value in metrics.items()]
    if not any(target.at_least > 0 for target in targets):
        why = "a share of 0" if any(value > 0 for value in metrics.values()) else "every score in it is 0"
        raise UsageError(f"{file}: {why}, so nothing could fail it; give a baseline with scores and a share above 0")
    targets.append(Target("tokens_per_sample", (1 - LENGTH_TOLERANCE) * tokens, (1 + LENGTH_TOLERANCE) * tokens))
    return Targets(f"{share:g} of {file}", tuple(targets), rows)


def read_result(path: Path) -> tuple[Path, dict[str, Any]]:
    """An ``accuracy.json``: itself, in that folder, or in the ``accuracy`` folder of a run folder; and its content.

    Raises:
        UsageError: There is none, or it cannot be read.
    """
    places = (path, path / SCORES, path / FOLDER / SCORES)
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise UsageError(f"{path}: no {SCORES} there; make it: megatoken accuracy {path}")
    try:
        document = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise UsageError(f"{file}: no result of megatoken accuracy; make it anew")
    return file, document


def numbers(scores: Scores) -> dict[str, float]:
    """The names and values that an ``accuracy.txt`` states."""
    values: dict[str, float] = {name: mean.value for name, mean in scores.metrics.items()}
    if scores.characters is not None:
        values["gen_len"] = scores.characters
    return values | {
        "gen_num": scores.answers,
        "gen_tok_len": scores.tokens,
        "tokens_per_sample": scores.tokens_per_sample,
    }


def missed(scores: Scores, targets: Targets) -> list[Reason]:
    """Every target that is not reached, with the numbers."""
    return list(_missed(numbers(scores), targets, scores.answers))


def _missed(values: Mapping[str, float], targets: Targets, answers: int) -> Iterator[Reason]:
    if answers != targets.rows:
        yield Reason(
            code="ANSWERS", message=f"{count_of(answers, 'answer')}; {targets.source} asks for {targets.rows:,}"
        )
    for target in targets.targets:
        value = values.get(target.name)
        found = f"no {target.name}" if value is None else f"{target.name} is {value:.7g}"
        if value is None or value < target.at_least:
            wanted = f"asks for {target.at_least:.7g} or more"
        elif target.at_most is not None and value > target.at_most:
            wanted = f"allows {target.at_most:.7g} at most"
        else:
            continue
        yield Reason(code="ACCURACY", message=f"{found}; {targets.source} {wanted}")
