"""Copies between pinned memory of the host and the GPU, one way and both ways at once, with their data checked."""

from __future__ import annotations

import time

import torch

from megatoken.errors import CapacityError
from megatoken.hardware.nvml import nvml_gpu
from megatoken.hardware.qualify.exact import different_elements
from megatoken.hardware.qualify.gpu_timing import DEVICE, device_uuid, gpu_seconds
from megatoken.hardware.qualify.timing import rates
from megatoken.hardware.qualify.values import Bound, Outcomes, Setting, Value
from megatoken.hardware.specification import part_name

MOST_BYTES = 2**29
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
    yield Value("copy_errors", "Data after both copies", "wrong", [wrong], better="zero")

    out_stream, in_stream = (torch.cuda.Stream(DEVICE) for _ in range(2))  # type: ignore[no-untyped-call]
    calls = max(1, round(setting.seconds / setting.windows / max(seconds[0], 1e-6)))
    windows = []
    for _ in range(setting.windows):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            with torch.cuda.stream(out_stream):
                host_back.copy_(on_gpu, non_blocking=True)
            with torch.cuda.stream(in_stream):
                back.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        windows.append(2 * size * calls / (time.perf_counter() - began) / 1e9)
    both = bound and Bound(2 * bound.value, f"both directions of {bound.formula}")
    yield Value("copy_both_ways", "Copies in both directions at once", "GB/s", windows, bound=both)


def _link() -> Bound | None:
    """What the link to the host carries in one direction; None where NVML does not say."""
    if (rate := C2C_GIGABYTES.get(part_name(torch.cuda.get_device_name(DEVICE)))) is not None:
        return Bound(rate, "data sheet of NVLink-C2C")
    try:
        facts = nvml_gpu(device_uuid()).facts()
    except CapacityError:
        return None
    generation, lanes = facts["pcie_generation"], facts["max_pcie_lanes"]
    if generation not in TRANSFERS_PER_LANE or lanes is None:
        return None
    return Bound(TRANSFERS_PER_LANE[generation] * lanes / 8 * ENCODING, f"PCIe {generation} x{lanes}")
