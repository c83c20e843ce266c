"""What HTTP costs an engine: output tokens per second of `megatoken serve` against the same engine in process.

Both sides get the same requests on the same machine in turn: random weights, prompts of random ids, MLPerf's lengths,
answers forced to their lengths. In process the queue is always full, as in MLPerf's Offline scenario; over HTTP each of
``--streams`` connections has one request in flight and streams its answer. Rates are of tokens that the engine has made
between two moments of the steady state.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, cast

import numpy as np

from megatoken.datasets.lengths import load_lengths
from megatoken.engine import Engine, EngineConfig, Request
from megatoken.engine.config import SHAPES
from megatoken.hardware.inventory import take_inventory
from own_server import READY_SECONDS, metric, own_server, percentiles, save
from peers.random_model import make_model_folder

NOTE = "unofficial: random weights, prompts of random ids, forced output lengths; not verified by MLCommons"
DISTINCT_REQUESTS = 4096
WAITING_REQUESTS = 128
GENERATED = "vllm:generation_tokens_total"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama2-70b")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp8"], default="fp8")
    parser.add_argument("--streams", type=int, default=1024)
    parser.add_argument("--clients", type=int, default=4, help="processes that the streams are shared by")
    parser.add_argument("--fill-seconds", type=float, default=75.0, help="until the state is steady")
    parser.add_argument("--seconds", type=float, default=60.0, help="measured")
    parser.add_argument("--longest-output", type=int, default=10**9, help="cuts answers, for trials on small machines")
    parser.add_argument("--turns", default="process,http")
    parser.add_argument("--serve-flags", default="", help="more flags of megatoken serve, separated by spaces")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    return parser.parse_args(arguments)


# Model and requests ---------------------------------------------------------------------------------------------------


def requests(vocabulary_size: int, options: argparse.Namespace) -> list[tuple[list[int], int]]:
    """Prompts of random ids and how many tokens to answer with."""
    data_set = load_lengths(None, vocabulary_size=vocabulary_size, max_length=SHAPES[options.shape].max_positions)
    return [
        (list(map(int, one.prompt)), min(one.max_tokens, options.longest_output))
        for one in data_set.requests[:DISTINCT_REQUESTS]
    ]


# In process -----------------------------------------------------------------------------------------------------------


def in_process(folder: Path, options: argparse.Namespace, results: Any) -> None:
    """Puts output tokens per second of an engine that always has requests waiting."""
    engine = Engine(folder, EngineConfig(precision=options.precision), random_weights=True)
    work = itertools.cycle(requests(engine.model_config.vocabulary_size, options))
    start, begun = time.monotonic(), None
    while True:
        while engine.state().waiting < WAITING_REQUESTS:
            prompt, output = next(work)
            engine.submit(Request(prompt, output, ignore_end_token=True))
        engine.step()
        now, tokens = time.monotonic(), engine.state().output_tokens
        if begun is None and now - start >= options.fill_seconds:
            begun = now, tokens, engine.state().steps
        elif begun is not None and now - begun[0] >= options.seconds:
            break
    seconds, state = now - begun[0], engine.state()
    results.put(
        {
            "output_tokens_per_second": (tokens - begun[1]) / seconds,
            "step_seconds": seconds / (state.steps - begun[2]),
            "running": state.running,
            "seconds": seconds,
            "memory_plan": asdict(engine.memory_plan),
        }
    )
    engine.close()


# Over HTTP ------------------------------------------------------------------------------------------------------------


class Stream(asyncio.Protocol):
    """One connection: a request, its streamed answer, the next request."""

    def __init__(self, work: Iterator[bytes], counts: dict[str, Any]) -> None:
        self._work, self._counts = work, counts
        self._sent = self._last = 0.0
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sends the first request."""
        self._transport = cast(asyncio.WriteTransport, transport)
        self._send()

    def _send(self) -> None:
        self._sent, self._last, self._tail = time.monotonic(), 0.0, b""
        self._transport.write(next(self._work))

    def data_received(self, data: bytes) -> None:
        """Counts frames and times; after the last frame sends the next request."""
        now, counts = time.monotonic(), self._counts
        frames = data.count(b"data: ")
        if not self._last:
            if not data.startswith(b"HTTP/1.1 200"):
                counts["errors"].append(data[:400].decode(errors="replace"))
                self._transport.close()
                return
            counts["ttft_seconds"].append(now - self._sent)
        else:
            counts["gap_seconds"].append(now - self._last)
        self._last = now
        counts["frames"] += frames
        end = self._tail + data
        if b"data: [DONE]" in end:
            counts["answers"] += 1
            if end.endswith(b"\r\n0\r\n\r\n") or b"0\r\n\r\n" in end[end.index(b"data: [DONE]") :]:
                self._send()
                return
        self._tail = end[-64:]

    def connection_lost(self, error: Exception | None) -> None:
        """Counts it: the server should close none."""
        self._counts["closed"] += 1


