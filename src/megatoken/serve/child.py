"""What a process started by the supervisor has in common: its settings, its life line, its event loop."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import socket
import struct
import sys
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

from megatoken.serve.engine_client import fault

_LENGTH = struct.Struct("<Q")
_STOP = b"s"

Settings = TypeVar("Settings")


class Control:
    """The socket to the supervisor: settings come first, then perhaps the word to stop; its end ends the process."""

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
        if _STOP in data:
            self._stop.set()


def read_settings(kind: type[Settings]) -> tuple[Control, Settings]:
    """What the supervisor sent to this process, which was started with the number of a socket.

    The supervisor handles the signals that end a server; this process ignores them, because a terminal and a service
    manager send them to every process.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    with connection.makefile("rb", buffering=0) as file:
        (length,) = _LENGTH.unpack(_exactly(file, _LENGTH.size))
        settings = pickle.loads(_exactly(file, length))
    assert isinstance(settings, kind)
    return Control(connection), settings


def first_message(settings: object) -> bytes:
    """What the supervisor sends first."""
    content = pickle.dumps(settings, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(content)) + content


def stop_message() -> bytes:
    """What the supervisor sends to stop a process in order."""
    return _STOP


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


def _exactly(file: Any, count: int) -> bytes:
    content = b""
    while len(content) < count:
        piece = file.read(count - len(content))
        if not piece:
            os._exit(1)
        content += piece
    return content
