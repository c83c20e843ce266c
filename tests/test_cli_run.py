import json
import os
import pty
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import tokenizers
import torch
import yaml

import megatoken
from cli_support import (
    COMMAND,
    ENVIRONMENT,
    TIMEOUT_SECONDS,
    call,
    call_here,
    make_checkpoint,
    make_overflowing_checkpoint,
    redirected,
    started,
    wait_until_busy,
    write_lines,
)
from examples import every
from forks import Process
from megatoken.config import load_run_config
from megatoken.hardware.inventory import multiplies_bf16
from megatoken.runs.run import Verdict, read_run

QUICK = ("--engine.threads", 1, "--warm-up", 0.1, "--precision", "fp32")  # bf16 takes most processors longer
SOURCE = Path(megatoken.__file__).parents[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "lengths.csv", "input_tokens,output_tokens", "9,4", "30,8", "5,12")


def test_a_run_prints_one_json_document_that_is_the_result_and_the_folder(tmp_path: Path, lengths: Path) -> None:
    out = tmp_path / "runs"
    code, stdout, err = call("run", "--lengths", lengths, "--samples", 7, "--out", out, "--json", *QUICK)
    assert (code, err) == (0, "")
    document = json.loads(stdout)
    folder = Path(document.pop("run_folder"))
    assert folder.parent == out
    assert document == json.loads((folder / "result.json").read_text())
    assert document["verdict"] == "MEASURED"
    assert {rule["code"] for rule in document["rules_unmet"]} == {
        "MIN_DURATION",
        "MIN_SAMPLES",
        "EQUAL_ISSUE",
        "DATA_SET_SIZE",
    }
    assert document["samples_completed"] == 7
    config, plan = load_run_config(folder / "config.yaml", {}), document["memory_plan"]
    for size in ("device", "max_batched_tokens", "max_sequences", "max_length", "page_size"):
        assert getattr(config.engine, size) == plan[size]
    assert (config.samples, config.min_duration_seconds) == (7, 0.0)
    assert config.engine.cache_tokens == plan["pages"] * plan["page_size"]
    assert (config.engine.threads, config.engine.overlap) == (1, document["target"]["steps_in_flight"] == 2)
    assert document["output_tokens"] == 4 * 3 + 8 * 2 + 12 * 2  # rows repeat when more samples are asked for
    assert document["core_wait_share"] is None or 0 <= document["core_wait_share"] <= 1
    assert document["loadgen_output_tokens_per_second"] == pytest.approx(document["output_tokens_per_second"], rel=0.2)
    assert {path.name for path in folder.iterdir()} == {
        "config.yaml",
        "environment.json",
        "mlperf",
        "report.html",
        "requests.parquet",
        "result.json",
        "series.parquet",
    }


@pytest.mark.parametrize(("scenario", "samples", "noted"), [("server", 4, True), ("server", 12, False)])
def test_samples_that_end_before_the_duration_say_so(
    tmp_path: Path, lengths: Path, scenario: str, samples: int, noted: bool
) -> None:
    asked = ("--samples", samples, "--rate", 20, "--min-duration", 0.3)
    code, out, _ = call_here(
        "run", "--lengths", lengths, "--scenario", scenario, *asked, "--out", tmp_path / "runs", "--json", *QUICK
    )
    assert code == 0
    said = "--samples 4 ends the run, so --min-duration 0.3 does not apply; leave one of them out"
    assert (said in [note["message"] for note in json.loads(out)["notes"]]) is noted


def test_a_claim_cut_short_is_invalid_and_says_so_on_the_terminal(tmp_path: Path, lengths: Path) -> None:
    config = write_lines(
        tmp_path / "run.yaml", "rules: v5.1", "samples: 6", "min_duration_seconds: 100", "engine: {threads: 1}"
    )
    options = ("--model", "tiny", "--lengths", lengths, "--out", tmp_path / "runs", "--warm-up", 0)
    code, stdout, err = call_here("run", config, *options)
    assert code == 3
    assert "INVALID" in stdout
    for reason in ("MIN_DURATION", "MIN_SAMPLES", "LOADGEN_INVALID", "DATA_SET_SIZE"):
        assert reason in stdout
    for percentile in ("p50", "p90", "p95", "p99", "tokens/s"):
        assert percentile in stdout
    (folder,) = (tmp_path / "runs").iterdir()
    assert str(folder) in stdout
    fastest = "bf16" if multiplies_bf16() else "fp32"
    assert f"loading tiny in {fastest}" in err
    assert ("computed in fp32: this processor has no bf16 instructions" in stdout) is (fastest == "fp32")
    assert "warning: cannot be VALID: the data set has 3 rows, MLPerf's 24,576" in err  # before the run, not after
    assert "cannot be VALID" not in stdout
    for note in ("random weights: the speed is real", "prompts are random tokens", "the verdict judges LoadGen's log"):
        assert (stdout.count(note), err.count(note)) == (1, 0)
    assert "tokens/s" in err


