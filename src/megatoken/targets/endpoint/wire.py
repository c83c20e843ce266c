"""Messages between a run and its client processes: frames with a value of Python's marshal.

Both ends are processes of the same version of Python: on one machine, where nothing else can write to the socket, or on
machines of one Ray cluster, over a connection on which both have proved that they know the run's key.
"""

from __future__ import annotations

import marshal
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from megatoken.framing import FrameReader, frame
from megatoken.targets.endpoint.address import Address
from megatoken.targets.endpoint.bodies import Api

FIRST, PROGRESS, END, FAILURE, CUT = range(5)  # kinds of events, the first of their fields


class Asked(IntEnum):
    """What a client process is asked to do."""

    SEND = 0  # [Task]
    CANCEL = 1  # [ticket]
    PROBE = 2  # number of a lost endpoint
    PING = 3  # time in ns


class News(IntEnum):
    """What a client process says."""

    EVENTS = 0  # [event]
    LOAD = 1  # how busy it is
    METRICS = 2  # number of an endpoint, its metrics
    BACK = 3  # number of an endpoint that answers again
    PONG = 4  # the time of a PING; its monotonic clock and its wall clock in ns
    CANCELLED = 5  # [ticket] of a CANCEL; what was seen of them came before
    PRIORITY = 6  # what it runs at while requests have times at which they leave: a Priority


class Task(NamedTuple):
    """A request to send at ``due_ns`` by the process's clock; ``keep_text`` asks for the text of the answer."""

    ticket: int
    endpoint: int
    body: bytes
    max_tokens: int
    forced: bool
    keep_text: bool
    due_ns: int


class Ended(NamedTuple):
    """A whole answer. Times: the process's ``time.monotonic_ns()``; a first time of 0 and counts of -1 are unknown."""

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
    uncounted: str  # why its tokens cannot be counted without its text; empty: ``tokens`` is their number

    def by_our_clock(self, ahead_ns: int) -> Ended:
        """With the times of a clock that is ``ahead_ns`` behind."""
        times = (np.frombuffer(self.times, np.int64) - ahead_ns).tobytes() if self.times else b""
        return self._replace(
            sent_ns=self.sent_ns - ahead_ns,
            first_ns=self.first_ns - ahead_ns if self.first_ns else 0,
            last_ns=self.last_ns - ahead_ns,
            times=times,
        )


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


class Run(NamedTuple):
    """Where a run on another machine listens for a client process, the run's secret, and the process's number."""

    address: tuple[str, int]
    secret: bytes
    number: int


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """What a client process gets first."""

    addresses: tuple[Address, ...]
    api: Api
    key: str | None = field(repr=False)
    ca_file: str | None
    stream: bool
    timeout_seconds: float
    connect_seconds: float
    watch_metrics: bool
    processes: int = 1  # client processes of that machine
    run: Run | None = field(default=None, repr=False)  # None: the process that started it

    def of(self, number: int, processes: int) -> ClientSettings:
        """Those of the process with that number, one of ``processes`` of its machine: the first reads the metrics."""
        return replace(self, watch_metrics=self.watch_metrics and number == 0, processes=processes)


def pack(kind: int, value: Any) -> bytes:
    """A message."""
    return frame(kind, marshal.dumps(value))


def unpack(reader: FrameReader, data: bytes) -> Iterator[tuple[int, Any]]:
    """The messages that are complete with ``data``."""
    return ((kind, marshal.loads(body)) for kind, body in reader.feed(data))
