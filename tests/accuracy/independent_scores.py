"""Scores by a second implementation, from the definitions of MLPerf's references: the oracle of ``evaluate``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rouge_score.rouge_scorer import RougeScorer
from tokenizers import Tokenizer

from megatoken.datasets.references import References
from megatoken.mlperf.accuracy_log import Answers

ROUGES: Mapping[str, tuple[str, ...]] = {
    "exact": ("rouge1", "rouge2", "rougeL"),
    "summary": ("rouge1", "rouge2", "rougeL"),
    "rouge": ("rougeL",),
}
DECIMALS = {"llama2-70b": 4}  # of references that round their scores
_PUNCTUATION, _CONTRACTIONS = (" .", " ?", " !", " ,"), (" n't", " 'm", " 's", " 've", " 're")
Metrics = dict[str, tuple[float, float, int]]  # mean, standard error and number of answers, by metric


def independent_scores(answers: Answers, references: References, tokenizer: Path) -> tuple[Metrics, dict[str, Metrics]]:
    """What the answers score, together and for each task; without rougeLsum, which takes sentences."""
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    scores = []
    for record, text in zip(answers.records, _decoded(answers, tokenizer), strict=True):
        given, expected = text.strip(), references.texts[record.row].strip()
        scoring = references.scorings[record.row]
        values = {"exact_match": 100.0 * (given == expected)} if scoring == "exact" else {}
        found = scorer.score(expected, given)
        scores.append(values | {name: 100.0 * found[name].fmeasure for name in ROUGES[scoring]})
    decimals = DECIMALS.get(references.data_set or "")
    tasks = [references.tasks[record.row] for record in answers.records] if references.tasks else []
    by_task = {
        task: dict(_means([one for one, its in zip(scores, tasks, strict=True) if its == task], decimals))
        for task in sorted(set(tasks))
    }
    return dict(_means(scores, decimals)), by_task


def _means(scores: Sequence[Mapping[str, float]], decimals: int | None) -> Iterator[tuple[str, Any]]:
    for name in sorted({name for one in scores for name in one}):
        values = np.array([one[name] for one in scores if name in one])
        error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        mean = float(values.mean())
        yield name, (mean if decimals is None else round(mean, decimals), error, len(values))


def _decoded(answers: Answers, tokenizer: Path) -> list[str]:
    """Texts without special tokens, cleaned up if the tokenizer's configuration asks for it."""
    ids = [record.data for record in answers.records]
    wide = any(record.token_count and len(record.data) == 8 * record.token_count for record in answers.records)
    texts = Tokenizer.from_file(str(tokenizer)).decode_batch(
        [np.frombuffer(one, "<i8" if wide else "<i4").tolist() for one in ids]
    )
    settings = json.loads(tokenizer.with_name("tokenizer_config.json").read_text())
    return [_cleaned(text) for text in texts] if settings["clean_up_tokenization_spaces"] is True else list(texts)


def _cleaned(text: str) -> str:
    for ending in _PUNCTUATION:
        text = text.replace(ending, ending[1:])
    text = text.replace(" ' ", "'")
    for ending in _CONTRACTIONS:
        text = text.replace(ending, ending[1:])
    return text
