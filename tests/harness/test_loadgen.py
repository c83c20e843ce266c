"""LoadGen itself, through the binding. Every test asks for its own process."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from loadgen_children import SEEDS, call

from megatoken.errors import StorageError
from megatoken.harness.loadgen import LoadGenLog


def settings(**changes: Any) -> dict[str, Any]:
    return {
        "mode": "performance",
        "library_rows": 64,
        "samples": 64,
        "min_duration_seconds": 0.0,
        "target_samples_per_second": 1.0,
        **changes,
    }


def test_a_performance_run_issues_every_row_once_and_counts_tokens(tmp_path: Path) -> None:
    answer = call("loadgen", directory=str(tmp_path), tokens=[5, 6, 7], settings=settings())
    assert sorted(answer["rows"]) == list(range(64))
    assert answer["rows"] != list(range(64))
    assert answer["errors"] == []
    assert answer["outstanding"] == 0
    values = answer["values"]
    assert values["result_validity"] == "VALID"
    assert values["requested_use_token_latencies"] is True
    assert values["effective_qsl_rng_seed"] == SEEDS.qsl
    assert values["effective_sample_index_rng_seed"] == SEEDS.sample_index
    assert values["effective_schedule_rng_seed"] == SEEDS.schedule
    assert values["result_tokens_per_second"] == pytest.approx(3 * values["result_samples_per_second"], rel=1e-4)
    assert {path.name for path in tmp_path.iterdir()} == {
        "user.conf",
        "mlperf_log_accuracy.json",
        "mlperf_log_detail.txt",
        "mlperf_log_summary.txt",
        "mlperf_log_trace.json",
    }
    assert (tmp_path / "mlperf_log_trace.json").read_text() == ""


def test_whole_passes_issue_every_row_equally_often(tmp_path: Path) -> None:
    answer = call("loadgen", directory=str(tmp_path), tokens=[1, 2], settings=settings(samples=130))
    assert Counter(answer["rows"]) == dict.fromkeys(range(64), 3)


def test_what_is_left_out_comes_from_mlperf_conf(tmp_path: Path) -> None:
    left_out = settings(library_rows=24_576, samples=None, min_duration_seconds=None)
    values = call("loadgen", directory=str(tmp_path), tokens=[1, 2], settings=left_out)["values"]
    assert values["effective_samples_per_query"] == 24_576
    assert values["effective_min_duration_ms"] == 600_000
    assert values["effective_sample_concatenate_permutation"] is True
    assert values["result_validity"] == "INVALID"
    assert (tmp_path / "user.conf").read_text().split("\n")[0] == "*.Offline.target_qps = 1"


def test_accuracy_mode_keeps_the_tokens_as_little_endian_int32(tmp_path: Path) -> None:
    tokens = [1, 2**31 - 1, 256]
    accuracy = settings(mode="accuracy", samples=3)
    answer = call("loadgen", directory=str(tmp_path), tokens=tokens, settings=accuracy)
    assert sorted(answer["rows"]) == list(range(64))
    assert answer["errors"] == []
    entries = json.loads((tmp_path / "mlperf_log_accuracy.json").read_text())
    assert sorted(entry["qsl_idx"] for entry in entries) == list(range(64))
    for entry in entries:
        assert entry["token_count"] == 3
        assert bytes.fromhex(entry["data"]) == b"".join(token.to_bytes(4, "little") for token in tokens)


@pytest.mark.parametrize("tokens", [[], [9]])
def test_fewer_than_two_tokens_are_an_error_in_the_log_for_each_sample(tmp_path: Path, tokens: list[int]) -> None:
    answer = call("loadgen", directory=str(tmp_path), tokens=tokens, settings=settings())
    assert len(answer["errors"]) == 64
    assert answer["values"]["num_errors"] == 64


def test_an_abandoned_test_ends_and_its_log_cannot_pass_for_a_result(tmp_path: Path) -> None:
    answer = call("loadgen", directory=str(tmp_path), tokens=[1, 2], settings=settings(), abandon_after=5)
    assert answer["outstanding"] == 0
    assert answer["values"]["num_errors"] == 1
    marker, summary = tmp_path / "ABANDONED.txt", tmp_path / "mlperf_log_summary.txt"
    assert "Result is : VALID" in summary.read_text()
    assert marker.read_text().startswith("The run was interrupted and 59 of its 64 samples got empty answers, so")
    assert marker.stat().st_mtime_ns < summary.stat().st_mtime_ns


def test_an_audit_file_in_the_working_directory_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "audit.config").write_text("*.*.min_query_count = 5\n*.*.performance_sample_count_override = 5\n")
    (tmp_path / "logs").mkdir()
    monkeypatch.chdir(tmp_path)
    answer = call("loadgen", directory=str(tmp_path / "logs"), tokens=[1, 2], settings=settings())
    assert len(answer["rows"]) == 64


def test_a_log_that_the_disk_cut_off_is_no_log(tmp_path: Path) -> None:
    call("loadgen", directory=str(tmp_path), tokens=[1, 2], settings=settings())
    path = tmp_path / "mlperf_log_detail.txt"
    whole = path.read_bytes()
    assert LoadGenLog.read(tmp_path, last_key="num_errors").values["num_errors"] == 0
    for size in (0, 100, len(whole) // 2, len(whole) - 200):
        path.write_bytes(whole[:size])
        with pytest.raises(StorageError, match="LoadGen"):
            LoadGenLog.read(tmp_path, last_key="num_errors")
    path.write_bytes(whole)
    (tmp_path / "mlperf_log_accuracy.json").write_text("[\n")
    with pytest.raises(StorageError, match="has no end"):
        LoadGenLog.read(tmp_path, last_key="num_errors")
    path.unlink()
    with pytest.raises(StorageError, match=r"mlperf_log_detail\.txt"):
        LoadGenLog.read(tmp_path, last_key="num_errors")
