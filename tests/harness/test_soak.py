"""Soaks with the real engine: a short one to its end, one that is killed and resumed, and what is refused."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cli_support import (
    ENVIRONMENT,
    TIMEOUT_SECONDS,
    call,
    call_here,
    make_checkpoint,
    started,
)
from megatoken.analysis.stability import judge_soak
from megatoken.cli.soak import duration_seconds
from megatoken.config import load_run_config
from megatoken.errors import UsageError
from megatoken.files import plain
from megatoken.harness.result import CORE_WAIT_SHARE
from megatoken.harness.soak import Earlier, SteadyLoad
from megatoken.runs.run import Run, Verdict, read_run

ROWS = 20
POPULATION = 4 + 16  # sequences, and the fewest that wait


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """Flags of a load that a slow machine serves too: a tiny model, four sequences, few tokens."""
    folder = tmp_path_factory.mktemp("load")
    lengths = folder / "lengths.csv"
    lengths.write_text("input_tokens,output_tokens\n" + "".join(f"{4 + i % 7},{2 + i % 5}\n" for i in range(ROWS)))
    model = make_checkpoint(folder / "model")
    return [
        *("--model", model, "--lengths", lengths, "--warm-up", 0.1),
        *("--engine.threads", 1, "--engine.max_sequences", 4),
    ]


def only_run(out: Path) -> Path:
    (path,) = (path for path in out.iterdir() if not path.name.startswith("."))
    return path


def check_whole(run: Run, duration: float) -> None:
    """What holds for every soak that came to its end, interrupted or not."""
    soak, stability = run.result["soak"], run.result["stability"]
    assert run.result["scenario"] == "soak"
    assert soak["duration_seconds"] == duration
    assert soak["population"] == POPULATION
    assert run.verdict is (Verdict.MEASURED if stability["verdict"] == "STABLE" else Verdict.INVALID)
    assert [reason["code"] for reason in run.reasons] == [reason["code"] for reason in stability["reasons"]]

    assert plain(judge_soak(run.result, run.environment, run.requests, run.series)) == stability

    ids = run.requests["sample_id"].to_pylist()
    assert len(set(ids)) == len(ids)
    assert set(run.requests["finish_reason"].to_pylist()) == {"length"}
    times = run.series["elapsed_seconds"].to_pylist()
    assert all(earlier < later for earlier, later in pairwise(times))
    tokens = run.series["output_tokens"].to_pylist()
    assert all(earlier <= later for earlier, later in pairwise(tokens))
    assert duration <= times[-1]
    assert list((run.path / "mlperf").iterdir()) == []


@pytest.mark.timing
def test_a_soak_keeps_the_target_full_for_its_time_and_is_judged(tmp_path: Path, load: list[object]) -> None:
    code, out, err = call_here("soak", "--duration", "8s", *load, "--json", "--out", tmp_path)
    printed = json.loads(out)
    run = read_run(Path(printed["run_folder"]))
    assert code == run.verdict.exit_code, err
    check_whole(run, 8.0)
    assert run.result["soak"]["interruptions"] == []
    moments = [run.result[name] for name in ("created_at", "started_at", "ended_at")]
    assert {text[-1] for text in (*moments, run.result["soak"]["segments"][0]["started_at"])} == {"Z"}
    assert run.requests["sample_id"].to_pylist() != []
    assert sorted(run.requests["sample_id"].to_pylist()) == list(range(len(run.requests)))  # each issued one ended

    by_order = run.requests.sort_by("sample_id")["sample_index"].to_pylist()
    passes = [by_order[at : at + ROWS] for at in range(0, len(by_order) - ROWS, ROWS)]
    assert len(passes) > 1
    assert all(sorted(one) == list(range(ROWS)) for one in passes)
    assert passes[0] != passes[1]

    during = [row for row in run.series.to_pylist() if 1 < row["elapsed_seconds"] < 8]
    assert min(row["in_flight"] for row in during) >= POPULATION - 4  # a step may end all four
    # What waited when the time was over is not begun: two steps may take in four each before that is known.
    assert sum(at > 8 for at in run.requests["started_seconds"].to_pylist()) <= 8
    assert run.result["samples_failed"] == 0
    assert run.result["output_tokens"] == run.series["output_tokens"].to_pylist()[-1]
    page = (run.path / "report.html").read_text()
    assert run.result["stability"]["verdict"] in page
    assert "Stability" in page
    assert call_here("report", run.path)[0] == 0

    code, out, _ = call_here("audit", run.path, "--json")
    assert code == 0, out
    (run.path / "result.json").write_text(json.dumps({**run.result, "verdict": "VALID", "stability": {}}))
    code, out, _ = call_here("audit", run.path, "--json")
    assert code == 3
    failed = {item["id"] for item in json.loads(out)["findings"] if item["severity"] == "fail"}
    assert "run_folder.verdict" in failed


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel does not count")
@pytest.mark.timing
def test_a_soak_says_so_when_other_work_takes_the_cores(tmp_path: Path, load: list[object]) -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
            try:
                _, out, err = call("soak", "--duration", "2s", *load, "--json", "--out", tmp_path)
            finally:
                other.kill()
    finally:
        os.sched_setaffinity(0, cores)
    result = json.loads(out)
    assert result["core_wait_share"] > CORE_WAIT_SHARE, err
    assert result["notes"][-1]["code"] == "CORE_WAIT"


@pytest.mark.timing
def test_the_headline_is_the_rate_under_load_and_the_live_line_says_that_it_drains(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, load: list[object]
) -> None:
    monkeypatch.setattr("megatoken.harness.progress.PLAIN_PERIOD_SECONDS", 0.0)
    _, out, err = call_here("soak", "--duration", "2s", *load, "--out", tmp_path)
    path = only_run(tmp_path)
    run = read_run(path)
    until = next(row for row in run.series.to_pylist() if row["elapsed_seconds"] >= 2.0)
    result = run.result
    assert result["rated_seconds"] == 2.0 < result["duration_seconds"] + 1
    assert 0 < result["output_tokens_per_second"] * 2.0 <= until["output_tokens"]
    assert re.search(r"(?m)^Output rate under load +tokens/s ", out), out
    assert re.search(r"(?m)^Time under load +s +2\.00 *$", out), out
    assert re.search(r"(?m)^Duration with drain +s ", out), out
    assert "rated over 2.00 s under load" in (path / "report.html").read_text()
    *under_load, last = [line for line in err.splitlines() if "in flight" in line]
    assert re.search(r"s, draining  [\d,]+ tokens/s", last), err
    assert under_load, err
    assert "left  " in under_load[0], err


def reached(out: Path, seconds: float, process: "subprocess.Popen[str]") -> Path:
    """The folder of a running soak once its time series goes that far."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        for path in out.glob("2*"):
            moments = read_run(path).series["elapsed_seconds"].to_pylist()
            if moments and moments[-1] >= seconds:
                return path
        time.sleep(0.1)
    raise AssertionError("the soak does not get on")


