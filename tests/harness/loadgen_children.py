"""Runs against targets of known answers, in processes of their own: they take signals over, or are killed."""

import json
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from queueing import QueueingTarget

from cli_support import ENVIRONMENT, TIMEOUT_SECONDS
from forks import Process, forked
from megatoken.config import RunConfig
from megatoken.datasets.lengths import load_lengths
from megatoken.engine.request import Request
from megatoken.engine.state import ReplicaState
from megatoken.errors import MegatokenError, RequestError
from megatoken.hardware.telemetry import Telemetry
from megatoken.harness import stop
from megatoken.harness.progress import Progress
from megatoken.harness.run import run_scenario
from megatoken.runs.reasons import reason
from megatoken.targets import ReplicaReading, SampleEvent
from short_rounds import shorten_rounds


def started(name: str, **arguments: Any) -> AbstractContextManager[Process]:
    """A function of this module in a process of its own, which does not outlive the block."""
    return forked(__file__, name, json.dumps(arguments), environment=ENVIRONMENT)


def wait_until_running(process: Process, out: Path, folder: str = "2*/mlperf") -> None:
    """Until LoadGen has begun to write in ``folder``."""
    while not any(out.glob(f"{folder}/mlperf_log_detail.txt")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def call(name: str, **arguments: Any) -> Any:
    """Runs a function of this module in a process of its own and returns its answer."""
    with started(name, **arguments) as process:
        out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 0, err
    return json.loads(out)


class PacedTarget:
    """Answers ``per_poll`` samples a poll, each with as many tokens as it asks for."""

    def __init__(
        self,
        per_poll: int = 50,
        pause_seconds: float = 0.0005,
        refuse_samples: Sequence[int] = (),
        crash_at_sample: int | None = None,
        hang_at_sample: int | None = None,
    ) -> None:
        self._per_poll = per_poll
        self._pause_seconds = pause_seconds
        self._refuse_samples = refuse_samples
        self._crash_at_sample = crash_at_sample
        self._hang_at_sample = hang_at_sample
        self._queue: deque[tuple[int, Request]] = deque()
        self._processed = self._output_tokens = self._most_rows = 0

    def facts(self) -> dict[str, Any]:
        return {"memory_plan": {"pages": 9, "page_size": 10**6, "max_sequences": 10**6}}

    def submit(self, sample_id: int, request: Request) -> None:
        if sample_id in self._refuse_samples:
            raise RequestError("not this one")
        self._queue.append((sample_id, request))

    def poll(self, timeout_seconds: float) -> list[SampleEvent]:
        time.sleep(self._pause_seconds)
        events, before = [], self._processed
        for _ in range(min(self._per_poll, len(self._queue))):
            sample_id, request = self._queue.popleft()
            if sample_id == self._crash_at_sample:
                raise MegatokenError("the target fell over")
            if sample_id == self._hang_at_sample:
                time.sleep(1000)
            self._processed += len(request.prompt) + request.max_tokens - 1
            now_ns = time.monotonic_ns()
            self._output_tokens += request.max_tokens
            events.append(SampleEvent(sample_id, tuple(range(request.max_tokens - 1)), None, now_ns))
            events.append(SampleEvent(sample_id, (7,), "length", now_ns + 1))
        self._most_rows = max(self._most_rows, self._processed - before)
        return events

    def state(self) -> ReplicaState:
        waiting = len(self._queue)
        return ReplicaState(
            in_flight=waiting,
            waiting=waiting,
            batched_tokens=self._per_poll,
            max_batched_tokens=self._most_rows,
            pages_free=5,
            pages=9,
            processed_tokens=self._processed,
            output_tokens=self._output_tokens,
        )

    def replicas(self) -> list[ReplicaReading]:
        return [ReplicaReading(None, 0, self.state(), Telemetry(power_watts=250.0))]

    def outcome(self, since_ns: int) -> dict[str, Any]:
        return {}

    def cancel_all(self) -> list[SampleEvent]:
        self._queue.clear()
        return []

    def close(self) -> None:
        self.cancel_all()


def scenario(
    out: str,
    lengths: str,
    config: dict[str, Any],
    rules_seconds: float | None = None,
    grace_seconds: float = stop.GRACE_SECONDS,
    queueing: tuple[int, float] | None = None,
    **target: Any,
) -> object:
    """A whole run against a ``PacedTarget`` or, with ``queueing``, a ``QueueingTarget``.

    With ``rules_seconds``, under rules of that duration.
    """
    stop.GRACE_SECONDS = grace_seconds
    data_set = load_lengths(Path(lengths), vocabulary_size=100, max_length=1000)
    if rules_seconds is not None:
        shorten_rounds(pytest.MonkeyPatch(), len(data_set.requests), rules_seconds)
    settings = RunConfig(**{"out": out, "warm_up_seconds": 0.05, "precision": "bf16", **config})
    serving = QueueingTarget(*queueing) if queueing else PacedTarget(**target)
    facts = {"model": "paced", "precision": "bf16", "weights": "paced", "memory_plan": {"pages": 8}}
    facts["notes"] = [reason("RULES_SCOPE", not_judged="model and data set")] if settings.rules else []
    try:
        path = run_scenario(settings, data_set, serving, facts, Progress(quiet=True))
    except MegatokenError as error:
        return {"error": str(error)}
    return {"path": str(path)}


if __name__ == "__main__":
    answer = globals()[sys.argv[1]](**json.loads(sys.argv[2]))
    print(json.dumps(answer, default=np.ndarray.tolist))
