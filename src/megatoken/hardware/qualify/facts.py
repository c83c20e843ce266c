"""What a machine is, and what it reports about its own health."""

from __future__ import annotations

from megatoken.hardware.host_sensors import logged_xids
from megatoken.hardware.nvml import HARDWARE_XIDS, nvml_gpu
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
    faults: dict[str, tuple[str, str, float | None]] = {
        "ecc_uncorrected": (
            "Memory errors that could not be corrected",
            "errors",
            counters["ecc_uncorrected_errors"],
        ),
        "rows_pending": ("Rows of memory to be replaced at the next reset", "rows", rows and rows[2]),
        "rows_failed": ("Rows of memory that could not be replaced", "rows", rows and rows[3]),
        "lanes_missing": ("PCIe lanes that are not in use", "lanes", None if None in (lanes, most) else most - lanes),
    }
    for name, (title, unit, count) in faults.items():
        if count is None:
            yield NotRun(name, title, "NVML does not report it", "take a GPU and driver that report it")
        else:
            yield Value(name, title, unit, [float(count)], "zero")
    for name, title, unit, count in (
        ("ecc_corrected", "Memory errors that were corrected", "errors", counters["ecc_corrected_errors"]),
        ("rows_remapped", "Rows of memory that were replaced", "rows", counters["rows_remapped"]),
        ("pcie_replays", "Repeated PCIe packets", "packets", counters["pcie_replays"]),
    ):
        if count is not None:
            yield Value(name, f"{title}, since the driver started", unit, [float(count)], "")
    place, logged = gpu.ask("nvmlDeviceGetPciInfo"), logged_xids()
    if place is not None and logged is not None:
        bus = str(place.busId).lower()
        found = [
            one["xid"]
            for one in logged
            if str(one["device"]).removeprefix("PCI:").lower() in bus and one["xid"] in HARDWARE_XIDS
        ]
        title, note = "Critical errors of hardware since the node started", ", ".join(f"XID {xid}" for xid in found)
        yield Value("xids_logged", title, "errors", [float(len(found))], "rare", note=note)
    against = list(contradictions(facts | {"pcie_lanes": None}))  # the lanes are a value of their own
    yield Value(
        "specification", "Contradictions with the data sheet", "facts", [len(against)], "zero", note="; ".join(against)
    )
