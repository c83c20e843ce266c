"""A product of our own for Hopper, ``y = x W^T`` of e4m3 in bf16, in the variants whose joules are asked for.

Only benchmarks call it (``product_algorithms.py``). It has the ring, the pairs of programs and the ``wgmma`` of the
engine's ``gated_product.cu`` with another ending, see ``own_product.cu``. Shape letters: T tokens, N outputs, D inputs.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megatoken.engine.ops import nvrtc
from megatoken.engine.ops.fused import require_contiguous

ROWS, DEPTH, THREADS = 128, 128, 384
WRITE_BYTES = 2 * 8 * 16 * 128
"""Two buffers of 16 rows of 128 bytes for each of eight warps."""
CHUNK = 64
SHARED_BYTES = 227 * 1024
OTHER_BYTES = 1024 + 256
"""To align the ring, and for its barriers."""
MOST_STAGES = 8
MOST_SUMS = 96
"""Of a thread that holds those of two tiles."""


@dataclass(frozen=True, slots=True)
class Variant:
    """How the kernel is built. Changes neither result nor rounding."""

    columns: int = 256  # outputs of a tile, a multiple of 16 from 64 to 256
    cluster: int = 2  # programs that share copies of weights
    overlapped: bool = False  # a tile is written while the next is multiplied; up to 192 columns
    rows_first: bool = True  # tiles in the order of tokens, so that programs share weights in L2; otherwise inputs

    def __post_init__(self) -> None:
        if self.columns % 16 or not CHUNK <= self.columns <= 256 or self.cluster not in (1, 2):
            raise ValueError(f"no tiles of {self.columns} columns for clusters of {self.cluster}")
        if self.overlapped and self.columns > 2 * MOST_SUMS:
            raise ValueError(f"a thread has no registers for the sums of two tiles of {self.columns} columns")

    @property
    def stages(self) -> int:
        """Pieces in the ring."""
        return min(MOST_STAGES, (SHARED_BYTES - WRITE_BYTES - OTHER_BYTES) // ((ROWS + self.columns) * DEPTH))

    @property
    def shared_bytes(self) -> int:
        """Of a launch; barriers come on top."""
        return self.stages * (ROWS + self.columns) * DEPTH + WRITE_BYTES + 1024

    def __str__(self) -> str:
        order = "" if self.rows_first else ", columns first"
        return f"own {self.columns} x {self.cluster}{', overlapped' if self.overlapped else ''}{order}"


def own_product(x_TD: Tensor, weight_ND: Tensor, x_scale: Tensor, weight_scale: Tensor, variant: Variant) -> Tensor:
    """bf16 [T, N] of e4m3 matrices; scales are fp32, one of each, or [T] and [N].

    Raises:
        CapacityError: the kernel cannot be compiled or launched.
        ValueError: the sides do not fit.
    """
    (tokens, depth), outputs = x_TD.shape, len(weight_ND)
    if depth % DEPTH or outputs % 8 or (variant.overlapped and depth * CHUNK < variant.columns * DEPTH):
        raise ValueError(f"{outputs} outputs of {depth} inputs do not fit {variant}")
    if (len(x_scale), len(weight_scale)) not in ((1, 1), (tokens, outputs)):
        raise ValueError("expected a scale for each row and each output, or one of each")
    require_contiguous(x_TD, weight_ND, x_scale, weight_scale)
    out_TN = torch.empty(tokens, outputs, dtype=torch.bfloat16, device=x_TD.device)
    if tokens:
        compiled(x_TD.device.index, variant, len(weight_scale) > 1)(x_TD, weight_ND, (x_scale, weight_scale), out_TN)
    return out_TN


class Kernel:
    """One variant, compiled for one device."""

    def __init__(self, device: int, variant: Variant, row_scales: bool) -> None:
        self._variant = variant
        code = machine_code(variant, row_scales)
        self._function = nvrtc.load(code, "own_product", device, variant.shared_bytes)
        self._programs = torch.cuda.get_device_properties(device).multi_processor_count // variant.cluster
        self._map: Callable[..., Any] = lru_cache(4096)(nvrtc.tensor_map)

    def __call__(self, x_TD: Tensor, weight_ND: Tensor, scales: tuple[Tensor, Tensor], out_TN: Tensor) -> None:
        """Launch on the current stream."""
        (tokens, depth), outputs, variant = x_TD.shape, len(weight_ND), self._variant
        x_map = self._map("UINT8", x_TD.data_ptr(), (depth, tokens), depth, (DEPTH, ROWS))
        weight_box = DEPTH, variant.columns // variant.cluster
        weight_map = self._map("UINT8", weight_ND.data_ptr(), (depth, outputs), depth, weight_box)
        out_map = self._map("BFLOAT16", out_TN.data_ptr(), (outputs, tokens), 2 * outputs, (CHUNK, 16))
        tiles = -(-tokens // (ROWS * variant.cluster)) * -(-outputs // variant.columns)
        grid = min(self._programs, tiles) * variant.cluster, 1
        arguments = x_map, weight_map, out_map, *scales, tokens, outputs, depth
        nvrtc.launch(self._function, grid, THREADS, variant.shared_bytes, arguments, x_TD.device)


@lru_cache
def compiled(device: int, variant: Variant, row_scales: bool) -> Kernel:
    """Compiled at the first call. Raises CapacityError: it cannot be compiled or loaded."""
    return Kernel(device, variant, row_scales)


def machine_code(variant: Variant, row_scales: bool) -> bytes:
    """For sm_90a. Raises CapacityError: it cannot be compiled."""
    columns, cluster, overlapped, rows_first = astuple(variant)
    constants = {
        "ROWS": ROWS,
        "COLUMNS": columns,
        "DEPTH": DEPTH,
        "THREADS": THREADS,
        "STAGES": variant.stages,
        "CLUSTER": cluster,
        "CLUSTER_DIMENSIONS": f"__cluster_dims__({cluster}, 1, 1)" if cluster > 1 else "",
        "OVERLAPPED": int(overlapped),
        "TILE_ROWS_FIRST": int(rows_first),
        "ROW_SCALES": int(row_scales),
    }
    source = nvrtc.hopper_source(__file__, columns)
    return nvrtc.machine_code(source, "own_product.cu", "sm_90a", constants)
