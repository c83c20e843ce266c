"""Collectives between ranks: GPUs of this machine through NCCL, or processes on its cores through gloo; checked."""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatoken.engine.gpus import gpus
from megatoken.hardware.nvml import all_gpus, open_nvml
from megatoken.hardware.qualify.processor import cores_within_quota
from megatoken.hardware.qualify.rank_process import Task, bus_share
from megatoken.hardware.qualify.values import Bound, NotRun, Outcomes, Setting, Value
from megatoken.hardware.specification import part_name

TITLES = {
    "all_reduce": "All-reduce",
    "all_gather": "All-gather",
    "reduce_scatter": "Reduce-scatter",
    "all_to_all": "All-to-all",
}
CPU_SIZES = (2**14, 2**20)
GPU_SIZES = (2**14, 2**20, 2**27, 2**30)
MOST_CPU_RANKS = 4
LIMIT_SECONDS = 100.0


def on_cpu(setting: Setting) -> Outcomes:
    """Two to four processes of this machine, through shared memory."""
    yield from _collectives("gloo", max(2, min(cores_within_quota(), MOST_CPU_RANKS)), CPU_SIZES, None, setting)


def on_gpus(setting: Setting) -> Outcomes:
    """All GPUs that this process may see."""
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        title = "Collectives between GPUs"
        yield NotRun("collectives", title, f"this machine has {count} GPU", "take a machine with two GPUs or more")
        return
    sheet = gpus().get(part_name(torch.cuda.get_device_name(0)))
    link = None if sheet is None else sheet.link_bytes_per_second
    bound = None if link is None else Bound(link / 1e9, "data sheet of the links, one direction", certain=False)
    yield from _collectives("nccl", count, GPU_SIZES, bound, setting)
    yield from _links(count)


def _collectives(backend: str, ranks: int, sizes: tuple[int, ...], bound: Bound | None, setting: Setting) -> Outcomes:
    wrong = 0
    of = f"{ranks} GPUs" if backend == "nccl" else f"{ranks} processes"
    seconds = max(setting.seconds / 2, 0.01)
    for result in run_ranks(backend, ranks, sizes, setting.windows, seconds):
        if isinstance(result, str):
            yield NotRun(
                "collectives", f"Collectives between {of}", result, "megatoken doctor; look at NCCL_DEBUG=INFO"
            )
            return
        operation, size = result["operation"], result["bytes"]
        wrong += result["wrong"]
        moved = size * bus_share(operation, ranks) / 1e9
        yield Value(
            f"{operation}_{size}",
            f"{TITLES[operation]} of {size:,} bytes between {of}, bus",
            "GB/s",
            [moved / one for one in result["seconds"]],
            bound=bound if size >= 2**27 else None,
            note=f"{1e6 * sorted(result['seconds'])[len(result['seconds']) // 2]:.1f} us",
        )
    yield Value("collective_errors", f"Results of the collectives between {of}", "wrong", [wrong], "zero")


def run_ranks(
    backend: str, ranks: int, sizes: tuple[int, ...], windows: int, seconds: float
) -> Iterator[dict[str, Any] | str]:
    """What rank 0 printed, line by line; a text says why the ranks failed and is the last."""
    with tempfile.TemporaryDirectory() as folder:
        file = (Path(folder) / "rendezvous").as_uri()
        tasks = [Task(backend, ranks, rank, file, sizes, windows, seconds) for rank in range(ranks)]
        command = [sys.executable, "-m", "megatoken.hardware.qualify.rank_process"]
        processes = [
            subprocess.Popen(
                [*command, task.to_json()], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
            )
            for task in tasks
        ]
        try:
            yield from _lines(processes)
        finally:
            for process in processes:
                process.kill()
                process.communicate()


def _lines(processes: list[subprocess.Popen[str]]) -> Iterator[dict[str, Any] | str]:
    first = processes[0]
    assert first.stdout is not None
    deadline = time.monotonic() + LIMIT_SECONDS
    with selectors.DefaultSelector() as selector:
        selector.register(first.stdout, selectors.EVENT_READ)
        while True:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                yield f"the ranks did not end within {LIMIT_SECONDS:.0f} s"
                return
            line = first.stdout.readline()
            if not line:
                break
            yield json.loads(line)
    for rank, process in enumerate(processes):
        if process.wait(LIMIT_SECONDS):
            assert process.stderr is not None
            words = process.stderr.read().strip().splitlines() or ["no message"]
            yield f"rank {rank} failed: {words[-1]}"
            return


def _links(count: int) -> Outcomes:
    """NVLinks that should be there and are not, by the count of the other GPUs."""
    library = open_nvml()
    found = [] if library is None else [gpu.facts()["nvlinks"] for gpu in all_gpus(library)][:count]
    title = "NVLinks that the other GPUs have and one lacks"
    if None in found or not found:
        yield NotRun("links_missing", title, "NVML does not report links", "install nvidia-ml-py, update the driver")
        return
    missing = {index: max(found) - links for index, links in enumerate(found) if links < max(found)}
    note = ", ".join(f"GPU {index} lacks {lost}" for index, lost in missing.items())
    yield Value("links_missing", title, "links", [sum(missing.values())], "zero", note=note)
