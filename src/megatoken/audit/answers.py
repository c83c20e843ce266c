"""The answers that an accuracy log holds, as token ids, and what they score against the answers expected.

Reading, decoding and scoring are the audit's own, from the definitions of MLPerf's references: whoever asked the code
that made a score would only hear it twice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatoken.datasets.references import HELD_OUT, References, load_references
from megatoken.errors import MegatokenError
from megatoken.files import UnreadableError, open_regular, read_text
from megatoken.mlperf.accuracy_log import AccuracyLogError, read_answers

MOST_REFERENCES_BYTES = 2**30
MOST_ROUGE_TOKENS = 500_000  # whose scores take a minute or two of a core
DECIMALS = {"llama2-70b": 4, "llama3.1-8b": 4, "llama3.1-8b-edge": 4}  # whose references round their scores
_ROUGES: Mapping[str, tuple[str, ...]] = {
    "exact": ("rouge1", "rouge2", "rougeL"),
    "summary": ("rouge1", "rouge2", "rougeL"),  # rougeLsum needs NLTK's sentences, which differ by its release
    "rouge": ("rougeL",),
}
_PUNCTUATION, _CONTRACTIONS = (" .", " ?", " !", " ,"), (" n't", " 'm", " 's", " 've", " 're")


@dataclass(frozen=True, slots=True)
class LoggedAnswer:
    """One record: its line, numbers of sample and row, token ids, those reported first, and the count that was told."""

    line: int
    sample: int
    row: int
    ids: NDArray[np.int64]
    first: NDArray[np.int64] | None
    counted: int | None


@dataclass(frozen=True, slots=True)
class Rescored:
    """Scores computed again.

    Attributes:
        metrics: 0 to 100 by name, with standard error and how many answers.
        by_task: The same for the rows of each task.
        left_out: Why others could not be computed; None: all were.
        rows: Of the data set, answered or not.
    """

    metrics: Mapping[str, tuple[float, float, int]]
    by_task: Mapping[str, Mapping[str, tuple[float, float, int]]]
    left_out: str | None
    rows: int


def read_logged_answers(path: Path) -> list[LoggedAnswer]:
    """All answers of a log that is whole, as int32 or int64, whichever its token counts say.

    Raises:
        UnreadableError: it is too large to be held, was cut, or its data is no whole number of ids.
    """
    try:
        answers = read_answers(path)
        kind = answers.token_type()
        return [
            LoggedAnswer(
                record.line,
                record.sequence,
                record.row,
                ids,
                None if record.first_token is None else np.frombuffer(record.first_token, kind).astype(np.int64),
                record.token_count,
            )
            for record, ids in zip(answers.records, answers.token_ids(), strict=True)
        ]
    except (AccuracyLogError, ValueError) as error:
        raise UnreadableError(str(error)) from None


def find_references(candidates: Sequence[Path], content_hash: str) -> References | None:
    """The answers expected whose hash that is: the packaged ones, else the first of ``candidates`` that has it."""
    for path in (HELD_OUT, *candidates):
        try:
            open_regular(path).close()  # the name may be anybody's: no pipe, nothing that does not end
            if path.stat().st_size > MOST_REFERENCES_BYTES:
                continue
            found = load_references(path)
        except (UnreadableError, MegatokenError, OSError, ValueError):
            continue
        if found.content_hash == content_hash:
            return found
    return None


def rescore(answers: Sequence[LoggedAnswer], references: References, tokenizer: Path) -> Rescored:
    """What the answers score.

    Raises:
        UnreadableError: the tokenizer cannot be read, or an answer is to a row that the data set does not have.
    """
    if any(answer.row >= len(references.texts) for answer in answers):
        raise UnreadableError(f"answers rows beyond the {len(references.texts):,} of the data set")
    texts = _decoded(answers, tokenizer)
    left_out = None
    scorer: Any = None
    if sum(len(answer.ids) for answer in answers) > MOST_ROUGE_TOKENS:
        left_out = "ROUGE of so many answers takes minutes; megatoken accuracy computes it"
    else:
        try:
            from rouge_score.rouge_scorer import RougeScorer

            scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
        except ImportError:
            left_out = "rouge-score is not installed"
    scores = []
    for answer, text in zip(answers, texts, strict=True):
        given, expected = text.strip(), references.texts[answer.row].strip()
        scoring = references.scorings[answer.row]
        values = {"exact_match": 100.0 * (given == expected)} if scoring == "exact" else {}
        if scoring not in _ROUGES:
            left_out = left_out or f"scores of the kind {scoring}"
        elif scorer is not None:
            found = scorer.score(expected, given)
            values |= {name: 100.0 * found[name].fmeasure for name in _ROUGES[scoring]}
        scores.append(values)
    decimals = DECIMALS.get(references.data_set or "")
    tasks = [references.tasks[answer.row] for answer in answers] if references.tasks else []
    return Rescored(
        dict(_means(scores, decimals)),
        {
            task: dict(_means([one for one, its in zip(scores, tasks, strict=True) if its == task], decimals))
            for task in sorted(set(tasks))
        },
        left_out,
        len(references.texts),
    )


def _means(scores: Sequence[Mapping[str, float]], decimals: int | None) -> Iterator[tuple[str, Any]]:
    for name in sorted({name for one in scores for name in one}):
        values = np.array([one[name] for one in scores if name in one])
        error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        mean = float(values.mean())
        yield name, (mean if decimals is None else round(mean, decimals), error, len(values))


def _decoded(answers: Sequence[LoggedAnswer], tokenizer: Path) -> list[str]:
    """Texts without special tokens, cleaned up where the tokenizer's configuration asks for it."""
    from tokenizers import Tokenizer

    try:
        open_regular(tokenizer).close()
        texts = Tokenizer.from_file(str(tokenizer)).decode_batch([answer.ids.tolist() for answer in answers])
    except UnreadableError:
        raise
    except Exception as error:  # the library raises bare Exception for files, and OverflowError for ids
        raise UnreadableError(f"cannot be decoded with {tokenizer.name}: {' '.join(str(error).split())}") from None
    try:
        settings = json.loads(read_text(tokenizer.with_name("tokenizer_config.json"))[0])
    except (UnreadableError, ValueError):
        return list(texts)
    if not isinstance(settings, dict) or settings.get("clean_up_tokenization_spaces") is not True:
        return list(texts)
    return [_cleaned(text) for text in texts]


def _cleaned(text: str) -> str:
    for ending in _PUNCTUATION:
        text = text.replace(ending, ending[1:])
    text = text.replace(" ' ", "'")
    for ending in _CONTRACTIONS:
        text = text.replace(ending, ending[1:])
    return text
