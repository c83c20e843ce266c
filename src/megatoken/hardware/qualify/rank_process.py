"""One rank of the collectives test: ``python -m megatoken.hardware.qualify.rank_process`` with its task as JSON.

Rank 0 prints one line of JSON for each operation and size. Data are whole numbers, so every result has one right value
whatever the order of additions.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megatoken.hardware.qualify.collectives import Task

PARENT_DIES = 1  # PR_SET_PDEATHSIG of prctl(2)
LARGE_BYTES, MOST_SECONDS = 2**27, 6.0
"""From so many bytes on the time grows with them; a size may take so long, with a call in each window and three before.
"""


def main() -> None:
    """Run the task in ``sys.argv[1]``."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # NCCL prints its version and, with NCCL_DEBUG, much more to standard output
    task = Task(**json.loads(sys.argv[1]))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DIES, signal.SIGKILL)
    if os.getppid() != task.parent:  # it ended while PyTorch was loaded
        sys.exit("the process that started this rank has ended")
    device = torch.device("cuda", task.device) if task.backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group(
        task.backend,
        init_method=task.rendezvous,
        rank=task.rank,
        world_size=task.ranks,
        timeout=timedelta(seconds=task.limit_seconds),
    )
    for operation in task.operations:
        each = 0.0  # seconds for a byte of a large buffer, of the slowest rank: all ranks leave out the same
        for size in task.sizes:
            if each * size * (task.windows + 3) > MOST_SECONDS:
                if task.rank == 0:
                    result = {"operation": operation, "bytes": size, "wrong": 0, "seconds": None}
                    print(json.dumps(result), file=results, flush=True)
                continue
            run, check = prepared(operation, size, task.ranks, task.rank, device)
            run()
            wrong = _total(check(), device)
            seconds = _timed(run, task, device)
            if size >= LARGE_BYTES:
                each = max(seconds) / size
            if task.rank == 0:
                result = {"operation": operation, "bytes": size, "wrong": wrong, "seconds": seconds}
                print(json.dumps(result), file=results, flush=True)
    dist.destroy_process_group()


def prepared(
    operation: str, size: int, ranks: int, rank: int, device: torch.device
) -> tuple[Callable[[], object], Callable[[], int]]:
    """The operation on buffers of ``size`` bytes in all, and a check that counts wrong elements after the first run."""
    count = max(1, size // 4 // ranks) * ranks
    part = count // ranks
    values = torch.arange(count, device=device).remainder_(7).float()
    if operation == "all_reduce":
        buffer = values + rank
        expected = ranks * values + sum(range(ranks))
        return (lambda: dist.all_reduce(buffer)), (lambda: int((buffer != expected).sum()))
    if operation == "all_gather":
        own, gathered = values[:part] + rank, torch.empty(count, device=device)
        expected = (values[:part] + torch.arange(ranks, device=device).float()[:, None]).view(-1)
        return (lambda: dist.all_gather_into_tensor(gathered, own)), (lambda: int((gathered != expected).sum()))
    if operation == "reduce_scatter":
        whole, reduced = values + rank, torch.empty(part, device=device)
        expected = ranks * values[rank * part : (rank + 1) * part] + sum(range(ranks))
        return (lambda: dist.reduce_scatter_tensor(reduced, whole)), (lambda: int((reduced != expected).sum()))
    sent, received = values + 10 * rank, torch.empty(count, device=device)
    mine = values[rank * part : (rank + 1) * part]
    expected = (mine + 10 * torch.arange(ranks, device=device).float()[:, None]).view(-1)
    return (lambda: dist.all_to_all_single(received, sent)), (lambda: int((received != expected).sum()))


def _timed(run: Callable[[], object], task: Task, device: torch.device) -> list[float]:
    """Mean seconds of a call in each window, of the slowest rank."""

    def calls(count: int) -> float:
        _finish(device)
        dist.barrier()
        began = time.perf_counter()
        for _ in range(count):
            run()
        _finish(device)
        return time.perf_counter() - began

    once = _slowest(calls(2), device) / 2
    in_window = max(1, round(task.seconds / task.windows / max(once, 1e-7)))
    return [_slowest(calls(in_window), device) / in_window for _ in range(task.windows)]


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _slowest(seconds: float, device: torch.device) -> float:
    value = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def _total(count: int, device: torch.device) -> int:
    value: Tensor = torch.tensor([count], dtype=torch.int64, device=device)
    dist.all_reduce(value)
    return int(value)


if __name__ == "__main__":
    main()
