"""A client process: sends requests over HTTP, reads the answers and reports them in batches. No PyTorch."""

from __future__ import annotations

import asyncio
import errno
import heapq
import os
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from megatoken.engine.process_memory import collect_garbage_rarely
from megatoken.framing import FrameReader, read_settings
from megatoken.hardware.core_wait import CoreWait
from megatoken.processes import allow_many_files
from megatoken.rack.wire import dial
from megatoken.targets.endpoint import wire
from megatoken.targets.endpoint.address import cause_of, trust
from megatoken.targets.endpoint.alarm import Alarm
from megatoken.targets.endpoint.bodies import PATHS
from megatoken.targets.endpoint.connection import Connection, Exchange
from megatoken.targets.endpoint.counting import report_of
from megatoken.targets.endpoint.dialer import Dialer
from megatoken.targets.endpoint.priority import OwnPriority
from megatoken.targets.endpoint.wire import ClientSettings, Failed, Task, pack, unpack

LOOK_SECONDS = 0.05
LATE_SECONDS = 0.01  # after its time, a look at the clock counts as late, and so may the times of tokens be
REPORT_SECONDS = 1.0
IDLE_SECONDS = 5.0  # without a request that comes before its time, after which its priority is given back
PROBE_SECONDS = 1.0  # between two questions to an endpoint that was lost
AFTER_DONE_SECONDS = 1.0  # how long the end of a stream may take after [DONE]
RETRY_SECONDS = 1.0  # where the server does not say when to try again
LONGEST_RETRY_SECONDS = 60.0
RECEIVE_BYTES = 1 << 20
DIAL_SECONDS = 10.0
# A machine is gone after 30 s, also while something that was sent is not acknowledged.
KEEP_ALIVE = {
    socket.TCP_KEEPIDLE: 10,
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 4,
    socket.TCP_USER_TIMEOUT: 30_000,
}
TOO_MANY_FILES = (
    "this client cannot open another connection (too many open files); raise its limit (ulimit -n), or lower "
    "--endpoint.max_in_flight"
)
READ_BYTES = 1 << 16  # of one connection
MOST_READY = 1024  # connections that are read before the loop looks at anything else
MOST_HELD = 32  # reads of a stream that are taken apart together
HELD_BYTES = 1 << 12  # a read as long has many frames
_READ, _WRITE = select.EPOLLIN, select.EPOLLOUT
_WAITS = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Client:
    """Requests of one process to all endpoints."""

    def __init__(self, settings: ClientSettings, starter: socket.socket) -> None:
        """``starter``: the process that started this one, which ends with it."""
        self.api = settings.api
        self.key = settings.key
        self.streams = settings.stream
        self._settings = settings
        self._starter = starter
        self._parent = starter if settings.run is None else _dial(settings.run)
        self._reader = FrameReader()
        self._out: list[tuple[Any, ...]] = []
        self._unsent: deque[bytes] = deque()
        self._open: dict[int, Exchange] = {}  # by ticket, oldest first
        self._later: list[tuple[int, int]] = []  # when a request is due, and its ticket; a heap
        self._alarm = Alarm()
        self._idle: list[list[Connection]] = [[] for _ in settings.addresses]
        self._poll = select.epoll()  # of connections: the loop waits for it as one source
        self._connections: dict[int, Connection] = {}  # by file descriptor
        self._writing: set[Connection] = set()  # have more to send than the kernel takes
        self._tasks: set[asyncio.Task[None]] = set()
        ca_file = Path(settings.ca_file) if settings.ca_file else None
        self._dialers = [
            Dialer(one, trust(one.secure, ca_file), settings.key, settings.connect_seconds)
            for one in settings.addresses
        ]
        self._heads = [self._head(at) for at in range(len(settings.addresses))]
        self._worst_lag = 0.0
        self._looks = self._late_looks = 0
        self._core_wait = CoreWait()
        self._priority = OwnPriority(settings.processes)
        self._on_time = False  # whether requests come before the time at which they leave
        self._last_early = 0.0  # when one did

    async def run(self) -> None:
        """Works until the parent closes the socket."""
        self._loop = asyncio.get_running_loop()
        if self._starter is not self._parent:
            self._loop.add_reader(self._starter.fileno(), os._exit, 0)  # it sends nothing more, so it has gone
        self._parent.setblocking(False)
        self._loop.add_reader(self._parent.fileno(), self._receive)
        self._loop.add_reader(self._poll.fileno(), self._read)
        self._loop.add_reader(self._alarm.descriptor, self._send_due)
        self._tasks.add(self._loop.create_task(self._watch()))
        if self._settings.watch_metrics:
            self._tasks |= {self._loop.create_task(self._scrape(at)) for at in range(len(self._idle))}
        await asyncio.Event().wait()

    # what connections report

    def began(self, exchange: Exchange) -> None:
        """Reports the first text."""
        answer = exchange.answer
        assert answer is not None
        self._report((wire.FIRST, exchange.task.ticket, exchange.sent_ns, answer.times[0]))

    def answered(self, exchange: Exchange) -> None:
        """Reports a whole answer."""
        if self._open.pop(exchange.task.ticket, None) is not None:
            self._report(tuple(report_of(exchange)))

    def failed(self, exchange: Exchange, cause: str, message: str) -> None:
        """Reports a failure; a request that a stale connection swallowed is sent once more."""
        ticket = exchange.task.ticket
        if ticket not in self._open:
            return
        if cause == "stale":
            self._spawn(self._connect(exchange))  # other idle connections may have been closed too
            return
        if cause == "lost" and len(self._idle) > 1:
            self._spawn(self._ask_whether_gone(exchange, message))
            return
        del self._open[ticket]
        self._report(tuple(Failed(wire.FAILURE, ticket, cause, message, exchange.retries)))

    def refused(self, exchange: Exchange, retry_after: str, message: str) -> None:
        """Sends a request again when the server wants it, if its time allows."""
        seconds = float(retry_after) if retry_after.isdecimal() and len(retry_after) < 9 else RETRY_SECONDS
        seconds = min(seconds, LONGEST_RETRY_SECONDS)
        if time.monotonic() + seconds >= exchange.deadline:
            self.failed(exchange, "answer", f"{message}; tried {exchange.retries + 1} times")
            return
        exchange.retries += 1
        exchange.connection = None
        self._loop.call_later(seconds, self._again, exchange)

    def free(self, connection: Connection) -> None:
        """Keeps a connection for the next request."""
        self._idle[connection.endpoint].append(connection)

    def gone(self, connection: Connection) -> None:
        """Forgets a connection that is about to be closed."""
        del self._connections[connection.socket.fileno()]
        self._writing.discard(connection)
        idle = self._idle[connection.endpoint]
        if connection in idle:
            idle.remove(connection)

    def waits_to_write(self, connection: Connection, *, waits: bool) -> None:
        """Watches for room to write, or no longer."""
        if waits is not (connection in self._writing):
            (self._writing.add if waits else self._writing.discard)(connection)
            self._poll.modify(connection.socket, _READ | _WRITE if waits else _READ)

    def _read(self) -> None:
        """Reads each connection that has data, once. This is what a frame costs."""
        connections, monotonic_ns = self._connections, time.monotonic_ns
        now_ns = monotonic_ns()
        for descriptor, events in self._poll.poll(0, MOST_READY):
            if now_ns >= self._alarm.due_ns:
                self._send_due()  # a request that is due goes first
            connection = connections.get(descriptor)
            if connection is None:
                continue  # closed by what happened to another one
            try:
                data = connection.receive(READ_BYTES)
            except _WAITS:
                data = None
            except OSError as error:
                connection.ended(error)
                continue
            now_ns = monotonic_ns()
            if events & _WRITE:
                connection.write()
            if data is None:
                continue
            if data.endswith(connection.tail):
                held = connection.held
                held.append(data)
                connection.held_ns.append(now_ns)
                if len(held) >= MOST_HELD or len(data) > HELD_BYTES:
                    connection.flush()
            elif data:
                connection.received(data, now_ns)
            else:
                connection.ended(None)

    # requests

    def _again(self, exchange: Exchange) -> None:
        if exchange.task.ticket in self._open:
            self._start(exchange)

    def _send_due(self) -> None:
        """Sends the requests that are due, and sets the alarm to the next one."""
        later = self._later
        while later and later[0][0] <= time.monotonic_ns():
            exchange = self._open.get(heapq.heappop(later)[1])
            if exchange is not None:  # else it was cancelled
                self._start(exchange)
        self._alarm.set(later[0][0] if later else None)

    def _start(self, exchange: Exchange) -> None:
        idle = self._idle[exchange.endpoint]
        while idle:
            connection = idle.pop()
            if not connection.closed:
                self._send(exchange, connection)
                return
        self._spawn(self._connect(exchange))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask_whether_gone(self, exchange: Exchange, message: str) -> None:
        """Reports a lost connection: whether its server takes others decides whether the endpoint is lost."""
        cause = "interrupted"
        try:
            async with asyncio.timeout(self._settings.connect_seconds):
                self.free(await self._open_connection(exchange.endpoint))
        except OSError as error:  # TimeoutError is one
            if error.errno != errno.EMFILE:
                cause = "gone"
        self.failed(exchange, cause, message)

    def _send(self, exchange: Exchange, connection: Connection) -> None:
        body = exchange.task.body
        connection.send(exchange, b"%b%d\r\n\r\n%b" % (self._heads[exchange.endpoint], len(body), body))

    async def _connect(self, exchange: Exchange) -> None:
        address = self._settings.addresses[exchange.endpoint]
        try:
            async with asyncio.timeout(min(self._settings.connect_seconds, exchange.deadline - time.monotonic())):
                connection = await self._open_connection(exchange.endpoint)
        except TimeoutError:
            self.failed(exchange, "connect", f"{address.name}: no connection in {self._settings.connect_seconds:g} s")
            return
        except OSError as error:
            if error.errno == errno.EMFILE:  # which says nothing against the endpoint
                self.failed(exchange, "client", TOO_MANY_FILES)
            else:
                self.failed(exchange, "connect", f"{address.name}: no connection ({cause_of(error)})")
            return
        if exchange.task.ticket in self._open:
            self._send(exchange, connection)
        else:
            self.free(connection)

    async def _open_connection(self, at: int) -> Connection:
        """A new connection to an endpoint. Raises OSError."""
        connection = Connection(self, at, await self._dialers[at].connect())
        self._connections[connection.socket.fileno()] = connection
        self._poll.register(connection.socket, _READ)
        return connection

    def _cancel(self, ticket: int) -> None:
        """Ends a request; reports when the tokens came that it has."""
        exchange = self._open.get(ticket)
        if exchange is not None and exchange.connection is not None:
            exchange.connection.take_held()
        if self._open.pop(ticket, None) is None or exchange is None:
            return  # what was held was the end of the answer
        answer = exchange.answer
        if answer is not None and answer.frames:
            self._report((wire.CUT, ticket, exchange.sent_ns, answer.times[-1], answer.times.tobytes()))
        if exchange.connection is not None:
            exchange.connection.abandon()

    def _head(self, at: int) -> bytes:
        address = self._settings.addresses[at]
        lines = [
            f"POST {address.path}{PATHS[self.api]} HTTP/1.1",
            f"Host: {address.name}",
            "User-Agent: megatoken",
            f"Accept: {'text/event-stream' if self.streams else 'application/json'}",
            "Content-Type: application/json",
            *([f"Authorization: Bearer {self.key}"] if self.key else []),
            "Content-Length: ",
        ]
        return "\r\n".join(lines).encode()

    # the parent

    def _receive(self) -> None:
        try:
            data = self._parent.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            os._exit(0)
        deadline = time.monotonic() + self._settings.timeout_seconds
        for kind, value in unpack(self._reader, data):
            if kind == wire.Asked.PING:
                self._tell(wire.News.PONG, (value, time.monotonic_ns(), time.time_ns()))
                continue
            if kind == wire.Asked.PROBE:
                self._spawn(self._probe(value))
                continue
            if kind == wire.Asked.CANCEL:
                for ticket in value:
                    self._cancel(ticket)
                self._flush()
                self._tell(wire.News.CANCELLED, value)
                continue
            for fields in value:
                exchange = Exchange(Task(*fields), deadline)
                self._open[exchange.task.ticket] = exchange
                if exchange.task.due_ns <= time.monotonic_ns():
                    self._start(exchange)
                else:
                    heapq.heappush(self._later, (exchange.task.due_ns, exchange.task.ticket))
            if self._later:
                self._last_early = time.monotonic()
                if not self._on_time:
                    self._on_time = True
                    self._hold_priority(0.0)
            if self._later and self._later[0][0] < self._alarm.due_ns:
                self._send_due()

    def _report(self, event: tuple[Any, ...]) -> None:
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(event)

    def _flush(self) -> None:
        if self._out:
            self._tell(wire.News.EVENTS, self._out)
            self._out = []

    def _tell(self, kind: int, value: Any) -> None:
        self._unsent.append(pack(kind, value))
        if len(self._unsent) == 1:
            self._write()

    def _write(self) -> None:
        """Sends what the socket takes; the rest when it takes more."""
        while self._unsent:
            data = self._unsent[0]
            try:
                sent = self._parent.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                os._exit(0)
            if sent < len(data):
                self._unsent[0] = data[sent:]
                self._loop.add_writer(self._parent.fileno(), self._write)
                return
            self._unsent.popleft()
        self._loop.remove_writer(self._parent.fileno())

    # watching

    async def _watch(self) -> None:
        """Ends requests that take too long, and reports about once a second how busy this process is."""
        reported, cpu = time.monotonic(), time.process_time()
        due = reported + LOOK_SECONDS
        while True:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            now = time.monotonic()
            self._worst_lag = max(self._worst_lag, now - due)
            self._looks, self._late_looks = self._looks + 1, self._late_looks + (now - due > LATE_SECONDS)
            due = now + LOOK_SECONDS
            self._end_late(now)
            if now - reported >= REPORT_SECONDS:
                self._finish_done(now)
                used = time.process_time()
                busy = (used - cpu) / (now - reported)
                load = (busy, self._worst_lag, self._looks, self._late_looks, self._core_wait.share())
                self._tell(wire.News.LOAD, load)
                self._on_time = self._on_time and now - self._last_early < IDLE_SECONDS
                self._hold_priority(busy)
                self._looks = self._late_looks = 0
                for ticket, exchange in self._open.items():
                    if exchange.answer is not None and exchange.answer.frames:
                        held = len(exchange.connection.held) if exchange.connection is not None else 0
                        self._report((wire.PROGRESS, ticket, len(exchange.answer.times) + held))
                self._worst_lag, reported, cpu = 0.0, now, used

    def _hold_priority(self, busy_share: float) -> None:
        if self._on_time:
            self._tell(wire.News.PRIORITY, int(self._priority.hold(busy_share)))
        else:
            self._priority.give_back()

    def _end_late(self, now: float) -> None:
        """Requests that are out of time; the oldest come first, and all have the same time."""
        late = []
        for exchange in self._open.values():
            if exchange.deadline > now:
                break
            late.append(exchange)
        for exchange in late:
            if exchange.connection is not None:
                exchange.connection.abandon()
            self.failed(exchange, "timeout", f"no whole answer in {self._settings.timeout_seconds:g} s")

    def _finish_done(self, now: float) -> None:
        for exchange in list(self._open.values()):
            answer = exchange.answer
            if answer is None or not answer.done or exchange.connection is None:
                continue
            if not answer.times or now - answer.times[-1] / 1e9 > AFTER_DONE_SECONDS:
                exchange.connection.finish()

    async def _scrape(self, at: int) -> None:
        """Reads an endpoint's metrics about once a second."""
        while True:
            if values := await self._dialers[at].metrics():
                self._tell(wire.News.METRICS, (at, values))
            await asyncio.sleep(REPORT_SECONDS)

    async def _probe(self, at: int) -> None:
        """Asks a lost endpoint until it answers."""
        while not await self._dialers[at].answers():
            await asyncio.sleep(PROBE_SECONDS)
        self._tell(wire.News.BACK, at)


def _dial(run: wire.Run) -> socket.socket:
    """A connection to a run on another machine, which ends too when that machine is gone."""
    connection = dial(run.address, run.secret, run.number, DIAL_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEP_ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    return connection


def main() -> None:
    """Entry of the process."""
    import uvloop

    starter, settings = read_settings(ClientSettings)
    collect_garbage_rarely()
    allow_many_files()
    uvloop.run(Client(settings, starter).run())


if __name__ == "__main__":
    main()
