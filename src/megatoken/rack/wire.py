"""The protocol between driver and workers: frames of plain arrays and JSON over TCP. Nothing is unpickled.

Numbers are little-endian. Before the first frame both sides prove that they know the run's key (HMAC-SHA256 over the
other's nonce). Content is not encrypted.
"""

from __future__ import annotations

import hmac
import json
import socket
import struct
from array import array
from collections.abc import Sequence
from dataclasses import fields
from enum import IntEnum
from hashlib import sha256
from secrets import token_bytes
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatoken.engine.request import Request, Sampling, check_options, used_options
from megatoken.engine.state import ReplicaState
from megatoken.errors import RequestError
from megatoken.framing import FrameReader, WireError, frame
from megatoken.hardware.telemetry import FIELDS as TELEMETRY_FIELDS

NONCE_BYTES = KEY_BYTES = 32
LARGEST_FRAME_BYTES = 2**28
RECEIVE_BYTES = 2**20

_REQUEST = struct.Struct("<iiidIdq?")  # prompt ids, stop ids, max tokens, temperature, top k, top p, seed, ignore end
_SUBMIT = struct.Struct("<II")  # replica, samples
_REPORT = struct.Struct("<II")  # replicas, ids of answers
_NO_SEED = -1


class Kind(IntEnum):
    """The kind of a frame: who sends it, and what it carries."""

    SUBMIT = 2  # driver: samples for one replica
    REPORT = 3  # worker: states, samples wanted, events
    PING = 4  # driver: its monotonic time in ns
    PONG = 5  # worker: the same, its own monotonic time, its wall clock
    CANCEL = 6  # driver: a number
    CANCELLED = 7  # worker: that number, once everything submitted before is dropped
    FAILED = 8  # worker: text; it ends
    CLOSE = 9  # driver: end


STATE_FIELDS = tuple(field.name for field in fields(ReplicaState) if field.name != "replicas")
STATE = np.dtype(
    [
        ("wanted", "<i4"),  # samples that the replica asks for beyond those asked for before
        ("unended_tokens", "<i8"),  # of the output tokens, those of answers that have not ended
        ("step_seconds", "<f8"),  # how long the step that runs now has been running
        *((name, "<f8") for name in TELEMETRY_FIELDS),  # NaN where there is no sensor
        # The engine's own record; its totals count from the start of a connection.
        *((name, "<f8" if name.endswith("_seconds") else "<i8") for name in STATE_FIELDS),
    ]
)
PING = struct.Struct("<q")
PONG = struct.Struct("<qqq")
NUMBER = struct.Struct("<q")


class First(NamedTuple):
    """The first token of a sample, as soon as it is known; times are the worker's ``time.monotonic_ns()``."""

    ticket: int  # the driver's number of one try of a sample, see ``hub``
    token: int
    started_ns: int


class Done(NamedTuple):
    """A whole answer."""

    ticket: int
    tokens: int
    ids: int  # how many of the ids that come with it are this answer's
    reason: str
    first_ns: int
    last_ns: int
    started_ns: int


class Report(NamedTuple):
    """One report of a worker."""

    states: NDArray[Any]  # STATE, one per replica of the worker
    ids: NDArray[np.int32]  # of the answers, one after the other; none if the run does not need them
    first: list[First]
    done: list[Done]
    failures: list[tuple[int, str]]  # ticket, why the engine refuses it


class Channel:
    """One connection that never blocks; bytes that cannot be sent now wait for ``flush``."""

    def __init__(self, connection: socket.socket, kinds: type[IntEnum] = Kind) -> None:
        """``kinds``: of the frames that the other side sends."""
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self._kinds = kinds
        self._incoming = FrameReader(LARGEST_FRAME_BYTES)
        self._outgoing: list[memoryview] = []

    @property
    def pending(self) -> bool:
        """Whether bytes wait to be sent."""
        return bool(self._outgoing)

    def send(self, kind: int, body: bytes = b"") -> None:
        """Sends a frame, now or with later ``flush``es. Raises WireError when the other side is gone."""
        self._outgoing.append(memoryview(frame(kind, body)))
        self.flush()

    def flush(self) -> None:
        """Sends as much as the connection takes now. Raises WireError when the other side is gone."""
        try:
            while self._outgoing:
                sent = self.socket.send(self._outgoing[0])
                if sent < len(self._outgoing[0]):
                    self._outgoing[0] = self._outgoing[0][sent:]
                    return
                del self._outgoing[0]
        except BlockingIOError:
            return
        except OSError as error:
            raise WireError(f"connection lost: {error.strerror or error}") from None

    def receive(self) -> list[tuple[int, bytes]]:
        """Every whole frame that has arrived. Raises WireError when the other side is gone or a frame is malformed."""
        ended, frames = None, list[tuple[int, bytes]]()
        try:
            while piece := self.socket.recv(RECEIVE_BYTES):
                frames += [(self._kinds(kind), body) for kind, body in self._incoming.feed(piece)]
                if len(piece) < RECEIVE_BYTES:
                    break
            else:
                ended = "the other side closed the connection"
        except BlockingIOError:
            pass
        except OSError as error:
            ended = f"connection lost: {error.strerror or error}"
        except ValueError:
            raise WireError("a frame of an unknown kind") from None
        if ended is not None and not frames:
            raise WireError(ended)
        return frames

    def close(self) -> None:
        """Closes the connection."""
        self.socket.close()


