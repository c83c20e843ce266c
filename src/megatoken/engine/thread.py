"""The one way to share an engine between threads, or with an event loop: a thread that owns it and steps it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Self

from megatoken.engine.active_request import ActiveRequest
from megatoken.engine.request import FinishReason, Request, TokenEvent
from megatoken.errors import MegatokenError

if TYPE_CHECKING:
    from megatoken.engine.loop import Engine
    from megatoken.engine.state import ReplicaState


@dataclass(frozen=True, slots=True)
class Step:
    """What one step of the engine brought; times are ``time.monotonic_ns()``."""

    events: list[TokenEvent]  # of requests that were submitted, not streamed
    began_ns: int
    ended_ns: int
    engine: str = "0"  # which one, where there are several


class WakeUp:
    """What one thread waits for, and any may ring; what rang before is waited for no more.

    A bare lock, because ``threading.Event`` does in Python what a lock does in C: two threads that ring each other in
    turn take about half of the processor time.
    """

    def __init__(self) -> None:
        self._rung = threading.Lock()  # held until it rings
        self._rung.acquire()

    def ring(self) -> None:
        """Wake the thread, now or when it waits next."""
        with suppress(RuntimeError):  # it has rung already
            self._rung.release()

    def wait(self, seconds: float = -1) -> None:
        """Wait until it rings, or for so many seconds at most; -1: without a limit."""
        self._rung.acquire(timeout=seconds)


class EngineThread:
    """Steps an engine on a thread of its own. Every method may be called from any thread.

    The ids of requests are those of the engine, in the order of submission. Requests are checked, and text is encoded,
    on the caller's thread; each call costs the stepping thread one look at a queue.
    """

    def __init__(self, engine: Engine, on_step: Callable[[Step], None] | None = None, *, name: str = "engine") -> None:
        """Starts the thread.

        Args:
            engine: only this thread may use it from now on, and no request may be in flight.
            on_step: called on the stepping thread after every step; must be quick and not raise. An event loop gets
                it by ``lambda step: loop.call_soon_threadsafe(handle, step)``. Without it, use ``stream`` only.
            name: of the thread.
        """
        if engine.busy:
            raise MegatokenError("the engine has requests in flight; run them to their ends or cancel them first")
        self.failure: BaseException | None = None  # the error that ended the thread, or None
        self.step_began_ns = 0  # when the step that runs now began; 0 while none runs
        self._engine = engine
        self._on_step = on_step
        self._next_id = engine.next_id
        self._lock = threading.Lock()  # orders ids and inbox
        self._inbox: deque[ActiveRequest | int] = deque()  # requests to enqueue, ids to cancel
        self._queued = 0  # requests in the inbox
        self._open: dict[int, SimpleQueue[TokenEvent] | None] = {}  # by id; None: events go to on_step
        self._wake = WakeUp()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        state = "failed" if self.failure is not None else "closed" if self.dead else "open"
        return f"<EngineThread {state}, {len(self._open)} in flight, of {self._engine!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, request: Request) -> int:
        """Queue a request; its events go to ``on_step``. Raises as ``Engine.submit``, and if the thread has ended."""
        return self.enqueue(self._engine.check(request))

    def enqueue(self, checked: ActiveRequest) -> int:
        """Queue what ``Engine.check`` returned, once; its events go to ``on_step``. Raises if the thread has ended."""
        return self._enqueue(checked, None)

    def stream(self, request: Request) -> Iterator[TokenEvent]:
        """Queue a request now, and iterate over its events; leaving the loop, or dropping the iterator, cancels it.

        Raises:
            RequestError, CapacityError: as ``Engine.submit``, at once.
            MegatokenError: what ended the request, in the iteration.
        """
        events: SimpleQueue[TokenEvent] = SimpleQueue()
        stream = self._events(self._enqueue(self._engine.check(request, text=True), events), events)
        next(stream)  # a generator that has not started would not notice that it is dropped
        return stream

    def cancel(self, request_id: int) -> None:
        """End a request after the step that runs; its last event says so. Ids of ended requests pass."""
        with self._lock:
            self._inbox.append(request_id)
        self._wake.ring()

    def state(self) -> ReplicaState:
        """What the engine holds and has done; requests that it has not taken yet count as waiting."""
        state, queued = self._engine.state(), self._queued
        return replace(state, in_flight=state.in_flight + queued, waiting=state.waiting + queued)

    @property
    def dead(self) -> bool:
        """Whether the thread has ended, by ``close`` or ``failure``."""
        return not self._thread.is_alive()

    def close(self, *, drain: bool = False) -> None:
        """End the thread: cancel every request, or with ``drain`` wait until all have ended. The engine stays open."""
        with self._lock:
            self._closing = True
            if not drain:
                self._inbox.extend(list(self._open))
        self._wake.ring()
        self._thread.join()

    def _enqueue(self, checked: ActiveRequest, events: SimpleQueue[TokenEvent] | None) -> int:
        with self._lock:
            if self.failure is not None:
                raise _typed(self.failure)
            if self._closing:
                raise MegatokenError("the engine's thread is closed; make a new EngineThread")
            self._next_id += 1
            request_id = self._next_id - 1
            self._open[request_id] = events
            self._inbox.append(checked)
            self._queued += 1
        self._wake.ring()
        return request_id

    def _events(self, request_id: int, events: SimpleQueue[TokenEvent]) -> Iterator[TokenEvent]:
        try:
            yield TokenEvent(request_id, (), None)  # taken by ``stream``
            while True:
                event = events.get()
                if event.error is not None:
                    raise event.error
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            if request_id in self._open:
                self.cancel(request_id)

    def _run(self) -> None:
        try:
            with self._engine.exclusive:
                self._serve()
        except BaseException as error:
            self._fail(error)

    def _serve(self) -> None:
        engine = self._engine
        while True:
            if self._inbox:
                self._take_inbox()
            if engine.busy:
                self.step_began_ns = began_ns = time.monotonic_ns()
                events = engine.step()
                self.step_began_ns = 0
                self._report(events, began_ns)
            elif self._closing and not self._inbox:
                return
            else:
                self._wake.wait()

    def _take_inbox(self) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, int):
                self._engine.cancel(item)
            else:
                self._engine.enqueue(item)
                with self._lock:
                    self._queued -= 1

    def _report(self, events: list[TokenEvent], began_ns: int) -> None:
        """Hand out the events of a step: to each stream its own, the others together."""
        ended_ns = time.monotonic_ns()
        others = []
        for event in events:
            request_id = event.request_id
            queue = self._open[request_id] if event.finish_reason is None else self._open.pop(request_id)
            if queue is None:
                others.append(event)
            else:
                queue.put(event)
        if self._on_step is not None:
            self._on_step(Step(others, began_ns, ended_ns))

    def _fail(self, error: BaseException) -> None:
        """End every open request with the error that ended the engine."""
        with self._lock:
            self.failure = error
            request_ids = list(self._open)
        typed = _typed(error)
        now_ns = time.monotonic_ns()
        self.step_began_ns = 0
        self._report([TokenEvent(one, (), FinishReason.ERROR, typed) for one in request_ids], now_ns)


def _typed(error: BaseException) -> MegatokenError:
    if isinstance(error, MegatokenError):
        return error
    text = str(error).splitlines()
    return MegatokenError(f"the engine failed: {type(error).__name__}{f': {text[0]}' if text else ''}")
