"""A server of known delays that records its own times, to hold load clients against.

    python benchmarks/known_server.py --port 8900          # until it gets SIGINT

It speaks the routes of completions and chat completions. Each answer has as many tokens as were asked for, each the
word `` the``, which is one token of the reference model, each in a frame of its own with its usage at the end. Delays
are drawn from ``seed``: a first token after 80 ms, the others after 12 ms, both with jitter; one gap in 200 is a stall
of 150 ms, one in 20 brings two tokens at once. ``POST /reset`` forgets the record, ``GET /record`` gives it: for each
stream its length, when its request had come and when each frame was given to the kernel, in ns of the monotonic clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from dataclasses import dataclass
from typing import Any

import httptools
import numpy as np
import uvloop

WORD = " the"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass(frozen=True)
class Delays:
    """Delays of one answer in seconds; jitter is the standard deviation of their logarithm."""

    ttft: float = 0.08
    itl: float = 0.012
    jitter: float = 0.1
    stall: float = 0.15
    stall_share: float = 0.005
    burst_share: float = 0.05

    def draw(self, tokens: int, seed: int) -> list[float]:
        """Seconds between the request and the first token, and between tokens [tokens]."""
        random = np.random.default_rng(seed)
        gaps = np.full(tokens, self.itl)
        gaps[random.random(tokens) < self.stall_share] = self.stall
        gaps *= np.exp(self.jitter * random.standard_normal(tokens))
        gaps[random.random(tokens) < self.burst_share] = 0.0
        gaps[0] = self.ttft * np.exp(self.jitter * random.standard_normal())
        return [float(gap) for gap in gaps]


class Connection(asyncio.Protocol):
    """One connection of a client."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def connection_made(self, transport: Any) -> None:
        """The connection is open."""
        self._transport = transport
        self._parser = httptools.HttpRequestParser(self)
        self._path, self._body = b"", b""

    def data_received(self, data: bytes) -> None:
        """Part of a request."""
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        """The path."""
        self._path, self._body = url, b""

    def on_body(self, body: bytes) -> None:
        """Part of the body."""
        self._body += body

    def on_message_complete(self) -> None:
        """Answers."""
        path = self._path.decode().partition("?")[0]
        if path == "/reset":
            self._server.record.clear()
            self._reply({})
        elif path == "/record":
            self._reply(self._server.record)
        elif path == "/health":
            self._reply({})
        elif path.endswith("/models"):
            self._reply({"object": "list", "data": [{"id": "reference", "object": "model"}]})
        elif path.endswith("completions"):
            self._answer(json.loads(self._body), chat="chat" in path)
        else:
            self._reply({"error": {"message": "no such route"}}, "404 Not Found")

    def _reply(self, document: Any, status: str = "200 OK") -> None:
        data = json.dumps(document).encode()
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        self._transport.write(head.encode() + data)

    def _answer(self, body: dict[str, Any], *, chat: bool) -> None:
        received_ns = time.monotonic_ns()
        tokens = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        if not body.get("stream"):
            text = {"message": {"role": "assistant", "content": WORD * tokens}} if chat else {"text": WORD * tokens}
            choice = {"index": 0, "finish_reason": "length", **text}
            self._reply({**_head(chat), "choices": [choice], "usage": _usage(tokens)})
            return
        row: dict[str, Any] = {"tokens": tokens, "received_ns": received_ns, "sent_ns": []}
        self._server.record.append(row)
        delays = self._server.delays.draw(tokens, len(self._server.record))
        self._transport.write(STREAM)
        self._go_on(row["sent_ns"], delays, _frame(chat, None), _frame(chat, "length"), received_ns / 1e9 + delays[0])

    def _go_on(self, sent_ns: list[int], delays: list[float], frame: bytes, last: bytes, due: float) -> None:
        """Waits for the next token; then sends it and all that are due with it."""
        loop = asyncio.get_running_loop()
        while time.monotonic() >= due:
            at = len(sent_ns)
            if self._transport.is_closing():
                return
            sent_ns.append(time.monotonic_ns())
            if at + 1 == len(delays):
                end = _chunk(_event({**_head(False), "choices": [], "usage": _usage(len(delays))}))
                self._transport.write(last + end + _chunk(b"data: [DONE]\n\n") + _chunk(b""))
                return
            self._transport.write(frame)
            due = max(due + delays[at + 1], time.monotonic() if delays[at + 1] == 0 else 0.0)
        loop.call_later(max(0.0, due - time.monotonic()), self._go_on, sent_ns, delays, frame, last, due)


class Server:
    """The record of all connections."""

    def __init__(self, delays: Delays) -> None:
        self.delays = delays
        self.record: list[dict[str, Any]] = []


def _head(chat: bool) -> dict[str, Any]:
    return {
        "id": "cmpl-079345ded6195a287441e916a153ab0d",
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": 1795462983,
        "model": "reference",
    }


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 8, "completion_tokens": tokens, "total_tokens": tokens + 8}


def _event(document: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(document)}\n\n".encode()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _frame(chat: bool, reason: str | None) -> bytes:
    text = {"delta": {"content": WORD}} if chat else {"text": WORD, "logprobs": None}
    return _chunk(_event({**_head(chat), "choices": [{"index": 0, **text, "finish_reason": reason}]}))


async def serve(port: int, delays: Delays) -> None:
    """Serves until it is cancelled."""
    server = Server(delays)
    listening = await asyncio.get_running_loop().create_server(
        lambda: Connection(server), "127.0.0.1", port, backlog=4096
    )
    await listening.serve_forever()


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--port", type=int, default=8900)
    parser.add_argument("--core", type=int, help="processor core to stay on")
    parser.add_argument("--ttft", type=float, default=Delays.ttft, help="seconds")
    parser.add_argument("--itl", type=float, default=Delays.itl, help="seconds")
    options = parser.parse_args()
    if options.core is not None:
        os.sched_setaffinity(0, {options.core})
    uvloop.run(serve(options.port, Delays(ttft=options.ttft, itl=options.itl)))


if __name__ == "__main__":
    main()
