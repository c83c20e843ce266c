"""Whole runs of the harness: real LoadGen, real run folder, a target whose answers are known."""

import json
import signal
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from loadgen_children import TIMEOUT_SECONDS, call, started, wait_until_running

from cli_support import call as call_command
from cli_support import make_checkpoint, write_lines
from megatoken.runs.run import Run, Verdict, read_run


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.csv"
    path.write_text("input_tokens,output_tokens\n" + "".join(f"{20 + i},{2 + i % 5}\n" for i in range(40)))
    return path


def run(tmp_path: Path, lengths: Path, config: dict[str, Any], **options: Any) -> Run:
    answer = call("scenario", out=str(tmp_path / "runs"), lengths=str(lengths), config=config, **options)
    return read_run(Path(answer["path"]))


def codes(run: Run) -> list[str]:
    return [reason["code"] for reason in run.reasons]


@pytest.mark.timing
def test_a_measured_run_records_every_sample_as_loadgen_saw_it(tmp_path: Path, lengths: Path) -> None:
    finished = run(tmp_path, lengths, {"samples": 100}, per_poll=5, pause_seconds=0.02)
    assert finished.verdict is Verdict.MEASURED
    assert finished.reasons == []
    assert {rule["code"] for rule in finished.rules_unmet} == {
        "MIN_DURATION",
        "MIN_SAMPLES",
        "EQUAL_ISSUE",
        "DATA_SET_SIZE",
    }

    rows = finished.requests.sort_by("sample_id").to_pylist()
    assert [row["sample_id"] for row in rows] == list(range(100))
    assert sorted(row["sample_index"] for row in rows) == sorted(index % 40 for index in range(100))
    for row in rows:
        assert row["input_tokens"] == 20 + row["sample_index"]
        assert row["output_tokens"] == 2 + row["sample_index"] % 5
        assert row["finish_reason"] == "length"
        assert row["scheduled_seconds"] == row["sent_seconds"] == 0
        assert 0 < row["first_token_seconds"] < row["last_token_seconds"]

    result = finished.result
    assert result["samples_completed"] == 100
    assert result["output_tokens"] == sum(row["output_tokens"] for row in rows)
    assert result["loadgen_samples_per_second"] == pytest.approx(result["samples_per_second"], rel=0.2)
    assert result["loadgen_output_tokens_per_second"] == pytest.approx(result["output_tokens_per_second"], rel=0.2)
    assert finished.series.to_pylist()[-1]["output_tokens"] == result["output_tokens"]
    assert finished.config["samples"] == 100
    assert result["memory_plan"]["pages"] == 9  # the target's own
    assert not (finished.path / "mlperf" / "ABANDONED.txt").exists()


@pytest.mark.timing
def test_a_claim_that_is_met_is_valid(tmp_path: Path, lengths: Path) -> None:
    config = {"rules": "v5.1", "min_duration_seconds": 0.3}
    finished = run(tmp_path, lengths, config, rules_seconds=0.3, per_poll=20, pause_seconds=0.0002)
    assert (finished.verdict, finished.reasons, finished.rules_unmet) == (Verdict.VALID, [], [])
    assert finished.result["samples_completed"] >= 24_576  # LoadGen's own minimum for llama2-70b
    assert finished.result["samples_completed"] % 40 == 0
    assert finished.result["duration_seconds"] >= 0.3


def test_a_claim_cut_short_is_invalid_with_every_rule_it_breaks(tmp_path: Path, lengths: Path) -> None:
    finished = run(tmp_path, lengths, {"rules": "v5.1", "samples": 16, "min_duration_seconds": 0.5})
    assert finished.verdict is Verdict.INVALID
    assert codes(finished) == ["MIN_DURATION", "MIN_SAMPLES", "LOADGEN_INVALID", "DATA_SET_SIZE"]
    assert finished.rules_unmet == []
    assert finished.result["samples_completed"] == 16


def test_samples_of_one_token_are_told_to_loadgen_as_they_are(tmp_path: Path) -> None:
    lengths = tmp_path / "ones.csv"
    lengths.write_text("input_tokens,output_tokens\n5,1\n6,4\n")
    finished = run(tmp_path, lengths, {"samples": 10})
    assert finished.verdict is Verdict.MEASURED
    (rule,) = [rule for rule in finished.rules_unmet if rule["code"] == "LOADGEN_ERRORS"]
    assert rule["message"].startswith("LoadGen logged 5 errors")
    assert finished.result["output_tokens"] == 25


def test_a_sample_that_fails_does_not_take_the_others_with_it(tmp_path: Path, lengths: Path) -> None:
    finished = run(tmp_path, lengths, {"samples": 9}, refuse_samples=[0, 4, 8])
    assert finished.verdict is Verdict.INVALID
    assert [(reason["code"], reason["message"]) for reason in finished.reasons] == [
        ("FAILED_SAMPLES", "3 of 9 samples failed")
    ]
    assert finished.result["samples_completed"] == 6
    assert finished.requests.num_rows == 9
    for row in finished.requests.to_pylist():
        assert row["error"] == ("not this one" if row["sample_id"] in (0, 4, 8) else None)


