"""Paged attention on the GPU in Triton, one query token a sequence (decode). For prompts see ``prompt_attention``.

Keys and values lie in pages, k_cache and v_cache [P, K, S, E], e4m3 or bf16; stored values are ``k / k_scale`` and
``v / v_scale``. Slots that no sequence has reached are never read.
Softmax is computed in fp32 in powers of two. e4m3 keys and values enter the products as fp16, in which they are exact;
queries too become fp16 (exact within its range) and softmax weights fp16, or bf16 with a bf16 cache. e4m3 outputs are
``out / out_scale``, saturated at 448. A query may see only the last keys, a window, whose older pages are not read; and
a sink, which is a key of a given score without a value.

Shape letters as in ``ops``: T tokens, H query heads, K key/value heads, G = H / K <= 16, E head size, B sequences,
P pages, S tokens per page, W pages per table row. Kernels are not specialised on numbers that change from
step to step, so that no step compiles.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatoken.engine.memory import PARTIAL_RESULTS
from megatoken.engine.ops import nvrtc
from megatoken.engine.ops.fused import let_next_start
from megatoken.engine.schemes.fp8_weight import E4M3_MAX

MAX_SPLITS = 32
"""Most pieces of one sequence."""
SHORTEST_SPLIT = 128
"""Fewest tokens for a program: its partial sums then move a quarter of the bytes of its keys and values."""
RUNNING_PROGRAMS = 660
"""Decode programs that one H200 runs at once: 132 multiprocessors x 5."""
_NEVER_SPLIT = 2**31 - 1

_E4M3_MAX = tl.constexpr(E4M3_MAX)
_FP16_MAX = tl.constexpr(65504.0)
LOG2_E = tl.constexpr(math.log2(math.e))
IN_INTERPRETER = triton.knobs.runtime.interpret


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How ``decode_attention`` runs. Changes the result by rounding only.

    Attributes:
        block_tokens: tokens per tile.
        warps: warps per program.
        stages: tiles in flight per program.
        e4m3_scores: with an e4m3 cache, multiply keys as e4m3 by a query split into two e4m3 terms (8 significant bits,
            what bf16 has), instead of converting keys to fp16. Meant for G > 8, where the conversion is slow.
        split_tokens: tokens per program, a multiple of ``block_tokens``; None to choose from the lengths.
        registers: most of a thread; None to leave them to the compiler.
    """

    block_tokens: int = 64
    warps: int = 4
    stages: int = 2
    e4m3_scores: bool = False
    split_tokens: int | None = None
    registers: int | None = None


FEW_PROGRAMS = DecodeConfig(e4m3_scores=True)
MANY_PROGRAMS = DecodeConfig(32, 1, 2, registers=128)
"""One warp waits for no other: at the clock that the power limit leaves, such programs read about a tenth faster."""
MANY = 3072
"""Programs from which on one warp each is faster: about twice as many as one H200 then runs at once."""


def decode_config(sequences: int, kv_heads: int) -> DecodeConfig:
    """The faster of the two for so many sequences."""
    return MANY_PROGRAMS if sequences * kv_heads >= MANY else FEW_PROGRAMS


# Kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def cache_rows(table, tokens, live, kv_head, K: tl.constexpr, S: tl.constexpr):
    """Index of the tokens' keys and values, in rows of E elements; 64 bits, as a cache may hold more than 2^31."""
    page = tl.load(table + tokens // S, mask=live, other=0)
    return page.to(tl.int64) * (K * S) + (kv_head * S + tokens % S)


@triton.jit
def _e4m3_pairs(pairs, INTERPRETED: tl.constexpr):
    """16-bit words of two e4m3 values -> the even (low) and the odd (high) values as fp16.

    A V tile enters the product transposed, and the tensor cores' transposing load moves 16-bit words. So V is loaded as
    words and split in registers: one byte shuffle and two conversions for four values.
    """
    if INTERPRETED:
        words = pairs.to(tl.uint16, bitcast=True)
        even = (words & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        odd = (words >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        even, odd = tl.inline_asm_elementwise(
            """{
            .reg .b32 bytes;
            .reg .b16 evens, odds;
            prmt.b32 bytes, $2, 0, 0x3120;
            mov.b32 {evens, odds}, bytes;
            cvt.rn.f16x2.e4m3x2 $0, evens;
            cvt.rn.f16x2.e4m3x2 $1, odds;
            }""",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return even, odd


@triton.jit
def to_fp16(x):
    """Saturated; NaN stays NaN."""
    return tl.clamp(x.to(tl.float32), -_FP16_MAX, _FP16_MAX, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)


@triton.jit
def store(pointers, values, mask):
    """In the pointers' dtype; e4m3 saturated, NaN stays NaN."""
    dtype: tl.constexpr = pointers.dtype.element_ty
    if dtype == tl.float8e4nv:
        values = tl.clamp(values, -_E4M3_MAX, _E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
    tl.store(pointers, values.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["table_stride", "split_tokens"], do_not_specialize_on_alignment=["table", "lengths"])
def _decode_kernel(
    q, k_cache, v_cache, table, lengths, sinks, out, partial, score_scale, value_scale, table_stride, split_tokens,
    H: tl.constexpr, K: tl.constexpr, S: tl.constexpr, E: tl.constexpr, WINDOW: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, E4M3_SCORES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    # Operands are swapped: tokens are on the long side of every product, the few grouped queries on the short side,
    # keys [N, E] x queries [E, G], values^T [E, N] x weights [N, G].
    E4M3: tl.constexpr = k_cache.dtype.element_ty == tl.float8e4nv
    FLOAT: tl.constexpr = tl.float16 if E4M3 else (tl.float32 if INTERPRETED else tl.bfloat16)
    G: tl.constexpr = H // K
    program, split = tl.program_id(0), tl.program_id(1)
    sequence, kv_head = program // K, program % K
    length = tl.load(lengths + sequence)
    first = tl.maximum(length - WINDOW, 0) if WINDOW else 0
    begin = first + split * split_tokens
    if begin >= tl.maximum(length, 1):  # the first program of an empty sequence goes on, to write zeros
        return
    end = begin + tl.minimum(length - begin, split_tokens)

    e = tl.arange(0, BLOCK_E)
    n = tl.arange(0, BLOCK_N)
    column = tl.arange(0, 2 * BLOCK_G if E4M3_SCORES else BLOCK_G)
    head = column % BLOCK_G
    q_EG = tl.load(
        q + (program * G + head)[None, :] * E + e[:, None], mask=(head < G)[None, :] & (e < E)[:, None], other=0.0
    )
    if E4M3_SCORES:
        # A power of two brings the largest query to 224..448 without rounding; the remainder after the first term's
        # 4 bits, times 16, is the second term.
        q_EG = q_EG.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(q_EG)), 1e-30)
        q_scale = tl.exp2(tl.ceil(tl.log2(largest / _E4M3_MAX)))
        q_EG /= q_scale
        score_scale *= q_scale
        coarse_EG = q_EG.to(tl.float8e4nv).to(tl.float32)
        q_EG = tl.where((column < BLOCK_G)[None, :], coarse_EG, (q_EG - coarse_EG) * 16.0).to(tl.float8e4nv)
    elif E4M3:
        q_EG = to_fp16(q_EG)
    else:
        q_EG = q_EG.to(FLOAT)

    g = tl.arange(0, BLOCK_G)
    highest = tl.full([BLOCK_G], float("-inf"), tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + kv_head * G + g, mask=g < G, other=0.0) * LOG2_E
        highest = tl.where(split == 0, sink, highest)
    weight_NG = tl.zeros([BLOCK_N, BLOCK_G], tl.float32)  # summed over tokens only once, at the end
    if E4M3:
        pair = tl.arange(0, BLOCK_E // 2)
        even_EG = tl.zeros([BLOCK_E // 2, BLOCK_G], tl.float32)
        odd_EG = tl.zeros([BLOCK_E // 2, BLOCK_G], tl.float32)
    else:
        sum_EG = tl.zeros([BLOCK_E, BLOCK_G], tl.float32)
    table += sequence.to(tl.int64) * table_stride
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        token = start + n
        live = token < end
        row = cache_rows(table, token, live, kv_head, K, S)[:, None]
        k_NE = tl.load(k_cache + row * E + e[None, :], mask=live[:, None] & (e < E)[None, :], other=0.0)
        if E4M3:
            v_NE = tl.load(
                v_cache.to(tl.pointer_type(tl.int16), bitcast=True) + row * (E // 2) + pair[None, :],
                mask=live[:, None] & (pair < E // 2)[None, :],
                other=0,
            )
        else:
            v_NE = tl.load(v_cache + row * E + e[None, :], mask=live[:, None] & (e < E)[None, :], other=0.0)

        if E4M3_SCORES:
            terms = tl.reshape(tl.dot(k_NE, q_EG), (BLOCK_N, 2, BLOCK_G))
            coarse_NG, fine_NG = tl.split(tl.permute(terms, (0, 2, 1)))
            score_NG = coarse_NG + fine_NG * 0.0625
        else:
            score_NG = tl.dot(k_NE.to(FLOAT), q_EG)
        score_NG = tl.where(live[:, None], score_NG, float("-inf"))
        higher = tl.maximum(highest, tl.max(score_NG, axis=0) * score_scale)
        fade = tl.exp2(highest - higher)[None, :]
        p_NG = tl.exp2(score_NG * score_scale - higher[None, :])
        weight_NG = weight_NG * fade + p_NG
        p_NG = p_NG.to(FLOAT)
        if E4M3:
            v_even, v_odd = _e4m3_pairs(tl.trans(v_NE), INTERPRETED)
            even_EG = tl.dot(v_even, p_NG, even_EG * fade)
            odd_EG = tl.dot(v_odd, p_NG, odd_EG * fade)
        else:
            sum_EG = tl.dot(tl.trans(v_NE.to(FLOAT)), p_NG, sum_EG * fade)
        highest = higher

    if E4M3:
        sum_EG = tl.reshape(tl.permute(tl.join(even_EG, odd_EG), (0, 2, 1)), (BLOCK_E, BLOCK_G))
    total = tl.sum(weight_NG, axis=0)
    if sinks is not None:
        total += tl.where(split == 0, tl.exp2(sink - highest), 0.0)
    mask = (g < G)[:, None] & (e < E)[None, :]
    if length - first > split_tokens:
        row = (program.to(tl.int64) * tl.num_programs(1) + split) * G + g
        rows = tl.num_programs(0).to(tl.int64) * tl.num_programs(1) * G
        tl.store(partial + row[:, None] * E + e[None, :], tl.trans(sum_EG), mask=mask)
        tl.store(partial + rows * E + row, highest, mask=g < G)
        tl.store(partial + rows * (E + 1) + row, total, mask=g < G)
    else:
        sum_EG *= (value_scale / tl.maximum(total, 1e-30))[None, :]
        store(out + (program * G + g)[:, None] * E + e[None, :], tl.trans(sum_EG), mask)


@triton.jit(do_not_specialize=["split_tokens", "splits"], do_not_specialize_on_alignment=["lengths"])
def _merge_kernel(
    partial, lengths, out, value_scale, split_tokens, splits,
    H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, WINDOW: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAPS)
    G: tl.constexpr = H // K
    row = tl.program_id(0)
    length = tl.load(lengths + row // H)
    if WINDOW:
        length = tl.minimum(length, WINDOW)
    if length <= split_tokens:
        return
    split = tl.arange(0, BLOCK_SPLITS)
    live = split * split_tokens < length
    e = tl.arange(0, BLOCK_E)
    at = ((row // G).to(tl.int64) * splits + split) * G + row % G
    rows = tl.num_programs(0).to(tl.int64) * splits
    highest = tl.load(partial + rows * E + at, mask=live, other=float("-inf"))
    total = tl.load(partial + rows * (E + 1) + at, mask=live, other=0.0)
    sums = tl.load(partial + at[:, None] * E + e[None, :], mask=live[:, None] & (e < E)[None, :], other=0.0)
    share = tl.exp2(highest - tl.max(highest))
    value = tl.sum(sums * share[:, None], axis=0) * (value_scale / tl.sum(total * share))
    store(out + row.to(tl.int64) * E + e, value, e < E)


# Functions --------------------------------------------------------------------------------------------------------


def check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    out_scale: float | None,
    sinks_H: Tensor | None,
    *int32s: Tensor,
) -> None:
    """Raise ValueError if the kernels do not support these queries, caches, output, page table and lengths."""
    _, kv_heads, page_size, head_dim = k_cache.shape
    heads = q.shape[1]
    fits = (
        q.dtype == torch.bfloat16
        and k_cache.dtype == v_cache.dtype
        and k_cache.dtype in (torch.float8_e4m3fn, torch.bfloat16)
        and out.dtype == (torch.bfloat16 if out_scale is None else torch.float8_e4m3fn)
        and k_cache.shape == v_cache.shape
        and out.shape == q.shape
        and q.shape[2] == head_dim
        and heads % kv_heads == 0
        and heads <= 16 * kv_heads
        and head_dim % 16 == 0
        and head_dim <= 256
        and page_size in (16, 32, 64, 128)
        and (sinks_H is None or (sinks_H.dtype == torch.float32 and sinks_H.shape == (heads,)))
        and all(tensor.is_contiguous() for tensor in (q, k_cache, v_cache, out))
        and all(tensor.dtype == torch.int32 and tensor.stride(-1) == 1 for tensor in int32s)
    )
    if not fits:
        named = {"queries": q, "k_cache": k_cache, "v_cache": v_cache, "out": out}
        named |= {f"index {number}": tensor for number, tensor in enumerate(int32s)}
        seen = ", ".join(f"{name} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in named.items())
        raise ValueError(
            "attention expects contiguous bf16 queries [T, H, E] and e4m3 or bf16 caches [P, K, S, E] with S 16, "
            "32, 64 or 128, E a multiple of 16 up to 256, H / K up to 16, an output like the queries (e4m3 with "
            f"out_scale), fp32 sinks [H], int32 indices; got {seen}, out_scale {out_scale}"
        )


def split_tokens(
    kv_heads: int, max_length: int, total_tokens: int, block_tokens: int = 64, *, sequences: int = 1
) -> int:
    """Tokens per decode program: few enough that all programs end at about the same time, enough to be efficient.

    A piece is about half of the work of one running program. A program finishes a sequence that fits into one piece; a
    second kernel merges the pieces of the others.

    Returns:
        A multiple of ``block_tokens``, or a number above any length if no sequence needs splitting.
    """
    share = total_tokens * kv_heads // RUNNING_PROGRAMS
    splits = min(MAX_SPLITS, PARTIAL_RESULTS // max(sequences, 1) or 1)
    piece = max(share // 2, SHORTEST_SPLIT, -(-max_length // splits))
    piece = -(-piece // block_tokens) * block_tokens
    return piece if piece < max_length else _NEVER_SPLIT


def decode_attention(
    q_BHE: Tensor,  # bf16 [B, H, E]
    k_cache: Tensor,  # e4m3 or bf16 [P, K, S, E], like v_cache
    v_cache: Tensor,  # like k_cache
    page_table_BW: Tensor,  # int32 [B, W]; entries past a sequence's last page are not read. Rows may be strided.
    lengths_B: Tensor,  # int32 [B], visible keys; 0 gives zeros
    out_BHE: Tensor,  # written: bf16 [B, H, E], or e4m3 with ``out_scale``
    *,
    softmax_scale: float,  # positive; usually E ** -0.5
    max_length: int,  # at least the largest length, known to the host, which need not wait for the device
    total_tokens: int,  # about the sum of lengths, for the splitting
    k_scale: float = 1.0,  # positive
    v_scale: float = 1.0,  # any
    out_scale: float | None = None,  # None for a bf16 output
    window: int | None = None,  # the last keys of each sequence, which alone are seen; None for all
    sinks_H: Tensor | None = None,  # fp32 [H], of each head a score (scaled already) of one more key, whose value is 0
    config: DecodeConfig | None = None,  # tile sizes and splitting; None for ``decode_config``'s
) -> Tensor:
    """One query a sequence against all its cached keys, or those in its window. Longest sequences first are fastest.

    ``out[b, h] = softmax(q[b, h] . k[0 .. length_b] x softmax_scale x k_scale) v[0 .. length_b] x v_scale / out_scale``

    Returns:
        out_BHE.

    Raises:
        ValueError: another shape, dtype or layout.
    """
    check(q_BHE, k_cache, v_cache, out_BHE, out_scale, sinks_H, page_table_BW, lengths_B)
    sequences, heads, head_dim = q_BHE.shape
    _, kv_heads, page_size, _ = k_cache.shape
    group = heads // kv_heads
    config = config or decode_config(sequences, kv_heads)
    if window is not None:
        max_length, total_tokens = min(max_length, window), min(total_tokens, sequences * window)
    piece = config.split_tokens or split_tokens(
        kv_heads, max_length, total_tokens, config.block_tokens, sequences=sequences
    )
    splits = -(-max_length // piece) or 1
    if splits > MAX_SPLITS:
        raise ValueError(f"{max_length} tokens in pieces of {piece} are more than {MAX_SPLITS} pieces")
    if splits == 1:
        piece = _NEVER_SPLIT
    rows = sequences * heads * splits if splits > 1 else 0
    partial = torch.empty(rows * (head_dim + 2), dtype=torch.float32, device=q_BHE.device)
    value_scale = v_scale / (out_scale or 1.0)
    block_e = triton.next_power_of_2(head_dim)
    _decode_kernel[(sequences * kv_heads, splits)](
        q_BHE, k_cache, v_cache, page_table_BW, lengths_B, sinks_H, out_BHE, partial,
        softmax_scale * k_scale * math.log2(math.e), value_scale, page_table_BW.stride(0), piece,
        H=heads, K=kv_heads, S=page_size, E=head_dim, WINDOW=window or 0, BLOCK_E=block_e,
        BLOCK_G=8 if group <= 8 else 16, BLOCK_N=config.block_tokens, STAGES=config.stages,
        E4M3_SCORES=config.e4m3_scores and k_cache.itemsize == 1, INTERPRETED=IN_INTERPRETER, num_warps=config.warps,
        maxnreg=config.registers,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(sequences * heads,)](
            partial, lengths_B, out_BHE, value_scale, piece, splits,
            H=heads, K=kv_heads, E=head_dim, WINDOW=window or 0, BLOCK_E=block_e, BLOCK_SPLITS=MAX_SPLITS,
            OVERLAPS=nvrtc.overlaps(out_BHE.device, sequences),
        )  # fmt: skip
    return out_BHE
