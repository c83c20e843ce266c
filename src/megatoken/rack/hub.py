"""The driver's side: one queue from which replicas pull, what each replica holds, detection of lost workers.

Each time a sample is given to a replica it gets a new ticket, and answers carry tickets. When a replica is lost, its
tickets are deleted and its samples go back to the head of the queue. Late answers of that replica carry deleted tickets
and are dropped, so every sample ends exactly once. One thread reads from all workers and watches for silence, so that
a busy driver never mistakes its own delay for a dead worker.
"""

from __future__ import annotations

import math
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatoken.engine.state import TOTALS
from megatoken.errors import MegatokenError
from megatoken.framing import WireError
from megatoken.hardware.telemetry import FIELDS as TELEMETRY_FIELDS
from megatoken.rack.clock import ClockOffset, OffsetEstimate
from megatoken.rack.records import Loss, Place, ReplicaRecord, SampleEvent
from megatoken.rack.wire import (
    NUMBER,
    PING,
    PONG,
    STATE,
    Channel,
    Kind,
    handshake,
    pack_submit,
    unpack_report,
)

PING_SECONDS = 1.0
FIRST_PINGS = 16  # right after a connection is made, one after the other
LOOK_SECONDS = 0.25
LONGEST_ROUND_SECONDS = 1.0
HANDSHAKE_SECONDS = 5.0
MOST_HANDSHAKES = 64  # at a time
LOW_QUEUE, LOW_QUEUE_PER_REPLICA = 256, 32  # samples below which the thread that fills the queue is woken


@dataclass(slots=True)
class _Peer:
    """A worker that is connected."""

    number: int
    channel: Channel
    replicas: list[ReplicaRecord]
    heard: float
    clock: OffsetEstimate = field(default_factory=OffsetEstimate)
    pinged: float = 0.0
    cancelled: int = -1


