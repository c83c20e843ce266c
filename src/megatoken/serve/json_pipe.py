"""How the server and its template processes speak over pipes: four bytes of length, then JSON."""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any, BinaryIO

_LENGTH = struct.Struct(">I")


def framed(text: str) -> bytes:
    """JSON as it travels."""
    data = text.encode()
    return _LENGTH.pack(len(data)) + data


def read_message(stream: BinaryIO) -> Any:
    """The next message, None at the end."""
    head = stream.read(_LENGTH.size)
    return json.loads(stream.read(_LENGTH.unpack(head)[0])) if len(head) == _LENGTH.size else None


async def receive_message(reader: asyncio.StreamReader) -> Any:
    """The next message. Raises asyncio.IncompleteReadError: there is none."""
    head = await reader.readexactly(_LENGTH.size)
    return json.loads(await reader.readexactly(_LENGTH.unpack(head)[0]))
