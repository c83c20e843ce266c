"""Copies between the host's pinned memory and the GPU, and between every two GPUs, with their data checked.

Each is measured one way and both ways at once. Of the pairs of GPUs the slow one is named.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch

from megatoken.engine.gpus import gpus
from megatoken.errors import CapacityError
from megatoken.hardware.inventory import cpu
from megatoken.hardware.nvml import NvmlGpu, nvml_gpu
from megatoken.hardware.qualify.exact import different_elements
from megatoken.hardware.qualify.fleet import graded_parts
from megatoken.hardware.qualify.gpu_timing import DEVICE, device_uuid, gpu_seconds
from megatoken.hardware.qualify.judge import Verdict
from megatoken.hardware.qualify.timing import rates
from megatoken.hardware.qualify.values import Bound, NotRun, Outcomes, Setting, Value
from megatoken.hardware.specification import part_name
from megatoken.hardware.topology import numa_nodes
from megatoken.text import count_of

MOST_BYTES = 2**29
BOTH_WAYS_FACTOR = 4
"""The two directions share the link differently for tenths of a second: windows so many times as long average that,
where the rate is judged."""
SHARED_MEMORY = "recorded only: on a virtual machine this rate follows the host: 70 to 102 GB/s were seen"
TRANSFERS_PER_LANE = {3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}
"""Gigatransfers/s of a PCIe lane by generation."""
ENCODING = 128 / 130
C2C_GIGABYTES = {"GB200": 450.0, "GB300": 450.0}
"""One direction of NVLink-C2C, which these parts have in place of PCIe."""


@torch.inference_mode()
def copies(setting: Setting) -> Outcomes:
    """Both directions one after the other, then together."""
    torch.cuda.set_device(DEVICE)
    size = min(MOST_BYTES, setting.buffer_bytes)
    on_gpu, back = (torch.randint(256, (size,), dtype=torch.uint8, device=DEVICE) for _ in range(2))
    host, host_back = (torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    bound = _link()
    seconds = gpu_seconds(lambda: host.copy_(on_gpu, non_blocking=True), setting)
    yield Value("copy_from_gpu", "Copy from the GPU to pinned memory", "GB/s", rates(size / 1e9, seconds), bound=bound)
    seconds = gpu_seconds(lambda: back.copy_(host, non_blocking=True), setting)
    yield Value("copy_to_gpu", "Copy from pinned memory to the GPU", "GB/s", rates(size / 1e9, seconds), bound=bound)
    wrong = different_elements(on_gpu.view(torch.int32), back.view(torch.int32))

    out_stream, in_stream = (torch.cuda.Stream(DEVICE) for _ in range(2))  # type: ignore[no-untyped-call]
    virtual = bool(cpu()["virtual"])
    factor = 1 if virtual else BOTH_WAYS_FACTOR
    calls = max(1, round(factor * setting.seconds / setting.windows / max(seconds[0], 1e-6)))
    gpu, windows, missing = _gpu(), [], None
    for _ in range(setting.windows):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            with torch.cuda.stream(out_stream):
                host_back.copy_(on_gpu, non_blocking=True)
            with torch.cuda.stream(in_stream):
                back.copy_(host, non_blocking=True)
        missing = _generations_missing(gpu)  # while copies run: a link without traffic falls back to save power
        torch.cuda.synchronize()
        windows.append(2 * size * calls / (time.perf_counter() - began) / 1e9)
    both = bound and Bound(2 * bound.value, f"both directions of {bound.formula}")
    speed = Value("copy_both_ways", "Copies in both directions at once", "GB/s", windows, bound=both)
    yield replace(speed, better="", note=SHARED_MEMORY) if virtual else speed
    if missing is not None:
        yield Value(
            "generations_missing", "PCIe generations below the highest, during copies", "generations", [missing], "rare"
        )
    for copied in (back, host_back.to(DEVICE)):
        wrong += different_elements(on_gpu.view(torch.int32), copied.view(torch.int32))
    yield Value("copy_errors", "Data after all copies", "wrong", [wrong], better="zero")


def _link() -> Bound | None:
    """What the link to the host carries in one direction; None where NVML does not say."""
    if (rate := C2C_GIGABYTES.get(part_name(torch.cuda.get_device_name(DEVICE)))) is not None:
        return Bound(rate, "data sheet of NVLink-C2C")
    facts = _facts()
    generation, lanes = facts.get("pcie_generation"), facts.get("max_pcie_lanes")
    if generation not in TRANSFERS_PER_LANE or lanes is None:
        return None
    return Bound(TRANSFERS_PER_LANE[generation] * lanes / 8 * ENCODING, f"PCIe {generation} x{lanes}")


def _generations_missing(gpu: NvmlGpu | None) -> int | None:
    """By how much the link to the host is now below what GPU and host can do; None where NVML does not say."""
    if gpu is None:
        return None
    most, now = (gpu.ask(f"nvmlDeviceGet{which}PcieLinkGeneration") for which in ("Max", "Curr"))
    return None if most is None or now is None else max(0, most - now)


def _facts() -> dict[str, Any]:
    """Of the first GPU by NVML; empty without it."""
    return {} if (gpu := _gpu()) is None else gpu.facts()


def _gpu() -> NvmlGpu | None:
    try:
        return nvml_gpu(device_uuid())
    except CapacityError:
        return None


@torch.inference_mode()
def copies_by_node(setting: Setting) -> Outcomes:
    """Copies to and from pinned memory of each of the host's NUMA nodes."""
    torch.cuda.set_device(DEVICE)
    size, wrong, bound = min(MOST_BYTES, setting.buffer_bytes), 0, _link()
    on_gpu, back = (torch.randint(256, (size,), dtype=torch.uint8, device=DEVICE) for _ in range(2))
    # All of them before the first is used: PyTorch hands out again what is freed, wherever it lies.
    pinned = {node: _pinned_by(cores, size) for node, cores in numa_nodes().items()}
    for node, host in pinned.items():
        seconds = gpu_seconds(lambda host=host: host.copy_(on_gpu, non_blocking=True), setting)  # type: ignore[misc]
        title = f"Copy from the GPU to pinned memory of node {node}"
        yield Value(f"copy_from_gpu_node{node}", title, "GB/s", rates(size / 1e9, seconds), bound=bound)
        seconds = gpu_seconds(lambda host=host: back.copy_(host, non_blocking=True), setting)  # type: ignore[misc]
        title = f"Copy from pinned memory of node {node} to the GPU"
        yield Value(f"copy_to_gpu_node{node}", title, "GB/s", rates(size / 1e9, seconds), bound=bound)
        wrong += different_elements(on_gpu.view(torch.int32), back.view(torch.int32))
    yield Value("copy_errors_of_nodes", "Data after the copies by node", "wrong", [wrong], "zero")


