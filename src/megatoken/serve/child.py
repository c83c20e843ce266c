"""What the processes of a server share: settings, the socket to the supervisor, and the event loop."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

from megatoken import framing
from megatoken.serve.engine_client import fault

STOP = b"s"  # what the supervisor sends to stop a process in order

Settings = TypeVar("Settings")


class Control:
    """The socket to the supervisor. It brings the settings, then at most one stop; its end ends this process."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._stop = asyncio.Event()

    def send(self, message: dict[str, Any]) -> None:
        """Report to the supervisor."""
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def leave(self, message: str, code: int) -> NoReturn:
        """Report an error to the supervisor and end this process."""
        self.send({"error": message, "exit_code": int(code)})
        os._exit(code)

    async def wait_for_stop(self) -> None:
        """Return when the supervisor says stop."""
        await self._stop.wait()

    def watch(self) -> None:
        """From now on, end this process when the supervisor has ended."""
        self._connection.setblocking(False)
        asyncio.get_running_loop().add_reader(self._connection.fileno(), self._read)

    def _read(self) -> None:
        try:
            data = self._connection.recv(64)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            os._exit(1)
        if STOP in data:
            self._stop.set()


def read_settings(kind: type[Settings]) -> tuple[Control, Settings]:
    """What the supervisor sent to this process."""
    connection, settings = framing.read_settings(kind)
    return Control(connection), settings


def run_loop(control: Control, main: Coroutine[Any, Any, None]) -> None:
    """Run ``main`` on an event loop, and end the process when the supervisor has ended."""

    async def watched() -> None:
        control.watch()
        await main

    import uvloop

    try:
        uvloop.run(watched())
    except Exception as error:  # the supervisor starts the process again, or ends
        print(f"megatoken: {fault('a process of the server failed', error)}", file=sys.stderr, flush=True)
        os._exit(1)
