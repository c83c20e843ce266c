"""What scores must reach: a benchmark's published targets, or a share of what a baseline reached."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatoken.accuracy.answer_log import SCORES
from megatoken.accuracy.evaluate import Scores
from megatoken.accuracy.scores import SENTENCES_FIX, sentence_splitter
from megatoken.datasets.catalog import catalog
from megatoken.datasets.references import References
from megatoken.errors import UsageError
from megatoken.mlperf.accuracy_log import Answers
from megatoken.mlperf.benchmarks import benchmark_of
from megatoken.runs.reasons import Reason, reason
from megatoken.text import nearest

FOLDER = "accuracy"  # of a run folder
BY_SENTENCES = frozenset(("rougeLsum", "gen_len", "exact_match"))  # MLPerf's references split texts for these
LENGTH_TOLERANCE = 0.1  # of the tokens a sample, as MLPerf allows around its reference


@dataclass(frozen=True, slots=True)
class Target:
    """Bounds of one number."""

    name: str
    at_least: float
    at_most: float | None = None


@dataclass(frozen=True, slots=True)
class Targets:
    """Bounds that must be met, their source, and the number of answers that there must be."""

    source: str
    targets: tuple[Target, ...]
    rows: int


def of_benchmark(name: str, references: References) -> Targets:
    """The targets of MLPerf's submission checker for a benchmark, such as ``llama2-70b-99.9``.

    Raises UsageError: No benchmark of that name can be scored, ``references`` are not of its data set, or one of its
    scores needs NLTK's sentence data, which is missing.
    """
    benchmark = benchmark_of(name, None)
    scored = {known: entry for entry in catalog().values() for known in entry.benchmarks}
    if benchmark is None or benchmark.name not in scored:
        meant = nearest(name, scored)
        fix = f"did you mean {meant}? Known are" if meant else "known are"
        raise UsageError(f"--benchmark {name}: cannot be scored; {fix} {', '.join(scored)}")
    data_set = scored[benchmark.name].name
    if references.data_set != data_set:
        raise UsageError(
            f"--benchmark {name}: expected MLPerf's {data_set} data set, got {references.path}, which is "
            + (f"that of {references.data_set}" if references.data_set else "not one of MLPerf's")
        )
    names = {"rougel": "rougeL", "rougelsum": "rougeLsum"}
    targets = [Target(names.get(metric, metric), at_least) for metric, at_least in benchmark.accuracy.items()]
    windows = {"tokens_per_sample": benchmark.tokens_per_sample, "gen_len": benchmark.gen_len}
    targets += [Target(metric, *window) for metric, window in windows.items() if window]
    if any(target.name in BY_SENTENCES for target in targets) and sentence_splitter() is None:
        raise UsageError(f"--benchmark {name}: needs sentences; {SENTENCES_FIX}")
    return Targets(f"MLPerf {benchmark.name}", tuple(targets), benchmark.accuracy_rows)


def of_baseline(
    path: Path, share: float, references: References, answers: Answers | None = None, *, replaces: Path | None = None
) -> Targets:
    """Targets from another evaluation: a share of each of its metrics, and its tokens per sample within 10 %.

    Raises UsageError: ``path`` has no ``accuracy.json`` that can be read, it has other expected answers than
    ``references`` or the same log as ``answers``, it is the file that this evaluation replaces, or requires nothing.
    """
    file, document = read_result(path)
    try:
        metrics = {str(name): float(metric["value"]) for name, metric in document["metrics"].items()}
        tokens, rows, digest = (document[key] for key in ("tokens_per_sample", "gen_num", "references_sha256"))
        tokens, rows = float(tokens), int(rows)
        if not all(map(math.isfinite, (tokens, *metrics.values()))):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"{file}: not a result of megatoken accuracy; run megatoken accuracy again") from None
    if digest != references.content_hash:
        raise UsageError(
            f"{file}: scored against other expected answers than {references.path}; score it again with those"
        )
    if answers is not None and document.get("log_sha256") == answers.sha256:
        same = f"scored from the same log, or a copy of it (SHA-256 {answers.sha256[:16]})"
        raise UsageError(f"{file}: {same}, so the comparison would prove nothing; give the evaluation of another run")
    if replaces is not None and replaces.exists() and file.samefile(replaces):
        raise UsageError(f"{file}: would be replaced by the new result; give a baseline in another folder")
    targets = [Target(name, share * value) for name, value in metrics.items()]
    if not any(target.at_least > 0 for target in targets):
        why = "the share is 0" if any(value > 0 for value in metrics.values()) else "every score in it is 0"
        raise UsageError(f"{file}: {why}, so nothing could fail; give a baseline with scores and a share above 0")
    targets.append(Target("tokens_per_sample", (1 - LENGTH_TOLERANCE) * tokens, (1 + LENGTH_TOLERANCE) * tokens))
    return Targets(f"{share:g} of {file}", tuple(targets), rows)


def read_result(path: Path) -> tuple[Path, dict[str, Any]]:
    """An ``accuracy.json``: itself, in that folder, or in the ``accuracy`` folder of a run folder; and its content.

    Raises UsageError: There is none, or it cannot be read.
    """
    places = (path, path / SCORES, path / FOLDER / SCORES)
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise UsageError(f"{path}: no {SCORES} there; create it with: megatoken accuracy {path}")
    try:
        document = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise UsageError(f"{file}: not a result of megatoken accuracy; run megatoken accuracy again")
    return file, document


def numbers(scores: Scores) -> dict[str, float]:
    """The numbers of ``accuracy.txt``, by name."""
    values: dict[str, float] = {name: mean.value for name, mean in scores.metrics.items()}
    if scores.characters is not None:
        values["gen_len"] = scores.characters
    return values | {
        "gen_num": scores.answers,
        "gen_tok_len": scores.tokens,
        "tokens_per_sample": scores.tokens_per_sample,
    }


def missed(scores: Scores, targets: Targets) -> Iterator[Reason]:
    """Every target that is not reached."""
    if scores.answers != targets.rows:
        yield reason("ANSWERS", found=scores.answers, required=targets.rows, source=targets.source)
    values = numbers(scores)
    for target in targets.targets:
        value = values.get(target.name)
        if value is None or value < target.at_least:
            bound = {"at_least": target.at_least}
        elif target.at_most is not None and value > target.at_most:
            bound = {"at_most": target.at_most}
        else:
            continue
        yield reason("ACCURACY", metric=target.name, found=value, source=targets.source, **bound)