def _pinned_by(cores: list[int], size: int) -> torch.Tensor:
    """Pinned memory that a thread on these cores takes, which the kernel places on their node."""
    anywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    finally:
        os.sched_setaffinity(0, anywhere)


@torch.inference_mode()
def pairs(setting: Setting) -> Outcomes:
    """Each value is of the slowest pair. Far behind the others a pair is a fault, if NVLink makes all of them alike."""
    count, title = torch.cuda.device_count(), "Copies between GPUs"
    if count < 2:
        yield NotRun("p2p", title, f"this machine has {count} GPU", "take a machine with two GPUs or more")
        return
    sheet = gpus().get(part_name(torch.cuda.get_device_name(0)))
    link = None if sheet is None else sheet.link_bytes_per_second
    size, wrong, blocked = min(MOST_BYTES, setting.buffer_bytes), 0, []
    setting = replace(setting, seconds=setting.seconds / math.comb(count, 2))
    one_way: dict[str, list[float]] = {}
    both_ways: dict[str, list[float]] = {}
    for first, second in combinations(range(count), 2):
        name = f"{first}-{second}"
        if not torch.cuda.can_device_access_peer(first, second):
            blocked.append(name)
        here, there = (torch.device("cuda", index) for index in (first, second))
        source = torch.randint(256, (size,), dtype=torch.uint8, device=here)
        other = torch.randint(256, (size,), dtype=torch.uint8, device=there)
        target, back = torch.empty_like(other), torch.empty_like(source)
        one_way[name] = rates(size / 1e9, _seconds([(target, source)], setting))
        both_ways[name] = rates(2 * size / 1e9, _seconds([(target, source), (back, other)], setting))
        for copied, original in ((target, source), (back, other)):
            wrong += different_elements(copied.to(original.device).view(torch.int32), original.view(torch.int32))
        del source, other, target, back
        torch.cuda.empty_cache()
    alike = bool(_facts().get("nvlinks"))
    slow: dict[str, str] = {}
    behind: dict[str, str] = {}
    for key, ways, found, factor in (
        ("p2p_one_way", "one direction", one_way, 1),
        ("p2p_both_ways", "both directions", both_ways, 2),
    ):
        medians = {name: statistics.median(windows) for name, windows in found.items()}
        slowest = min(medians, key=medians.__getitem__)
        words = f"{title}, {ways}, the slowest of {count_of(len(found), 'pair')}"
        bound = None if link is None else Bound(factor * link / 1e9, f"data sheet of the links, {ways}")
        # Published rates are of NVLink.
        note = f"GPUs {slowest}" + ("" if alike else ", without NVLink: recorded only")
        yield Value(key, words, "GB/s", found[slowest], "higher" if alike else "", bound=bound, note=note)
        for name, verdict in graded_parts(medians, "higher").items():
            of_kind = slow if alike and verdict is Verdict.FAIL else behind
            of_kind.setdefault(name, f"GPUs {name}: {medians[name]:.0f} GB/s, {ways}")
    words, note = "Pairs of GPUs that are far slower than the others", "; ".join(slow.values())
    yield Value("p2p_slow_pairs", words, "pairs", [len(slow)], "zero", note=note)
    words, note = "Pairs of GPUs that are slower than the others", "; ".join(behind.values())
    yield Value("p2p_pairs_behind", words, "pairs", [len(behind)], "rare", note=note)
    note = ", ".join(f"GPUs {name}" for name in blocked)
    yield Value("p2p_indirect", "Pairs of GPUs without direct access", "pairs", [len(blocked)], "", note=note)
    yield Value("p2p_errors", "Data after the copies between GPUs", "wrong", [wrong], "zero")


def _seconds(copies: list[tuple[torch.Tensor, torch.Tensor]], setting: Setting) -> list[float]:
    """Mean seconds of one round of copies, all at once, in each window."""
    streams = [torch.cuda.Stream(source.device) for _, source in copies]  # type: ignore[no-untyped-call]

    def run(count: int) -> float:
        for device in {source.device for _, source in copies} | {target.device for target, _ in copies}:
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(count):
            for stream, (target, source) in zip(streams, copies, strict=True):
                with torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)
        for stream in streams:
            stream.synchronize()
        return time.perf_counter() - began

    run(2)  # the first copies prepare the way
    once = run(2) / 2
    count = max(2, round(setting.seconds / setting.windows / max(once, 1e-6)))
    return [run(count) / count for _ in range(setting.windows)]
