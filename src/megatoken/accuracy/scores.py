"""The score of one answer, as MLPerf's references compute it.

Sources: language/llama2-70b/evaluate-accuracy.py, language/llama3.1-8b/evaluation.py and
language/llama3.1-405b/evaluate-accuracy.py of mlcommons/inference. ROUGE is Google's rouge-score, F-measure, with
Porter stemming, of stripped texts whose sentences, as NLTK's Punkt finds them, each stand on a line. Of the ROUGEs only
Lsum looks at lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

from megatoken.datasets.references import Scoring
from megatoken.errors import UsageError, how_to_install

_UUID = re.compile(r"\w{8}-\w{4}-\w{4}-\w{4}-\w{12}")
_ANSWER = "Answer: "
_ROUGES = ("rouge1", "rouge2", "rougeL")
SENTENCES_FIX = (
    "get NLTK's sentence data with: python -m nltk.downloader punkt_tab (or set NLTK_DATA to a folder with it)"
)


@dataclass(frozen=True, slots=True)
class Pair:
    """An answer and the expected answer, decoded."""

    scoring: Scoring
    answer: str
    reference: str


@dataclass(frozen=True, slots=True)
class Score:
    """Scores of one answer, 0 to 100."""

    metrics: Mapping[str, float]  # rouge1, rouge2, rougeL, rougeLsum, exact_match
    characters: int | None  # of the answer as the references count them; None without NLTK's sentence data
    identifiers_found: float | None  # niah_em: 100 if the answer has every expected identifier, else 0
    empty: bool  # the answer has no text


def check_installed() -> None:
    """Raises UsageError if rouge-score is not installed."""
    if find_spec("rouge_score") is None:
        raise _not_installed()


def score(pairs: Sequence[Pair], sentences: bool) -> list[Score]:
    """Scores answers; ``sentences``: split texts with NLTK's sentence data, which must be installed."""
    return [_score(pair, sentences) for pair in pairs]


def _score(pair: Pair, sentences: bool) -> Score:
    answer, reference = pair.answer.strip(), pair.reference.strip()
    if pair.scoring == "exact":
        metrics = _rouge(_ROUGES, reference, answer)
        return Score(metrics | {"exact_match": 100.0 * (answer == reference)}, None, None, not answer)
    split = sentence_splitter() if sentences else None
    if split is not None:
        answer, reference = "\n".join(split(answer)), "\n".join(split(reference))
    found = None
    match pair.scoring:
        case "summary":
            metrics = _rouge((*_ROUGES, "rougeLsum") if sentences else _ROUGES, reference, answer)
        case "rouge":
            metrics = _rouge(("rougeL",), reference, answer)
        case "niah_em":
            metrics = {"exact_match": _needle_match(reference, answer)}
            found = 100.0 * (set(_UUID.findall(reference)) <= set(_UUID.findall(answer)))
        case _:
            metrics = {"exact_match": _question_match(reference, answer)}
    return Score(metrics, len(answer) if sentences else None, found, not answer)


def _rouge(kinds: tuple[str, ...], reference: str, answer: str) -> dict[str, float]:
    scores = _scorer(kinds).score(reference, answer)
    return {kind: 100.0 * float(scores[kind].fmeasure) for kind in kinds}


def _needle_match(reference: str, answer: str) -> float:
    """The reference's score of a needle in a haystack.

    It pairs the identifiers in their order. A pair scores the share of the expected identifier's characters that occur
    anywhere in the other, so a wrong identifier scores about 90; ``Score.identifiers_found`` is strict.
    """
    found, wanted = _UUID.findall(answer), _UUID.findall(reference)
    if not found:
        return 0.0
    shares = [
        sum(character.lower() in have.lower() for character in want) / len(want)
        for have, want in zip(found, wanted, strict=False)
    ]
    return round(100.0 * sum(shares) / len(found), 2)


def _question_match(reference: str, answer: str) -> float:
    """The reference's score of a question: ``reference`` lists right answers between bars.

    The text after the last ``Answer: `` must occur in ``reference``, so an empty answer is right; or, ignoring case and
    white space, it must contain one of the right answers.
    """
    given = answer.rpartition(_ANSWER)[2]
    if given in reference:
        return 100.0
    squeezed = re.sub(r"\s+", "", given).lower()
    return 100.0 * any(re.sub(r"\s+", "", one).lower() in squeezed for one in reference.split("|"))


@cache
def sentence_splitter() -> Callable[[str], list[str]] | None:
    """NLTK's Punkt for English, or None without its data. Raises UsageError if NLTK is not installed."""
    try:
        from nltk.tokenize import PunktTokenizer
    except ImportError:
        raise _not_installed() from None
    try:
        splitter: Callable[[str], list[str]] = PunktTokenizer("english").tokenize
    except LookupError:
        return None
    return splitter


@cache
def _scorer(kinds: tuple[str, ...]) -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise _not_installed() from None
    return RougeScorer(list(kinds), use_stemmer=True)


def _not_installed() -> UsageError:
    return UsageError(f"scores need rouge-score and NLTK, which are not installed; {how_to_install('accuracy')}")
