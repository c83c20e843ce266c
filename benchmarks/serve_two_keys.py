"""Two API keys of ``megatoken serve``: what one that floods with long prompts does to the latencies of another.

    python benchmarks/serve_two_keys.py --seconds 40 -- --engine.target_step_seconds 0.01

The steady key sends short requests at a fixed rate, first alone and then while the other key keeps many long prompts
open, in turns on the same server: ratios of one run hold on a machine that others use too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from own_server import own_server, percentiles, save

STEADY, FLOOD = "steady-key", "flood-key"


class Load:
    """Requests of two keys to one server; times of the steady one's tokens."""

    def __init__(self, port: int, options: argparse.Namespace) -> None:
        self.port, self.options = port, options
        self.ttft: list[float] = []
        self.gaps: list[float] = []
        self.flooded = 0
        self.draws = np.random.default_rng(0)

    async def stream(self, key: str, prompt_tokens: int, tokens: int) -> None:
        """One request; each has another prompt, so that no prefix is shared."""
        prompt = self.draws.integers(100, 3000, prompt_tokens).tolist()
        body = json.dumps({"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer {key}\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        last = sent = time.perf_counter()
        writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            raise ValueError((status + await reader.read(500)).decode(errors="replace"))
        first = True
        try:
            while line := await reader.readline():
                if line.startswith(b"data: {"):
                    now = time.perf_counter()
                    if key == STEADY:
                        (self.ttft if first else self.gaps).append(now - (sent if first else last))
                    first, last = False, now
        finally:
            writer.transport.abort()

    async def flood(self) -> None:
        """Long prompts without end."""
        while True:
            await self.stream(FLOOD, self.options.flood_prompt, self.options.flood_tokens)
            self.flooded += 1

    async def steady(self, seconds: float) -> dict[str, Any]:
        """Requests at the rate, whatever comes back; percentiles of their times."""
        self.ttft, self.gaps = [], []
        requests, began = [], time.perf_counter()
        for number in range(round(seconds * self.options.rate)):
            await asyncio.sleep(max(0.0, began + number / self.options.rate - time.perf_counter()))
            requests.append(asyncio.create_task(self.stream(STEADY, self.options.prompt, self.options.tokens)))
        await asyncio.gather(*requests)
        return {
            "requests": len(self.ttft),
            "ttft_seconds": percentiles(self.ttft),
            "itl_seconds": percentiles(self.gaps),
        }

    async def capacity(self) -> float:
        """Requests of the steady kind that the server answers per second."""
        began, count = time.perf_counter(), 64
        await asyncio.gather(*(self.stream(STEADY, self.options.prompt, self.options.tokens) for _ in range(count)))
        return count / (time.perf_counter() - began)


async def run(port: int, options: argparse.Namespace) -> dict[str, Any]:
    """Alone and next to the flood."""
    load = Load(port, options)
    capacity = await load.capacity()
    options.rate = capacity * options.share
    alone = await load.steady(options.seconds)
    flood = [asyncio.create_task(load.flood()) for _ in range(options.flooding)]
    await asyncio.sleep(3.0)
    flooded = await load.steady(options.seconds)
    for task in flood:
        task.cancel()
    failures = [str(one) for one in await asyncio.gather(*flood, return_exceptions=True) if isinstance(one, Exception)]
    ratios = {
        f"{name}_{percent}": round(flooded[name][percent] / alone[name][percent], 2)
        for name in ("ttft_seconds", "itl_seconds")
        for percent in ("p50", "p99")
    }
    return {
        "capacity_requests_per_second": round(capacity, 2),
        "alone": alone,
        "flooded": flooded,
        "flood_requests": load.flooded,
        "flood_failures": failures[:3],
        "ratios": ratios,
    }


def main() -> None:
    """Start a server with two keys, measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40.0, help="of each of the two parts")
    parser.add_argument("--share", type=float, default=0.1, help="of the capacity, that the steady key uses")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the steady key's prompts")
    parser.add_argument("--tokens", type=int, default=32, help="of its answers")
    parser.add_argument("--flooding", type=int, default=64, help="requests that the other key keeps open")
    parser.add_argument("--flood-prompt", type=int, default=1500)
    parser.add_argument("--flood-tokens", type=int, default=32)
    parser.add_argument("--out", type=Path)
    parser.add_argument("server", nargs="*", help="further flags of megatoken serve, after --")
    options = parser.parse_args()
    with own_server(options.server, {"MEGATOKEN_API_KEY": f"{STEADY},{FLOOD}"}) as server:
        report = asyncio.run(run(server.port, options))
    print(json.dumps(report))
    save(report, options.out)


if __name__ == "__main__":
    main()
