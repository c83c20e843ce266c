"""Checks of NVIDIA GPUs through NVML."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from megatoken.hardware.doctor.finding import Finding, fix, ok
from megatoken.hardware.nvml import HARMFUL_REASONS, RECOVERY_ACTION, RECOVERY_ACTIONS, NvmlGpu, words_of
from megatoken.hardware.specification import contradictions

CLOCKS_SET = 0x2
CAP_TOLERANCE = 0.98


def check_gpus(gpus: Sequence[NvmlGpu]) -> Iterator[Finding]:
    """Every GPU of the machine."""
    for index, gpu in enumerate(gpus):
        found = list(_check(gpu, index))
        yield from found
        if not found:
            yield ok(f"gpu{index}", f"GPU {index} has no pending reset, partition, clock or power setting to change")


def _check(gpu: NvmlGpu, index: int) -> Iterator[Finding]:
    ask = gpu.ask
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
    reasons = gpu.clock_reasons() or 0
    if reasons & CLOCKS_SET:
        message = f"GPU {index} has its clocks set by a user"
        yield fix(f"gpu{index}_clocks_set", message, f"{smi} -rac && {smi} -rgc")
    if causes := words_of(reasons & HARMFUL_REASONS):
        message = f"GPU {index} is slowed down right now by {' and '.join(causes)}"
        yield fix(f"gpu{index}_slow_down", message, "check its cooling and power supply")
    (action,) = gpu.fields([RECOVERY_ACTION])
    if action and (words := RECOVERY_ACTIONS.get(int(action))):
        command = f"{smi} --gpu-reset" if action == 1 else words
        yield fix(f"gpu{index}_recovery", f"the driver advises for GPU {index}: {words}", command)
    for message in contradictions(gpu.facts()):
        yield fix(f"gpu{index}_specification", f"GPU {index}: {message}", f"nvidia-smi -q -i {index}")
    others = [one for one in ask("nvmlDeviceGetComputeRunningProcesses") or [] if one.pid != os.getpid()]
    if others:
        ids = " ".join(str(one.pid) for one in others)
        held = sum(one.usedGpuMemory or 0 for one in others) / 2**30
        message = f"GPU {index} is also used by the processes {ids}, which hold {held:.1f} GiB"
        yield fix(f"gpu{index}_shared", message, f"stop them: kill {ids}")
