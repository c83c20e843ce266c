"""Servers over HTTP as a target: shares samples out to client processes and endpoints, and takes their reports."""

from __future__ import annotations

import json
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatoken.engine.request import Request
from megatoken.engine.state import ReplicaState
from megatoken.framing import WireError
from megatoken.hardware.telemetry import Telemetry
from megatoken.runs.reasons import Reason, reason
from megatoken.targets import HasFileno, ReplicaReading, SampleEvent
from megatoken.targets.endpoint import wire
from megatoken.targets.endpoint.bodies import Asking, body_of
from megatoken.targets.endpoint.clients import SILENT_SECONDS, ClientProcess, Clients
from megatoken.targets.endpoint.failures import Failures, ServerEnd
from megatoken.targets.endpoint.observations import Observations
from megatoken.targets.endpoint.wire import Asked, ClientSettings, Ended, Failed, News, Task

TEXTS_AT_FIRST, TEXTS_LATER = 256, 64  # the first answers keep their text, later every so many
CANCEL_SECONDS = 2.0  # in which client processes say what was seen of the requests that they cancel
SWITCH_SECONDS = 0.0002  # Python's 5 ms would hold up a request that is due while a thread writes the run folder
_KNOWN = {"in_flight", "waiting", "output_tokens", "processed_tokens", "replicas"}  # fields that a client knows
_encode = json.JSONEncoder(ensure_ascii=False).encode


@dataclass(slots=True)
class _Sample:
    sample_id: int
    body: bytes
    max_tokens: int
    forced: bool
    due_ns: int
    endpoint: int = -1
    client: ClientProcess = field(init=False)
    moved: bool = False
    seen_tokens: int = 0  # of the answer under way, which the endpoint's count has already
    given_ns: int = 0  # when its client process was chosen
    ahead_ns: int | None = None  # that process's clock minus ours; None: none of its times was seen


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


