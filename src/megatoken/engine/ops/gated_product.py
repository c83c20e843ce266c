"""``silu(x G^T) * (x U^T)`` in e4m3 as one kernel for Hopper: what two products give is never written to memory.

The kernel (``gated_product.cu``) is compiled by NVRTC at its first use; ``wgmma`` multiplies, with sums as inexact as
those of cuBLASLt's fast accumulation. Shape letters: T tokens, D inputs, F features.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megatoken.engine.ops import nvrtc
from megatoken.engine.ops.fused import require_contiguous

ROWS, COLUMNS, DEPTH = 128, 256, 128
"""Of a tile: tokens, gates and ups, and the bytes of a row that are multiplied at a time."""
STAGES = 4
CLUSTERS = (1, 2)
"""Programs that share copies of weights. In pairs, an odd number of tiles of tokens wastes one."""
_MOST_WASTED = 1 / 16
THREADS = 384
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
    return nvrtc.compiler_obstacle()


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
        self._cluster = cluster
        self._shared_bytes = STAGES * (ROWS + COLUMNS) * DEPTH + 1024
        self._function = nvrtc.load(_machine_code(cluster), "gated_product", device, self._shared_bytes)
        self._programs = torch.cuda.get_device_properties(device).multi_processor_count // cluster * cluster
        # Steps use the same memory again and again, and to describe a matrix takes longer than to launch.
        self._described: Callable[..., Any] = lru_cache(_MOST_DESCRIBED)(self._describe)

    def _describe(self, address: int, rows: int, depth: int, tile_rows: int) -> Any:
        return nvrtc.tensor_map("UINT8", address, (depth, rows), depth, (DEPTH, tile_rows))

    def __call__(self, x_TD: Tensor, gate_up_ND: Tensor, scales_and_out: tuple[Tensor, ...]) -> None:
        """Launch on the current stream."""
        (tokens, depth), columns = x_TD.shape, len(gate_up_ND)
        x_map = self._described(x_TD.data_ptr(), tokens, depth, ROWS)
        weight_map = self._described(gate_up_ND.data_ptr(), columns, depth, COLUMNS // self._cluster)
        tiles = -(-tokens // (ROWS * self._cluster)) * (columns // COLUMNS) * self._cluster
        arguments = (x_map, weight_map, *scales_and_out, tokens, columns // 2, depth)
        grid = min(self._programs, tiles), 1
        nvrtc.launch(self._function, grid, THREADS, self._shared_bytes, arguments, x_TD.device)


@lru_cache
def compiled(device: int, cluster: int) -> Kernel:
    """Compiled at the first call. Raises CapacityError: it cannot be compiled or loaded."""
    return Kernel(device, cluster)


@lru_cache
def _machine_code(cluster: int) -> bytes:
    dimensions = f"__cluster_dims__({cluster}, 1, 1)" if cluster > 1 else ""
    constants: dict[str, object] = {
        "ROWS": ROWS,
        "COLUMNS": COLUMNS,
        "DEPTH": DEPTH,
        "THREADS": THREADS,
        "STAGES": STAGES,
    }
    constants |= {"CLUSTER": cluster, "CLUSTER_DIMENSIONS": dimensions}
    return nvrtc.machine_code(nvrtc.hopper_source(__file__, COLUMNS), "gated_product.cu", "sm_90a", constants)
