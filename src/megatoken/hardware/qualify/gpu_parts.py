"""The driver's answers about the GPU under test."""

from __future__ import annotations

from megatoken.errors import CapacityError, how_to_install
from megatoken.hardware.nvml import NvmlGpu, gpus_of


def nvml_gpu(uuid: str) -> NvmlGpu:
    """The GPU named ``GPU-...`` for questions to the driver.

    Raises:
        CapacityError: nvidia-ml-py is not installed, or the driver does not know the GPU.
    """
    gpus = gpus_of([uuid])
    if gpus is None:
        raise CapacityError(f"NVML does not know {uuid}; {how_to_install('gpu')}, and check nvidia-smi")
    return gpus[0]
