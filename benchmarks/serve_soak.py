"""Holds thousands of streams open on ``megatoken serve`` while some clients vanish; checks that no other one notices.

    python benchmarks/serve_soak.py --streams 4096 --minutes 10 --out soak.json

Every stream asks for the same number of tokens and begins again when it has them. A share of the clients closes its
connection at a random token instead. At the end: every stream that was read to its end had all its tokens and no error,
the gauges of the server are back at 0, and its processes have not grown. Prints one JSON object; exit code 1 if one of
these does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil

GROWTH_BYTES = 200e6
SETTLE_SECONDS = 20.0


async def stream(port: int, model: str, tokens: int, leave_after: int | None) -> str:
    """Reads one answer, or leaves after so many frames; how it went."""
    usage = {"include_usage": True}
    body = json.dumps(
        {"model": model, "prompt": [5, 6, 7], "max_tokens": tokens, "ignore_eos": True}
        | {"stream": True, "stream_options": usage}
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(f"{head}{body}".encode())
        data, frames = b"", 0
        while piece := await reader.read(1 << 16):
            data = data[-1000:] + piece
            if b'"error"' in piece:
                return f"error: {piece[-300:]!r}"
            frames += piece.count(b"data: {")
            if leave_after is not None and frames >= leave_after:
                return "left"
        whole = b"data: [DONE]" in data and f'"completion_tokens":{tokens}'.encode() in data
        return "whole" if whole else f"cut off after {frames} frames"
    finally:
        writer.close()


async def user(port: int, model: str, options: argparse.Namespace, until: float, ends: Counter[str]) -> None:
    """One client after the other until the time is over."""
    draw = random.Random(random.random())
    await asyncio.sleep(draw.random() * options.tokens / options.tokens_per_second)
    while time.monotonic() < until:
        leaves = draw.random() < options.vanish
        try:
            ends[
                await stream(port, model, options.tokens, draw.randint(1, options.tokens - 1) if leaves else None)
            ] += 1
        except OSError as error:
            ends[f"failed: {error}"] += 1


def metric(port: int, name: str) -> float:
    """Sum over the samples of a metric."""
    text = urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}\{{.*\}} (\S+)$", text, re.MULTILINE))


def resident_bytes(server: int) -> int:
    """Of all processes of the server."""
    parent = psutil.Process(server)
    return sum(one.memory_info().rss for one in [parent, *parent.children(recursive=True)])


async def soak(port: int, model: str, server: int, options: argparse.Namespace) -> dict[str, Any]:
    """All users, then the checks."""
    ends: Counter[str] = Counter()
    until = time.monotonic() + options.minutes * 60
    users = [asyncio.create_task(user(port, model, options, until, ends)) for _ in range(options.streams)]
    await asyncio.sleep(min(20.0, options.minutes * 20))  # all have begun
    before = resident_bytes(server)
    most = 0
    while not all(one.done() for one in users):
        await asyncio.sleep(1)
        most = max(most, resident_bytes(server))
    deadline = time.monotonic() + SETTLE_SECONDS
    gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    while any(metric(port, name) for name in gauges) and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
    left = {name: await asyncio.to_thread(metric, port, name) for name in gauges}
    failures = {end: count for end, count in ends.items() if end not in ("whole", "left")}
    return {
        "streams": options.streams,
        "minutes": options.minutes,
        "answers": ends["whole"],
        "vanished": ends["left"],
        "failures": failures,
        "gauges_afterwards": left,
        "growth_bytes": most - before,
        "holds": not failures and not any(left.values()) and most - before < GROWTH_BYTES,
    }


def main() -> int:
    """Starts a server, loads it, checks it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1024)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--vanish", type=float, default=0.05, help="share of clients that leave early")
    parser.add_argument("--tokens", type=int, default=100, help="of one answer")
    parser.add_argument("--tokens-per-second", type=float, default=10.0, help="of one stream, with the mock engine")
    parser.add_argument("--engine", choices=["mock", "real"], default="mock")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    command = [sys.executable, "-m", "megatoken", "serve", "--port", "0", "--engine", options.engine]
    command += ["--tokens-per-second", str(options.tokens_per_second), "--access-log", "false"]
    command += ["--max-queued", str(2 * options.streams)]
    with tempfile.NamedTemporaryFile("r") as log:
        server = subprocess.Popen(command, stderr=log.fileno())
        try:
            while not (found := re.search(r"serving (\S+) on \S+:(\d+) ", Path(log.name).read_text())):
                if server.poll() is not None:
                    sys.exit(Path(log.name).read_text())
                time.sleep(0.1)
            result = asyncio.run(soak(int(found[2]), found[1], server.pid, options))
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
