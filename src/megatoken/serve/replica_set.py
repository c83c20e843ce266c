"""The replicas of a rack as one engine: the router gives each request to one of them, and again if that one is lost.

A request is on one replica at a time. When the connection to that replica ends, nothing more is read from it, so no
answer comes twice. Requests of which no client has seen a token are computed again elsewhere, ``MOST_RUNS`` times at
most, because a request can be what ends its replica; the others end with an error. Everything but ``register``,
``unregister`` and ``connected`` is for the event loop's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from megatoken.engine.config import model_folder
from megatoken.engine.request import FinishReason, Request, TokenEvent, check_options
from megatoken.engine.state import ReplicaState
from megatoken.engine.thread import Step
from megatoken.errors import MegatokenError
from megatoken.framing import FrameReader
from megatoken.rack.records import Place
from megatoken.serve.hub import SEQUENCES_AHEAD, Hub
from megatoken.serve.messages import (
    NO_SIZES,
    EngineSizes,
    Health,
    Kind,
    Replicas,
    ServedModel,
    Status,
    Submission,
    Unavailable,
    pickled,
    step_parts,
    submission_frame,
    unpickled,
)
from megatoken.serve.metrics import QUEUE, EngineReport
from megatoken.serve.options import ServeConfig
from megatoken.serve.routing import Load, PrefixRouter
from megatoken.serve.tenants import DEFAULT_TENANT
from megatoken.text import count_of

MOST_RUNS = 3
LOOK_SECONDS = 0.25
LONGEST_LOOK_SECONDS = 1.0


@dataclass(slots=True, eq=False)
class _Routed:
    """A request that has not ended."""

    request_id: int
    request: Request
    keys: list[bytes]
    runs: int = 0
    link: ReplicaLink | None = None  # None: waits for a replica


@dataclass(slots=True)
class _Known:
    """A replica that may connect, or has."""

    place: Place
    label: str
    lost_at: float | None = None  # time.monotonic(); None: it serves, has not served yet, or was given up
    sizes: EngineSizes = NO_SIZES
    state: ReplicaState = field(default_factory=ReplicaState)


class ReplicaSet:
    """All replicas of a server.

    Attributes:
        failure: set when no replica will come back.
        note: takes a line for the log, on any thread.
        address: where processes that a cluster starts connect to.
        step_began_ns: always 0: replicas notice themselves that their engine is stuck.
    """

    def __init__(
        self,
        hub: Hub,  # that hands requests over, and out what comes back; started when the first replica serves
        options: ServeConfig,  # of the server
        *,
        note: Callable[[str], None],  # takes a line for the log, on any thread
        give_up: Callable[[int], None],  # called with the number of a replica that was lost and has not come back
        # called whenever it changes how many replicas serve: with that number, and how many should
        on_change: Callable[[int, int], None],
    ) -> None:
        """Prepares an empty set."""
        self.failure: BaseException | None = None
        self.step_began_ns = 0
        self.address = ("", 0)
        self._hub = hub
        self._options = options
        self.note, self._give_up, self._on_change = note, give_up, on_change
        self._loop = asyncio.get_running_loop()
        self._labels: dict[Place, str] = {}
        self._known: dict[int, _Known] = {}
        self._live: dict[int, ReplicaLink] = {}
        self._connected: frozenset[int] = frozenset()
        self._expected = 0
        self._open: dict[int, _Routed] = {}
        self._orphans: deque[_Routed] = deque()
        self._router: PrefixRouter | None = None
        self._next_id = 0
        self._empty_since: float | None = None
        self._cause = ""

    # the side of the cluster: any thread

    def register(self, number: int, places: Sequence[Place]) -> None:
        """Let the process with that number connect, which has a replica at ``places[0]``."""
        (place,) = places
        self._known[number] = _Known(place, self._labels.setdefault(place, str(len(self._labels))))
        self._expected = max(self._expected, len(self._known))

    def unregister(self, number: int, cause: str) -> None:
        """Remove the process with that number; it will not come back."""
        self._loop.call_soon_threadsafe(self._unregister, number, cause)

    def connected(self) -> set[int]:
        """Numbers of the processes that serve now."""
        return set(self._connected)

    # the side of the hub

    def submit(self, request: Request) -> int:
        """Give a request to a replica."""
        keys = self._router.keys(request.prompt, request.cache_salt) if self._router is not None else []  # type: ignore[arg-type]
        routed = _Routed(self._next_id, request, keys)
        self._next_id += 1
        self._open[routed.request_id] = routed
        self._place(routed)
        return routed.request_id

    def cancel(self, request_id: int) -> None:
        """End a request. Ids of ended requests pass."""
        routed = self._open.pop(request_id, None)
        if routed is None:
            return
        label = QUEUE
        if routed.link is None:
            self._orphans.remove(routed)
        else:
            routed.link.cancel(request_id)
            label = routed.link.label
        self._hub.take_step(_step([TokenEvent(request_id, (), FinishReason.CANCELLED)], label))

    def state(self) -> ReplicaState:
        """Nothing: the rack's hub asks for ``reports``."""
        return ReplicaState()

    def reports(self) -> dict[str, EngineReport]:
        """What metrics say of every replica, by its label."""
        found = {}
        for number, known in self._known.items():
            link, where = self._live.get(number), known.place
            waiting = min(known.state.waiting, len(link.open)) if link is not None else 0
            running = len(link.open) - waiting if link is not None else 0
            free = known.state.pages_free if running else known.state.pages
            state = replace(known.state, waiting=waiting, running=running, pages_free=free)
            place = {"node": where.node, "replica": str(where.replica)}
            found[known.label] = EngineReport(state, known.sizes, place, link is not None)
        return found

    # the side of the replicas

    def admit(self, number: int) -> ReplicaLink:
        """The protocol of a connection on which a replica has given its number."""
        return ReplicaLink(self, number)

    def heard(self, link: ReplicaLink, status: Status) -> None:
        """Take a replica's status."""
        known = self._known.get(link.number)
        if known is None or link.lost:  # given up before it came
            link.close()
            return
        known.sizes, known.state = status.sizes, status.state
        if link.number in self._live:
            if not status.health.serves:
                self.lose(link, status.message)
        elif status.health.serves and status.model is not None:
            self._join(link, known, status.model)

    def connecting(self, link: ReplicaLink) -> None:
        """A replica has connected; its older connection no longer counts."""
        if (before := self._live.get(link.number)) is not None:
            self.lose(before, "it connected again")

    def lose(self, link: ReplicaLink, cause: str) -> None:
        """Nothing more comes on a connection: run its requests elsewhere, or end them."""
        if link.lost:
            return
        link.lost = True
        link.close()
        if self._live.get(link.number) is not link:
            return
        known = self._known[link.number]
        del self._live[link.number]
        assert self._router is not None
        self._router.remove(link.number)
        known.lost_at = time.monotonic()
        again, ends = [], []
        for request_id, routed in link.open.items():
            routed.link = None
            if routed.runs < MOST_RUNS and self._hub.start_over(request_id):
                again.append(routed)
            else:
                del self._open[request_id]
                error = Unavailable("the replica that computed this answer was lost; send the request again")
                ends.append(TokenEvent(request_id, (), FinishReason.ERROR, error))
        self._cause = f"{known.place.node}/{known.place.replica} was lost: {cause}"
        self.note(
            f"replica {self._cause}; {len(self._live)} of {count_of(self._expected, 'replica')} left; "
            f"{count_of(len(again), 'request')} started over elsewhere, {len(ends)} ended with an error"
        )
        for routed in again:
            self._place(routed)
        self._changed()
        self._hub.take_steps([_step(ends, known.label)])

    async def watch(self) -> None:
        """Notice replicas that are silent, and requests that have waited too long for one."""
        now = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now, before = time.monotonic(), now
            if now - before > LONGEST_LOOK_SECONDS:  # this process was stopped and could hear no replica
                for link in self._live.values():
                    link.heard += now - before
            for link in list(self._live.values()):
                if now - link.heard > self._options.rack.dead_after_seconds:
                    self.lose(link, f"it was silent for {now - link.heard:.1f} s")
            for number, known in list(self._known.items()):
                if known.lost_at is not None and now - known.lost_at > self._options.rack.reconnect_seconds:
                    known.lost_at = None
                    self._give_up(number)
            if self._empty_since is not None and now - self._empty_since > self._options.rack.wait_seconds:
                self._empty_since = None
                self._end_orphans()

    # inside

    def _unregister(self, number: int, cause: str) -> None:
        if (link := self._live.get(number)) is not None:
            self.lose(link, cause)
        known = self._known.pop(number, None)
        if known is not None:
            self._cause = f"{known.place.node}/{known.place.replica} was lost: {cause}"
        if not self._known and not self._options.restart and self._router is not None:
            self.failure = MegatokenError(f"no replica is left; the last, {self._cause}")
            self._hub.take_steps([])

    def _join(self, link: ReplicaLink, known: _Known, model: ServedModel) -> None:
        known.lost_at = None
        link.label, link.max_sequences = known.label, known.sizes.max_sequences
        first = self._router is None
        if self._router is None:
            self._router = PrefixRouter(known.sizes.page_size if self._options.engine.prefix_cache else 0)
        self._router.add(link.number, known.sizes.cache_tokens)
        self._live[link.number] = link
        self._empty_since = None
        while self._orphans:
            self._place(self._orphans.popleft())
        if first:
            folder = model_folder(self._options.model).resolve()  # on this machine, where HTTP processes read its files
            model = replace(model, folder=folder if folder.is_dir() else None)
            self._hub.start(self, model, known.sizes, check_options, self.reports)
        elif self._cause:
            self.note(
                f"replica {known.place.node}/{known.place.replica} serves; "
                f"{len(self._live)} of {count_of(self._expected, 'replica')}"
            )
        self._changed()

    def _changed(self) -> None:
        self._connected = frozenset(self._live)
        serving, expected = len(self._live), self._expected
        if serving >= expected:
            self._cause = ""
            health, message = Health.READY, "ready"
        elif serving:
            health, message = Health.DEGRADED, f"{serving} of {count_of(expected, 'replica')} serve"
        else:
            self._empty_since = time.monotonic()
            health, message = Health.STARTING, "no replica serves now"
        if self._cause:
            message += f"; {self._cause}"
        self._hub.set_health(health, message, Replicas(serving, expected))
        total = NO_SIZES
        for number in self._live:
            total = self._known[number].sizes + total
        self._hub.resize(total)
        self._on_change(serving, expected)

    def _place(self, routed: _Routed) -> None:
        if not self._live:
            self._orphans.append(routed)
            return
        assert self._router is not None
        loads = {number: Load(len(link.open), link.max_sequences) for number, link in self._live.items()}
        with_room = {number: load for number, load in loads.items() if load.requests < _most_requests(load)}
        number = self._router.choose(routed.keys, with_room or loads)
        self._router.sent(number, routed.keys)
        routed.runs += 1
        routed.link = self._live[number]
        routed.link.submit(routed)

    def ended(self, request_id: int) -> None:
        """A replica has sent the last event of a request."""
        del self._open[request_id]

    def _end_orphans(self) -> None:
        message = f"no replica has served for {self._options.rack.wait_seconds:g} s; send the request again"
        ends = []
        while self._orphans:
            routed = self._orphans.popleft()
            del self._open[routed.request_id]
            ends.append(TokenEvent(routed.request_id, (), FinishReason.ERROR, Unavailable(message)))
        self._hub.end_all(message)
        self._hub.take_steps([_step(ends, QUEUE)])

    def take(
        self, link: ReplicaLink, request_ids: Sequence[int], token_ids: Sequence[int], others: list[TokenEvent]
    ) -> None:
        """Take what a step of a replica brought: single tokens, and all other events. ``flush`` sends it on."""
        if request_ids:
            self._hub.take_tokens(link.label, request_ids, token_ids, link.heard)
        if others:
            self._hub.take_steps([_step(others, link.label)])

    def flush(self) -> None:
        """Send on what was taken, and hand over what may run now."""
        if self._router is not None:
            self._hub.take_steps([])


