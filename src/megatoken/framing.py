"""How processes of one run or server talk: their settings when they start, then frames on a stream of bytes."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import struct
import sys
from collections.abc import Iterator
from typing import Any, TypeVar

from megatoken.errors import MegatokenError

HEAD = struct.Struct("<IB")  # of a frame: the length of its body, and its kind
_LENGTH = struct.Struct("<Q")

_Settings = TypeVar("_Settings")


class WireError(MegatokenError):
    """The other side is gone, or sent what this version does not understand."""


def frame(kind: int, body: bytes = b"") -> bytes:
    """The bytes of one frame."""
    return HEAD.pack(len(body), kind) + body


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self, largest_bytes: int = 2**32 - 1) -> None:
        """``largest_bytes``: of a body."""
        self._largest = largest_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Kind and body of every frame that ``data`` completes. Raises WireError: a body is too large."""
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= HEAD.size:
                length, kind = HEAD.unpack_from(buffer, start)
                if length > self._largest:
                    raise WireError(f"a frame of kind {kind} with {length:,} bytes")
                end = start + HEAD.size + length
                if len(buffer) < end:
                    break
                body = bytes(memoryview(buffer)[start + HEAD.size : end])
                start = end
                yield kind, body
        finally:
            del buffer[:start]


def first_message(settings: object) -> bytes:
    """What a process that this one has started reads by ``read_settings``."""
    content = pickle.dumps(settings, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(content)) + content


def read_settings(kind: type[_Settings]) -> tuple[socket.socket, _Settings]:
    """The socket to the parent, whose number is this process's argument, and what it sent first.

    The parent handles the signals that end it; this process ignores them, because a terminal and a service manager send
    them to every process. It ends if the parent has gone.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent = socket.socket(fileno=int(sys.argv[1]))
    with parent.makefile("rb", buffering=0) as file:
        (length,) = _LENGTH.unpack(_exactly(file, _LENGTH.size))
        settings = pickle.loads(_exactly(file, length))
    assert isinstance(settings, kind)
    return parent, settings


def _exactly(file: Any, count: int) -> bytes:
    content = b""
    while len(content) < count:
        content += file.read(count - len(content)) or os._exit(1)
    return content
