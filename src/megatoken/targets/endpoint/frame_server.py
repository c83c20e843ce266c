"""A server that costs next to nothing, to measure a client: it sends bytes made beforehand.

    python -m megatoken.targets.endpoint.frame_server FRAMES FRAMES_PER_WRITE SECONDS_BETWEEN_WRITES

It prints its port and serves until its standard input ends. Every answer of a stream has ``FRAMES`` frames.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import threading
import time
from contextlib import suppress

from megatoken.processes import allow_many_files

_JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
_STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """A chunk of HTTP's chunked encoding."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def document(text: str, reason: str | None = None, usage: dict[str, int] | None = None) -> bytes:
    """An answer of the route of completions, as long as vLLM's."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason, "stop_reason": None}
    head = {"id": "cmpl-079345ded6195a287441e916a153ab0d", "object": "text_completion", "created": 1795462983}
    return json.dumps({**head, "model": "m", "choices": [choice], "usage": usage}).encode()


def serve(listening: socket.socket, frames: int, per_write: int, interval: float) -> None:
    """Answers every request. Streams get ``per_write`` frames every ``interval`` seconds, one after the other.

    ``frames`` is a multiple of ``per_write``. Sockets block where a client does not keep up.
    """
    usage = {"prompt_tokens": 4, "completion_tokens": frames}
    whole = document("word " * 32, "length", usage)
    frame = chunk(b"data: " + document(" word") + b"\n\n")
    end = chunk(b"data: " + document(" word", "length", usage) + b"\n\n") + chunk(b"data: [DONE]\n\n") + chunk(b"")
    reply, burst, last = _JSON % (len(whole), whole), frame * per_write, frame * (per_write - 1) + end
    poll = select.epoll()
    poll.register(listening, select.EPOLLIN)
    connections: dict[int, socket.socket] = {}
    left: dict[socket.socket, int] = {}
    due = time.monotonic()

    def drop(connection: socket.socket) -> None:
        poll.unregister(connection)
        del connections[connection.fileno()]
        left.pop(connection, None)
        connection.close()

    while True:
        for descriptor, _ in poll.poll(0 if left else 1):
            if descriptor == listening.fileno():
                with suppress(BlockingIOError, ConnectionError):
                    while True:
                        connection, _ = listening.accept()
                        connection.setblocking(True)
                        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                        connections[connection.fileno()] = connection
                        poll.register(connection, select.EPOLLIN)
                continue
            connection = connections[descriptor]
            try:
                data = connection.recv(1 << 16)
                if b'"stream": true' in data:
                    connection.sendall(_STREAM)
                    left[connection] = frames // per_write
                elif data:
                    connection.sendall(reply)
                else:
                    drop(connection)
            except ConnectionError:  # a client that ends resets what it has open; the next one is served
                drop(connection)
        if time.monotonic() < due:
            time.sleep(1e-4)
            continue
        due = max(due + interval, time.monotonic())
        for connection in list(left):
            left[connection] -= 1
            try:
                connection.sendall(burst if left[connection] else last)
                if not left[connection]:
                    del left[connection]
            except ConnectionError:
                drop(connection)


def main() -> None:
    """Entry point."""
    frames, per_write, interval = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    allow_many_files()
    listening = socket.create_server(("127.0.0.1", 0), backlog=4096)
    listening.setblocking(False)
    print(listening.getsockname()[1], flush=True)

    def end() -> None:
        sys.stdin.buffer.read()
        os._exit(0)

    threading.Thread(target=end, daemon=True).start()
    serve(listening, frames, per_write, interval)


if __name__ == "__main__":
    main()
