"""HTTP/1.1 on asyncio: requests in, one at a time per connection, within limits of size and time.

A protocol of our own, because a general server's coroutine and messages per chunk double the cost of a frame
(docs/performance.md). Parsing is llhttp's, through httptools.
"""

from __future__ import annotations

import asyncio
import fcntl
import re
import secrets
import sys
import termios
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol, cast

import httptools

from megatoken.serve.exchange import Exchange, HttpRequest
from megatoken.serve.options import ServeConfig

LINE_BYTES, HEAD_BYTES = 8 << 10, 64 << 10  # of a request, at most
BODIES_HELD = 16  # of the largest size, in one process: those that are still being sent, or wait for a route
BUFFERED_BYTES = 4 << 20  # that may wait for a client that reads slowly
MOST_PIPELINED = 64
LINGER_SECONDS = 1.0
UNREAD_BYTES = 64 << 10  # beyond it, a client counts as slow
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_VERSION = re.compile(rb"^[A-Za-z]+ \S+ HTTP/(?!1\.[01]\r?\n)[0-9.]+\r?$", re.MULTILINE)
_ORIGIN = re.compile(r"^https?://[^/?]*(?=/)", re.IGNORECASE)  # of a request that was meant for a proxy
_KNOWN_METHODS = rb"GET|HEAD|POST|PUT|DELETE|OPTIONS|PATCH|CONNECT|TRACE"
_UNKNOWN_METHOD = re.compile(rb"^(?!(?:%b) )[A-Z]{1,32} \S{1,1000} HTTP/1\.[01]\r?$" % _KNOWN_METHODS, re.MULTILINE)
_BODY_METHODS = ("POST", "PUT", "PATCH")


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error that is answered without a route."""

    status: int
    message: str
    headers: tuple[tuple[str, str], ...] = ()
    keep_alive: bool = False


class Handler(Protocol):
    """What answers requests."""

    options: ServeConfig
    connections: set[Connection]
    held_body_bytes: int  # of all connections

    def admit(self, request: HttpRequest) -> Refusal | None:
        """Look at a request's head, before its body is read: authenticate, find the route. Sets its tenant."""

    def handle(self, exchange: Exchange) -> None:
        """Answer a request, now or later."""

    def finished(self, exchange: Exchange) -> None:
        """An exchange has ended: answered, or the client has left."""

    def extra_headers(self, request: HttpRequest) -> Iterable[tuple[str, str]]:
        """Headers of every answer."""

    def flush_soon(self, exchange: Exchange) -> None:
        """Flush the exchange in a turn of the loop to come."""


class _Phase(Enum):
    IDLE = auto()
    HEAD = auto()
    BODY = auto()
    LINGERING = auto()  # answered; what the client still sends is dropped


