"""Scores agree with a second implementation, on every kind of data set."""

from pathlib import Path

import numpy as np
import pytest
from independent_scores import independent_scores

from accuracy_files import make_tokenizer, write_405b, write_lines, write_log, write_openorca
from megatoken.accuracy.decoding import AnswerDecoder
from megatoken.accuracy.evaluate import evaluate
from megatoken.datasets.references import load_references
from megatoken.mlperf.accuracy_log import read_answers

WORDS = ("the", "cats", "sat", ",", "on", "12", "mats", ".", "don", "'t", "it", "'s", "!", "are", "Running", "?", "yes")
KEPT = {"rouge1", "rouge2", "rougeL", "exact_match"}  # rougeLsum takes sentences, which the other leaves out


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
def test_both_implementations_agree(kind: str, clean_up: bool, dtype: str, tmp_path: Path) -> None:
    expected, given = texts(1, 40), texts(2, 40)
    given[:20] = expected[:20]
    tokenizer = make_tokenizer(tmp_path / "model", clean_up)
    log = write_log(tmp_path / "log.json", [tokenizer.encode(text).ids for text in given], dtype=dtype)
    references = load_references(data_set(kind, tmp_path, expected))
    theirs = evaluate(read_answers(log), references, AnswerDecoder(tmp_path / "model"), processes=1)
    metrics, by_task = independent_scores(read_answers(log), references, tmp_path / "model" / "tokenizer.json")
    wanted = {name: mean for name, mean in theirs.metrics.items() if name in KEPT}
    assert metrics.keys() == wanted.keys()
    assert all(0 < mean.value < 100 for mean in wanted.values())
    for name, mean in wanted.items():
        assert metrics[name] == pytest.approx((mean.value, mean.standard_error, mean.answers))
    for task, metrics in theirs.by_task.items():
        for name in metrics.keys() & KEPT:
            assert by_task[task][name][0] == pytest.approx(metrics[name].value)
