"""An engine that only paces tokens, to measure everything but the engine. No PyTorch."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from megatoken.engine.config import ModelConfig
from megatoken.engine.request import FinishReason, Request, TokenEvent, check_request, token_ids
from megatoken.engine.state import ReplicaState
from megatoken.engine.thread import Step, WakeUp
from megatoken.errors import CapacityError, RequestError

STEP_SECONDS = 0.001  # tokens that are due within it leave together


@dataclass(slots=True)
class _Stream:
    request_id: int
    left: int
    due: float  # time.monotonic() of its next token


class MockEngine:
    """The first token comes at once, the others at a set pace. Methods as those of ``EngineThread``."""

    def __init__(
        self,
        model: ModelConfig,  # whose limits hold
        vocabulary: list[int],  # ids to answer with, in turn
        tokens_per_second: float,  # of one stream
        on_step: Callable[[Step], None],  # called after every step, on the thread
        max_sequences: int,  # streams that run at once; others wait
    ) -> None:
        """Starts the thread."""
        self.failure: BaseException | None = None
        self.step_began_ns = 0
        self._model = model
        self._vocabulary = vocabulary
        self._interval = 1 / tokens_per_second
        self._on_step = on_step
        self._max_sequences = max_sequences
        self._inbox: deque[tuple[int, Request] | int] = deque()
        self._waiting: deque[tuple[int, Request]] = deque()
        self._running: dict[int, _Stream] = {}
        self._slots: dict[int, list[_Stream]] = {}  # by number of STEP_SECONDS since the clock's start
        self._slot = _slot(time.monotonic())  # the next one to look at
        self._wake = WakeUp()
        self._closing = False
        self._next_id = 0
        self._steps = self._output_tokens = 0
        self._thread = threading.Thread(target=self._run, name="mock-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> int:
        """Queue a request. Raises RequestError or CapacityError as an engine does."""
        if isinstance(request.prompt, str):
            raise RequestError("the mock engine takes token ids")
        prompt = token_ids(request.prompt)
        check_request(prompt, request, self._model.vocabulary_size)
        if len(prompt) + request.max_tokens > self._model.max_positions:
            raise CapacityError(
                f"prompt of {len(prompt):,} tokens and {request.max_tokens:,} new tokens do not fit into the context "
                f"of {self._model.max_positions:,}; send less"
            )
        self._next_id += 1
        self._inbox.append((self._next_id - 1, request))
        self._wake.ring()
        return self._next_id - 1

    def cancel(self, request_id: int) -> None:
        """End a request; its last event says so. Ids of ended requests pass."""
        self._inbox.append(request_id)
        self._wake.ring()

    def state(self) -> ReplicaState:
        """How many requests wait and run."""
        waiting, running = len(self._waiting) + len(self._inbox), len(self._running)
        return ReplicaState(
            in_flight=waiting + running,
            waiting=waiting,
            running=running,
            steps=self._steps,
            output_tokens=self._output_tokens,
        )

    def close(self, *, drain: bool = False) -> None:
        """End the thread."""
        self._closing = True
        self._wake.ring()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing:
            began_ns = time.monotonic_ns()
            events: list[TokenEvent] = []
            self._take_inbox(events)
            now_slot = _slot(time.monotonic())
            while self._slot < now_slot:
                due = self._slots.pop(self._slot, ())
                self._slot += 1
                for stream in due:
                    self._advance(stream, events)
            if events:
                self._steps += 1
                self._on_step(Step(events, began_ns, time.monotonic_ns()))
            next_slot = (self._slot + 1) * STEP_SECONDS
            self._wake.wait(max(0.0, next_slot - time.monotonic()) if self._running or self._waiting else -1)
            if not self._slots:
                self._slot = max(self._slot, _slot(time.monotonic()))

    def _take_inbox(self, events: list[TokenEvent]) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            if not isinstance(item, int):
                self._waiting.append(item)
            elif self._running.pop(item, None) is not None or self._drop_waiting(item):
                events.append(TokenEvent(item, (), FinishReason.CANCELLED))
        while self._waiting and len(self._running) < self._max_sequences:
            request_id, request = self._waiting.popleft()
            stream = self._running[request_id] = _Stream(request_id, request.max_tokens, time.monotonic())
            self._advance(stream, events)

    def _drop_waiting(self, request_id: int) -> bool:
        before = len(self._waiting)
        self._waiting = deque(one for one in self._waiting if one[0] != request_id)
        return len(self._waiting) < before

    def _advance(self, stream: _Stream, events: list[TokenEvent]) -> None:
        request_id = stream.request_id
        if request_id not in self._running:  # cancelled
            return
        token_id = self._vocabulary[(request_id + stream.left) % len(self._vocabulary)]
        stream.left -= 1
        stream.due += self._interval
        self._output_tokens += 1
        if stream.left:
            self._slots.setdefault(max(self._slot, _slot(stream.due)), []).append(stream)
            events.append(TokenEvent(request_id, (token_id,), None))
        else:
            del self._running[request_id]
            events.append(TokenEvent(request_id, (token_id,), FinishReason.LENGTH))


def _slot(seconds: float) -> int:
    return int(seconds / STEP_SECONDS)
