"""Triton kernels for the operations between products and attention, each one pass over memory.

Kernels compute in fp32 and round once, when they store. Scaled e4m3 means ``value / scale``, saturated at 448, computed
as ``value * (1 / scale)``; NaN stays NaN. Tensors are contiguous; shape letters as in ``ops``, with L positions, F
feed-forward size and S, in cache shapes, tokens per page.

Kernels are not specialised on pointers into a step's packed buffer or on numbers that change from step to step, so that
no step compiles. Keyword arguments after ``*`` tune a launch and change results by rounding only.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatoken.engine.ops import nvrtc
from megatoken.engine.schemes.fp8_weight import E4M3_MAX

_E4M3_MAX = tl.constexpr(E4M3_MAX)
_SMALLEST_SCALE = tl.constexpr(1e-12)
_MINUS_LOG2_E = tl.constexpr(-math.log2(math.e))
RUN = tl.constexpr(8)
"""Consecutive elements of a thread, for every type: 16 bytes of bf16, 8 of e4m3. A wider run for e4m3 only would move
each tile through shared memory, from the layout of the loads to that of the stores."""


def require_contiguous(*tensors: Tensor | None) -> None:
    """Raise ValueError if a tensor is not contiguous; None is allowed."""
    for tensor in tensors:
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"expected contiguous tensors, got shape {tuple(tensor.shape)}, strides {tensor.stride()}")


@triton.jit
def let_next_start(OVERLAPS: tl.constexpr):
    """Let the next kernel start before this one has ended; that kernel must wait for this one's results itself."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()


# Residual add, RMSNorm, quantise ----------------------------------------------------------------------------------


