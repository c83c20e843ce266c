"""Measures the client of ``megatoken run --endpoint`` alone: CPU time of a client process per request and per frame.

    python benchmarks/endpoint_client.py                                 # both, for a few seconds each
    python benchmarks/endpoint_client.py --streams 400 --frame-rate 50   # frames that come one by one

The server is a process of this benchmark that sends bytes made beforehand, so it costs little. Frames are paced, so
that each comes in a read of its own: the worst case for a client. Wall-clock rates depend on other work on the machine;
CPU times hardly do. One over the CPU time is what one core of its own can hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import uvloop

from megatoken.engine.request import Request
from megatoken.targets.endpoint.address import Address
from megatoken.targets.endpoint.observations import Observations
from megatoken.targets.endpoint.target import Asking, EndpointTarget
from megatoken.targets.endpoint.wire import ClientSettings

WARM_UP_SECONDS = 1.0


def chunk(data: bytes) -> bytes:
    """A chunk of HTTP's chunked encoding."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def document(text: str, reason: str | None = None, usage: dict[str, int] | None = None) -> bytes:
    """An answer of the route of completions, as long as vLLM's."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason, "stop_reason": None}
    head = {"id": "cmpl-079345ded6195a287441e916a153ab0d", "object": "text_completion", "created": 1795462983}
    return json.dumps({**head, "model": "m", "choices": [choice], "usage": usage}).encode()


def serve(ready: Any, frames: int, interval: float) -> None:
    """Answers every request, with ``frames`` frames every ``interval`` seconds where it asks for a stream."""
    usage = {"prompt_tokens": 4, "completion_tokens": frames}
    whole = document("word " * 32, "length", usage)
    reply = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(whole) + whole
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    frame = chunk(b"data: " + document(" word") + b"\n\n")
    last = chunk(b"data: " + document(" word", "length", usage) + b"\n\n") + chunk(b"data: [DONE]\n\n") + chunk(b"")

    class Protocol(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            self.transport, self.left = transport, 0

        def data_received(self, data: bytes) -> None:
            if b'"stream": true' not in data:
                self.transport.write(reply)
                return
            self.left = frames - 1
            self.transport.write(head + frame)
            asyncio.get_running_loop().call_later(interval, self.go_on)

        def go_on(self) -> None:
            self.left -= 1
            if self.left > 0:
                self.transport.write(frame)
                asyncio.get_running_loop().call_later(interval, self.go_on)
            else:
                self.transport.write(last)

    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(Protocol, "127.0.0.1", 0)
        ready.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(main())


@dataclass
class Result:
    """What one client process did."""

    streams: bool
    open_requests: int
    requests_per_second: float
    frames_per_second: float
    client_cpu_microseconds_per_request: float
    client_cpu_microseconds_per_frame: float | None
    parent_cpu_microseconds_per_request: float
    one_core_could_hold_per_second: float


def measure(options: argparse.Namespace, *, stream: bool) -> Result:
    """Keeps ``options.streams`` requests open for a while."""
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.Process(target=serve, args=(theirs, options.frames, 1 / options.frame_rate), daemon=True)
    server.start()
    address = Address.parse(f"http://127.0.0.1:{ours.recv()}/v1")
    settings = ClientSettings((address,), "completions", None, None, stream, 600.0, 10.0, watch_metrics=False)
    target = EndpointTarget(
        settings,
        Asking("m", False, False),
        {},
        processes=1,
        max_in_flight=options.streams,
        observations=Observations(None),
    )
    try:
        [process] = [one for one in psutil.Process().children() if "megatoken.targets.endpoint.worker" in one.cmdline()]
        request, number, done, frames = Request([5, 6, 7, 8], max_tokens=options.frames), 0, 0, 0
        began, cpu, own = time.perf_counter(), 0.0, 0.0
        measuring = False
        while (elapsed := time.perf_counter() - began) < options.seconds or not measuring:
            if not measuring and elapsed > WARM_UP_SECONDS:
                measuring, done, frames = True, 0, 0
                began, cpu, own = time.perf_counter(), cpu_seconds(process), time.process_time()
            for _ in range(2 * options.streams - target.state().in_flight):
                target.submit(number, request)
                number += 1
            for event in target.poll(0.01):
                if event.error:
                    raise SystemExit(event.error)
                if event.finish_reason:
                    done += 1
                    frames += options.frames if stream else 0
        elapsed, cpu, own = time.perf_counter() - began, cpu_seconds(process) - cpu, time.process_time() - own
    finally:
        target.close()
        server.kill()
        server.join()
    per_request = cpu / max(1, done) * 1e6
    per_frame = cpu / frames * 1e6 if frames else None
    return Result(
        streams=stream,
        open_requests=options.streams,
        requests_per_second=round(done / elapsed, 1),
        frames_per_second=round(frames / elapsed, 1),
        client_cpu_microseconds_per_request=round(per_request, 1),
        client_cpu_microseconds_per_frame=None if per_frame is None else round(per_frame, 2),
        parent_cpu_microseconds_per_request=round(own / max(1, done) * 1e6, 1),
        one_core_could_hold_per_second=round(1e6 / (per_frame or per_request)),
    )


def cpu_seconds(process: psutil.Process) -> float:
    """User and system time."""
    return float(sum(process.cpu_times()[:2]))


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=200, help="requests that are open at once")
    parser.add_argument("--frames", type=int, default=128, help="frames of one answer")
    parser.add_argument("--frame-rate", type=float, default=100.0, help="frames/s of one stream")
    parser.add_argument("--seconds", type=float, default=4.0)
    options = parser.parse_args()
    for stream in (False, True):
        print(json.dumps(asdict(measure(options, stream=stream)), indent=1))


if __name__ == "__main__":
    main()
