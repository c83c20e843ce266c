"""What the warm-up of a run against a server sends: no more than the run's own load. Client and sockets are real."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_server import Server, scripted_server

from cli_support import call_here, write_lines
from megatoken.config import RunConfig
from megatoken.datasets.prompts import load_texts
from megatoken.errors import MegatokenError
from megatoken.harness.progress import Progress
from megatoken.harness.sizing import OwnLoad, estimate_latency, estimate_rate
from megatoken.targets.endpoint import clients
from megatoken.targets.endpoint.backend import EndpointBackend
from megatoken.targets.endpoint.self_test import SETTINGS
from megatoken.targets.endpoint.target import EndpointTarget

SECONDS = 0.5


@pytest.fixture
def server() -> Iterator[Server]:
    with scripted_server() as one:
        yield one


@pytest.fixture
def target(server: Server) -> Iterator[EndpointTarget]:
    config = RunConfig(scenario="server", endpoint={"urls": server.url, "processes": 1})
    with EndpointBackend(config, Progress(quiet=True)).open() as backend, backend.load() as one:
        yield one


def rows(tmp_path: Path, word: str, tokens: int = 2) -> Any:
    lines = [{"prompt": f"{word} {at}", "max_tokens": tokens} for at in range(50)]
    return load_texts(write_lines(tmp_path / "rows.jsonl", *lines), encode=None, default_max_tokens=tokens)


def test_never_more_at_once_than_the_run_has(server: Server, target: EndpointTarget, tmp_path: Path) -> None:
    estimate_rate(target, rows(tmp_path, "hang"), SECONDS, 0.0, OwnLoad(in_flight=3))
    assert server.asked.total() == 3 and target.state().in_flight == 0


def test_requests_come_at_the_rate_of_the_run(server: Server, target: EndpointTarget, tmp_path: Path) -> None:
    rate = estimate_rate(target, rows(tmp_path, "quick"), SECONDS, 0.0, OwnLoad(rate=40))
    sent_ns = sorted(times[0] for times in server.sent_ns.values())
    assert 10 <= len(sent_ns) == len(server.bodies) <= 1 + 40 * SECONDS
    assert sent_ns[-1] - sent_ns[0] > SECONDS / 2 * 1e9
    assert 20 < rate < 48


def test_a_run_of_few_samples_needs_few(server: Server, target: EndpointTarget, tmp_path: Path) -> None:
    began = time.monotonic()
    rate = estimate_rate(target, rows(tmp_path, "quick"), 30.0, 30.0, OwnLoad(samples=4))
    assert len(server.bodies) == 4 and time.monotonic() - began < 20  # it ends with the last of them
    assert rate > 4 / 20
    estimate_latency(target, rows(tmp_path, "quick"), 30.0, OwnLoad(samples=3))
    assert len(server.bodies) == 7


def test_without_a_warm_up_the_rate_is_that_of_one_answer(
    server: Server, target: EndpointTarget, tmp_path: Path
) -> None:
    assert 0.5 < estimate_rate(target, rows(tmp_path, "quick"), 0.0, 30.0, OwnLoad()) < 500
    assert len(server.bodies) == 1


def test_a_run_of_one_sample_is_preceded_by_one(server: Server, target: EndpointTarget, tmp_path: Path) -> None:
    assert 0.001 < estimate_latency(target, rows(tmp_path, "quick"), 30.0, OwnLoad(samples=1)) < 5
    assert len(server.bodies) == 1


def test_a_client_process_that_hangs_at_its_start_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "START_SECONDS", 0.5)
    process = clients.LocalProcess(SETTINGS)
    process.process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(MegatokenError, match=r"did not start within 0\.5 s"):
            process.wait_until_ready()
    finally:
        process.process.kill()
        process.close()


def test_client_processes_are_ended_where_one_does_not_start(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    start = clients.start_process

    def noted(settings: Any) -> Any:
        process, connection = start(settings)
        started.append(process)
        return process, connection

    monkeypatch.setattr(clients, "start_process", noted)
    monkeypatch.setattr(clients, "START_SECONDS", 0.0)
    config = RunConfig(scenario="server", endpoint={"urls": server.url, "processes": 2})
    with (
        pytest.raises(MegatokenError, match="did not start within 0 s"),
        EndpointBackend(config, Progress(quiet=True)).open() as backend,
        backend.load(),
    ):
        pass
    assert len(started) >= 2 and all(process.poll() is not None for process in started)


@pytest.mark.parametrize(
    ("flags", "most"),
    [
        (("--scenario", "server", "--samples", 4, "--rate", 50), 8),
        (("--scenario", "server", "--samples", 4), 8),
        (("--scenario", "singlestream", "--samples", 4), 8),
        (("--scenario", "offline", "--samples", 4), 8),
        (("--scenario", "server", "--min-duration", 0.2, "--rate", 10), 5),  # 2 of the warm-up
    ],
)
def test_a_run_sends_at_most_as_much_again(
    server: Server, tmp_path: Path, flags: tuple[object, ...], most: int
) -> None:
    prompts = write_lines(tmp_path / "prompts.jsonl", *({"prompt": f"quick {at}", "max_tokens": 2} for at in range(9)))
    common = ("--endpoint", server.url, "--prompts", prompts, "--endpoint.processes", 1, "--out", tmp_path / "runs")
    code, out, error = call_here("run", *common, "--endpoint.stream", "true", *flags)
    assert code in (0, 3), out + error
    assert most / 2 < len(server.bodies) <= most


@pytest.mark.parametrize(
    ("flags", "most"), [(("--concurrency", "1,2"), 2), (("--concurrency", "1@1,3@1"), 3), (("--users", "2"), 2)]
)
def test_a_sweep_never_has_more_at_once_than_its_highest_load(
    server: Server, tmp_path: Path, flags: tuple[object, ...], most: int
) -> None:
    turn = [{"from": "human", "value": "quick question"}, {"from": "gpt", "value": "a short answer"}]
    talk = tmp_path / "talk.json"
    talk.write_text(json.dumps([{"conversations": turn * 4}]))
    source = ("--conversations", talk, "--think", 0, "--endpoint.api", "completions")
    if "--users" not in flags:
        source = ("--prompts", write_lines(tmp_path / "prompts.jsonl", {"prompt": "quick", "max_tokens": 2}))
    code, out, error = call_here(
        *("sweep", "--endpoint", server.url, *source, *flags, "--warm-up", 0.3),
        *(() if "@" in str(flags) else ("--settle", 0.1, "--window", 1)),
        *("--endpoint.processes", 1, "--out", tmp_path / "runs"),
    )
    assert code == 0, out + error
    assert server.most_open == most
