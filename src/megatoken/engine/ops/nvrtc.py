"""Kernels in CUDA C++: compiled by NVRTC at their first use, loaded and launched through the driver."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatoken.errors import CapacityError

_OVERLAPPING_TOKENS = 8
"""Most tokens of a step in which kernels overlap: at 16 the largest product loses more than the others gain."""


def overlaps(device: torch.device, tokens: int) -> bool:
    """Whether a kernel of so many tokens may start while the one before it runs, where both are written for that."""
    return tokens <= _OVERLAPPING_TOKENS and device.type == "cuda" and _can_overlap(device)


@lru_cache
def _can_overlap(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@lru_cache
def compiler_obstacle() -> str | None:
    """Why NVRTC cannot be used here; None if it can."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:  # the package, or the library that it loads
        return f"cuda-bindings cannot use NVRTC, which compiles it: {error}"
    return None


def machine_code(source: str, name: str, architecture: str, constants: Mapping[str, object]) -> bytes:
    """``source`` with ``constants`` as macros, for an ``architecture`` such as sm_90a.

    Raises:
        CapacityError: it cannot be compiled; ``name`` is that of the file.
    """
    from cuda.bindings import nvrtc

    options = [f"-arch={architecture}", *(f"-D{key}={value}" for key, value in constants.items())]
    program = checked(nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], []))
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if status.value:
        log = b" " * checked(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        first_line = log.decode(errors="replace").strip("\0 \n").partition("\n")[0]
        raise CapacityError(f"{name} was not compiled: {first_line}")
    code: bytes = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
    checked(nvrtc.nvrtcGetCUBIN(program, code))
    return code


def load(code: bytes, name: str, device: int, shared_bytes: int = 0) -> Any:
    """A kernel of machine code on a device; ``shared_bytes``: most dynamic shared memory of its launches.

    Raises:
        CapacityError: the device does not take it.
    """
    from cuda.bindings import driver

    try:
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # so that this thread has the device's context
            function = checked(driver.cuModuleGetFunction(checked(driver.cuModuleLoadData(code)), name.encode()))
            if shared_bytes:
                most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                checked(driver.cuFuncSetAttribute(function, most, shared_bytes))
    except RuntimeError as error:  # a driver without such a function, or an earlier failure of the device
        raise CapacityError(f"the kernel {name} cannot be loaded: {error}") from error
    return function


def launch(
    function: Any,
    grid: tuple[int, int],
    threads: int,
    shared_bytes: int,
    arguments: Sequence[Any],
    device: torch.device,
    overlapping: bool = False,
) -> None:
    """On the current stream. Arguments: tensors, None (the address 0), integers (32 bits) or tensor maps.

    If ``overlapping``, the kernel may start before those before it have ended: it must wait for them itself.
    """
    from cuda.bindings import driver

    held: list[ctypes.c_uint64 | ctypes.c_int32] = []
    addresses = []
    for argument in arguments:
        if argument is None or isinstance(argument, Tensor):
            held.append(ctypes.c_uint64(0 if argument is None else argument.data_ptr()))
        elif isinstance(argument, int):
            held.append(ctypes.c_int32(argument))
        else:
            addresses.append(int(argument.getPtr()))
            continue
        addresses.append(ctypes.addressof(held[-1]))
    pointers = (ctypes.c_void_p * len(addresses))(*addresses)
    stream = torch.cuda.current_stream(device).cuda_stream
    if not overlapping:
        shape = (*grid, 1, threads, 1, 1, shared_bytes)
        checked(driver.cuLaunchKernel(function, *shape, stream, ctypes.addressof(pointers), 0))
        return
    attribute, config = driver.CUlaunchAttribute(), driver.CUlaunchConfig()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes, config.hStream, config.attrs, config.numAttrs = shared_bytes, stream, [attribute], 1
    checked(driver.cuLaunchKernelEx(config, function, ctypes.addressof(pointers), 0))


def checked(results: tuple[Any, ...]) -> Any:
    """The value of a call of CUDA. Raises CapacityError: it failed."""
    status, *values = results
    if status.value:
        raise CapacityError(f"CUDA's {type(status).__name__} {status.name} from a kernel; please report it")
    return values[0] if values else None


def source_of(module_file: str) -> str:
    """The CUDA C++ next to a Python module of the same name."""
    return Path(module_file).with_suffix(".cu").read_text()


def hopper_source(module_file: str, columns: int) -> str:
    """The same after ``hopper.cuh``, whose products then have so many columns."""
    sums = columns // 2
    names = {
        "SUMS": ", ".join(f"%{number}" for number in range(sums)),
        "OPERANDS": ", ".join(f'"+f"(sum[{number}])' for number in range(sums)),
        "COLUMNS": columns,
        **{name: f"%{sums + place}" for place, name in enumerate(("X", "WEIGHT", "ADD"))},
    }
    source = Path(__file__).with_name("hopper.cuh").read_text() + source_of(module_file)
    for name, value in names.items():
        source = source.replace(f"@{name}@", str(value))
    return source


def tensor_map(kind: str, address: int, sides: tuple[int, int], row_bytes: int, box: tuple[int, int]) -> Any:
    """Describes a matrix to the bulk copy engine, which swizzles rows of 128 bytes in shared memory.

    Args:
        kind: of its elements, such as UINT8.
        address: of its first element.
        sides: elements of a row, rows.
        row_bytes: from a row to the next.
        box: of a copy, as ``sides``; at most 128 bytes of a row.
    """
    from cuda.bindings import driver

    size, count = driver.cuuint64_t, driver.cuuint32_t
    return checked(
        driver.cuTensorMapEncodeTiled(
            getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{kind}"),
            2,
            address,
            [size(side) for side in sides],
            [size(row_bytes)],
            [count(side) for side in box],
            [count(1), count(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
