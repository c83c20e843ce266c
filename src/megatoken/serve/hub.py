"""The engine process's hub: requests of all HTTP processes in, through the fair queue to the engine; events back."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

from megatoken.engine.request import FinishReason, Request, TokenEvent
from megatoken.engine.state import ReplicaState
from megatoken.engine.thread import Step
from megatoken.errors import MegatokenError, RequestError
from megatoken.serve.engine_client import fault
from megatoken.serve.fair_queue import RETRY_AFTER_SECONDS, FairQueue
from megatoken.serve.messages import (
    Busy,
    FrameReader,
    Health,
    Kind,
    ServedModel,
    Status,
    Submission,
    Unavailable,
    frame,
    pickled,
    step_frame,
    unpickled,
)
from megatoken.serve.metrics import Metrics
from megatoken.serve.tenants import Tenant

STUCK_SECONDS = 10.0
STATUS_SECONDS = 1.0
MOST_WAITING_BYTES = 256 << 20  # of requests in front of the engine, as their HTTP processes sent them
MOST_UNSENT_BYTES = 256 << 20  # of an HTTP process that does not read; then it is given up
STEPS_AHEAD = 2  # steps' worth of prompt tokens that the engine's own queue may hold
SEQUENCES_AHEAD = 16  # with one tenant, one request in so many waits in the engine, so that no free sequence does


class SharedEngine(Protocol):
    """What the hub asks of an engine: ``EngineThread``, or the mock engine."""

    failure: BaseException | None
    step_began_ns: int

    def submit(self, request: Request) -> int:
        """Queue a request; its events go to ``on_step``. Raises MegatokenError."""

    def cancel(self, request_id: int) -> None:
        """End a request."""

    def state(self) -> ReplicaState:
        """What it holds and has done."""


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """What the fair queue must know of the engine."""

    max_sequences: int
    max_batched_tokens: int
    cache_tokens: int
    page_size: int


@dataclass(slots=True, eq=False)
class _Entry:
    """A request that has not ended."""

    link: Link | None  # None: its HTTP process has ended
    client_id: int
    request: Request
    tenant: Tenant
    prompt_tokens: int
    arrival: float  # seconds of time.monotonic()
    priority: int
    waiting_bytes: int = 0  # of its message, until the engine has it
    engine_id: int | None = None
    handed_over: float = 0.0
    first: float = 0.0
    last: float = 0.0
    generated: int = 0
    stopped: bool = False  # cancelled because its answer has come to a stop string


class Hub:
    """Lives on the event loop's thread. ``take_step`` alone may be called from another one."""

    def __init__(self, max_queued: int, *, several_tenants: bool, restarts: bool, fail: Callable[[str], None]) -> None:
        """Prepares the hub; requests are taken from ``start`` on.

        Args:
            max_queued: requests that may wait.
            several_tenants: whether a share of the engine is kept free of any one tenant.
            restarts: whether an engine that has failed is started again.
            fail: called once when the engine has ended by an error, after everyone was sent that error.
        """
        self._loop = asyncio.get_running_loop()
        self._max_queued = max_queued
        self._several_tenants = several_tenants
        self._restarts = restarts
        self._waiting_bytes = 0
        self._fail = fail
        self._links: set[Link] = set()
        self._steps: deque[Step] = deque()
        self._entries: dict[int, _Entry] = {}  # by the engine's id
        self._unstarted_tokens = 0  # prompt tokens of requests in the engine that have no token yet
        self._health = Health.STARTING
        self._message = "the engine is starting"
        self._model: ServedModel | None = None
        self._last_step = time.monotonic()
        self._computed_tokens = 0
        self._failed = False
        self._compiling: set[asyncio.Task[None]] = set()

    # life

    def start(
        self, engine: SharedEngine, model: ServedModel, sizes: EngineSizes, check: Callable[[Request], object]
    ) -> None:
        """Take requests from now on; ``check``, called on any thread, keeps what it has compiled of a grammar."""
        self._engine, self._sizes, self._check_request = engine, sizes, check
        self._queue: FairQueue[_Entry] = FairQueue(
            max_queued=self._max_queued,
            max_running=sizes.max_sequences,
            cache_tokens=sizes.cache_tokens,
            reserve=self._several_tenants,
        )
        ahead = 0 if self._several_tenants else max(1, sizes.max_sequences // SEQUENCES_AHEAD)
        self._most_entries = sizes.max_sequences + ahead
        self.metrics = Metrics(model.name)
        self._model, self._health, self._message = model, Health.READY, "ready"
        self.send_status()

    async def watch(self) -> None:
        """Send a status every second; notice an engine that is stuck."""
        while True:
            await asyncio.sleep(STATUS_SECONDS)
            if self._health in (Health.READY, Health.STUCK):
                self._check()
            self.send_status()

    def send_status(self) -> None:
        """Send every HTTP process the state of the engine."""
        for link in self._links:
            self._greet(link)

    def _check(self) -> None:
        now = time.monotonic()
        began_ns = self._engine.step_began_ns
        stuck_for = now - began_ns / 1e9 if began_ns else (now - self._last_step if self._entries else 0.0)
        if stuck_for > STUCK_SECONDS:
            self._health = Health.STUCK
            self._message = f"the engine has made no step for {stuck_for:.0f} s"
        else:
            self._health, self._message = Health.READY, "ready"

    # links

    def joined(self, link: Link) -> None:
        """An HTTP process has connected."""
        self._links.add(link)
        self._greet(link)

    def left(self, link: Link) -> None:
        """An HTTP process has ended, and so have its clients."""
        self._links.discard(link)
        for entry in list(link.open.values()):
            self._cancel(entry)
            entry.link = None
        link.open.clear()

    def submit(self, link: Link, submission: Submission, message_bytes: int) -> None:
        """Queue a request of an HTTP process, which came in so many bytes; errors go back as its last event."""
        client_id, request, tenant, arrival_ns, priority = submission
        entry = _Entry(link, client_id, request, tenant, len(request.prompt), arrival_ns / 1e9, priority)
        link.open[client_id] = entry
        if not self._health.serves:
            self._end_with(entry, Unavailable(self._message))
            return
        if self._waiting_bytes + message_bytes > MOST_WAITING_BYTES or len(self._compiling) >= self._max_queued:
            self._refuse(entry, Busy("too much waits for the engine already; try again later", RETRY_AFTER_SECONDS))
            return
        entry.waiting_bytes = message_bytes
        self._waiting_bytes += message_bytes
        if request.grammar is None:
            self._queue_entry(entry)
        else:
            task = self._loop.create_task(self._compile(entry))
            self._compiling.add(task)
            task.add_done_callback(self._compiling.discard)

    async def _compile(self, entry: _Entry) -> None:
        """Compile the grammar of a request on a thread of its own, then queue the request."""
        try:
            await asyncio.to_thread(self._check_request, entry.request)
        except Exception as error:
            self._refuse(entry, error)
            return
        if entry.link is None:  # the client has left
            return
        if self._health.serves:
            self._queue_entry(entry)
        else:
            self._end_with(entry, Unavailable(self._message))

    def _queue_entry(self, entry: _Entry) -> None:
        try:
            if not entry.prompt_tokens:
                raise RequestError("the prompt is empty; give at least one token", "prompt")
            lengths = entry.prompt_tokens, entry.request.max_tokens
            self._queue.add(entry.tenant, entry, *lengths, time.monotonic(), entry.priority)
        except Exception as error:
            self._refuse(entry, error)
            return
        self._pump()

    def cancel(self, link: Link, client_id: int, *, stopped: bool) -> None:
        """A client has left, or its answer has come to a stop string."""
        entry = link.open.pop(client_id, None)
        if entry is not None:
            entry.stopped = stopped
            self._cancel(entry)
            entry.link = None
            self._pump()

    def answer_metrics(self, link: Link) -> None:
        """Send the metrics."""
        link.send(frame(Kind.METRICS, self._metrics_text().encode()))

    # steps

    def take_step(self, step: Step) -> None:
        """Take over a step's events; called on the engine's thread, which loses no more time than for this."""
        self._steps.append(step)
        if len(self._steps) == 1:
            self._loop.call_soon_threadsafe(self._take_steps)

    def _take_steps(self) -> None:
        while self._steps:
            step = self._steps[0]
            try:
                # The last step of an engine that has failed ends every request by the same error: _die says more.
                last = self._engine.failure is not None and all(event.error is not None for event in step.events)
                if not self._failed and not last:
                    self._deliver(step)
            except Exception as error:
                self._die(MegatokenError(fault("the events of a step cannot be delivered", error)))
            finally:
                self._steps.popleft()  # only now: take_step wakes this thread when it finds the deque empty
        for link in self._links:
            link.flush()
        failure = self._engine.failure
        if failure is not None:
            self._die(failure)
        elif not self._failed:
            self._pump()

    def _deliver(self, step: Step) -> None:
        before, ended = self._last_step, step.ended_ns / 1e9
        self._last_step = ended
        entries = self._entries
        latencies = self.metrics.histograms["inter_token_latency_seconds"]
        of_step_before = 0  # tokens whose answer got the one before in the last step: nearly all
        served: dict[str, int] = {}  # tokens by tenant
        tenants: dict[str, Tenant] = {}
        for event in step.events:
            entry = entries[event.request_id]
            count = len(event.token_ids)
            if count:
                if entry.generated and entry.last == before:
                    of_step_before += 1
                elif entry.generated:
                    latencies.observe(ended - entry.last)
                else:
                    self._started(entry, event, ended)
                entry.last = ended
                entry.generated += count
                name = entry.tenant.name
                if name in served:
                    served[name] += count
                else:
                    served[name], tenants[name] = count, entry.tenant
            link = entry.link
            if event.finish_reason is not None:
                self._ended(entry, event, ended)
            if link is not None:
                link.collect(entry.client_id, event)
        latencies.observe(ended - before, of_step_before)
        for name, tokens in served.items():
            self.metrics.tenant(name).generation_tokens += tokens
            self._queue.served(tenants[name], tokens)
        for link in self._links:
            link.end_step()
        computed = self._engine.state().processed_tokens
        if computed > self._computed_tokens:
            self.metrics.histograms["iteration_tokens_total"].observe(computed - self._computed_tokens)
            self._computed_tokens = computed

    def _started(self, entry: _Entry, event: TokenEvent, now: float) -> None:
        entry.first = now
        self._unstarted_tokens -= entry.prompt_tokens
        tenant = self.metrics.tenant(entry.tenant.name)
        tenant.ttft.observe(now - entry.arrival)
        tenant.prompt_tokens += entry.prompt_tokens
        tenant.cached_tokens += event.cached_tokens
        if event.cached_tokens:
            self._queue.refund(entry.tenant, event.cached_tokens)
        self.metrics.histograms["time_to_first_token_seconds"].observe(now - entry.arrival)
        self.metrics.histograms["request_prefill_time_seconds"].observe(now - entry.handed_over)

    def _ended(self, entry: _Entry, event: TokenEvent, now: float) -> None:
        assert entry.engine_id is not None
        del self._entries[entry.engine_id]
        if not entry.first:
            self._unstarted_tokens -= entry.prompt_tokens
        self._queue.ended(entry.tenant, entry.prompt_tokens, entry.request.max_tokens, entry.generated)
        if entry.link is not None:
            entry.link.open.pop(entry.client_id, None)
        observe = self.metrics.histograms
        tenant = self.metrics.tenant(entry.tenant.name)
        assert event.finish_reason is not None
        reason = event.finish_reason.value
        if event.finish_reason is FinishReason.CANCELLED:
            reason = FinishReason.STOP.value if entry.stopped else "abort"
        tenant.ended[reason] = tenant.ended.get(reason, 0) + 1
        observe["e2e_request_latency_seconds"].observe(now - entry.arrival)
        observe["request_inference_time_seconds"].observe(now - entry.handed_over)
        observe["request_prompt_tokens"].observe(entry.prompt_tokens)
        observe["request_generation_tokens"].observe(entry.generated)
        observe["request_params_max_tokens"].observe(entry.request.max_tokens)
        if entry.first:
            observe["request_decode_time_seconds"].observe(now - entry.first)

    def _pump(self) -> None:
        """Hand requests over while the engine's own queue is short: the order is decided as late as possible."""
        limit = STEPS_AHEAD * self._sizes.max_batched_tokens
        while self._queue.waiting and self._unstarted_tokens < limit:
            if len(self._entries) >= self._most_entries:
                return
            entry = self._queue.take()
            if entry is None:
                return
            self._not_waiting(entry)
            try:
                entry.engine_id = self._engine.submit(entry.request)
            except Exception as error:
                self._queue.ended(entry.tenant, entry.prompt_tokens, entry.request.max_tokens, 0)
                failure = self._engine.failure
                self._refuse(entry, error if failure is None else Unavailable(self._failed_by(failure)))
                continue
            entry.handed_over = time.monotonic()
            if not self._entries:
                self._last_step = entry.handed_over
            self._entries[entry.engine_id] = entry
            self._unstarted_tokens += entry.prompt_tokens
            self.metrics.histograms["request_queue_time_seconds"].observe(entry.handed_over - entry.arrival)

    # ends

    def _not_waiting(self, entry: _Entry) -> None:
        self._waiting_bytes -= entry.waiting_bytes
        entry.waiting_bytes = 0

    def _cancel(self, entry: _Entry) -> None:
        self._not_waiting(entry)
        if entry.engine_id is not None:
            self._engine.cancel(entry.engine_id)
        elif self._queue.remove(entry.tenant, entry):
            tenant = self.metrics.tenant(entry.tenant.name)
            tenant.ended["abort"] = tenant.ended.get("abort", 0) + 1

    def _refuse(self, entry: _Entry, error: Exception) -> None:
        self.metrics.tenant(entry.tenant.name).refused += 1
        if not isinstance(error, MegatokenError):
            error = MegatokenError(fault("the request cannot be taken", error))
        self._end_with(entry, error)

    def _end_with(self, entry: _Entry, error: MegatokenError) -> None:
        self._not_waiting(entry)
        link, entry.link = entry.link, None
        if link is not None:
            link.open.pop(entry.client_id, None)
            link.collect(entry.client_id, TokenEvent(entry.client_id, (), FinishReason.ERROR, error))
            link.end_step()
            link.flush()

    def _failed_by(self, error: BaseException) -> str:
        what_next = "it is started again" if self._restarts else "the server stops"
        return f"{_failure(error)}; {what_next}; send the request again"

    def _die(self, failure: BaseException) -> None:
        """End every request, and report that the engine, or the hub itself, has failed."""
        if self._failed:
            return
        self._failed = True
        self._health = Health.DEAD
        self._message = self._failed_by(failure)
        for _ in self._queue.drain():
            pass
        for entry in [entry for link in self._links for entry in link.open.values()]:
            self._end_with(entry, Unavailable(self._message))
        self.send_status()
        self._fail(_failure(failure))

    def _greet(self, link: Link) -> None:
        link.send(pickled(Kind.STATUS, tuple(Status(self._health, self._message, self._model))))

    def _metrics_text(self) -> str:
        if self._model is None:
            return ""
        queues = {one.tenant.name: (len(one.queued), one.running) for one in self._queue.tenants()}
        for name in queues:
            self.metrics.tenant(name)
        cache = {
            "block_size": self._sizes.page_size,
            "num_gpu_blocks": self._sizes.cache_tokens // max(1, self._sizes.page_size),
        }
        return self.metrics.text(self._engine.state(), queues, cache, healthy=self._health.serves)


def _failure(error: BaseException) -> str:
    return (
        f"the engine has failed: {error}"
        if isinstance(error, MegatokenError)
        else fault("the engine has failed", error)
    )


class Link(asyncio.Protocol):
    """The connection of one HTTP process.

    Attributes:
        open: its requests that have not ended, by their ids.
    """

    def __init__(self, hub: Hub) -> None:
        self.open: dict[int, _Entry] = {}
        self._hub = hub
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._request_ids: list[int] = []
        self._token_ids: list[int] = []
        self._others: list[TokenEvent] = []
        self._frames: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet."""
        self._transport = cast(asyncio.Transport, transport)
        self._hub.joined(self)

    def connection_lost(self, error: Exception | None) -> None:
        """Cancel its requests."""
        self._transport = None
        self._hub.left(self)

    def data_received(self, data: bytes) -> None:
        """Take requests and cancellations."""
        for kind, payload in self._reader.feed(data):
            if kind is Kind.SUBMIT:
                self._hub.submit(self, Submission(*unpickled(payload)), len(payload))
            elif kind is Kind.CANCEL:
                client_id, stopped = unpickled(payload)
                self._hub.cancel(self, client_id, stopped=stopped)
            elif kind is Kind.METRICS:
                self._hub.answer_metrics(self)

    def collect(self, client_id: int, event: TokenEvent) -> None:
        """Add an event to the frame of this step."""
        if event.is_one_token:
            self._request_ids.append(client_id)
            self._token_ids.append(event.token_ids[0])
        else:
            self._others.append(event._replace(request_id=client_id))

    def end_step(self) -> None:
        """Make the frame of this step."""
        if self._request_ids or self._others:
            self._frames.append(step_frame(self._request_ids, self._token_ids, self._others))
            self._request_ids, self._token_ids, self._others = [], [], []

    def flush(self) -> None:
        """Send the frames."""
        if self._frames:
            frames, self._frames = b"".join(self._frames), []
            self.send(frames)

    def send(self, data: bytes) -> None:
        """Write, unless the process is gone or has stopped reading."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if transport.get_write_buffer_size() > MOST_UNSENT_BYTES:
            transport.abort()
        else:
            transport.write(data)
