"""What a command shows while a server takes connections and does not answer, so that its user can end it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from scripted_server import scripted_server

from cli_support import call_here, write_lines
from megatoken.harness import progress
from megatoken.targets.endpoint import backend

SILENT_SECONDS = 1.0


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SILENT_SECONDS", SILENT_SECONDS)
    monkeypatch.setattr(progress, "PLAIN_PERIOD_SECONDS", 0.0)


def test_a_question_before_the_run_says_for_how_long_it_has_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "FAST_SECONDS", 3.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        code, _, err = call_here("run", "--endpoint", f"http://{address}/v1", "--out", tmp_path)
    assert code == 2
    assert f"asking {address}, at most 3.5 s: no answer for 1 s  1 in flight" in err
    assert f"asking {address}, at most 3.5 s: no answer for 3 s  1 in flight" in err


@pytest.mark.parametrize("command", [("run", "--scenario", "server", "--rate", 5), ("sweep", "--concurrency", 2)])
@pytest.mark.parametrize(
    ("failure", "said"),
    [
        ({"refuses_with": 500}, "HTTP 500: not this time"),
        ({"closes": True}, "no answer to a prompt (Remote end closed connection without response)"),
        ({"hangs": True}, "no answer to a prompt (timed out after 1 s; raise --endpoint.timeout_seconds)"),
    ],
)
def test_a_server_that_answers_no_prompt_ends_the_command_as_a_failed_one(
    tmp_path: Path, command: tuple[object, ...], failure: dict[str, int], said: str
) -> None:
    prompts = write_lines(tmp_path / "prompts.jsonl", {"prompt": "quick", "max_tokens": 8})
    with scripted_server() as server:
        for name, value in failure.items():
            setattr(server, name, value)
        code, _, err = call_here(
            *(*command, "--endpoint", server.url, "--prompts", prompts, "--out", tmp_path / "runs"),
            *("--endpoint.timeout_seconds", 1, "--endpoint.processes", 1),
        )
    assert code == 1 and err.endswith(f"megatoken: --endpoint {server.url}: {said}\n"), err


@pytest.mark.parametrize(
    ("command", "in_flight"),
    [
        (("run", "--scenario", "singlestream", "--samples", 1, "--min-duration", 0, "--warm-up", 0), 1),
        (("sweep", "--concurrency", 2, "--settle", 0, "--window", 3, "--warm-up", 3), 2),
    ],
)
def test_warm_up_and_measurement_say_for_how_long_nothing_was_answered(
    tmp_path: Path, command: tuple[object, ...], in_flight: int
) -> None:
    prompts = write_lines(tmp_path / "prompts.jsonl", {"prompt": "hang", "max_tokens": 8})
    with scripted_server() as server:
        code, _, err = call_here(
            *(*command, "--endpoint", server.url, "--prompts", prompts, "--out", tmp_path / "runs"),
            *("--endpoint.timeout_seconds", 4, "--endpoint.processes", 1),
        )
    assert code == 3, err
    shown = [line for line in err.splitlines() if line.endswith(f"  {in_flight} in flight")]
    silent = [line for line in shown if "no answer for " in line]
    assert any(line.startswith("warming up for ") for line in silent), err
    assert any(" left  " in line and "tokens/s" not in line for line in silent), err