class Hub:
    """All workers of a run. ``submit``, ``take`` and the rest are for the thread that drives the target."""

    def __init__(self, host: str, key: bytes, *, streams: bool, dead_after_seconds: float, wait_seconds: float) -> None:
        """Listens on ``host`` and starts the thread.

        ``host``: address of this machine that the workers reach. ``key``: secret of this run, which they know too. With
        ``streams`` events are timed by their arrival here, where a user would wait for tokens. A replica counts as lost
        after ``dead_after_seconds`` of silence or in one step. A rack without replicas waits ``wait_seconds`` for one.
        """
        self._key, self._streams = key, streams
        self._dead_after_seconds, self._wait_seconds = dead_after_seconds, wait_seconds
        self._listener = socket.create_server((host, 0), backlog=256)
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._registered: dict[int, list[Place]] = {}  # by worker
        self._lock = threading.RLock()
        self._peers: dict[int, _Peer] = {}
        self._queue: deque[int] = deque()
        self._requests: dict[int, bytes] = {}  # of every sample that has not ended
        self._tickets: dict[int, tuple[int, ReplicaRecord]] = {}
        self._next_ticket = 0
        self._gone: dict[Place, NDArray[Any]] = {}  # totals of replicas that were lost, by place
        self._events: SimpleQueue[list[SampleEvent]] = SimpleQueue()
        self._cancelling = 0
        self.late_answers = 0
        """Since the last ``cancel_all``, dropped because their replicas had been declared lost."""
        self._empty_since: float | None = time.monotonic()
        self.losses: list[Loss] = []
        self.joins: list[tuple[Place, int]] = []
        self.clocks: dict[str, ClockOffset] = {}
        self._served: set[Place] = set()
        self._handshakes = 0
        self._error: BaseException | None = None
        self._over = False
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)
        self._wake_reader.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="rack-hub", daemon=True)
        self._thread.start()

    def register(self, worker: int, places: Sequence[Place]) -> None:
        """Lets the worker with that number connect, which has replicas at ``places``."""
        with self._lock:
            self._registered[worker] = list(places)

    def unregister(self, worker: int, cause: str) -> None:
        """Removes the worker with that number and refuses new connections under it."""
        with self._lock:
            self._registered.pop(worker, None)
            if (peer := self._peers.get(worker)) is not None:
                self._remove(peer, cause)

    def connected(self) -> set[int]:
        """Numbers of the workers that serve now."""
        with self._lock:
            return set(self._peers)

    def submit(self, sample_id: int, request: bytes) -> None:
        """Queues a sample."""
        with self._lock:
            self._requests[sample_id] = request
            self._queue.append(sample_id)

    def dispatch(self) -> None:
        """Gives queued samples to the replicas that want some, first to those that hold the fewest."""
        with self._lock:
            hungry = [(peer, one) for peer in self._peers.values() for one in peer.replicas if one.wanted > 0]
            while self._queue and hungry:
                hungry.sort(key=lambda entry: len(entry[1].tickets))
                share = max(1, len(self._queue) // len(hungry))
                for peer, replica in hungry:
                    count = min(share, replica.wanted, len(self._queue))
                    if count:
                        self._give(peer, replica, count)
                hungry = [entry for entry in hungry if entry[1].wanted > 0 and entry[0].number in self._peers]

    def take(self, timeout_seconds: float) -> list[SampleEvent]:
        """Events since the last call; waits at most this long for one, or for the queue to run low.

        Raises:
            MegatokenError: there has been no replica for ``wait_seconds``.
        """
        events: list[SampleEvent] = []
        with suppress(Empty):
            events += self._events.get(timeout=timeout_seconds)
            while True:
                events += self._events.get_nowait()
        if self._error is not None:
            raise self._error
        empty = self._empty_since
        if empty is not None and self._requests and time.monotonic() - empty > self._wait_seconds:
            last = f"; the last was lost: {self.losses[-1].cause}" if self.losses else ""
            raise MegatokenError(
                f"no replica has served for {self._wait_seconds:g} s, waiting: {len(self._requests):,}{last}"
            )
        return events

    @property
    def unended(self) -> int:
        """Samples submitted and not ended."""
        return len(self._requests)

    @property
    def waiting(self) -> int:
        """Samples that no replica holds."""
        return len(self._queue)

    def states(self) -> list[tuple[Place, NDArray[Any]]]:
        """Every replica that ever served, with its ``wire.STATE``: totals over all its connections, levels now."""
        with self._lock:
            live = {one.place: one.state for peer in self._peers.values() for one in peer.replicas}
            rows = []
            for place in sorted(self._served, key=lambda one: (one.node, one.replica)):
                state, gone = live.get(place), self._gone.get(place)
                if state is None:
                    state = np.zeros((), STATE)
                    for name in TELEMETRY_FIELDS:
                        state[name] = math.nan
                elif gone is not None:
                    state = state.copy()
                if gone is not None:
                    for name in TOTALS:
                        state[name] += gone[name]
                rows.append((place, state))
            return rows

    def live(self) -> list[Place]:
        """Replicas that serve now."""
        with self._lock:
            return [one.place for peer in self._peers.values() for one in peer.replicas]

    def withdraw(self) -> list[int]:
        """Drops every sample that no replica holds; their ids."""
        with self._lock:
            withdrawn = list(self._queue)
            self._queue.clear()
            for sample in withdrawn:
                del self._requests[sample]
            return withdrawn

    def cancel_all(self) -> None:
        """Drops every sample and waits until the replicas hold none."""
        with self._lock:
            self._queue.clear()
            self._requests.clear()
            self._tickets.clear()
            self._cancelling += 1
            number = self._cancelling
            for peer in list(self._peers.values()):
                for replica in peer.replicas:
                    replica.tickets.clear()
                    replica.wanted = 0
                self._send(peer, Kind.CANCEL, NUMBER.pack(number))
        while True:
            with self._lock:  # a worker that joins meanwhile holds nothing
                if all(peer.cancelled >= number for peer in self._peers.values()):
                    self.late_answers = 0  # answers that crossed the cancellation
                    self._events = SimpleQueue()
                    return
            time.sleep(0.01)

    def close(self) -> None:
        """Ends every worker and the thread."""
        with self._lock:
            self._registered.clear()
            for peer in list(self._peers.values()):
                with suppress(WireError):
                    peer.channel.send(Kind.CLOSE)
            self._over = True
        self._wake()
        self._thread.join()
        for peer in self._peers.values():
            peer.channel.close()
        for held in (self._listener, self._selector, self._wake_reader, self._wake_writer):
            held.close()

    def _give(self, peer: _Peer, replica: ReplicaRecord, count: int) -> None:
        samples = [self._queue.popleft() for _ in range(count)]
        tickets = range(self._next_ticket, self._next_ticket + count)
        self._next_ticket += count
        for ticket, sample in zip(tickets, samples, strict=True):
            self._tickets[ticket] = (sample, replica)
            replica.tickets[ticket] = sample
        replica.wanted -= count
        requests = [self._requests[sample] for sample in samples]
        self._send(peer, Kind.SUBMIT, pack_submit(replica.channel_place, tickets, requests))

    def _send(self, peer: _Peer, kind: Kind, body: bytes) -> None:
        try:
            peer.channel.send(kind, body)
        except WireError as error:
            self._remove(peer, str(error))
            return
        if peer.channel.pending:
            self._wake()

    def _run(self) -> None:
        try:
            looked, woke = 0.0, time.monotonic()
            while not self._over:
                ready = self._selector.select(LOOK_SECONDS)
                woke, before = time.monotonic(), woke
                if woke - before > LONGEST_ROUND_SECONDS:  # this process was stopped and could hear no worker
                    with self._lock:
                        for peer in self._peers.values():
                            peer.heard += woke - before
                for key, mask in ready:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is self._wake_reader:
                        with suppress(BlockingIOError):
                            self._wake_reader.recv(4096)
                    else:
                        self._serve(key.data, mask)
                now = time.monotonic()
                if now - looked >= LOOK_SECONDS:
                    looked = now
                    self._look(now)
                self._watch_writes()
        except BaseException as error:
            self._error = error
            self._events.put([])

    def _accept(self) -> None:
        with suppress(BlockingIOError):
            connection, _ = self._listener.accept()
            if self._handshakes >= MOST_HANDSHAKES:
                connection.close()
                return
            self._handshakes += 1
            threading.Thread(target=self._handshake, args=(connection,), name="rack-handshake", daemon=True).start()

    def _handshake(self, connection: socket.socket) -> None:
        """Accepts a worker that knows the key; runs on its own thread, because it waits."""
        try:
            number = handshake(connection, self._key, HANDSHAKE_SECONDS)
            with self._lock:
                self._add(connection, number)
        except (OSError, WireError):
            connection.close()
        finally:
            self._handshakes -= 1

    def _add(self, connection: socket.socket, number: int) -> None:
        """Adds a worker. Raises WireError if its number is not registered, or the run is over."""
        places = self._registered.get(number)
        if places is None:
            raise WireError("not expected")
        if (before := self._peers.get(number)) is not None:
            self._remove(before, "its worker connected again")
        now_ns = time.monotonic_ns()
        replicas = [ReplicaRecord(place, index, np.zeros((), STATE)) for index, place in enumerate(places)]
        peer = _Peer(number, Channel(connection), replicas, time.monotonic(), cancelled=self._cancelling)
        self._peers[number] = peer
        self._served.update(places)
        self.joins += [(place, now_ns) for place in places]
        self._empty_since = None
        self._selector.register(connection, selectors.EVENT_READ, peer)
        self._ping(peer)

    def _serve(self, peer: _Peer, mask: int) -> None:
        with self._lock:
            if self._peers.get(peer.number) is not peer:
                return
            try:
                if mask & selectors.EVENT_WRITE:
                    peer.channel.flush()
                frames = peer.channel.receive() if mask & selectors.EVENT_READ else []
            except WireError as error:
                self._remove(peer, str(error))
                return
            if frames:
                peer.heard = time.monotonic()
            for kind, body in frames:
                if kind == Kind.REPORT:
                    self._note(peer, body)
                elif kind == Kind.PONG:
                    now_ns = time.monotonic_ns()
                    sent_ns, monotonic_ns, wall_ns = PONG.unpack(body)
                    peer.clock.note(sent_ns, now_ns, time.time_ns(), monotonic_ns, wall_ns)
                    if peer.clock.rounds < FIRST_PINGS:
                        self._ping(peer)
                elif kind == Kind.CANCELLED:
                    peer.cancelled = NUMBER.unpack(body)[0]
                elif kind == Kind.FAILED:
                    self._remove(peer, body.decode(errors="replace"))
                    return
            if self._queue:
                self.dispatch()
                if len(self._queue) < max(LOW_QUEUE, LOW_QUEUE_PER_REPLICA * len(self._served)):
                    self._events.put([])

    def _note(self, peer: _Peer, body: bytes) -> None:
        report = unpack_report(body)
        arrived_ns = time.monotonic_ns()
        offset_ns = peer.clock.monotonic_ns
        for replica, state in zip(peer.replicas, report.states, strict=True):
            replica.state = state
            replica.wanted += int(state["wanted"])

        def ours(their_ns: int) -> int | None:
            return min(arrived_ns, their_ns - offset_ns) if their_ns else None

        events = []
        for ticket, token, started_ns in report.first:
            held = self._tickets.get(ticket)
            if held is None:
                self.late_answers += 1
                continue
            sample, replica = held
            place = (replica.place.node, replica.place.replica)
            events.append(SampleEvent(sample, (token,), None, arrived_ns, ours(started_ns), arrived_ns, None, *place))
        ids, begin = report.ids, 0
        for ticket, tokens, count, reason, first_ns, last_ns, started_ns in report.done:
            begin += count
            held = self._tickets.pop(ticket, None)
            if held is None:
                self.late_answers += 1
                continue
            sample, replica = held
            del replica.tickets[ticket], self._requests[sample]
            time_ns, seen_ns = (arrived_ns, None) if self._streams else (ours(last_ns) or arrived_ns, ours(first_ns))
            place = (replica.place.node, replica.place.replica)
            own = tuple(ids[begin - count : begin].tolist())
            events.append(SampleEvent(sample, own, reason, time_ns, ours(started_ns), seen_ns, tokens, *place))
        for ticket, why in report.failures:
            held = self._tickets.pop(ticket, None)
            if held is not None:
                sample, replica = held
                del replica.tickets[ticket], self._requests[sample]
                events.append(SampleEvent(sample, (), None, arrived_ns, error=why))
        if events:
            self._events.put(events)

    def _ping(self, peer: _Peer) -> None:
        peer.pinged = time.monotonic()
        self._send(peer, Kind.PING, PING.pack(time.monotonic_ns()))

    def _look(self, now: float) -> None:
        """Removes silent and stuck workers, and reads every worker's clocks once a second."""
        with self._lock:
            for peer in list(self._peers.values()):
                silent = now - peer.heard
                step = max((float(one.state["step_seconds"]) for one in peer.replicas), default=0.0)
                if silent > self._dead_after_seconds:
                    self._remove(peer, f"silent for {silent:.1f} s")
                elif step > self._dead_after_seconds:
                    self._remove(peer, f"in one step for {step:.1f} s")
                elif now - peer.pinged >= PING_SECONDS:
                    self._ping(peer)
                if (offset := peer.clock.offset()) is not None:
                    for node in {one.place.node for one in peer.replicas}:
                        self.clocks[node] = offset

    def _remove(self, peer: _Peer, cause: str) -> None:
        """Removes a lost worker; the samples that it held go to the head of the queue, oldest first."""
        if self._peers.pop(peer.number, None) is None:
            return
        with suppress(KeyError, ValueError):
            self._selector.unregister(peer.channel.socket)
        peer.channel.close()
        if self._over:
            return
        now_ns = time.monotonic_ns()
        left = sum(len(other.replicas) for other in self._peers.values())
        returned: list[int] = []
        for replica in peer.replicas:
            for ticket in replica.tickets:
                del self._tickets[ticket]
            returned += replica.tickets.values()
            dropped = int(replica.state["unended_tokens"])
            self.losses.append(Loss(replica.place, now_ns, cause, len(replica.tickets), dropped, left))
            replica.wanted = 0  # a dispatch that is under way gives it no more
            gone = self._gone.setdefault(replica.place, np.zeros((), STATE))
            for name in TOTALS:
                gone[name] += replica.state[name]
            gone["output_tokens"] -= dropped  # another replica starts those answers over; no token counts twice
        self._queue.extendleft(sorted(returned, reverse=True))
        if not self._peers:
            self._empty_since = time.monotonic()
        self._events.put([])

    def _watch_writes(self) -> None:
        with self._lock:
            for peer in self._peers.values():
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.channel.pending else 0)
                if self._selector.get_key(peer.channel.socket).events != wanted:
                    self._selector.modify(peer.channel.socket, wanted, peer)

    def _wake(self) -> None:
        with suppress(BlockingIOError, OSError):
            self._wake_writer.send(b"\0")
