"""Server, Interactive and SingleStream: real LoadGen, real run folders, a queue in real time or the engine."""

import json
import os
import re
import signal
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from loadgen_children import TIMEOUT_SECONDS, started, wait_until_running
from queueing import QueueingTarget, Simulated, queue_of

from cli_support import call_here, make_checkpoint
from examples import every
from megatoken.analysis.repeats import interval, read_repeats
from megatoken.audit import Severity, audit
from megatoken.config import RunConfig, load_run_config
from megatoken.datasets.lengths import load_lengths
from megatoken.datasets.requests import Dataset
from megatoken.harness.clock import WallClockSteps
from megatoken.harness.progress import Progress
from megatoken.harness.result import CORE_WAIT_SHARE
from megatoken.harness.run import run_scenario
from megatoken.mlperf.benchmarks import LatencyLimits
from megatoken.mlperf.draws import PoissonSchedule
from megatoken.mlperf.rounds import round_seeds
from megatoken.planning.run_price import judge_run, request_price
from megatoken.report.blocks import Headline
from megatoken.report.metrics import metric_rows
from megatoken.report.views.run import run_view
from megatoken.runs.plan_hash import changed_parts
from megatoken.runs.run import Run, Verdict, read_run
from megatoken.runs.writer import RunFolder
from megatoken.targets import SampleEvent
from megatoken.text import number
from short_rounds import shorten_rounds
from stated_fields import unstated_fields

SEED = round_seeds()["v5.1"].schedule


@pytest.fixture
def data_set(tmp_path: Path) -> Dataset:
    path = tmp_path / "lengths.csv"
    path.write_text("input_tokens,output_tokens\n" + "".join(f"{20 + i},2\n" for i in range(40)))
    return load_lengths(path, vocabulary_size=100, max_length=1000)


def run(
    tmp_path: Path, data_set: Dataset, servers: int, service_seconds: float, *, quiet: bool = True, **config: Any
) -> Run:
    target = QueueingTarget(servers, service_seconds)
    settings = RunConfig(**{"out": str(tmp_path / "runs"), "warm_up_seconds": 0.05, **config})
    return read_run(run_scenario(settings, data_set, target, {"model": "queue"}, Progress(quiet)))


def codes(run: Run) -> set[str]:
    return {rule["code"] for rule in (*run.reasons, *run.rules_unmet, *run.doubts)}


@pytest.mark.timing
def test_server_latencies_count_from_when_samples_were_due(tmp_path: Path, data_set: Dataset) -> None:
    finished = run(tmp_path, data_set, 50, 0.02, scenario="server", rate=300.0, samples=600)
    assert finished.verdict is Verdict.MEASURED
    assert {rule["code"] for rule in finished.rules_unmet} == {"MIN_DURATION", "DATA_SET_SIZE"}
    rows = finished.requests.sort_by("sample_id").to_pylist()
    schedule = PoissonSchedule(SEED, 300.0)
    assert [row["scheduled_seconds"] for row in rows] == pytest.approx(
        [schedule.due_ns(sample) / 1e9 for sample in range(600)], abs=2e-3
    )
    for row in rows:
        assert -1e-3 < row["scheduled_seconds"] <= row["sent_seconds"] + 2e-3
        assert row["sent_seconds"] < row["submitted_seconds"] <= row["started_seconds"]
        assert row["first_token_seconds"] - row["started_seconds"] >= 0.01
        assert row["last_token_seconds"] - row["started_seconds"] >= 0.02
    result = finished.result
    assert result["loadgen_validity"] == "VALID"
    assert result["latency_verdict"]["met"] is result["latency_verdict"]["loadgen_met"] is True
    assert 0.01 <= result["ttft_seconds"]["p50"] < 0.03
    apart = 0.02 if (result["core_wait_share"] or 0.0) <= 0.05 else 0.1  # both wait for a core on a busy machine
    assert result["loadgen_ttft_p99_seconds"] == pytest.approx(result["latency_verdict"]["ttft_p99_seconds"], abs=apart)
    assert result["loadgen_samples_per_second"] == pytest.approx(300, rel=0.1)
    assert result["loadgen_scheduled_samples_per_second"] == pytest.approx(schedule.mean_rate(600), rel=0.01)
    assert result["client_capacity"]["samples_per_second"] > 300
    assert 0 <= result["send_lag_seconds"]["p50"] < 0.01
    assert result["send_lag_limit_seconds"] == 0.1
    assert abs(result["wall_clock_step_seconds"]) < 0.01
    stages = result["stages"]
    assert 0.01 <= stages["prefill"]["p50_seconds"] < 0.02
    assert stages["decode"]["p50_seconds"] == pytest.approx(0.01, abs=5e-3)
    assert stages["tokenise"] is stages["detokenise"] is None
    assert result["seeds"]["schedule"] == SEED
    loop = result["loop_seconds"]
    assert sum(seconds or 0 for seconds in loop.values()) == pytest.approx(result["duration_seconds"], rel=0.2)


