"""Holds many streams of ``megatoken serve`` open for minutes while some clients vanish; reports failures and leaks.

    python benchmarks/serve_soak.py --streams 4096 --seconds 600

Every client opens a stream of random length, reads it to its end and opens the next one. A share of the streams ends at
a random moment instead: half of those clients close the connection, half reset it. Every other stream must bring all of
its tokens and ``[DONE]``. At the end all clients leave; then the gauges of ``/metrics`` must be back at 0, and the
server's processes may not have grown much. Exit code 1 if one of these does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import resource
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from own_server import metric, own_server, save

OPENING_SECONDS = 20.0
SETTLED_SECONDS = 120.0  # when the memory to compare with is read: all streams are open, the KV cache has been in use
GROWTH_MIB = 190.0  # 200 MB, since then
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


class Load:
    """The clients of one server, and what came of their streams."""

    def __init__(self, port: int, options: argparse.Namespace) -> None:
        self.port, self.options = port, options
        self.counts = {"complete": 0, "vanished": 0, "failed": 0}
        self.open = self.most_open = 0
        self.problems: list[str] = []
        self.draws = random.Random(options.seed)

    async def client(self, start_seconds: float) -> None:
        """Stream after stream."""
        await asyncio.sleep(start_seconds)
        while True:
            vanishes = self.draws.random() < self.options.vanishing
            limit = self.draws.expovariate(1 / self.options.vanish_seconds) if vanishes else None
            self.open += 1
            self.most_open = max(self.open, self.most_open)
            try:
                await asyncio.wait_for(self.stream(), limit)
                self.counts["complete"] += 1
            except TimeoutError:
                self.counts["vanished"] += 1
            except (OSError, ValueError, asyncio.IncompleteReadError) as error:
                self.counts["failed"] += 1
                self.problems.append(f"{type(error).__name__}: {error}"[:300])
            finally:
                self.open -= 1

    async def stream(self) -> None:
        """One stream; its connection is closed, or reset, however it ends."""
        tokens = self.draws.randint(*self.options.tokens)
        fields = {"prompt": [5, 6, 7, 8], "max_tokens": tokens, "stream": True, "ignore_eos": True}
        body = json.dumps(fields | {"temperature": 1, "return_token_ids": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)
        try:
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            status = await reader.readline()
            if b" 200 " not in status:
                raise ValueError((status + await reader.read(500)).decode(errors="replace"))
            found, line = 0, b""
            while not line.startswith(b"data: [DONE]"):
                line = await reader.readline()
                if not line:
                    raise ValueError(f"the stream ended after {found} of {tokens} tokens")
                if line.startswith(b"data: {"):
                    choices = json.loads(line[6:])["choices"]  # an event of an error has none: KeyError is a failure
                    found += sum(len(choice["token_ids"]) for choice in choices)
            if found != tokens:
                raise ValueError(f"{found} of {tokens} tokens")
        except KeyError:
            raise ValueError(line.decode(errors="replace")) from None
        finally:
            if self.draws.random() < 0.5:
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()


def memory_mib(pid: int) -> dict[str, float]:
    """Resident memory and open files of each process of the server."""
    sizes: dict[str, float] = {}
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        line = " ".join(process.cmdline())
        name = found[1] if (found := re.search(r"megatoken\.serve\.(\w+)", line)) else "supervisor"
        sizes[name] = sizes.get(name, 0.0) + round(process.memory_info().rss / 2**20, 1)
        sizes[f"{name} files"] = sizes.get(f"{name} files", 0) + process.num_fds()
    return sizes


async def run(port: int, pid: int, options: argparse.Namespace) -> dict[str, Any]:
    """Load the server, then leave; what was seen."""
    load = Load(port, options)
    before = await asyncio.to_thread(memory_mib, pid)
    clients = [
        asyncio.create_task(load.client(OPENING_SECONDS * number / options.streams))
        for number in range(options.streams)
    ]
    began = time.monotonic()
    samples = []
    while (elapsed := time.monotonic() - began) < options.seconds:
        await asyncio.sleep(min(10.0, options.seconds - elapsed))
        seconds = round(time.monotonic() - began)
        samples.append({"seconds": seconds, "open": load.open, **await asyncio.to_thread(memory_mib, pid)})
        print(json.dumps(samples[-1] | load.counts), flush=True)
    open_at_the_end = load.open
    for task in clients:
        task.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    deadline, left = time.monotonic() + 60, {"": 1.0}
    while any(left.values()) and time.monotonic() < deadline:
        await asyncio.sleep(1.0)
        left = {name: await asyncio.to_thread(metric, port, name) for name in GAUGES}
    settled = next((one for one in samples if one["seconds"] >= SETTLED_SECONDS), samples[0])
    after = await asyncio.to_thread(memory_mib, pid)
    growth = {name: round(samples[-1][name] - settled[name], 1) for name in before if "files" not in name}
    return {
        "counts": load.counts,
        "problems": load.problems[:20],
        "most_open": load.most_open,
        "open_at_the_end": open_at_the_end,
        "gauges_after": left,
        "memory_mib": {"idle": before, "settled": settled, "last": samples[-1], "after": after},
        "growth_mib": growth,
        "holds": not load.counts["failed"] and not any(left.values()) and sum(growth.values()) < GROWTH_MIB,
    }


def main() -> int:
    """Start a server, load it, and print one JSON object last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--vanishing", type=float, default=0.05, help="share of streams whose client vanishes")
    parser.add_argument("--vanish-seconds", type=float, default=30.0, help="mean time until then")
    parser.add_argument("--tokens", type=int, nargs=2, default=(20, 200), help="shortest and longest answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("server", nargs="*", help="further flags of megatoken serve, after --")
    options = parser.parse_args()
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    with own_server(options.server) as server:
        report = asyncio.run(run(server.port, server.process.pid, options))
        report |= {"exit_code": server.end(), "log_end": server.log.read_text().splitlines()[-5:]}
    print(json.dumps(report))
    save(report, options.out)
    return 0 if report["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
