"""``megatoken dataset``: what it lists, checks, converts and refuses; profiles as lengths."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mlperf_files import TEXTS, make_tokenizer, write_405b, write_cnn, write_openorca

from cli_support import call_here, make_checkpoint, write_lines
from megatoken.datasets.catalog import catalog
from megatoken.datasets.mlperf import load_mlperf
from megatoken.datasets.requests import Dataset
from megatoken.errors import DatasetError
from megatoken.mlperf.benchmarks import benchmarks
from megatoken.planning.workloads import OUTPUT_GAMMA_SHAPE, load_profiles, profile_csv


@pytest.fixture
def run() -> Any:
    return lambda *arguments: call_here("dataset", *arguments)


def sized(monkeypatch: pytest.MonkeyPatch, name: str, path: Path, rows: int) -> None:
    """The catalogue as if the real data set were the invented one of ``path``: so few rows, these sums."""
    digests = {kind: hashlib.new(kind, path.read_bytes()).hexdigest() for kind in catalog()[name].sums}
    entry = catalog()[name].model_copy(update={"rows": rows, "sums": digests})
    everything = {**catalog(), name: entry}
    for module in ("catalog", "tables", "parquet", "check"):
        monkeypatch.setattr(f"megatoken.datasets.{module}.catalog", lambda: everything)


def refusal(result: tuple[int, str, str]) -> str:
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    return err


def load(path: Path, **changes: Any) -> Dataset:
    return load_mlperf(path, vocabulary_size=256, max_length=4096, **changes)


# --- list -------------------------------------------------------------------------------------------------------------


def test_the_catalogue_agrees_with_the_rules_of_the_benchmarks() -> None:
    for entry in catalog().values():
        for name in entry.benchmarks:
            assert benchmarks()[name].rows == entry.rows
    assert {name for entry in catalog().values() for name in entry.benchmarks} >= {
        name for name, one in benchmarks().items() if name.startswith("llama")
    }


def test_a_list_says_what_is_missing_and_how_to_get_it(run: Any, tmp_path: Path) -> None:
    (tmp_path / "cnn_eval.json").write_text("[]")
    code, out, err = run("list", "--folder", tmp_path)
    assert (code, err) == (0, "")
    assert "24,576" in out
    assert f"put it at {tmp_path}/open_orca_gpt4_tokenized_llama.sampled_24576.pkl" in out
    assert "llama3.1-8b: get it" not in out
    assert all(profile.name in out for profile in load_profiles())
    document = json.loads(run("list", "--folder", tmp_path, "--json")[1])
    assert [entry["name"] for entry in document["mlperf"]] == list(catalog())
    assert [entry["name"] for entry in document["mlperf"] if entry["found"]] == ["llama3.1-8b"]


# --- check ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "write"), [("llama2-70b", write_openorca), ("llama3.1-405b", write_405b), ("llama3.1-8b", write_cnn)]
)
def test_a_whole_data_set_is_found_by_its_name_checked_and_converted(
    name: str, write: Any, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_checkpoint(tmp_path / "model")
    path = write(tmp_path / catalog()[name].file, make_tokenizer(tmp_path / "t"), [text[:40] for text in TEXTS[:2]])
    sized(monkeypatch, name, path, rows=2)
    if name == "llama3.1-8b":
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 512}))
    code, out, err = run("check", name, "--folder", tmp_path, "--model", model, "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["rows"] == 2
    assert document["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert document["notes"][1] == "token ids of 2 rows decode to their text"
    code, out, _ = run("convert", name, "--folder", tmp_path, "--json")
    assert code == 0
    converted = json.loads(out)
    assert converted["source_sha256"] == document["sha256"]
    path.unlink()
    again = json.loads(run("check", name, "--folder", tmp_path, "--model", model, "--json")[1])
    assert {**again, "file": ""} == {**document, "file": ""}
    assert again["file"] == converted["file"]


def test_a_file_that_is_not_the_one_that_is_known(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer(tmp_path / "t")
    path = write_openorca(tmp_path / "o.pkl", tokenizer)
    assert "3 rows; MLPerf's llama2-70b has 24,576, its calibration file 1,000" in refusal(run("check", path))
    sized(monkeypatch, "llama2-70b", path, rows=3)
    assert run("check", path)[0] == 0
    converted = tmp_path / "o.parquet"
    assert run("convert", path)[0] == 0
    write_openorca(path, tokenizer, [*TEXTS[:2], f"{TEXTS[2]} More."])
    assert run("convert", path, "--out", tmp_path / "p.parquet")[0] == 0
    assert "o.pkl: the md5 sum is " in refusal(run("check", path))
    assert "p.parquet: the md5 sum is " in refusal(run("check", tmp_path / "p.parquet"))
    assert run("check", converted)[0] == 0
    for file in (path, tmp_path / "p.parquet"):
        with pytest.raises(DatasetError, match=f"{file.name}: the md5 sum is .*, or claim no rules$"):
            load(file, as_published=True)
        [note] = load(file).notes
        assert f"{file.name}: the md5 sum is " in note
    assert load(converted, as_published=True).notes == ()
    write_openorca(path, tokenizer, TEXTS[:2])
    assert load(path, as_published=True).notes == (), "a part of it has a sum of its own"


def test_a_data_set_against_a_model(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_checkpoint(tmp_path / "model")  # 256 ids, 64 tokens of context
    path = write_openorca(tmp_path / "o.pkl", make_tokenizer(tmp_path / "t"))
    sized(monkeypatch, "llama2-70b", path, rows=3)
    assert "row 1: a prompt of 77 tokens leaves no room for an answer in the context of 64" in refusal(
        run("check", path, "--model", model)
    )
    other = write_openorca(tmp_path / "p.pkl", make_tokenizer(tmp_path / "t", shift=40), [text[:40] for text in TEXTS])
    sized(monkeypatch, "llama2-70b", other, rows=3)
    assert "tok_input does not decode to input" in refusal(run("check", other, "--model", model))
    outside = write_openorca(tmp_path / "q.pkl", make_tokenizer(tmp_path / "t"), tok_input=[[1], [256], [3]],
                             tok_input_length=[1, 1, 1])  # fmt: skip
    assert "row 1: token id 256 is outside the vocabulary of 256" in refusal(run("check", outside, "--model", model))


def test_own_prompts_and_lengths(run: Any, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model")
    prompts = write_lines(tmp_path / "p.jsonl", {"prompt": "abc", "reference": "d"}, {"prompt": "abcde"})
    assert "give --model DIR" in refusal(run("check", prompts))
    document = json.loads(run("check", prompts, "--model", model, "--json")[1])
    assert document["input_tokens"] == {"mean": 4.0, "min": 3, "max": 5}
    lengths = write_lines(tmp_path / "l.csv", "input_tokens,output_tokens", "9,4")
    assert "input_tokens: mean 9, min 9, max 9" in run("check", lengths)[1]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("check", "llama2-70b", "--folder", "{tmp}"), "data set is missing; get it with `bash"),
        (("convert", "llama3.1-8b", "--folder", "{tmp}"), "put it at {tmp}/cnn_eval.json"),
        (("check", "llama4"), "no such file and no such MLPerf data set; the data sets are llama2-70b, "),
        (("check", "{tmp}/absent.pkl"), "No such file"),
        (("check", "{tmp}/absent.jsonl", "--model", "{tmp}"), "config.json"),
        (("convert", "{tmp}/absent.json"), "No such file"),
        (("convert", "rag", "--rows", "0"), "--rows: must be at least 1, got '0'"),
        (("convert", "rag", "--rows", "many"), "--rows: must be a whole number, got 'many'"),
        (("convert", "rag", "--seed", "-1"), "--seed: must be at least 0, got '-1'"),
        (("convert", "rag", "--out", "{tmp}/no/where.csv"), "cannot be written"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    arguments: tuple[str, ...], problem: str, run: Any, tmp_path: Path
) -> None:
    message = refusal(run(*(one.format(tmp=tmp_path) for one in arguments)))
    assert problem.format(tmp=tmp_path) in message


# --- profiles ---------------------------------------------------------------------------------------------------------


def lengths_of(text: str) -> np.ndarray:
    return np.array([[int(cell) for cell in line.split(",")] for line in text.splitlines()[2:]])


@pytest.mark.parametrize("profile", load_profiles(), ids=lambda profile: profile.name)
def test_a_profile_has_its_own_means_and_the_spread_that_is_stated(profile: Any) -> None:
    rows = 20_000
    lengths = lengths_of(profile_csv(profile, rows, seed=1))
    assert len(lengths) == rows
    answers = lengths[:, 1]
    assert answers.mean() == pytest.approx(profile.output_tokens, rel=0.03)
    assert answers.std() / answers.mean() == pytest.approx(OUTPUT_GAMMA_SHAPE**-0.5, rel=0.03)
    prompts = lengths[:: profile.turns, 0]  # of first turns
    assert prompts.mean() == pytest.approx(profile.input_tokens + profile.context_tokens, rel=0.03)
    assert lengths.min() >= 1


def test_later_turns_of_an_agent_send_everything_again() -> None:
    (agent,) = load_profiles(names=["agent"])
    lengths = lengths_of(profile_csv(agent, 4000, seed=0)).reshape(-1, agent.turns, 2)
    new = np.diff(lengths[:, :, 0], axis=1) - lengths[:, :-1, 1]
    assert new.min() >= 1
    assert new.mean() == pytest.approx(agent.input_tokens, rel=0.05)


def test_a_profile_becomes_a_file_that_a_run_takes(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "rag.csv"
    code, out, err = run("convert", "rag", "--rows", 50, "--seed", 3, "--out", path, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {"file": str(path), "profile": "rag", "rows": 50, "seed": 3}
    (rag,) = load_profiles(names=["rag"])
    assert path.read_text() == profile_csv(rag, 50, 3)
    assert path.read_text() != profile_csv(rag, 50, 4)
    checked = json.loads(run("check", path, "--json")[1])
    assert checked["rows"] == 50
    assert "assumed" in path.read_text().splitlines()[0]
    assert run("convert", "agent", "--rows", 5, "--out", path)[0] == 0  # its own file is replaced


@pytest.mark.parametrize("content", ["input_tokens,output_tokens\n9,4\n", "", "# Workload\n"])
def test_what_convert_did_not_write_is_not_replaced(content: str, run: Any, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(content)
    message = "mine.csv: the file exists and does not hold lengths of a workload profile; move it away, or name another"
    assert message in refusal(run("convert", "rag", "--out", path))
    assert path.read_text() == content

    source = write_openorca(tmp_path / "o.pkl", make_tokenizer(tmp_path / "t"))
    message = "mine.csv: the file exists and is not a converted data set; move it away, or name another file with --out"
    assert message in refusal(run("convert", source, "--out", path))
    assert path.read_text() == content
    pq.write_table(pa.table({"a": [1]}), tmp_path / "o.parquet")
    assert "o.parquet: the file exists and is not a converted data set" in refusal(run("convert", source))
    (tmp_path / "o.parquet").unlink()
    assert run("convert", source)[0] == run("convert", source)[0] == 0
