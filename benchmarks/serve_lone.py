"""A request that is alone: its time to first token from `megatoken serve`, with and without steps recorded before.

    python benchmarks/serve_lone.py --shape llama3.1-8b --out lone.json

Requests come one after the other: random weights, prompts of random ids, MLPerf's lengths, answers cut to
``--longest-output``. In turn: the engine in this process; the engine on its thread, as in a server; a server without
recorded steps; a server with them. The first two do not record. Every turn gets the same requests, none of them twice,
so what differs between the first three is what a process, a thread and HTTP cost a step that is launched.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatoken.datasets.lengths import load_lengths
from megatoken.engine import Engine, EngineConfig, EngineThread, Request
from megatoken.engine.config import SHAPES
from megatoken.hardware.inventory import take_inventory
from own_server import own_server, percentiles, save
from peers.random_model import make_model_folder

TURNS = ("process", "thread", "launched", "recorded")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama3.1-8b")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp8"], default="fp8")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--longest-output", type=int, default=16)
    parser.add_argument("--turns", default=",".join(TURNS))
    parser.add_argument("--serve-flags", default="", help="more flags of megatoken serve, separated by spaces")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    return parser.parse_args(arguments)


def measure(work: Sequence[Request], tokens: Callable[[Request], Iterator[object]]) -> dict[str, Any]:
    """Percentiles of the times that ``tokens``, which yields once a token, takes."""
    first: list[float] = []
    gaps: list[float] = []
    for request in work:
        last, times = time.perf_counter(), first
        for _ in tokens(request):
            now = time.perf_counter()
            times.append(now - last)
            last, times = now, gaps
    return {"ttft_seconds": percentiles(first), "itl_seconds": percentiles(gaps), "tokens": len(first) + len(gaps)}


def over_http(port: int) -> Callable[[Request], Iterator[object]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)

    def tokens(request: Request) -> Iterator[object]:
        limit = {"max_tokens": request.max_tokens, "ignore_eos": True, "stream": True, "temperature": 0}
        body = json.dumps({"prompt": list(map(int, request.prompt)), **limit})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        with connection.getresponse() as answer:
            if answer.status != 200:
                raise RuntimeError(answer.read(500).decode(errors="replace"))
            for line in answer:
                if line.startswith(b"data: {"):
                    yield line

    return tokens


def in_process(folder: Path, options: argparse.Namespace, work: Sequence[Request], turn: str) -> dict[str, Any]:
    began = time.monotonic()
    with Engine(folder, EngineConfig(precision=options.precision, prefix_cache=True), random_weights=True) as engine:
        ready = {"ready_seconds": round(time.monotonic() - began, 2)}
        if turn == "process":
            return ready | measure(work, lambda one: (event for event in engine.stream(one) if event.token_ids))
        with EngineThread(engine) as thread:
            return ready | measure(work, lambda one: (event for event in thread.stream(one) if event.token_ids))


def served(folder: Path, options: argparse.Namespace, work: Sequence[Request], turn: str) -> dict[str, Any]:
    flags = ["--model", str(folder), "--random-weights", "--precision", options.precision, *options.serve_flags.split()]
    if turn == "launched":
        flags += ["--engine.record_seconds", "0"]
    with own_server(flags) as server:
        notes = [line for line in server.log.read_text().splitlines() if "recorded" in line]
        return {"ready_seconds": round(server.ready_seconds, 2), "log": notes} | measure(work, over_http(server.port))


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / options.shape
        shape = SHAPES[options.shape]
        make_model_folder(shape, folder)
        data_set = load_lengths(None, vocabulary_size=shape.vocabulary_size, max_length=shape.max_positions)
        work = [
            Request(one.prompt, min(one.max_tokens, options.longest_output), ignore_end_token=True)
            for one in data_set.requests[: options.requests]
        ]
        for turn in options.turns.split(","):
            side = in_process if turn in TURNS[:2] else served
            found[turn] = side(folder, options, work, turn)
            print(json.dumps({turn: found[turn]}), flush=True)
    save({"options": {**vars(options), "out": str(options.out)}, **found, "environment": take_inventory()}, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