class ReplicaLink(asyncio.Protocol):
    """The router's end of the connection of one replica."""

    def __init__(self, replicas: ReplicaSet, number: int) -> None:
        self.number = number
        self.open: dict[int, _Routed] = {}  # requests that it has
        self.heard = time.monotonic()  # time.monotonic() of its last message
        self.lost = False  # whether the connection counts no more
        self.label = ""
        self.max_sequences = 0
        self._replicas = replicas
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Its first status comes by itself."""
        self._transport = cast(asyncio.Transport, transport)
        self._replicas.connecting(self)

    def data_received(self, data: bytes) -> None:
        """Take events and statuses."""
        self.heard = time.monotonic()
        for kind, payload in self._reader.feed(data):
            if self.lost:
                return
            if kind == Kind.STEP:
                request_ids, token_ids, others = step_parts(payload)
                self._replicas.take(self, request_ids, token_ids, self._events(others))
            elif kind == Kind.STATUS:
                self._replicas.heard(self, Status(*unpickled(payload)))
        self._replicas.flush()

    def connection_lost(self, error: Exception | None) -> None:
        """The replica has gone."""
        self._transport = None
        self._replicas.lose(self, "its connection ended")

    def submit(self, routed: _Routed) -> None:
        """Send a request; if the connection has ended, ``connection_lost`` will take it back."""
        self.open[routed.request_id] = routed
        submission = Submission(routed.request_id, routed.request, DEFAULT_TENANT, time.monotonic_ns())
        self._send(submission_frame(submission))

    def cancel(self, request_id: int) -> None:
        """End a request; what still comes for it is dropped."""
        del self.open[request_id]
        self._send(pickled(Kind.CANCEL, (request_id, False)))

    def close(self) -> None:
        """End the connection."""
        if self._transport is not None:
            self._transport.abort()

    def _send(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _events(self, others: list[TokenEvent]) -> list[TokenEvent]:
        """Those of requests that it has; without the errors of an engine that ends, which its status reports."""
        events = []
        held = self.open
        for event in others:
            if event.request_id not in held or isinstance(event.error, Unavailable):
                continue
            if event.finish_reason is not None:
                del held[event.request_id]
                self._replicas.ended(event.request_id)
            events.append(event)
        return events


def _most_requests(load: Load) -> int:
    return load.max_sequences + max(1, load.max_sequences // SEQUENCES_AHEAD)


def _step(events: list[TokenEvent], label: str) -> Step:
    now = time.monotonic_ns()
    return Step(events, now, now, label)