def test_accuracy_mode_on_a_checkpoint_logs_the_tokens_that_generate_gives(model: Path, tmp_path: Path) -> None:
    prompts = write_lines(
        tmp_path / "prompts.jsonl",
        {"prompt": "one"},
        {"prompt_token_ids": [4, 5, 6], "max_tokens": 3},
        {"prompt": "three", "max_tokens": 20},
    )
    shared = ("--model", model, "--prompts", prompts, "--max-tokens", 7, "--precision", "fp32")
    code, stdout, _ = call_here("run", *shared, "--mode", "accuracy", "--out", tmp_path / "runs", "--json", *QUICK)
    assert code == 0
    document = json.loads(stdout)
    assert document["model"] == model.name
    assert call_here("generate", *shared, "--out", tmp_path / "answers.jsonl")[0] == 0
    answers = [json.loads(line)["token_ids"] for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    log = json.loads((Path(document["run_folder"]) / "mlperf" / "mlperf_log_accuracy.json").read_text())
    logged = {entry["qsl_idx"]: bytes.fromhex(entry["data"]) for entry in log}
    assert len(logged) == 3
    for index, answer in enumerate(answers):
        assert logged[index] == b"".join(token.to_bytes(4, "little") for token in answer)


def test_a_dry_run_shows_the_plan_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, stdout, err = call_here("run", "--dry-run", "--model", "tiny", "--engine.max_batched_tokens", 512)
    assert (code, err) == (0, "")
    for words in ("model: tiny", "  max_batched_tokens: 512", "KV cache", "24,576 rows", "random weights"):
        assert words in stdout
    engine = re.search("(?ms)^engine:.*?^rack:", stdout)[0]
    assert re.findall("(\\w+): null", engine) == ["memory_bytes", "target_step_seconds"]  # limits that are none
    shown = write_lines(tmp_path / "shown.yaml", stdout)
    shown_again = call_here("run", "--dry-run", shown)[1]
    assert yaml.safe_load(shown_again) == yaml.safe_load(stdout)
    shown.unlink()
    code, stdout, _ = call_here("run", "--dry-run", "--json", "--model", "125m")
    assert json.loads(stdout)["config"]["model"] == "125m"
    assert json.loads(stdout)["memory_plan"]["weights_bytes"] > 2e8
    assert list(tmp_path.iterdir()) == []


def test_one_of_a_thing_is_no_plural(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("input_tokens,output_tokens\n5,2\n")
    sizes = ("--engine.max_sequences", 1, "--engine.max_batched_tokens", 1, "--engine.cache_tokens", 32)
    code, stdout, err = call_here("run", "--dry-run", "--model", "tiny", "--lengths", lengths, *sizes)
    assert (code, err) == (0, "")
    for words in ("data set lengths.csv: 1 row,", "in 1 page of 32", "steps of 1 token\n", "1 sequence at a time"):
        assert words in stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--engine.max_length 1", "the longest sequence has 1 token, but a prompt and its answer need at least 2"),
        ("--engine.page_size 1 --engine.cache_tokens 1", "the longest sequence has 1 token"),
        ("--engine.threads 99999", "engine.threads is 99,999, but this process may use "),
        ("--engine.device cuda", "device cuda: no NVIDIA GPU that this PyTorch can use"),
        ("--text", "text: tiny has no tokenizer.json; add it to the model's folder"),
        (
            "--scenario server --find-rate --rate 20 --min-duration 5",
            "111 samples come due in 5.08 s at 20 samples/s, but only 459 or more show a p99; give --min-duration 32",
        ),
        (
            "--rules v6.1 --benchmark llama3.1-405b",
            "--rules v6.1: that round has no llama3.1-405b; rounds that have it: v5.1, v6.0",
        ),
        ("--out=", "--out: must be a path, got ''"),
        ("--out /proc/foo", "/proc/foo: cannot write in /proc (No such file or directory)"),
        (
            "--out {tmp}/file/runs",
            "cannot write in {tmp}/file/runs (Not a directory); choose another folder with --out",
        ),
        ("--out {tmp}/file", "cannot write in {tmp}/file (Not a directory)"),
        ("--out {tmp}/dangling", "cannot write in {tmp}/dangling (No such file or directory)"),
        ("--out " + "o" * 300, "(File name too long)"),
    ],
)
def test_a_dry_run_refuses_what_the_run_would(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    message: str,
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    write_lines(tmp_path / "file", "not a folder")
    (tmp_path / "dangling").symlink_to("nowhere")
    words = arguments.format(tmp=tmp_path).split()
    code, stdout, err = call_here("run", "--dry-run", "--model", "tiny", *words)
    assert (code, stdout, err.count("\n")) == (2, "", 1)
    assert message.format(tmp=tmp_path) in err
    assert list(work.iterdir()) == []


@pytest.mark.parametrize(
    ("sizes", "mend"),
    [
        ("--engine.cache_tokens 64", "raise engine.cache_tokens to 928 or more, or leave it out,"),
        ("--engine.max_length 300", "raise engine.max_length to 917 or more, or leave it out,"),
        (
            "--engine.cache_tokens 64 --engine.max_length 64",
            "raise engine.cache_tokens to 928 and engine.max_length to 917 or more, or leave them out,",
        ),
        (
            "--engine.memory_bytes 328000000 --engine.max_batched_tokens 1",
            "raise engine.memory_bytes, or leave it out,",
        ),
    ],
)
def test_a_context_too_short_for_the_prompts_that_ship(tmp_path: Path, sizes: str, mend: str) -> None:
    code, stdout, err = call_here("run", "--dry-run", "--out", tmp_path, *sizes.split())
    assert (code, stdout, err.count("\n")) == (2, "", 1)
    assert "need a context of 917 tokens with their answers, but it is" in err
    assert mend in err
    advised = [f"--{word.group(1)}={word.group(2)}" for word in re.finditer(r"(engine\.\w+) to (\d+)", err)]
    assert call_here("run", "--dry-run", "--out", tmp_path, *advised)[0] == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("H200", "reference: not one of the named shapes; give --model, one of tiny, "),
        ("GB3000 --model llama2-70b", "GPU 'GB3000' is not in gpu_specs.csv; did you mean GB300?"),
        ("H200 --model llama2-70b --precision fp4", "H200 is not known to multiply in fp4; take one of bf16, fp8"),
        ("H200 --model llama3.1-405b", "llama3.1-405b in bf16 does not fit: "),
        (
            "H200 --model llama2-70b --engine.tensor_parallel 8",
            "engine.tensor_parallel 8 does not divide the 4 GPUs of a simulated node; change it or rack.simulated_gpus",
        ),
    ],
)
def test_what_cannot_be_simulated_is_refused_before_a_cluster_is_looked_for(
    tmp_path: Path, flags: str, message: str
) -> None:
    nobody = ("--rack", "127.0.0.1:1", "--out", tmp_path, "--rack.simulated_gpu")
    code, stdout, err = call_here("run", *nobody, *flags.split())
    assert (code, stdout) == (2, "")
    assert err.startswith(f"megatoken: {message}") and err.count("\n") == 1


