"""Scores against values worked out by hand from the definitions of ROUGE and of MLPerf's references."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from accuracy_files import END, make_tokenizer, write_405b, write_lines, write_log, write_openorca
from megatoken.accuracy.decoding import AnswerDecoder
from megatoken.accuracy.evaluate import FEW, Scores, evaluate
from megatoken.accuracy.scores import Pair, score, sentence_splitter
from megatoken.datasets.references import load_references
from megatoken.errors import CheckpointError, UsageError
from megatoken.mlperf.accuracy_log import read_answers

WITHOUT_SENTENCES = sentence_splitter() is None
needs_sentences = pytest.mark.skipif(
    WITHOUT_SENTENCES, reason="NLTK's sentence data is not here: python -m nltk.downloader punkt_tab"
)


def scored(scoring: str, reference: str, answer: str, sentences: bool = False) -> dict[str, float]:
    (one,) = score([Pair(scoring, answer, reference)], sentences)  # type: ignore[arg-type]
    return {name: round(value, 4) for name, value in one.metrics.items()}


def evaluated(tmp_path: Path, references: Path, answers: list[str], **options: object) -> Scores:
    tokenizer = make_tokenizer(tmp_path / "model")
    log = write_log(tmp_path / "log", [tokenizer.encode(text).ids for text in answers])
    return evaluate(read_answers(log), load_references(references), AnswerDecoder(tmp_path / "model"), **options)


# --- ROUGE ------------------------------------------------------------------------------------------------------------


def test_rouge_of_six_words_with_five_in_common() -> None:
    """5 of 6 words agree both ways; 3 of 5 pairs of words; the longest common subsequence is 5 words."""
    values = scored("exact", "the cat sat on the mat", "the cat lay on the mat")
    assert values == {"rouge1": 83.3333, "rouge2": 60.0, "rougeL": 83.3333, "exact_match": 0.0}


def test_rouge_takes_stems_and_no_punctuation_or_case() -> None:
    values = scored("exact", "Running dogs, barking!", "run DOG bark")
    assert values == {"rouge1": 100.0, "rouge2": 100.0, "rougeL": 100.0, "exact_match": 0.0}


def test_rouge_l_counts_order_and_rouge_1_does_not() -> None:
    values = scored("exact", "one two three four", "four three two one")
    assert (values["rouge1"], values["rougeL"]) == (100.0, 25.0)


def test_an_empty_answer_scores_nothing() -> None:
    assert set(scored("summary", "some words", "").values()) == {0.0}


def test_the_same_text_up_to_white_space_around_it_is_an_exact_match() -> None:
    assert scored("exact", "42", " 42\n")["exact_match"] == 100.0
    assert scored("exact", "42", "42.")["exact_match"] == 0.0


@needs_sentences
def test_rouge_lsum_takes_sentences_one_by_one() -> None:
    """Sentences in another order: the longest common subsequence is half, the union over sentences is all of it."""
    reference, answer = "Dr. Smith slept. The cat sat down.", "The cat sat down. Dr. Smith slept."
    values = scored("summary", reference, answer, sentences=True)
    assert values["rougeLsum"] == 100.0
    assert values["rougeL"] == pytest.approx(100 * 4 / 7, abs=1e-4)
    assert sentence_splitter()(reference) == ["Dr. Smith slept.", "The cat sat down."]  # type: ignore[misc]


@needs_sentences
def test_sentences_change_no_other_rouge(tmp_path: Path) -> None:
    text = "One went. Two came! Did three?  Four\n\nslept."
    other = "Two went. One came! Four\tslept. Did three?"
    without = scored("summary", text, other)
    assert without == {name: value for name, value in scored("summary", text, other, True).items() if name in without}


@needs_sentences
def test_characters_are_counted_after_sentences_are_put_on_lines(tmp_path: Path) -> None:
    references = write_openorca(tmp_path / "orca.pkl", ["x"])
    assert evaluated(tmp_path, references, ["One went.  \n\n Two came. "]).characters == len("One went.\nTwo came.")


# --- the 405B set -----------------------------------------------------------------------------------------------------

A, B = "0a1b2c3d-0000-1111-2222-333344445555", "ffffffff-eeee-dddd-cccc-bbbbaaaa9999"


@pytest.mark.parametrize(
    ("reference", "answer", "expected", "found"),
    [
        (A, f"it is {A}", 100.0, 100.0),
        (f"{A} and {B}", f"{A}, {B}", 100.0, 100.0),
        (f"{A} and {B}", f"{B}, {A}", None, 100.0),  # the reference compares in order
        (f"{A} and {B}", A, 100.0, 0.0),  # and only as many as were answered
        (A, "no idea", 0.0, 0.0),
        (A, "", 0.0, 0.0),
    ],
)
def test_needles(reference: str, answer: str, expected: float | None, found: float) -> None:
    (one,) = score([Pair("niah_em", answer, reference)], False)
    assert one.identifiers_found == found
    if expected is not None:
        assert one.metrics["exact_match"] == expected


def test_a_wrong_needle_gets_the_share_of_characters_that_occur_in_it() -> None:
    """Of A's 36 characters its a, b, c, d and four dashes occur in B, its digits do not: 8."""
    (one,) = score([Pair("niah_em", B, A)], False)
    assert one.metrics["exact_match"] == round(100 * 8 / 36, 2)
    assert one.identifiers_found == 0.0


