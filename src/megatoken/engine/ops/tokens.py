"""Triton kernels for token ids: model inputs from host or device, the ids of the highest logits, and drawn ids.

Kernels are not specialised on pointers into a step's packed buffer or on numbers that change from step to step, so that
no step compiles. Keyword arguments after ``*`` tune a launch and never change a result.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatoken.engine.ops.fused import require_contiguous

_NO_COLUMN = tl.constexpr(2**31 - 1)
_LOG2_E = tl.constexpr(math.log2(math.e))
_LARGEST_FACTOR = tl.constexpr(1e30)
CHUNK = 4096
"""Columns of a row that are summed together when a token is drawn: part of the result, so the same for every batch."""


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
def load_comparable(logits, column, inside):
    """Logits in fp32; a NaN counts as infinity."""
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
        x = load_comparable(logits, column, column < V)
        best_block = tl.where(x > best, block, best_block)
        best = tl.maximum(best, x)
    first = tl.min(tl.where(best == tl.max(best), best_block * BLOCK + lane, _NO_COLUMN))
    tl.store(out + row * tl.num_programs(1) + split, first.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["splits"])
def _argmax_merge_kernel(logits, partial, out, splits, V: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    split = tl.arange(0, BLOCK)
    column = tl.load(partial + row * splits + split, mask=split < splits, other=_NO_COLUMN)
    x = load_comparable(logits + row.to(tl.int64) * V, column, split < splits)
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


@triton.jit
def _power_factor(temperature):
    """A logit times this is the exponent of two of its weight; finite and above 0 for every temperature."""
    bounded = tl.minimum(tl.maximum(tl.load(temperature), 1.0 / _LARGEST_FACTOR), _LARGEST_FACTOR)
    return (1.0 / bounded).to(tl.float32) * _LOG2_E


@triton.jit
def _load_chunk(logits, rows, number, chunk, V: tl.constexpr, CHUNK: tl.constexpr):
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    at = logits + tl.load(rows + number) * V + column
    x = tl.load(at, mask=column < V, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("-inf"))


@triton.jit(do_not_specialize=["rows", "temperatures"])
def _sum_chunks_kernel(logits, rows, temperatures, highest, total, V: tl.constexpr, CHUNK: tl.constexpr):
    number, chunk = tl.program_id(0), tl.program_id(1)
    x = _load_chunk(logits, rows, number, chunk, V, CHUNK)
    best = tl.max(x)
    base = tl.where(best == float("-inf"), 0.0, best)
    at = number * tl.num_programs(1) + chunk
    tl.store(highest + at, best)
    tl.store(total + at, tl.sum(tl.exp2((x - base) * _power_factor(temperatures + number))))


@triton.jit(do_not_specialize=["rows", "temperatures", "uniforms"])
def _draw_kernel(
    logits, rows, temperatures, uniforms, highest, total, out,
    V: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_CHUNKS: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    factor = _power_factor(temperatures + number)
    c = tl.arange(0, BLOCK_CHUNKS)
    best = tl.load(highest + number * CHUNKS + c, mask=c < CHUNKS, other=float("-inf"))
    top = tl.max(best)
    weight = tl.load(total + number * CHUNKS + c, mask=c < CHUNKS, other=0.0) * tl.exp2((best - top) * factor)
    cumulative = tl.cumsum(weight.to(tl.float64))
    wanted = tl.load(uniforms + number) * tl.max(cumulative)
    chunk = tl.minimum(tl.sum((cumulative <= wanted).to(tl.int32)), CHUNKS - 1)
    wanted -= tl.max(tl.where(c < chunk, cumulative, 0.0))
    base = tl.max(tl.where(c == chunk, best, float("-inf")))
    x = _load_chunk(logits, rows, number, chunk, V, CHUNK)
    weight = tl.exp2((x - base) * factor)
    cumulative = tl.cumsum(weight.to(tl.float64)) * tl.exp2((base - top) * factor)
    place = tl.sum((cumulative <= wanted).to(tl.int32))
    last = tl.max(tl.where(weight > 0, tl.arange(0, CHUNK), 0))  # rounding may leave the number beyond the sum
    tl.store(out + number, (chunk * CHUNK + tl.minimum(place, last)).to(tl.int64))


def draw_rows(logits_SV: Tensor, rows_R: Tensor, temperatures_R: Tensor, uniforms_R: Tensor) -> Tensor:
    """Ids drawn by inverting the cumulative distribution in the order of token ids, as ``sampling`` defines it.

    Weights are fp32, their sums over chunks of a row float64. Logits are read once, and one chunk of each row twice.

    Args:
        logits_SV: bf16 or fp32 [S, V]; the highest of a row is finite, or its id means nothing.
        rows_R: int64, rows of the logits.
        temperatures_R: float64, above 0.
        uniforms_R: float64, from 0 to below 1.

    Returns:
        int64 [R].
    """
    require_contiguous(logits_SV, rows_R, temperatures_R, uniforms_R)
    rows, width = len(rows_R), logits_SV.shape[1]
    chunks, device = triton.cdiv(width, CHUNK), logits_SV.device
    highest, total = (torch.empty(rows, chunks, dtype=torch.float32, device=device) for _ in range(2))
    out = torch.empty(rows, dtype=torch.int64, device=device)
    _sum_chunks_kernel[(rows, chunks)](logits_SV, rows_R, temperatures_R, highest, total, width, CHUNK, num_warps=4)
    _draw_kernel[(rows,)](
        logits_SV, rows_R, temperatures_R, uniforms_R, highest, total, out,
        width, CHUNK, chunks, triton.next_power_of_2(chunks), num_warps=4,
    )  # fmt: skip
    return out