def test_a_context_that_ends_at_a_sliding_window_says_so(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model")
    file = directory / "config.json"
    values = json.loads(file.read_text())
    dry_run = ("run", "--dry-run", "--model", directory, "--out", tmp_path / "runs")
    assert "sliding_window" not in call_here(*dry_run)[1]
    file.write_text(json.dumps(values | {"architectures": ["MistralForCausalLM"], "sliding_window": 16}))
    code, stdout, _ = call_here(*dry_run)
    assert code == 0 and "# the context ends at the sliding_window of model, 16 tokens, because " in stdout
    assert "sliding_window" not in call_here(*dry_run, "--engine.max_length", 15)[1]  # what was asked for ends it
    code, stdout, err = call_here(*dry_run, "--engine.max_length", 64)
    assert (code, stdout) == (2, "")
    assert err == "megatoken: max_length 64 is more than the 16 tokens of the sliding_window of model; lower it\n"


def test_flags_may_be_typed_with_underscores(tmp_path: Path) -> None:
    flags = ("--dry_run", "--min_duration", 7, "--engine.max-batched-tokens=64", "--warm_up", 1)
    code, stdout, err = call_here("run", "--json", "--out", tmp_path, *flags)
    config = json.loads(stdout)["config"]
    assert (code, err) == (0, "")
    assert (config["min_duration_seconds"], config["engine"]["max_batched_tokens"], config["warm_up_seconds"]) == (
        7,
        64,
        1,
    )


@pytest.mark.parametrize(
    ("words", "random_weights", "overlap"),
    [
        ("CONFIG", True, None),
        ("CONFIG --random-weights false", False, None),
        ("--random_weights=no CONFIG", False, None),
        ("--random-weights CONFIG", True, None),
        ("CONFIG --engine.overlap", True, True),
        ("--engine.overlap CONFIG --random-weights", True, True),
        ("CONFIG --engine.overlap off", True, False),
    ],
)
def test_a_switch_takes_a_value_or_none(
    tmp_path: Path,
    words: str,
    random_weights: bool,
    overlap: bool | None,
) -> None:
    config = write_lines(tmp_path / "run.yaml", "random_weights: true", "model: tiny")
    arguments = words.replace("CONFIG", str(config)).split()
    code, stdout, err = call_here("run", "--dry-run", "--json", "--out", tmp_path, *arguments)
    assert (code, err) == (0, "")
    found = json.loads(stdout)["config"]
    assert (found["random_weights"], found["engine"]["overlap"]) == (random_weights, bool(overlap))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model nowhere", "nowhere: no such directory, and not one of the shapes tiny"),
        ("--model {tmp}/truncated", "model.safetensors"),
        ("--model {tmp}/nan", "NaN"),
        ("--model {tmp}/tpu", "config.json"),
        ("--prompts none.jsonl", "none.jsonl: cannot be read"),
        ("--model {model} --prompts {tmp}/broken.jsonl", "broken.jsonl, line 2: column"),
        ("--model {model} --prompts {tmp}/long.jsonl", "long.jsonl, line 1"),
        (
            "--model tiny --prompts {tmp}/text.jsonl",
            "text.jsonl, line 1: the prompt is text but the model has no tokenizer.json",
        ),
        ("--prompts {tmp}/outside.jsonl", "outside.jsonl, line 1: token id 8192"),
        ("--prompts {tmp}/evil.pkl", "evil.pkl"),
        ("--prompts {tmp}/table.PKL", "table.PKL, row 0: token id 25580"),
        ("--lengths none.csv", "none.csv: cannot be read"),
        ("--lengths {tmp}/zero.csv", "zero.csv, line 2: output_tokens is '0'"),
        ("--prompts a.jsonl --lengths b.csv", "give prompts or lengths, not both"),
        ("--scenario batch", "--scenario: must be 'offline', 'server', 'interactive' or 'singlestream', got 'batch'"),
        ("--max-tokens 9", "--max-tokens 9: applies to JSON lines that state no max_tokens, and every row of held_out"),
        ("--max-tokens 9 --lengths {tmp}/lengths.csv", "every row of lengths.csv has its own length"),
        ("--rules v9.9", "--rules: must be 'v5.1', 'v6.0' or 'v6.1', got 'v9.9'"),
        ("--samples 0", "--samples: must be at least 1, got '0'"),
        ("--smaples 4", "--smaples: unknown flag; did you mean --samples?"),
        (
            "--engine.max_batched_token=4",
            "--engine.max_batched_token: unknown flag; did you mean --engine.max_batched_tokens?",
        ),
        ("--jsn", "--jsn: unknown flag; did you mean --json?"),
        ("--dry_rn", "--dry_rn: unknown flag; did you mean --dry-run?"),
        ("--modle 125m", "--modle: unknown flag; did you mean --model?"),
        ("--warmup 1", "--warmup: unknown flag; did you mean --warm-up?"),
        ("--engine 5", "--engine: unknown flag"),
        ("--xyzzy", "--xyzzy: unknown flag; see megatoken run --help"),
        ("--warm-up --dry-run", "--warm-up: needs a value"),
        ("--engine.max_batched_tokens", "--engine.max_batched_tokens: needs a value"),
        (
            "tiny",
            "tiny: cannot be read: No such file or directory; give a YAML file of settings; a model is given with",
        ),
        ("--prompts {tmp}/pipe", "pipe: cannot be read: no process writes into this pipe"),
        ("--prompts /dev/zero", "/dev/zero: cannot be read: it is a device, not a file"),
        ("--engine.memory_bytes 1000", "does not fit"),
        ("--engine.max_length 1000000", "max_length 1,000,000"),
        (
            "{tmp}/bad.yaml",
            "bad.yaml:2: unknown key 'engine.max_batched_token'; did you mean engine.max_batched_tokens?",
        ),
        ("{tmp}/none.yaml", "none.yaml: cannot be read"),
        ("a.yaml b.yaml", "unexpected extra argument: b.yaml; see megatoken run --help"),
        ("-x", "No such option: -x"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    message: str,
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    make_bad_input(tmp_path, model)
    code, stdout, err = call_here("run", *arguments.format(tmp=tmp_path, model=model).split())
    assert code == 2
    assert stdout == ""
    last = err.splitlines()[-1]
    assert last.startswith("megatoken: ")
    assert message.format(tmp=tmp_path) in last
    assert "Traceback" not in err
    assert list(work.iterdir()) == []
    assert not (tmp_path / "executed").exists()


def make_bad_input(folder: Path, model: Path) -> None:
    weights = (model / "model.safetensors").read_bytes()
    config = (model / "config.json").read_text()
    nan = weights[:-2] + b"\xc0\x7f"
    for name, content, text in (
        ("truncated", weights[:-10], config),
        ("nan", nan, config),
        ("tpu", weights, config.replace("LlamaForCausalLM", "TpuForCausalLM")),
    ):
        (folder / name).mkdir()
        (folder / name / "model.safetensors").write_bytes(content)
        (folder / name / "config.json").write_text(text)
    os.mkfifo(folder / "pipe")
    write_lines(folder / "broken.jsonl", {"prompt": "a"}, '{"prompt":')
    write_lines(folder / "long.jsonl", {"prompt": "a" * 70})
    write_lines(folder / "text.jsonl", {"prompt": "a"})
    write_lines(folder / "outside.jsonl", {"prompt_token_ids": [8192]})
    write_lines(folder / "zero.csv", "input_tokens,output_tokens", "5,0")
    write_lines(folder / "lengths.csv", "input_tokens,output_tokens", "5,4")
    write_lines(folder / "file", "not a folder")
    write_lines(folder / "bad.yaml", "engine:", "  max_batched_token: 5")
    table = Path(__file__).parent / "data/openorca_pickles/pandas-3.0.0-numpy-2.4.6-protocol-5.pkl"
    shutil.copy(table, folder / "table.PKL")
    (folder / "evil.pkl").write_bytes(b"cos\nsystem\n(S'touch %s'\ntR." % str(folder / "executed").encode())


@pytest.mark.parametrize("limit_bytes", [0, 12_000])
def test_a_full_disk_is_one_line_and_never_a_result(tmp_path: Path, lengths: Path, limit_bytes: int) -> None:
    """No file may grow beyond a limit: first the folder itself cannot be made, then LoadGen's log is cut off."""
    out = tmp_path / "runs"
    code, stdout, err = call(
        *("run", "--lengths", lengths, "--samples", 9, "--out", out, "--json", *QUICK),
        before=partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes)),
    )
    assert (code, stdout) == (2, "")
    assert err.startswith("megatoken: ") and err.count("\n") == 1
    if limit_bytes == 0:
        assert err.endswith("cannot be written (File too large); raise the limit on the size of files (ulimit -f)\n")
        assert list(out.glob("*")) == []
    else:
        (folder,) = out.iterdir()
        assert "LoadGen" in err and "is the disk full?" in err
        assert err.endswith(f"; {folder} says INTERRUPTED and keeps what was done\n")
        assert read_run(folder).verdict is Verdict.INTERRUPTED


