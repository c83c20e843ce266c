"""A server whose behaviour each prompt asks for by its first word; it records when it sent what."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
ITL_SECONDS = 0.02


def frame(text: str, reason: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
    document = {"id": "c", "object": "text_completion", "created": 1, "model": "m", "choices": [choice], **more}
    return f"data: {json.dumps(document, ensure_ascii=False)}\n\n".encode()


def usage(tokens: int, prompt_tokens: int = 3) -> bytes:
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": tokens + prompt_tokens}
    return f"data: {json.dumps({'choices': [], 'usage': counts})}\n\n".encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


DONE = b"data: [DONE]\n\n"


@dataclass
class Server:
    """One server on a thread of its own."""

    port: int = 0
    tls: ssl.SSLContext | None = None
    asked: Counter[str] = field(default_factory=Counter)
    bodies: list[dict[str, Any]] = field(default_factory=list)  # of streams
    whole: list[dict[str, Any]] = field(default_factory=list)  # bodies of requests for answers that are no streams
    heads: list[bytes] = field(default_factory=list)
    sent_ns: dict[str, list[int]] = field(default_factory=dict)  # times of frames with text, by prompt
    starts_at: float = 0.0  # monotonic seconds; until then it answers 503
    refuses_with: int = 0  # status of the answer to every prompt; 0: it answers
    closes: bool = False  # the connection, on every prompt
    hangs: bool = False  # on every prompt
    open: int = 0  # answers under way
    most_open: int = 0
    stop: Callable[[], None] = lambda: None
    writers: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http{'s' * (self.tls is not None)}://127.0.0.1:{self.port}/v1"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.add(writer)
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            for number in itertools.count():
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                path = head.split(b" ")[1].decode()
                length = next(
                    (int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0
                )
                body = json.loads(await reader.readexactly(length)) if length else {}
                if time.monotonic() < self.starts_at:
                    reply(writer, {"error": {"message": "loading the model"}}, 503)
                elif path == "/v1/models":
                    reply(writer, {"data": [{"id": "m", "object": "model"}]})
                elif path == "/version":
                    reply(writer, {"version": "7.0"})
                elif path == "/metrics":
                    text = b'vllm:num_requests_running{model_name="m"} 3.0\nvllm:num_requests_waiting 2\n'
                    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nConnection: close\r\n"
                    writer.write(head + b"Content-Length: %d\r\n\r\n" % len(text) + text)
                    writer.close()
                    return
                elif self.closes or self.hangs:
                    await asyncio.sleep(60 * self.hangs)
                    writer.close()
                    return
                elif self.refuses_with:
                    reply(writer, {"error": {"message": "not this time"}}, self.refuses_with)
                elif not body.get("stream"):
                    self.whole.append(body)
                    if body["prompt"] == "unlike":  # another form, as long as the connection lasts
                        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"
                        writer.write(head + b'{"choices": [{"token_ids": 7}]}')
                        writer.close()
                        return
                    if "ignore_eos" in body and self.asked["knows nothing"]:
                        reply(writer, {"error": {"message": "ignore_eos: extra fields are not permitted"}}, 400)
                    else:
                        choices = [{"index": 0, "text": "a b c d", "finish_reason": "length"}]
                        reply(writer, {"choices": choices, "usage": {"prompt_tokens": 1, "completion_tokens": 4}})
                elif number and str(body["prompt"]).startswith("new"):
                    writer.close()  # as a server does whose limit of requests for each connection is reached
                    return
                else:
                    self.bodies.append(body)
                    self.open += 1
                    self.most_open = max(self.most_open, self.open)
                    try:
                        await self.answer(str(body["prompt"]), body, writer)
                    finally:
                        self.open -= 1

    async def answer(self, prompt: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        word = prompt.split()[0]
        self.asked[prompt] += 1
        if word == "hang" or (word == "stops" and self.asked[prompt] > 4):
            await asyncio.sleep(60)
        elif word == "error":
            reply(writer, {"error": {"message": "the engine has failed"}}, 500)
        elif word == "busy" and self.asked[prompt] == 1:
            reply(writer, {"error": {"message": "too many"}}, 429, "Retry-After: 1\r\n")
        elif word == "redirect":
            reply(writer, {}, 307, "Location: http://elsewhere.example/v1\r\n")
        elif word == "type":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 2\r\n\r\nhi")
        elif word in ("reset", "close"):
            writer.write(STREAM + chunk(frame("one ")))
            await writer.drain()
            await asyncio.sleep(0.3)
            if word == "reset":
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.close()
        elif word == "malformed":
            writer.write(STREAM + chunk(frame("one ")) + chunk(b"data: {oops\n\n") + chunk(b""))
        elif word == "half":
            bad = frame("x").replace(b'"x"', b'"\xe2\x82"')
            writer.write(STREAM + chunk(frame("one ")) + chunk(bad) + chunk(b""))
        elif word == "huge":
            writer.write(STREAM)
            for _ in range(100):
                writer.write(chunk(b"data: " + b"x" * (1 << 20)))
                await writer.drain()
        elif word == "textless":
            writer.write(STREAM + chunk(frame("", "stop")) + chunk(usage(0)) + chunk(DONE) + chunk(b""))
        elif word == "whole":  # as a proxy sends it that waits for the end of a stream
            tokens = body["max_tokens"]
            frames = [frame(f"w{at} ", "length" if at == tokens - 1 else None) for at in range(tokens)]
            writer.write(STREAM + b"".join(map(chunk, (*frames, usage(tokens), DONE, b""))))
        elif word == "unfinished":
            writer.write(STREAM + chunk(frame("one ")) + chunk(b""))
        else:
            await self.stream(word, prompt, body["max_tokens"], writer)

    async def stream(self, word: str, prompt: str, tokens: int, writer: asyncio.StreamWriter) -> None:
        sent = self.sent_ns.setdefault(prompt, [])
        writer.write(STREAM)

        def put(text: str, reason: str | None = None) -> None:
            sent.append(time.monotonic_ns())
            writer.write(chunk(frame(text, reason)))

        if word == "empty":
            writer.write(chunk(frame("")))
        if word == "split":  # a character of three bytes in two pieces of the stream
            data = chunk(frame("€ "))
            at = data.index("€".encode()) + 1
            writer.write(data[:at])
            await asyncio.sleep(0.02)
            sent.append(time.monotonic_ns())
            writer.write(data[at:])
        if word == "dummy":
            put("\u200b")
            await asyncio.sleep(0.2)
        count = {"cut": tokens // 2, "short": tokens // 2}.get(word, tokens) - (word in ("split", "dummy"))
        quick = word in ("dummy", "quick") or (word == "memory" and self.asked[prompt] > 1)
        pace = 0.001 if quick else ITL_SECONDS
        per_frame = 4 if word == "several" else 1
        for at in range(0, count, per_frame):
            if at:
                await asyncio.sleep(pace)
            last = at + per_frame >= count
            if word == "ends" and last:  # the end token has no text
                put("", "stop")
                break
            put(" " * 4 if word == "padded" and at > 1 else f"w{at} ", None if not last else "length")
            if word == "early" and at == 1:
                writer.write(chunk(DONE))
        stated = 2 * count if word == "inflated" else count + (word in ("split", "dummy", "rounded"))
        writer.write(chunk(usage(stated, 10**9 if word == "bloated" else 3)))
        if word != "nodone":
            writer.write(chunk(DONE))
        if word != "lingers":
            writer.write(chunk(b""))


def reply(writer: asyncio.StreamWriter, document: Any, status: int = 200, headers: str = "") -> None:
    data = json.dumps(document).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n{headers}Content-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)


@contextmanager
def scripted_server(port: int = 0, tls: ssl.SSLContext | None = None) -> Iterator[Server]:
    server, ready = Server(tls=tls), threading.Event()

    def run() -> None:
        async def main() -> None:
            stopped, loop = asyncio.Event(), asyncio.get_running_loop()
            listening = await asyncio.start_server(server.serve, "127.0.0.1", port, ssl=tls)
            server.port = listening.sockets[0].getsockname()[1]
            server.stop = lambda: loop.call_soon_threadsafe(stopped.set)
            ready.set()
            await stopped.wait()
            listening.close()
            await asyncio.sleep(0.3)  # connections that were just accepted reach ``serve``
            for writer in server.writers:
                writer.transport.abort()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0.05)  # transports close in the next turn

        asyncio.run(main())

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait(60)
    try:
        yield server
    finally:
        with suppress(RuntimeError):
            server.stop()
        thread.join(10)