class Lingering(QueueingTarget):
    """Keeps the end of one early sample back."""

    kept: SampleEvent | None = None

    def poll(self, timeout_seconds: float) -> list[SampleEvent]:
        events = super().poll(timeout_seconds)
        for event in events:
            if event.sample_id == 5 and event.finish_reason:
                self.kept = event
        now_ns = time.monotonic_ns()
        if self.kept is not None and now_ns > self.kept.time_ns + 3_000_000_000:
            events.append(self.kept._replace(time_ns=now_ns))
            self.kept = None
        return [event for event in events if event is not self.kept]


@pytest.mark.timing
def test_the_whole_run_leads_and_loadgens_rate_where_rules_are_claimed(tmp_path: Path, data_set: Dataset) -> None:
    config = RunConfig(out=tmp_path / "runs", warm_up_seconds=0.05, scenario="server", rate=300.0, samples=500)
    target = Lingering(50, 0.02)
    finished = read_run(run_scenario(config, data_set, target, {"model": "queue"}, Progress(quiet=True)))
    result = finished.result
    assert result["duration_seconds"] > 3.0
    assert result["rated_seconds"] < 2.5
    assert result["output_tokens_per_second"] == pytest.approx(result["loadgen_output_tokens_per_second"], rel=0.03)
    assert result["samples_per_second"] == pytest.approx(result["loadgen_samples_per_second"], rel=0.03)
    assert result["whole_run_output_tokens_per_second"] < 0.8 * result["output_tokens_per_second"]
    by_loadgen = ("Output rate", number(result["output_tokens_per_second"]))
    whole = number(result["whole_run_output_tokens_per_second"])
    rows = [(row.label, row.value) for row in metric_rows(finished)]
    assert rows[:2] == [("Output rate with drain", whole), ("Output rate by LoadGen", by_loadgen[1])]
    assert ("Sample rate", number(500 / result["duration_seconds"])) in rows
    headline = run_view(finished).summary[0]
    assert isinstance(headline, Headline)
    assert headline.value == whole and "drain included" in headline.quiet
    asked = {"limits": {"output_tokens_per_second": 0.9 * result["output_tokens_per_second"]}, "dollars_per_hour": 36}
    assert [one.answer for one in judge_run(finished, asked)] == ["NOT MET"]
    price = request_price(finished, 36.0)
    assert price is not None
    assert price.dollars == pytest.approx(0.01 * result["duration_seconds"] / 500)
    claimed = replace(finished, result=result | {"rules": "v5.1"})
    rows = [(row.label, row.value) for row in metric_rows(claimed)]
    assert rows[:2] == [by_loadgen, ("Output rate with drain", whole)]
    assert [one.answer for one in judge_run(claimed, asked)] == ["MET"]


@pytest.mark.parametrize("scenario", ["server", "interactive", "singlestream", "offline"])
def test_one_sample_is_a_run_that_shows_little(tmp_path: Path, data_set: Dataset, scenario: str) -> None:
    """LoadGen divides 0 by 0 and logs -nan."""
    rate = {"rate": 5.0} if scenario in ("server", "interactive") else {}
    finished = run(tmp_path, data_set, 2, 0.02, scenario=scenario, samples=1, **rate)
    assert finished.verdict is Verdict.MEASURED
    assert len(finished.requests) == 1
    assert finished.result["output_tokens_per_second"] > 0
    log = (finished.path / "mlperf" / "mlperf_log_detail.txt").read_text()
    assert finished.result["loadgen_scheduled_samples_per_second"] is None
    assert ("nan" in log) is bool(rate)
    assert ("EARLY_STOPPING" in codes(finished)) is (scenario != "offline")
    assert finished.result["loadgen_validity"] == ("VALID" if scenario == "offline" else "INVALID")
    findings = {found.id: found.severity for found in audit(finished.path).findings}
    assert findings["run_folder.verdict"] is Severity.PASS