def test_repeats_that_find_no_room_for_the_next_keep_what_is_told_of_the_last(tmp_path: Path, lengths: Path) -> None:
    """What is written beside ``repeats.json`` goes to a full device from the second repeat on."""
    flags = ("--lengths", lengths, "--samples", 9, "--repeat", 100, "--out", tmp_path, "--json", *QUICK)
    with started("run", *flags) as process:
        while not (there := list(tmp_path.glob("*-repeats/repeats.json"))):
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        there[0].with_name(".repeats.json.tmp").symlink_to("/dev/full")
        stdout, err = process.communicate(timeout=TIMEOUT_SECONDS)
    folder = there[0].parent
    assert (process.returncode, stdout) == (2, "")
    mend = "make room or choose another folder with --out"
    assert err.splitlines()[-1] == f"megatoken: {there[0]}: cannot be written (No space left on device); {mend}"
    ended = sorted(path.name for path in folder.iterdir() if path.is_dir())
    assert json.loads(there[0].read_text())["runs"] == ended[:-1]
    assert all(read_run(folder / name).verdict is Verdict.MEASURED for name in ended)
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
    assert call_here("report", folder)[0] == 0


@pytest.mark.parametrize("repeat", [1, 2])
def test_a_page_that_finds_no_room_costs_no_number(tmp_path: Path, lengths: Path, repeat: int) -> None:
    """The page is larger than every file that it is made of."""
    limit = (38_000, 38_000)
    code, stdout, err = call(
        *("run", "--lengths", lengths, "--samples", 9, "--repeat", repeat, "--out", tmp_path / "runs", "--json"),
        *QUICK,
        before=partial(resource.setrlimit, resource.RLIMIT_FSIZE, limit),
    )
    folder = Path(json.loads(stdout)["run_folder"])
    assert (code, json.loads(stdout)["verdict"]) == (0, "MEASURED")
    assert err.startswith("megatoken: ") and err.count("\n") == 1
    assert "report.html: cannot be written (File too large); " in err
    assert err.endswith(f"; megatoken report {folder} writes the page later\n")
    assert not list(folder.rglob("*.html"))
    code, stdout, _ = call_here("report", folder)
    assert (code, stdout.count(".html\n")) == (0, repeat + (repeat > 1))


