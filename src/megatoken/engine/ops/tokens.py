"""Triton kernels for token ids: model inputs from host or device, and the ids of the highest logits.

Kernels are not specialised on pointers into a step's packed buffer or on numbers that change from step to step, so that
no step compiles. Keyword arguments after ``*`` tune a launch and never change a result.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatoken.engine.ops.fused import require_contiguous

_NO_COLUMN = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=["host_ids", "table_slots", "rows"])
def _gather_tokens_kernel(host_ids, table_slots, last_tokens, out, rows, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    slot = tl.load(table_slots + row, mask=inside, other=-1)
    host_id = tl.load(host_ids + row, mask=inside, other=0).to(out.dtype.element_ty)
    last_token = tl.load(last_tokens + slot, mask=slot >= 0, other=0)
    tl.store(out + row, tl.where(slot >= 0, last_token, host_id), mask=inside)


def gather_tokens(host_ids_T: Tensor, table_slots_T: Tensor, last_tokens: Tensor) -> Tensor:
    """The id of each token of a step, from the host or from the table of the newest sampled ids.

    Args:
        host_ids_T: int32 [T].
        table_slots_T: int32 [T], -1 to take the host's id.
        last_tokens: int32 or int64 [slots].

    Returns:
        [T] in the table's dtype.
    """
    rows = len(host_ids_T)
    out = torch.empty(rows, dtype=last_tokens.dtype, device=last_tokens.device)
    _gather_tokens_kernel[(triton.cdiv(rows, 256),)](host_ids_T, table_slots_T, last_tokens, out, rows, 256)
    return out


@triton.jit
def _load_comparable(logits, column, inside):
    x = tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("inf"))


@triton.jit(do_not_specialize=["blocks_per_split"])
def _argmax_kernel(logits, out, blocks_per_split, V: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    split = tl.program_id(1)
    logits += row.to(tl.int64) * V
    lane = tl.arange(0, BLOCK)
    first_block = split * blocks_per_split
    best = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    best_block = tl.zeros([BLOCK], dtype=tl.int32) + first_block
    for block in tl.range(first_block, first_block + blocks_per_split, loop_unroll_factor=2):
        column = block * BLOCK + lane
        x = _load_comparable(logits, column, column < V)
        best_block = tl.where(x > best, block, best_block)
        best = tl.maximum(best, x)
    first = tl.min(tl.where(best == tl.max(best), best_block * BLOCK + lane, _NO_COLUMN))
    tl.store(out + row * tl.num_programs(1) + split, first.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["splits"])
def _argmax_merge_kernel(logits, partial, out, splits, V: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    split = tl.arange(0, BLOCK)
    column = tl.load(partial + row * splits + split, mask=split < splits, other=_NO_COLUMN)
    x = _load_comparable(logits + row.to(tl.int64) * V, column, split < splits)
    tl.store(out + row, tl.min(tl.where(x == tl.max(x), column, _NO_COLUMN)).to(tl.int64))


def argmax_rows(logits_SV: Tensor, *, block: int = 2048, warps: int = 4, programs: int = 1024) -> Tensor:
    """Highest logit of each row, the lowest id among equals; NaN counts as infinity.

    Args:
        logits_SV: bf16 or fp32 [S, V].
        block: columns a program holds at a time.
        warps: per program.
        programs: columns are split until there are about this many.

    Returns:
        int64 [S].
    """
    rows, width = logits_SV.shape
    require_contiguous(logits_SV)
    out = torch.empty(rows, dtype=torch.int64, device=logits_SV.device)
    blocks = triton.cdiv(width, block)
    blocks_per_split = triton.cdiv(blocks, min(blocks, max(programs // max(rows, 1), 1)))
    splits = triton.cdiv(blocks, blocks_per_split)
    if splits == 1:
        _argmax_kernel[(rows, 1)](logits_SV, out, blocks, width, block, num_warps=warps)
        return out
    partial = torch.empty((rows, splits), dtype=torch.int32, device=logits_SV.device)
    _argmax_kernel[(rows, splits)](logits_SV, partial, blocks_per_split, width, block, num_warps=warps)
    _argmax_merge_kernel[(rows,)](logits_SV, partial, out, splits, width, triton.next_power_of_2(blocks), num_warps=1)
    return out