class EndpointTarget:
    """Drives the servers at ``settings.addresses`` as one system."""

    def __init__(
        self,
        settings: ClientSettings,
        asking: Asking,
        facts: Mapping[str, Any],
        *,
        clients: Clients,
        max_in_flight: int,
        observations: Observations,
        ids_of: Callable[[str, str], tuple[int, ...]] | None = None,
        server_end: Callable[[], ServerEnd | None] = lambda: None,
    ) -> None:
        """Takes the client processes, which it ends.

        Args:
            settings: of each process.
            asking: how requests are put.
            facts: fields of ``result.json`` that stay the same.
            clients: the client processes.
            max_in_flight: requests that are open at once, over all processes.
            observations: collects what the answers show.
            ids_of: token ids of an answer's text and finish reason, for a server that returns none; None: not wanted.
            server_end: how the server ended, if the run started it and it has ended.
        """
        self._settings = settings
        self._asking = asking
        self._facts = facts
        self._most = max_in_flight
        self._observations = observations
        self._clients = clients
        self._endpoints = [_Endpoint(address.name) for address in settings.addresses]
        self._queue: deque[_Sample] = deque()
        self._open: dict[int, _Sample] = {}  # by ticket
        self._next_ticket = 0
        self._wake: HasFileno | None = None
        self._losses: list[_Loss] = []
        self._retries = 0
        self._tokens = self._pieces = 0  # of whole answers that came as streams
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

    def submit(self, sample_id: int, request: Request, due_ns: int = 0) -> None:
        """Queues a sample, which leaves at ``due_ns``. Raises RequestError if the route does not take its prompt."""
        asking, settings = self._asking, self._settings
        content = _encode(body_of(request, settings.api, asking, stream=settings.stream)).encode()
        forced = request.ignore_end_token and asking.forces
        self._queue.append(_Sample(sample_id, content, request.max_tokens, forced, due_ns))
        if len(self._open) < self._most:
            self._dispatch()

    def poll(self, timeout_seconds: float) -> list[SampleEvent]:
        """Sends what may be sent and waits for reports.

        Raises:
            MegatokenError: a client process of this machine has ended, or all those of other hosts.
        """
        events: list[SampleEvent] = []
        for client in self._clients.silent():
            self._lose_host(client, f"silent for {SILENT_SECONDS:g} s", events)
        self._dispatch()
        clients = self._clients.left()
        for client in clients:
            client.flush()
        sources: list[Any] = [client.channel.socket for client in clients]
        wake = [self._wake] if self._wake is not None else []
        more = [client.channel.socket for client in clients if client.channel.pending]
        ready = select.select(sources + wake, more, [], 0.0 if events else timeout_seconds)[0]
        for client in clients:
            if client.channel.socket in ready and client in self._clients.left():
                try:
                    messages = client.receive()
                except WireError as error:
                    self._lose_host(client, str(error), events)
                    continue
                for kind, value in messages:
                    self._take(client, kind, value, events)
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
        return {
            "endpoints": {
                "count": len(self._endpoints),
                "lost": lost,
                "requests_repeated": self._retries,
                "failed": self._failures.to_document(since_ns),
            },
            "client": self._clients.to_document(since_ns),
        }

    def findings(self, since_ns: int) -> list[Reason]:
        """What the answers since then showed of the servers, and clocks of hosts that are not known well enough."""
        again = [reason("REQUESTS_REPEATED", requests=self._retries)] if self._retries else []
        return [*again, *self._observations.findings(since_ns), *self._clients.findings()]

    def begin(self) -> None:
        """A test begins: what was observed of the client before does not count."""
        sys.setswitchinterval(SWITCH_SECONDS)
        self._retries = 0
        self._failures.begin()
        self._clients.begin()
        self._losses = [one for one in self._losses if one.back_ns is None]
        for one in self._losses:
            one.moved = 0

    def withdraw(self) -> list[int]:
        """Drops what was not sent; returns the ids."""
        queue, self._queue = self._queue, deque()
        return [sample.sample_id for sample in queue]

    def cancel_all(self) -> list[SampleEvent]:
        """Closes the connections of all open requests."""
        self._queue.clear()
        asked: dict[ClientProcess, list[int]] = {}
        for client in self._clients.left():
            asked[client] = [ticket for ticket, sample in self._open.items() if sample.client is client]
            client.flush()
            client.send(Asked.CANCEL, asked[client])
        events = self._seen_before(asked)
        self._queue.clear()  # of what an endpoint held that was lost meanwhile
        for client in self._clients.left():
            client.in_flight = 0
        self._open.clear()
        for one in self._endpoints:
            one.in_flight = 0
        return events

    def _seen_before(self, asked: dict[ClientProcess, list[int]]) -> list[SampleEvent]:
        """What the client processes report until each has cancelled the tickets that it was ``asked`` to."""
        events: list[SampleEvent] = []
        until = time.monotonic() + CANCEL_SECONDS
        while asked and (left := until - time.monotonic()) > 0:
            sockets = {client.channel.socket: client for client in asked}
            more = [one for one, client in sockets.items() if client.channel.pending]
            readable, writable, _ = select.select(list(sockets), more, [], left)
            for one in writable:
                sockets[one].flush()
            for client in map(sockets.__getitem__, readable):
                try:
                    messages = client.receive()
                except WireError:  # the next poll notices it
                    del asked[client]
                    continue
                for kind, value in messages:
                    if kind == News.CANCELLED and value == asked.get(client):
                        del asked[client]
                    else:
                        self._take(client, kind, value, events)
        return events

    def close(self) -> None:
        """Ends the client processes."""
        self._clients.close()

    def _dispatch(self) -> None:
        while self._queue and len(self._open) < self._most:
            self._send(self._queue.popleft())

    def _send(self, sample: _Sample) -> None:
        """Gives a sample to the endpoint and the process with the fewest."""
        at = 0
        if len(self._endpoints) > 1:
            alive = [one for one, end in enumerate(self._endpoints) if end.loss is None and one != sample.endpoint]
            at = min(alive or range(len(self._endpoints)), key=lambda one: self._endpoints[one].in_flight)
        client = self._clients.least_busy()
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        keep = self._every_text or _observed(ticket)
        sample.endpoint, sample.client, sample.given_ns, sample.ahead_ns = at, client, time.monotonic_ns(), None
        self._open[ticket] = sample
        self._endpoints[at].in_flight += 1
        client.in_flight += 1
        due_ns = sample.due_ns + (client.host.clock.monotonic_ns if client.host is not None else 0)
        client.tasks.append(tuple(Task(ticket, at, sample.body, sample.max_tokens, sample.forced, keep, due_ns)))

    def _take(self, client: ClientProcess, kind: int, value: Any, events: list[SampleEvent]) -> None:
        if kind == News.LOAD:
            client.note_load(*value)
        elif kind == News.METRICS:
            at, metrics = value
            self._endpoints[at].metrics = metrics
        elif kind == News.CANCELLED:
            pass  # of samples that another endpoint has
        elif kind == News.BACK:
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
            ahead_ns = self._ahead_ns(sample, fields[2], fields[3])
            sent_ns, first_ns = fields[2] - ahead_ns, fields[3] - ahead_ns
            end.heard_ns = first_ns
            sent = None if sample.moved else sent_ns
            events.append(SampleEvent(sample.sample_id, (), None, first_ns, first_ns=first_ns, sent_ns=sent))
        elif kind == wire.PROGRESS:
            seen = self._tokens_of(fields[2])
            end.output_tokens += seen - sample.seen_tokens
            sample.seen_tokens = seen
            events.append(SampleEvent(sample.sample_id, (), None, time.monotonic_ns(), output_tokens=seen))
        elif kind == wire.CUT:
            ahead_ns = self._ahead_ns(sample, fields[2], fields[3])
            times_ns = np.frombuffer(fields[4], np.int64) - ahead_ns
            seen, last_ns = self._tokens_of(len(times_ns)), fields[3] - ahead_ns
            end.output_tokens += seen - sample.seen_tokens
            sample.seen_tokens = seen
            events.append(SampleEvent(sample.sample_id, (), None, last_ns, output_tokens=seen, token_times_ns=times_ns))
        elif kind == wire.END:
            ended = Ended(*fields)
            if ahead_ns := self._ahead_ns(sample, ended.sent_ns, ended.last_ns):
                ended = ended.by_our_clock(ahead_ns)
            self._release(ticket, sample)
            if ended.uncounted and self._ids_of is None:
                self._retries += ended.retries
                self._observations.add(ended._replace(text="", frames=0))  # what its count gives is not looked at
                events.append(self._failure(end, sample, ended.uncounted, answered=True))
            else:
                events.append(self._ended(sample, end, ended))
        else:
            self._failed(ticket, sample, Failed(*fields), events)

    def _tokens_of(self, pieces: int) -> int:
        """Tokens of an answer under way, each piece of which counts as one of whole answers did on average."""
        return max(1, round(pieces * self._tokens / self._pieces)) if self._pieces else pieces

    def _ended(self, sample: _Sample, end: _Endpoint, ended: Ended) -> SampleEvent:
        if self._ids_of is not None:
            ids = self._ids_of(ended.text, ended.finish_reason)
            ended = ended._replace(token_ids=ids, tokens=len(ids))
        times_ns = np.frombuffer(ended.times, np.int64) if ended.times else None
        if times_ns is not None:
            self._tokens, self._pieces = self._tokens + ended.tokens, self._pieces + len(times_ns)
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
            token_times_ns=times_ns,
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
            events.append(self._failure(end, sample, failed.message, answered=failed.cause in ("answer", "client")))

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
        self._clients.first().send(Asked.PROBE, at)
        for ticket, sample in [(ticket, sample) for ticket, sample in self._open.items() if sample.endpoint == at]:
            self._release(ticket, sample)
            sample.client.send(Asked.CANCEL, [ticket])
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
        sample.client.in_flight -= 1

    # hosts

    def _ahead_ns(self, sample: _Sample, sent_ns: int, last_ns: int) -> int:
        """The clock of the sample's client process minus ours: one value for all its times, so that gaps are exact.

        Its request left after it was given out, and what is reported was before the report; within that the host's
        measured offset.
        """
        host = sample.client.host
        if host is None:
            return 0
        if sample.ahead_ns is None:
            ahead_ns = min(host.clock.monotonic_ns, sent_ns - max(sample.given_ns, sample.due_ns))
            sample.ahead_ns = max(ahead_ns, last_ns - time.monotonic_ns())
        return sample.ahead_ns

    def _lose_host(self, client: ClientProcess, cause: str, events: list[SampleEvent]) -> None:
        """Goes on without the host of a lost client process: the others send its open requests again, each once."""
        asked = self._clients.first()
        loss = self._clients.lose(client, cause)
        if asked.host is loss.host:
            for number, end in enumerate(self._endpoints):
                end.metrics = {}
                if end.loss is not None:
                    self._clients.first().send(Asked.PROBE, number)
        for ticket, sample in [(ticket, one) for ticket, one in self._open.items() if one.client.host is loss.host]:
            end = self._endpoints[sample.endpoint]
            self._release(ticket, sample)
            if sample.moved:
                message = f"lost with the client host {loss.host.name}: {cause}"
                events.append(self._failure(end, sample, message, answered=False))
                continue
            sample.moved, sample.endpoint = True, -1
            loss.moved += 1
            self._queue.appendleft(sample)

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
