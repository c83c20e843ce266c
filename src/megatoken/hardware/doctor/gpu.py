"""Checks of NVIDIA GPUs through NVML."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from megatoken.hardware.doctor.finding import Finding, fix, ok

APPLICATION_CLOCKS, HARMFUL = 0x2, {0x8: "hardware", 0x20: "heat", 0x40: "heat", 0x80: "the power supply"}
"""Bits of NVML's clock-event reasons: clocks set by a user, and slow-downs with their cause."""
CAP_TOLERANCE = 0.98


def check_gpus(nvml: Any) -> Iterator[Finding]:
    """Every GPU that NVML knows; ``nvml``: pynvml, initialised."""
    for index in range(nvml.nvmlDeviceGetCount()):
        found = list(_check(nvml, nvml.nvmlDeviceGetHandleByIndex(index), index))
        yield from found
        if not found:
            yield ok(f"gpu{index}", f"GPU {index} has no pending reset, partition, clock or power setting to change")


def _check(nvml: Any, handle: Any, index: int) -> Iterator[Finding]:
    def ask(name: str, *arguments: Any) -> Any:
        """The answer; None where driver or GPU does not know it."""
        question: Callable[..., Any] | None = getattr(nvml, name, None)
        try:
            return None if question is None else question(handle, *arguments)
        except nvml.NVMLError:
            return None

    smi = f"sudo nvidia-smi -i {index}"
    remapped = ask("nvmlDeviceGetRemappedRows")
    if remapped is not None and remapped[3]:
        message = f"GPU {index} has rows of memory that could not be replaced"
        yield fix(f"gpu{index}_memory_rows", message, "have the GPU replaced")
    elif remapped is not None and remapped[2]:
        message = f"GPU {index} replaces rows of memory at the next reset"
        yield fix(f"gpu{index}_memory_rows", message, f"{smi} --gpu-reset")
    ecc = ask("nvmlDeviceGetEccMode")
    if ecc is not None and ecc[0] != ecc[1]:
        message = f"GPU {index} changes its error correction at the next reset"
        yield fix(f"gpu{index}_ecc_pending", message, f"{smi} --gpu-reset")
    elif ecc is not None and not ecc[0]:
        message = f"GPU {index} does not correct memory errors, so results can be wrong without a message"
        yield fix(f"gpu{index}_ecc_off", message, f"{smi} -e 1")
    if (ask("nvmlDeviceGetMigMode") or [0])[0]:
        message = f"GPU {index} is partitioned (MIG), so a process gets a part of it"
        yield fix(f"gpu{index}_mig", message, f"{smi} -mig 0")
    if ask("nvmlDeviceGetPersistenceMode") == 0:
        message = f"GPU {index} is not in persistence mode, so each start of a process takes seconds longer"
        yield fix(f"gpu{index}_persistence", message, f"{smi} -pm 1")
    limit, usual = ask("nvmlDeviceGetPowerManagementLimit"), ask("nvmlDeviceGetPowerManagementDefaultLimit")
    if limit and usual and limit < CAP_TOLERANCE * usual:
        message = f"GPU {index} may draw {limit / 1e3:.0f} W; its default is {usual / 1e3:.0f} W"
        yield fix(f"gpu{index}_power_limit", message, f"{smi} -pl {usual / 1e3:.0f}")
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:
        reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
    if reasons & APPLICATION_CLOCKS:
        message = f"GPU {index} has its clocks set by a user"
        yield fix(f"gpu{index}_clocks_set", message, f"{smi} -rac && {smi} -rgc")
    if causes := list(dict.fromkeys(cause for bit, cause in HARMFUL.items() if reasons & bit)):
        message = f"GPU {index} is slowed down right now by {' and '.join(causes)}"
        yield fix(f"gpu{index}_slow_down", message, "check its cooling and power supply")
    others = [one for one in ask("nvmlDeviceGetComputeRunningProcesses") or [] if one.pid != os.getpid()]
    if others:
        ids = " ".join(str(one.pid) for one in others)
        held = sum(one.usedGpuMemory or 0 for one in others) / 2**30
        message = f"GPU {index} is also used by the processes {ids}, which hold {held:.1f} GiB"
        yield fix(f"gpu{index}_shared", message, f"stop them: kill {ids}")
