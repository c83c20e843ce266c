"""Products of rows sorted by group with the group's own weight, in Triton: the two products of a mixture of experts.

One launch computes all groups. Its programs, no more than run at once, walk over the tiles of all groups and find the
group of a tile from where groups start, which only the GPU knows: nothing waits for the host, no rows are padded in
memory, a group without rows costs nothing, and the launch can be part of a CUDA graph.

Values are bf16, or e4m3 with a scale for each row of the input and each output of a weight. Sums are fp32; those of
e4m3 are as inexact as in cuBLASLt's fast accumulation. Biases, a clamped activation of neighbouring outputs and the
weight of a choice are applied before anything is stored. Shape letters as in ``routing``; R rows, which are choices of
tokens sorted by expert, N outputs, K inputs.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megatoken.engine.config import ClampedSwiglu
from megatoken.engine.ops.fused import require_contiguous, saturate
from megatoken.engine.ops.paged_attention import IN_INTERPRETER, LOG2_E
from megatoken.engine.schemes.fp8_weight import E4M3_MAX

INTERPRETED_PROGRAMS = 3


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How ``grouped_product`` runs. Changes the result by rounding only."""

    rows: int  # of a tile
    columns: int  # outputs of a tile
    depth_bytes: int = 128  # of the inputs of a row that are multiplied at a time
    warps: int = 4  # warps per program
    stages: int = 4  # pieces of that depth in flight per program
    programs: int = 1  # per multiprocessor


FEW_ROWS = TileConfig(16, 128, stages=5, programs=2)
SOME_ROWS = TileConfig(64, 256, warps=8)
MANY_ROWS = TileConfig(128, 256, warps=8)


def tile_config(rows: int, groups: int) -> TileConfig:
    """For an average number of rows in a group."""
    average = rows / groups
    return FEW_ROWS if average <= 16 else SOME_ROWS if average <= 64 else MANY_ROWS


