"""``y = x W^T`` of e4m3 in bf16 as a persistent kernel in Triton, all copies by the bulk copy engine.

A candidate of ``product_algorithms.py``. Shape letters: T tokens, N outputs, D inputs.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True, slots=True)
class Variant:
    """How the kernel runs."""

    rows: int = 128  # of a tile
    columns: int = 256
    stages: int = 3
    flatten: bool = False  # tiles and pieces are one loop, so that copies for the next tile begin before this one ends

    def __str__(self) -> str:
        return f"triton {self.rows} x {self.columns}, {self.stages} stages{', one loop' if self.flatten else ''}"


DEPTH, WARPS = 128, 8


@triton.jit
def _product_kernel(
    x, weight, out, x_scale, weight_scale, T, N, D,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    row_tiles = tl.cdiv(T, BLOCK_T)
    tiles = row_tiles * tl.cdiv(N, BLOCK_N)
    scale = tl.load(x_scale) * tl.load(weight_scale)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        row, column = tile % row_tiles * BLOCK_T, tile // row_tiles * BLOCK_N
        sum_TN = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
        for start in tl.range(0, D, BLOCK_D, num_stages=STAGES):
            sum_TN = tl.dot(x.load([row, start]), weight.load([column, start]).T, sum_TN)
        out.store([row, column], (sum_TN * scale).to(tl.bfloat16))


def triton_product(x_TD: Tensor, weight_ND: Tensor, x_scale: Tensor, weight_scale: Tensor, variant: Variant) -> Tensor:
    """bf16 [T, N] of contiguous e4m3 matrices and a scale, fp32 [1], of each."""
    (tokens, depth), outputs = x_TD.shape, len(weight_ND)
    out_TN = torch.empty(tokens, outputs, dtype=torch.bfloat16, device=x_TD.device)
    tiles = triton.cdiv(tokens, variant.rows) * triton.cdiv(outputs, variant.columns)
    programs = torch.cuda.get_device_properties(x_TD.device).multi_processor_count
    _product_kernel[(min(programs, tiles),)](
        TensorDescriptor.from_tensor(x_TD, [variant.rows, DEPTH]),
        TensorDescriptor.from_tensor(weight_ND, [variant.columns, DEPTH]),
        TensorDescriptor.from_tensor(out_TN, [variant.rows, variant.columns]),
        x_scale, weight_scale, tokens, outputs, depth,
        variant.rows, variant.columns, DEPTH, variant.stages, variant.flatten, num_warps=WARPS,
    )  # fmt: skip
    return out_TN