class Connection(asyncio.Protocol):
    """One client. Routes see its ``Exchange``s."""

    transport: asyncio.Transport

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._options = handler.options
        self._parser: Any = httptools.HttpRequestParser(self)
        self._phase = _Phase.IDLE
        self._deadline = time.monotonic() + handler.options.head_seconds
        self._current: Exchange | None = None
        self._pipeline: deque[tuple[HttpRequest, Refusal | None]] = deque()
        self._refused = False  # nothing after a refused request is read
        self._stalled_since: float | None = None
        self._written_bytes = 0
        self._taken_bytes = 0  # of those written, what the client had taken when that was last looked at
        self._held_bytes = 0  # of bodies that no route has taken
        # of the message that is being read
        self._body_came = False  # in the data that is being parsed
        self._url = b""
        self._headers: dict[str, str] = {}
        self._repeated: set[str] = set()
        self._body: list[bytes] = []
        self._head_bytes = self._body_bytes = 0
        self._unparsed_bytes = 0  # since a header, or a piece of the body, was complete
        self._arrival_ns = 0
        self._request: HttpRequest | None = None
        self._refusal: Refusal | None = None

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection, unless there are too many."""
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=UNREAD_BYTES)
        self._handler.connections.add(self)
        if len(self._handler.connections) > self._options.max_connections:
            self._refuse(503, "too many connections; try again later", headers=(("retry-after", "1"),))
            self._next()

    def connection_lost(self, error: Exception | None) -> None:
        """End the open exchange."""
        self._handler.connections.discard(self)
        self._pipeline.clear()
        if (exchange := self._current) is not None:
            self._current = None
            exchange.abandon()
            self._handler.finished(exchange)
        self.release_body(self._held_bytes)

    def eof_received(self) -> bool:
        """The client closed its side. It may have left altogether, so its request is not worth computing."""
        if self._current is not None:
            self._current.half_closed()
        if self._phase in (_Phase.HEAD, _Phase.BODY) and self._current is None and not self._pipeline:
            self._refuse(400, "the request ended before it was complete")
            self._next()
        return False

    def pause_writing(self) -> None:
        """The client reads more slowly than its answer is made."""
        self._stalled_since = time.monotonic()

    def resume_writing(self) -> None:
        """The client has read."""
        self._stalled_since = None

    def data_received(self, data: bytes) -> None:
        """Parse, and start to answer the first request that is complete."""
        if self._phase is _Phase.LINGERING or self._refused:
            return
        if self._phase is _Phase.IDLE:
            self._phase = _Phase.HEAD
            self._arrival_ns = time.monotonic_ns()
            self._deadline = time.monotonic() + self._options.head_seconds
        waiting, unparsed_bytes = len(self._pipeline), self._unparsed_bytes
        self._body_came = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refused = True  # answered as HTTP/1.1; what follows is of another protocol, or nothing
            if self._pipeline:
                self._pipeline[-1][0].keep_alive = False
        except httptools.HttpParserError as error:
            self._refuse_broken(data, error)
        reading = self._phase in (_Phase.HEAD, _Phase.BODY)
        if reading and not self._body_came and not self._refused and len(self._pipeline) == waiting:
            # The parser holds them until a header is complete; in a body, a trailer or the extension of a chunk.
            self._unparsed_bytes = unparsed_bytes + len(data)
            if self._unparsed_bytes > HEAD_BYTES:
                self._refuse_large_head()
        if self._current is not None and self._pipeline:
            self.transport.pause_reading()
        elif self._current is None:
            self._next()

    # httptools

    def on_message_begin(self) -> None:
        """Begin another request."""
        self._url, self._headers, self._repeated, self._body = b"", {}, set(), []
        self._head_bytes = self._body_bytes = self._unparsed_bytes = 0
        self._request = self._refusal = None
        self._phase = _Phase.HEAD
        self._arrival_ns = time.monotonic_ns()
        self._deadline = time.monotonic() + self._options.head_seconds

    def on_url(self, url: bytes) -> None:
        """Part of the request line."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header. Repeated ones are joined, as RFC 9110 says."""
        if self._phase is _Phase.BODY:
            return  # a trailer, which must not change a request that has been admitted
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > HEAD_BYTES:
            return
        key, text = name.decode("latin-1").lower(), value.decode("latin-1").strip()
        if key in self._headers:
            self._repeated.add(key)
            text = f"{self._headers[key]}, {text}"
        self._headers[key] = text

    def on_headers_complete(self) -> None:
        """Refuse what can be refused without the body; let the client send it otherwise."""
        if self._refused:
            return
        self._phase = _Phase.BODY
        self._unparsed_bytes = 0
        self._body_came = True
        self._deadline = time.monotonic() + self._options.body_seconds
        version = self._parser.get_http_version()
        request = self._request = self._new_request(version)
        refusal = self._refusal_of_head(request.method, version) or self._handler.admit(request)
        if refusal is None:
            if self._headers.get("expect", "").lower() == "100-continue" and self._current is None:
                self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            return
        if refusal.keep_alive and not self._has_body():
            self._refusal = refusal
        else:
            self._queue_refusal(refusal)

    def on_body(self, body: bytes) -> None:
        """Part of the body."""
        self._body_came = True
        self._unparsed_bytes = 0
        if self._refused:
            return
        self._body_bytes += len(body)
        if self._body_bytes > self._options.max_body_bytes:
            self._queue_refusal(self._too_large())
        elif self._handler.held_body_bytes + len(body) > BODIES_HELD * self._options.max_body_bytes:
            self._queue_refusal(Refusal(503, "too many large requests; try again later", (("retry-after", "1"),)))
        else:
            self._held_bytes += len(body)
            self._handler.held_body_bytes += len(body)
            self._body.append(body)

    def on_message_complete(self) -> None:
        """Queue the request."""
        if self._refused or self._request is None:
            return
        self._request.body = b"".join(self._body)
        self._body = []
        self._phase = _Phase.IDLE
        self._deadline = time.monotonic() + self._options.idle_seconds
        if len(self._pipeline) >= MOST_PIPELINED:
            self._queue_refusal(Refusal(429, f"more than {MOST_PIPELINED} requests were sent ahead; wait for answers"))
        else:
            self._pipeline.append((self._request, self._refusal))

    # for exchanges

    def write(self, data: bytes) -> None:
        """Send data to the client."""
        self._written_bytes += len(data)
        self.transport.write(data)

    def release_body(self, count: int) -> None:
        """``count`` bytes of a body are no longer held. After the connection was lost, none are."""
        count = min(count, self._held_bytes)
        self._held_bytes -= count
        self._handler.held_body_bytes -= count

    def flush_soon(self, exchange: Exchange) -> None:
        """Flush ``exchange`` in a turn of the loop to come; end it if its client does not read."""
        if self._stalled_since is not None and self.transport.get_write_buffer_size() > BUFFERED_BYTES:
            self.transport.abort()
        else:
            self._handler.flush_soon(exchange)

    def extra_headers(self, request: HttpRequest) -> Iterable[tuple[str, str]]:
        """Headers of every answer."""
        return self._handler.extra_headers(request)

    def answered(self, exchange: Exchange) -> None:
        """Go on to the next request, or close."""
        self._current = None
        self.release_body(len(exchange.request.body))
        self._handler.finished(exchange)
        if not exchange.request.keep_alive or exchange.request.http_1_0:
            self._close()
            return
        self._deadline = time.monotonic() + self._options.idle_seconds
        if self._pipeline:
            asyncio.get_running_loop().call_soon(self._next)  # not deeper into the stack

    def check(self, now: float) -> None:
        """End what takes too long; called about once a second.

        Args:
            now: ``time.monotonic()``.
        """
        if self._stalled_since is not None:
            taken_bytes = self._written_bytes - self._unread_bytes()
            if taken_bytes > self._taken_bytes:
                self._taken_bytes, self._stalled_since = taken_bytes, now
        if self._stalled_since is not None and now - self._stalled_since > self._options.stalled_seconds:
            self.transport.abort()
        elif self._phase is _Phase.LINGERING:
            if now > self._deadline:
                self.transport.abort()
        elif self._current is None and not self._pipeline and now > self._deadline:
            if self._phase is _Phase.IDLE:
                self.transport.close()
            else:
                part = "head" if self._phase is _Phase.HEAD else "body"
                self._refuse(408, f"the {part} of the request took too long; send it faster")
                self._next()

    # inside

    def _unread_bytes(self) -> int:
        """Written bytes that the client has not acknowledged, here and in the kernel, which holds megabytes."""
        try:
            answer = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        except OSError:
            answer = bytes(4)
        return self.transport.get_write_buffer_size() + int.from_bytes(answer, sys.byteorder)

    def _has_body(self) -> bool:
        return "transfer-encoding" in self._headers or self._headers.get("content-length", "0").strip("0") != ""

    def _new_request(self, version: str) -> HttpRequest:
        given = self._headers.get("x-request-id")
        path, _, query = _ORIGIN.sub("", self._url.decode("latin-1")).partition("?")
        method = self._parser.get_method().decode("latin-1")
        request_id = given if given and _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        keep_alive = bool(self._parser.should_keep_alive())
        return HttpRequest(
            method, path, query, self._headers, b"", request_id, self._arrival_ns, None, keep_alive, version == "1.0"
        )

    def _refusal_of_head(self, method: str, version: str) -> Refusal | None:
        headers = self._headers
        if version not in ("1.0", "1.1"):
            return Refusal(505, "only HTTP/1.1 and HTTP/1.0 are supported")
        if len(self._url) > LINE_BYTES:
            return Refusal(414, f"the path is longer than {LINE_BYTES:,} bytes")
        if self._head_bytes > HEAD_BYTES:
            return self._large_head()
        if version == "1.1" and ("host" not in headers or "host" in self._repeated):
            return Refusal(400, "a request must have one Host header")
        if "content-length" in self._repeated:
            return Refusal(400, "a request must have at most one Content-Length header")
        encoding = headers.get("transfer-encoding")
        if encoding is not None and encoding.lower() != "chunked":
            return Refusal(501, "only the transfer encoding chunked is supported")
        if headers.get("content-encoding", "identity").lower() != "identity":
            return Refusal(415, "compressed bodies are not supported; send plain JSON")
        if encoding is None and "content-length" not in headers and method in _BODY_METHODS:
            return Refusal(411, "a body needs a Content-Length header or the transfer encoding chunked")
        length = headers.get("content-length", "0")
        if len(length) > 18 or int(length) > self._options.max_body_bytes:
            return self._too_large()
        if method in ("GET", "HEAD") and self._has_body():
            return Refusal(400, f"a {method} request must not have a body")
        if headers.get("expect", "100-continue").lower() != "100-continue":
            return Refusal(417, "the only expectation that is supported is 100-continue")
        return None

    def _too_large(self) -> Refusal:
        return Refusal(413, f"the body is larger than {self._options.max_body_bytes:,} bytes; send less")

    def _large_head(self) -> Refusal:
        return Refusal(431, f"the headers are larger than {HEAD_BYTES:,} bytes; send fewer")

    def _refuse_large_head(self) -> None:
        if len(self._url) > LINE_BYTES:
            self._refuse(414, f"the path is longer than {LINE_BYTES:,} bytes")
        else:
            self._queue_refusal(self._large_head())

    def _refuse_broken(self, data: bytes, error: Exception) -> None:
        if isinstance(error, httptools.HttpParserCallbackError):
            self._refuse(500, "the server failed to read this request")
        elif _VERSION.search(data[:LINE_BYTES]):
            self._refuse(505, "only HTTP/1.1 and HTTP/1.0 are supported")
        elif isinstance(error, httptools.HttpParserInvalidMethodError) and _UNKNOWN_METHOD.search(data):
            self._refuse(501, "the method is not one of HTTP's")
        else:
            what = " ".join(str(error).split())[:200]
            self._refuse(400, f"this is not a valid HTTP/1.1 request: {what}")

    def _refuse(self, status: int, message: str, headers: tuple[tuple[str, str], ...] = ()) -> None:
        if not self._refused:
            self._queue_refusal(Refusal(status, message, headers))

    def _queue_refusal(self, refusal: Refusal) -> None:
        """Answer with an error after the requests before it, then close: what follows cannot be trusted."""
        request = self._request or HttpRequest("", "", "", {}, b"", secrets.token_hex(16), self._arrival_ns)
        request.keep_alive = False
        self.release_body(sum(map(len, self._body)))
        self._body = []
        self._pipeline.append((request, refusal))
        self._refused = True

    def _next(self) -> None:
        """Answer the requests that wait, until one takes its time."""
        if self._current is not None or not self._pipeline or self.transport.is_closing():
            return
        request, refusal = self._pipeline.popleft()
        if not self._pipeline:
            self.transport.resume_reading()  # only so does it notice that the client leaves
        exchange = self._current = Exchange(request, self)
        if refusal is not None:
            exchange.fail(refusal.status, refusal.message, headers=refusal.headers)
        else:
            self._handler.handle(exchange)

    def _close(self) -> None:
        """Close so that the client gets its answer: data that arrives at a closed socket would reset the connection."""
        if self._refused and self.transport.can_write_eof():
            self.transport.write_eof()
            self._phase = _Phase.LINGERING
            self._deadline = time.monotonic() + LINGER_SECONDS
            self.transport.resume_reading()
        else:
            self.transport.close()
