"""The highest logit of each row by two products: e4m3 finds the candidates, and bf16 decides between them.

A product in e4m3 takes half the time and half the joules of one in bf16, and a greedy step needs its logits only to
find the highest. Rounding moves a logit by a deviation that is known for each row, so every token whose e4m3 logit is
within ``DEVIATIONS`` of the highest is computed again from bf16 values. The token is then that of the bf16 head unless
rounding moved a logit by more than that.

Shape letters as in ``ops``: S tokens that sample, D hidden size, V vocabulary.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatoken.engine.ops import NO_TOKEN, fused
from megatoken.engine.ops.cuda_fp8 import RowScaledLinear, ScaledTokens
from megatoken.engine.ops.tokens import load_comparable
from megatoken.engine.schemes.fp8_weight import Fp8Weight, quantise_rows

DEVIATIONS = 8.0
"""How many deviations of a difference of two logits a token may be below the highest and still be a candidate."""
ROUNDING = 0.0376
"""Relative deviation of a product of two e4m3 values: each is rounded to 3 bits, uniformly on a logarithmic scale."""
_BF16_ROUNDING = tl.constexpr(2.0**-8)
_PART_ROWS = 8192
BLOCK = 2048
"""Tokens whose highest e4m3 logit is kept, so that only blocks with candidates are read again."""
_NO_COLUMN = tl.constexpr(2**31 - 1)
_NO_TOKEN = tl.constexpr(NO_TOKEN)


@triton.jit
def _highest_of_blocks_kernel(logits, highest, V: tl.constexpr, BLOCK: tl.constexpr):
    row, block = tl.program_id(0), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    x = load_comparable(logits + row.to(tl.int64) * V, column, column < V)
    tl.store(highest + row * tl.num_programs(1) + block, tl.max(x))


@triton.jit
def _decide_kernel(
    logits, highest, inputs, head, margin_D, out,
    V: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK_BLOCKS)
    top = tl.max(tl.load(highest + row * BLOCKS + block, mask=block < BLOCKS, other=float("-inf")))
    d = tl.arange(0, BLOCK_D)
    finite = top < float("inf")
    x_D = tl.where(finite, tl.load(inputs + row * D + d, mask=d < D, other=0.0).to(tl.float32), 0.0)
    margin = tl.sqrt(tl.sum(x_D * x_D * tl.load(margin_D + d, mask=d < D, other=0.0)))
    top = tl.where(finite, top, 0.0)
    lowest = tl.where(finite, top - margin - tl.abs(top) * _BF16_ROUNDING, float("nan"))  # NaN: no candidates
    best = tl.full([], float("-inf"), tl.float32)
    best_token = tl.full([], _NO_TOKEN, tl.int32)
    for number in range(BLOCKS):
        if tl.load(highest + row * BLOCKS + number) >= lowest:
            column = number * BLOCK + tl.arange(0, BLOCK)
            candidate = load_comparable(logits + row * V, column, column < V) >= lowest
            while tl.max(candidate.to(tl.int32)) > 0:
                token = tl.min(tl.where(candidate, column, _NO_COLUMN))
                candidate = candidate & (column != token)
                weight_D = tl.load(head + token.to(tl.int64) * D + d, mask=d < D, other=0.0).to(tl.float32)
                logit = tl.sum(x_D * weight_D).to(tl.bfloat16).to(tl.float32)
                better = logit > best
                best, best_token = tl.where(better, logit, best), tl.where(better, token, best_token)
    tl.store(out + row, tl.where(best < float("inf"), best_token, _NO_TOKEN).to(tl.int64))


def decide(logits_SV: Tensor, inputs_SD: Tensor, head_VD: Tensor, margin_D: Tensor) -> Tensor:
    """The token with the highest bf16 logit, the lowest id among equals, of those near the highest e4m3 logit.

    Args:
        logits_SV: bf16, made by a product in e4m3.
        inputs_SD: bf16, of the head.
        head_VD: bf16.
        margin_D: fp32; the root of ``sum(inputs^2 * margin_D)`` is how far below the highest a candidate may be.

    Returns:
        int64 [S], ``NO_TOKEN`` where the highest logit is not finite.
    """
    fused.require_contiguous(logits_SV, inputs_SD, head_VD, margin_D)
    (rows, tokens), width = logits_SV.shape, inputs_SD.shape[1]
    blocks = triton.cdiv(tokens, BLOCK)
    highest = torch.empty(rows, blocks, dtype=torch.float32, device=logits_SV.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits_SV.device)
    _highest_of_blocks_kernel[(rows, blocks)](logits_SV, highest, tokens, BLOCK, num_warps=4)
    _decide_kernel[(rows,)](
        logits_SV, highest, inputs_SD, head_VD, margin_D, out,
        tokens, width, BLOCK, blocks, triton.next_power_of_2(width), triton.next_power_of_2(blocks), num_warps=8,
    )  # fmt: skip
    return out


@dataclass(frozen=True, slots=True)
class ScreenedHead:
    """A head in bf16 with a copy in e4m3."""

    head_VD: Tensor
    screen: RowScaledLinear
    margin_D: Tensor

    @classmethod
    def pack(cls, head_VD: Tensor) -> Self:
        """Takes V x (D + 4) bytes."""
        values_VD = torch.empty(head_VD.shape, dtype=torch.float8_e4m3fn, device=head_VD.device)
        scale_V1 = torch.empty(len(head_VD), 1, dtype=torch.float32, device=head_VD.device)
        squares_D = torch.zeros(head_VD.shape[1], dtype=torch.float32, device=head_VD.device)
        largest = torch.zeros((), dtype=torch.float32, device=head_VD.device)
        for first in range(0, len(head_VD), _PART_ROWS):
            part = slice(first, first + _PART_ROWS)
            values_VD[part], scale_V1[part] = quantise_rows(head_VD[part])
            squares = head_VD[part].float().square()
            squares_D += squares.sum(0)
            largest = torch.maximum(largest, squares.sum(1).amax())
        # A token with large weights moves more than the average one: all are given the margin of the largest.
        spread = largest * len(head_VD) / squares_D.sum().clamp_min(1e-30)
        margin = DEVIATIONS * ROUNDING * math.sqrt(2.0)
        margin_D = squares_D / len(head_VD) * spread * margin**2
        return cls(head_VD, RowScaledLinear.pack(Fp8Weight(values_VD, scale_V1), None), margin_D)

    def greedy(self, inputs_SD: Tensor) -> Tensor:
        """int64 [S], see ``decide``."""
        logits_SV = self.screen.product(ScaledTokens(*fused.quantise_rows(inputs_SD)))
        return decide(logits_SV, inputs_SD, self.head_VD, self.margin_D)
