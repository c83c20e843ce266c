"""Targets of known behaviour: simulated in no time, and one that queues in real time."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from heapq import heapreplace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatoken.analysis.statistics import Samples
from megatoken.engine.request import Request
from megatoken.engine.state import ReplicaState
from megatoken.hardware.telemetry import Telemetry
from megatoken.harness.rate_finder import Outcome, Probe
from megatoken.harness.rate_search import Try
from megatoken.harness.saturation import Saturation, SaturationWatch
from megatoken.mlperf.benchmarks import LatencyLimits
from megatoken.mlperf.draws import PoissonSchedule
from megatoken.mlperf.latencies import latencies
from megatoken.runs.tables import SampleRow, to_table
from megatoken.targets import ReplicaReading, SampleEvent

Floats = NDArray[np.float64]
Serve = Callable[[Floats], tuple[Floats, Floats, NDArray[np.int64]]]  # due -> first token, last token, tokens
LOOK_SECONDS = 0.25


def queue_of(servers: int, service_seconds: float) -> Serve:
    """First come, first served; the first token half way through the service, the last of two at its end."""

    def serve(due: Floats) -> tuple[Floats, Floats, NDArray[np.int64]]:
        free = [0.0] * servers  # a heap
        end = np.empty(len(due))
        for sample, at in enumerate(due.tolist()):
            end[sample] = max(free[0], at) + service_seconds
            heapreplace(free, end[sample])
        return end - service_seconds / 2, end, np.full(len(due), 2)

    return serve


@dataclass(frozen=True)
class Batching:
    """An engine in steps: a token for every resident, prompts in what is left of the rows; more rows take longer."""

    step_seconds: float = 0.01
    row_seconds: float = 2e-4
    rows: int = 128
    prompt_tokens: int = 60
    answer_tokens: tuple[int, ...] = (10, 20, 45)

    def __call__(self, due: Floats) -> tuple[Floats, Floats, NDArray[np.int64]]:
        tokens = np.array([self.answer_tokens[sample % len(self.answer_tokens)] for sample in range(len(due))])
        first, last = np.empty(len(due)), np.empty(len(due))
        waiting: deque[list[int]] = deque()
        residents: dict[int, int] = {}  # sample -> tokens to come
        now, nxt = 0.0, 0
        while nxt < len(due) or waiting or residents:
            if not waiting and not residents:
                now = max(now, due[nxt])
            while nxt < len(due) and due[nxt] <= now:
                waiting.append([nxt, self.prompt_tokens])
                nxt += 1
            rows, begun = len(residents), []
            while waiting and rows < self.rows:
                taken = min(waiting[0][1], self.rows - rows)
                waiting[0][1] -= taken
                rows += taken
                if not waiting[0][1]:
                    begun.append(waiting.popleft()[0])
            now += self.step_seconds + self.row_seconds * rows
            for sample in list(residents):
                residents[sample] -= 1
                if not residents[sample]:
                    del residents[sample]
                    last[sample] = now
            for sample in begun:
                first[sample] = now
                residents[sample] = int(tokens[sample]) - 1
        return first, last, tokens


class Simulated:
    """A target in simulated time, for a ``RateFinder``."""

    def __init__(
        self, serve: Serve, limits: LatencyLimits, seed: int, full_seconds: float, stalled_try: int | None = None
    ) -> None:
        """``stalled_try``: number of the one measurement, from 0, whose second half comes 10 s late."""
        self._serve = serve
        self._stalled_try = stalled_try
        self.limits = limits
        self._seed = seed
        self._full_seconds = full_seconds
        self.seconds_of_probes: list[tuple[bool, float]] = []  # full length?, simulated seconds until it ended

    def full_length(self, rate: float) -> tuple[int, float]:
        return PoissonSchedule(self._seed, rate).queries_until(self._full_seconds), self._full_seconds

    def measure(self, tried: Try, probe: Probe) -> Outcome:
        due, first, last, tokens = self._run(probe.rate, probe.seconds or self._full_seconds)
        if len(self.seconds_of_probes) == self._stalled_try:
            late = np.where(due > due[-1] / 2, 10.0, 0.0)
            first, last = first + late, last + late
        saturation, ended = replay(probe.watch, due, first, last, tokens)
        self.seconds_of_probes.append((probe.seconds is None, ended))
        broken = ()
        if saturation is None and probe.seconds is None and not self._met(due, first, last, tokens):
            broken = ("LATENCIES",)
        return Outcome(f"{len(self.seconds_of_probes)}", saturation, broken)

    def valid(self, rate: float) -> bool:
        """Whether a run of full length keeps the limits, by LoadGen's rules."""
        return self._met(*self._run(rate, self._full_seconds))

    def highest_valid_rate(self, low: float, high: float) -> float:
        assert self.valid(low) and not self.valid(high)
        while high > 1.0005 * low:
            middle = (low + high) / 2
            low, high = (middle, high) if self.valid(middle) else (low, middle)
        return low

    def _run(self, rate: float, seconds: float) -> tuple[Floats, Floats, Floats, NDArray[np.int64]]:
        schedule = PoissonSchedule(self._seed, rate)
        due = np.array([schedule.due_ns(query) / 1e9 for query in range(schedule.queries_until(seconds))])
        return due, *self._serve(due)

    def _met(self, due: Floats, first: Floats, last: Floats, tokens: NDArray[np.int64]) -> bool:
        found = latencies(Samples.of(to_table(SampleRow, rows_of(due, first, last, tokens))), self.limits)
        return found is not None and found.met(self.limits)