def authenticate(connection: socket.socket, key: bytes, timeout_seconds: float, *, driver: bool) -> None:
    """Proves to the other side that this one knows the key, and checks its proof; blocks for at most the timeout.

    Raises:
        WireError: the other side does not know the key, or does not answer in time.
    """
    names = (b"driver", b"worker") if driver else (b"worker", b"driver")
    nonce = token_bytes(NONCE_BYTES)
    try:
        connection.settimeout(timeout_seconds)
        connection.sendall(nonce)
        theirs = _receive_exactly(connection, NONCE_BYTES)
        if theirs == nonce:
            raise WireError("the other side repeats our nonce")
        connection.sendall(_proof(key, names[0], theirs))
        if not hmac.compare_digest(_receive_exactly(connection, sha256().digest_size), _proof(key, names[1], nonce)):
            raise WireError("the other side does not know this run's key")
    except OSError as error:
        raise WireError(f"no handshake: {error.strerror or error}") from None


def dial(address: str | tuple[str, int], key: bytes, number: int, timeout_seconds: float) -> socket.socket:
    """A connection to the driver at a Unix socket's path, or host and port, which knows ``number`` now; blocks.

    Raises:
        OSError, WireError: there is no such driver.
    """
    connection = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    try:
        connection.settimeout(timeout_seconds)
        connection.connect(address)
        authenticate(connection, key, timeout_seconds, driver=False)
        connection.sendall(NUMBER.pack(number))
        connection.setblocking(False)
    except BaseException:
        connection.close()
        raise
    return connection


def handshake(connection: socket.socket, key: bytes, timeout_seconds: float) -> int:
    """Checks that a worker that has connected knows the key; returns its number. Blocks. Raises OSError, WireError."""
    authenticate(connection, key, timeout_seconds, driver=True)
    (number,) = NUMBER.unpack(_receive_exactly(connection, NUMBER.size))
    connection.setblocking(False)
    return int(number)


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    """So many bytes, before the first frame. Raises WireError if the other side closes the connection."""
    got = b""
    while len(got) < count:
        piece = connection.recv(count - len(got))
        if not piece:
            raise WireError("the other side closed the connection during the handshake")
        got += piece
    return got


def pack_request(request: Request) -> bytes:
    """A request as bytes. Raises RequestError for text, for which the driver has no tokenizer, or bad options."""
    prompt, sampling = request.prompt, request.sampling
    if isinstance(prompt, str):
        raise RequestError("a rack takes token ids, not text")
    check_options(request)
    for name in sorted(used_options(request)):
        raise RequestError(f"a rack does not carry {name} to its replicas; leave it out")
    head = _REQUEST.pack(
        len(prompt),
        len(request.stop_token_ids),
        min(request.max_tokens, 2**31 - 1),  # more exceeds every engine
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        _NO_SEED if sampling.seed is None else sampling.seed,
        request.ignore_end_token,
    )
    return b"".join((head, array("i", prompt).tobytes(), array("i", request.stop_token_ids).tobytes()))


def pack_submit(replica: int, tickets: Sequence[int], requests: Sequence[bytes]) -> bytes:
    """The body of a SUBMIT frame: samples for one replica of a worker, by its place there."""
    return b"".join((_SUBMIT.pack(replica, len(tickets)), array("q", tickets).tobytes(), *requests))


def unpack_submit(body: bytes) -> tuple[int, list[tuple[int, Request]]]:
    """What ``pack_submit`` packed: the replica, and (ticket, request)."""
    replica, count = _SUBMIT.unpack_from(body)
    tickets = np.frombuffer(body, "<i8", count, _SUBMIT.size).tolist()
    begin = _SUBMIT.size + 8 * count
    samples = []
    for ticket in tickets:
        prompt, stops, max_tokens, temperature, top_k, top_p, seed, ignore = _REQUEST.unpack_from(body, begin)
        ids = np.frombuffer(body, "<i4", prompt + stops, begin + _REQUEST.size).tolist()
        begin += _REQUEST.size + 4 * (prompt + stops)
        sampling = Sampling(temperature, top_k, top_p, None if seed == _NO_SEED else seed)
        samples.append((ticket, Request(ids[:prompt], max_tokens, sampling, tuple(ids[prompt:]), ignore)))
    return replica, samples


def pack_report(report: Report) -> bytes:
    """The body of a REPORT frame: the two arrays, then the rest as JSON."""
    states, ids, *rest = report
    return b"".join((_REPORT.pack(len(states), len(ids)), states.tobytes(), ids.tobytes(), json.dumps(rest).encode()))


def unpack_report(body: bytes) -> Report:
    """What ``pack_report`` packed."""
    replicas, count = _REPORT.unpack_from(body)
    states = np.frombuffer(body, STATE, replicas, _REPORT.size)
    ids = np.frombuffer(body, "<i4", count, _REPORT.size + states.nbytes)
    first, done, failures = json.loads(body[_REPORT.size + states.nbytes + ids.nbytes :])
    return Report(states, ids, first, done, failures)


def _proof(key: bytes, name: bytes, nonce: bytes) -> bytes:
    return hmac.digest(key, name + nonce, "sha256")