@pytest.mark.timing
def test_a_killed_soak_goes_on_where_it_stopped(tmp_path: Path, load: list[object]) -> None:
    with started("soak", "--duration", "1h", *load, "--out", tmp_path) as process:
        path = reached(tmp_path, 3.0, process)
        code, _, err = call_here("soak", "--resume", path)  # while the other is alive
        assert (code, err.count("\n")) == (2, 1)
        assert "another process" in err
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = read_run(path)
    assert before.verdict is Verdict.INTERRUPTED
    assert before.reasons[0]["code"] == "NOT_FINISHED"

    with started("soak", "--resume", path) as process:
        reached(tmp_path, before.series["elapsed_seconds"].to_pylist()[-1] + 2.0, process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=TIMEOUT_SECONDS)
        assert process.returncode == 130, err
    between = read_run(path)
    assert between.verdict is Verdict.INTERRUPTED
    assert f"--resume {path}" in between.reasons[0]["message"]

    for name in ("requests", "series"):  # as if it had run under another name so far
        table = pq.read_table(path / f"{name}.parquet")
        renamed = pa.array(["elsewhere"] * len(table), table.schema.field("node").type)
        place = table.schema.get_field_index("node")
        pq.write_table(table.set_column(place, table.schema.field("node"), renamed), path / f"{name}.parquet")
    between = read_run(path)

    # An hour is more than a test has.
    result: dict[str, Any] = json.loads((path / "result.json").read_text())
    duration = result["soak"]["duration_seconds"] = between.series["elapsed_seconds"].to_pylist()[-1] + 3.0
    (path / "result.json").write_text(json.dumps(result))
    code, _, err = call("soak", "--resume", path)
    assert (code, f"min_duration_seconds was {duration}, now it is 3600.0" in err) == (2, True), err
    settings = (path / "config.yaml").read_text()
    (path / "config.yaml").write_text(settings.replace("seconds: 3600.0", f"seconds: {duration!r}"))
    code, out, err = call("soak", "--resume", path, "--json")
    run = read_run(path)
    assert code == run.verdict.exit_code, err
    assert json.loads(out)["run_folder"] == str(path)
    check_whole(run, duration)
    assert run.requests.slice(0, len(between.requests)).equals(between.requests)
    assert [node["node"] for node in run.result["nodes"]] == ["elsewhere"]
    assert set(run.series["node"].to_pylist()) == {"elsewhere"}
    there = before.requests.drop_columns(["node"])
    assert run.requests.drop_columns(["node"]).slice(0, len(there)).equals(there)
    soak = run.result["soak"]
    parts = [soak, *soak["segments"], *soak["interruptions"]]
    documented = (Path(__file__).parents[2] / "docs" / "run-folder.md").read_text()
    assert {name for part in parts for name in part if f"`{name}`" not in documented} == set()
    assert len(soak["segments"]) == 3
    assert [set(one) for one in soak["interruptions"]] == [
        {"at_seconds", "gap_seconds", "samples_dropped", "why", "lost_replicas"}
    ] * 2
    killed, stopped = soak["interruptions"]
    assert killed["at_seconds"] == soak["segments"][1]["begins_seconds"] >= 3.0
    assert "the process ended before the run did" in killed["why"]
    assert "SIGINT" in stopped["why"]
    assert 0 < killed["gap_seconds"] < 600
    assert 0 <= killed["samples_dropped"] <= POPULATION
    assert run.result["started_at"] == before.result["started_at"]
    assert run.result["duration_seconds"] >= duration

    code, _, err = call_here("soak", "--resume", path)
    assert (code, err.count("\n")) == (2, 1)
    assert "already finished (" in err


