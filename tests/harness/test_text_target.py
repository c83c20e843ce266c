"""The harness on a target without memory plan, pages or token ids: another process that answers in text."""

import json
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import pytest

from cli_support import write_lines
from megatoken.config import RunConfig
from megatoken.datasets.prompts import load_texts
from megatoken.datasets.requests import ChatRequest
from megatoken.engine.request import Request
from megatoken.engine.state import ReplicaState
from megatoken.engine.tokenizer import Tokenizer
from megatoken.errors import DatasetError, UsageError
from megatoken.harness.command import Test, measure_on
from megatoken.harness.generate import answer
from megatoken.harness.prepare import Prepared
from megatoken.harness.progress import Progress
from megatoken.harness.run import run_scenario
from megatoken.harness.soak import run_soak
from megatoken.report import write_reports
from megatoken.runs.run import Run, Verdict, read_run
from megatoken.targets import ReplicaReading, SampleEvent, Target
from megatoken.targets.backend import ServedModel

CONNECTIONS = 4
SERVER = """
import json, sys, threading, time
from concurrent.futures import ThreadPoolExecutor

lock = threading.Lock()

def say(**fields):
    with lock:
        print(json.dumps(fields), flush=True)

def serve(line):
    asked = json.loads(line)
    words = asked["prompt"].split()
    if "fail" in words:
        say(id=asked["id"], error="the server refuses this prompt")
        return
    for count in range(asked["max_tokens"]):
        time.sleep(0.002)
        say(id=asked["id"], text=f"{words[count % len(words)]} ")
    say(id=asked["id"], text="", end="length", tokens_in=len(words), tokens_out=asked["max_tokens"])

with ThreadPoolExecutor(4) as threads:
    for line in sys.stdin:
        threads.submit(serve, line)
"""


