"""Servers over HTTP as a target: shares samples out to client processes and endpoints, and takes their reports."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import psutil

from megatoken.engine.request import Request
from megatoken.engine.state import ReplicaState
from megatoken.errors import MegatokenError
from megatoken.framing import FrameReader, first_message
from megatoken.hardware.telemetry import Telemetry
from megatoken.runs.reasons import Reason
from megatoken.targets import HasFileno, ReplicaReading, SampleEvent
from megatoken.targets.endpoint import wire
from megatoken.targets.endpoint.bodies import Asking, body_of
from megatoken.targets.endpoint.failures import Failures, ServerEnd
from megatoken.targets.endpoint.observations import Observations
from megatoken.targets.endpoint.wire import ClientSettings, Ended, Failed, Task, pack, unpack

TEXTS_AT_FIRST, TEXTS_LATER = 256, 64  # the first answers keep their text, later every so many
RECEIVE_BYTES = 1 << 20
END_SECONDS = 2.0
SWITCH_SECONDS = 0.0002  # Python's 5 ms would hold up a request that is due while a thread writes the run folder
FEWEST_LOOKS = 20  # of a second: in a shorter run one late look at the clock would be a large share
_KNOWN = {"in_flight", "waiting", "output_tokens", "processed_tokens", "replicas"}  # fields that a client knows
_encode = json.JSONEncoder(ensure_ascii=False).encode


@dataclass(slots=True)
class _Sample:
    sample_id: int
    body: bytes
    max_tokens: int
    forced: bool
    endpoint: int = -1
    worker: int = -1
    moved: bool = False
    seen_tokens: int = 0  # of the answer under way, which the endpoint's count has already


@dataclass(slots=True)
class _Loss:
    """A time in which an endpoint got no samples."""

    endpoint: str
    lost_ns: int
    cause: str
    back_ns: int | None = None
    moved: int = 0


@dataclass(slots=True)
class _Endpoint:
    name: str
    in_flight: int = 0
    output_tokens: int = 0
    input_tokens: int = 0
    heard_ns: int = 0
    loss: _Loss | None = None  # while it is lost
    metrics: dict[str, float] = field(default_factory=dict)


class _Worker:
    """A client process."""

    def __init__(self, settings: ClientSettings) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "megatoken.targets.endpoint.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self.socket.sendall(first_message(settings))
        self.reader = FrameReader()
        self.in_flight = 0
        self.tasks: list[tuple[Any, ...]] = []
        self.core_wait_share: float | None = None
        self.reset_load()

    def reset_load(self) -> None:
        """Sets back how busy the process was."""
        self.busy_share = self.loop_lag_seconds = 0.0  # the worst second
        self.looks = self.late_looks = 0  # at the clock of its loop

    def flush(self) -> None:
        """Sends the tasks that were collected."""
        if self.tasks:
            self.send(wire.SEND, self.tasks)
            self.tasks = []

    def send(self, kind: int, value: Any) -> None:
        """Sends a message. Raises MegatokenError if the process has ended."""
        try:
            self.socket.sendall(pack(kind, value))
        except OSError:
            raise self.ended() from None

    def ended(self) -> MegatokenError:
        """The error that it has ended."""
        return MegatokenError(f"a client process ended with code {self.process.wait()}; its messages above say why")

    def close(self) -> None:
        """Ends the process."""
        self.socket.close()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class EndpointTarget:
    """Drives the servers at ``settings.addresses`` as one system."""

    def __init__(
        self,
        settings: ClientSettings,
        asking: Asking,
        facts: Mapping[str, Any],
        *,
        processes: int,
        max_in_flight: int,
        observations: Observations,
        self_test: Mapping[str, float] | None = None,
        ids_of: Callable[[str, str], tuple[int, ...]] | None = None,
        server_end: Callable[[], ServerEnd | None] = lambda: None,
    ) -> None:
        """Starts the client processes.

        Args:
            settings: of each process.
            asking: how requests are put.
            facts: fields of ``result.json`` that stay the same.
            processes: how many client processes.
            max_in_flight: requests that are open at once, over all processes.
            observations: collects what the answers show.
            self_test: what one client process can hold on this machine, for ``result.json``.
            ids_of: token ids of an answer's text and finish reason, for a server that returns none; None: not wanted.
            server_end: how the server ended, if the run started it and it has ended.
        """
        self._settings = settings
        self._asking = asking
        self._facts = facts
        self._most = max_in_flight
        self._observations = observations
        self._self_test = self_test
        self._workers = [_Worker(settings if not at else _without_metrics(settings)) for at in range(processes)]
        self._endpoints = [_Endpoint(address.name) for address in settings.addresses]
        self._queue: deque[_Sample] = deque()
        self._open: dict[int, _Sample] = {}  # by ticket
        self._next_ticket = 0
        self._wake: HasFileno | None = None
        self._losses: list[_Loss] = []
        self._retries = 0
        self._failures = Failures(server_end)
        self._ids_of = ids_of
        self._every_text = ids_of is not None

    def facts(self) -> Mapping[str, Any]:
        """What the server says of itself, and how it is asked."""
        return self._facts

    def wake_on(self, source: HasFileno) -> None:
        """From now on ``poll`` also returns when ``source`` can be read."""
        self._wake = source

    def keep_every_text(self) -> None:
        """From now on every answer comes with its text."""
        self._every_text = True

    def submit(self, sample_id: int, request: Request) -> None:
        """Queues a sample. Raises RequestError if the route does not take its prompt."""
        asking, settings = self._asking, self._settings
        content = _encode(body_of(request, settings.api, asking, stream=settings.stream)).encode()
        forced = request.ignore_end_token and asking.forces
        self._queue.append(_Sample(sample_id, content, request.max_tokens, forced))
        if len(self._open) < self._most:
            self._dispatch()

    def poll(self, timeout_seconds: float) -> list[SampleEvent]:
        """Sends what may be sent and waits for reports. Raises MegatokenError when a client process has ended."""
        self._dispatch()
        for worker in self._workers:
            worker.flush()
        events: list[SampleEvent] = []
        sources: list[Any] = [worker.socket for worker in self._workers]
        wake = [self._wake] if self._wake is not None else []
        ready = select.select(sources + wake, [], [], timeout_seconds)[0]
        for worker in self._workers:
            if worker.socket in ready:
                data = worker.socket.recv(RECEIVE_BYTES)
                if not data:
                    raise worker.ended()
                for kind, value in unpack(worker.reader, data):
                    self._take(worker, kind, value, events)
        return events

    def state(self) -> ReplicaState:
        """What is under way; ``waiting`` has not been sent."""
        ends = self._endpoints
        return ReplicaState(
            in_flight=len(self._queue) + len(self._open),
            waiting=len(self._queue),
            output_tokens=sum(one.output_tokens for one in ends),
            processed_tokens=sum(one.output_tokens + one.input_tokens for one in ends),
            replicas=len(ends),
        )

    def replicas(self) -> list[ReplicaReading]:
        """Each endpoint, with the server's own metrics where it has them; the first also has what was not sent."""
        return [self._reading(at, one) for at, one in enumerate(self._endpoints)]

    def outcome(self, since_ns: int) -> dict[str, Any]:
        """Endpoints that were lost since then, what each did, and how busy the client was."""
        lost = [
            {
                "endpoint": one.endpoint,
                "at_seconds": (one.lost_ns - since_ns) / 1e9,
                "back_at_seconds": None if one.back_ns is None else (one.back_ns - since_ns) / 1e9,
                "cause": one.cause,
                "samples_moved": one.moved,
            }
            for one in self._losses
        ]
        waits = [worker.core_wait_share for worker in self._workers if worker.core_wait_share is not None]
        return {
            "endpoints": {
                "count": len(self._endpoints),
                "lost": lost,
                "requests_repeated": self._retries,
                "failed": self._failures.to_document(since_ns),
            },
            "client": {
                "processes": len(self._workers),
                "busy_share": max(worker.busy_share for worker in self._workers),
                "loop_lag_seconds": max(worker.loop_lag_seconds for worker in self._workers),
                "late_share": max(worker.late_looks / max(FEWEST_LOOKS, worker.looks) for worker in self._workers),
                "core_wait_share": max(waits, default=None),
                "cores": len(os.sched_getaffinity(0)),
                "self_test": self._self_test,
            },
        }

    def findings(self, since_ns: int) -> list[Reason]:
        """What the answers since then showed of the servers."""
        return self._observations.findings(since_ns)

    def begin(self) -> None:
        """A test begins: what was observed of the client before does not count."""
        sys.setswitchinterval(SWITCH_SECONDS)
        self._retries = 0
        self._failures.begin()
        for worker in self._workers:
            worker.reset_load()
        self._losses = [one for one in self._losses if one.back_ns is None]
        for one in self._losses:
            one.moved = 0

    def withdraw(self) -> list[int]:
        """Drops what was not sent; returns the ids."""
        queue, self._queue = self._queue, deque()
        return [sample.sample_id for sample in queue]

    def cancel_all(self) -> None:
        """Closes the connections of all open requests."""
        self._queue.clear()
        for at, worker in enumerate(self._workers):
            worker.flush()
            worker.send(wire.CANCEL, [ticket for ticket, sample in self._open.items() if sample.worker == at])
            worker.in_flight = 0
        self._open.clear()
        for one in self._endpoints:
            one.in_flight = 0

    def cpu_seconds(self) -> float:
        """User and system time of the client processes so far."""
        return sum(sum(psutil.Process(worker.process.pid).cpu_times()[:2]) for worker in self._workers)

    def close(self) -> None:
        """Ends the client processes."""
        for worker in self._workers:
            worker.close()

    def _dispatch(self) -> None:
        while self._queue and len(self._open) < self._most:
            self._send(self._queue.popleft())

    def _send(self, sample: _Sample) -> None:
        """Gives a sample to the endpoint and the process with the fewest."""
        at, worker = 0, 0
        if len(self._endpoints) > 1:
            alive = [one for one, end in enumerate(self._endpoints) if end.loss is None and one != sample.endpoint]
            at = min(alive or range(len(self._endpoints)), key=lambda one: self._endpoints[one].in_flight)
        if len(self._workers) > 1:
            worker = min(range(len(self._workers)), key=lambda one: self._workers[one].in_flight)
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        keep = self._every_text or _observed(ticket)
        sample.endpoint, sample.worker = at, worker
        self._open[ticket] = sample
        self._endpoints[at].in_flight += 1
        self._workers[worker].in_flight += 1
        self._workers[worker].tasks.append(tuple(Task(ticket, at, sample.body, sample.max_tokens, sample.forced, keep)))

    def _take(self, worker: _Worker, kind: int, value: Any, events: list[SampleEvent]) -> None:
        if kind == wire.LOAD:
            busy, lag, looks, late_looks, worker.core_wait_share = value
            worker.busy_share, worker.loop_lag_seconds = max(worker.busy_share, busy), max(worker.loop_lag_seconds, lag)
            worker.looks, worker.late_looks = worker.looks + looks, worker.late_looks + late_looks
        elif kind == wire.METRICS:
            at, metrics = value
            self._endpoints[at].metrics = metrics
        elif kind == wire.BACK:
            end = self._endpoints[value]
            assert end.loss is not None
            end.loss.back_ns, end.loss = time.monotonic_ns(), None
        else:
            for fields in value:
                self._take_event(fields, events)

    def _take_event(self, fields: Sequence[Any], events: list[SampleEvent]) -> None:
        kind, ticket = fields[0], fields[1]
        sample = self._open.get(ticket)
        if sample is None:
            return  # cancelled, or moved to another endpoint
        end = self._endpoints[sample.endpoint]
        if kind == wire.FIRST:
            end.heard_ns = fields[3]
            events.append(
                SampleEvent(
                    sample.sample_id,
                    (),
                    None,
                    fields[3],
                    first_ns=fields[3],
                    sent_ns=None if sample.moved else fields[2],
                )
            )
        elif kind == wire.PROGRESS:
            end.output_tokens += fields[2] - sample.seen_tokens
            sample.seen_tokens = fields[2]
            events.append(SampleEvent(sample.sample_id, (), None, time.monotonic_ns(), output_tokens=fields[2]))
        elif kind == wire.END:
            self._release(ticket, sample)
            events.append(self._ended(sample, end, Ended(*fields)))
        else:
            self._failed(ticket, sample, Failed(*fields), events)

    def _ended(self, sample: _Sample, end: _Endpoint, ended: Ended) -> SampleEvent:
        if self._ids_of is not None:
            ids = self._ids_of(ended.text, ended.finish_reason)
            ended = ended._replace(token_ids=ids, tokens=len(ids))
        end.heard_ns = ended.last_ns
        end.output_tokens += ended.tokens
        end.input_tokens += max(0, ended.input_tokens)
        self._retries += ended.retries
        self._failures.answered()
        self._observations.add(ended if _observed(ended.ticket) else ended._replace(text=""))
        return SampleEvent(
            sample.sample_id,
            ended.token_ids,
            ended.finish_reason,
            ended.last_ns,
            first_ns=ended.first_ns or None,
            output_tokens=ended.tokens,
            node=end.name,
            text=ended.text,
            input_tokens=ended.input_tokens if ended.input_tokens >= 0 else None,
            sent_ns=None if sample.moved else ended.sent_ns,  # when it was sent first is not known
            token_times_ns=np.frombuffer(ended.times, np.int64) if ended.times else None,
            first_characters=ended.first_characters,
        )

    def _failed(self, ticket: int, sample: _Sample, failed: Failed, events: list[SampleEvent]) -> None:
        self._retries += failed.retries
        end = self._endpoints[sample.endpoint]
        others = any(one.loss is None for one in self._endpoints if one is not end)
        self._release(ticket, sample)
        if others and failed.cause in ("connect", "gone"):
            self._lose(end, failed.message, events)
        elif others and failed.cause == "timeout" and self._silent(end):
            self._lose(end, f"silent for {self._settings.timeout_seconds:g} s", events)
        if not (others and failed.cause in ("connect", "gone", "interrupted") and self._move(end, sample)):
            events.append(self._failure(end, sample, failed.message, answered=failed.cause == "answer"))

    def _failure(self, end: _Endpoint, sample: _Sample, message: str, *, answered: bool) -> SampleEvent:
        self._failures.failed(message, answered=answered)
        return SampleEvent(sample.sample_id, (), None, time.monotonic_ns(), node=end.name, error=message)

    def _silent(self, end: _Endpoint) -> bool:
        return time.monotonic_ns() - end.heard_ns > self._settings.timeout_seconds * 1e9

    def _lose(self, end: _Endpoint, cause: str, events: list[SampleEvent]) -> None:
        """Gives no more samples to an endpoint until it answers; those it holds go to the others, once."""
        if end.loss is not None:
            return
        end.loss = _Loss(end.name, time.monotonic_ns(), cause)
        self._losses.append(end.loss)
        at = self._endpoints.index(end)
        self._workers[0].send(wire.PROBE, at)
        for ticket, sample in [(ticket, sample) for ticket, sample in self._open.items() if sample.endpoint == at]:
            self._release(ticket, sample)
            self._workers[sample.worker].send(wire.CANCEL, [ticket])
            if not self._move(end, sample):
                events.append(self._failure(end, sample, f"{end.name}: {cause}", answered=False))

    def _move(self, end: _Endpoint, sample: _Sample) -> bool:
        """Queues a sample for another endpoint, unless it was moved before."""
        if sample.moved:
            return False
        sample.moved = True
        if end.loss is not None:
            end.loss.moved += 1
        self._queue.appendleft(sample)
        return True

    def _release(self, ticket: int, sample: _Sample) -> None:
        del self._open[ticket]
        self._endpoints[sample.endpoint].in_flight -= 1
        self._endpoints[sample.endpoint].output_tokens -= sample.seen_tokens
        sample.seen_tokens = 0
        self._workers[sample.worker].in_flight -= 1

    def _reading(self, at: int, end: _Endpoint) -> ReplicaReading:
        own = {
            "in_flight": end.in_flight + (0 if at else len(self._queue)),
            "waiting": int(end.metrics.get("waiting", 0)) + (0 if at else len(self._queue)),
            "output_tokens": end.output_tokens,
            "processed_tokens": end.output_tokens + end.input_tokens,
        }
        stated = ("running", "preemptions", "prefix_cache_queries", "prefix_cache_hits")
        server = {name: int(end.metrics[name]) for name in stated if name in end.metrics}
        known = frozenset(_KNOWN | server.keys())
        return ReplicaReading(end.name, 0, ReplicaState(**own, **server), Telemetry(), known)


def _observed(ticket: int) -> bool:
    """Whether the text of an answer is looked at."""
    return ticket < TEXTS_AT_FIRST or ticket % TEXTS_LATER == 0


def _without_metrics(settings: ClientSettings) -> ClientSettings:
    return replace(settings, watch_metrics=False)
