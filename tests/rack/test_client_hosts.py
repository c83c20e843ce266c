"""Client processes on the two nodes of a real Ray cluster, the clocks of one of them far ahead of the other's."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
from rack_drivers import PATIENCE_SECONDS, Driver, RayNodes, environment, gone, ray_nodes

from cli_support import write_lines
from forks import Process, forked

sys.path.append(str(Path(__file__).parents[1] / "endpoint"))
from scripted_server import scripted_server

AHEAD_SECONDS = 1000
CLOCKS = f"""
import time
monotonic, monotonic_ns = time.monotonic, time.monotonic_ns
time.monotonic = lambda: monotonic() + {AHEAD_SECONDS}
time.monotonic_ns = lambda: monotonic_ns() + {AHEAD_SECONDS} * 10**9
"""
KEY = "sk-of-the-hosts-1"
ROWS = 40


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    """A cluster whose node beta has other clocks, as every machine of its own has."""
    folder = tmp_path_factory.mktemp("ahead")
    (folder / "sitecustomize.py").write_text(CLOCKS)
    with ray_nodes(BETA_PYTHONPATH=str(folder)) as nodes:
        yield nodes


@pytest.fixture
def measure(ahead: RayNodes, tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    """Starts runs; none outlives its test."""
    started = []

    def start(url: str, *flags: object) -> Driver:
        rows = [{"prompt": f"ok {row}", "max_tokens": 12} for row in range(ROWS)]
        key = tmp_path / "key"
        key.write_text(KEY)
        command = ["-m", "megatoken", "run", "--endpoint", url, "--endpoint.hosts", ahead.address]
        command += ["--api-key-file", key, "--prompts", write_lines(tmp_path / "prompts.jsonl", *rows)]
        command += ["--scenario", "server", "--min-duration", "0", "--warm-up", "0.5", "--out", tmp_path / "runs"]
        process = Process(list(map(str, [*command, "--json", *flags])), environment(ahead.folder), None)
        started.append(process)
        return Driver(process, tmp_path / "runs")

    yield start
    for process in started:
        process.kill()
        process.close()


def clients_of(cluster: RayNodes, ahead: bool) -> list[psutil.Process]:
    """The client processes of beta, whose modules come from a folder of their own first, or of alpha."""
    found = []
    for process in psutil.Process(cluster.process_id).children(recursive=True):
        with suppress(psutil.Error):
            is_ahead = f"{os.sep}ahead" in process.environ().get("PYTHONPATH", "")
            if "megatoken.targets.endpoint.worker" in process.cmdline() and is_ahead is ahead:
                found.append(process)
    return found


@pytest.mark.timing
def test_times_of_all_hosts_are_those_of_the_server(ahead: RayNodes) -> None:
    variables = environment(ahead.folder)
    variables["PYTHONPATH"] += f"{os.pathsep}{Path(__file__).parents[1] / 'endpoint'}"
    with forked(Path(__file__).parent / "host_times.py", ahead.address, environment=variables) as process:
        output, messages = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, messages
    found = json.loads(output)
    hosts = {one["host"]: one for one in found["client"]["hosts"]}
    assert sorted(hosts) == ["alpha", "beta"]
    for name, ahead_seconds in (("alpha", 0), ("beta", AHEAD_SECONDS)):
        offset = hosts[name]["clock_offset"]
        assert abs(offset["monotonic_seconds"] - ahead_seconds) <= offset["uncertainty_seconds"] + 0.001
        assert offset["rounds"] > 16 and hosts[name]["busy_share"] > 0, "both answered requests"
    late = np.array(found["late"])
    uncertainty = max(one["clock_offset"]["uncertainty_seconds"] for one in hosts.values())
    assert late.min() > -uncertainty and np.median(late) < 0.01 and late.max() < 1, (late.min(), late.max())


def test_a_run_on_two_hosts_names_them_and_no_key(
    ahead: RayNodes, measure: Callable[..., Driver], tmp_path: Path
) -> None:
    with scripted_server() as server:
        driver = measure(server.url, "--endpoint.processes", 3, "--rate", 30, "--samples", 60)
        code, output, messages = driver.end()
    run = driver.run()
    assert code in (0, 3), messages
    assert [one["code"] for one in run.reasons] in ([], ["CLIENT_SATURATED"])  # on a busy machine
    assert sorted(run.requests["sample_id"].to_pylist()) == list(range(60)) and run.result["samples_completed"] == 60
    client = run.result["client"]
    assert {one["host"]: one["processes"] for one in client["hosts"]} == {"alpha": 1, "beta": 2}
    assert client["processes"] == 3 and client["lost"] == []
    assert client["cores"] == sum(one["cores"] for one in client["hosts"])
    assert client["self_test"]["frames_per_second"] == min(
        one["self_test"]["frames_per_second"] for one in client["hosts"]
    )
    assert all(gone(number) for one in client["hosts"] for number in one["process_ids"])
    times = run.requests.select(["scheduled_seconds", "request_sent_seconds", "first_token_seconds"])
    scheduled, sent, first = (column.to_numpy() for column in times.columns)
    assert (scheduled <= sent).all() and (sent < first).all() and first.max() < 60
    assert sum(f"Authorization: Bearer {KEY}".encode() in head for head in server.heads) >= 60
    written = [
        file for file in [*tmp_path.rglob("*"), *ahead.folder.rglob("*")] if file.is_file() and file.name != "key"
    ]
    assert not [file for file in written if KEY.encode() in file.read_bytes()] and KEY not in output + messages


@pytest.mark.parametrize(("ending", "cause"), [(signal.SIGKILL, "connection"), (signal.SIGSTOP, "silent for 8 s")])
def test_a_host_that_is_lost_leaves_its_requests_to_the_others_once(
    ahead: RayNodes, measure: Callable[..., Driver], ending: signal.Signals, cause: str
) -> None:
    with scripted_server() as server:
        driver = measure(server.url, "--endpoint.processes", 3, "--rate", 20, "--samples", 200)
        driver.until(lambda run: len(run.requests) >= 20)
        before = server.asked.total()
        hit, other = clients_of(ahead, ahead=True)
        hit.send_signal(ending)
        code, _, messages = driver.end()
        asked = server.asked.total() - before
    with suppress(psutil.NoSuchProcess):
        hit.send_signal(signal.SIGCONT)
    run = driver.run()
    assert sorted(run.requests["sample_id"].to_pylist()) == list(range(200)) and run.result["samples_failed"] == 0
    [lost] = run.result["client"]["lost"]
    assert lost["host"] == "beta" and cause in lost["cause"] and lost["samples_moved"] > 0
    assert asked <= 180 + lost["samples_moved"]
    reason = {one["code"]: one["message"] for one in run.reasons}["LOST_HOSTS"]
    assert reason.startswith("1 of 2 client hosts lost: beta at") and cause in reason
    assert code == 4 or "CLIENT_SATURATED" in [one["code"] for one in run.reasons], messages
    assert gone(other.pid) and gone(hit.pid)