@pytest.mark.timing
def test_a_rate_beyond_the_capacity_is_over_its_limits(tmp_path: Path, data_set: Dataset) -> None:
    config = {"scenario": "interactive", "rate": 300.0, "samples": 900, "benchmark": "llama3.1-8b"}
    finished = run(tmp_path, data_set, 4, 0.02, **config)  # serves 200 samples/s
    assert {"TTFT_LIMIT", "EARLY_STOPPING", "LOADGEN_INVALID"} <= codes(finished)
    (rule,) = [rule for rule in finished.rules_unmet if rule["code"] == "TTFT_LIMIT"]
    assert rule["required"] == 0.5 < rule["found"]
    result = finished.result
    assert result["latency_verdict"]["met"] is result["latency_verdict"]["loadgen_met"] is False
    assert result["stages"]["queue"]["share"] > 0.5
    assert result["loadgen_samples_per_second"] == pytest.approx(200, rel=0.1)


@pytest.mark.timing
def test_the_users_limits_are_loadgens_and_the_rules_name_the_benchmarks(tmp_path: Path, data_set: Dataset) -> None:
    limits = {"ttft_limit_seconds": 3.0, "tpot_limit_seconds": 0.005}
    finished = run(tmp_path, data_set, 50, 0.02, scenario="server", rate=300.0, samples=500, **limits)
    assert codes(finished) >= {"LATENCY_LIMITS", "LOADGEN_INVALID", "EARLY_STOPPING"}  # TPOT is 10 ms
    (rule,) = [rule for rule in finished.rules_unmet if rule["code"] == "LATENCY_LIMITS"]
    assert (rule["found"], rule["required"]) == (3.0, 2.0)
    assert finished.result["tpot_limit_seconds"] == 0.005


@pytest.mark.timing
def test_a_duration_is_filled_and_few_queries_show_no_percentile(tmp_path: Path, data_set: Dataset) -> None:
    finished = run(tmp_path, data_set, 50, 0.02, scenario="server", rate=100.0, min_duration_seconds=1.5)
    assert finished.requests["scheduled_seconds"].to_numpy().max() >= 1.5
    asked = {key: finished.config[key] for key in ("rate", "samples", "min_duration_seconds")}
    assert asked == {"rate": 100.0, "samples": len(finished.requests), "min_duration_seconds": 1.5}
    assert 100 < len(finished.requests) < 220
    assert codes(finished) >= {"EARLY_STOPPING", "LOADGEN_INVALID"}
    (rule,) = [rule for rule in finished.rules_unmet if rule["code"] == "EARLY_STOPPING"]
    assert rule["message"] == f"{len(finished.requests)} queries; a p99 needs 459"
    (rule,) = [rule for rule in finished.rules_unmet if rule["code"] == "LOADGEN_INVALID"]
    summary = (finished.path / "mlperf" / "mlperf_log_summary.txt").read_text()
    (needed,) = re.findall(r"\* (Would need to run at least \d+ more queries)", summary)
    assert rule["message"].startswith("LoadGen result: INVALID (Early stopping satisfied: NO; TPOT Early")
    assert needed in rule["message"]


