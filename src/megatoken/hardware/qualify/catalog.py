"""The tests, in the order in which they run: later ones use what earlier ones have measured."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from megatoken.errors import UsageError
from megatoken.hardware.qualify.values import Setting
from megatoken.hardware.topology import numa_nodes
from megatoken.text import nearest

Device = Literal["cpu", "gpu"]
HERE = "megatoken.hardware.qualify"
DEVICES = Path("/dev")
FACTS = "facts"
"""Runs in every qualification, because bounds need it."""


@dataclass(frozen=True, slots=True)
class HardwareTest:
    """One test."""

    name: str  # as ``--tests`` takes it
    title: str  # for people
    function: str  # ``module:name`` of a function from ``Setting`` to outcomes, called in a process of its own
    limit_seconds: float = 60.0  # after which the process is ended, in the quick set
    quick: bool = True  # whether the quick set has it
    twice: bool = False  # whether it runs again after the others, so that a drift in between shows
    whole: bool = False  # whether it is of all GPUs together, and so only of machines with several
    numa: bool = False  # whether only machines with several NUMA nodes have it
    idles: bool = False  # whether it waits most of its time, so that tests of the host may run meanwhile
    of_host: bool = False  # whether it needs only the host's processor and disk


TESTS: dict[Device, tuple[HardwareTest, ...]] = {
    "cpu": (
        HardwareTest("facts", "Facts of the machine", f"{HERE}.facts:on_cpu", twice=True),
        HardwareTest("memory", "Memory", f"{HERE}.cpu_tests:memory", twice=True),
        HardwareTest("caches", "Caches and latency of memory", f"{HERE}.cpu_memory:caches", quick=False),
        HardwareTest("numa", "Copies between NUMA nodes", f"{HERE}.cpu_memory:nodes", quick=False, numa=True),
        HardwareTest("gemm", "Matrix products", f"{HERE}.cpu_tests:gemm", twice=True),
        HardwareTest("layers", "Products of the engine's layers", f"{HERE}.cpu_tests:layer_products", twice=True),
        HardwareTest("exact", "Exact arithmetic and memory", f"{HERE}.exact:on_cpu"),
        HardwareTest("latency", "Latency", f"{HERE}.host_tests:latency", twice=True),
        HardwareTest("kernels", "Kernels of the engine", f"{HERE}.cpu_tests:kernels", twice=True),
        HardwareTest("disk", "Disk", f"{HERE}.host_tests:disk", twice=True),
        HardwareTest("disk_writes", "Random writes to the disk", f"{HERE}.host_tests:disk_writes", quick=False),
        HardwareTest("answers", "Answers of the engine", f"{HERE}.engine_answers:on_cpu", 120.0, quick=False),
        HardwareTest("steps", "Steps of the engine", f"{HERE}.engine_steps:on_cpu", 90.0),
        HardwareTest("collectives", "Collectives", f"{HERE}.collectives:on_cpu", 120.0, quick=False),
    ),
    "gpu": (
        HardwareTest("facts", "Health of the GPU", f"{HERE}.facts:on_gpu"),
        HardwareTest("hbm", "Memory of the GPU", f"{HERE}.gpu_memory:hbm"),
        HardwareTest("cache", "Cache of the GPU", f"{HERE}.gpu_memory:cache"),
        HardwareTest("gemm", "Matrix products", f"{HERE}.gpu_products:gemm"),
        HardwareTest("layers", "Products of decoder layers", f"{HERE}.gpu_products:layer_products"),
        HardwareTest("zeros", "Random values against zeros", f"{HERE}.gpu_products:zeros"),
        HardwareTest("power", "Sustained load", f"{HERE}.gpu_power:power"),
        HardwareTest("copies", "Copies to and from the host", f"{HERE}.gpu_copies:copies"),
        HardwareTest("launch", "Launch of kernels", f"{HERE}.gpu_kernels:launch"),
        HardwareTest("kernels", "Kernels of the engine", f"{HERE}.gpu_kernels:kernels"),
        HardwareTest("exact", "Exact arithmetic and memory", f"{HERE}.exact:on_gpu"),
        HardwareTest(
            "idle_memory", "Memory through an idle minute", f"{HERE}.exact:idle_memory", 120.0, quick=False, idles=True
        ),
        HardwareTest("disk", "Disk", f"{HERE}.host_tests:disk", quick=False, of_host=True),
        HardwareTest(
            "disk_writes", "Random writes to the disk", f"{HERE}.host_tests:disk_writes", quick=False, of_host=True
        ),
        HardwareTest("latency", "Latency of the host", f"{HERE}.host_tests:latency", quick=False, of_host=True),
        HardwareTest("answers", "Answers of the engine", f"{HERE}.engine_answers:on_gpu", 120.0, quick=False),
        HardwareTest("steps", "Steps of the engine", f"{HERE}.engine_steps:on_gpu", quick=False),
        HardwareTest("pulse", "Load and pauses in turn", f"{HERE}.gpu_power:pulse", quick=False),
        HardwareTest(
            "products", "Products of a 70B layer, each by itself", f"{HERE}.gpu_products:one_by_one", 120.0, quick=False
        ),
        HardwareTest("bf16_cache", "Attention over a bf16 cache", f"{HERE}.gpu_kernels:bf16_cache", quick=False),
        HardwareTest("formats", "Products in other formats", f"{HERE}.gpu_products:formats", quick=False),
        HardwareTest("numa", "Copies by NUMA node", f"{HERE}.gpu_copies:copies_by_node", quick=False, numa=True),
        HardwareTest("pairs", "Copies between GPUs", f"{HERE}.gpu_copies:pairs", quick=False, whole=True),
        HardwareTest("collectives", "Collectives", f"{HERE}.collectives:on_gpus", 120.0, quick=False, whole=True),
    ),
}

CPU_QUICK = Setting(
    seconds=0.3,
    warm_up_seconds=0.1,
    windows=5,
    sides=(1024,),
    buffer_bytes=2**28,
    pattern_bytes=2**28,
    file_bytes=2**26,
    repeats=24,
    power_seconds=5.0,
)
CPU_FULL = replace(
    CPU_QUICK,
    seconds=0.7,
    warm_up_seconds=0.3,
    windows=11,
    sides=(512, 1024, 2048),
    pattern_bytes=2**30,
    file_bytes=2**29,
    repeats=200,
)
GPU_QUICK = replace(
    CPU_QUICK,
    seconds=0.7,
    warm_up_seconds=0.4,
    windows=7,
    sides=(4096, 8192),
    buffer_bytes=2**31,
    pattern_bytes=2**34,
)
GPU_FULL = replace(
    GPU_QUICK,
    seconds=2.0,
    warm_up_seconds=1.0,
    windows=11,
    sides=(1024, 2048, 4096, 8192, 16_384, 32_768),
    pattern_bytes=2**42,
    file_bytes=2**30,
    repeats=200,
    power_seconds=60.0,
)
SETTINGS: dict[Device, tuple[Setting, Setting]] = {"cpu": (CPU_QUICK, CPU_FULL), "gpu": (GPU_QUICK, GPU_FULL)}
"""Of the quick and of the full set. 2**42 bytes of pattern: all that is free, see ``exact.FREE_SHARE``."""
FULL_LIMIT_FACTOR = 6
"""The full set may take so many times the limit of the quick one."""


def choose(tests: Sequence[HardwareTest], names: Sequence[str], *, full: bool) -> list[HardwareTest]:
    """The tests of a set that this machine has parts for, or those named and the facts. Raises UsageError."""
    known = [test.name for test in tests]
    elsewhere = {test.name: device for device, of_device in TESTS.items() for test in of_device}
    for name in names:
        if not name:
            raise UsageError(f"--tests: a name is empty; known are {', '.join(known)}")
        if name not in known:
            if device := elsewhere.get(name):
                where = "a GPU" if device == "gpu" else "a processor; hide the GPUs with CUDA_VISIBLE_DEVICES="
                raise UsageError(f"--tests {name}: is a test of {where}; known here are {', '.join(known)}")
            meant = nearest(name, known)
            hint = f"did you mean {meant}? " if meant else ""
            raise UsageError(f"--tests {name}: unknown test; {hint}known are {', '.join(known)}")
    if names:
        return [test for test in tests if test.name in (FACTS, *names)]
    chosen = [test for test in tests if full or test.quick]
    if _gpu_count() < 2:
        chosen = [test for test in chosen if not test.whole]
    return [test for test in chosen if not test.numa or len(numa_nodes()) > 1]


def visible_names() -> list[str] | None:
    """The GPUs that CUDA_VISIBLE_DEVICES names, in its order; None without it, so that all may be seen."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if visible is None else [name.strip() for name in visible.split(",") if name.strip()]


def _gpu_count() -> int:
    """GPUs that this process may see."""
    names = visible_names()
    return len(list(DEVICES.glob("nvidia[0-9]*")) if names is None else names)


def device_here() -> Device:
    """``gpu`` if the driver of an NVIDIA GPU is loaded and CUDA_VISIBLE_DEVICES does not hide all GPUs."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    return "gpu" if any(DEVICES.glob("nvidia*")) and not hidden else "cpu"
