"""Why a run was slow: each cause is found in a run folder that has it, and a healthy run has none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli_support import call_here
from megatoken.analysis.diagnosis import diagnose
from megatoken.analysis.summary import summarise_run
from megatoken.hardware.doctor import State
from megatoken.runs.run import Run, read_run
from megatoken.runs.tables import SampleRow, SeriesRow
from megatoken.runs.writer import RunFolder

SECONDS = 60
FACTS = {
    "model": "tiny",
    "precision": "bf16",
    "core_wait_share": 0.01,
    "loop_seconds": {"wait": 0.0, "target": 59.0, "tokenise": None, "detokenise": None, "harness": 1.0},
    "memory_plan": {"max_sequences": 40},
    "target": {"device": "cuda", "why_no_kernels": None, "bf16_widened": False, "why_no_gpu": None},
}


def made(out: Path, levels: dict[str, Any], facts: dict[str, Any]) -> Run:
    """Samples that overlap evenly for a minute; ``levels`` are columns of every row, or functions of the second."""
    folder = RunFolder.create(
        out,
        "run",
        {"engine": {}},
        {"hostname": "here"},
        scenario="offline",
        summarise=summarise_run,
        facts=FACTS | facts,
    )
    folder.add_samples(
        [
            SampleRow(i, i, 0.0, 0.0, max(0.0, i / 10 - 2), min(float(SECONDS), i / 10 + 2), 5, 20, "length", "here")
            for i in range(10 * SECONDS)
        ]
    )
    usual: dict[str, Any] = {
        "output_tokens": lambda second: 200 * second,
        "processed_tokens": lambda second: 250 * second,
        "computed_seconds": lambda second: 0.98 * second,
        "batched_tokens": 40,
        "max_batched_tokens": 64,
        "pages": 100,
        "pages_free": 20,
        "in_flight": 80,
        "waiting": 40,
        "running": 40,
        "preemptions": 0,
        "recomputed_tokens": 0,
        "clock_mhz": 1800.0,
        "clock_reasons": 4,
        "ecc_uncorrected_errors": 0,
    }
    for second in range(1, SECONDS + 1):
        row = {name: value(second) if callable(value) else value for name, value in (usual | levels).items()}
        folder.add_series(SeriesRow(float(second), "here", 0, **row))
    folder.finish({"verdict": "MEASURED", "reasons": []} | facts)
    return read_run(folder.path)


@pytest.mark.parametrize(
    ("code", "words", "levels", "facts"),
    [
        ("contention", "engine's process waited for a core 57%", {}, {"core_wait_share": 0.57}),
        ("contention", "client waited for", {}, {"core_wait_share": 0.57, "target": {"kind": "endpoint"}}),
        ("memory_pressure", "memory 20%", {"memory_stalled_share": 0.2}, {}),
        ("disk_pressure", "disk 30%", {"disk_stalled_share": 0.3}, {}),
        ("throttling", "heat (hardware)", {"clock_reasons": lambda second: 0x44 if second > 30 else 4}, {}),
        (
            "xid_errors",
            "1 critical errors (XID), from 41 s on",
            {"xid_errors": lambda second: int(second > 40), "last_xid": 79},
            {},
        ),
        ("nvlink_errors", "5 NVLink errors", {"nvlink_errors": 5}, {}),
        ("preemptions", "7 preemptions", {"preemptions": 7, "recomputed_tokens": lambda second: 50 * second}, {}),
        ("pages", "98% full while requests waited, so a batch had 11 of 40", {"pages_free": 2, "running": 11}, {}),
        ("small_batches", "a batch had 5 of 40", {"running": 5, "waiting": lambda second: int(second % 3 == 0)}, {}),
        ("idle_engine", "nothing in 50%", {"computed_seconds": lambda second: 0.5 * second}, {}),
        (
            "client",
            "the client was the limit: busy",
            {},
            {"doubts": [{"code": "CLIENT_LIMIT", "message": "busy"}]},
        ),
        ("measuring_loop", "12%", {}, {"loop_seconds": {"harness": 7.2}}),
        ("kernels", "no g++", {}, {"target": FACTS["target"] | {"why_no_kernels": "no g++"}}),  # type: ignore[operator]
        *(
            ("bf16_widened", "no bf16", {}, {"precision": one, "target": FACTS["target"] | {"bf16_widened": True}})  # type: ignore[operator]
            for one in ("bf16", "fp8")
        ),
        (
            "steadiness",
            "the worst began",
            {"output_tokens": lambda second: 200 * second - (second % 10 > 5) * 150},
            {},
        ),
    ],
)
def test_each_cause_is_found_with_its_evidence(
    code: str, words: str, levels: dict[str, Any], facts: dict[str, Any], tmp_path: Path
) -> None:
    (found,) = [one for one in diagnose(made(tmp_path, levels, facts)) if one.state != State.OK]
    assert found.code == code
    assert words in found.message
    assert found.command


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("core_wait_share", "x", "core_wait_share is not a number"),
        ("loop_seconds", ["x"], "loop_seconds is not a mapping"),
        ("memory_plan", "x", "memory_plan is not a mapping"),
        ("memory_plan", {"max_sequences": "x"}, "memory_plan.max_sequences is not a number"),
    ],
)
def test_a_damaged_field_is_refused_by_its_name(name: str, value: object, problem: str, tmp_path: Path) -> None:
    file = made(tmp_path, {}, {}).path / "result.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    code, out, err = call_here("doctor", file.parent)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert f"result.json is damaged ({problem})" in err


def test_a_healthy_run_has_no_cause_and_the_command_says_what_was_examined(tmp_path: Path) -> None:
    run = made(tmp_path, {}, {})
    assert {one.state for one in diagnose(run)} == {State.OK}
    code, out, _ = call_here("doctor", run.path, "--json")
    document = json.loads(out)
    assert (code, document["kind"], document["verdict"]) == (0, "diagnosis", "MEASURED")
    assert {"contention", "throttling", "preemptions", "pages"} <= {one["code"] for one in document["findings"]}
    (tmp_path / "empty").mkdir()
    code, _, err = call_here("doctor", tmp_path / "empty")
    assert (code, len(err.splitlines())) == (2, 1)


def test_a_run_without_samples_has_no_list_of_checks_that_found_nothing(tmp_path: Path) -> None:
    facts = {"core_wait_share": 0.3, "target": {"kind": "endpoint"}}
    folder = RunFolder.create(
        tmp_path, "run", {}, {"hostname": "here"}, scenario="server", summarise=summarise_run, facts=facts
    )
    folder.finish({"verdict": "INVALID", "reasons": []})
    code, out, _ = call_here("doctor", folder.path)
    assert code == 0 and "FIX " in out and "OK " not in out and "0 checks" not in out, out


def test_of_a_folder_of_runs_such_as_a_sweep_each_is_examined(tmp_path: Path) -> None:
    slow = {"core_wait_share": 0.3}
    for name, facts in (("01-concurrency-1-1", {}), ("02-concurrency-4-1", slow)):
        made(tmp_path, {}, facts).path.rename(tmp_path / name)
    code, out, _ = call_here("doctor", tmp_path)
    assert code == 0
    first, second = out.split("02-concurrency-4-1 (MEASURED)\n")
    assert first.startswith("01-concurrency-1-1 (MEASURED)\nOK ") and "FIX" not in first
    assert second.startswith("FIX      the engine's process waited for a core 30%")
    _, out, _ = call_here("doctor", tmp_path, "--json")
    runs = json.loads(out)["runs"]
    assert [Path(one["run"]).name for one in runs] == ["01-concurrency-1-1", "02-concurrency-4-1"]
    assert {one["code"] for one in runs[1]["findings"] if one["state"] == "FIX"} == {"contention"}


@pytest.mark.parametrize(("whole", "state"), [(1028.0, State.OK), (900.0, State.FIX)])
def test_ramp_and_tail_are_a_cause_only_where_they_cost_speed(whole: float, state: State, tmp_path: Path) -> None:
    rates = {"steady_output_tokens_per_second": 1038.0, "output_tokens_per_second": whole}
    run = made(tmp_path, {}, {})
    run = replace(run, result={**run.result, "steady_window_seconds": [10.0, 32.0], "duration_seconds": 60.0, **rates})
    (found,) = [one for one in diagnose(run) if one.code == "short_run"]
    assert found.state is state
    assert (
        f"ramp and tail took 63% of the run; while it was steady it made 1,038 tokens/s instead of {whole:,.0f}"
        in found.message
    )


def test_an_invalid_run_says_why_and_steadiness_is_not_called_right(tmp_path: Path) -> None:
    path = made(tmp_path, {}, {}).path / "result.json"
    varied = [{"code": "VARIATION", "message": "windows vary by 20.6 %; at most 5 % is steady"}]
    result = json.loads(path.read_text()) | {"verdict": "INVALID", "reasons": varied}
    path.write_text(json.dumps(result | {"stability": {"verdict": "UNSTABLE", "reasons": varied}}))
    findings = diagnose(read_run(path.parent))
    assert findings[0].message == "the run is INVALID: windows vary by 20.6 %; at most 5 % is steady"
    assert findings[0].state == State.FIX and findings[0].command
    assert "steadiness" not in {one.code for one in findings}


def test_late_samples_of_an_engine_in_this_process_need_no_client(tmp_path: Path) -> None:
    levels: dict[str, Any] = {"running": 4, "waiting": 0}
    path = made(tmp_path, levels, {}).path / "result.json"
    late = [{"code": "SEND_LAG", "message": "samples were sent late"}]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"verdict": "INVALID", "reasons": late}))
    found = {one.code: one.command for one in diagnose(read_run(path.parent)) if one.state == State.FIX}
    assert found["client"] == "stop other work on this machine, or lower --rate"
    assert "small_batches" not in found


def test_an_interrupted_run_is_called_so_and_an_edited_one_is_refused(tmp_path: Path) -> None:
    run = made(tmp_path, {}, {})
    path = run.path / "result.json"
    result = json.loads(path.read_text())
    path.write_text(json.dumps(result | {"verdict": "INTERRUPTED", "steady_window_seconds": None}))
    code, out, _ = call_here("doctor", run.path)
    assert (code, out.splitlines()[0]) == (0, f"{run.path.name} (INTERRUPTED)")
    assert "--samples" not in out
    path.write_text(json.dumps(result | {"output_tokens_per_second": 2 * result["output_tokens_per_second"]}))
    code, _, err = call_here("doctor", run.path)
    assert code == 2
    assert "result.json contradicts itself" in err
