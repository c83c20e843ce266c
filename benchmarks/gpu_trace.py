"""What the device ran and when, by PyTorch's profiler: true times of single kernels, where events would add their own.

Only the device is traced, so that the host is not slowed by records of every operation.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatoken.errors import MegatokenError

DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel, or a copy or fill of memory; microseconds of the trace's own clock."""

    name: str
    begin: float
    end: float


def traced(run: Callable[[], object]) -> list[Kernel]:
    """All that the device did for ``run``, in the order of its beginnings; waits before and after.

    Raises:
        MegatokenError: the profiler saw nothing.
    """
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        kernels = kernels_of(json.loads(path.read_text(errors="replace"), strict=False))
    if not kernels:
        raise MegatokenError("PyTorch's profiler saw no kernel: CUPTI does not work on this machine")
    return kernels


def kernels_of(trace: Mapping[str, Any]) -> list[Kernel]:
    """From a Chrome trace."""
    events = (event for event in trace["traceEvents"] if event.get("cat") in DEVICE_WORK and event.get("ph") == "X")
    kernels = (Kernel(event["name"], float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in events)
    return sorted(kernels, key=lambda kernel: kernel.begin)


def busy_microseconds(kernels: Sequence[Kernel]) -> float:
    """Time in which at least one ran; they are in the order of their beginnings."""
    busy, reached = 0.0, float("-inf")
    for kernel in kernels:
        busy += max(kernel.end - max(kernel.begin, reached), 0.0)
        reached = max(reached, kernel.end)
    return busy
