"""Real drivers on a real Ray cluster: what is measured, what is refused, what a fault costs.

Replicas that meet a fault are simulated: no machine is fast enough to end their work before the fault, however slow
one is it only comes later. Faults come when the run folder shows that samples have ended.
"""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from rack_drivers import PATIENCE_SECONDS, RayNodes, gone, workers_of

from examples import every
from megatoken.audit import Severity, audit
from megatoken.runs.reasons import on_node
from megatoken.runs.run import Run, Verdict, read_run

TINY = (  # in fp32, because most processors multiply bf16 three times as slowly
    *("--model", "tiny", "--precision", "fp32", "--engine.max-length", "128"),
    *("--rack.dead-after-seconds", str(PATIENCE_SECONDS)),
)
# Three replicas of four sequences at a time, about 14 answers a second together.
SIMULATED = (
    *("--rack.simulated-gpu", "H200", "--rack.simulated-nodes", "3", "--rack.simulated-gpus", "1"),
    *("--model", "llama2-70b", "--precision", "fp8", "--engine.max-sequences", "4"),
)
REPLICAS = ("replicas", "replicas_least", "replicas_at_end")
NODES = ["node-1", "node-2", "node-3"]
NULL = object()
ENDLESS = ("--samples", "1000000")


def assert_each_sample_ended_once(run: Run, samples: int) -> None:
    assert sorted(run.requests["sample_id"].to_pylist()) == list(range(samples))
    assert run.result["samples_completed"] == samples
    assert run.requests["output_tokens"].to_pylist() == [
        (40, 24, 56, 32)[row % 4] for row in run.requests["sample_index"].to_pylist()
    ]


def told_against(folder: Path) -> tuple[Severity, str]:
    (found,) = [item for item in audit(folder).findings if item.id == "run_folder.healthy"]
    return found.severity, found.found.partition(" 1 of ")[0]


def failed_checks(folder: Path, severity: Severity = Severity.FAIL) -> list[str]:
    return [f"{item.id}: {item.found}" for item in audit(folder).findings if item.severity is severity]


def failed_after(run: Run, severity: Severity = Severity.FAIL, **values: Any) -> list[str]:
    """What an audit finds once ``result.json`` has other values; double underscores lead into it, None takes away."""
    path = run.path / "result.json"
    whole = path.read_text()
    result = json.loads(whole)
    for key, value in values.items():
        *above, last = key.split("__")
        holder = result
        for part in above:
            holder = holder[int(part) if part.isdigit() else part]
        holder[last] = None if value is NULL else value
        if value is None:
            del holder[last]
    path.write_text(json.dumps(result))
    failed = failed_checks(run.path, severity)
    path.write_text(whole)
    return failed


def ended(samples: int) -> Any:
    return lambda run: len(run.requests) >= samples


def rack_of(run: Run) -> dict[str, Any]:
    rack: dict[str, Any] = run.result.get("rack", {"lost": [], "joined": []})
    return rack


def _answers_again(node: str) -> Any:
    """Whether a node that was lost has ended samples since it joined."""

    def asked(run: Run) -> bool:
        joined = [entry["at_seconds"] for entry in rack_of(run)["joined"] if entry["node"] == node]
        ends = zip(run.requests["node"].to_pylist(), run.requests["last_token_seconds"].to_pylist(), strict=True)
        return bool(joined) and any(name == node and seconds > joined[0] for name, seconds in ends)

    return asked


def replicas_told(of_rack: int, of_alpha: int, of_beta: int) -> dict[str, int]:
    values = {f"rack__{name}": of_rack for name in REPLICAS}
    return values | {"rack_nodes__0__replicas": of_alpha, "rack_nodes__1__replicas": of_beta}