def test_a_request_that_fails_makes_the_run_invalid_and_the_others_end(tmp_path: Path) -> None:
    letters = ["a"] * 40
    letters[np.random.default_rng(0).permutation(40)[-1]] = "z"  # the last that a warm-up would take
    model = make_overflowing_checkpoint(tmp_path / "model", "z")
    lines = [{"prompt": letter, "max_tokens": 2, "ignore_end_token": True} for letter in letters]
    prompts = write_lines(tmp_path / "in.jsonl", *lines)
    options = ("--prompts", prompts, "--out", tmp_path / "runs", "--samples", 40, "--warm-up", 0)
    code, stdout, err = call_here("run", "--model", model, *options, "--engine.max_sequences", 2)
    (folder,) = (tmp_path / "runs").iterdir()
    assert code == 3 and "\nINVALID: samples failed\n" in stdout and "Traceback" not in err
    run = read_run(folder)
    assert run.verdict is Verdict.INVALID
    (why,) = run.result["reasons"]
    assert (why["code"], why["failed"], why["samples"]) == ("FAILED_SAMPLES", 1, 40)
    rows = pq.read_table(folder / "requests.parquet").to_pylist()
    (failed,) = [row for row in rows if row["error"] is not None]
    assert failed["error"].startswith("logits after 1 token of a request are not finite")
    assert letters[failed["sample_index"]] == "z" and failed["output_tokens"] == 0
    assert [row["output_tokens"] for row in rows if row is not failed] == [2] * 39


