"""The replicas of one process: each engine steps on a thread of its own, one more thread talks to the driver.

Knows nothing of Ray: given a driver's address and key it serves until that driver is gone.
"""

from __future__ import annotations

import math
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from megatoken.engine.request import FinishReason, Request, TokenEvent
from megatoken.engine.state import TOTALS, ReplicaState
from megatoken.errors import MegatokenError
from megatoken.hardware.telemetry import GpuTelemetry, Telemetry
from megatoken.rack.wire import (
    DONE,
    FIRST,
    NUMBER,
    PING,
    PONG,
    STATE,
    STATE_FIELDS,
    Channel,
    Kind,
    Report,
    WireError,
    authenticate,
    pack_report,
    unpack_submit,
)

REPORT_SECONDS = 0.25  # between reports where nobody waits for a single token
STREAM_SECONDS = 0.004  # the least between reports where somebody does
IDLE_SECONDS = 0.05
LEAST_PREFETCH, MOST_PREFETCH = 8, 1024
TOKENS_PER_PREFETCH = 32  # of the token budget: enough for two steps where prompts are at least that long
PREFETCH_DECAY = 0.95
CONNECT_SECONDS = 2.0
LONGEST_ROUND_SECONDS = 1.0
RECONNECT_PAUSE_SECONDS = 0.2
REFUSALS = 3  # of connections, after which the driver is gone for good
FINISH_REASONS = tuple(FinishReason)


class ReplicaEngine(Protocol):
    """What a replica needs of an engine."""

    @property
    def busy(self) -> bool:
        """Whether ``step`` has something to do or to tell."""

    def submit(self, request: Request) -> int:
        """Queues a request."""

    def step(self) -> list[TokenEvent]:
        """Runs one step."""

    def cancel(self, ticket: int) -> None:
        """Ends a request."""

    def state(self) -> ReplicaState:
        """What it holds and has done."""


class _Answer:
    """A sample between its arrival and its end."""

    __slots__ = ("first_ns", "ids", "started_ns", "ticket", "tokens")

    def __init__(self, ticket: int) -> None:
        self.ticket = ticket
        self.tokens = 0
        self.first_ns = self.started_ns = 0
        self.ids: list[int] = []


