"""Collectives between ranks: GPUs of this machine through NCCL, or processes on its cores through gloo; checked."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from megatoken.engine.gpus import gpus
from megatoken.errors import CapacityError, MegatokenError
from megatoken.hardware.nvml import all_gpus, open_nvml
from megatoken.hardware.qualify.processes import ending_of
from megatoken.hardware.qualify.processor import cores_within_quota
from megatoken.hardware.qualify.values import Bound, NotRun, Outcomes, Setting, Value
from megatoken.hardware.specification import part_name
from megatoken.text import count_of

TITLES = {
    "all_reduce": "All-reduce",
    "all_gather": "All-gather",
    "reduce_scatter": "Reduce-scatter",
    "all_to_all": "All-to-all",
}
CPU_SIZES = (2**14, 2**20)
GPU_SIZES = (2**14, 2**20, 2**27, 2**30, 2**32)
MOST_MEMORY_SHARE = 1 / 16
"""Of a GPU, that the largest buffer takes: the whole numbers in it and what is compared take several times as much."""
MOST_CPU_RANKS = 4
LIMIT_SECONDS, PERIOD_SECONDS = 100.0, 0.05
"""The most that all ranks may take, and how often they are looked at."""
ADVICE = "see megatoken doctor, and repeat with NCCL_DEBUG=INFO"


@dataclass(frozen=True, slots=True)
class Task:
    """What each rank does."""

    backend: str  # nccl or gloo
    ranks: int  # how many
    rank: int  # this one
    device: int  # of the GPUs that this rank may see
    rendezvous: str  # a file on this machine, or tcp://host:port, where rank 0 listens
    sizes: Sequence[int]  # bytes of the largest buffer of each operation
    windows: int  # timed
    seconds: float  # of all windows of one size
    operations: Sequence[str] = tuple(TITLES)
    limit_seconds: float = 60.0  # after which an operation, or the wait for the other ranks, has failed
    parent: int = field(default_factory=os.getpid)  # the process with which the rank ends

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))


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
    most = MOST_MEMORY_SHARE * min(torch.cuda.get_device_properties(index).total_memory for index in range(count))
    yield from _collectives("nccl", count, tuple(size for size in GPU_SIZES if size <= most), bound, setting)
    yield from _links(count)


def _collectives(backend: str, ranks: int, sizes: tuple[int, ...], bound: Bound | None, setting: Setting) -> Outcomes:
    wrong, left_out = 0, []
    of = f"{ranks} GPUs" if backend == "nccl" else f"{ranks} processes"
    seconds = max(setting.seconds / 2, 0.01)
    for result in run_ranks(backend, ranks, sizes, setting.windows, seconds):
        operation, size = result["operation"], result["bytes"]
        if result["seconds"] is None:
            left_out.append(f"{TITLES[operation]} of {size:,} bytes")
            continue
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
    note = f"would have taken too long: {', '.join(left_out)}" if left_out else ""
    yield Value("collective_errors", f"Results of the collectives between {of}", "wrong", [wrong], "zero", note=note)


def bus_share(operation: str, ranks: int) -> float:
    """Bytes that each link carries, over those of the buffer."""
    return (2 if operation == "all_reduce" else 1) * (ranks - 1) / ranks


def run_ranks(backend: str, ranks: int, sizes: Sequence[int], windows: int, seconds: float) -> Iterator[dict[str, Any]]:
    """What rank 0 printed, line by line; ``seconds`` is None of a size that would have taken too long.

    Raises:
        CapacityError: a rank ran out of memory.
        MegatokenError: a rank failed, or did not end.
    """
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = (Path(folder) / "rendezvous").as_uri()
        tasks = [Task(backend, ranks, rank, rank, rendezvous, sizes, windows, seconds) for rank in range(ranks)]
        try:
            yield from run_tasks(tasks, LIMIT_SECONDS)
        except CapacityError:
            raise
        except MegatokenError as error:
            raise MegatokenError(f"{error}; {ADVICE}") from None


def run_tasks(
    tasks: Sequence[Task], limit_seconds: float, environment: Mapping[str, str] | None = None
) -> Iterator[dict[str, Any]]:
    """The ranks of a group that run on this machine, in processes: what the first one prints, line by line.

    ``environment``: of the processes; None: this one's. Errors as for ``run_ranks``.
    """
    command = [sys.executable, "-m", "megatoken.hardware.qualify.rank_process"]
    with ExitStack() as files:
        # Into files: what NCCL prints about itself would fill a pipe that nothing reads.
        messages: list[TextIO] = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in tasks]
        processes: list[subprocess.Popen[str]] = []
        try:
            for task, file in zip(tasks, messages, strict=True):
                words = [*command, task.to_json()]
                processes.append(
                    subprocess.Popen(words, stdout=subprocess.PIPE, stderr=file, text=True, env=environment)
                )
            yield from _lines(tasks, processes, messages, limit_seconds)
        finally:
            for process in processes:
                process.kill()
                process.communicate()


def _lines(
    tasks: Sequence[Task],
    processes: Sequence[subprocess.Popen[str]],
    messages: Sequence[TextIO],
    limit_seconds: float,
) -> Iterator[dict[str, Any]]:
    printed = processes[0].stdout
    assert printed is not None
    deadline = time.monotonic() + limit_seconds
    with selectors.DefaultSelector() as selector:
        selector.register(printed, selectors.EVENT_READ)
        while None in (codes := [process.poll() for process in processes]):
            # The first that fails is the cause: the others then fail because they wait for it.
            if any(codes):
                break
            if time.monotonic() > deadline:
                ranks = count_of(len(tasks), "rank")
                raise MegatokenError(f"{ranks} did not end within {limit_seconds:.0f} s and had to be stopped")
            if selector.select(PERIOD_SECONDS) and (line := printed.readline()):
                yield json.loads(line)
    if any(codes):
        failed = next(index for index, code in enumerate(codes) if code)
        raise _failure(tasks[failed].rank, processes[failed], messages[failed])
    yield from map(json.loads, printed)


def _failure(rank: int, process: subprocess.Popen[str], messages: TextIO) -> MegatokenError:
    messages.seek(0)
    words = messages.read().strip().splitlines()
    # Warnings can follow the error.
    error = next((line for line in reversed(words) if "Error" in line), "")
    if "OutOfMemoryError" in error:
        return CapacityError(error)
    return MegatokenError(f"rank {rank} {ending_of(process.returncode)}: {error or 'no message'}")


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
