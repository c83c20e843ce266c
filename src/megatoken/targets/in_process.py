"""The engine of this process as a target: every poll runs one step."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from megatoken.engine.request import Request
from megatoken.engine.state import ReplicaState
from megatoken.hardware.telemetry import GpuTelemetry, Telemetry
from megatoken.targets import ReplicaReading, SampleEvent

if TYPE_CHECKING:
    from megatoken.engine import Engine
    from megatoken.engine.simulated import SimulatedEngine


class InProcessTarget:
    """Drives ``engine``; nobody else may submit to it meanwhile."""

    def __init__(self, engine: Engine | SimulatedEngine) -> None:
        self._engine = engine
        self._sensors = GpuTelemetry.open(engine.gpu_uuids)
        self._samples: dict[int, int] = {}  # ticket -> sample id
        self._unstarted: deque[int] = deque()  # tickets that were never in a step, oldest first
        self._started_ns: dict[int, int] = {}  # ticket -> until its first event

    def facts(self) -> dict[str, Any]:
        """The sizes the engine took, and what it runs with."""
        return {"memory_plan": asdict(self._engine.memory_plan), "target": self._engine.describe()}

    def submit(self, sample_id: int, request: Request) -> None:
        """Queues a sample. Raises RequestError or CapacityError if it can never be served."""
        ticket = self._engine.submit(request)
        self._samples[ticket] = sample_id
        self._unstarted.append(ticket)

    def poll(self, timeout_seconds: float) -> list[SampleEvent]:
        """Runs one step, however long it takes, and reports its tokens at the time it ended."""
        began_ns = time.monotonic_ns()
        events = self._engine.step()
        now_ns = time.monotonic_ns()
        self._note_started(began_ns)
        return [
            SampleEvent(
                self._samples[event.ticket] if event.finish_reason is None else self._samples.pop(event.ticket),
                event.token_ids,
                event.finish_reason,
                now_ns,
                self._started_ns.pop(event.ticket, None),
            )
            for event in events
            if event.ticket in self._samples  # not of what was withdrawn
        ]

    def state(self) -> ReplicaState:
        """The engine's state now."""
        return self._engine.state()

    def replicas(self) -> list[ReplicaReading]:
        """The engine's state now, and its GPU's sensors; of a CPU nothing is known."""
        telemetry = self._sensors.read() if self._sensors else Telemetry()
        return [ReplicaReading(None, 0, self._engine.state(), telemetry)]

    def outcome(self, since_ns: int) -> dict[str, Any]:
        """An engine in this process is lost only together with it."""
        return {}

    def withdraw(self) -> list[int]:
        """Drops what was never in a step; the ids of those samples."""
        tickets = list(self._unstarted)
        self._unstarted.clear()
        for ticket in tickets:
            self._engine.cancel(ticket)
        return [self._samples.pop(ticket) for ticket in tickets]

    def cancel_all(self) -> None:
        """Drops every sample in flight and steps until the engine has nothing left to tell of them."""
        for ticket in self._samples:
            self._engine.cancel(ticket)
        while self._engine.busy:
            self._engine.step()
        self._samples.clear()
        self._unstarted.clear()
        self._started_ns.clear()

    def _note_started(self, began_ns: int) -> None:
        """Finds out whose first rows the step had: the engine admits in order, and after a preemption nobody new.

        So those that wait are the newest, and preempted ones among them are older than all that never ran.
        """
        waiting = self._engine.state().waiting
        while len(self._unstarted) > waiting:
            self._started_ns[self._unstarted.popleft()] = began_ns

    def close(self) -> None:
        """Frees pages and queue; the engine itself belongs to the caller."""
        self.cancel_all()