def test_a_target_that_falls_over_leaves_an_interrupted_run_that_says_why(tmp_path: Path, lengths: Path) -> None:
    out = tmp_path / "runs"
    options = {"per_poll": 1, "crash_at_sample": 30, "config": {"samples": 90, "warm_up_seconds": 0.0}}
    answer = call("scenario", out=str(out), lengths=str(lengths), **options)
    folder = next(out.iterdir())
    assert answer == {"error": f"the target fell over; {folder} says INTERRUPTED and keeps what was done"}
    finished = read_run(folder)
    assert finished.verdict is Verdict.INTERRUPTED
    assert "the target fell over" in finished.reasons[0]["message"]
    assert finished.requests.num_rows == 30
    assert_facts_of_the_start_are_there(finished)


@pytest.mark.timing
def test_a_run_whose_answers_end_early_lasts_as_long_as_asked(tmp_path: Path) -> None:
    """Answers of about 8 tokens where 48 are allowed: a run sized by the limit would be over after a sixth."""
    model = make_checkpoint(tmp_path / "model")
    generation = model / "generation_config.json"
    generation.write_text(json.dumps(json.loads(generation.read_text()) | {"eos_token_id": [*range(32)]}))
    rows = [{"prompt_token_ids": [row % 256] * 8, "max_tokens": 48, "temperature": 1.0} for row in range(300)]
    prompts = write_lines(tmp_path / "prompts.jsonl", *rows)
    code, out, err = call_command(
        *("run", "--model", model, "--prompts", prompts, "--min-duration", 2, "--warm-up", 0.5, "--json"),
        *("--precision", "fp32", "--engine.threads", 1, "--out", tmp_path / "runs"),
    )
    assert (code, err) == (0, "")
    result = json.loads(out)
    mean_answer = result["output_tokens"] / result["samples_completed"]
    assert 6 < mean_answer < 11
    # By the estimate it lasts 2.6 s or more, 0.4 s if sized by the limit; neighbours may leave the machine meanwhile.
    assert result["duration_seconds"] > 0.8


def test_accuracy_mode_logs_what_the_target_said(tmp_path: Path, lengths: Path) -> None:
    finished = run(tmp_path, lengths, {"mode": "accuracy"})
    assert finished.verdict is Verdict.MEASURED
    entries = json.loads((finished.path / "mlperf" / "mlperf_log_accuracy.json").read_text())
    assert sorted(entry["qsl_idx"] for entry in entries) == list(range(40))
    for entry in entries:
        count = 2 + entry["qsl_idx"] % 5
        expected = [*range(count - 1), 7]
        assert bytes.fromhex(entry["data"]) == b"".join(token.to_bytes(4, "little") for token in expected)


def assert_facts_of_the_start_are_there(interrupted: Run) -> None:
    result = interrupted.result
    assert datetime.fromisoformat(result["started_at"]) >= datetime.fromisoformat(result["created_at"])
    assert {result[name][-1] for name in ("started_at", "created_at")} == {"Z"}
    assert result["peak_memory_bytes"] > 20e6


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "SIGINT"), (signal.SIGTERM, "SIGTERM")])
@pytest.mark.timing
def test_a_signal_ends_the_run_soon_and_keeps_what_was_done(
    tmp_path: Path, lengths: Path, number: signal.Signals, name: str
) -> None:
    out = tmp_path / "runs"
    config = {"samples": 20_000, "warm_up_seconds": 0.0}
    options = {"config": config, "per_poll": 1, "pause_seconds": 0.01}
    with started("scenario", out=str(out), lengths=str(lengths), **options) as process:
        wait_until_running(process, out)
        time.sleep(1.0)
        process.send_signal(number)
        sent = time.monotonic()
        out_text, err = process.communicate(timeout=TIMEOUT_SECONDS)
        assert time.monotonic() - sent < 20  # 0.2 s when nothing else runs, 200 s for all samples
    assert process.returncode == 0, err
    finished = read_run(Path(json.loads(out_text)["path"]))
    assert finished.verdict is Verdict.INTERRUPTED
    done = finished.requests.num_rows
    assert done > 0
    assert finished.reasons[0]["message"] == f"{name} after {done:,} of 20,000 samples"
    assert not (finished.path / "mlperf" / "mlperf_log_summary.txt").read_text()  # nobody can take it for a result
    assert f" {20_000 - done:,} of the 20,000 samples" in (finished.path / "mlperf" / "ABANDONED.txt").read_text()
    assert_facts_of_the_start_are_there(finished)


@pytest.mark.parametrize(("grace_seconds", "signals"), [(0.5, 1), (1000.0, 2)])
def test_a_target_that_hangs_cannot_hold_the_process(
    tmp_path: Path, lengths: Path, grace_seconds: float, signals: int
) -> None:
    out = tmp_path / "runs"
    config = {"samples": 50, "warm_up_seconds": 0.0}
    options = {"config": config, "per_poll": 1, "hang_at_sample": 20, "grace_seconds": grace_seconds}
    with started("scenario", out=str(out), lengths=str(lengths), **options) as process:
        wait_until_running(process, out)
        while not (running := read_run(next(out.glob("2*")))).requests.num_rows:
            time.sleep(0.05)
        for _ in range(signals):
            process.send_signal(signal.SIGINT)
            time.sleep(0.2)
        _, err = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 130
    assert "stopped at once" in err
    finished = read_run(running.path)
    assert_facts_of_the_start_are_there(finished)
    assert finished.verdict is Verdict.INTERRUPTED
    assert finished.requests.num_rows == 20
