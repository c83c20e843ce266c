"""Messages between a run and its client processes: frames with a value of Python's marshal.

Both ends are processes of one interpreter on one machine, and nothing else can write to the socket.
"""

from __future__ import annotations

import marshal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatoken.framing import FrameReader, frame
from megatoken.targets.endpoint.address import Address
from megatoken.targets.endpoint.bodies import Api

SEND, CANCEL, PROBE = range(3)  # to a client process: [Task], [ticket], number of a lost endpoint
EVENTS, LOAD, METRICS, BACK = range(4)  # from it
FIRST, PROGRESS, END, FAILURE = range(4)  # kinds of events, the first of their fields


class Task(NamedTuple):
    """A request to send; ``keep_text`` asks for the text of the answer."""

    ticket: int
    endpoint: int
    body: bytes
    max_tokens: int
    forced: bool
    keep_text: bool


class Ended(NamedTuple):
    """A whole answer. Times are ``time.monotonic_ns()``; a first time of 0 and counts of -1 are unknown."""

    kind: int
    ticket: int
    sent_ns: int
    first_ns: int
    last_ns: int
    finish_reason: str
    tokens: int
    counted_by: str  # ids, usage or frames
    input_tokens: int
    cached_tokens: int
    frames: int  # that brought text
    times: bytes  # int64, of each of them, or of each token where their number is known
    token_ids: tuple[int, ...]
    text: str
    flags: int
    prompt_hash: int
    answer_hash: int
    first_piece_hash: int
    retries: int
    first_characters: int  # of the text, that the first frame with text brought


class Failed(NamedTuple):
    """A request without an answer.

    ``cause``: connect (no connection), lost (the connection ended; of several endpoints gone, where the server takes no
    other connection, or interrupted, where it does), timeout or answer.
    """

    kind: int
    ticket: int
    cause: str
    message: str
    retries: int


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """What a client process gets first."""

    addresses: tuple[Address, ...]
    api: Api
    key: str | None
    ca_file: str | None
    stream: bool
    timeout_seconds: float
    connect_seconds: float
    watch_metrics: bool


def pack(kind: int, value: Any) -> bytes:
    """A message."""
    return frame(kind, marshal.dumps(value))


def unpack(reader: FrameReader, data: bytes) -> Iterator[tuple[int, Any]]:
    """The messages that are complete with ``data``."""
    return ((kind, marshal.loads(body)) for kind, body in reader.feed(data))
