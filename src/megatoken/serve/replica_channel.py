"""How a replica connects to the router of its server, on this machine or another, and how the router knows it.

Both prove that they know the server's key before anything else is read, as in a rack's runs (``rack/wire.py``). Then
the replica sends its number, and frames of ``messages`` follow. They are not encrypted.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from contextlib import suppress

from megatoken.framing import WireError
from megatoken.rack.wire import dial, handshake
from megatoken.serve.link import Link, LinkOwner

CONNECT_SECONDS = 5.0
HANDSHAKE_SECONDS = 5.0
MOST_HANDSHAKES = 16  # at a time; each waits on a thread
AGAIN_SECONDS = 0.2
BACKLOG = 256

Address = str | tuple[str, int]
"""Path of a Unix socket, or host and port."""


def listen_at(address: Address) -> socket.socket:
    """A listening socket."""
    listener = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    listener.bind(address)
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


async def serve_router(hub: LinkOwner, address: Address, key: bytes, number: int, reconnect_seconds: float) -> None:
    """Serve the router; connect again after a loss. Returns when it was out of reach for ``reconnect_seconds``."""
    loop = asyncio.get_running_loop()
    until = time.monotonic() + reconnect_seconds
    while time.monotonic() < until:
        with suppress(OSError, WireError):
            connection = await asyncio.to_thread(dial, address, key, number, CONNECT_SECONDS)
            link = Link(hub)
            await loop.create_connection(lambda link=link: link, sock=connection)  # type: ignore[misc]
            await link.closed.wait()
            until = time.monotonic() + reconnect_seconds
        await asyncio.sleep(AGAIN_SECONDS)


async def accept_replicas(listener: socket.socket, key: bytes, make: Callable[[int], asyncio.Protocol]) -> None:
    """Accept replicas for good; ``make`` is called with the number of each that knows the key."""
    loop = asyncio.get_running_loop()
    room = asyncio.Semaphore(MOST_HANDSHAKES)
    admitting: set[asyncio.Task[None]] = set()

    async def admit(connection: socket.socket) -> None:
        try:
            number = await asyncio.to_thread(handshake, connection, key, HANDSHAKE_SECONDS)
            await loop.connect_accepted_socket(lambda: make(number), connection)
        except (OSError, WireError):
            connection.close()
        finally:
            room.release()

    while True:
        await room.acquire()
        connection, _ = await loop.sock_accept(listener)
        task = loop.create_task(admit(connection))
        admitting.add(task)
        task.add_done_callback(admitting.discard)
