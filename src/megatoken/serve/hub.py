"""The hub: requests of all HTTP processes go through the fair queue to the engine, or those of a rack; events back."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from megatoken.engine.request import FinishReason, Request, TokenEvent
from megatoken.engine.state import ReplicaState
from megatoken.engine.thread import Step
from megatoken.errors import MegatokenError, RequestError
from megatoken.framing import frame
from megatoken.serve.engine_client import fault
from megatoken.serve.fair_queue import RETRY_AFTER_SECONDS, FairQueue
from megatoken.serve.link import Entry, Link
from megatoken.serve.messages import (
    NO_SIZES,
    Busy,
    EngineSizes,
    Health,
    Kind,
    Replicas,
    ServedModel,
    StartedOver,
    Status,
    Submission,
    Unavailable,
    pickled,
)
from megatoken.serve.metrics import EngineCounters, EngineReport, Metrics
from megatoken.serve.tenants import Tenant

STUCK_SECONDS = 10.0
STATUS_SECONDS = 1.0
MOST_WAITING_BYTES = 256 << 20  # of requests in front of the engine, as their HTTP processes sent them
# Steps' worth of prompt tokens that the engine may hold of one tenant. Those of the two steps that run count until
# their first tokens have come: with two steps' worth, an engine finds no prompt of a tenant that floods in half of its
# plans, and does not see that it floods. Six was found by trial (docs/performance.md, "Two keys").
STEPS_AHEAD = 6
SEQUENCES_AHEAD = 16  # with one tenant, one request in so many waits in the engine, so that no free sequence does


class SharedEngine(Protocol):
    """What the hub asks of an engine: ``EngineThread``, the mock engine, or the replicas of a rack."""

    failure: BaseException | None
    step_began_ns: int

    def submit(self, request: Request) -> int:
        """Queue a request; its events go to ``on_step``. Raises MegatokenError."""

    def cancel(self, request_id: int) -> None:
        """End a request."""

    def state(self) -> ReplicaState:
        """What it holds and has done."""


class Hub:
    """Lives on the event loop's thread. ``take_step`` alone may be called from another one."""

    def __init__(
        self, max_queued: int, *, several_tenants: bool, restarts: bool, fail: Callable[[str], None], rack: bool = False
    ) -> None:
        """Prepares the hub; requests are taken from ``start`` on.

        Args:
            max_queued: requests that may wait.
            several_tenants: whether a share of the engine is kept free of any one tenant.
            restarts: whether an engine that has failed is started again.
            fail: called once when the engine has ended by an error, after everyone was sent that error.
            rack: whether the engine is the replicas of a rack, which come and go: ``resize``.
        """
        self._loop = asyncio.get_running_loop()
        self._max_queued = max_queued
        self._several_tenants = several_tenants
        self._restarts = restarts
        self._waiting_bytes = 0
        self._fail = fail
        self._rack = rack
        self._ready = (Health.READY, "ready")
        self._replicas: Replicas | None = None
        self._sizes = NO_SIZES
        self._links: set[Link] = set()
        self._steps: deque[Step] = deque()
        self._entries: dict[int, Entry] = {}  # by the engine's id
        self._health = Health.STARTING
        self._message = "the engine is starting"
        self.model: ServedModel | None = None  # that is served; None until ``start``
        self._last_step = time.monotonic()
        self._last_steps: dict[str, float] = {}  # by engine
        self._computed_tokens = 0
        self._failed = False
        self._compiling: set[asyncio.Task[None]] = set()

    # life

    def start(
        self,
        engine: SharedEngine,
        model: ServedModel,
        sizes: EngineSizes,
        check: Callable[[Request], object],
        reports: Callable[[], Mapping[str, EngineReport]] | None = None,
    ) -> None:
        """Take requests from now on.

        ``check``, called on any thread, keeps what it has compiled of a grammar. ``reports``: what metrics say of each
        engine of a rack.
        """
        self._engine, self._check_request = engine, check
        self._reports = reports or (lambda: {"0": EngineReport(engine.state(), sizes)})
        self._queue: FairQueue[Entry] = FairQueue(max_queued=self._max_queued, reserve=self._several_tenants)
        self.metrics = Metrics(model.name, rack=self._rack)
        self.model, (self._health, self._message) = model, self._ready
        self.resize(sizes)

    def resize(self, sizes: EngineSizes) -> None:
        """Hand over as many requests as fit into engines of these sizes together."""
        self._sizes = sizes
        self._queue.resize(sizes.max_sequences, sizes.cache_tokens, STEPS_AHEAD * sizes.max_batched_tokens)
        ahead = 0 if self._several_tenants else max(1, sizes.max_sequences // SEQUENCES_AHEAD)
        self._most_entries = sizes.max_sequences + ahead if sizes.max_sequences else 0
        self.send_status()
        self._pump()

    def set_health(self, health: Health, message: str, replicas: Replicas) -> None:
        """What the hub reports while it is not stuck: so many replicas of a rack serve."""
        self._ready, self._replicas = (health, message), replicas
        if not self._failed:
            self._health, self._message = self._ready
            self.send_status()

    async def watch(self) -> None:
        """Send a status every second; notice an engine that is stuck."""
        while True:
            await asyncio.sleep(STATUS_SECONDS)
            if self._health.serves or self._health is Health.STUCK:
                self._check()
            self.send_status()

    def send_status(self) -> None:
        """Send every HTTP process the state of the engine."""
        for link in self._links:
            self._send_status_to(link)

    def _check(self) -> None:
        now = time.monotonic()
        began_ns = self._engine.step_began_ns
        stuck_for = now - began_ns / 1e9 if began_ns else (now - self._last_step if self._entries else 0.0)
        if stuck_for > STUCK_SECONDS:
            self._health = Health.STUCK
            self._message = f"the engine has made no step for {stuck_for:.0f} s"
        else:
            self._health, self._message = self._ready

    # links

    def joined(self, link: Link) -> None:
        """An HTTP process has connected."""
        self._links.add(link)
        self._send_status_to(link)

    def left(self, link: Link) -> None:
        """An HTTP process has ended, and so have its clients."""
        self._links.discard(link)
        for entry in list(link.open.values()):
            self._cancel(entry)
            entry.link = None
        link.open.clear()

    def submit(self, link: Link, submission: Submission, message_bytes: int) -> None:
        """Queue a request of an HTTP process, which came in so many bytes; errors go back as its last event."""
        client_id, request, tenant, arrival_ns, priority, whole, answers = submission
        if self._several_tenants:
            request = replace(request, group=tenant.name, weight=tenant.weight)
        entry = Entry(link, client_id, request, tenant, len(request.prompt), arrival_ns / 1e9, priority)
        entry.whole, entry.answers = whole, answers
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

    async def _compile(self, entry: Entry) -> None:
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

    def _queue_entry(self, entry: Entry) -> None:
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

    def take_steps(self, steps: Sequence[Step]) -> None:
        """Hand steps' events out now; for the event loop's thread."""
        self._steps.extend(steps)
        self._take_steps()

    def take_tokens(self, label: str, request_ids: Sequence[int], token_ids: Sequence[int], now: float) -> None:
        """Take one token of each request; ids of ended ones pass. The next ``take_steps`` sends what this collects."""
        before = self._last_steps.get(label, 0.0)
        self._last_step = self._last_steps[label] = now
        entries = self._entries
        counters = self.metrics.engine(label)
        latencies = counters.histograms["inter_token_latency_seconds"]
        of_step_before = 0
        served: dict[str, list[Entry]] = {}
        for request_id, token_id in zip(request_ids, token_ids, strict=True):
            entry = entries.get(request_id)
            if entry is None:
                continue
            if not entry.generated:
                entry.engine = label
                self._started(entry, 0, now)
            elif entry.last == before:
                of_step_before += 1
            else:
                latencies.observe(now - entry.last)
            entry.last = now
            entry.generated += 1
            name = entry.tenant.name
            if name in served:
                served[name].append(entry)
            else:
                served[name] = [entry]
            if entry.link is not None:
                entry.link.collect_token(entry.client_id, token_id)
        latencies.observe(now - before, of_step_before)
        for name, entries_of in served.items():
            self._charge(counters, name, entries_of[0].tenant, len(entries_of))
        for link in self._links:
            link.end_step()

    def start_over(self, request_id: int) -> bool:
        """Whether a request that its engine has lost can be computed again: its client has seen nothing of it."""
        entry = self._entries[request_id]
        if entry.generated and not entry.whole:
            return False
        if entry.generated and entry.link is not None:
            entry.link.collect(entry.client_id, TokenEvent(entry.client_id, (), None, StartedOver("started over")))
        return True

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
            if not self._rack:  # whose replicas report their totals once a second
                self._count_computed()

    def _deliver(self, step: Step) -> None:
        label, ended = step.engine, step.ended_ns / 1e9
        before = self._last_steps.get(label, 0.0)
        self._last_step = self._last_steps[label] = ended
        entries = self._entries
        counters = self.metrics.engine(label)
        latencies = counters.histograms["inter_token_latency_seconds"]
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
                    entry.engine = label
                    self._started(entry, event.cached_tokens, ended)
                entry.last = ended
                entry.generated += count
                name = entry.tenant.name
                if name in served:
                    served[name] += count
                else:
                    served[name], tenants[name] = count, entry.tenant
            link = entry.link
            if event.finish_reason is not None:
                entry.engine = label
                self._ended(entry, event, ended)
            if link is not None:
                link.collect(entry.client_id, event)
        latencies.observe(ended - before, of_step_before)
        for name, tokens in served.items():
            self._charge(counters, name, tenants[name], tokens)
        for link in self._links:
            link.end_step()

    def _count_computed(self) -> None:
        computed, before = self._engine.state().processed_tokens, self._computed_tokens
        if computed > before:
            self.metrics.front().histograms["iteration_tokens_total"].observe(computed - before)
            self._computed_tokens = computed

    def _charge(self, counters: EngineCounters, name: str, tenant: Tenant, tokens: int) -> None:
        counters.generation_tokens += tokens
        self.metrics.tenant(name).generation_tokens += tokens
        self._queue.served(tenant, tokens)

    def _started(self, entry: Entry, cached_tokens: int, now: float) -> None:
        entry.first = now
        self._queue.started(entry.tenant, entry.prompt_tokens)
        tenant = self.metrics.tenant(entry.tenant.name)
        tenant.ttft.observe(now - entry.arrival)
        tenant.prompt_tokens += entry.prompt_tokens
        tenant.cached_tokens += cached_tokens
        if cached_tokens:
            self._queue.refund(entry.tenant, cached_tokens)
        counters = self.metrics.engine(entry.engine)
        counters.prompt_tokens += entry.prompt_tokens
        counters.histograms["time_to_first_token_seconds"].observe(now - entry.arrival)
        counters.histograms["request_prefill_time_seconds"].observe(now - entry.handed_over)

    def _ended(self, entry: Entry, event: TokenEvent, now: float) -> None:
        assert entry.engine_id is not None
        del self._entries[entry.engine_id]
        if not entry.first:
            self._queue.started(entry.tenant, entry.prompt_tokens)
        self._queue.ended(entry.tenant, entry.prompt_tokens, entry.request.max_tokens, entry.generated)
        if entry.link is not None:
            entry.link.open.pop(entry.client_id, None)
        counters = self.metrics.engine(entry.engine)
        observe = counters.histograms
        assert event.finish_reason is not None
        reason = event.finish_reason.value
        if event.finish_reason is FinishReason.CANCELLED:
            reason = FinishReason.STOP.value if entry.stopped else "abort"
        counters.ended[reason] = counters.ended.get(reason, 0) + 1
        observe["request_queue_time_seconds"].observe(entry.handed_over - entry.arrival)
        observe["e2e_request_latency_seconds"].observe(now - entry.arrival)
        observe["request_inference_time_seconds"].observe(now - entry.handed_over)
        observe["request_prompt_tokens"].observe(entry.prompt_tokens)
        observe["request_generation_tokens"].observe(entry.generated)
        observe["request_params_max_tokens"].observe(entry.request.max_tokens)
        if entry.answers:
            observe["request_params_n"].observe(entry.answers)
        if entry.first:
            observe["request_decode_time_seconds"].observe(now - entry.first)

    def _pump(self) -> None:
        """Hand requests over while the engine's own queue is short: the order is decided as late as possible."""
        while self._queue.waiting and len(self._entries) < self._most_entries:
            entry = self._queue.take()
            if entry is None:
                return
            self._not_waiting(entry)
            try:
                entry.engine_id = self._engine.submit(entry.request)
            except Exception as error:
                self._queue.started(entry.tenant, entry.prompt_tokens)
                self._queue.ended(entry.tenant, entry.prompt_tokens, entry.request.max_tokens, 0)
                failure = self._engine.failure
                self._refuse(entry, error if failure is None else Unavailable(self._failed_by(failure)))
                continue
            entry.handed_over = time.monotonic()
            if not self._entries:
                self._last_step = entry.handed_over
                self._last_steps.clear()
            self._entries[entry.engine_id] = entry

    # ends

    def _not_waiting(self, entry: Entry) -> None:
        self._waiting_bytes -= entry.waiting_bytes
        entry.waiting_bytes = 0

    def _cancel(self, entry: Entry) -> None:
        self._not_waiting(entry)
        if entry.engine_id is not None:
            self._engine.cancel(entry.engine_id)
        elif self._queue.remove(entry.tenant, entry):
            front = self.metrics.front()
            front.ended["abort"] = front.ended.get("abort", 0) + 1

    def _refuse(self, entry: Entry, error: Exception) -> None:
        self.metrics.tenant(entry.tenant.name).refused += 1
        if not isinstance(error, MegatokenError):
            error = MegatokenError(fault("the request cannot be taken", error))
        self._end_with(entry, error)

    def _end_with(self, entry: Entry, error: MegatokenError) -> None:
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
        self.end_all(self._message)
        self.send_status()
        self._fail(_failure(failure))

    def end_all(self, message: str) -> None:
        """End every open request with an error."""
        if self.model is not None:
            for _ in self._queue.drain():
                pass
        for entry in [entry for link in self._links for entry in link.open.values()]:
            self._end_with(entry, Unavailable(message))

    def _send_status_to(self, link: Link) -> None:
        status = Status(self._health, self._message, self.model, replicas=self._replicas)
        if self.model is not None and not self._rack:
            status = status._replace(sizes=self._sizes, state=self._engine.state())
        link.send(pickled(Kind.STATUS, tuple(status)))

    def _metrics_text(self) -> str:
        if self.model is None:
            return ""
        queues = {one.tenant.name: (len(one.queued), one.running) for one in self._queue.tenants()}
        for name in queues:
            self.metrics.tenant(name)
        share = 1.0 if self._replicas is None else self._replicas.share
        return self.metrics.text(self._reports(), queues, healthy=self._health.serves, share=share)


def _failure(error: BaseException) -> str:
    if isinstance(error, MegatokenError):
        return f"the engine has failed: {error}"
    return fault("the engine has failed", error)
