"""The expected answers of a data set and how each is scored."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatoken.datasets.prompt_lines import read_prompt_lines
from megatoken.datasets.requests import GREEDY
from megatoken.datasets.tables import SUFFIXES, read_table
from megatoken.engine.config import REFERENCE, model_folder
from megatoken.errors import DatasetError

HELD_OUT = model_folder(REFERENCE) / "held_out.jsonl"  # test set of the reference model

Scoring = Literal["summary", "rouge", "niah_em", "qa_em", "exact"]
_METRICS: Mapping[str, Scoring] = {"rouge": "rouge", "niah_em": "niah_em", "qa_em": "qa_em"}  # of the 405B set


@dataclass(frozen=True, slots=True, eq=False)
class References:
    """Expected answers by row of the data set."""

    path: Path  # the file
    texts: tuple[str, ...]  # the answer expected of each row
    # how each row is scored. ``summary``: ROUGE-1, -2, -L and -Lsum, as the references of llama2-70b and llama3.1-8b
    # do; ``rouge``, ``niah_em``, ``qa_em``: as the reference of llama3.1-405b does; ``exact``: the same text, and
    # ROUGE-1, -2 and -L.
    scorings: tuple[Scoring, ...]
    tasks: tuple[str, ...]  # what kind of work each row is; empty where the file does not say
    data_set: str | None  # name of the MLPerf data set; None for other files
    content_hash: str  # as ``Dataset.content_hash`` of the same file


def load_references(path: Path) -> References:
    """Read the expected answers of an MLPerf data set, or of JSON lines with the key ``reference``.

    Raises:
        DatasetError: The file cannot be read, was changed since it was converted, or lacks an answer.
    """
    return _of_table(path) if path.suffix.lower() in SUFFIXES else _of_lines(path)


def _of_table(path: Path) -> References:
    table = read_table(path, ("reference", "metric"))
    texts = table.texts("reference")
    tasks: tuple[str, ...] = ()
    scorings: list[Scoring] = ["summary"] * len(texts)
    if "metric" in table.data_set.columns:
        tasks = tuple(table.texts("metric"))
        for row, task in enumerate(tasks):
            if task not in _METRICS:
                known = ", ".join(_METRICS)
                raise DatasetError(f"{path}, row {row}: metric is {task[:40]!a}, known are {known}; {table.fix}")
            scorings[row] = _METRICS[task]
    return References(path, tuple(texts), tuple(scorings), tasks, table.data_set.name, table.content_hash)


def _of_lines(path: Path) -> References:
    digest = hashlib.sha256()
    texts, tasks = [], []
    for place, fields in read_prompt_lines(path, GREEDY, digest.update):
        if fields.reference is None:
            raise DatasetError(f'{place}: no reference; add the expected answer, such as {{"reference": "Paris"}}')
        texts.append(fields.reference)
        tasks.append(fields.task or "")
    if not texts:
        raise DatasetError(f"{path}: the file holds no prompts; give one with at least one row")
    exact: Scoring = "exact"
    scorings = (exact,) * len(texts)
    return References(path, tuple(texts), scorings, tuple(tasks) if any(tasks) else (), None, digest.hexdigest())
