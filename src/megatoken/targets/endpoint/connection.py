"""HTTP/1.1 on the client's side: one request at a time per connection, the time taken as soon as bytes arrive.

Plain sockets, because transports and protocols of asyncio cost more per frame than everything else together.
"""

from __future__ import annotations

import socket
import ssl
import time
from array import array
from functools import partial
from typing import Any, Protocol

import httptools

from megatoken.targets.endpoint.address import status_error
from megatoken.targets.endpoint.answers import MOST_BODY_BYTES, Answer, BrokenAnswerError
from megatoken.targets.endpoint.bodies import Api
from megatoken.targets.endpoint.frames import BLANK_LINE, BLANK_LINE_AND_CHUNK, take_apart
from megatoken.targets.endpoint.wire import Task

MOST_ERROR_BYTES = 1 << 16
MOST_HEAD_BYTES = 1 << 16
RETRIED = (429, 503)
NO_TAIL = b"\0no frame was learnt\0"


class Exchange:
    """A request under way, over one connection after the other if it is repeated."""

    __slots__ = (
        *("answer", "connection", "deadline", "endpoint", "first_reported", "resent", "retries", "sent_ns", "task"),
    )

    def __init__(self, task: Task, deadline: float) -> None:
        self.task = task
        self.endpoint = task.endpoint
        self.deadline = deadline  # time.monotonic()
        self.answer: Answer | None = None
        self.connection: Connection | None = None
        self.sent_ns = 0
        self.retries = 0
        self.resent = False
        self.first_reported = False


class Owner(Protocol):
    """What gets the outcome of exchanges."""

    api: Api
    key: str | None
    streams: bool

    def began(self, exchange: Exchange) -> None:
        """The first text of an answer has arrived."""

    def answered(self, exchange: Exchange) -> None:
        """The answer is whole."""

    def failed(self, exchange: Exchange, cause: str, message: str) -> None:
        """There will be no answer."""

    def refused(self, exchange: Exchange, retry_after: str, message: str) -> None:
        """The server asks to try again later."""

    def free(self, connection: Connection) -> None:
        """The connection can take another request."""

    def waits_to_write(self, connection: Connection, *, waits: bool) -> None:
        """Whether the connection has more to send than the kernel takes."""

    def gone(self, connection: Connection) -> None:
        """The connection is closed."""


def _receive_decrypted(connected: ssl.SSLSocket, most: int) -> bytes:
    """All that has arrived: the kernel does not report what OpenSSL has read already."""
    data = connected.recv(most)
    while data and connected.pending():
        data += connected.recv(most)
    return data


