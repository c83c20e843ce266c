"""What this client can do on this machine: a short run against a server that costs next to nothing."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

import megatoken
from megatoken.engine.request import Request
from megatoken.errors import StorageError
from megatoken.files import write_text
from megatoken.hardware.inventory import cpu
from megatoken.targets.endpoint.address import Address
from megatoken.targets.endpoint.bodies import Asking
from megatoken.targets.endpoint.clients import Clients, LocalProcess
from megatoken.targets.endpoint.observations import Observations
from megatoken.targets.endpoint.target import EndpointTarget
from megatoken.targets.endpoint.wire import ClientSettings

SECONDS = 0.5  # of each of the two parts
STREAMS, FRAMES = 64, 128
LONGEST_START_SECONDS = 60.0
SETTINGS = ClientSettings((), "completions", None, None, True, 60.0, 10.0, watch_metrics=False)


@dataclass(frozen=True, slots=True)
class ProcessCapacity:
    """What one client process can hold on a core of its own: answers that are no streams, frames of streams."""

    requests_per_second: float
    frames_per_second: float


@dataclass(slots=True)
class Counts:
    """What ended while it was counted, and what it took of this process and its client process."""

    requests: int = 0
    frames: int = 0
    reads: int = 0  # that brought frames
    seconds: float = 0.0
    client_cpu_seconds: float = 0.0
    parent_cpu_seconds: float = 0.0


@contextmanager
def frame_server(frames: int, per_write: int = 1, interval: float = 0.0, core: int | None = None) -> Iterator[Address]:
    """A process of ``frame_server``, on one core if it is given."""
    arguments = [str(frames), str(per_write), str(interval)]
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "megatoken.targets.endpoint.frame_server", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as process:
        assert process.stdout is not None
        if core is not None:
            os.sched_setaffinity(process.pid, {core})
        try:
            yield Address.parse(f"http://127.0.0.1:{int(process.stdout.readline())}/v1")
        finally:
            process.kill()


def count(address: Address, *, stream: bool, streams: int, frames: int, seconds: float) -> Counts:
    """Keeps ``streams`` requests open with one client process, and counts for ``seconds`` once as many have ended.

    Raises:
        RuntimeError: a request failed, or none ended.
    """
    settings = replace(SETTINGS, addresses=(address,), stream=stream)
    client = LocalProcess(settings)
    target = EndpointTarget(
        settings,
        Asking("m", False, False),
        {},
        clients=Clients([client]),
        max_in_flight=streams,
        observations=Observations(None),
    )
    try:
        request = Request([5, 6, 7, 8], max_tokens=frames)
        for at in range(streams):
            target.submit(at, request)
        began, ended = time.monotonic(), 0
        while ended < streams:
            ended += _go_on(target, request, 0.0).requests
            if time.monotonic() - began > LONGEST_START_SECONDS:
                raise RuntimeError(f"{ended} answers in {LONGEST_START_SECONDS:g} s")
        cpu, own = client.cpu_seconds(), time.process_time()
        counts = _go_on(target, request, seconds, fewest=1)
        counts.client_cpu_seconds, counts.parent_cpu_seconds = client.cpu_seconds() - cpu, time.process_time() - own
    finally:
        target.close()
    return counts


def _go_on(target: EndpointTarget, request: Request, seconds: float, fewest: int = 0) -> Counts:
    """Counts what ends, and replaces it; goes on until ``fewest`` have, as on a machine that is full none may."""
    counts, began = Counts(), time.monotonic()
    while not counts.seconds or counts.seconds < seconds or counts.requests < fewest:
        if counts.seconds > LONGEST_START_SECONDS:
            raise RuntimeError(f"no answer in {LONGEST_START_SECONDS:g} s")
        for event in target.poll(0.01):
            if event.error:
                raise RuntimeError(event.error)
            if event.finish_reason:
                counts.requests += 1
                if event.token_times_ns is not None:
                    counts.frames += len(event.token_times_ns)
                    counts.reads += 1 + int((np.diff(event.token_times_ns) > 1).sum())
                target.submit(event.sample_id, request)
        counts.seconds = time.monotonic() - began
    return counts


def process_capacity() -> ProcessCapacity:
    """What one client process can hold on a core of its own; measured once by each version on each machine."""
    file = _file()
    with suppress(OSError, ValueError, TypeError):
        return ProcessCapacity(**json.loads(file.read_text()))
    with frame_server(FRAMES) as address:
        whole, streamed = (
            count(address, stream=stream, streams=STREAMS, frames=FRAMES, seconds=SECONDS) for stream in (False, True)
        )
    capacity = ProcessCapacity(
        requests_per_second=whole.requests / max(whole.client_cpu_seconds, 0.01),
        frames_per_second=streamed.frames / max(streamed.client_cpu_seconds, 0.01),
    )
    with suppress(StorageError, OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_text(file, json.dumps(asdict(capacity)))
    return capacity


def _file() -> Path:
    code = [file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py"))]
    key = hashlib.sha256(repr((megatoken.__version__, code, cpu()["model"], platform.release())).encode()).hexdigest()[
        :16
    ]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatoken"
    return folder / f"client-{key}.json"