def rows_of(due: Floats, first: Floats, last: Floats, tokens: NDArray[np.int64]) -> list[SampleRow]:
    columns = zip(due.tolist(), first.tolist(), last.tolist(), tokens.tolist(), strict=True)
    return [
        SampleRow(number, 0, at, at, begun, ended, 1, count, "length", "here")
        for number, (at, begun, ended, count) in enumerate(columns)
    ]


def replay(
    watch: SaturationWatch, due: Floats, first: Floats, last: Floats, tokens: NDArray[np.int64]
) -> tuple[Saturation | None, float]:
    """Shows a watch what a run would have shown it; what it found, and when."""
    rows = rows_of(due, first, last, tokens)
    order = np.argsort(last)
    added, now = 0, 0.0
    while added < len(rows):
        now += LOOK_SECONDS
        until = int(np.searchsorted(last[order], now, side="right"))
        watch.add_samples([rows[sample] for sample in order[added:until]])
        added = until
        unended = (due <= now) & (last > now)
        begun = np.where(first <= now, first, np.nan)
        found = watch.look(now, due[unended], begun[unended])
        if found is not None:
            return found, now
    return None, now


class QueueingTarget:
    """``servers`` that take ``service_seconds`` for each sample, first come, first served, in real time."""

    def __init__(self, servers: int, service_seconds: float) -> None:
        self._service_ns = round(service_seconds * 1e9)
        self._free_ns = [0] * servers
        self._coming: deque[tuple[int, int, int]] = deque()  # start, end, sample: in order of their ends
        self._begun: deque[tuple[int, int]] = deque()
        self._processed = 0

    def facts(self) -> Mapping[str, Any]:
        return {}

    def submit(self, sample_id: int, request: Request) -> None:
        server = min(range(len(self._free_ns)), key=self._free_ns.__getitem__)
        start_ns = max(self._free_ns[server], time.monotonic_ns())
        self._free_ns[server] = start_ns + self._service_ns
        self._begun.append((start_ns + self._service_ns // 2, sample_id))
        self._coming.append((start_ns, start_ns + self._service_ns, sample_id))
        self._processed += len(request.prompt)

    def poll(self, timeout_seconds: float) -> list[SampleEvent]:
        now_ns = time.monotonic_ns()
        nexts = [queue[0][index] for queue, index in ((self._begun, 0), (self._coming, 1)) if queue]
        if nexts and min(nexts) > now_ns:
            time.sleep(min(timeout_seconds, (min(nexts) - now_ns) / 1e9))
            now_ns = time.monotonic_ns()
        events = []
        while self._begun and self._begun[0][0] <= now_ns:
            first_ns, sample = self._begun.popleft()
            self._processed += 1
            events.append(SampleEvent(sample, (1,), None, now_ns, first_ns - self._service_ns // 2))
        while self._coming and self._coming[0][1] <= now_ns:
            self._processed += 1
            sample = self._coming.popleft()[2]
            events.append(SampleEvent(sample, (2,), "length", now_ns))
        return events

    def state(self) -> ReplicaState:
        waiting = sum(start > time.monotonic_ns() for start, _, _ in self._coming) if len(self._coming) < 2000 else 2000
        return ReplicaState(
            in_flight=len(self._coming),
            waiting=waiting,
            processed_tokens=self._processed,
            output_tokens=self._processed,
        )

    def replicas(self) -> list[ReplicaReading]:
        return [ReplicaReading(None, 0, self.state(), Telemetry())]

    def outcome(self, since_ns: int) -> dict[str, Any]:
        return {}

    def cancel_all(self) -> list[SampleEvent]:
        self._coming.clear()
        self._begun.clear()
        self._free_ns = [0] * len(self._free_ns)
        return []

    def close(self) -> None:
        self.cancel_all()