@triton.jit
def saturate(x):
    """fp32 within the range of e4m3; NaN stays."""
    return tl.clamp(x, -_E4M3_MAX, _E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _row_scale(largest):
    return tl.maximum(largest / _E4M3_MAX, _SMALLEST_SCALE)


@triton.jit(do_not_specialize=["scale"])
def _add_rms_norm_kernel(
    delta, residual, weight, scale, out, out_scale, epsilon,
    D: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    column = tl.max_contiguous(tl.arange(0, BLOCK), RUN)
    inside = column < D
    at = row * D + column
    x = tl.load(residual + at, mask=inside, other=0.0)
    if delta is not None:
        x = (x.to(tl.float32) + tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(residual + at, x, mask=inside)
    x = x.to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x) / D + epsilon)
    # The weight is loaded late: held during the reduction, its registers would halve the occupancy.
    y = x * factor * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if scale is not None:
        y = saturate(y * (1.0 / tl.load(scale)))
    if out_scale is not None:
        row_scale = _row_scale(tl.max(tl.abs(y)))
        tl.store(out_scale + row, row_scale)
        y = saturate(y * (1.0 / row_scale))
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


def _launch_add_rms_norm(
    delta_TD: Tensor | None,
    residual_TD: Tensor,
    weight_D: Tensor,
    epsilon: float,
    scale: Tensor | None,
    out: Tensor,
    out_scale: Tensor | None,
    warps: int | None,
) -> None:
    require_contiguous(delta_TD, residual_TD, weight_D, out)
    rows, hidden = residual_TD.shape
    block = triton.next_power_of_2(hidden)
    _add_rms_norm_kernel[(rows,)](
        delta_TD, residual_TD, weight_D, scale, out, out_scale, float(epsilon), hidden, block,
        nvrtc.overlaps(out.device, rows), num_warps=warps or min(max(block // 1024, 1), 16),
    )  # fmt: skip


def add_rms_norm(
    delta_TD: Tensor | None,  # bf16 [T, D], or None to leave the residual unchanged
    residual_TD: Tensor,  # bf16 [T, D]; the sum is rounded to bf16 before it is normalised
    weight_D: Tensor,  # bf16 or fp32 [D], D up to 16,384
    epsilon: float,  # added to the mean square
    scale: Tensor | None = None,  # fp32, one element: the result is e4m3 of ``y / scale``. None: the result is bf16.
    *,
    warps: int | None = None,  # per program; by default one for 1,024 columns
) -> Tensor:
    """``residual += delta`` in place, then RMSNorm of the sum.

    Returns:
        e4m3 or bf16 [T, D].
    """
    dtype = residual_TD.dtype if scale is None else torch.float8_e4m3fn
    out = torch.empty(residual_TD.shape, dtype=dtype, device=residual_TD.device)
    _launch_add_rms_norm(delta_TD, residual_TD, weight_D, epsilon, scale, out, None, warps)
    return out


def _empty_rows(rows: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """e4m3 values and a scale for each row."""
    values = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=device)
    return values, torch.empty((rows, 1), dtype=torch.float32, device=device)


def add_rms_norm_rows(
    delta_TD: Tensor | None, residual_TD: Tensor, weight_D: Tensor, epsilon: float, *, warps: int | None = None
) -> tuple[Tensor, Tensor]:
    """Like ``add_rms_norm``, with one scale per token, which takes the token's largest magnitude to 448.

    Returns:
        e4m3 [T, D] and fp32 scales [T, 1].
    """
    values, scale_T1 = _empty_rows(len(residual_TD), residual_TD.shape[1], residual_TD.device)
    _launch_add_rms_norm(delta_TD, residual_TD, weight_D, epsilon, None, values, scale_T1, warps)
    return values, scale_T1


# SiLU, product, quantise ------------------------------------------------------------------------------------------


@triton.jit
def _silu_times(gate, up):
    return gate / (1.0 + tl.exp2(gate * _MINUS_LOG2_E)) * up


@triton.jit
def _load_silu_mul(gate_up, column, F: tl.constexpr):
    inside = column < F
    gate = tl.load(gate_up + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + F + column, mask=inside, other=0.0).to(tl.float32)
    return _silu_times(gate, up)


@triton.jit(do_not_specialize=["scale"])
def _silu_mul_kernel(gate_up, scale, out, F: tl.constexpr, BLOCK: tl.constexpr):
    blocks: tl.constexpr = (F + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    column = program % blocks * BLOCK + tl.max_contiguous(tl.arange(0, BLOCK), RUN)
    y = _load_silu_mul(gate_up + row * (2 * F), column, F)
    if scale is not None:
        y = saturate(y * (1.0 / tl.load(scale)))
    tl.store(out + row * F + column, y.to(out.dtype.element_ty), mask=column < F)


@triton.jit(do_not_specialize=["scale"])
def _silu_mul_interleaved_kernel(
    gate_up, scale, out,
    F: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, FEATURES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Pairs of a gate and its up, those of ``LANES`` runs of ``FEATURES`` neighbouring features in turn."""
    let_next_start(OVERLAPS)
    blocks: tl.constexpr = (F + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    column = program % blocks * BLOCK + tl.arange(0, BLOCK)
    pair = program % blocks * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
    both = tl.load(gate_up + row * (2 * F) + pair, mask=pair < 2 * F, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(both, (BLOCK, 2)))
    y = _silu_times(gate, up)
    if scale is not None:
        y = saturate(y * (1.0 / tl.load(scale)))
    tiles: tl.constexpr = BLOCK // (LANES * FEATURES)
    y = tl.permute(tl.reshape(y.to(out.dtype.element_ty), (tiles, FEATURES, LANES)), (0, 2, 1))
    tl.store(out + row * F + column, tl.reshape(y, (BLOCK,)), mask=column < F)


@triton.jit
def _silu_mul_rows_kernel(gate_up, out, out_scale, F: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    gate_up += row * (2 * F)
    lane = tl.max_contiguous(tl.arange(0, BLOCK), RUN)
    largest = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, F, BLOCK):
        largest = tl.maximum(largest, tl.abs(_load_silu_mul(gate_up, start + lane, F)))
    row_scale = _row_scale(tl.max(largest))
    tl.store(out_scale + row, row_scale)
    for start in range(0, F, BLOCK):
        column = start + lane
        y = saturate(_load_silu_mul(gate_up, column, F) * (1.0 / row_scale))
        tl.store(out + row * F + column, y.to(out.dtype.element_ty), mask=column < F)


def silu_mul(
    gate_up_T2F: Tensor,
    scale: Tensor | None = None,
    *,
    interleaved: tuple[int, int] | None = None,
    block: int = 2048,
    warps: int = 4,
) -> Tensor:
    """``silu(gate) * up``.

    Args:
        gate_up_T2F: bf16 [T, 2 F], gate in the first F columns.
        scale: fp32, one element: the result is e4m3 of ``y / scale``. None: the result is bf16.
        interleaved: (L, N): columns are pairs of a gate and its up instead, feature ``L N t + N l + n`` in the pair
            ``L N t + L n + l``; L N divides F and ``block``.
        block: columns per program.
        warps: per program.

    Returns:
        e4m3 or bf16 [T, F].
    """
    rows, width = gate_up_T2F.shape
    dtype = gate_up_T2F.dtype if scale is None else torch.float8_e4m3fn
    out = torch.empty((rows, width // 2), dtype=dtype, device=gate_up_T2F.device)
    require_contiguous(gate_up_T2F)
    grid = rows * triton.cdiv(width // 2, block)
    if interleaved is None:
        _silu_mul_kernel[(grid,)](gate_up_T2F, scale, out, width // 2, block, num_warps=warps)
    else:
        overlaps = nvrtc.overlaps(out.device, rows)
        _silu_mul_interleaved_kernel[(grid,)](
            gate_up_T2F, scale, out, width // 2, block, *interleaved, overlaps, num_warps=warps
        )
    return out


def silu_mul_rows(gate_up_T2F: Tensor, *, block: int = 4096, warps: int = 8) -> tuple[Tensor, Tensor]:
    """Like ``silu_mul``, with one scale per token, which takes the token's largest magnitude to 448.

    Reads each row twice, the second time from the cache.

    Returns:
        e4m3 [T, F] and fp32 scales [T, 1].
    """
    rows, width = gate_up_T2F.shape
    require_contiguous(gate_up_T2F)
    values, scale_T1 = _empty_rows(rows, width // 2, gate_up_T2F.device)
    # A row of an expert is narrow: most threads of a large block would be idle.
    block = min(block, triton.next_power_of_2(width // 2))
    warps = min(warps, max(block // 256, 1))
    _silu_mul_rows_kernel[(rows,)](gate_up_T2F, values, scale_T1, width // 2, block, num_warps=warps)
    return values, scale_T1


# Quantise ---------------------------------------------------------------------------------------------------------


@triton.jit
def _quantise_rows_kernel(x, out, out_scale, D: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.max_contiguous(tl.arange(0, BLOCK), RUN)
    inside = column < D
    y = tl.load(x + row * D + column, mask=inside, other=0.0).to(tl.float32)
    row_scale = _row_scale(tl.max(tl.abs(y)))
    tl.store(out_scale + row, row_scale)
    tl.store(out + row * D + column, saturate(y * (1.0 / row_scale)).to(out.dtype.element_ty), mask=inside)


def quantise_rows(x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """One scale per token, which takes the token's largest magnitude to 448, for tensors of other kernels.

    Args:
        x_TD: bf16 [T, D], D up to 16,384.

    Returns:
        e4m3 [T, D] and fp32 scales [T, 1].
    """
    require_contiguous(x_TD)
    rows, width = x_TD.shape
    block = triton.next_power_of_2(width)
    values, scale_T1 = _empty_rows(rows, width, x_TD.device)
    _quantise_rows_kernel[(rows,)](x_TD, values, scale_T1, width, block, num_warps=min(max(block // 1024, 1), 16))
    return values, scale_T1


# Rotary embedding and cache write ---------------------------------------------------------------------------------


@triton.jit
def _load_halves(head_row, inside, norm, epsilon, E: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """Both halves of some heads in fp32, normalised if ``norm`` is given."""
    half: tl.constexpr = E // 2
    first = tl.load(head_row, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(head_row + half, mask=inside, other=0.0).to(tl.float32)
    if norm is not None:
        pair = tl.arange(0, BLOCK_HALF)
        factor = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / E + epsilon)[:, None]
        first *= factor * tl.load(norm + pair, mask=pair < half, other=0.0).to(tl.float32)[None, :]
        second *= factor * tl.load(norm + half + pair, mask=pair < half, other=0.0).to(tl.float32)[None, :]
    return first, second


@triton.jit
def _rotate(first, second, cos, sin, position, E: tl.constexpr, BLOCK_HALF: tl.constexpr):
    # In the second half of a table's row neither function has a changed sign.
    pair = tl.arange(0, BLOCK_HALF)
    at = position * E + E // 2 + pair
    cos_row = tl.load(cos + at, mask=pair < E // 2, other=0.0).to(tl.float32)[None, :]
    sin_row = tl.load(sin + at, mask=pair < E // 2, other=0.0).to(tl.float32)[None, :]
    return first * cos_row - second * sin_row, second * cos_row + first * sin_row


@triton.jit
def _store_halves(head_row, first, second, inside, E: tl.constexpr):
    if head_row.dtype.element_ty.is_fp8():
        first = saturate(first)
        second = saturate(second)
    tl.store(head_row, first.to(head_row.dtype.element_ty), mask=inside)
    tl.store(head_row + E // 2, second.to(head_row.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["positions", "cache_slots"])
def _rotate_and_write_kernel(
    qkv, cos, sin, positions, cache_slots, k_cache, v_cache, k_factor, v_factor, q_norm, k_norm, epsilon, q_out,
    H: tl.constexpr, K: tl.constexpr, S: tl.constexpr, E: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    q_parts: tl.constexpr = (H + BLOCK_HEADS - 1) // BLOCK_HEADS
    kv_parts: tl.constexpr = (K + BLOCK_HEADS - 1) // BLOCK_HEADS
    parts: tl.constexpr = q_parts + 2 * kv_parts
    program = tl.program_id(0)
    token = (program // parts).to(tl.int64)
    part = program % parts
    qkv += token * ((H + 2 * K) * E)
    pair = tl.max_contiguous(tl.arange(0, BLOCK_HALF), RUN)[None, :]

    if part < q_parts:
        head = (part * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
        inside = (head < H) & (pair < E // 2)
        first, second = _load_halves(qkv + head * E + pair, inside, q_norm, epsilon, E, BLOCK_HALF)
        first, second = _rotate(first, second, cos, sin, tl.load(positions + token), E, BLOCK_HALF)
        _store_halves(q_out + token * (H * E) + head * E + pair, first, second, inside, E)
    else:
        head = ((part - q_parts) % kv_parts * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
        inside = (head < K) & (pair < E // 2)
        slot = tl.load(cache_slots + token)
        at = ((slot // S).to(tl.int64) * K * S + slot % S) * E + head * (S * E) + pair
        if part < q_parts + kv_parts:
            first, second = _load_halves(qkv + (H + head) * E + pair, inside, k_norm, epsilon, E, BLOCK_HALF)
            first, second = _rotate(first, second, cos, sin, tl.load(positions + token), E, BLOCK_HALF)
            _store_halves(k_cache + at, first * k_factor, second * k_factor, inside, E)
        else:
            first, second = _load_halves(qkv + (H + K + head) * E + pair, inside, None, epsilon, E, BLOCK_HALF)
            _store_halves(v_cache + at, first * v_factor, second * v_factor, inside, E)


def rotate_and_write(
    qkv_TN: Tensor,  # bf16 [T, (H + 2 K) E]: query heads, key heads, value heads
    cos_LE: Tensor,  # fp32 [L, E] from ``model.rotary_tables``; the second half of each row is read
    sin_LE: Tensor,  # the same for the signed sine
    positions_T: Tensor,  # int32 [T], below L
    cache_slots_T: Tensor,  # int32 [T], page * S + offset in the page; tokens without a sequence go to the dump page
    k_cache: Tensor,  # e4m3 or bf16 [P, K, S, E], written in place
    v_cache: Tensor,  # like ``k_cache``
    k_scale: float = 1.0,  # stored keys are ``k / k_scale``, saturated if the cache is e4m3
    v_scale: float = 1.0,  # the same for values
    q_norm_E: Tensor | None = None,  # RMSNorm weight of each query head before the rotation (Qwen3)
    k_norm_E: Tensor | None = None,  # the same for keys
    epsilon: float = 0.0,  # of these norms
    *,
    block_heads: int = 16,  # heads per program, a power of two
    warps: int = 4,  # per program; with fewer than 4 the tables go through shared memory
) -> Tensor:
    """Normalise queries and keys if there are norms, rotate them, and write keys and values into their pages.

    Returns:
        Rotated queries, bf16 [T, H, E].
    """
    _, kv_heads, page_size, head_dim = k_cache.shape
    rows, width = qkv_TN.shape
    heads = width // head_dim - 2 * kv_heads
    q_out = torch.empty((rows, heads, head_dim), dtype=qkv_TN.dtype, device=qkv_TN.device)
    require_contiguous(qkv_TN, cos_LE, sin_LE, k_cache, v_cache)
    parts = triton.cdiv(heads, block_heads) + 2 * triton.cdiv(kv_heads, block_heads)
    _rotate_and_write_kernel[(rows * parts,)](
        qkv_TN, cos_LE, sin_LE, positions_T, cache_slots_T, k_cache, v_cache, 1.0 / k_scale, 1.0 / v_scale,
        q_norm_E, k_norm_E, float(epsilon), q_out, heads, kv_heads, page_size, head_dim, block_heads,
        triton.next_power_of_2(head_dim // 2), num_warps=warps,
    )  # fmt: skip
    return q_out
