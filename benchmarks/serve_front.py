"""Measures the front end of ``megatoken serve`` alone, with the mock engine: frames/s, added TTFT and ITL, scaling.

    python benchmarks/serve_front.py                      # one HTTP process: most frames/s, latencies at half of it
    python benchmarks/serve_front.py --http-processes 1 8 --streams 4096 --replicas 4 --clients 3 --pin \\
        --read-seconds 0.1                                # scaling

The load comes from client processes, which only count frames. One more takes the times: it has few streams, reads at
once, and sends short requests at random moments while all streams run, each on a connection of its own, or with
--keep-alive on one that an earlier request has left, as HTTP clients do. So a time is never that of a client that is
busy. The mock engine sends the first token of a request at once, so every time to first token is added by the front
end, and so is what a gap between two tokens has on top of the pace. It sends once a millisecond; the pace is rounded to
whole ones, or a gap would be up to one longer or shorter for this alone. A client that reads at once takes as long for
a frame as the server; with --read-seconds those that count find several in each read, so few of them are enough for
many HTTP processes, and the pace is not rounded.

Frames/s: the highest offered rate of those tried at which 98 % of the frames arrive in time. The CPU time per frame is
less sensitive to other work on the machine: of the HTTP processes, and of the one process in front of them, which is
the mock engine's, or with --replicas the router, with the mock engines in processes behind it. What one core does,
divided by it, is the most that this process can pass on. What the system takes for one bare `send` of a frame to
a process that waits for it is measured too: a server that writes each frame to the connection of its stream pays it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import selectors
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from megatoken.serve.mock_engine import STEP_SECONDS
from own_server import OwnServer, own_server, percentiles, save

WARM_UP_SECONDS = 1.5  # of 1,024 streams
IN_TIME_SHARE = 0.98
FRAME = b"data: "
END = b"0\r\n\r\n"  # of a chunked answer
MOST_TOKENS = 2000  # what the reference model's context leaves
TIMED_STREAMS = 64
SHORT_SECONDS = 0.01  # between the short requests, on average
SHORT_TOKENS = 2


@dataclass
class Measurement:
    """One run at one offered rate."""

    http_processes: int
    replicas: int
    streams: int
    offered_frames_per_second: float
    frames_per_second: float
    http_cpu_microseconds_per_frame: float
    http_cores_used: float
    front_cpu_microseconds_per_frame: float
    ttft_seconds: dict[str, float]
    added_itl_seconds: dict[str, float]
    failed_streams: int


@dataclass(frozen=True)
class Load:
    """What all clients of a measurement know."""

    port: int
    model: str
    tokens: int  # of a stream
    warm_up_seconds: float
    seconds: float
    keep_alive: bool


def client(load: Load, streams: int, read_seconds: float | None, results: Any) -> None:
    """Opens streams at random moments, reads them all until the time is over; reports counts and times.

    ``read_seconds``: how often it looks for frames, which it then only counts. None: it reads at once, takes times, and
    while it measures, it sends short requests at random moments: their times to first token are those next to the
    streams.
    """
    timed = read_seconds is None
    random = np.random.default_rng(os.getpid())
    selector = selectors.DefaultSelector()
    last: dict[int, float] = {}
    sent: dict[int, float] = {}
    ttft: list[float] = []
    gaps: list[float] = []
    idle: list[socket.socket] = []  # connections of short requests that ended
    buffer = bytearray(1 << 18)
    view = memoryview(buffer)
    failed = frames = 0

    def send(number: int, tokens: int) -> socket.socket:
        body = json.dumps(
            {"model": load.model, "prompt": [5, 6, 7, 8], "max_tokens": tokens, "stream": True, "ignore_eos": True}
        ).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection = idle.pop() if idle else socket.create_connection(("127.0.0.1", load.port))
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ, number)
        sent[number] = time.perf_counter()
        connection.send(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return connection

    def read_all(until: float, measuring: bool) -> None:
        nonlocal frames, failed
        while (left := until - time.perf_counter()) > 0:
            if measuring and read_seconds:
                time.sleep(min(left, read_seconds))
            for key, _ in selector.select(left):
                connection, number = key.fileobj, key.data
                assert isinstance(connection, socket.socket)
                count = connection.recv_into(view)
                now = time.perf_counter()
                if not count:
                    failed += 1
                    selector.unregister(connection)
                    continue
                found = buffer.count(FRAME, 0, count)
                ended = bytes(view[max(0, count - len(END)) : count]) == END
                if number >= streams and ended:
                    selector.unregister(connection)
                    if load.keep_alive:
                        idle.append(connection)
                    else:
                        connection.close()
                if not found:
                    if not ended and not buffer.startswith(b"HTTP/1.1 200"):
                        sys.exit(f"a request was refused: {bytes(buffer[:count])!r}")
                    continue
                if number in sent:
                    began = sent.pop(number)
                    if number >= streams:
                        ttft.append(now - began)
                elif measuring and timed and number < streams:
                    gaps.append(now - last[number])
                    gaps.extend([0.0] * (found - 1))
                last[number] = now
                if measuring:
                    frames += found

    began = time.perf_counter()
    sockets = []
    for number, moment in enumerate(np.sort(random.uniform(0, load.warm_up_seconds, streams)).tolist()):
        read_all(began + moment, measuring=False)
        sockets.append(send(number, load.tokens))
    read_all(began + 2 * load.warm_up_seconds, measuring=False)
    results.put("measuring")
    start = time.perf_counter()
    if timed:
        moments = start + np.cumsum(random.exponential(SHORT_SECONDS, int(2 * load.seconds / SHORT_SECONDS)))
        for number, moment in enumerate(moments[moments < start + load.seconds - 2 * SHORT_SECONDS].tolist()):
            read_all(moment, measuring=True)
            send(streams + number, SHORT_TOKENS)
    read_all(start + load.seconds, measuring=True)
    elapsed = time.perf_counter() - start
    failed += len(sent)
    results.put((frames / elapsed, ttft, gaps, failed))
    for connection in sockets:
        connection.close()


def measure(http_processes: int, streams: int, rate: float, options: argparse.Namespace) -> Measurement:
    """Starts a server, loads it for a while, ends it."""
    flags = ["--engine", "mock", "--model", options.model, "--http-processes", str(http_processes)]
    if options.replicas:
        flags += ["--rack", "auto", "--rack.replicas", str(options.replicas)]
    with own_server([*flags, "--tokens-per-second", str(rate / streams)]) as server:
        http = children(server, "http_process")
        front = children(server, "router_process" if options.replicas else "engine_process")
        if options.pin:
            pin([*http, *front] if options.replicas else http, options.cores)
        results: Any = multiprocessing.Queue()
        warm_up_seconds = warm_up(streams)
        needed = (options.seconds + 2 * warm_up_seconds + 0.5) * rate / streams
        if needed > MOST_TOKENS:
            sys.exit(
                f"streams of {MOST_TOKENS} tokens end before the measurement at {rate:.0f} frames/s; more --streams"
            )
        tokens = min(MOST_TOKENS, int(needed + 10 * rate / streams))
        load = Load(server.port, server.model, tokens, warm_up_seconds, options.seconds, options.keep_alive)
        timed = min(TIMED_STREAMS, streams)
        clients = min(options.clients, streams - timed)
        shares = [(timed, None)]
        shares += [((streams - timed + at) // clients, options.read_seconds) for at in range(clients)]
        processes = [multiprocessing.Process(target=client, args=(load, *share, results)) for share in shares]
        for process in processes:
            process.start()
        for _ in processes:
            results.get(timeout=120)
        before, front_before, started = cpu_seconds(http), cpu_seconds(front), time.perf_counter()
        time.sleep(options.seconds * 0.9)
        used, front_used = cpu_seconds(http) - before, cpu_seconds(front) - front_before
        elapsed = time.perf_counter() - started
        parts = [results.get(timeout=120) for _ in processes]
        for process in processes:
            process.join()
    frames = sum(part[0] for part in parts)
    ttft = np.array([one for part in parts for one in part[1]])
    gaps = np.array([one for part in parts for one in part[2]]) - streams / rate
    return Measurement(
        http_processes=http_processes,
        replicas=options.replicas,
        streams=streams,
        offered_frames_per_second=round(rate, 1),
        frames_per_second=round(frames, 1),
        http_cpu_microseconds_per_frame=round(used / elapsed / frames * 1e6, 2),
        http_cores_used=round(used / elapsed, 3),
        front_cpu_microseconds_per_frame=round(front_used / elapsed / frames * 1e6, 2),
        ttft_seconds=percentiles(ttft),
        added_itl_seconds=percentiles(gaps),
        failed_streams=sum(part[3] for part in parts),
    )


def warm_up(streams: int) -> float:
    """Seconds in which so many streams are opened, and that they then run before they are measured."""
    return WARM_UP_SECONDS * max(1.0, streams / 1024)


def wait_for_frames(connections: int, address: Any) -> None:
    """Accepts connections and reads what comes, waiting for it, until they are closed."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=connections)
    address.put(listener.getsockname())
    selector = selectors.DefaultSelector()
    for _ in range(connections):
        selector.register(listener.accept()[0], selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            if not connection.recv(1 << 16):
                return


def send_microseconds(frame_bytes: int = 230, connections: int = 1024, frames: int = 30, rounds: int = 1000) -> float:
    """What one `send` of a frame takes, to a process that waits for it; so many frames every millisecond.

    Much of it is waking the other process, so it is less where that has not stopped reading yet.
    """
    address: Any = multiprocessing.Queue()
    receiver = multiprocessing.Process(target=wait_for_frames, args=(connections, address), daemon=True)
    receiver.start()
    to = address.get(timeout=60)
    senders = [socket.create_connection(to) for _ in range(connections)]
    for sender in senders:
        sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    frame, taken = bytes(frame_bytes), []
    for first in range(0, rounds * frames, frames):
        began = time.perf_counter()
        for number in range(first, first + frames):
            senders[number % connections].send(frame)
        taken.append((time.perf_counter() - began) / frames * 1e6)
        time.sleep(0.001)
    for sender in senders:
        sender.close()
    receiver.join()
    return round(float(np.median(taken)), 2)


def children(server: OwnServer, module: str) -> list[psutil.Process]:
    """The server's processes of one kind."""
    found = psutil.Process(server.process.pid).children()
    return [one for one in found if f"megatoken.serve.{module}" in one.cmdline()]


def pin(alone: list[psutil.Process], cores: list[int]) -> None:
    """One core for each of these processes, the others for engines and clients."""
    for process, core in zip(alone, cores, strict=False):
        process.cpu_affinity([core])
    others = cores[len(alone) :]
    os.sched_setaffinity(0, others)  # of the clients, which this process starts
    parent = alone[0].parent()
    for process in [parent, *parent.children()] if parent is not None else []:
        if process not in alone:
            process.cpu_affinity(others)


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """User and system time of all."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def measure_all(options: argparse.Namespace) -> Iterator[Measurement]:
    """For each number of processes offers more and more, until frames come late."""
    for http_processes in options.http_processes:
        alone = http_processes + (1 if options.replicas else 0)
        if options.pin and alone >= len(options.cores):
            print(
                f"--http-processes {http_processes} left out: with --pin {alone} processes take a core each, and the "
                f"rest needs one more; this machine has {len(options.cores)}",
                file=sys.stderr,
            )
            continue
        for rate in options.rates:
            interval = options.streams / (rate * http_processes)
            if not options.read_seconds:
                interval = max(1, round(interval / STEP_SECONDS)) * STEP_SECONDS
            measured = measure(http_processes, options.streams, options.streams / interval, options)
            yield measured
            if measured.frames_per_second < IN_TIME_SHARE * measured.offered_frames_per_second:
                break


def main() -> None:
    """Measures and prints JSON lines; --out has all of them after each measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--http-processes", type=int, nargs="+", default=[1])
    parser.add_argument(
        "--replicas", type=int, default=0, help="mock engine processes behind a router; 0: one, no router"
    )
    parser.add_argument("--streams", type=int, default=1024)
    parser.add_argument("--clients", type=int, default=1, help="client processes that count frames")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of one measurement")
    parser.add_argument(
        "--read-seconds",
        type=float,
        default=0.0,
        help="clients that count look for frames so often; 0: at once",
    )
    parser.add_argument("--model", default="reference")
    rates = [20_000.0, 30_000.0, 40_000.0, 50_000.0, 60_000.0, 70_000.0, 80_000.0, 100_000.0]
    parser.add_argument("--rates", type=float, nargs="+", default=rates, help="frames/s to offer each HTTP process")
    parser.add_argument("--keep-alive", action="store_true", help="short requests take connections that others left")
    parser.add_argument("--pin", action="store_true", help="a core for each HTTP process and the router")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.cores = sorted(os.sched_getaffinity(0))  # before a measurement pins this process
    results = []
    sending = send_microseconds()
    print(f"a bare send of a frame to a process that waits takes {sending} us")
    for measured in measure_all(options):
        results.append(asdict(measured))
        print(json.dumps(results[-1]), flush=True)
        save({"send_microseconds": sending, "measurements": results}, options.out)


if __name__ == "__main__":
    main()