@pytest.mark.timing
def test_two_nodes_share_one_query(drive: Any) -> None:
    driver = drive(*TINY, "--samples", "80")
    code, output, messages = driver.end()
    assert code == 0, (output, messages)
    run = driver.run()
    assert run.verdict is Verdict.MEASURED
    assert_each_sample_ended_once(run, 80)
    assert set(run.requests["node"].to_pylist()) == {"alpha", "beta"}
    assert [node["node"] for node in run.result["nodes"]] == ["alpha", "beta"]
    assert set(zip(run.series["node"].to_pylist(), run.series["replica"].to_pylist(), strict=True)) == {
        ("alpha", 0),
        ("beta", 0),
    }
    last = np.max(run.requests["last_token_seconds"].to_numpy())
    assert 0 < np.min(run.requests["first_token_seconds"].to_numpy()) < last <= run.result["duration_seconds"] + 0.001
    offsets = run.result["rack"]["clock_offsets"]
    assert [offset["node"] for offset in offsets] == ["alpha", "beta"]
    for offset in offsets:  # one machine, one clock
        assert abs(offset["wall_seconds"]) <= offset["uncertainty_seconds"] + 0.001
        assert abs(offset["monotonic_seconds"]) <= offset["uncertainty_seconds"] + 0.001
    assert run.result["rack"]["share_left"] == 1.0
    assert failed_checks(run.path) == []
    for found, values in {
        "rack_nodes have 1 replica, rack.replicas 2": {"rack_nodes__1__replicas": 0},
        "1 replica of rack_nodes without rows in series.parquet": replicas_told(2, 2, 0),
        "2 replicas of rack_nodes without rows in series.parquet": replicas_told(4, 2, 2),
        "2 replicas served in series.parquet, rack.replicas_at_end 1 and 0 lost": replicas_told(1, 1, 0),
        "target.steps_in_flight 2, config.yaml engine.overlap False": {"target__steps_in_flight": 2},
        "replicas_least 2, replicas_at_end 3 of 2 and 0 that joined": {"rack__replicas_at_end": 3},
        "share_left 0.9, replicas_least 2 of 2": {"rack__share_left": 0.9},
        "alpha has 4 GPUs for 1 replica": {"rack_nodes__0__gpus": 4},
        "run_folder.replicas: no rack_nodes": {"rack_nodes": None},
        "run_folder.replicas: no rack; no rack_nodes": {"rack": None, "rack_nodes": None},
        "run_folder.metrics: aggregate.": {"aggregate": {}},
        "run_folder.metrics: aggregate.spread none, recomputed": {"aggregate__spread": None},
        "run_folder.metrics: aggregate.mean_tokens_per_second 1.0, recomputed": {
            "aggregate__mean_tokens_per_second": 1.0
        },
        "run_folder.metrics: aggregate.common_window.output_tokens_per_second 1000000.0": {
            "aggregate__common_window__output_tokens_per_second": 1e6
        },
        "run_folder.metrics: aggregate.accelerators 2": {"aggregate__accelerators": 2},
    }.items():
        failed = failed_after(run, **values)
        assert any(found in one for one in failed), (found, failed)
    # A search that found no rate has no rows, and tells of its nodes alone.
    pq.write_table(pq.read_table(run.path / "requests.parquet")[:0], run.path / "requests.parquet")
    assert not any(one.startswith("run_folder.replicas") for one in failed_after(run, rack=None))


def test_replicas_that_die_or_hang_cost_no_sample(drive: Any) -> None:
    driver = drive(*SIMULATED, "--samples", "150", "--rack.dead-after-seconds", "5", "--rack.replace", "false")
    workers = workers_of(driver.until(ended(20)))
    hangs = psutil.Process(workers["node-2"])
    hangs.suspend()  # what it holds cannot end before it is lost
    os.kill(workers["node-1"], signal.SIGKILL)
    try:
        code, output, messages = driver.end()
    finally:
        with suppress(psutil.NoSuchProcess):  # it was ended while it hung
            hangs.resume()
    assert code == 4, (output, messages)
    run = driver.run()
    assert run.verdict is Verdict.DEGRADED
    assert_each_sample_ended_once(run, 150)
    causes = {entry["node"]: entry["cause"] for entry in run.result["rack"]["lost"]}
    assert "connection" in causes["node-1"] and "silent" in causes["node-2"]
    returned = {entry["node"]: entry["samples_returned"] for entry in run.result["rack"]["lost"]}
    assert returned["node-1"] > 0 and returned["node-2"] > 0
    assert run.result["rack"]["share_left"] == pytest.approx(1 / 3)
    assert "1 of 3 replicas" in run.reasons[0]["message"] and "33.3 %" in run.reasons[0]["message"]
    assert failed_checks(run.path) == []
    assert told_against(run.path) == (Severity.WARN, "DEGRADED: LOST_REPLICAS")
    assert gone(hangs.pid)