def client(
    port: int, bodies: list[bytes], streams: int, seed: int, measuring: Event, stop: Event, results: Any
) -> None:
    """Holds ``streams`` connections busy; puts what came while ``measuring`` was set."""

    async def hold() -> dict[str, Any]:
        order = random.Random(seed)
        work = iter(lambda: order.choice(bodies), None)
        counts = new_counts()
        loop = asyncio.get_running_loop()
        for _ in range(streams):
            await loop.create_connection(lambda: Stream(work, counts), "127.0.0.1", port)
        while not measuring.is_set():
            await asyncio.sleep(0.05)
        counts |= {name: value for name, value in new_counts().items() if name not in ("errors", "closed")}
        while not stop.is_set():
            await asyncio.sleep(0.05)
        return dict(counts)

    try:
        import uvloop

        results.put(uvloop.run(hold()))
    except ImportError:
        results.put(asyncio.run(hold()))


def new_counts() -> dict[str, Any]:
    return {"frames": 0, "answers": 0, "closed": 0, "errors": [], "ttft_seconds": [], "gap_seconds": []}


def over_http(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Output tokens per second of a server whose streams are always busy."""
    model = SHAPES[options.shape]
    bodies = [
        http_post({"prompt": prompt, "max_tokens": output, "ignore_eos": True, "stream": True, "temperature": 0})
        for prompt, output in requests(model.vocabulary_size, options)
    ]
    flags = ["--model", str(folder), "--random-weights", "--precision", options.precision]
    flags += ["--engine.prefix_cache", "false"]  # MLPerf's rules allow none, and in process there is none
    with own_server([*flags, *options.serve_flags.split()]) as server:
        found = measure_http(server.port, bodies, options)
        return found | {"ready_seconds": server.ready_seconds, "flags": [*flags, *options.serve_flags.split()]}


def http_post(body: dict[str, Any]) -> bytes:
    text = json.dumps({"model": "", **body} if "model" in body else body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
    return f"{head}{len(text)}\r\n\r\n".encode() + text


def measure_http(port: int, bodies: list[bytes], options: argparse.Namespace) -> dict[str, Any]:
    spawn = multiprocessing.get_context("spawn")
    measuring, stop, results = spawn.Event(), spawn.Event(), spawn.Queue()
    share = options.streams // options.clients
    clients = [
        spawn.Process(target=client, args=(port, bodies, share, seed, measuring, stop, results), daemon=True)
        for seed in range(options.clients)
    ]
    for one in clients:
        one.start()
    time.sleep(options.fill_seconds)
    measuring.set()
    begun, tokens = time.monotonic(), metric(port, GENERATED)
    time.sleep(options.seconds)
    made, seconds = metric(port, GENERATED) - tokens, time.monotonic() - begun
    stop.set()
    counts = [results.get(timeout=60) for _ in clients]
    for one in clients:
        one.join(30)
    together = {name: [value for count in counts for value in count[name]] for name in ("ttft_seconds", "gap_seconds")}
    return {
        "output_tokens_per_second": made / seconds,
        "frames_per_second": sum(count["frames"] for count in counts) / seconds,
        "answers": sum(count["answers"] for count in counts),
        "closed": sum(count["closed"] for count in counts),
        "errors": [error for count in counts for error in count["errors"]][:5],
        "seconds": seconds,
        **{name: percentiles(values) for name, values in together.items()},
    }


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    sides: dict[str, list[dict[str, Any]]] = {"process": [], "http": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / options.shape
        make_model_folder(SHAPES[options.shape], folder)
        for turn in options.turns.split(","):
            if turn == "http":
                sides[turn].append(over_http(folder, options))
            else:
                spawn = multiprocessing.get_context("spawn")
                results = spawn.Queue()
                child = spawn.Process(target=in_process, args=(folder, options, results))
                child.start()
                sides[turn].append(results.get(timeout=READY_SECONDS + options.fill_seconds + options.seconds))
                child.join()
            print(json.dumps({turn: sides[turn][-1]}), file=sys.stderr)
    rates = {
        side: float(np.mean([one["output_tokens_per_second"] for one in runs])) for side, runs in sides.items() if runs
    }
    document: dict[str, Any] = {
        "note": NOTE,
        "options": {**vars(options), "out": str(options.out)},
        "rates": rates,
        **sides,
        "environment": take_inventory(),
    }
    if len(rates) == 2:
        document["http_over_process"] = rates["http"] / rates["process"]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    save(document, options.out)
    print(json.dumps(rates), document.get("http_over_process"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
