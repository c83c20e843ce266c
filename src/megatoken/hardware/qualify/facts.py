"""What a machine is, and what it reports about its own health."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatoken.hardware.qualify.gpu_parts import nvml_handle
from megatoken.hardware.qualify.processor import clock
from megatoken.hardware.qualify.values import NotRun, Outcomes, Setting, Value


def on_cpu(setting: Setting) -> Outcomes:
    """The clock of a core. Names, counts and versions are in the document's ``machine``."""
    yield clock(setting)


def on_gpu(setting: Setting) -> Outcomes:
    """Errors that the card has counted, rows of memory that failed, lanes of its link, and other work on it."""
    import torch

    from megatoken.hardware.qualify.gpu_timing import DEVICE, device_uuid

    torch.cuda.set_device(DEVICE)
    with nvml_handle(device_uuid()) as (nvml, handle):
        counts: dict[str, tuple[str, str, Callable[[], Any]]] = {
            "ecc_uncorrected": (
                "Memory errors that could not be corrected",
                "errors",
                lambda: nvml.nvmlDeviceGetTotalEccErrors(
                    handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                ),
            ),
            "rows_pending": (
                "Rows of memory to be replaced at the next reset",
                "rows",
                lambda: nvml.nvmlDeviceGetRemappedRows(handle)[2],
            ),
            "rows_failed": (
                "Rows of memory that could not be replaced",
                "rows",
                lambda: nvml.nvmlDeviceGetRemappedRows(handle)[3],
            ),
            "lanes_missing": (
                "PCIe lanes that are not in use",
                "lanes",
                lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle) - nvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
            ),
        }
        for name, (title, unit, ask) in counts.items():
            try:
                yield Value(name, title, unit, [float(ask())], "zero")
            except nvml.NVMLError as error:
                yield NotRun(name, title, f"NVML: {error}", "take a GPU and driver that report it")