def test_a_soak_of_another_model_or_machine_is_not_gone_on_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, load: list[object]
) -> None:
    monkeypatch.setitem(ENVIRONMENT, "CXX", "no-such-compiler")
    with started("soak", "--duration", "1h", *load, "--precision", "bf16", "--out", tmp_path) as process:
        path = reached(tmp_path, 1.0, process)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=TIMEOUT_SECONDS)
    result: dict[str, Any] = json.loads((path / "result.json").read_text())
    assert any(note["code"] == "NO_KERNELS" for note in result["notes"])
    assert "model" not in result["soak"]["settings"]  # it may lie elsewhere by now: the hash of its weights tells it
    file = path / "config.yaml"
    settings = file.read_text()
    for line, other, words in (
        ("seed: 0", "seed: 1", "seed was 0, now it is 1"),
        ("max_sequences: 4", "max_sequences: 5", "engine.max_sequences was 4, now it is 5"),
        ("max_tokens: 128", "max_tokens: 9", "max_tokens was 128, now it is 9"),
        ("precision: bf16", "precision: fp32", "precision was bf16, now it is fp32"),
    ):
        assert line in settings
        file.write_text(settings.replace(line, other))
        with pytest.raises(UsageError, match=f"cannot be resumed: {words}; "):
            Earlier(read_run(path), 1.0, ()).check_settings(load_run_config(file, {}))
    code, _, err = call("soak", "--resume", path)
    assert (code, err.count("\n"), err.count("precision was bf16, now it is fp32")) == (2, 1, 1)
    file.write_text(settings)
    Earlier(read_run(path), 1.0, ()).check_settings(load_run_config(file, {}))
    with pytest.raises(UsageError, match="precision was fp8, now it is bf16"):  # all that older versions recorded
        Earlier(replace(read_run(path), result={**result, "precision": "fp8"}), 1.0, ()).check(result)

    (path / "result.json").write_text(json.dumps({**result, "data_set_sha256": "0" * 64}))
    code, _, err = call_here("soak", "--resume", path)
    assert (code, err.count("\n"), err.count("data_set_sha256")) == (2, 1, 1)  # nothing was loaded
    assert read_run(path).verdict is Verdict.INTERRUPTED

    run = read_run(path)
    machine = {"cpu": {"model": "Grace"}, "gpus": [{"name": "GB300"}] * 4}
    nodes = [{"node": f"n{number}", "replicas": 4, "machine": machine} for number in range(3)]
    of_rack = Earlier(replace(run, result={**result, "rack_nodes": nodes}), 1.0, ())
    renamed = [{**node, "node": "m"} for node in nodes]
    of_rack.check({**result, "rack_nodes": renamed})
    with pytest.raises(UsageError, match="3 x 4 replicas on Grace, 4 GB300, now it is 2 x 4 replicas on"):
        of_rack.check({**result, "rack_nodes": nodes[1:]})
    with pytest.raises(UsageError, match="hardware was Grace, 4 GB300, now it is "):
        Earlier(replace(run, environment=machine, result=result), 1.0, ()).check(result)