@pytest.mark.timing
def test_a_claim_that_is_met_is_valid(tmp_path: Path, data_set: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_rounds(monkeypatch, 40, 2.0)
    config = {"scenario": "server", "rate": 300.0, "rules": "v5.1", "min_duration_seconds": 2.0}
    for attempt in ("first", "second", "third"):  # a neighbour on the machine may break a limit of latency
        (folder := tmp_path / attempt).mkdir()
        finished = run(folder, data_set, 50, 0.02, **config)
        if finished.verdict is Verdict.VALID:
            break
    assert (finished.verdict, finished.reasons, finished.rules_unmet) == (Verdict.VALID, [], [])
    assert len(finished.requests) % 40 == 0
    finished = run(tmp_path, data_set, 2, 0.02, **config)
    assert finished.verdict is Verdict.INVALID
    assert {"TTFT_LIMIT", "EARLY_STOPPING", "LOADGEN_INVALID"} <= codes(finished)


@pytest.mark.timing
def test_single_stream_has_one_sample_at_a_time(tmp_path: Path, data_set: Dataset) -> None:
    finished = run(tmp_path, data_set, 50, 0.01, scenario="singlestream", samples=80)
    rows = finished.requests.sort_by("sample_id").to_pylist()
    assert len(rows) == 80
    for before, after in pairwise(rows):
        assert after["scheduled_seconds"] >= before["last_token_seconds"]
        assert after["scheduled_seconds"] == after["sent_seconds"]
    result = finished.result
    assert result["loadgen_validity"] == "VALID"
    assert result["loadgen_latency_p90_seconds"] == pytest.approx(result["latency_seconds"]["p90"], abs=5e-3)
    assert result["client_capacity"] is None
    assert "SCENARIO" in codes(finished)  # of llama2-70b, the yardstick of a model that is named after no benchmark
    lasting = run(tmp_path, data_set, 50, 0.01, scenario="singlestream", min_duration_seconds=1.0)
    assert lasting.result["loadgen_validity"] == "VALID"
    assert 1.0 <= lasting.result["duration_seconds"] < 5.0


@pytest.mark.parametrize("scenario", ["server", "singlestream"])
def test_accuracy_mode_answers_every_row_once(tmp_path: Path, data_set: Dataset, scenario: str) -> None:
    rate = {"rate": 200.0} if scenario == "server" else {}
    finished = run(tmp_path, data_set, 50, 0.01, scenario=scenario, mode="accuracy", **rate)
    assert sorted(finished.requests["sample_index"].to_pylist()) == list(range(40))
    entries = json.loads((finished.path / "mlperf" / "mlperf_log_accuracy.json").read_text())
    assert {entry["data"] for entry in entries} == {"0100000002000000"}
    assert codes(finished) == {"DATA_SET_SIZE", *(["SCENARIO"] if scenario == "singlestream" else [])}


@pytest.mark.timing
def test_a_sender_that_is_late_is_seen_and_speaks_against_the_run(tmp_path: Path) -> None:
    lengths, out = tmp_path / "lengths.csv", tmp_path / "runs"
    lengths.write_text("input_tokens,output_tokens\n5,2\n")
    config = {"scenario": "server", "rate": 100.0, "samples": 500}
    with started("scenario", out=str(out), lengths=str(lengths), config=config, queueing=[50, 0.02]) as process:
        wait_until_running(process, out)
        time.sleep(1.0)
        (loadgen,) = psutil.Process(process.pid).children()
        loadgen.suspend()
        time.sleep(1.0)
        loadgen.resume()
        text, err = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 0, err
    finished = read_run(Path(json.loads(text)["path"]))
    assert "SEND_LAG" in {doubt["code"] for doubt in finished.doubts}
    assert finished.result["send_lag_seconds"]["p99"] > 0.5
    lag = finished.requests["sent_seconds"].to_numpy() - finished.requests["scheduled_seconds"].to_numpy()
    assert np.median(lag) < 0.1
    assert finished.result["ttft_seconds"]["p99"] > 0.5  # nothing of it is hidden


@pytest.mark.parametrize("more", [{}, {"find_rate": True, "min_duration_seconds": 12.0}, {"repeat": 2}])
def test_a_signal_while_the_folder_is_being_made_ends_the_run_like_any_other(
    tmp_path: Path, data_set: Dataset, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    create = RunFolder.create.__func__  # type: ignore[attr-defined]

    def interrupted(*arguments: Any, **named: Any) -> RunFolder:
        folder: RunFolder = create(RunFolder, *arguments, **named)
        monkeypatch.undo()
        os.kill(os.getpid(), signal.SIGINT)
        return folder

    monkeypatch.setattr(RunFolder, "create", interrupted)
    config = RunConfig(out=tmp_path / "runs", warm_up_seconds=0.05, scenario="server", rate=60.0, **more)
    path = run_scenario(config, data_set, QueueingTarget(50, 0.02), {"model": "queue"}, Progress(quiet=True))
    folder = path / "001" if "repeat" in more else path
    assert read_run(folder).verdict is Verdict.INTERRUPTED
    assert read_run(folder).reasons[0]["message"].startswith("SIGINT after ")
    assert "repeat" not in more or [one.name for one in path.iterdir() if one.is_dir()] == ["001"]


@pytest.mark.parametrize(
    ("search", "number"),
    [
        *((False, signal.SIGINT), (True, signal.SIGTERM), (False, signal.SIGKILL), (True, signal.SIGKILL)),
        *every((False, signal.SIGTERM), (True, signal.SIGINT)),
    ],
)
@pytest.mark.timing
def test_a_signal_ends_a_long_run_at_once_and_leaves_nothing_running(
    tmp_path: Path, search: bool, number: signal.Signals
) -> None:
    lengths, out = tmp_path / "lengths.csv", tmp_path / "runs"
    lengths.write_text("input_tokens,output_tokens\n5,2\n")
    config = {"scenario": "server", "rate": 50.0, "min_duration_seconds": 600, "find_rate": search}
    if search:
        config["probe_seconds"] = 20.0
    with started("scenario", out=str(out), lengths=str(lengths), config=config, queueing=[50, 0.02]) as process:
        measured = "2*/probes/01*" if search else "2*"
        wait_until_running(process, out, f"{measured}/mlperf")
        while len(read_run(next(out.glob(measured))).requests) <= 20:
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        children = psutil.Process(process.pid).children()
        process.send_signal(number)
        sent = time.monotonic()
        process.communicate(timeout=TIMEOUT_SECONDS)
        assert time.monotonic() - sent < 20
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    finished = read_run(next(out.glob("2*")))
    assert finished.verdict is Verdict.INTERRUPTED
    inner = read_run(next(finished.path.glob("probes/01*"))) if search else finished
    assert inner.verdict is Verdict.INTERRUPTED
    assert len(inner.requests) > 20
    assert load_run_config(inner.path / "config.yaml", {}).find_rate is False  # a run that can be repeated
    if number != signal.SIGKILL:
        assert finished.reasons[0]["message"].startswith(number.name)
        assert (inner.path / "mlperf" / "ABANDONED.txt").exists()


@pytest.mark.timing
def test_repeats_say_what_they_have_in_common(tmp_path: Path, data_set: Dataset) -> None:
    target = QueueingTarget(50, 0.02)
    config = RunConfig(
        out=tmp_path / "runs", warm_up_seconds=0.05, scenario="server", rate=300.0, samples=460, repeat=3
    )
    parent = run_scenario(config, data_set, target, {"model": "queue"}, Progress(quiet=True))
    repeats = read_repeats(parent)
    assert repeats is not None
    assert repeats["runs"] == ["001", "002", "003"]
    runs = [read_run(parent / name) for name in repeats["runs"]]
    assert repeats["verdicts"] == ["MEASURED"] * 3
    rates = [one.result["output_tokens_per_second"] for one in runs]
    found = repeats["metrics"]["output_tokens_per_second"]
    assert found["values"] == rates
    logs = np.log(rates)
    margin = 4.302652729911275 * np.std(logs, ddof=1) / np.sqrt(3)  # t(0.975; 2), from tables
    ends = np.exp([logs.mean() - margin, logs.mean() + margin])
    assert (found["low"], found["high"]) == pytest.approx(tuple(ends), rel=1e-6)
    first, second = (one.requests.sort_by("sample_id")["sample_index"].to_pylist() for one in runs[:2])
    assert first == second  # the seeds are the same
    assert "same seeds" in repeats["seeds_note"]
    assert interval([2.0])["low"] is None


@pytest.mark.timing
def test_the_search_finds_the_rate_of_a_real_queue(
    tmp_path: Path, data_set: Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    """30 servers of 0.2 s, whose highest valid rate is known from a simulation of the same arrivals."""
    config = {"scenario": "server", "find_rate": True, "rate": 120.0, "min_duration_seconds": 6.0}
    same = Simulated(queue_of(30, 0.2), LatencyLimits(0.4, 0.2), SEED, full_seconds=6.0)
    best = same.highest_valid_rate(100.0, 200.0)
    finished = run(tmp_path, data_set, 30, 0.2, ttft_limit_seconds=0.4, quiet=False, **config)
    said = capsys.readouterr().err
    [estimate] = re.findall(r"the search is likely to take .*: probes of about \d+ s, then runs of 6 s", said)
    assert said.index(estimate) < said.index("probe at 120 samples/s")
    search = finished.result["rate_search"]
    assert search["samples_per_second"] is not None, search
    assert finished.result["loadgen_validity"] == "VALID"
    assert finished.result["offered_samples_per_second"] == pytest.approx(search["samples_per_second"], rel=1e-4)
    # Neighbours on the machine make a queue slower, never faster; how near the search comes to the best rate is tested
    # in simulated time, in test_rate_finder.py.
    assert search["samples_per_second"] <= 1.02 * best
    for probe in search["probes"]:
        kept = read_run(finished.path / probe["run_folder"])
        assert kept.result["offered_samples_per_second"] == pytest.approx(probe["samples_per_second"], rel=0.15)
    too_high = [probe["samples_per_second"] for probe in search["probes"] if probe["valid"] is False]
    assert min(too_high) <= 1.021 * search["samples_per_second"]
    assert finished.path.parent == tmp_path / "runs"
    assert finished.config["find_rate"] is True and changed_parts(finished) == []
    folders = [finished, *(read_run(finished.path / probe["run_folder"]) for probe in search["probes"])]
    assert all(one.result["core_wait_share"] is not None for one in folders)
    noted = ["CORE_WAIT" in {note["code"] for note in one.result["notes"]} for one in folders]
    assert noted == [one.result["core_wait_share"] > CORE_WAIT_SHARE for one in folders]
    assert unstated_fields(finished.result) == set()


def test_too_short_a_length_for_a_search_is_refused(tmp_path: Path, data_set: Dataset) -> None:
    with pytest.raises(Exception, match=r"only 459 or more show a p99; give --min-duration \d+"):
        run(tmp_path, data_set, 5, 0.2, scenario="server", find_rate=True, rate=20.0, min_duration_seconds=5.0)
    assert not (tmp_path / "runs").exists()


@pytest.mark.timing
def test_a_wall_clock_that_is_set_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = WallClockSteps()
    steps.look()
    assert abs(steps.largest_seconds) < 0.005
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() - 3_000_000_000)
    steps.look()
    monkeypatch.setattr(time, "time_ns", real)
    steps.look()
    assert steps.largest_seconds == pytest.approx(-3.0, abs=0.01)


@pytest.mark.parametrize("scenario", ["server", *every("interactive"), "singlestream", "offline"])
def test_the_engine_serves_every_scenario_with_text_at_both_ends(tmp_path: Path, scenario: str) -> None:
    model = make_checkpoint(tmp_path / "model")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": "a" * (3 + i % 9), "max_tokens": 8}) + "\n" for i in range(30)))
    rate = ("--rate", 40) if scenario in ("server", "interactive") else ()
    code, out, err = call_here(
        *("run", "--model", model, "--prompts", prompts, "--samples", 30, "--warm-up", 0.2, "--json", "--text"),
        *("--scenario", scenario, *rate, "--engine.threads", 1, "--out", tmp_path / "runs"),
    )
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert result["samples_completed"] == 30
    assert result["output_characters"] > 30
    stages = result["stages"]
    assert all(stages[name]["mean_seconds"] > 0 for name in stages)
    assert sum(stages[name]["share"] for name in stages) == pytest.approx(1)
    assert result["loop_seconds"]["tokenise"] > 0


def test_a_limit_in_milliseconds_by_mistake_is_pointed_at(tmp_path: Path) -> None:
    slo = tmp_path / "slo.yaml"
    slo.write_text("tpot_seconds: {p99: 70}\n")
    flags = ("--ttft-limit", 500, "--slo", slo, "--dry-run", "--out", tmp_path / "runs")
    code, out, _ = call_here("run", "--scenario", "server", *flags)
    assert code == 0
    assert "ttft_limit_seconds is 500 seconds; if 500 ms are meant, give 0.5" in out
    assert "limits.tpot_seconds.p99 is 70 seconds; if 70 ms are meant, give 0.07" in out
    _, out, _ = call_here("run", "--scenario", "server", "--ttft-limit", 60, "--dry-run", "--out", tmp_path / "runs")
    assert "are meant" not in out


def test_flags_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    for flags, words in (
        (("--rate", 5), "--rate: only for the scenarios server and interactive, and this is offline; leave it out"),
        (("--scenario", "singlestream", "--find-rate"), "--find-rate: only for the scenarios server and interactive"),
        (("--scenario", "server", "--find-rate", "--repeat", 3), "--repeat: not supported with find_rate"),
        (("--scenario", "server", "--find-rate", "--samples", 3), "--samples: not supported with find_rate"),
        (("--scenario", "server", "--probe", 5), "--probe: only for a search for a rate; give --find-rate"),
        (
            ("--rack", "auto", "--rack.simulated_gpu", "H200", "--compliance", "TEST06"),
            "--compliance: not supported with rack.simulated_gpu, which computes nothing",
        ),
        (("--scenario", "server", "--rate", 0), "--rate: must be "),
        (("--scenario", "server", "--ttft-limit", -1), "--ttft-limit: must be at least 0.001 seconds, got '-1'"),
        (
            ("--scenario", "server", "--find-rate", "--benchmark", "llama3.1-8b-edge"),
            "--scenario server: llama3.1-8b-edge has no limits for it; use singlestream or offline",
        ),
        (("--model", "tiny", "--text"), "text: tiny has no tokenizer.json"),
    ):
        code, _, err = call_here("run", *flags, "--out", tmp_path / "runs")
        assert code == 2
        assert words in err
    assert not (tmp_path / "runs").exists()
