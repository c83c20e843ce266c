"""The protocol between driver and workers: frames of plain arrays over TCP. Nothing is unpickled.

A frame is the length of its body, a kind and the body. Numbers are little-endian. Before the first frame both sides
prove that they know the run's key (HMAC-SHA256 over the other's nonce). Content is not encrypted.
"""

from __future__ import annotations

import hmac
import socket
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import fields
from enum import IntEnum
from hashlib import sha256
from secrets import token_bytes
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatoken.engine.request import FinishReason, Request, Sampling, check_options, used_options
from megatoken.engine.state import ReplicaState
from megatoken.errors import MegatokenError, RequestError
from megatoken.hardware.telemetry import FIELDS as TELEMETRY_FIELDS

NONCE_BYTES = KEY_BYTES = 32
LARGEST_FRAME_BYTES = 2**28
RECEIVE_BYTES = 2**20

_FRAME = struct.Struct("<IB")
FRAME_HEAD_BYTES = _FRAME.size
_REQUEST = struct.Struct("<iiidIdq?")  # prompt ids, stop ids, max tokens, temperature, top k, top p, seed, ignore end
_SUBMIT = struct.Struct("<II")  # replica, samples
_REPORT = struct.Struct("<IIIII")  # replicas, first tokens, answers, ids of answers, bytes of failures
_NO_SEED = -1
FINISH_REASONS = tuple(FinishReason)  # by the number in DONE


class Kind(IntEnum):
    """The kind of a frame: who sends it, and what it carries."""

    HELLO = 1  # worker: its number
    SUBMIT = 2  # driver: samples for one replica
    REPORT = 3  # worker: states, samples wanted, events
    PING = 4  # driver: its monotonic time in ns
    PONG = 5  # worker: the same, its own monotonic time, its wall clock
    CANCEL = 6  # driver: a number
    CANCELLED = 7  # worker: that number, once everything submitted before is dropped
    FAILED = 8  # worker: text; it ends
    CLOSE = 9  # driver: end


_KINDS = frozenset(int(kind) for kind in Kind)
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
FIRST = np.dtype([("ticket", "<i8"), ("token", "<i4"), ("started_ns", "<i8")])
DONE = np.dtype(
    [
        ("ticket", "<i8"),
        ("tokens", "<i4"),
        ("ids", "<i4"),  # how many of the ids that follow are this answer's
        ("reason", "u1"),
        ("first_ns", "<i8"),
        ("last_ns", "<i8"),
        ("started_ns", "<i8"),
    ]
)
PING = struct.Struct("<q")
PONG = struct.Struct("<qqq")
NUMBER = struct.Struct("<q")


class Report(NamedTuple):
    """One report of a worker; times are its own ``time.monotonic_ns()``."""

    states: NDArray[Any]  # STATE, one per replica of the worker
    first: NDArray[Any]  # FIRST
    done: NDArray[Any]  # DONE
    ids: NDArray[np.int32]
    failures: list[tuple[int, str]]  # ticket, why the engine refuses it


class WireError(MegatokenError):
    """The other side is gone, or sent what this version does not understand."""


class Channel:
    """One connection that never blocks; bytes that cannot be sent now wait for ``flush``."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self._incoming = bytearray()
        self._outgoing: list[memoryview] = []

    @property
    def pending(self) -> bool:
        """Whether bytes wait to be sent."""
        return bool(self._outgoing)

    def send(self, kind: Kind, body: bytes = b"") -> None:
        """Sends a frame, now or with later ``flush``es. Raises WireError when the other side is gone."""
        self._outgoing.append(memoryview(_FRAME.pack(len(body), kind) + body))
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

    def receive(self) -> list[tuple[Kind, bytes]]:
        """Every whole frame that has arrived. Raises WireError when the other side is gone or a frame is malformed."""
        ended = None
        try:
            while piece := self.socket.recv(RECEIVE_BYTES):
                self._incoming += piece
                if len(piece) < RECEIVE_BYTES:
                    break
            else:
                ended = "the other side closed the connection"
        except BlockingIOError:
            pass
        except OSError as error:
            ended = f"connection lost: {error.strerror or error}"
        frames = list(self._frames())
        if ended is not None and not frames:
            raise WireError(ended)
        return frames

    def close(self) -> None:
        """Closes the connection."""
        self.socket.close()

    def _frames(self) -> Iterator[tuple[Kind, bytes]]:
        begin = 0
        while len(self._incoming) - begin >= _FRAME.size:
            length, kind = _FRAME.unpack_from(self._incoming, begin)
            if length > LARGEST_FRAME_BYTES or kind not in _KINDS:
                raise WireError(f"unknown frame of kind {kind} with {length:,} bytes")
            end = begin + _FRAME.size + length
            if len(self._incoming) < end:
                break
            yield Kind(kind), bytes(memoryview(self._incoming)[begin + _FRAME.size : end])
            begin = end
        if begin:
            del self._incoming[:begin]


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
        theirs = receive_exactly(connection, NONCE_BYTES)
        if theirs == nonce:
            raise WireError("the other side repeats our nonce")
        connection.sendall(_proof(key, names[0], theirs))
        if not hmac.compare_digest(receive_exactly(connection, sha256().digest_size), _proof(key, names[1], nonce)):
            raise WireError("the other side does not know this run's key")
    except OSError as error:
        raise WireError(f"no handshake: {error.strerror or error}") from None


def receive_exactly(connection: socket.socket, count: int) -> bytes:
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
    """The body of a REPORT frame."""
    failures = b"".join(
        NUMBER.pack(ticket) + NUMBER.pack(len(text := why.encode())) + text for ticket, why in report.failures
    )
    counts = (len(report.states), len(report.first), len(report.done), len(report.ids), len(failures))
    arrays = (report.states, report.first, report.done, report.ids)
    return b"".join((_REPORT.pack(*counts), *(part.tobytes() for part in arrays), failures))


def unpack_report(body: bytes) -> Report:
    """What ``pack_report`` packed."""
    *counts, failure_bytes = _REPORT.unpack_from(body)
    begin, arrays = _REPORT.size, []
    for count, dtype in zip(counts, (STATE, FIRST, DONE, np.dtype("<i4")), strict=True):
        arrays.append(np.frombuffer(body, dtype, count, begin))
        begin += arrays[-1].nbytes
    failures, end = [], begin + failure_bytes
    while begin < end:
        (ticket,), (length,) = NUMBER.unpack_from(body, begin), NUMBER.unpack_from(body, begin + NUMBER.size)
        begin += 2 * NUMBER.size + length
        failures.append((ticket, body[begin - length : begin].decode(errors="replace")))
    return Report(arrays[0], arrays[1], arrays[2], arrays[3], failures)


def _proof(key: bytes, name: bytes, nonce: bytes) -> bytes:
    return hmac.digest(key, name + nonce, "sha256")