@pytest.mark.parametrize("verb", ["run", "generate"])
def test_a_tokenizer_is_read_once(verb: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bytes] = []

    def from_buffer(content: bytes) -> tokenizers.Tokenizer:
        read.append(content)
        return tokenizers.Tokenizer.from_buffer(content)

    monkeypatch.setattr("megatoken.engine.tokenizer.FastTokenizer", SimpleNamespace(from_buffer=from_buffer))
    prompts = write_lines(tmp_path / "prompts.jsonl", {"prompt": "ab", "max_tokens": 2})
    own = ("--samples", 3, "--text", "--out", tmp_path / "runs", *QUICK) if verb == "run" else ("--out", tmp_path / "o")
    code, _, err = call_here(verb, "--model", model, "--prompts", prompts, *own)
    assert (code, read) == (0, [(model / "tokenizer.json").read_bytes()]), err


def test_a_run_without_compiled_kernels_says_that_it_is_slower(
    tmp_path: Path, lengths: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENVIRONMENT, "CXX", "no-such-compiler")
    code, stdout, err = call("run", "--lengths", lengths, "--samples", 3, "--out", tmp_path, *QUICK)
    assert code == 0
    assert "Note: without compiled kernels, so the result is low: no compiler no-such-compiler; " in stdout
    assert "compiling" not in err


@contextmanager
def long_run(
    out: Path, *arguments: object, samples: int = 5000, before: Callable[[], object] | None = None
) -> Iterator[Process]:
    """A run of minutes, given once LoadGen has begun."""
    settings = ("--samples", samples, "--engine.threads", 1, "--engine.max_sequences", 8, "--warm-up", 0)
    with started("run", "--out", out, *settings, *arguments, before=before) as process:
        while not any(out.glob("2*/mlperf/mlperf_log_detail.txt")):
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        yield process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_run_keeps_what_was_done_and_exits_130(
    tmp_path: Path, lengths: Path, number: signal.Signals
) -> None:
    heard = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
    with long_run(tmp_path / "runs", "--lengths", lengths, "--json", before=heard) as process:
        time.sleep(1.5)
        process.send_signal(number)
        stdout, err = process.communicate(timeout=TIMEOUT_SECONDS)
    assert (process.returncode, err) == (130, "")
    document = json.loads(stdout)
    assert document["verdict"] == "INTERRUPTED"
    assert document["samples_completed"] < 5000
    assert document["reasons"][0]["message"].startswith(f"{number.name} after ")
    rows = read_run(Path(document["run_folder"])).requests.num_rows
    assert rows == document["samples_completed"] + document["samples_cancelled"]


