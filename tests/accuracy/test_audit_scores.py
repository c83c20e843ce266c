"""The audit scores answers with code of its own; both agree on every data set, and on a real run."""

from pathlib import Path

import numpy as np
import pytest

from accuracy_files import make_tokenizer, write_405b, write_lines, write_log, write_openorca
from megatoken.accuracy.decoding import AnswerDecoder
from megatoken.accuracy.evaluate import evaluate
from megatoken.audit import answers as audited
from megatoken.audit.answers import read_logged_answers, rescore
from megatoken.datasets.references import load_references
from megatoken.files import UnreadableError
from megatoken.mlperf.answers import read_answers

WORDS = ("the", "cats", "sat", ",", "on", "12", "mats", ".", "don", "'t", "it", "'s", "!", "are", "Running", "?", "yes")
KEPT = {"rouge1", "rouge2", "rougeL", "exact_match"}  # rougeLsum takes sentences, which the audit leaves out


def texts(seed: int, count: int) -> list[str]:
    draw = np.random.default_rng(seed)
    return [" ".join(draw.choice(WORDS, size=draw.integers(1, 12))) for _ in range(count)]


def data_set(kind: str, folder: Path, expected: list[str]) -> Path:
    if kind == "openorca":
        return write_openorca(folder / "set.pkl", expected)
    if kind == "405b":
        return write_405b(folder / "set.pkl", expected, ["rouge"] * len(expected))
    rows = [{"prompt": "?", "reference": text, "task": f"task {len(text) % 3}"} for text in expected]
    return write_lines(folder / "set.jsonl", rows)


@pytest.mark.parametrize("kind", ["openorca", "405b", "lines"])
@pytest.mark.parametrize("clean_up", [False, True])
@pytest.mark.parametrize("dtype", ["<i4", "<i8"])
def test_both_score_alike(kind: str, clean_up: bool, dtype: str, tmp_path: Path) -> None:
    expected, given = texts(1, 40), texts(2, 40)
    given[:20] = expected[:20]
    tokenizer = make_tokenizer(tmp_path / "model", clean_up)
    log = write_log(tmp_path / "log.json", [tokenizer.encode(text).ids for text in given], dtype=dtype)
    references = load_references(data_set(kind, tmp_path, expected))
    theirs = evaluate(read_answers(log), references, AnswerDecoder(tmp_path / "model"), processes=1)
    ours = rescore(read_logged_answers(log), references, tmp_path / "model" / "tokenizer.json")
    assert ours.left_out is None
    wanted = {name: mean for name, mean in theirs.metrics.items() if name in KEPT}
    assert ours.metrics.keys() == wanted.keys()
    assert all(0 < mean.value < 100 for mean in wanted.values())
    for name, mean in wanted.items():
        assert ours.metrics[name] == pytest.approx((mean.value, mean.standard_error, mean.answers))
    for task, metrics in theirs.by_task.items():
        for name in metrics.keys() & KEPT:
            assert ours.by_task[task][name][0] == pytest.approx(metrics[name].value)


def test_scores_that_the_audit_leaves_out_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = make_tokenizer(tmp_path / "model").encode
    tokenizer = tmp_path / "model" / "tokenizer.json"
    log = write_log(tmp_path / "log.json", [encode(text).ids for text in ("a b", "c d")])
    needles = load_references(write_405b(tmp_path / "set.pkl", ["a b", "c d"], ["rouge", "niah_em"]))
    found = rescore(read_logged_answers(log), needles, tokenizer)
    assert (found.left_out, list(found.metrics)) == ("scores of the kind niah_em", ["rougeL"])
    monkeypatch.setattr(audited, "MOST_ROUGE_TOKENS", 5)
    lines = load_references(data_set("lines", tmp_path, ["a b", "x"]))
    found = rescore(read_logged_answers(log), lines, tokenizer)
    assert found.left_out is not None and found.left_out.startswith("ROUGE of so many answers takes minutes")
    assert found.metrics["exact_match"][0] == 50.0


@pytest.mark.parametrize(
    ("answers", "rows", "problem"),
    [([[1], [2]], [0, 7], "answers rows beyond the 2 of the data set"), ([[1], [-5]], [0, 1], "cannot be decoded")],
)
def test_answers_that_do_not_fit(answers: list[list[int]], rows: list[int], problem: str, tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "model")
    log = write_log(tmp_path / "log.json", answers, rows)
    with pytest.raises(UnreadableError, match=problem):
        rescore(
            read_logged_answers(log),
            load_references(data_set("lines", tmp_path, ["a", "b"])),
            tmp_path / "model" / "tokenizer.json",
        )


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda text: text.replace('"data" : "', '"data" : "0'), "no whole number of bytes"),
        (lambda text: text.replace('"data" : "', '"data" : "00'), "no whole number of token ids"),
        (lambda text: text.replace("]", "...\n]"), "has a line 3 that is no record"),
    ],
)
def test_logs_that_hold_no_answers(change, problem: str, tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.json", [[1, 2]])
    log.write_text(change(log.read_text()))
    with pytest.raises(UnreadableError, match=problem):
        read_logged_answers(log)