def test_drawn_weights_of_another_shape_are_another_model(tmp_path: Path) -> None:
    few = ("--engine.max_sequences", 4, "--engine.max_length", 64)  # so that it drains soon
    flags = ("--warm-up", 0.1, "--engine.threads", 1, *few, "--json")
    _, out, _ = call_here("soak", "--model", "tiny", "--duration", "1s", "--out", tmp_path, *flags)
    path = Path(json.loads(out)["run_folder"])
    file = path / "config.yaml"
    Earlier(read_run(path), 1.0, ()).check_settings(load_run_config(file, {}))
    file.write_text(file.read_text().replace("model: tiny", "model: 125m"))
    with pytest.raises(UsageError, match="cannot be resumed: model was tiny, now it is 125m; "):
        Earlier(read_run(path), 1.0, ()).check_settings(load_run_config(file, {}))


def test_an_error_says_how_to_go_on(tmp_path: Path) -> None:
    """The table of requests is written to a full device from its second writing on."""
    out = tmp_path / "runs"
    with started("soak", "--duration", "1h", "--warm-up", 0, "--out", out) as process:
        while not (tables := list(out.glob("2*/requests.parquet"))):  # not the draft, whose name begins with a dot
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        tables[0].with_name(".requests.parquet.tmp").symlink_to("/dev/full")
        stdout, err = process.communicate(timeout=TIMEOUT_SECONDS)
    assert (process.returncode, stdout) == (2, "")
    message = err.splitlines()[-1]
    assert message.startswith(f"megatoken: {tables[0]}: cannot be written (No space left on device)")
    assert message.endswith(f"; resume with megatoken soak --resume {tables[0].parent}")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((), "give --duration, for example --duration 80m"),
        (("--duration", "soon"), "--duration soon: must be a time"),
        (("--duration", "0s"), "at least 1 s"),
        (("--duration", "8d"), "at most 7 days"),
        (("--duration", "80m", "--scenario", "server"), "scenario: not a setting of a soak"),
        (("--duration", "80m", "--samples", "9"), "samples: not a setting of a soak"),
        (("--duration", "80m", "--rules", "v5.1"), "rules: not a setting of a soak"),
        (("--duration", "80m", "--rack", "auto", "--rack.count", "per_node"), "rack.count: not a setting of a soak"),
        (("--resume", "nowhere", "--duration", "80m"), "give only --rack and --json"),
        (("--resume", "nowhere"), "nowhere: cannot be opened"),
    ],
)
def test_what_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: tuple[str, ...],
    why: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = call_here("soak", *arguments)
    assert (code, out) == (2, "")
    assert why in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "seconds"), [("80m", 4800), ("1h30m", 5400), ("90", 90), ("2d", 172_800), ("1.5h", 5400), ("10s", 10)]
)
def test_durations_are_read(text: str, seconds: float) -> None:
    assert duration_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "80 m", "-5s", "80mm5", "1e3", "nan", "80min"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(UsageError):
        duration_seconds(text)


def test_the_load_replaces_what_ends_until_its_time_is_over() -> None:
    load = SteadyLoad(rows=3, population=5, seconds=0.2, seed=(0, 0))
    (first,) = load.take_issued(0.0)
    assert (len(first.rows), load.issued, load.outstanding) == (5, 5, 5)
    assert load.take_issued(0.0) == []
    load.complete(1, 4)
    load.complete(4, 4)
    (more,) = load.take_issued(0.0)
    assert (len(more.rows), load.issued, load.outstanding) == (2, 7, 5)
    assert sorted((first.rows + more.rows)[:6]) == [0, 0, 1, 1, 2, 2]
    time.sleep(0.25)
    load.complete(0, 4)
    assert load.take_issued(0.0) == []
    assert load.all_issued
    assert load.outstanding == 4