@pytest.mark.parametrize(
    ("reference", "answer", "expected"),
    [
        ("Paris|Lutetia", "Answer: Paris", 100.0),
        ("Paris|Lutetia", "Long thought. Answer: no. Answer: lutetia!", 100.0),
        ("New York", "Answer: new\tyork city", 100.0),
        ("Paris", "Answer: Rome", 0.0),
        ("Paris", "I said Paris. Answer: Rome", 0.0),
        ("Paris", "I said Paris", 100.0),
        ("Paris", "Answer: ari", 100.0),  # part of a right answer
        ("Paris", "", 100.0),  # nothing is part of everything
    ],
)
def test_questions(reference: str, answer: str, expected: float) -> None:
    (one,) = score([Pair("qa_em", answer, reference)], False)
    assert one.metrics == {"exact_match": expected}


def test_each_row_of_the_405b_set_counts_for_its_own_metric_and_empty_answers_are_told(tmp_path: Path) -> None:
    references = write_405b(tmp_path / "l.pkl", ["a b", A, "Paris", "Paris"], ["rouge", "niah_em", "qa_em", "qa_em"])
    scores = evaluated(tmp_path, references, ["a b", "none", "Rome", ""])
    assert scores.metrics["rougeL"].value == 100.0
    assert scores.metrics["rougeL"].answers == 1
    assert scores.metrics["exact_match"].value == pytest.approx(100 / 3)
    assert scores.metrics["exact_match"].answers == 3
    assert scores.by_task["qa_em"]["exact_match"].value == 50.0
    assert scores.identifiers_found == 0.0
    assert (scores.empty, scores.empty_and_right) == (1, 1)


# --- a log as a whole -------------------------------------------------------------------------------------------------


def test_scores_follow_the_row_of_an_answer_not_its_place_in_the_log(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "model")
    rows = [{"prompt": "p", "reference": word, "task": task} for word, task in zip("abcd", "xxyy", strict=True)]
    references = load_references(write_lines(tmp_path / "r.jsonl", rows))
    ids = [[*tokenizer.encode(word).ids, END] for word in "dcba"]
    log = write_log(tmp_path / "log", ids, [3, 2, 1, 0])
    scores = evaluate(read_answers(log), references, AnswerDecoder(tmp_path / "model"))
    assert scores.metrics["exact_match"].value == 100.0
    assert {task: metrics["exact_match"].answers for task, metrics in scores.by_task.items()} == {"x": 2, "y": 2}
    assert (scores.tokens, scores.tokens_per_sample, scores.answers) == (8, 2.0, 4)


def test_mean_and_standard_error(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "reference": "yes"}] * 4
    scores = evaluated(tmp_path, write_lines(tmp_path / "r.jsonl", rows), ["yes", "yes", "no", "yes"])
    assert scores.metrics["exact_match"].value == 75.0
    assert scores.metrics["exact_match"].standard_error == pytest.approx(25.0)  # deviation 50, by the root of 4
    assert scores.by_task == {}
    assert scores.characters is None


def test_many_answers_are_scored_by_several_processes_in_the_same_order(tmp_path: Path) -> None:
    count = FEW + 100
    rows = [{"prompt": "p", "reference": str(row % 7)} for row in range(count)]
    answers = [str(row % 7) if row % 3 else "wrong" for row in range(count)]
    reported: list[tuple[int, int]] = []
    references = write_lines(tmp_path / "r.jsonl", rows)
    scores = evaluated(tmp_path, references, answers, progress=lambda done, total: reported.append((done, total)))
    assert scores.metrics["exact_match"].value == pytest.approx(100 * sum(row % 3 > 0 for row in range(count)) / count)
    assert reported[-1] == (count, count)
    assert [done for done, _ in reported] == sorted(done for done, _ in reported)


# --- decoding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clean_up", [False, True])
def test_texts_are_those_of_transformers(clean_up: bool, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "model", clean_up)
    # Transformers 4, which the references use, cleans up where it is asked to; version 5 wants to be asked twice.
    twice = {"clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": clean_up}
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **twice)
    texts = ["It is n't so , is it ? No ! We 're 'm 's 've . A ' B", "plain, text."]
    ids = [[*tokenizer.encode(text).ids, END] for text in texts]
    expected = [theirs.decode(one, skip_special_tokens=True, clean_up_tokenization_spaces=clean_up) for one in ids]
    log = read_answers(write_log(tmp_path / "log", ids))
    assert AnswerDecoder(tmp_path / "model").decode(log.token_ids(), ["", ""]) == expected
    assert (expected[0] == texts[0]) is not clean_up


def test_ids_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "model")
    log = read_answers(write_log(tmp_path / "log", [[1], [2, 257]]))
    with pytest.raises(UsageError, match=r"there: token id 257 is outside the vocabulary of .*tokenizer.json"):
        AnswerDecoder(tmp_path / "model").decode(log.token_ids(), ["here", "there"])


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be read as a tokenizer"):
        AnswerDecoder(tmp_path)
