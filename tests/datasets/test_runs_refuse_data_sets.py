"""``megatoken run`` on data sets that do not fit: one line, exit code 2, and nothing written."""

from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from mlperf_files import TEXTS, make_tokenizer, write_cnn, write_openorca

from cli_support import call_here, make_checkpoint
from megatoken.datasets.check import convert

SHORT = [text[:40] for text in TEXTS]


def fitting(folder: Path) -> Path:
    return write_openorca(folder / "o.pkl", make_tokenizer(folder / "t"), SHORT)


def of_another_tokenizer(folder: Path) -> Path:
    return write_openorca(folder / "o.pkl", make_tokenizer(folder / "t", shift=40), SHORT)


def of_a_larger_vocabulary(folder: Path) -> Path:
    return write_openorca(folder / "o.pkl", make_tokenizer(folder / "t"), SHORT, tok_input=[[300]] * 3,
                          tok_input_length=[1] * 3)  # fmt: skip


def longer_than_the_context(folder: Path) -> Path:
    return write_cnn(folder / "c.json", make_tokenizer(folder / "t"), SHORT)


def changed_after_conversion(folder: Path) -> Path:
    path = convert(fitting(folder), folder / "o.parquet").path
    pq.write_table(pq.read_table(path).take([1, 0, 2]), path)
    return path


def not_there(folder: Path) -> Path:
    return folder / "cnn_eval.json"


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (of_another_tokenizer, "o.pkl, row 0: tok_input does not decode to input: 0 % of its words match"),
        (of_a_larger_vocabulary, "o.pkl, row 0: token id 300 at index 0 is outside the vocabulary of 256"),
        (
            longer_than_the_context,
            "c.json, row 0: a prompt of 122 tokens leaves no room for an answer in the context of 64",
        ),
        (changed_after_conversion, "o.parquet: changed since it was converted"),
        (not_there, "cnn_eval.json: no such file; it is MLPerf's llama3.1-8b data set: get it with `bash"),
    ],
)
def test_each_is_one_clear_line(
    make: Callable[[Path], Path],
    problem: str,
    tmp_path: Path,
) -> None:
    model = make_checkpoint(tmp_path / "model")
    path = make(tmp_path)
    code, out, err = call_here("run", "--model", model, "--prompts", path, "--out", tmp_path / "runs")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert problem in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("form", ["pickle", "parquet"])
def test_the_same_data_set_in_order_is_planned(form: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model")
    path = fitting(tmp_path)
    if form == "parquet":
        path = convert(path, tmp_path / "o.parquet").path
    code, out, err = call_here("run", "--model", model, "--prompts", path, "--dry-run")
    assert (code, err) == (0, "")
    assert "3 rows, 41.0 tokens in" in out
