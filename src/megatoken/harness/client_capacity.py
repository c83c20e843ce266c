"""The rate of the client alone: LoadGen and the measurement loop with a target that answers at once."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatoken.datasets.requests import Dataset
from megatoken.engine.request import Request
from megatoken.engine.state import ReplicaState
from megatoken.harness.loadgen import LoadGenTest, TestSettings
from megatoken.harness.measurement import Measurement
from megatoken.harness.progress import Progress
from megatoken.mlperf.rules import ClientCapacity
from megatoken.runs.tables import SampleRow, SeriesRow
from megatoken.targets import ReplicaReading, SampleEvent

SAMPLES = 20_000
OFFERED_RATE = 1e6  # so high that every sample is due at once
MAX_SECONDS = 1.0


def measure_client_capacity(settings: TestSettings, data_set: Dataset) -> ClientCapacity:
    """Runs LoadGen's Server scenario for at most a second against a target that answers at once.

    ``settings``: of the run to come; its benchmark and seeds are used.
    """
    rows = len(data_set.requests)
    test_settings = TestSettings(
        "server", "performance", settings.model, SAMPLES, SAMPLES, 0.0, OFFERED_RATE, settings.seeds
    )
    record = _Counts()
    with (
        tempfile.TemporaryDirectory(prefix="megatoken-client-") as folder,
        LoadGenTest(test_settings, Path(folder)) as test,
    ):
        target = InstantTarget()
        measurement = Measurement(
            test, test_settings, np.arange(SAMPLES) % rows, data_set, target, record, Progress(quiet=True)
        )
        began = time.monotonic()
        while not measurement.over and time.monotonic() - began < MAX_SECONDS:
            measurement.step()
        seconds = measurement.elapsed_seconds()
    return ClientCapacity(record.samples / seconds, record.output_tokens / seconds)


class InstantTarget:
    """Answers every sample at the next poll, in events of one token."""

    def __init__(self) -> None:
        self._submitted: list[tuple[int, int]] = []

    def facts(self) -> Mapping[str, Any]:
        """No facts."""
        return {}

    def submit(self, sample_id: int, request: Request) -> None:
        """Takes any sample."""
        self._submitted.append((sample_id, request.max_tokens))

    def poll(self, timeout_seconds: float) -> list[SampleEvent]:
        """Answers everything that was submitted."""
        now_ns = time.monotonic_ns()
        submitted, self._submitted = self._submitted, []
        events = []
        for sample_id, tokens in submitted:
            events += [SampleEvent(sample_id, (0,), None, now_ns)] * (tokens - 1)
            events.append(SampleEvent(sample_id, (0,), "length", now_ns))
        return events

    def state(self) -> ReplicaState:
        """Nothing waits."""
        return ReplicaState(in_flight=len(self._submitted))

    def replicas(self) -> list[ReplicaReading]:
        """No replicas."""
        return []

    def outcome(self, since_ns: int) -> dict[str, Any]:
        """Nothing can be lost."""
        return {}

    def withdraw(self) -> list[int]:
        """Nothing waits."""
        return []

    def cancel_all(self) -> list[SampleEvent]:
        """Drops what was submitted."""
        self._submitted.clear()
        return []

    def close(self) -> None:
        """Does nothing."""


class _Counts:
    """A record that only counts samples and tokens."""

    def __init__(self) -> None:
        self.samples = self.output_tokens = 0

    def add_samples(self, rows: Sequence[SampleRow]) -> None:
        self.samples += len(rows)
        self.output_tokens += sum(row.output_tokens for row in rows)

    def add_series(self, row: SeriesRow) -> None:
        pass

    def add_token_times(self, sample_id: int, times_ns: NDArray[np.int64]) -> None:
        pass

    def add_facts(self, facts: Mapping[str, Any]) -> None:
        pass
