"""Scores the answers of an accuracy log: the numbers of MLPerf's reference evaluators, and our own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import numpy as np

from megatoken.accuracy.answer_log import check_rows
from megatoken.accuracy.decoding import AnswerDecoder
from megatoken.accuracy.scores import Pair, Score, score, sentence_splitter
from megatoken.datasets.references import References
from megatoken.errors import MegatokenError
from megatoken.mlperf.accuracy_log import Answers
from megatoken.processes import in_order, usable_cores

METRICS = ("rouge1", "rouge2", "rougeL", "rougeLsum", "exact_match")
CHUNK = 64
FEW = 512  # so few answers are scored before another process has started
ROUNDED = ("llama2-70b", "llama3.1-8b", "llama3.1-8b-edge")  # their references round scores to four decimals


@dataclass(frozen=True, slots=True)
class Mean:
    """Mean of a metric, 0 to 100, over the answers it applies to, and its standard error."""

    value: float
    standard_error: float
    answers: int


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of a log of answers; ``gen_num``, ``gen_tok_len`` and ``gen_len`` are the names of MLPerf's references."""

    metrics: Mapping[str, Mean]  # by name, for those of METRICS that apply
    by_task: Mapping[str, Mapping[str, Mean]]  # the same for the rows of each task, if the data set names tasks
    answers: int  # gen_num
    tokens: int  # of all answers, as logged: gen_tok_len
    characters: int | None  # of all answers: gen_len; None without NLTK's sentence data
    identifiers_found: float | None  # share of needles found whole, 0 to 100; None if the data set has none
    empty: int  # answers without text
    empty_and_right: int  # those of them that the reference's rule for questions counts as right

    @property
    def tokens_per_sample(self) -> float:
        """Rounded to one decimal, as the references do."""
        return round(self.tokens / self.answers, 1)


def evaluate(
    answers: Answers,
    references: References,
    decoder: AnswerDecoder,
    *,
    partial: bool = False,
    processes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Scores:
    """Scores every answer.

    ``partial``: rows of the data set may have no answer. ``processes``: None means one per core, if there are many
    answers. ``progress`` is called with the number of answers scored so far, and of all answers.

    Raises AccuracyLogError: The log does not fit the data set; UsageError: it does not fit the tokenizer, or
    rouge-score or NLTK is not installed.
    """
    check_rows(answers, len(references.texts), partial=partial)
    ids = answers.token_ids()
    texts = decoder.decode(ids, [f"{answers.path}:{record.line}" for record in answers.records])
    rows = [record.row for record in answers.records]
    pairs = [Pair(references.scorings[row], text, references.texts[row]) for row, text in zip(rows, texts, strict=True)]
    sentences = any(pair.scoring != "exact" for pair in pairs) and sentence_splitter() is not None
    scored: list[Score] = []
    for some in _scored(pairs, sentences, processes):
        scored += some
        if progress:
            progress(len(scored), len(pairs))
    tasks = [references.tasks[row] for row in rows] if references.tasks else []
    decimals = 4 if references.data_set in ROUNDED else None
    counts = [one.characters for one in scored]
    found = [one.identifiers_found for one in scored if one.identifiers_found is not None]
    empty = [pair.scoring for pair, one in zip(pairs, scored, strict=True) if one.empty]
    return Scores(
        metrics=_means(scored, decimals),
        by_task={
            task: _means([one for one, its in zip(scored, tasks, strict=True) if its == task], decimals)
            for task in sorted(set(tasks))
        },
        answers=len(scored),
        tokens=sum(map(len, ids)),
        characters=sum(count for count in counts if count is not None) if None not in counts else None,
        identifiers_found=sum(found) / len(found) if found else None,
        empty=len(empty),
        empty_and_right=empty.count("qa_em"),
    )


def _means(scored: Sequence[Score], decimals: int | None) -> dict[str, Mean]:
    means = {}
    for name in METRICS:
        values = np.array([one.metrics[name] for one in scored if name in one.metrics])
        if len(values):
            mean = float(values.mean())
            deviation = float(values.std(ddof=1)) if len(values) > 1 else math.nan
            value = mean if decimals is None else round(mean, decimals)
            means[name] = Mean(value, deviation / math.sqrt(len(values)), len(values))
    return means


def _scored(pairs: Sequence[Pair], sentences: bool, processes: int | None) -> Iterator[list[Score]]:
    """Scores in order, chunk by chunk."""
    chunks = [pairs[start : start + CHUNK] for start in range(0, len(pairs), CHUNK)]
    if processes is None:
        processes = 1 if len(pairs) < FEW else usable_cores()
    return in_order(partial(score, sentences=sentences), chunks, processes, _lost)


def _lost(chunk: object) -> NoReturn:
    raise MegatokenError("a process that scored answers died; is there enough memory?")
