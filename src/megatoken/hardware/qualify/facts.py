"""What a machine is, and what it reports about its own health."""

from __future__ import annotations

from megatoken.hardware.nvml import nvml_gpu
from megatoken.hardware.qualify.processor import clock
from megatoken.hardware.qualify.values import NotRun, Outcomes, Setting, Value
from megatoken.hardware.specification import contradictions


def on_cpu(setting: Setting) -> Outcomes:
    """The clock of a core. Names, counts and versions are in the document's ``machine``."""
    yield clock(setting)


def on_gpu(setting: Setting) -> Outcomes:
    """Errors that the card has counted, rows of memory that failed, lanes of its link, and its data sheet."""
    import torch

    from megatoken.hardware.qualify.gpu_timing import DEVICE, device_uuid

    torch.cuda.set_device(DEVICE)
    gpu = nvml_gpu(device_uuid())
    facts, rows = gpu.facts(), gpu.ask("nvmlDeviceGetRemappedRows")
    counters, lanes, most = facts["counters"], facts["pcie_lanes"], facts["max_pcie_lanes"]
    titles: dict[str, tuple[str, str, float | None]] = {
        "ecc_uncorrected": (
            "Memory errors that could not be corrected",
            "errors",
            counters["ecc_uncorrected_errors"],
        ),
        "rows_pending": ("Rows of memory to be replaced at the next reset", "rows", rows and rows[2]),
        "rows_failed": ("Rows of memory that could not be replaced", "rows", rows and rows[3]),
        "lanes_missing": ("PCIe lanes that are not in use", "lanes", None if None in (lanes, most) else most - lanes),
    }
    for name, (title, unit, count) in titles.items():
        if count is None:
            yield NotRun(name, title, "NVML does not report it", "take a GPU and driver that report it")
        else:
            yield Value(name, title, unit, [float(count)], "zero")
    against = list(contradictions(facts))
    yield Value(
        "specification", "Contradictions with the data sheet", "facts", [len(against)], "zero", note="; ".join(against)
    )