def test_a_run_whose_terminal_closes_is_interrupted(tmp_path: Path, lengths: Path) -> None:
    """The kernel's own SIGHUP, and nothing left to print on."""
    settings = ("--samples", 5000, "--engine.threads", 1, "--engine.max_sequences", 8, "--warm-up", 0)
    command = [*COMMAND, "run", "--out", tmp_path / "runs", "--lengths", lengths, *settings]
    child, terminal = pty.fork()
    if not child:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.execvpe(command[0], [str(word) for word in command], ENVIRONMENT)
    while not any((tmp_path / "runs").glob("2*/mlperf/mlperf_log_detail.txt")):
        os.read(terminal, 4096)
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 130
    (folder,) = (tmp_path / "runs").iterdir()
    assert read_run(folder).reasons[0]["message"].startswith("SIGHUP after ")
    assert (folder / "report.html").is_file()


def test_under_nohup_a_run_outlives_its_terminal(tmp_path: Path, lengths: Path) -> None:
    ignored = partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)
    with long_run(
        tmp_path / "runs", "--lengths", lengths, "--json", "--precision", "fp32", samples=100, before=ignored
    ) as process:
        process.send_signal(signal.SIGHUP)
        stdout, err = process.communicate(timeout=TIMEOUT_SECONDS)
    assert (process.returncode, err) == (0, "")
    assert json.loads(stdout)["samples_completed"] == 100


def python(program: str, *arguments: str, number: signal.Signals = signal.SIGINT) -> tuple[int, str, str]:
    """A program in a process in which ``number`` is not ignored."""
    done = subprocess.run(
        [sys.executable, *(arguments or ("-c", program))],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=TIMEOUT_SECONDS,
        check=False,
        preexec_fn=partial(signal.signal, number, signal.SIG_DFL),
    )
    return done.returncode, done.stdout, done.stderr