def test_replicas_that_were_lost_come_back(drive: Any) -> None:
    driver = drive(*SIMULATED, *ENDLESS, "--rack.dead-after-seconds", "5", "--rack.reconnect-seconds", "10")
    workers = workers_of(driver.until(ended(20)))
    os.kill(workers["node-1"], signal.SIGKILL)  # started anew
    hangs, stays_away = (psutil.Process(workers[node]) for node in ("node-2", "node-3"))
    hangs.suspend()
    stays_away.suspend()
    try:
        driver.until(lambda run: "node-2" in [entry["node"] for entry in rack_of(run)["lost"]])
        hangs.resume()  # comes back by itself
        driver.until(lambda run: all(_answers_again(node)(run) for node in NODES))  # node-3 started anew
    finally:
        for process in (hangs, stays_away):
            with suppress(psutil.NoSuchProcess):
                process.resume()
    driver.process.send_signal(signal.SIGINT)
    code, output, messages = driver.end()
    assert code == 130, (output, messages)
    run = driver.run()
    assert run.verdict is Verdict.INTERRUPTED
    assert len(set(run.requests["sample_id"].to_pylist())) == len(run.requests)
    assert set(NODES) <= {entry["node"] for entry in run.result["rack"]["lost"]}
    assert set(run.requests["node"].to_pylist()) == set(NODES)


def test_one_driver_at_a_time_and_no_replica_outlives_it(drive: Any) -> None:
    first = drive(*SIMULATED, *ENDLESS)
    workers = workers_of(first.until(ended(1)))
    second = drive(*SIMULATED, out="second")
    code, _, messages = second.end()
    assert code == 2 and f"process {first.process.pid}" in messages and "0.03 of 2 CPUs in use" in messages, messages
    assert not second.out.exists()
    before = len(first.until(ended(20)).requests)
    first.process.kill()
    first.process.wait()
    assert sorted(workers) == NODES
    assert all(gone(pid) for pid in workers.values())
    run = first.run()
    assert run.verdict is Verdict.INTERRUPTED
    assert len(set(run.requests["sample_id"].to_pylist())) == len(run.requests) >= before


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--rack.replicas", "3"), "3 replicas need 3 cores; the cluster has 2 (alpha 1, beta 1)"),
        (("--engine.tensor-parallel", "3"), "tensor_parallel 3 does not divide the 8 heads of tiny"),
        *every((("--engine.tensor-parallel", "2"), "the cluster has 2 (alpha 1, beta 1)")),
        (("--engine.device", "cuda"), "the cluster has 0"),
    ],
)
def test_what_does_not_fit_is_refused(drive: Any, flags: tuple[str, ...], words: str) -> None:
    driver = drive(*TINY, *flags)
    code, _, messages = driver.end()
    assert code == 2 and words in messages, messages
    assert not driver.out.exists()


@pytest.mark.timing
def test_a_loadgen_on_every_node(drive: Any) -> None:
    driver = drive(*TINY, "--rack.count", "per_node", "--samples", "30")
    code, output, messages = driver.end()
    assert code == 0, (output, messages)
    run = driver.run()
    assert run.verdict is Verdict.MEASURED
    assert run.requests["node"].to_pylist().count("alpha") == run.requests["node"].to_pylist().count("beta") == 30
    assert len(set(run.requests["sample_id"].to_pylist())) == 60
    offsets = {offset["node"]: offset["wall_seconds"] for offset in run.result["rack"]["clock_offsets"]}
    assert list(offsets) == ["alpha", "beta"]
    starts = []
    for node, ahead in offsets.items():
        own = read_run(driver.folder() / "nodes" / node)
        assert own.result["samples_completed"] == 30
        assert (own.path / "mlperf" / "mlperf_log_summary.txt").is_file()
        for note in own.result["notes"]:
            assert note in run.result["notes"] or on_node(note, node) in run.result["notes"]
        starts.append(datetime.fromisoformat(own.result["started_at"]).timestamp() - ahead)
    assert run.result["rack"]["start_spread_seconds"] == pytest.approx(max(starts) - min(starts), abs=1e-4)
    together = run.result["aggregate"]
    assert together["evidence_of_simultaneity"]["statement"].startswith(
        "by the driver's clock (offsets of the nodes known within"
    )
    rates = [node["output_tokens_per_second"] for node in run.result["nodes"]]
    assert together["sum_of_rates_tokens_per_second"] == pytest.approx(sum(rates), rel=0.05)
    assert together["makespan"]["output_tokens"] == run.result["output_tokens"]
    assert together["common_window"]["seconds"] > 0
    assert failed_checks(run.path) == []
    for name in ("makespan", "common_window"):
        (failed,) = failed_after(run, **{f"aggregate__{name}__output_tokens_per_second": 1e6})
        assert failed.startswith(f"run_folder.nodes: aggregate.{name}.")
    assert_lies_about_nodes_are_found(run)
    rows = pq.read_table(run.path / "requests.parquet")
    doubled = rows.set_column(
        rows.column_names.index("output_tokens"),
        rows.schema.field("output_tokens"),
        pc.multiply(rows["output_tokens"], 2).cast(rows.schema.field("output_tokens").type),
    )
    pq.write_table(doubled, run.path / "requests.parquet")
    assert "run_folder.nodes: output_tokens of requests.parquet differs from the nodes' tables" in failed_checks(
        run.path
    )


