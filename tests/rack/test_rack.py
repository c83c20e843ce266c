"""Real drivers on a real Ray cluster: what is measured, what is refused, what a fault costs."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import psutil
import pytest

from conftest import SILENCE_SECONDS, Nodes, gone, workers_of
from megatoken.results import Run, Verdict, read_run

pytestmark = pytest.mark.skipif(
    not os.environ.get("MEGATOKEN_TEST_RACK"),
    reason="whole racks need a machine of their own and known speed; set MEGATOKEN_TEST_RACK=1",
)
SAMPLES = 2000  # seconds of work, so that a fault meets a run on its way


def assert_each_sample_ended_once(run: Run, samples: int) -> None:
    assert sorted(run.requests["sample_id"].to_pylist()) == list(range(samples))
    assert run.result["samples_completed"] == samples
    assert run.requests["output_tokens"].to_pylist() == [
        (40, 24, 56, 32)[row % 4] for row in run.requests["sample_index"].to_pylist()
    ]


def _ends_on(node: str, run: Run) -> list[float]:
    ends = zip(run.requests["node"].to_pylist(), run.requests["last_token_seconds"].to_pylist(), strict=True)
    return [seconds for name, seconds in ends if name == node]


def test_two_nodes_share_one_query(two_nodes: Nodes, drive: Any) -> None:
    driver = drive(two_nodes.address, "--samples", "80")
    code, output, messages = driver.end()
    assert code == 0, (output, messages)
    run = driver.run()
    assert run.verdict is Verdict.MEASURED
    assert_each_sample_ended_once(run, 80)
    nodes = run.requests["node"].to_pylist()
    assert min(nodes.count("alpha"), nodes.count("beta")) > 8
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


def test_a_killed_replica_costs_no_sample(two_nodes: Nodes, drive: Any) -> None:
    driver = drive(two_nodes.address, "--samples", str(SAMPLES))
    victim = workers_of(driver.wait_for_samples(20))["beta"]
    os.kill(victim, signal.SIGKILL)
    code, output, messages = driver.end()
    assert code == 4, (output, messages)
    run = driver.run()
    assert run.verdict is Verdict.DEGRADED
    assert_each_sample_ended_once(run, SAMPLES)
    (lost,) = run.result["rack"]["lost"]
    assert (lost["node"], lost["replica"]) == ("beta", 0)
    assert run.result["rack"]["share_left"] == 0.5
    assert "1 of 2 replicas" in run.reasons[0]["message"] and "50.0%" in run.reasons[0]["message"]


def test_a_replica_that_hangs_is_lost_and_may_come_back(two_nodes: Nodes, drive: Any) -> None:
    driver = drive(two_nodes.address, "--samples", str(SAMPLES))
    victim = psutil.Process(workers_of(driver.wait_for_samples(20))["alpha"])
    victim.suspend()
    try:
        while not driver.run().result.get("rack", {}).get("lost"):
            driver.wait_for_samples(0)
    finally:
        victim.resume()
    code, output, messages = driver.end()
    assert code == 4, (output, messages)
    run = driver.run()
    assert_each_sample_ended_once(run, SAMPLES)
    (lost,) = run.result["rack"]["lost"]
    assert lost["node"] == "alpha" and "silent" in lost["cause"]
    assert lost["samples_returned"] > 0
    assert [joined["node"] for joined in run.result["rack"]["joined"]] == ["alpha"]
    assert run.result["rack"]["replicas_at_end"] == 2


def test_a_node_that_dies_and_comes_back(two_nodes: Nodes, drive: Any) -> None:
    driver = drive(two_nodes.address, "--samples", "100000")
    worker = workers_of(driver.wait_for_samples(20))["beta"]
    two_nodes.kill_raylet("beta")
    os.kill(worker, signal.SIGKILL)
    two_nodes.add("beta")
    while not (joined := driver.run().result.get("rack", {}).get("joined")):
        driver.wait_for_samples(0)
    again = joined[0]["node"]  # another name where Ray has not yet noticed that the first is gone
    assert again in ("beta", "beta-2")
    while max(_ends_on(again, driver.run()), default=0.0) < joined[0]["at_seconds"]:
        driver.wait_for_samples(0)
    driver.process.send_signal(signal.SIGINT)
    code, output, messages = driver.end()
    assert code == 130, (output, messages)
    run = driver.run()
    assert len(set(run.requests["sample_id"].to_pylist())) == len(run.requests)
    assert [lost["node"] for lost in run.result["rack"]["lost"]] == ["beta"]
    assert run.result["rack"]["replicas_at_end"] == 2


def test_replicas_do_not_outlive_their_driver(two_nodes: Nodes, drive: Any) -> None:
    driver = drive(two_nodes.address, "--samples", str(SAMPLES))
    workers = workers_of(driver.wait_for_samples(20))
    driver.process.kill()
    driver.process.wait()
    assert all(gone(pid, 5 * SILENCE_SECONDS) for pid in workers.values())
    run = driver.run()
    assert run.verdict is Verdict.INTERRUPTED
    assert len(run.requests) >= 20


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--rack.replicas", "3"), "3 replicas of 1 CPU cores need 3; the cluster has 2 (alpha 1, beta 1, head 0)"),
        (("--engine.tensor-parallel", "3"), "tensor_parallel 3 does not divide the 8 heads of tiny"),
        (("--engine.tensor-parallel", "2"), "the cluster has 2 (alpha 1, beta 1, head 0)"),
        (("--engine.device", "cuda"), "the cluster has 0"),
    ],
)
def test_what_does_not_fit_is_refused(two_nodes: Nodes, drive: Any, flags: tuple[str, ...], words: str) -> None:
    driver = drive(two_nodes.address, *flags)
    code, _, messages = driver.end()
    assert code == 2 and words in messages, messages
    assert not driver.out.exists()


def test_a_second_driver_is_refused(two_nodes: Nodes, drive: Any) -> None:
    first = drive(two_nodes.address, "--samples", "100000")
    first.wait_for_samples(1)
    second = drive(two_nodes.address, out="second")
    code, _, messages = second.end()
    assert code == 2 and f"process {first.process.pid}" in messages and "2 of 2 CPUs in use" in messages, messages
    first.process.send_signal(signal.SIGINT)
    assert first.end()[0] == 130


def test_a_loadgen_on_every_node(two_nodes: Nodes, drive: Any) -> None:
    driver = drive(two_nodes.address, "--rack.count", "per_node", "--samples", "30")
    code, output, messages = driver.end()
    assert code == 0, (output, messages)
    run = driver.run()
    assert run.verdict is Verdict.MEASURED
    assert run.requests["node"].to_pylist().count("alpha") == run.requests["node"].to_pylist().count("beta") == 30
    assert len(set(run.requests["sample_id"].to_pylist())) == 60
    for node in ("alpha", "beta"):
        own = read_run(driver.folder() / "nodes" / node)
        assert own.result["samples_completed"] == 30
        assert (own.path / "mlperf" / "mlperf_log_summary.txt").is_file()
    together = run.result["aggregate"]
    rates = [node["output_tokens_per_second"] for node in run.result["nodes"]]
    assert together["sum_of_rates_tokens_per_second"] == pytest.approx(sum(rates), rel=0.05)
    assert together["makespan"]["output_tokens"] == run.result["output_tokens"]
    assert together["common_window"]["seconds"] > 0
    assert run.result["rack"]["start_spread_seconds"] < 1.0
    assert [offset["node"] for offset in run.result["rack"]["clock_offsets"]] == ["alpha", "beta"]


def test_a_node_lost_with_its_loadgen(two_nodes: Nodes, drive: Any) -> None:
    driver = drive(two_nodes.address, "--rack.count", "per_node", "--samples", "60")
    victims: list[int] = []
    while not victims:
        assert driver.process.poll() is None, driver.end()
        named = [(process.info["name"] or "", process.pid) for process in psutil.process_iter(["name"])]
        victims = [pid for name, pid in named if name.startswith("ray::NodeDriver")]
        time.sleep(0.1)
    time.sleep(3)
    os.kill(max(victims), signal.SIGKILL)
    code, output, messages = driver.end()
    assert code == 4, (output, messages)
    run = driver.run()
    assert run.verdict is Verdict.DEGRADED
    assert run.result["rack"]["share_left"] == 0.5
    assert len(run.requests) == 60
    assert len(run.result["nodes"]) == 1
