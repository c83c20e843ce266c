"""The engine side's end of the channel to one HTTP process, or of a replica's to the router; its open requests."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol, cast

from megatoken.engine.request import Request, TokenEvent
from megatoken.framing import FrameReader
from megatoken.serve.messages import Kind, Submission, step_frame, submission_of, unpickled
from megatoken.serve.tenants import Tenant

MOST_UNSENT_BYTES = 256 << 20  # of a process that does not read; then it is given up


@dataclass(slots=True, eq=False)
class Entry:
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
    whole: bool = False  # as submitted
    answers: int = 1  # as submitted
    engine: str = ""  # label of the engine that has it


class LinkOwner(Protocol):
    """What a link reports to: the hub."""

    def joined(self, link: Link) -> None:
        """The other process has connected."""

    def left(self, link: Link) -> None:
        """It has gone."""

    def submit(self, link: Link, submission: Submission, message_bytes: int) -> None:
        """Take a request that came in so many bytes."""

    def cancel(self, link: Link, client_id: int, *, stopped: bool) -> None:
        """End a request."""

    def answer_metrics(self, link: Link) -> None:
        """Send the metrics."""


class Link(asyncio.Protocol):
    """One connection. ``closed`` is set when it has ended."""

    def __init__(self, hub: LinkOwner) -> None:
        self.open: dict[int, Entry] = {}  # its requests that have not ended, by their ids
        self.closed = asyncio.Event()
        self._hub = hub
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._request_ids: list[int] = []
        self._token_ids: list[int] = []
        self._others: list[TokenEvent] = []
        self._frames: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Join the hub, which sends its status."""
        self._transport = cast(asyncio.Transport, transport)
        self._hub.joined(self)

    def connection_lost(self, error: Exception | None) -> None:
        """Cancel its requests."""
        self._transport = None
        self._hub.left(self)
        self.closed.set()

    def data_received(self, data: bytes) -> None:
        """Take requests and cancellations."""
        for kind, payload in self._reader.feed(data):
            if kind == Kind.SUBMIT:
                self._hub.submit(self, submission_of(payload), len(payload))
            elif kind == Kind.CANCEL:
                client_id, stopped = unpickled(payload)
                self._hub.cancel(self, client_id, stopped=stopped)
            elif kind == Kind.METRICS:
                self._hub.answer_metrics(self)

    def collect(self, client_id: int, event: TokenEvent) -> None:
        """Add an event to the frame of this step."""
        if event.is_one_token:
            self.collect_token(client_id, event.token_ids[0])
        else:
            self._others.append(event._replace(request_id=client_id))

    def collect_token(self, client_id: int, token_id: int) -> None:
        """Add one token and nothing else to the frame of this step."""
        self._request_ids.append(client_id)
        self._token_ids.append(token_id)

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
