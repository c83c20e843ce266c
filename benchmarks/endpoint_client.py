"""Measures the client of ``megatoken run --endpoint`` on one core, with a server on another that costs next to nothing.

    python benchmarks/endpoint_client.py                          # requests, frames one by one, frames in bursts
    python benchmarks/endpoint_client.py --case bursts --frames-per-write 8

The server (``targets/endpoint/frame_server.py``) sends bytes made beforehand as fast as the sockets take them. The
client process and the process that shares requests out stay on one core, the server on the other. What a client can
hold depends on how many frames each read finds, so there are two cases: one frame a write, round the streams, where the
server's own system calls are the limit, and several frames a write. Next to the rate stands the processor time of the
client, which says what the core could hold if the server were faster. Frames per read are counted from the times of
the tokens: all frames of a read have the same one.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict, dataclass

from megatoken.targets.endpoint.self_test import count, frame_server

CASES = ("requests", "frames", "bursts")


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
    os.sched_setaffinity(0, {own_core})
    try:
        with frame_server(frames, per_write, interval, server_core) as address:
            counts = count(address, stream=stream, streams=options.streams, frames=frames, seconds=options.seconds)
    finally:
        os.sched_setaffinity(0, {own_core, server_core})
    parts = max(1, counts.frames if stream else counts.requests)
    return Result(
        case=case if not options.frame_rate else f"{case}, {options.frame_rate:g} writes/s of each stream",
        open_requests=options.streams,
        requests_per_second=round(counts.requests / counts.seconds, 1),
        frames_per_second=round(counts.frames / counts.seconds, 1),
        frames_per_read=round(counts.frames / counts.reads, 2) if counts.reads else None,
        worker_cpu_microseconds=round(counts.client_cpu_seconds / parts * 1e6, 2),
        parent_cpu_microseconds=round(counts.parent_cpu_seconds / parts * 1e6, 2),
        one_core_could_hold_per_second=round(parts / (counts.client_cpu_seconds + counts.parent_cpu_seconds)),
    )


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
