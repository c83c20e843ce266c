"""LoadGen itself, in the process that holds it: every scenario, what it is asked and what it logs."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatoken.errors import MegatokenError, StorageError
from megatoken.harness.loadgen import LoadGenTest, TestSettings
from megatoken.harness.loadgen_wire import (
    Completion,
    FirstToken,
    pack_answers,
    pack_issued,
    unpack_answers,
    unpack_issued,
)
from megatoken.mlperf.detail_log import read_finished_log
from megatoken.mlperf.draws import PoissonSchedule
from megatoken.mlperf.rounds import Seeds

SEEDS = Seeds(1, 2, 18209322760996052031)


def settings(**changes: Any) -> TestSettings:
    given = {
        "scenario": "offline",
        "mode": "performance",
        "model": "llama2-70b",
        "library_rows": 64,
        "samples": 64,
        "min_duration_seconds": 0.0,
        "rate": 1.0,
        "seeds": SEEDS,
    }
    return TestSettings(**given | changes)


class Answered:
    """One test, each sample answered with the same tokens as soon as it is issued."""

    def __init__(self, folder: Path, tokens: list[int], wanted: TestSettings, first_tokens: bool = True) -> None:
        self.rows: list[int] = []
        self.issued_ns: list[int] = []
        before_ns = time.monotonic_ns()
        with LoadGenTest(wanted, folder) as test:
            while not (test.all_issued and not test.outstanding):
                for query in test.take_issued(timeout_seconds=0.1):
                    assert before_ns < query.issued_ns < time.monotonic_ns()
                    for row in query.rows:
                        if first_tokens and wanted.scenario != "offline" and tokens:
                            test.first_token(len(self.rows), tokens[0])
                        test.complete(len(self.rows), len(tokens), tokens)
                        self.rows.append(row)
                        self.issued_ns.append(query.issued_ns)
                test.flush()
            assert test.issued == len(self.rows)
            log = test.finish()
        self.values = {key: entry.value for key, entry in log.first.items()}
        self.errors = [str(entry.value) for entry in log.errors]
        self.error_count = log.error_count


def loadgen_process() -> psutil.Process:
    (process,) = [one for one in psutil.Process().children() if "loadgen_process" in " ".join(one.cmdline())]
    return process


def test_a_performance_run_issues_every_row_once_and_counts_tokens(tmp_path: Path) -> None:
    answered = Answered(tmp_path, [5, 6, 7], settings())
    assert sorted(answered.rows) == list(range(64))
    assert answered.rows != list(range(64))
    assert answered.errors == []
    values = answered.values
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
    assert Counter(Answered(tmp_path, [1, 2], settings(samples=130)).rows) == dict.fromkeys(range(64), 3)


def test_what_is_left_out_comes_from_mlperf_conf(tmp_path: Path) -> None:
    left_out = settings(library_rows=24_576, samples=None, min_duration_seconds=None)
    values = Answered(tmp_path, [1, 2], left_out).values
    assert values["effective_samples_per_query"] == 24_576
    assert values["effective_min_duration_ms"] == 600_000
    assert values["effective_sample_concatenate_permutation"] is True
    assert values["result_validity"] == "INVALID"
    assert (tmp_path / "user.conf").read_text().split("\n")[0] == "*.Offline.target_qps = 1"


@pytest.mark.timing
def test_server_issues_at_the_times_that_its_seed_gives(tmp_path: Path) -> None:
    wanted = settings(scenario="server", library_rows=600, samples=600, rate=300.0)
    answered = Answered(tmp_path, [5, 6], wanted)
    assert sorted(answered.rows) == list(range(600))
    values = answered.values
    assert values["result_validity"] == "VALID"
    assert (values["requested_server_ttft_latency"], values["requested_server_tpot_latency"]) == (2e9, 2e8)
    schedule = PoissonSchedule(SEEDS.schedule, 300.0)
    assert values["result_scheduled_samples_per_sec"] == pytest.approx(schedule.mean_rate(600), rel=0.005)
    lag_ns = np.array(answered.issued_ns) - np.array([schedule.due_ns(query) for query in range(600)])
    lag_ns -= lag_ns.min()
    assert np.median(lag_ns) < 2e6  # other arrivals would be off by many gaps of 3.3 ms
    # LoadGen's own times to first token, from when it says that queries were due, begin where ours do.
    assert values["result_first_token_50.00_percentile_latency_ns"] > np.median(lag_ns)


def test_interactive_has_the_tighter_limits_and_the_users_limits_replace_them(tmp_path: Path) -> None:
    interactive = settings(scenario="interactive", model="llama2-70b-interactive", rate=5000.0, samples=64)
    values = Answered(tmp_path, [5, 6], interactive).values
    assert (values["requested_server_ttft_latency"], values["requested_server_tpot_latency"]) == (450e6, 40e6)
    assert values["effective_scenario"] == "Server"
    given = settings(scenario="server", rate=5000.0, ttft_limit_seconds=0.7, tpot_limit_seconds=0.03)
    values = Answered(tmp_path, [5, 6], given).values
    assert (values["requested_server_ttft_latency"], values["requested_server_tpot_latency"]) == (700e6, 30e6)


def test_few_queries_are_not_valid_and_loadgen_says_no_word_about_it(tmp_path: Path) -> None:
    values = Answered(tmp_path, [5, 6], settings(scenario="server", rate=5000.0)).values
    assert (values["result_validity"], values["early_stopping_met"]) == ("INVALID", False)
    assert values["result_perf_constraints_met"] is True
    assert not values.get("result_invalid_reason")


def test_a_first_token_that_nobody_told_of_is_an_error(tmp_path: Path) -> None:
    answered = Answered(tmp_path, [5, 6], settings(scenario="server", rate=5000.0), first_tokens=False)
    assert answered.error_count == 64


def test_single_stream_issues_one_after_the_other(tmp_path: Path) -> None:
    answered = Answered(tmp_path, [5, 6], settings(scenario="singlestream", library_rows=80, samples=79, rate=10.0))
    assert sorted(answered.rows) == list(range(80))
    assert answered.values["result_validity"] == "VALID"
    assert answered.errors == []
    gaps = np.diff(answered.issued_ns)
    assert gaps.min() > 0
    assert answered.values["result_90.00_percentile_latency_ns"] <= gaps.max()


@pytest.mark.parametrize("scenario", ["offline", "server", "singlestream"])
def test_accuracy_mode_keeps_the_tokens_as_little_endian_int32(tmp_path: Path, scenario: str) -> None:
    tokens = [1, 2**31 - 1, 256]
    accuracy = settings(scenario=scenario, mode="accuracy", samples=3, rate=2000.0)
    answered = Answered(tmp_path, tokens, accuracy)
    assert sorted(answered.rows) == list(range(64))
    assert answered.errors == []
    entries = json.loads((tmp_path / "mlperf_log_accuracy.json").read_text())
    assert sorted(entry["qsl_idx"] for entry in entries) == list(range(64))
    for entry in entries:
        assert entry["token_count"] == 3
        assert bytes.fromhex(entry["data"]) == b"".join(token.to_bytes(4, "little") for token in tokens)
        if scenario == "server":
            assert bytes.fromhex(entry["token_data"]) == tokens[0].to_bytes(4, "little")


@pytest.mark.parametrize("tokens", [[], [9]])
def test_fewer_than_two_tokens_are_an_error_in_the_log_for_each_sample(tmp_path: Path, tokens: list[int]) -> None:
    answered = Answered(tmp_path, tokens, settings())
    assert answered.error_count == 64
    assert answered.values["num_errors"] == 64


@pytest.mark.parametrize(("scenario", "issued"), [("offline", 172 * 64), ("server", None)])
def test_a_test_that_is_left_ends_at_once_and_its_logs_cannot_pass_for_a_result(
    tmp_path: Path, scenario: str, issued: int | None
) -> None:
    began = time.monotonic()
    with LoadGenTest(settings(scenario=scenario, min_duration_seconds=500.0, rate=20.0), tmp_path) as test:
        while test.issued < 5:
            test.take_issued(timeout_seconds=0.1)
        for sample in range(5):
            test.first_token(sample, 1)
            test.complete(sample, 2)
        test.flush()
        process = loadgen_process()
    assert time.monotonic() - began < 60  # LoadGen would go on for 500 s
    assert not process.is_running()
    assert issued in (None, test.issued)
    words = (tmp_path / "ABANDONED.txt").read_text()
    assert words.startswith(f"The run was interrupted when {test.issued - 5:,} of the {test.issued:,} samples issued")
    assert "Result is" not in (tmp_path / "mlperf_log_summary.txt").read_text()


def test_many_tests_follow_each_other_in_one_process(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / str(number)).mkdir()
        answered = Answered(tmp_path / str(number), [1, 2], settings(scenario="server", rate=5000.0))
        assert answered.errors == []  # a second configuration in LoadGen's process would be one


def take_for_ever(test: LoadGenTest) -> None:
    while True:
        test.take_issued(timeout_seconds=0.1)


def test_a_process_that_dies_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    with LoadGenTest(settings(scenario="server", rate=20.0), tmp_path) as test:
        test.take_issued(timeout_seconds=5)
        loadgen_process().kill()
        with pytest.raises(MegatokenError, match="LoadGen's process ended with code -9: no message"):
            take_for_ever(test)


def test_a_folder_that_is_not_there_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    before = psutil.Process().children()
    test = LoadGenTest(settings(), tmp_path / "no directory")
    with pytest.raises(StorageError, match=r"user\.conf"):
        test.__enter__()
    assert set(psutil.Process().children()) <= set(before)


def test_a_configuration_that_loadgen_refuses_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TestSettings, "user_conf", lambda self: "*.Offline.target_qps = a lot of them = 5\n")
    with (
        LoadGenTest(settings(), tmp_path) as test,
        pytest.raises(MegatokenError, match=r"refuses .*user\.conf \(code -"),
    ):
        take_for_ever(test)


def test_an_audit_file_in_the_working_directory_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "audit.config").write_text("*.*.min_query_count = 5\n*.*.performance_sample_count_override = 5\n")
    (tmp_path / "json.py").write_text("raise RuntimeError('not that json')\n")
    (tmp_path / "logs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert len(Answered(tmp_path / "logs", [1, 2], settings()).rows) == 64


def test_a_log_that_the_disk_cut_off_is_no_log(tmp_path: Path) -> None:
    Answered(tmp_path, [1, 2], settings())
    path = tmp_path / "mlperf_log_detail.txt"
    whole = path.read_bytes()
    assert read_finished_log(tmp_path, "num_errors").get("num_errors") == 0
    for size in (0, 100, len(whole) // 2, len(whole) - 200):
        path.write_bytes(whole[:size])
        with pytest.raises(StorageError, match="LoadGen"):
            read_finished_log(tmp_path, "num_errors")
    path.write_bytes(whole)
    (tmp_path / "mlperf_log_accuracy.json").write_text("[\n")
    with pytest.raises(StorageError, match="has no end"):
        read_finished_log(tmp_path, "num_errors")
    path.unlink()
    with pytest.raises(StorageError, match=r"mlperf_log_detail\.txt"):
        read_finished_log(tmp_path, "num_errors")


numbers = st.integers(0, 2**40)
token_ids = st.integers(0, 2**31 - 1)


@given(
    st.lists(st.builds(FirstToken, numbers, token_ids), max_size=9),
    st.lists(st.builds(Completion, numbers, numbers, st.lists(token_ids, max_size=9)), max_size=9),
)
def test_answers_survive_the_way(first: list[FirstToken], completions: list[Completion]) -> None:
    firsts, heads, ids = unpack_answers(pack_answers(first, completions))
    assert firsts.tolist() == [list(one) for one in first]
    assert heads.tolist() == [[one.sample, one.output_tokens, len(one.token_ids)] for one in completions]
    assert ids.tolist() == [token for one in completions for token in one.token_ids]


@given(numbers, st.lists(numbers, max_size=9))
def test_issued_samples_survive_the_way(issued_ns: int, rows: list[int]) -> None:
    issued = unpack_issued(pack_issued(issued_ns, rows))
    assert (issued.issued_ns, issued.rows) == (issued_ns, rows)


def test_no_process_outlives_a_killed_parent(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from megatoken.harness.loadgen import LoadGenTest, Seeds, TestSettings\n"
        "wanted = TestSettings('server', 'performance', 'llama2-70b', 64, 64, 500.0, 20.0, Seeds(1, 2, 3))\n"
        "test = LoadGenTest(wanted, Path(sys.argv[1])).__enter__(); test.take_issued(30); print('up', flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    parent = psutil.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, env=environment)
    assert parent.stdout.readline() == b"up\n"
    (child,) = parent.children()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _, alive = psutil.wait_procs([child], timeout=30)
    assert not alive
