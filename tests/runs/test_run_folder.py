"""The run folder in one process: what is there at once, what a finished run holds, and what reading refuses."""

import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from megatoken.analysis.statistics import summarise
from megatoken.analysis.summary import summarise_run
from megatoken.errors import ExitCode, StorageError, UsageError
from megatoken.runs.reasons import reason
from megatoken.runs.run import Verdict, read_run
from megatoken.runs.tables import SampleRow, SeriesRow
from megatoken.runs.writer import RunFolder, new_folder, run_name

NAME = "20261120T091233Z-offline-tiny"
FACTS = {"model": "tiny", "rules_unmet": [{"code": "MIN_DURATION", "message": "ran 20 s of 600 s"}]}
FILES = {"config.yaml", "environment.json", "mlperf", "requests.parquet", "series.parquet", "result.json"}
RACK = {"replicas": 4, "replicas_least": 4, "replicas_at_end": 4, "share_left": 1, "lost": [], "joined": []}
RACK["clock_offsets"] = []


def create(out: Path, **config: object) -> RunFolder:
    return RunFolder.create(
        out, NAME, config, {"hostname": "here"}, scenario="offline", summarise=summarise_run, facts=FACTS
    )


def sample(number: int, last_seconds: float = 1.0) -> SampleRow:
    return SampleRow(number, number % 7, 0.0, 0.01, 0.5, last_seconds, 10, 6, "length", "here")


def series(elapsed_seconds: float, **values: int) -> SeriesRow:
    levels = dict.fromkeys(SeriesRow._fields[3:12], 0) | values
    return SeriesRow(elapsed_seconds, "here", 0, **levels)


