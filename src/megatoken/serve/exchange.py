"""One request and its answer, as routes see them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from http import HTTPStatus
from typing import Any, Protocol

from megatoken.serve.tenants import Tenant

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> bytes:
    """The body of an answer with an HTTP status of 400 or more."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return json.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}}).encode()


Headers = Iterable[tuple[str, str]]
CLIENT_LEFT = 499  # status in the access log when the client has closed the connection


@dataclass(slots=True)
class HttpRequest:
    """A request whose head and body have arrived. Names of headers are in lower case; ``query`` has no ``?``."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes
    request_id: str
    arrival_ns: int  # time.monotonic_ns() when its first byte arrived
    tenant: Tenant | None = None
    keep_alive: bool = True
    http_1_0: bool = False


class Carrier(Protocol):
    """The connection of an exchange, as the exchange sees it."""

    def write(self, data: bytes) -> None:
        """Send data to the client."""

    def release_body(self, count: int) -> None:
        """``count`` bytes of a body are no longer held."""

    def flush_soon(self, exchange: Exchange) -> None:
        """Flush ``exchange`` in the next turn of the loop; end it if its client does not read."""

    def answered(self, exchange: Exchange) -> None:
        """Go on to the next request, or close."""

    def extra_headers(self, request: HttpRequest) -> Headers:
        """Headers of every answer."""


class _State(Enum):
    WAITING = auto()
    STREAMING = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False)
class Exchange:
    """One request and its answer. Only the event loop's thread may use it.

    After the client has left, or after the end, ``reply``, ``write`` and ``end`` do nothing.
    """

    request: HttpRequest
    connection: Carrier
    status: int = 0  # of the answer; 0 until there is one
    body_bytes: int = 0
    # facts for the access log. Never text of a prompt or an answer.
    notes: dict[str, Any] = field(default_factory=dict)
    _state: _State = _State.WAITING
    _head_bytes: bytes = b""  # of a stream, until it is written
    _parts: list[bytes] = field(default_factory=list)
    _callbacks: list[Callable[[], object]] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """Whether it takes nothing more: answered, or the client has left."""
        return self._state is _State.ENDED

    @property
    def begins(self) -> bool:
        """Whether it is a stream of which nothing is written yet."""
        return bool(self._head_bytes)

    @property
    def tenant_name(self) -> str:
        """Whose request it is; empty for a path that needs no key."""
        return "" if self.request.tenant is None else self.request.tenant.name

    def take_body(self) -> bytes:
        """The body of the request, once: what is parsed need not be held while the answer is made."""
        body, self.request.body = self.request.body, b""
        self.connection.release_body(len(body))
        return body

    def reply(
        self, status: int, body: bytes = b"", content_type: str = "application/json", headers: Headers = ()
    ) -> None:
        """Answer with one body."""
        if self._state is not _State.WAITING:
            return
        self._state = _State.ENDED
        self.status, self.body_bytes = status, len(body)
        has_body = status not in (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)
        own = [("content-type", content_type), ("content-length", str(len(body)))] if has_body else []
        head = self._head([*own, *headers])
        self.connection.write(head + body if self.request.method != "HEAD" else head)
        self._finish()

    def fail(self, status: int, message: str, *, headers: Headers = ()) -> None:
        """Answer with an error in OpenAI's shape."""
        self.reply(status, error_body(status, message), headers=headers)

    def start_events(self) -> None:
        """Begin a stream of server-sent events with status 200."""
        if self._state is not _State.WAITING:
            return
        self._state = _State.STREAMING
        self.status = HTTPStatus.OK
        own = [("content-type", "text/event-stream; charset=utf-8"), ("cache-control", "no-cache")]
        if not self.request.http_1_0:  # before HTTP/1.1 the end of the connection ends the body
            own.append(("transfer-encoding", "chunked"))
        self._head_bytes = self._head(own)
        self.connection.flush_soon(self)

    def write(self, frames: bytes) -> None:
        """Send frames of the stream; all that wait leave in one write."""
        if self._state is _State.STREAMING:
            if not (self._parts or self._head_bytes):  # else it will be flushed already
                self.connection.flush_soon(self)
            self._parts.append(frames)

    def end(self) -> None:
        """End the stream."""
        if self._state is _State.STREAMING:
            self.flush(last=True)
            self._state = _State.ENDED
            self._finish()

    def on_disconnect(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` if the client leaves, or reads too slowly, before the end; at once if it has."""
        if self._state is _State.ENDED:
            callback()
        else:
            self._callbacks.append(callback)

    def flush(self, *, last: bool = False) -> None:
        """Write what was collected as one chunk; with ``last`` also the end of the body."""
        if self._state is not _State.STREAMING or not (self._head_bytes or self._parts or last):
            return
        head, data = self._head_bytes, b"".join(self._parts)
        self._head_bytes = b""
        self._parts.clear()
        self.body_bytes += len(data)
        if not self.request.http_1_0:
            data = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
            data += b"0\r\n\r\n" if last else b""
        if head or data:
            self.connection.write(head + data)

    def half_closed(self) -> None:
        """The client sends no more; whether it still reads cannot be seen. Say so to one that does, and end."""
        if self._state is _State.WAITING:
            message = "the connection was closed on the client's side before the answer; keep it open until then"
            body = error_body(HTTPStatus.BAD_REQUEST, message)
            self.status = HTTPStatus.BAD_REQUEST
            self.request.keep_alive = False
            own = [("content-type", "application/json"), ("content-length", str(len(body)))]
            self.connection.write(self._head(own) + body)
        self.abandon()

    def abandon(self) -> None:
        """The client has left: call the callbacks."""
        if self._state is _State.ENDED:
            return
        self._state = _State.ENDED
        self.status = CLIENT_LEFT
        for callback in self._callbacks:
            callback()
        self._callbacks.clear()

    def _head(self, headers: Headers) -> bytes:
        lines = [f"HTTP/1.1 {self.status} {_reason(self.status)}", f"x-request-id: {self.request.request_id}"]
        lines += [f"{name}: {value}" for name, value in headers]
        lines += [f"{name}: {value}" for name, value in self.connection.extra_headers(self.request)]
        if not self.request.keep_alive or self.request.http_1_0:
            lines.append("connection: close")
        return "\r\n".join([*lines, "", ""]).encode("latin-1", errors="replace")

    def _finish(self) -> None:
        self._callbacks.clear()
        self.connection.answered(self)


def _reason(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown"