class Replica(threading.Thread):
    """One engine. Its thread steps it; all other methods are for the thread that talks to the driver."""

    def __init__(self, engine: ReplicaEngine, name: str, *, streams: bool, keep_ids: bool, gpus: Sequence[str]) -> None:
        """Prepares the thread.

        Args:
            engine: nobody else may use it.
            name: of the thread.
            streams: whether first tokens are told at once.
            keep_ids: whether answers are told as ids, not only as counts.
            gpus: UUIDs of the GPUs whose sensors are read.
        """
        super().__init__(name=name, daemon=True)
        self._engine = engine
        self._streams, self._keep_ids = streams, keep_ids
        self._sensors = GpuTelemetry.open(gpus)
        self._inbox: deque[tuple[int, Request]] = deque()
        self._wake = threading.Event()
        self._lock = threading.Lock()  # what came out, and the counts that go with it
        self._first: list[tuple[int, int, int]] = []
        self._done: list[tuple[int, int, int, int, int, int, int]] = []
        self._ids: list[int] = []
        self._failures: list[tuple[int, str]] = []
        self._answers: dict[int, _Answer] = {}  # by the engine's ticket
        self._unstarted: deque[int] = deque()  # tickets of the engine that were never in a step, oldest first
        self._unended_tokens = 0
        self._step_began_ns = 0  # 0: none runs
        self._drain = threading.Event()
        self._drained = threading.Event()
        self._over = False
        self._tell: Callable[[], None] = _nobody
        self.failure: BaseException | None = None
        self._prefetch = max(LEAST_PREFETCH, engine.state().max_batched_tokens // TOKENS_PER_PREFETCH)
        self._asked = 0  # samples asked for and not yet received
        self._admitted = self._admitted_when_asked = 0
        self._after_step = self._before = ReplicaState()  # after the last step; when the driver connected
        self._reported = (self._after_step, 0)  # state and unended tokens when the news were taken

    def on_news(self, tell: Callable[[], None]) -> None:
        """Has ``tell`` called when the driver ought to hear of something at once."""
        self._tell = tell

    def take(self, samples: Sequence[tuple[int, Request]]) -> None:
        """Queues samples under the driver's tickets."""
        self._inbox.extend(samples)
        self._wake.set()
        self._asked = max(0, self._asked - len(samples))
        if not self._asked:
            self._set_prefetch()

    def wanted(self) -> int:
        """Samples to ask for now, which count as asked for: enough that the engine has some when they arrive."""
        wanted = self._missing(self._engine.state().waiting)
        if wanted < self._prefetch // 2:
            return 0
        if not self._asked:
            self._admitted_when_asked = self._admitted
        self._asked += wanted
        return wanted

    def start_cancelling(self) -> None:
        """Has the thread drop everything; ``cancelled`` tells when nothing is left."""
        self._asked = 0
        self._drained.clear()
        self._drain.set()
        self._wake.set()

    @property
    def cancelled(self) -> bool:
        """Whether everything submitted before ``start_cancelling`` is gone."""
        return self._drained.is_set()

    def end(self) -> None:
        """Ends the thread after its step."""
        self._over = True
        self._wake.set()

    def start_counting(self) -> None:
        """Has totals count from now on: the driver that has connected adds up its connections."""
        self._before = self._after_step

    def excuse(self, seconds: float) -> None:
        """Takes time off the step that runs: the process was stopped for so long."""
        if self._step_began_ns:
            self._step_began_ns += round(seconds * 1e9)

    def state(self, wanted: int) -> tuple[Any, ...]:
        """A row of ``wire.STATE``, whose totals go with the news that were taken last."""
        now, telemetry = self._engine.state(), self._sensors.read() if self._sensors else Telemetry()
        began, queued = self._step_began_ns, len(self._inbox)
        reported, unended_tokens = self._reported
        totals = {name: getattr(reported, name) - getattr(self._before, name) for name in TOTALS}
        state = replace(now, in_flight=now.in_flight + queued, waiting=now.waiting + queued, **totals)
        return (
            wanted,
            unended_tokens,
            (time.monotonic_ns() - began) / 1e9 if began else 0.0,
            *(math.nan if value is None else value for value in _readings(telemetry)),
            *(getattr(state, name) for name in STATE_FIELDS),
        )

    def take_news(self) -> tuple[list[Any], list[Any], list[int], list[tuple[int, str]]]:
        """First tokens, answers, ids and failures since the last call."""
        with self._lock:
            news = (self._first, self._done, self._ids, self._failures)
            self._first, self._done, self._ids, self._failures = [], [], [], []
            self._reported = (self._after_step, self._unended_tokens)
        return news

    def run(self) -> None:
        """The thread: takes what arrived, steps, notes what came out."""
        try:
            while not self._over:
                if self._drain.is_set():
                    self._cancel_all()
                self._submit()
                if not self._engine.busy:
                    self._wake.wait(IDLE_SECONDS)
                    self._wake.clear()
                    continue
                self._step()
        except BaseException as error:
            self.failure = error
            self._tell()

    def _submit(self) -> None:
        while self._inbox:
            ticket, request = self._inbox.popleft()
            try:
                own = self._engine.submit(request)
            except MegatokenError as error:
                with self._lock:
                    self._failures.append((ticket, str(error)))
                continue
            self._answers[own] = _Answer(ticket)
            self._unstarted.append(own)

    def _step(self) -> None:
        self._step_began_ns = began_ns = time.monotonic_ns()
        events = self._engine.step()
        now_ns = time.monotonic_ns()
        self._step_began_ns = 0
        state = self._engine.state()
        waiting = state.waiting
        while len(self._unstarted) > waiting:  # the engine admits in order, and after a preemption nobody new
            self._answers[self._unstarted.popleft()].started_ns = began_ns
            self._admitted += 1
        first, done, ids, failures = [], [], [], []
        output_tokens = ended_tokens = 0
        for event in events:
            answer = self._answers[event.request_id]
            answer.tokens += len(event.token_ids)
            if self._keep_ids:
                answer.ids += event.token_ids
            if event.token_ids and not answer.first_ns:
                answer.first_ns = now_ns
                first.append((answer.ticket, event.token_ids[0], answer.started_ns))
            if event.finish_reason is not None:
                if event.error is not None:
                    failures.append((answer.ticket, str(event.error)))
                else:
                    reason = FINISH_REASONS.index(event.finish_reason)
                    times = (answer.first_ns, now_ns, answer.started_ns)
                    done.append((answer.ticket, answer.tokens, len(answer.ids), reason, *times))
                    ids += answer.ids
                ended_tokens += answer.tokens
                del self._answers[event.request_id]
            output_tokens += len(event.token_ids)
        with self._lock:
            self._after_step = state
            self._unended_tokens += output_tokens - ended_tokens
            if self._streams:
                self._first += first
            self._done += done
            self._failures += failures
            self._ids += ids
        if failures or (self._streams and (first or done)) or self._missing(waiting) >= self._prefetch // 2:
            self._tell()

    def _missing(self, waiting: int) -> int:
        """Samples short of the prefetch, those asked for counted as if they were here."""
        return self._prefetch - waiting - len(self._inbox) - self._asked

    def _cancel_all(self) -> None:
        self._inbox.clear()
        for ticket in self._answers:
            self._engine.cancel(ticket)
        while self._engine.busy:
            self._engine.step()
        self._answers.clear()
        self._unstarted.clear()
        self._unended_tokens = 0
        self.take_news()
        self._drain.clear()
        self._drained.set()
        self._tell()

    def _set_prefetch(self) -> None:
        """Twice what was admitted while the driver was asked; more where the engine ran dry meanwhile."""
        used = self._admitted - self._admitted_when_asked
        if self._engine.state().waiting == 0:
            self._prefetch *= 2
        else:
            self._prefetch = max(2 * used, round(PREFETCH_DECAY * self._prefetch))
        self._prefetch = min(MOST_PREFETCH, max(LEAST_PREFETCH, self._prefetch))


class Worker:
    """Serves a driver with the engines of this process until that driver is gone."""

    def __init__(
        self,
        engines: Sequence[ReplicaEngine],
        number: int,
        *,
        streams: bool,
        keep_ids: bool,
        dead_after_seconds: float,
        reconnect_seconds: float,
        gpus: Sequence[Sequence[str]] | None = None,
    ) -> None:
        """Starts a thread for each engine.

        Args:
            engines: one per replica.
            number: by which the driver knows this worker.
            streams: whether first tokens are told at once.
            keep_ids: whether answers are told as ids.
            dead_after_seconds: silence after which the driver counts as out of reach.
            reconnect_seconds: how long it may be that before this ends.
            gpus: UUIDs of each engine's GPUs.
        """
        self._number = number
        self._streams = streams
        self._dead_after_seconds = dead_after_seconds
        self._reconnect_seconds = reconnect_seconds
        self._replicas = [
            Replica(engine, f"replica-{place}", streams=streams, keep_ids=keep_ids, gpus=gpus[place] if gpus else ())
            for place, engine in enumerate(engines)
        ]
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)
        os.set_blocking(self._wake_reader, False)
        for replica in self._replicas:
            replica.on_news(self._wake)
            replica.start()

    def serve(self, address: tuple[str, int], key: bytes) -> None:
        """Serves the driver at ``address``; returns when it has said so, is gone, or has been out of reach too long.

        What was submitted over a connection that broke is dropped: the driver has given it to somebody else.

        Raises:
            MegatokenError: a replica failed; the driver was told.
        """
        refusals, until = 0, time.monotonic() + self._reconnect_seconds
        while refusals < REFUSALS and time.monotonic() < until:
            try:
                channel = Channel(_connect(address, key))
            except ConnectionRefusedError:
                refusals += 1
                time.sleep(RECONNECT_PAUSE_SECONDS)
                continue
            except (OSError, WireError):
                time.sleep(RECONNECT_PAUSE_SECONDS)
                continue
            try:
                if self._talk(channel):
                    return
            except WireError:
                pass
            finally:
                channel.close()
            self._drop_everything()
            refusals, until = 0, time.monotonic() + self._reconnect_seconds

    def close(self) -> None:
        """Ends the threads after their steps."""
        for replica in self._replicas:
            replica.end()

    def _talk(self, channel: Channel) -> bool:
        """Serves one connection; whether the driver asked to end. Raises WireError when it is gone."""
        for replica in self._replicas:
            replica.start_counting()
        channel.send(Kind.HELLO, NUMBER.pack(self._number))
        heard = now = time.monotonic()
        reported, pressing = 0.0, False
        cancelling: bytes | None = None
        while True:
            now, before = time.monotonic(), now
            if now - before > LONGEST_ROUND_SECONDS:  # this process was stopped, and with it whatever it waits for
                heard += now - before
                for replica in self._replicas:
                    replica.excuse(now - before)
            if now - heard > self._dead_after_seconds:
                raise WireError("the driver has fallen silent")
            writers = [channel.socket.fileno()] if channel.pending else []
            wait = max(0.0, reported + (STREAM_SECONDS if pressing else REPORT_SECONDS) - now)
            readable, writable, _ = select.select([channel.socket.fileno(), self._wake_reader], writers, [], wait)
            if writable:
                channel.flush()
            if channel.socket.fileno() in readable:
                heard = time.monotonic()
                for kind, body in channel.receive():
                    if kind == Kind.CLOSE:
                        return True
                    if kind == Kind.SUBMIT:
                        place, samples = unpack_submit(body)
                        self._replicas[place].take(samples)
                    elif kind == Kind.PING:
                        channel.send(Kind.PONG, PONG.pack(*PING.unpack(body), time.monotonic_ns(), time.time_ns()))
                    elif kind == Kind.CANCEL:
                        cancelling = body
                        for replica in self._replicas:
                            replica.start_cancelling()
            if self._wake_reader in readable:
                os.read(self._wake_reader, 4096)
                pressing = True
                self._raise_failure(channel)
                if cancelling is not None and all(replica.cancelled for replica in self._replicas):
                    channel.send(Kind.CANCELLED, cancelling)
                    cancelling = None
            due = STREAM_SECONDS if pressing else REPORT_SECONDS
            now_after = time.monotonic()
            if now_after - reported >= due and cancelling is None and not channel.pending:
                reported, pressing = now_after, False
                channel.send(Kind.REPORT, self._report())

    def _report(self) -> bytes:
        news = [replica.take_news() for replica in self._replicas]
        states = [replica.state(replica.wanted()) for replica in self._replicas]
        return pack_report(
            Report(
                np.array(states, STATE),
                np.array([row for first, *_ in news for row in first], FIRST),
                np.array([row for _, done, *_ in news for row in done], DONE),
                np.array([token for *_, ids, _ in news for token in ids], "<i4"),
                [failure for *_, failures in news for failure in failures],
            )
        )

    def _raise_failure(self, channel: Channel) -> None:
        for replica in self._replicas:
            if (failure := replica.failure) is not None:
                text = f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"
                with suppress(WireError):
                    channel.send(Kind.FAILED, text.encode())
                raise MegatokenError(text)

    def _drop_everything(self) -> None:
        for replica in self._replicas:
            replica.start_cancelling()
        while not all(replica.cancelled or replica.failure for replica in self._replicas):
            time.sleep(IDLE_SECONDS)

    def _wake(self) -> None:
        with suppress(BlockingIOError):
            os.write(self._wake_writer, b"\0")


def _nobody() -> None:
    """Hears the news until somebody is there for them."""


def _connect(address: tuple[str, int], key: bytes) -> socket.socket:
    connection = socket.create_connection(address, CONNECT_SECONDS)
    try:
        authenticate(connection, key, CONNECT_SECONDS, driver=False)
    except BaseException:
        connection.close()
        raise
    return connection


def _readings(telemetry: Telemetry) -> tuple[float | None, float | None, float | None]:
    return telemetry.power_watts, telemetry.clock_mhz, telemetry.temperature_celsius