def wait_until(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_new_folder_is_whole_and_says_interrupted(tmp_path):
    folder = create(tmp_path / "deep" / "runs", model="tiny")
    assert folder.path == tmp_path / "deep" / "runs" / NAME
    assert names(folder.path) == FILES
    assert names(folder.path.parent) == {NAME}
    assert folder.mlperf_directory.is_dir()
    run = read_run(folder.path)
    assert run.verdict is Verdict.INTERRUPTED
    assert run.reasons[0]["code"] == "NOT_FINISHED"
    assert run.config == {"model": "tiny"}
    assert run.environment == {"hostname": "here"}
    assert run.rules_unmet == FACTS["rules_unmet"]
    assert len(run.requests) == len(run.series) == 0
    assert run.result["output_tokens_per_second"] is None
    folder.interrupt(reason("INTERRUPTED", cause="test over"))


def test_rows_reach_the_disk_while_the_run_lasts(tmp_path):
    folder = create(tmp_path)
    folder.add_samples([sample(1), sample(2)])
    folder.add_series(series(1.0, output_tokens=12))
    wait_until(lambda: len(pq.read_table(folder.path / "requests.parquet")) == 2)
    folder.add_samples([sample(3)])
    wait_until(lambda: read_run(folder.path).result["samples_completed"] == 3)
    assert folder.write_seconds() > 0
    run = read_run(folder.path)
    assert run.verdict is Verdict.INTERRUPTED
    assert run.requests["sample_id"].to_pylist() == [1, 2, 3]
    assert run.series["output_tokens"].to_pylist() == [12]
    assert run.series["power_watts"].to_pylist() == [None]
    folder.interrupt(reason("INTERRUPTED", cause="test over"))


def test_finish_replaces_the_verdict_and_keeps_every_row(tmp_path):
    folder = create(tmp_path)
    folder.add_samples([sample(number, 1 + number / 10) for number in range(30)])
    folder.add_series(series(1.0, preemptions=2))
    folder.finish({"verdict": Verdict.MEASURED, "reasons": [], "odd": float("nan")})
    folder.interrupt(reason("INTERRUPTED", cause="Ctrl-C a moment too late"))
    run = read_run(folder.path)
    assert run.verdict is Verdict.MEASURED
    assert run.reasons == []
    assert run.result["schema_version"] == 2
    assert run.result["odd"] is None
    assert run.result["output_tokens"] == 180
    expected = summarise(run.requests, run.series, scenario="offline")
    assert run.result["ttft_seconds"] == expected["ttft_seconds"]
    assert run.result["preemptions"] == 2
    assert run.result["rules_unmet"] == FACTS["rules_unmet"]
    assert pq.read_table(folder.path / "requests.parquet").num_rows == 30
    assert names(folder.path) == FILES


def test_interrupt_keeps_the_rows_and_names_the_reason(tmp_path):
    folder = create(tmp_path)
    folder.add_samples([sample(1)])
    folder.interrupt(reason("INTERRUPTED", cause="stopped by Ctrl-C"))
    run = read_run(folder.path)
    assert run.verdict is Verdict.INTERRUPTED
    assert run.reasons == [{"code": "INTERRUPTED", "message": "stopped by Ctrl-C", "cause": "stopped by Ctrl-C"}]
    assert run.requests["sample_id"].to_pylist() == [1]


def test_facts_learnt_during_the_run_are_in_every_later_result(tmp_path):
    folder = create(tmp_path)
    folder.add_facts({"started_at": "now", "peak_memory_bytes": 1})
    folder.add_facts({"peak_memory_bytes": 2})
    folder.add_samples([sample(1)])
    wait_until(lambda: "started_at" in read_run(folder.path).result)
    folder.add_facts({"peak_memory_bytes": 3})
    folder.interrupt(reason("INTERRUPTED", cause="test over"))
    result = read_run(folder.path).result
    assert (result["model"], result["started_at"], result["peak_memory_bytes"]) == ("tiny", "now", 3)


def test_an_unknown_verdict_is_refused_before_anything_is_written(tmp_path):
    folder = create(tmp_path)
    with pytest.raises(ValueError, match="FINE"):
        folder.finish({"verdict": "FINE", "reasons": []})
    folder.interrupt(reason("INTERRUPTED", cause="test over"))


def test_two_commands_of_one_second_have_a_folder_each_and_an_empty_one_goes(tmp_path):
    wanted = tmp_path / "out" / "20261120T091233Z-sweep-tiny"
    with new_folder(wanted) as first, new_folder(wanted) as second:
        assert (first, second) == (wanted, wanted.with_name(f"{wanted.name}-2"))
        (second / "sweep.json").touch()
    assert list(wanted.parent.iterdir()) == [second]
    with pytest.raises(StorageError, match="cannot be written"), new_folder(second / "sweep.json" / "x"):
        pass


def test_a_taken_name_gets_a_number(tmp_path):
    (tmp_path / NAME).mkdir()  # empty: a bare rename would silently take its place
    folders = [create(tmp_path) for _ in range(3)]
    assert [folder.path.name for folder in folders] == [f"{NAME}-2", f"{NAME}-3", f"{NAME}-4"]
    assert not list((tmp_path / NAME).iterdir())
    for folder in folders:
        folder.interrupt(reason("INTERRUPTED", cause="test over"))


@pytest.mark.parametrize("place", ["a file", "below a file"])
def test_a_place_that_cannot_be_written_is_one_line_and_leaves_nothing(tmp_path, place):
    blocker = tmp_path / "blocker"
    blocker.write_text("here first")
    out = blocker if place == "a file" else blocker / "runs"
    with pytest.raises(StorageError) as failure:
        create(out)
    assert failure.value.exit_code is ExitCode.USAGE
    assert str(out) in str(failure.value)
    assert "\n" not in str(failure.value)
    assert names(tmp_path) == {"blocker"}


def test_a_failure_takes_back_the_folders_it_made(tmp_path):
    with pytest.raises(TypeError, match="object"):
        create(tmp_path / "a" / "b", thing=object())
    assert not names(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_one_line(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="Permission denied"):
        create(tmp_path)


def test_secrets_never_reach_the_disk(tmp_path):
    config = {
        "hf_token": "s1",
        "server": {"api_key": "s2", "url": "http://me:s3@host/v1"},
        "max_tokens": 9,
        "token": None,
    }
    folder = create(tmp_path, **config)
    folder.interrupt(reason("INTERRUPTED", cause="test over"))
    written = (folder.path / "config.yaml").read_text()
    assert yaml.safe_load(written) == {
        "hf_token": "***",
        "server": {"api_key": "***", "url": "http://***@host/v1"},
        "max_tokens": 9,
        "token": None,
    }


@pytest.mark.timing
def test_a_call_from_the_engine_thread_takes_microseconds(tmp_path):
    folder = create(tmp_path)
    rows = [sample(1)]
    costs = []
    for _ in range(2000):
        started = time.perf_counter()
        folder.add_samples(rows)
        costs.append(time.perf_counter() - started)
    folder.interrupt(reason("INTERRUPTED", cause="test over"))
    assert sorted(costs)[len(costs) // 2] < 20e-6


def test_the_package_does_not_import_pyarrow_or_rich():
    code = (
        "import sys, megatoken.runs.run, megatoken.report, megatoken.hardware.inventory;"
        "print([name for name in ('pyarrow', 'rich', 'torch') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("scenario", "model", "expected"),
    [
        ("offline", "llama2-70b", "20261120T091233Z-offline-llama2-70b"),
        ("offline", "/models/Llama 3.1 (8B)/", "20261120T091233Z-offline-Llama-3.1-8B"),
        ("offline", "../..", "20261120T091233Z-offline"),
        ("server", "模型", "20261120T091233Z-server"),
    ],
)
def test_run_name(scenario, model, expected):
    started = datetime(2026, 11, 20, 10, 12, 33, tzinfo=timezone(timedelta(hours=1)))
    assert run_name(started, scenario, model) == expected
    assert run_name(started.astimezone(UTC), scenario, model) == expected


@pytest.mark.parametrize(
    ("verdict", "code"), [("MEASURED", 0), ("VALID", 0), ("INVALID", 3), ("DEGRADED", 4), ("INTERRUPTED", 130)]
)
def test_exit_codes(verdict, code):
    assert Verdict(verdict).exit_code == code


@pytest.fixture
def finished(tmp_path):
    folder = create(tmp_path)
    folder.add_samples([sample(1)])
    folder.finish({"verdict": "MEASURED", "reasons": []})
    return folder.path


def damage_result(**changes):
    def apply(path: Path) -> None:
        file = path / "result.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return apply


def cut(name: str):
    return lambda path: (path / name).write_bytes((path / name).read_bytes()[:-9])


def swap_tables(path: Path) -> None:
    (path / "series.parquet").write_bytes((path / "requests.parquet").read_bytes())


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda path: (path / "result.json").unlink(), "result.json is missing"),
        (lambda path: (path / "config.yaml").write_text("a: [1"), "config.yaml is damaged (line 1: expected ','"),
        (lambda path: (path / "config.yaml").write_text("[" * 100_000), "config.yaml is damaged"),
        (lambda path: (path / "result.json").rename(path / "old") and os.mkfifo(path / "result.json"), "is not a file"),
        (lambda path: (path / "environment.json").write_bytes(b"\xff\xfe"), "environment.json is damaged"),
        (lambda path: (path / "environment.json").write_text("[]"), "environment.json is damaged (not a mapping)"),
        (lambda path: (path / "environment.json").write_text('{"cpu": 5}'), "(cpu is not a mapping)"),
        (lambda path: (path / "environment.json").write_text('{"packages": [5]}'), "(packages is not a mapping)"),
        (
            lambda path: (path / "environment.json").write_text('{"gpus": 5}'),
            "(gpus is not a list of GPUs with their names)",
        ),
        (lambda path: (path / "environment.json").write_text('{"gpus": [{}]}'), "(gpus is not a list of GPUs"),
        (cut("result.json"), "result.json is damaged"),
        (cut("requests.parquet"), "requests.parquet is damaged"),
        (lambda path: (path / "series.parquet").write_bytes(b""), "series.parquet is damaged"),
        (swap_tables, "series.parquet is damaged"),
        (damage_result(schema_version=99), "schema_version 99"),
        (damage_result(verdict="FINE"), "'FINE'"),
        (damage_result(reasons=None), "result.json is damaged"),
        (damage_result(reasons=[{"code": "X"}]), "result.json is damaged ('message')"),
        (
            damage_result(output_tokens_per_second="fast"),
            "result.json is damaged (output_tokens_per_second is not a number)",
        ),
        (damage_result(output_tokens_per_second=-1), "output_tokens_per_second of a run with a rate is not above zero"),
        (damage_result(output_tokens=0), "output_tokens of a run with a rate is not above zero"),
        (damage_result(model=7), "result.json is damaged (model is not a text)"),
        (damage_result(tpot_seconds=[1]), "result.json is damaged (tpot_seconds is not a mapping)"),
        (damage_result(tpot_seconds={"p99": "x"}), "result.json is damaged (tpot_seconds.p99 is not a number)"),
        (
            damage_result(stages={"queue": {"share": "x"}}),
            "result.json is damaged (stages has a value that is not a number)",
        ),
        (damage_result(steady_window_seconds=[5]), "steady_window_seconds is not a pair of numbers"),
        (damage_result(notes=[{}]), "result.json is damaged (notes is not a list of notes with code and message)"),
        (damage_result(nodes=None), "result.json is damaged (nodes is not a list)"),
        (damage_result(nodes=[{"node": 3}]), "result.json is damaged (nodes has an entry that is not a node)"),
        (damage_result(nodes=[{"node": "a", "samples_completed": "x"}]), "samples_completed of node a is not a number"),
        (damage_result(rack={}), "(rack.replicas is not a number)"),
        (damage_result(rack_nodes=[{"node": "a", "replicas": 4, "gpus": 4}]), "(machine of node a is not a mapping)"),
        (
            damage_result(rack={"replicas": 4, "replicas_least": 4, "replicas_at_end": 4}),
            "(rack.share_left is not a number)",
        ),
        (damage_result(rack={**RACK, "joined": [{}]}), "(rack.joined is not a list of nodes with their names and at_"),
        (damage_result(rack={**RACK, "lost": [{"node": "a"}]}), "(rack.lost has a loss without its replica or"),
        (damage_result(rack={**RACK, "lost": [{"node": "a", "cause": "", "replica": [0]}]}), "without its replica or"),
        (damage_result(node_verdicts={"a": "VALID"}), "(rack.start_spread_seconds is not a number)"),
        (damage_result(stability="STABLE"), "(stability is not a mapping)"),
        (damage_result(stability={"trend": [1]}), "(stability.trend is not a mapping)"),
        (damage_result(soak=[]), "(soak is not a mapping)"),
        (damage_result(soak={"duration_seconds": 9}), "(soak.segments is not a list of mappings with begins_seconds)"),
        (damage_result(soak={"duration_seconds": 9, "segments": []}), "(soak.interruptions is not a list of mappings"),
    ],
)
def test_reading_names_what_is_missing_or_damaged_in_one_line(finished, harm, message):
    harm(finished)
    with pytest.raises(UsageError) as refusal:
        read_run(finished)
    assert message in str(refusal.value)
    assert str(finished) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_reading_names_all_that_is_wrong(finished):
    (finished / "result.json").unlink()
    (finished / "series.parquet").unlink()
    with pytest.raises(UsageError, match=r"result.json is missing; series.parquet is missing"):
        read_run(finished)


def test_reading_what_is_no_folder(tmp_path):
    with pytest.raises(UsageError, match="no such folder"):
        read_run(tmp_path / "nothing")
