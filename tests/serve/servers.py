"""Real servers and raw sockets for tests of the front end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil

START_SECONDS = 120
ANSWER_SECONDS = 60  # only a hang takes this long, however busy the machine


@dataclass
class Running:
    """A server and what it wrote on standard error."""

    process: subprocess.Popen[str]
    port: int = 0
    log: list[str] = field(default_factory=list)

    def connect(self, *, receive_bytes: int | None = None) -> socket.socket:
        connection = socket.socket()
        if receive_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.settimeout(ANSWER_SECONDS)
        connection.connect(("127.0.0.1", self.port))
        return connection

    def raw(self, data: bytes) -> bytes:
        """Everything that comes back until the server closes the connection."""
        with self.connect() as connection:
            connection.sendall(data)
            return read_until_closed(connection)

    def ask(self, method: str, path: str, body: object = None, *, key: str | None = None) -> Answer:
        return answers(self.raw(request(method, path, body, key=key, headers={"Connection": "close"})))[0]

    def stream(self, tokens: int, *, key: str | None = None, prompt: list[int] | None = None) -> socket.socket:
        """A connection on which an answer is being streamed; its first token has arrived."""
        connection = self.connect()
        connection.sendall(completion(tokens, key=key, prompt=prompt))
        data = b""
        while b"data: " not in data:
            piece = connection.recv(65536)
            assert piece, data
            data += piece
        assert data.startswith(b"HTTP/1.1 200"), data
        return connection

    def metric(self, name: str) -> float:
        """Sum over the samples of a metric."""
        text = self.ask("GET", "/metrics").body.decode()
        values = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
        assert values, name
        return sum(map(float, values))

    def child(self, module: str) -> int:
        """Process id of a child."""
        found = [
            one.pid
            for one in psutil.Process(self.process.pid).children()
            if f"megatoken.serve.{module}" in one.cmdline()
        ]
        assert len(found) == 1, found
        return found[0]

    def wait_for_line(self, text: str) -> None:
        wait_until(lambda: any(text in line for line in self.log), f"{text!r} in {self.log}")


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        error = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


def request(
    method: str, path: str, body: object = None, *, key: str | None = None, headers: dict[str, str] | None = None
) -> bytes:
    content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    all_headers = {"Host": "test", **(headers or {})}
    if body is not None:
        all_headers |= {"Content-Type": "application/json", "Content-Length": str(len(content))}
    if key is not None:
        all_headers["Authorization"] = f"Bearer {key}"
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in all_headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + content


def completion(tokens: int, *, key: str | None = None, stream: bool = True, prompt: list[int] | None = None) -> bytes:
    body = {"model": "reference", "prompt": prompt or [5, 6, 7, 8], "max_tokens": tokens, "ignore_eos": True}
    return request("POST", "/v1/completions", {**body, "stream": stream}, key=key)


def read_until_closed(connection: socket.socket) -> bytes:
    data = b""
    while True:
        try:
            piece = connection.recv(1 << 16)
        except ConnectionResetError:
            return data
        if not piece:
            return data
        data += piece


def answers(data: bytes) -> list[Answer]:
    """All answers in what came back, which must be whole."""
    found = []
    while data:
        head, separator, data = data.partition(b"\r\n\r\n")
        assert separator, head
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        status = int(first.split()[1])
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while True:
                size, _, data = data.partition(b"\r\n")
                length = int(size, 16)
                body += data[:length]
                assert data[length : length + 2] == b"\r\n"
                data = data[length + 2 :]
                if length == 0:
                    break
        else:
            length = int(headers.get("content-length", 0 if status in (100, 204) else len(data)))
            assert len(data) >= length, (head, data)
            body, data = data[:length], data[length:]
        found.append(Answer(status, headers, body))
    return found


def wait_until(condition: Callable[[], bool], what: str, seconds: float = ANSWER_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@contextmanager
def running(*flags: str, environment: dict[str, str] | None = None, scheme: str = "http") -> Iterator[Running]:
    """A server on a free port; ended by force, because tests end servers in many ways."""
    command = [sys.executable, "-m", "megatoken", "serve", "--port", "0", *flags]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})}, start_new_session=True
    )
    server = Running(process)
    ready = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            server.log.append(line.rstrip("\n"))
            if found := re.search(rf"serving \S+ on {scheme}://\S+:(\d+) ", line):
                server.port = int(found[1])
                ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert ready.wait(START_SECONDS) and server.port, server.log
        yield server
    finally:
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.kill()
        process.wait()
        for child in children:
            try:
                child.wait(ANSWER_SECONDS)  # it notices that its parent has gone
            except psutil.TimeoutExpired:
                os.kill(child.pid, signal.SIGKILL)
                raise
        reader.join()
        assert process.stderr is not None
        process.stderr.close()
    assert not any("Traceback" in line for line in server.log), server.log