class ProcessTarget:
    """Sends prompts to a process and takes its pieces of text; at most ``CONNECTIONS`` requests at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._waiting: deque[tuple[int, Request]] = deque()
        self._sent: set[int] = set()
        self._begun: set[int] = set()
        self._said: SimpleQueue[tuple[int, dict[str, Any]]] = SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def facts(self) -> Mapping[str, Any]:
        return {"target": {"kind": "process"}}

    def submit(self, sample_id: int, request: Request) -> None:
        self._waiting.append((sample_id, request))
        self._send()

    def poll(self, timeout_seconds: float) -> list[SampleEvent]:
        events, said = [], []
        with suppress(Empty):
            said.append(self._said.get(timeout=timeout_seconds))
            while True:
                said.append(self._said.get_nowait())
        for at_ns, fields in said:
            sample = fields["id"]
            if sample not in self._sent:
                continue  # cancelled
            first_ns = None if sample in self._begun else at_ns
            self._begun.add(sample)
            if "error" in fields or "end" in fields:
                self._sent.remove(sample)
                self._begun.remove(sample)
            events.append(
                SampleEvent(
                    sample,
                    (),
                    fields.get("end"),
                    at_ns,
                    first_ns=first_ns if "error" not in fields else None,
                    output_tokens=fields.get("tokens_out"),
                    input_tokens=fields.get("tokens_in"),
                    error=fields.get("error"),
                    text=fields.get("text", ""),
                )
            )
        self._send()
        return events

    def state(self) -> ReplicaState:
        return ReplicaState(in_flight=len(self._waiting) + len(self._sent), waiting=len(self._waiting))

    def replicas(self) -> list[ReplicaReading]:
        return []

    def outcome(self, since_ns: int) -> Mapping[str, Any]:
        return {}

    def withdraw(self) -> list[int]:
        waiting, self._waiting = self._waiting, deque()
        return [sample for sample, _ in waiting]

    def cancel_all(self) -> list[SampleEvent]:
        self._waiting.clear()
        self._sent.clear()
        self._begun.clear()
        return []

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _send(self) -> None:
        while self._waiting and len(self._sent) < CONNECTIONS:
            sample, request = self._waiting.popleft()
            assert isinstance(request.prompt, str)
            self._sent.add(sample)
            asked = {"id": sample, "prompt": request.prompt, "max_tokens": request.max_tokens}
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._said.put((time.monotonic_ns(), json.loads(line)))


class ProcessBackend:
    """Knows the name of the model and how many requests may be sent at once, and nothing else."""

    def served(self) -> ServedModel:
        return ServedModel("words-1", None, CONNECTIONS, prompts="text")

    def tokenizer(self) -> Tokenizer | None:
        return None

    def facts(self) -> Mapping[str, Any]:
        return {}

    @contextmanager
    def load(self) -> Iterator[ProcessTarget]:
        target = ProcessTarget()
        try:
            yield target
        finally:
            target.close()


def scenario(prepared: Prepared, config: RunConfig, target: Target, progress: Progress) -> Path:
    return run_scenario(config, prepared.data_set, target, prepared.facts(), progress, gate=prepared.gate)


def soak(prepared: Prepared, config: RunConfig, target: Target, progress: Progress) -> Path:
    return run_soak(prepared, config, target, progress)


def run(tmp_path: Path, test: Test = scenario, prompt: str = "three short words", **settings: Any) -> Run:
    rows = [{"prompt": f"{prompt} {row}", "max_tokens": 4 + row % 5} for row in range(40)]
    prompts = write_lines(tmp_path / "prompts.jsonl", *rows)
    config = RunConfig(
        **{"model": "words-1", "prompts": prompts, "out": tmp_path / "runs", "warm_up_seconds": 0.2} | settings
    )
    _, path = measure_on(ProcessBackend(), config, test, Progress(quiet=True))
    assert path is not None
    return read_run(path)


@pytest.mark.parametrize(
    "settings",
    [
        {"min_duration_seconds": 0.0},
        {"scenario": "server", "rate": 40.0, "samples": 30},
        {"scenario": "singlestream", "samples": 10},
    ],
)
def test_every_scenario_measures_a_target_that_answers_in_text(tmp_path: Path, settings: dict[str, Any]) -> None:
    finished = run(tmp_path, **settings)
    assert finished.verdict is Verdict.MEASURED, finished.reasons
    result = finished.result
    assert result["model"] == "words-1" and result["weights"] is None and "memory_plan" not in result
    done = finished.requests.to_pylist()
    assert result["samples_completed"] == len(done) == settings.get("samples", 40)
    assert all(row["input_tokens"] == 4 and row["finish_reason"] == "length" for row in done)
    assert all(row["output_tokens"] == 4 + row["sample_index"] % 5 for row in done)
    assert result["input_tokens"] == 4 * len(done) and result["preemptions"] is None
    assert all(row["first_token_seconds"] < row["last_token_seconds"] for row in done)
    for row in finished.series.to_pylist():
        assert row["pages"] is None and row["in_flight"] is not None
    assert [page.name for page in write_reports(finished.path, movable=False)]


def test_a_sample_that_the_target_fails_is_failed_alone(tmp_path: Path) -> None:
    rows = [{"prompt": "fail" if row == 3 else "one two", "max_tokens": 4} for row in range(10)]
    prompts = write_lines(tmp_path / "some.jsonl", *rows)
    finished = run(tmp_path, prompts=prompts, min_duration_seconds=0.0)
    assert finished.verdict is Verdict.INVALID
    assert [reason["code"] for reason in finished.reasons] == ["FAILED_SAMPLES"]
    assert finished.result["samples_completed"] == 9
    assert [row["error"] for row in finished.requests.to_pylist() if row["sample_index"] == 3] == [
        "the server refuses this prompt"
    ]


def test_a_soak_keeps_as_many_samples_outstanding_as_the_target_runs_at_once_and_some_more(tmp_path: Path) -> None:
    finished = run(tmp_path, soak, min_duration_seconds=2.5)
    assert finished.result["soak"]["population"] == CONNECTIONS + 16
    assert finished.result["soak"]["settings"]["model"] == "words-1"
    assert finished.result["samples_completed"] > 20
    assert finished.result["output_tokens_per_second"] > 0


def test_what_needs_token_ids_is_refused(tmp_path: Path) -> None:
    for settings, message in (
        ({"mode": "accuracy"}, "mode: needs token ids, and words-1 is served as text"),
        ({"compliance": "TEST06"}, "compliance: needs token ids"),
        ({"text": True}, "text: needs token ids"),
        ({"prompts": None}, "words-1 is served as text, so it needs prompts; give a file with --prompts, or its "),
    ):
        with pytest.raises(UsageError, match=message):
            run(tmp_path, **settings)


def test_answers_are_text_where_the_target_gives_no_ids(tmp_path: Path) -> None:
    with ProcessBackend().load() as target:
        lines = dict(answer(target, None, [Request("a b", max_tokens=3), Request("c", max_tokens=2)]))
    first, second = (json.loads(lines[index]) for index in range(2))
    assert first == {"index": 0, "token_ids": None, "text": "a b a ", "finish_reason": "length"}
    assert second["text"] == "c c "


def test_prompts_may_be_chats(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]}
    file = write_lines(tmp_path / "chats.jsonl", chat, {"prompt": "plain", "max_tokens": 9})
    data_set = load_texts(file, encode=lambda text: [0] * len(text.split()), default_max_tokens=5)
    one, other = data_set.requests
    assert isinstance(one, ChatRequest)
    assert one.messages == (("system", "Be brief."), ("user", "Hello")) and one.prompt == "Be brief.\nHello"
    assert other == Request("plain", max_tokens=9)
    assert not data_set.prompts_counted and data_set.output_limits.tolist() == [5, 9]
    for wrong, message in (
        ({"prompt_token_ids": [1]}, "the target takes text, not token ids; give prompt or messages"),
        ({"messages": [{"role": "user"}]}, r'messages is a list .*; it must be a list of {"role": text'),
        ({"messages": [], "prompt": "a"}, "messages is an empty list"),
    ):
        with pytest.raises(DatasetError, match=message):
            load_texts(write_lines(tmp_path / "wrong.jsonl", wrong), encode=None, default_max_tokens=5)