@pytest.mark.timing
def test_every_node_offers_a_rate_of_its_own(drive: Any) -> None:
    driver = drive(*TINY, "--rack.count", "per_node", "--scenario", "interactive", "--rate", "6", "--min-duration", "3")
    code, output, messages = driver.end()
    assert code == 0, (output, messages)
    run = driver.run()
    for node in ("alpha", "beta"):
        own = read_run(run.path / "nodes" / node)
        assert own.result["offered_samples_per_second"] == 6.0
        assert own.config["engine"]["target_step_seconds"] == own.result["target"]["target_step_seconds"] > 0
    assert failed_checks(run.path) == []


def assert_lies_about_nodes_are_found(run: Run) -> None:
    offsets = run.result["rack"]["clock_offsets"]
    for found, values in {
        "run_folder.nodes: verdict VALID, recomputed MEASURED": {"verdict": "VALID"},
        "run_folder.nodes: rules_unmet none, recomputed MIN_DURATION": {"rules_unmet": []},
        "run_folder.nodes: node_verdicts.beta VALID, recomputed MEASURED": {"node_verdicts__beta": "VALID"},
        "rack.replicas_least 1, recomputed 2": {"rack__replicas_least": 1},
        "run_folder.nodes: rack.start_spread_seconds 9.0, recomputed": {"rack__start_spread_seconds": 9.0},
        "run_folder.nodes: started_at 2026-01-01T00:00:00Z, recomputed": {"started_at": "2026-01-01T00:00:00Z"},
        "run_folder.nodes: no clock offset of beta": {"rack__clock_offsets": offsets[:1]},
        "run_folder.nodes: scheduled_seconds of requests.parquet": {"rack__clock_offsets__1__wall_seconds": 577.0},
        "run_folder.nodes: aggregate.makespan.": {"aggregate__makespan": {}},
        "run_folder.nodes: aggregate.sum_label sum": {"aggregate__sum_label": "sum of 9 simultaneous node rates"},
        "run_folder.whole": {"rack__lost": None},
        "rack_nodes of alpha differ; rack_nodes of beta differ": {"rack_nodes__1__replicas": 2},
        "nodes without a verdict are not those in rack.lost: none": {"node_verdicts__beta": NULL},
    }.items():
        failed = failed_after(run, **values)
        assert any(found in one for one in failed), (found, failed)
    warned = failed_after(run, Severity.WARN, rack__clock_offsets__1__wall_seconds=577.0)
    assert "run_folder.nodes: beta 577 s" in warned
    path = run.path / "series.parquet"
    rows = pq.read_table(path)
    place, backwards = rows.column_names.index("elapsed_seconds"), rows["elapsed_seconds"].to_pylist()[::-1]
    pq.write_table(rows.set_column(place, rows.schema.field(place), [backwards]), path)
    assert any("run_folder.nodes: " in one and "series.parquet" in one for one in failed_checks(run.path))
    pq.write_table(rows, path)


def test_a_node_lost_with_its_loadgen(drive: Any, cluster: RayNodes) -> None:
    driver = drive(*TINY, "--rack.count", "per_node", "--samples", "60")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(list(cluster.folder.glob("megatoken-node-*/*/result.json"))) < 2:  # both wait for the start
        assert driver.process.poll() is None and time.monotonic() < deadline, driver.end()
        time.sleep(0.1)
    own = psutil.Process(cluster.process_id).children(recursive=True)
    drivers = [process for process in own if process.name().startswith("ray::NodeDriver")]
    assert len(drivers) == 2
    drivers[1].kill()
    code, output, messages = driver.end()
    assert code == 4, (output, messages)
    run = driver.run()
    assert run.verdict is Verdict.DEGRADED
    assert run.result["rack"]["share_left"] == 0.5
    assert len(run.requests) == 60
    assert failed_checks(run.path) == []
    hidden = {"rack": {**run.result["rack"], "replicas": 1, "replicas_least": 1, "share_left": 1.0, "lost": []}}
    failed = failed_after(run, **hidden, verdict="MEASURED", reasons=[])
    assert any(
        one.startswith("run_folder.nodes: nodes without a verdict are not those in rack.lost") for one in failed
    ), failed
    assert any(one.startswith("run_folder.replicas: rack_nodes have 2 replicas, rack.replicas 1") for one in failed)
    assert len(run.result["nodes"]) == 1
