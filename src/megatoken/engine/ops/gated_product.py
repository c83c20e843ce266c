"""``silu(x G^T) * (x U^T)`` in e4m3 as one kernel for Hopper: what two products give is never written to memory.

The kernel (``gated_product.cu``) is compiled by NVRTC at its first use; ``wgmma`` multiplies, with sums as inexact as
those of cuBLASLt's fast accumulation. Shape letters: T tokens, D inputs, F features.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatoken.engine.ops.fused import require_contiguous
from megatoken.errors import CapacityError

ROWS, COLUMNS, DEPTH = 128, 256, 128
"""Of a tile: tokens, gates and ups, and the bytes of a row that are multiplied at a time."""
STAGES = 4
CLUSTERS = (1, 2)
"""Programs that share copies of weights. In pairs, an odd number of tiles of tokens wastes one."""
_MOST_WASTED = 1 / 16
THREADS = 384
SUMS = 128
"""Of a thread."""
ORDER = (4, 32)
"""Lanes that share a tile's features, and the features of each: see ``interleaved``."""
FEWEST_TOKENS = 512
"""Fewer are faster as a product of cuBLASLt, whose tiles are then smaller, and the activation after it."""
_CAPABILITY = (9, 0)
_MOST_DESCRIBED = 4096


def obstacle(features: int, depth: int, device: torch.device) -> str | None:
    """Why the kernel cannot be used for these sides on this device; None if it can."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != _CAPABILITY:
        return "it is written for compute capability 9.0"
    if features % (COLUMNS // 2) or depth % DEPTH:
        return f"{features} features of {depth} inputs are no multiples of {COLUMNS // 2} and {DEPTH}"
    return _compiler_obstacle()


@lru_cache
def _compiler_obstacle() -> str | None:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:  # the package, or the library that it loads
        return f"cuda-bindings cannot use NVRTC, which compiles it: {error}"
    return None


def interleaved(gate_up_ND: Tensor) -> Tensor:
    """Gate above up, [2 F, D], in the order in which the kernel's threads hold sums.

    Row 256 t + 8 j + 2 l + p is feature 128 t + 32 l + j of the gate (p = 0) or of the up (p = 1).
    """
    parts = gate_up_ND.view(2, -1, *ORDER, gate_up_ND.shape[1])
    return parts.permute(1, 3, 2, 0, 4).reshape(gate_up_ND.shape)


def gated_product(
    x_TD: Tensor,  # e4m3
    gate_up_ND: Tensor,  # e4m3, ``interleaved``, N = 2 F
    x_scale: Tensor,  # fp32, one element, as are those below
    weight_scale: Tensor,
    out_scale: Tensor,
    cluster: int | None = None,  # one of ``CLUSTERS``; by default chosen by the tokens
) -> Tensor:
    """e4m3 [T, F] of ``silu(gate) * up / out_scale``, values beyond its range at its end.

    Raises:
        CapacityError: the kernel cannot be compiled or launched.
    """
    out_TF = torch.empty((len(x_TD), len(gate_up_ND) // 2), dtype=torch.float8_e4m3fn, device=x_TD.device)
    require_contiguous(x_TD, gate_up_ND, x_scale, weight_scale, out_scale)
    if x_TD.dtype != out_TF.dtype or gate_up_ND.dtype != out_TF.dtype:
        raise ValueError(f"expected e4m3, got {x_TD.dtype} and {gate_up_ND.dtype}")
    if not len(x_TD):
        return out_TF
    if cluster is None:
        row_tiles = -(-len(x_TD) // ROWS)
        paired = row_tiles % 2 == 0 or 1 / (row_tiles + 1) <= _MOST_WASTED
        cluster = max(CLUSTERS) if paired else min(CLUSTERS)
    compiled(x_TD.device.index, cluster)(x_TD, gate_up_ND, (x_scale, weight_scale, out_scale, out_TF))
    return out_TF


class Kernel:
    """The compiled kernel on one device."""

    def __init__(self, device: int, cluster: int) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._cluster = cluster
        self._shared_bytes = STAGES * (ROWS + COLUMNS) * DEPTH + 1024
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # so that this thread has the device's context
            self._module = _checked(driver.cuModuleLoadData(_machine_code(cluster)))
            self._function = _checked(driver.cuModuleGetFunction(self._module, b"gated_product"))
            most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(driver.cuFuncSetAttribute(self._function, most, self._shared_bytes))
        self._programs = torch.cuda.get_device_properties(device).multi_processor_count // cluster * cluster
        # Steps use the same memory again and again, and to describe a matrix takes longer than to launch.
        self._described: Callable[..., Any] = lru_cache(_MOST_DESCRIBED)(self._describe)

    def _describe(self, address: int, rows: int, depth: int, tile_rows: int) -> Any:
        driver = self._driver
        size, count = driver.cuuint64_t, driver.cuuint32_t
        return _checked(
            driver.cuTensorMapEncodeTiled(
                driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
                2,
                address,
                [size(depth), size(rows)],
                [size(depth)],
                [count(DEPTH), count(tile_rows)],
                [count(1), count(1)],
                driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
                driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
                driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        )

    def __call__(self, x_TD: Tensor, gate_up_ND: Tensor, scales_and_out: tuple[Tensor, ...]) -> None:
        """Launch on the current stream."""
        (tokens, depth), columns = x_TD.shape, len(gate_up_ND)
        x_map = self._described(x_TD.data_ptr(), tokens, depth, ROWS)
        weight_map = self._described(gate_up_ND.data_ptr(), columns, depth, COLUMNS // self._cluster)
        pointers = [ctypes.c_uint64(tensor.data_ptr()) for tensor in scales_and_out]
        numbers = [ctypes.c_int32(number) for number in (tokens, columns // 2, depth)]
        held = [*pointers, *numbers]
        addresses = [int(x_map.getPtr()), int(weight_map.getPtr()), *map(ctypes.addressof, held)]
        arguments = (ctypes.c_void_p * len(addresses))(*addresses)
        tiles = -(-tokens // (ROWS * self._cluster)) * (columns // COLUMNS) * self._cluster
        _checked(
            self._driver.cuLaunchKernel(
                self._function,
                min(self._programs, tiles), 1, 1,
                THREADS, 1, 1,
                self._shared_bytes,
                torch.cuda.current_stream(x_TD.device).cuda_stream,
                ctypes.addressof(arguments),
                0,
            )
        )  # fmt: skip


@lru_cache
def compiled(device: int, cluster: int) -> Kernel:
    """Compiled at the first call. Raises CapacityError: it cannot be compiled or loaded."""
    return Kernel(device, cluster)


@lru_cache
def _machine_code(cluster: int) -> bytes:
    from cuda.bindings import nvrtc

    source = Path(__file__).with_suffix(".cu").read_text()
    source = source.replace("@SUMS@", ", ".join(f"%{number}" for number in range(SUMS)))
    source = source.replace("@OPERANDS@", ", ".join(f'"+f"(sum[{number}])' for number in range(SUMS)))
    dimensions = f"__cluster_dims__({cluster}, 1, 1)" if cluster > 1 else ""
    constants: dict[str, object] = {
        "ROWS": ROWS,
        "COLUMNS": COLUMNS,
        "DEPTH": DEPTH,
        "THREADS": THREADS,
        "STAGES": STAGES,
    }
    constants |= {"CLUSTER": cluster, "CLUSTER_DIMENSIONS": dimensions}
    options = ["-arch=sm_90a", *(f"-D{name}={value}" for name, value in constants.items())]
    program = _checked(nvrtc.nvrtcCreateProgram(source.encode(), b"gated_product.cu", 0, [], []))
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if status.value:
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise CapacityError(f"gated_product.cu was not compiled: {log.decode(errors='replace')}")
    code: bytes = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
    _checked(nvrtc.nvrtcGetCUBIN(program, code))
    return code


def _checked(results: tuple[Any, ...]) -> Any:
    status, *values = results
    if status.value:
        raise CapacityError(f"CUDA's {type(status).__name__} {status.name} from gated_product; please report it")
    return values[0] if values else None