class Connection:
    """One connection to one endpoint: a socket that is open and does not block.

    The owner reads ``socket`` when it has data. A read that ends with ``tail`` goes to ``held`` with its time in
    ``held_ns``, and ``flush`` takes such reads apart together; every other read goes to ``received``.
    """

    __slots__ = (
        *("_answer", "_begun", "_between_chunks", "_body", "_body_bytes", "_exchange", "_head_bytes", "_headers"),
        *("_learnt", "_now_ns", "_owner", "_parser", "_status", "_unsent", "_used", "closed", "endpoint", "held"),
        *("held_ns", "receive", "socket", "tail"),
    )

    def __init__(self, owner: Owner, endpoint: int, connected: socket.socket) -> None:
        self.endpoint = endpoint
        self.socket = connected
        self.receive = (
            partial(_receive_decrypted, connected) if isinstance(connected, ssl.SSLSocket) else connected.recv
        )
        self.closed = False
        self.held: list[bytes] = []
        self.held_ns: array[int] = array("q")
        self._owner = owner
        self._exchange: Exchange | None = None
        self._answer: Answer | None = None  # while a stream is read
        self._parser: Any = None
        self._now_ns = 0
        self._used = False
        self._unsent = b""
        self._begin()

    def _begin(self) -> None:
        self.tail = NO_TAIL
        self._learnt = NO_TAIL
        self._status = 0
        self._headers: dict[str, str] = {}
        self._head_bytes = 0
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._between_chunks = False
        self._begun = False  # a byte of this answer has arrived

    def send(self, exchange: Exchange, data: bytes) -> None:
        """Sends a request; only on a connection that is free."""
        self._exchange = exchange
        exchange.connection = self
        exchange.answer = Answer(self._owner.api, keep_text=exchange.task.keep_text)
        self._parser = httptools.HttpResponseParser(self)
        self._begin()
        exchange.sent_ns = exchange.sent_ns or time.monotonic_ns()
        self._unsent = data
        self.write()

    def write(self) -> None:
        """Sends what the kernel takes; the owner calls again when it takes more."""
        waited = self._unsent
        try:
            self._unsent = waited[self.socket.send(waited) :]
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except OSError:
            self._lose("the connection was closed")
            return
        self._owner.waits_to_write(self, waits=bool(self._unsent))

    def received(self, data: bytes, now_ns: int) -> None:
        """Part of an answer."""
        self.take_held()
        self._begun = True
        exchange = self._exchange
        if exchange is None:
            self.close()  # bytes that no request asked for, or after an answer that failed
            return
        self._parse(data, now_ns)
        answer = self._answer
        if answer is None or not answer.frames or self._exchange is not exchange:
            return
        if not exchange.first_reported:
            exchange.first_reported = True
            self._owner.began(exchange)
        if answer.tail is not self._learnt and self._between_frames(answer):
            end = BLANK_LINE_AND_CHUNK if self._chunked else BLANK_LINE
            if data.endswith(answer.tail + end):
                self._learnt = answer.tail
                self.tail = answer.tail + end

    def flush(self) -> None:
        """Takes the held reads apart, together if they are what they seem to be."""
        held, times_ns = self.held, self.held_ns
        self.held, self.held_ns = [], array("q")
        answer = self._answer
        if answer is not None and self._between_frames(answer):
            pieces = take_apart(held, answer.head, answer.tail, chunked=self._chunked)
            if pieces is not None:
                answer.take_pieces(pieces, times_ns)
                return
        for data, now_ns in zip(held, times_ns, strict=True):
            if self._exchange is not None:
                self._parse(data, now_ns)

    @property
    def _chunked(self) -> bool:
        return "transfer-encoding" in self._headers

    def _between_frames(self, answer: Answer) -> bool:
        """Whether whole frames may come next, whose number says nothing about the end of the answer."""
        between = self._between_chunks if self._chunked else "content-length" not in self._headers
        return between and answer.between_frames

    def _parse(self, data: bytes, now_ns: int) -> None:
        self._now_ns = now_ns
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._fail("answer", str(error.__cause__ or error.__context__))  # a BrokenAnswerError
        except httptools.HttpParserUpgrade:
            self._fail("answer", "the server changes to another protocol")
        except httptools.HttpParserError as error:
            self._fail("answer", f"not an answer of HTTP/1.1: {' '.join(str(error).split())[:100]}")

    def ended(self, error: OSError | None) -> None:
        """The server, the network or this process closed the connection."""
        self.take_held()
        exchange = self._exchange
        if exchange is None:
            self.close()
            return
        until_close = self._status and not {"content-length", "transfer-encoding"} & self._headers.keys()
        if until_close and error is None:
            self._complete(reusable=False)
        else:
            what = "in the middle of the answer" if self._begun else "before an answer came"
            self._lose(f"the connection was {'reset' if error is not None else 'closed'} {what}")

    def close(self) -> None:
        """Closes the connection."""
        if not self.closed:
            self.closed = True
            self._owner.gone(self)
            self.socket.close()

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MOST_HEAD_BYTES:
            raise BrokenAnswerError(f"headers larger than {MOST_HEAD_BYTES >> 10} KiB")
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Decides how to read the body."""
        status = self._parser.get_status_code()
        if status < 200:
            return
        self._status = status
        if status != 200:
            return
        kind = self._headers.get("content-type", "").partition(";")[0].strip().lower()
        wanted = "text/event-stream" if self._owner.streams else "application/json"
        if kind != wanted:
            raise BrokenAnswerError(f"content type {kind[:60] or 'missing'}, expected {wanted}")
        assert self._exchange is not None
        if self._owner.streams:
            self._answer = self._exchange.answer

    def on_body(self, body: bytes) -> None:
        """Part of the body."""
        if self._answer is not None:
            self._answer.feed(body, self._now_ns)
            return
        self._body_bytes += len(body)
        if self._body_bytes > (MOST_BODY_BYTES if self._status == 200 else MOST_ERROR_BYTES):
            if self._status == 200:
                raise BrokenAnswerError(f"the answer is larger than {MOST_BODY_BYTES >> 20} MiB")
            return
        self._body.append(body)

    def on_message_complete(self) -> None:
        """The answer is whole."""
        if self._status:
            self._complete()

    def on_chunk_header(self) -> None:
        """A chunk begins."""
        self._between_chunks = False

    def on_chunk_complete(self) -> None:
        """A chunk has ended."""
        self._between_chunks = True

    def abandon(self) -> None:
        """Ends the request without an outcome."""
        self._exchange = self._answer = None
        self.close()

    def take_held(self) -> None:
        """Takes apart what is held until now."""
        if self.held:
            self.flush()

    def finish(self) -> None:
        """The stream said that it is done, and its end does not come."""
        self.take_held()
        if self._exchange is not None:
            self._complete(reusable=False)

    def _complete(self, *, reusable: bool = True) -> None:
        exchange, answer = self._exchange, self._answer
        assert exchange is not None
        if self._status != 200:
            message = status_error(self._status, self._headers, b"".join(self._body), self._owner.key)
            self._release(reusable)
            if self._status in RETRIED:
                self._owner.refused(exchange, self._headers.get("retry-after", ""), message)
            else:
                self._owner.failed(exchange, "answer", message)
            return
        try:
            assert exchange.answer is not None
            if answer is not None:
                answer.end()
            else:
                exchange.answer.take_body(b"".join(self._body))
        except BrokenAnswerError as error:
            self._fail("answer", str(error))
            return
        if answer is None:
            exchange.answer.times.append(self._now_ns)
        self._release(reusable)
        self._owner.answered(exchange)

    def _release(self, reusable: bool) -> None:
        """Makes the connection free, or closes it."""
        self._exchange = self._answer = None
        self._used = True
        self.tail = NO_TAIL
        if reusable and self._parser.should_keep_alive() and not self.closed:
            self._owner.free(self)
        else:
            self.close()

    def _fail(self, cause: str, message: str) -> None:
        exchange, self._exchange, self._answer = self._exchange, None, None
        self.close()
        if exchange is not None:
            self._owner.failed(exchange, cause, message)

    def _lose(self, message: str) -> None:
        """The connection ended under a request; one that was idle before may have ended before it was sent."""
        stale = self._used and not self._begun
        exchange = self._exchange
        if exchange is not None and stale and not exchange.resent:
            exchange.resent = True
            self._fail("stale", message)
        else:
            self._fail("lost", message)
