"""Which data sheet a GPU belongs to, and NVML's handle of the first GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from megatoken.engine.gpus import Gpu, gpus
from megatoken.errors import CapacityError, how_to_install

OTHER_VARIANTS = {"NVL", "PCIE", "40GB", "MIG"}
"""Words in the name of a GPU whose figures are not those of the SXM part of the data sheet."""


def part_name(device_name: str) -> str:
    """The name in gpu_specs.csv of a GPU as the driver names it; the driver's name where the table has none."""
    words = re.split(r"[^A-Za-z0-9]+", device_name.upper())
    if OTHER_VARIANTS & set(words):
        return device_name
    return next((part for part in gpus() if part in words), device_name)


def data_sheet(device_name: str) -> Gpu | None:
    """The data sheet of a GPU; None where it is not known."""
    return gpus().get(part_name(device_name))


@contextmanager
def nvml_handle(uuid: str) -> Iterator[tuple[Any, Any]]:
    """NVML's module and the handle of the GPU named ``GPU-...``.

    Raises:
        CapacityError: nvidia-ml-py is not installed, or the driver does not know the GPU.
    """
    try:
        nvml = import_module("pynvml")
    except ImportError as error:
        raise CapacityError(f"nvidia-ml-py is not installed; {how_to_install('gpu')}") from error
    try:
        nvml.nvmlInit()
        yield nvml, nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError as error:
        raise CapacityError(f"NVML: {error}; check nvidia-smi") from error
