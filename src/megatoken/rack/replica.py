"""One replica of a worker: an engine on its own thread, the samples that it holds, and how many more it asks for."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from typing import TYPE_CHECKING, Any

from megatoken.engine.request import Request
from megatoken.engine.state import TOTALS, ReplicaState
from megatoken.engine.thread import EngineThread, Step
from megatoken.errors import MegatokenError
from megatoken.hardware.telemetry import Sensors, Telemetry
from megatoken.rack.wire import STATE_FIELDS, Done, First

if TYPE_CHECKING:
    from megatoken.engine.loop import Engine

LEAST_PREFETCH, MOST_PREFETCH = 8, 1024
TOKENS_PER_PREFETCH = 32  # of the token budget: enough for two steps where prompts are at least that long
PREFETCH_DECAY = 0.95


class _Answer:
    """A sample between its arrival and its end."""

    __slots__ = ("first_ns", "ids", "started_ns", "ticket", "tokens")

    def __init__(self, ticket: int) -> None:
        self.ticket = ticket
        self.tokens = 0
        self.first_ns = self.started_ns = 0
        self.ids: list[int] = []


class Replica:
    """One engine and its samples. All methods are for the thread that talks to the driver."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        *,
        streams: bool,
        keep_ids: bool,
        sensors: Sensors | None,
        notify: Callable[[], None],
    ) -> None:
        """Starts the engine's thread.

        ``sensors`` belong to this replica from now on. ``notify`` is called, on any thread, when the driver should get
        a report soon. The others are as in ``WorkerSpec``.
        """
        self._engine = engine
        self._streams, self._keep_ids = streams, keep_ids
        self._sensors = sensors
        self._notify = notify
        self._lock = threading.Lock()  # guards the fields below, which the engine's thread changes after every step
        self._answers: dict[int, _Answer] = {}  # by request id
        self._unstarted: deque[int] = deque()  # ids of requests that were never in a step, oldest first
        self._first: list[First] = []
        self._done: list[Done] = []
        self._ids: list[int] = []
        self._failures: list[tuple[int, str]] = []
        self._unended_tokens = 0
        self._admitted = self._admitted_when_asked = 0
        self._cancelling = False
        self._after_step = self._before = ReplicaState()  # after the last step; when the driver connected
        self._reported = (self._after_step, 0)  # state and unended tokens at the last ``take_news``
        self._prefetch = max(LEAST_PREFETCH, engine.state().max_batched_tokens // TOKENS_PER_PREFETCH)
        self._asked = 0  # samples asked for and not yet received
        self._stopped_ns = (0, 0)  # of the step that began then: time during which the whole process was stopped
        self._thread = EngineThread(engine, self._note_step, name=name)

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the engine's thread."""
        return self._thread.failure

    @property
    def cancelled(self) -> bool:
        """Whether everything submitted before ``start_cancelling`` is dropped."""
        return not self._cancelling

    def take(self, samples: Sequence[tuple[int, Request]]) -> None:
        """Submits samples under the driver's tickets."""
        ran_dry = self._engine.state().waiting == 0
        for ticket, request in samples:
            self._submit(ticket, request)
        self._asked = max(0, self._asked - len(samples))
        if not self._asked:
            self._set_prefetch(ran_dry)

    def wanted(self) -> int:
        """How many samples to ask for now, so that the engine has some when they arrive; they count as asked for."""
        wanted = self._missing(self._thread.state().waiting)
        if wanted < self._prefetch // 2:
            return 0
        if not self._asked:
            self._admitted_when_asked = self._admitted
        self._asked += wanted
        return wanted

    def start_cancelling(self) -> None:
        """Drops every sample; ``cancelled`` is true when none is left."""
        with self._lock:
            self._asked = 0
            self._unstarted.clear()
            self._cancelling = True
            request_ids = list(self._answers)
            if not request_ids:
                self._end_cancelling()
        for request_id in request_ids:
            self._thread.cancel(request_id)
        if not request_ids:
            self._notify()

    def close(self) -> None:
        """Ends the engine's thread after its step, and that of the sensors."""
        self._thread.close()
        if self._sensors is not None:
            self._sensors.close()

    def start_counting(self) -> None:
        """Counts totals from now on: the driver adds up the totals of all connections."""
        self._before = self._after_step

    def discount(self, seconds: float) -> None:
        """Subtracts time from the running step: the process was stopped for so long."""
        began_ns, stopped_ns = self._thread.step_began_ns, self._stopped_ns
        before_ns = stopped_ns[1] if stopped_ns[0] == began_ns else 0
        self._stopped_ns = (began_ns, before_ns + round(seconds * 1e9))

    def state(self, wanted: int) -> tuple[Any, ...]:
        """A record of ``wire.STATE``, whose totals are those at the last ``take_news``."""
        telemetry = self._sensors.read() if self._sensors else Telemetry()
        began_ns = self._thread.step_began_ns
        stopped_ns = self._stopped_ns[1] if self._stopped_ns[0] == began_ns else 0
        reported, unended_tokens = self._reported
        totals = {name: getattr(reported, name) - getattr(self._before, name) for name in TOTALS}
        state = replace(self._thread.state(), **totals)
        return (
            wanted,
            unended_tokens,
            (time.monotonic_ns() - began_ns - stopped_ns) / 1e9 if began_ns else 0.0,
            *(math.nan if value is None else value for value in astuple(telemetry)),
            *(getattr(state, name) for name in STATE_FIELDS),
        )

    def take_news(self) -> tuple[list[First], list[Done], list[int], list[tuple[int, str]]]:
        """First tokens, answers, ids and failures since the last call."""
        with self._lock:
            news = (self._first, self._done, self._ids, self._failures)
            self._first, self._done, self._ids, self._failures = [], [], [], []
            self._reported = (self._after_step, self._unended_tokens)
        return news

    def _submit(self, ticket: int, request: Request) -> None:
        with self._lock:
            try:
                request_id = self._thread.submit(request)
            except MegatokenError as error:
                if self.failure is None:  # else the driver gives the sample to another replica
                    self._failures.append((ticket, str(error)))
                return
            self._answers[request_id] = _Answer(ticket)
            self._unstarted.append(request_id)

    def _note_step(self, step: Step) -> None:
        """Takes the events of a step; runs on the engine's thread."""
        if self.failure is not None:  # the events only end the requests, which other replicas will serve
            self._notify()
            return
        with self._lock:
            self._after_step = state = self._thread.state()
            soon = self._drop(step) if self._cancelling else self._note_events(step, state.waiting)
        if soon:
            self._notify()

    def _drop(self, step: Step) -> bool:
        """Drops events while samples are cancelled; whether none is left."""
        for event in step.events:
            if event.finish_reason is not None:
                self._answers.pop(event.request_id, None)
        if self._answers:
            return False
        self._end_cancelling()
        return True

    def _end_cancelling(self) -> None:
        """Ends a cancellation: nothing is held, and nothing is left to report."""
        self._unended_tokens = 0
        self._first, self._done, self._ids, self._failures = [], [], [], []
        self._reported = (self._after_step, 0)
        self._cancelling = False

    def _note_events(self, step: Step, waiting: int) -> bool:
        """Records the events of a step; whether the driver should get them, or be asked for samples, soon."""
        while len(self._unstarted) > waiting:  # the engine admits in order, and after a preemption no new request
            self._answers[self._unstarted.popleft()].started_ns = step.began_ns
            self._admitted += 1
        news = False
        for event in step.events:
            answer = self._answers[event.request_id]
            answer.tokens += len(event.token_ids)
            self._unended_tokens += len(event.token_ids)
            if self._keep_ids:
                answer.ids += event.token_ids
            if event.token_ids and not answer.first_ns:
                answer.first_ns = step.ended_ns
                if self._streams:
                    self._first.append(First(answer.ticket, event.token_ids[0], answer.started_ns))
                    news = True
            if event.finish_reason is None:
                continue
            self._unended_tokens -= answer.tokens
            del self._answers[event.request_id]
            if event.error is not None:
                self._failures.append((answer.ticket, str(event.error)))
                news = True
                continue
            times = (answer.first_ns, step.ended_ns, answer.started_ns)
            self._done.append(Done(answer.ticket, answer.tokens, len(answer.ids), event.finish_reason.value, *times))
            self._ids += answer.ids
            news = news or self._streams
        return news or self._missing(waiting) >= self._prefetch // 2

    def _missing(self, waiting: int) -> int:
        """Samples short of the prefetch; those asked for count as if they had arrived."""
        return self._prefetch - waiting - self._asked

    def _set_prefetch(self, ran_dry: bool) -> None:
        """Twice what was admitted since the driver was asked; doubled if the engine ran dry in between."""
        used = self._admitted - self._admitted_when_asked
        if ran_dry:
            self._prefetch *= 2
        else:
            self._prefetch = max(2 * used, round(PREFETCH_DECAY * self._prefetch))
        self._prefetch = min(MOST_PREFETCH, max(LEAST_PREFETCH, self._prefetch))
