"""All checks together, as a document."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatoken.errors import how_to_install
from megatoken.files import new_document
from megatoken.hardware.doctor.finding import Finding, State, unknown
from megatoken.hardware.doctor.gpu import check_gpus
from megatoken.hardware.doctor.software import check_software
from megatoken.hardware.doctor.system import check_system
from megatoken.hardware.nvml import all_gpus, open_nvml

DRIVER = Path("/dev/nvidiactl")
ORDER = (State.FIX, State.UNKNOWN, State.OK)


def examine(folder: Path) -> dict[str, Any]:
    """Look at the machine, with ``folder`` for the disk; the findings to fix first."""
    has_gpu = DRIVER.exists()
    found = [*check_system(folder), *check_software(has_gpu), *(_gpus() if has_gpu else ())]
    found.sort(key=lambda finding: ORDER.index(finding.state))
    return new_document("doctor", findings=[asdict(finding) for finding in found])


def _gpus() -> Iterator[Finding]:
    if find_spec("pynvml") is None:
        command = how_to_install("gpu").removeprefix("install it with: ")
        yield unknown("gpu", "nvidia-ml-py is not installed, so GPUs cannot be examined", command)
    elif (library := open_nvml()) is None:
        yield unknown("gpu", "the driver does not answer", "nvidia-smi")
    else:
        yield from check_gpus(all_gpus(library))
