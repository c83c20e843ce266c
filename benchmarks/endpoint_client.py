"""Measures the client of ``megatoken run --endpoint`` on one core, with a server on another that costs next to nothing.

    python benchmarks/endpoint_client.py                          # requests, frames one by one, frames in bursts
    python benchmarks/endpoint_client.py --case bursts --frames-per-write 8

The server is a process of this benchmark that sends bytes made beforehand as fast as the sockets take them. The client
process and the process that shares requests out stay on one core, the server on the other. What a client can hold
depends on how many frames each read finds, so there are two cases: one frame a write, round the streams, where the
server's own system calls are the limit, and several frames a write. Next to the rate stands the processor time of the
client, which says what the core could hold if the server were faster. Frames per read are counted from the times of
the tokens: all frames of a read have the same one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import select
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import psutil

from megatoken.engine.request import Request
from megatoken.targets.endpoint.address import Address
from megatoken.targets.endpoint.observations import Observations
from megatoken.targets.endpoint.target import Asking, EndpointTarget
from megatoken.targets.endpoint.wire import ClientSettings

WARM_UP_SECONDS = 1.0
CASES = ("requests", "frames", "bursts")


def chunk(data: bytes) -> bytes:
    """A chunk of HTTP's chunked encoding."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def document(text: str, reason: str | None = None, usage: dict[str, int] | None = None) -> bytes:
    """An answer of the route of completions, as long as vLLM's."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason, "stop_reason": None}
    head = {"id": "cmpl-079345ded6195a287441e916a153ab0d", "object": "text_completion", "created": 1795462983}
    return json.dumps({**head, "model": "m", "choices": [choice], "usage": usage}).encode()


def serve(ready: Any, core: int, frames: int, per_write: int, interval: float) -> None:
    """Answers every request; streams get ``per_write`` frames each ``interval`` seconds, together or as fast as can be.

    Sockets block when a client does not keep up.
    """
    os.sched_setaffinity(0, {core})
    usage = {"prompt_tokens": 4, "completion_tokens": frames}
    whole = document("word " * 32, "length", usage)
    reply = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(whole) + whole
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    burst = chunk(b"data: " + document(" word") + b"\n\n") * per_write
    last = chunk(b"data: " + document(" word", "length", usage) + b"\n\n") + chunk(b"data: [DONE]\n\n") + chunk(b"")
    last = burst[: len(burst) // per_write * (per_write - 1)] + last
    poll, listening = select.epoll(), socket.create_server(("127.0.0.1", 0), backlog=4096)
    listening.setblocking(False)
    poll.register(listening, select.EPOLLIN)
    connections: dict[int, socket.socket] = {}
    left: dict[socket.socket, int] = {}
    ready.send(listening.getsockname()[1])
    due = time.monotonic()
    while True:
        for descriptor, _ in poll.poll(0 if left else 1):
            if descriptor == listening.fileno():
                with suppress(BlockingIOError):
                    while True:
                        connection, _ = listening.accept()
                        connection.setblocking(True)
                        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                        connections[connection.fileno()] = connection
                        poll.register(connection, select.EPOLLIN)
                continue
            connection = connections[descriptor]
            data = connection.recv(1 << 16)
            if not data:
                poll.unregister(descriptor)
            elif b'"stream": true' in data:
                connection.sendall(head)
                left[connection] = frames // per_write
            else:
                connection.sendall(reply)
        if time.monotonic() < due:
            time.sleep(1e-4)
            continue
        due = max(due + interval, time.monotonic())
        for connection in list(left):
            left[connection] -= 1
            if left[connection]:
                connection.sendall(burst)
            else:
                connection.sendall(last)
                del left[connection]


@dataclass
class Result:
    """What the client did on its core."""

    case: str
    open_requests: int
    requests_per_second: float
    frames_per_second: float
    frames_per_read: float | None
    worker_cpu_microseconds: float  # per frame, or per request without streams
    parent_cpu_microseconds: float
    one_core_could_hold_per_second: float


def measure(options: argparse.Namespace, case: str) -> Result:
    """Keeps ``options.streams`` requests open for a while."""
    own_core, server_core = sorted(os.sched_getaffinity(0))[:2]
    stream, per_write = case != "requests", options.frames_per_write if case == "bursts" else 1
    frames = options.frames // per_write * per_write
    interval = 1 / options.frame_rate if options.frame_rate and stream else 0.0
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.Process(target=serve, args=(theirs, server_core, frames, per_write, interval), daemon=True)
    server.start()
    address = Address.parse(f"http://127.0.0.1:{ours.recv()}/v1")
    settings = ClientSettings((address,), "completions", None, None, stream, 600.0, 10.0, watch_metrics=False)
    os.sched_setaffinity(0, {own_core})
    target = EndpointTarget(
        settings,
        Asking("m", False, False),
        {},
        processes=1,
        max_in_flight=options.streams,
        observations=Observations(None),
    )
    try:
        [worker] = [one for one in psutil.Process().children() if "megatoken.targets.endpoint.worker" in one.cmdline()]
        requests, seen = _submitted(options, frames), _Seen()
        for at, request in zip(range(2 * options.streams), requests, strict=False):
            target.submit(at, request)
        _run(target, requests, seen, WARM_UP_SECONDS)
        seen = _Seen()
        began, cpu, own = time.perf_counter(), cpu_seconds(worker), time.process_time()
        _run(target, requests, seen, options.seconds)
        elapsed, cpu, own = time.perf_counter() - began, cpu_seconds(worker) - cpu, time.process_time() - own
    finally:
        target.close()
        server.kill()
        server.join()
        os.sched_setaffinity(0, {own_core, server_core})
    parts = max(1, seen.frames if stream else seen.requests)
    return Result(
        case=case if not options.frame_rate else f"{case}, {options.frame_rate:g} writes/s of each stream",
        open_requests=options.streams,
        requests_per_second=round(seen.requests / elapsed, 1),
        frames_per_second=round(seen.frames / elapsed, 1),
        frames_per_read=round(seen.frames / seen.reads, 2) if seen.reads else None,
        worker_cpu_microseconds=round(cpu / parts * 1e6, 2),
        parent_cpu_microseconds=round(own / parts * 1e6, 2),
        one_core_could_hold_per_second=round(parts / (cpu + own)),
    )


@dataclass
class _Seen:
    requests: int = 0
    frames: int = 0
    reads: int = 0


def _submitted(options: argparse.Namespace, frames: int) -> Iterator[Request]:
    while True:
        yield Request([5, 6, 7, 8], max_tokens=frames)


def _run(target: EndpointTarget, requests: Iterator[Request], seen: _Seen, seconds: float) -> None:
    """Counts what ends, and replaces it."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        for event in target.poll(0.01):
            if event.error:
                raise SystemExit(event.error)
            if not event.finish_reason:
                continue
            seen.requests += 1
            if event.token_times_ns is not None:
                seen.frames += len(event.token_times_ns)
                seen.reads += len(np.unique(event.token_times_ns))
            target.submit(event.sample_id, next(requests))


def cpu_seconds(process: psutil.Process) -> float:
    """User and system time."""
    return float(sum(process.cpu_times()[:2]))


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--case", choices=CASES, action="append", help="default: all")
    parser.add_argument("--streams", type=int, default=256, help="requests that are open at once")
    parser.add_argument("--frames", type=int, default=512, help="frames of one answer")
    parser.add_argument("--frames-per-write", type=int, default=4, help="of the bursts")
    parser.add_argument("--frame-rate", type=float, default=0.0, help="writes/s of one stream; 0: as fast as can be")
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    for case in options.case or CASES:
        print(json.dumps(asdict(measure(options, case))), flush=True)


if __name__ == "__main__":
    main()