SIGNAL_IN_AN_IMPORT = """
import os, sys, time
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            try:
                os.kill(os.getpid(), {number})
                time.sleep(0.5)
            except KeyboardInterrupt as error:  # as the C code of NumPy and others does
                raise ImportError("cannot be loaded") from error
sys.meta_path.insert(0, Finder())
sys.argv = ["megatoken", "run", "--dry-run"]
import runpy
runpy.run_module("megatoken", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("number", "module", "words"),
    [
        (signal.SIGINT, "typer", "interrupted; nothing was written"),
        (signal.SIGTERM, "typer", "interrupted; nothing was written"),
        (signal.SIGHUP, "typer", "interrupted; nothing was written"),
        (
            signal.SIGTERM,
            "megatoken.harness.prepare",
            "interrupted before the measurement began; nothing was written",
        ),
    ],
)
def test_a_signal_during_an_import_is_one_line(number: signal.Signals, module: str, words: str) -> None:
    program = SIGNAL_IN_AN_IMPORT.format(module=module, number=int(number))
    assert python(program, number=number) == (130, "", f"megatoken: {words}\n")


def test_ctrl_c_before_signals_are_handled_leaves_no_traceback() -> None:
    program = SIGNAL_IN_AN_IMPORT.format(module="megatoken.signals", number=int(signal.SIGINT))
    assert python(program) == (-signal.SIGINT, "", "")


def test_a_second_signal_ends_what_does_not_end(tmp_path: Path) -> None:
    program = SIGNAL_IN_AN_IMPORT.format(module="megatoken.harness.prepare", number="2); os.kill(os.getpid(), 15")
    assert python(program) == (130, "", "megatoken: interrupted again; ended at once\n")


def test_an_interruption_that_has_been_told_is_not_the_end_by_a_signal(tmp_path: Path) -> None:
    """``python -m`` sends itself SIGINT at its end once a plain KeyboardInterrupt has come out of ``exec``."""
    package = tmp_path / "interrupted"
    package.mkdir()
    (package / "__main__.py").write_text(
        "import os\nfrom megatoken.cli import application\n"
        "application._command = lambda: exec('while True: os.kill(os.getpid(), 2)')\n"
        "application.run_application()\n"
    )
    code, out, err = python(
        "",
        "-c",
        f"import os, sys; os.chdir({str(tmp_path)!r}); os.execv(sys.executable, [sys.executable, '-m', 'interrupted'])",
    )
    assert (code, out, err) == (130, "", "megatoken: interrupted; nothing was written\n")


def test_an_interruption_inside_a_codec_has_no_words_of_the_codec() -> None:
    """Such as that of the host of ``serve``, whose first use imports a module."""
    program = (
        "import codecs, os\nfrom megatoken.cli import application\n"
        "codec = codecs.CodecInfo(lambda text: os.kill(os.getpid(), 2), None)\n"
        "codecs.register(lambda name: codec)\n"
        "application._command = lambda: 'x'.encode('nosuch')\n"
        "application.run_application()\n"
    )
    assert python(program) == (130, "", "megatoken: interrupted; nothing was written\n")


def test_little_is_imported_before_signals_are_handled() -> None:
    program = "before = set(sys.modules); import megatoken.cli; print(*set(sys.modules) - before)"
    path = f"import sys; sys.path.append({str(SOURCE)!r}); "
    code, out, err = python("", "-I", "-S", "-c", path + program)
    assert (code, err) == (0, "")
    assert {"megatoken", "megatoken.cli", "megatoken.signals", "megatoken.errors"} <= set(out.split())
    assert not {"typing", "typer", "megatoken.cli.application"} & set(out.split())


def test_an_interrupted_start_leaves_nothing(tmp_path: Path) -> None:
    with started("run", "--out", tmp_path / "runs", "--warm-up", 1000, "--json", *QUICK[:2]) as process:
        wait_until_busy(process)
        process.send_signal(signal.SIGTERM)
        words = "megatoken: interrupted before the measurement began; nothing was written\n"
        assert process.communicate(timeout=TIMEOUT_SECONDS) == ("", words)
    assert process.returncode == 130
    assert list(tmp_path.iterdir()) == []


def test_a_killed_run_can_be_read(tmp_path: Path, lengths: Path) -> None:
    out = tmp_path / "runs"
    with long_run(out, "--lengths", lengths) as process:
        while not read_run(next(out.glob("2*"))).requests.num_rows:
            time.sleep(0.1)
        time.sleep(random.uniform(0.0, 1.0))
        process.kill()
    killed = read_run(next(out.glob("2*")))
    assert killed.verdict is Verdict.INTERRUPTED
    assert killed.requests.num_rows >= killed.result["samples_completed"]


@pytest.mark.parametrize(
    ("redirection", "reason"),
    [
        (">/dev/full", "No space left on device"),
        (">&-", "Bad file descriptor"),
        *every(("2>/dev/full", None)),
        ("2>&-", None),
    ],
)
def test_a_stream_that_takes_nothing_costs_no_measurement(
    tmp_path: Path, lengths: Path, redirection: str, reason: str | None
) -> None:
    code, stdout, err = redirected(
        redirection, "run", "--lengths", lengths, "--samples", 4, "--out", tmp_path / "runs", *QUICK
    )
    (folder,) = (tmp_path / "runs").iterdir()
    assert read_run(folder).verdict is Verdict.MEASURED
    assert (folder / "report.html").is_file()
    if reason:
        assert (code, stdout) == (1, "")
        assert err.splitlines()[-1] == f"megatoken: cannot write to standard output: {reason}; the run is in {folder}"
        assert "Traceback" not in err and "Exception ignored" not in err
    else:
        assert (code, err) == (0, "")
        assert str(folder) in stdout


@pytest.mark.parametrize("arguments", [["--version"], [], ["run", "--help"], ["run", "--dry-run", "--json"]])
def test_words_that_cannot_be_written_are_one_line(arguments: list[str]) -> None:
    code, _, err = redirected(">/dev/full", *arguments)
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith("megatoken: ") and "No space left on device" in err


def test_a_working_directory_that_is_gone_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    words = "megatoken: the working directory is gone (No such file or directory); change to another one\n"
    assert call_here("generate", "--prompt", "x") == (2, "", words)


def test_too_little_address_space_is_one_line() -> None:
    limited = ["sh", "-c", 'ulimit -v 307200; exec "$@"', "sh", *COMMAND, "generate", "--prompt", "x"]
    done = subprocess.run(limited, capture_output=True, text=True, env=ENVIRONMENT, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    words = r"megatoken: not enough memory( \(.*\))?; free some, or raise the limit \(ulimit -v\)\n"
    assert re.fullmatch(words, done.stderr)


def test_a_reader_that_leaves_early_gets_no_traceback() -> None:
    with started("run", "--dry-run") as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 1


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("megatoken pl", ["plan"]),
        ("megatoken run --mod", ["--mode", "--model"]),
        ("megatoken audit x --fu", ["--full"]),
    ],
)
def test_the_shell_completes_commands_flags_and_keys(
    typed: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_MEGATOKEN_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(typed.count(" ")))
    code, out, err = call_here()
    assert (code, out.split(), err) == (0, words, "")


def test_the_version() -> None:
    assert call_here("--version") == (0, f"megatoken {megatoken.__version__}\n", "")
    assert call_here("nothing") == (2, "", "megatoken: No such command 'nothing'.\n")