@triton.jit(do_not_specialize=["groups", "out_factor"])
def _grouped_product_kernel(
    x, x_scale, weights, weight_scale, bias, order, starts, factors, out, groups, out_factor,
    N: tl.constexpr, K: tl.constexpr, CHOICES: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    group = tl.arange(0, BLOCK_X)
    begin = tl.load(starts + group, mask=group < groups, other=0).to(tl.int32)
    size = tl.load(starts + 1 + group, mask=group < groups, other=0).to(tl.int32) - begin
    tiles = (size + BLOCK_M - 1) // BLOCK_M
    tile_end = tl.cumsum(tiles)
    columns: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    k = tl.arange(0, BLOCK_K)
    for tile in tl.range(tl.program_id(0), tl.sum(tiles) * columns, tl.num_programs(0)):
        row_tile = tile // columns
        number = tl.sum((tile_end <= row_tile).to(tl.int32))
        here = group == number
        first = tl.sum(tl.where(here, begin + (row_tile - tile_end + tiles) * BLOCK_M, 0))
        end = tl.sum(tl.where(here, begin + size, 0))
        row = first + tl.arange(0, BLOCK_M)
        live = row < end
        choice = tl.load(order + row, mask=live, other=0)
        # Gathered inputs are tokens, in any order, and outputs sorted choices; otherwise the reverse.
        from_row = (choice // CHOICES if CHOICES else row).to(tl.int64)
        to_row = (row if CHOICES else choice).to(tl.int64)
        from_row = tl.where(live, from_row, 0)
        at = x + from_row[:, None] * K + k[None, :]
        column = tile % columns * BLOCK_N
        sum_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            if K % BLOCK_K == 0:
                x_MK = tl.load(at + start)
            else:
                x_MK = tl.load(at + start, mask=k[None, :] < K - start, other=0.0)
            w_NK = weights.load([number * N + column, start])
            if INTERPRETED:
                x_MK, w_NK = x_MK.to(tl.float32), w_NK.to(tl.float32)
            sum_MN = tl.dot(x_MK, tl.trans(w_NK), sum_MN)
        n = column + tl.arange(0, BLOCK_N)
        if x_scale is not None:
            sum_MN = sum_MN * tl.load(x_scale + from_row)[:, None]
        if weight_scale is not None:
            sum_MN = sum_MN * tl.load(weight_scale + number * N + n, mask=n < N, other=0.0)[None, :]
        if bias is not None:
            sum_MN += tl.load(bias + number * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        if LIMIT > 0:
            gate, up = tl.split(tl.reshape(sum_MN, (BLOCK_M, BLOCK_N // 2, 2)))
            gate = tl.minimum(gate, LIMIT)
            up = tl.clamp(up, -LIMIT, LIMIT)
            y_MN = gate / (1.0 + tl.exp2(gate * (-ALPHA * LOG2_E))) * (up + 1.0) * out_factor
            if out.dtype.element_ty == tl.float8e4nv:
                y_MN = saturate(y_MN)
            n = column // 2 + tl.arange(0, BLOCK_N // 2)
            mask = live[:, None] & (n < N // 2)[None, :]
            tl.store(out + to_row[:, None] * (N // 2) + n[None, :], y_MN.to(out.dtype.element_ty), mask=mask)
        else:
            if factors is not None:
                sum_MN = sum_MN * tl.load(factors + choice, mask=live, other=0.0)[:, None]
            mask = live[:, None] & (n < N)[None, :]
            tl.store(out + to_row[:, None] * N + n[None, :], sum_MN.to(out.dtype.element_ty), mask=mask)


def activation_scale(activation: ClampedSwiglu) -> float:
    """Of its e4m3 output. The limits fix it, so that a row's largest need not be known."""
    return activation.largest / E4M3_MAX


def grouped_product(
    x: Tensor,  # bf16 or e4m3; with ``choices`` [T, K], the input of each token, otherwise [R, K], of each sorted row
    x_scale: Tensor | None,  # fp32 with an element for each row of ``x``; None for 1
    weights_XNK: Tensor,  # of the same type; its rows have a multiple of 16 bytes
    weight_scale_XN: Tensor | None,  # fp32, if it is e4m3
    order_R: Tensor,  # the choice that each sorted row is, token * choices + its number; int32
    starts: Tensor,  # int32 [X + 1], the first sorted row of each group, and R
    *,
    bias_XN: Tensor | None = None,  # added to the scaled sums
    choices: int | None = None,  # of a token, to read its row for each of them. None: ``x`` is sorted already.
    # fp32, multiplies the output of each choice; in the order of choices. Not with ``activation``.
    factors_R: Tensor | None = None,
    activation: ClampedSwiglu | None = None,  # of outputs 2 n, the gate, and 2 n + 1
    config: TileConfig | None = None,  # by default chosen by the average number of rows in a group
) -> Tensor:
    """Each row times the transposed weight of its group, plus its bias.

    Returns:
        bf16 [R, N]: with ``choices`` sorted rows, otherwise in the order of choices. With ``activation`` [R, N / 2] in
        the type of ``x``; e4m3 is divided by ``activation_scale``.
    """
    require_contiguous(x, x_scale, weights_XNK, weight_scale_XN, bias_XN, order_R, starts, factors_R)
    (rows,), (_, outputs, inputs), groups = order_R.shape, weights_XNK.shape, len(starts) - 1
    tile = config or tile_config(rows, groups)
    out_factor, alpha, limit = 1.0, 0.0, 0.0
    shape, dtype = (rows, outputs), torch.bfloat16
    if activation is not None:
        shape, dtype, alpha, limit = (rows, outputs // 2), x.dtype, activation.alpha, activation.limit
        if x.itemsize == 1:
            out_factor = 1.0 / activation_scale(activation)
    out = torch.empty(shape, dtype=dtype, device=x.device)
    depth = tile.depth_bytes // x.itemsize
    most_tiles = (min(groups, rows) + rows // tile.rows) * triton.cdiv(outputs, tile.columns)
    programs = INTERPRETED_PROGRAMS
    if x.is_cuda:
        programs = tile.programs * torch.cuda.get_device_properties(x.device).multi_processor_count
    weights = TensorDescriptor.from_tensor(weights_XNK.view(-1, inputs), [tile.columns, depth])
    _grouped_product_kernel[(min(programs, most_tiles),)](
        x, x_scale, weights, weight_scale_XN, bias_XN, order_R, starts, factors_R, out, groups, out_factor, outputs,
        inputs, choices or 0, alpha, limit, triton.next_power_of_2(groups), tile.rows, tile.columns, depth, tile.stages,
        IN_INTERPRETER,
        num_warps=tile.warps,
    )  # fmt: skip
    return out
