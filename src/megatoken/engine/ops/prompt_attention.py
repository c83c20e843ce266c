"""Attention of prompt chunks over paged keys and values on the GPU, in Triton.

Caches, dtypes, precision and shape letters are those of ``paged_attention``; C is chunks.

A tile of keys is read in one of two ways. Paged: every program looks up the pages and converts e4m3 to fp16, although
all tokens of a prompt read the same keys. Gathered: one pass copies the pages of each sequence into a contiguous 16-bit
buffer, whose tiles the bulk copy engine loads, three in flight. For a long context that pass is cheap. With a window
few keys are read, always paged.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megatoken.engine.memory import GATHERED_HEAD_SIZES, gathered_tokens, gathers_contexts
from megatoken.engine.ops.paged_attention import IN_INTERPRETER, LOG2_E, cache_rows, check, store, to_fp16


@dataclass(frozen=True, slots=True)
class ChunkConfig:
    """How ``chunk_attention`` runs. Changes the result by rounding only."""

    block_rows: int = 128  # query tokens x heads per program
    block_tokens: int = 64  # keys per tile
    warps: int = 8  # warps per program
    stages: int = 2  # tiles in flight per program
    gathered: bool = False  # gather keys and values first, see above; the head size must be 64 or 128


PAGED_CHUNKS = ChunkConfig()
GATHERED_CHUNKS = ChunkConfig(block_tokens=128, stages=3, gathered=True)


@triton.jit(do_not_specialize=["table_stride", "capacity"], do_not_specialize_on_alignment=["table", "contexts"])
def _gather_kernel(
    k_cache, v_cache, table, contexts, k_out, v_out, table_stride, capacity,
    K: tl.constexpr, S: tl.constexpr, E: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # The rest of the last tile becomes zeros: a weight of zero times an unwritten value may be NaN.
    tile, kv_head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(contexts + chunk)
    if tile * BLOCK_N >= context:
        return
    token = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    live = token < context
    e = tl.arange(0, E)[None, :]
    row = cache_rows(table + chunk.to(tl.int64) * table_stride, token, live, kv_head, K, S)[:, None]
    at = ((chunk * K + kv_head).to(tl.int64) * capacity + token)[:, None] * E + e
    k_NE = tl.load(k_cache + row * E + e, mask=live[:, None], other=0.0)
    v_NE = tl.load(v_cache + row * E + e, mask=live[:, None], other=0.0)
    tl.store(k_out + at, k_NE.to(k_out.dtype.element_ty))
    tl.store(v_out + at, v_NE.to(v_out.dtype.element_ty))


@triton.jit
def _tiles(
    q_ME, highest, total, sum_ME, keys, values, table, first_row, begin, end, visible_M, score_scale, kv_head,
    K: tl.constexpr, S: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, MASKED: tl.constexpr, GATHERED: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    e = tl.arange(0, BLOCK_E)[None, :]
    n = tl.arange(0, BLOCK_N)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        token = start + n
        if GATHERED:
            k_NE = keys.load([first_row + start, 0]).to(q_ME.dtype)
            v_NE = values.load([first_row + start, 0]).to(q_ME.dtype)
        else:
            live = token < end
            row = cache_rows(table, token, live, kv_head, K, S)[:, None]
            mask = live[:, None] & (e < E) if MASKED else e < E
            k_NE = tl.load(keys + row * E + e, mask=mask, other=0.0).to(q_ME.dtype)
            v_NE = tl.load(values + row * E + e, mask=mask, other=0.0).to(q_ME.dtype)
        score_MN = tl.dot(q_ME, tl.trans(k_NE))
        if MASKED:
            seen = token[None, :] < visible_M[:, None]
            if WINDOW:
                seen &= token[None, :] >= visible_M[:, None] - WINDOW
            score_MN = tl.where(seen, score_MN, float("-inf"))
        higher = tl.maximum(highest, tl.max(score_MN, axis=1) * score_scale)
        base = tl.where(higher == float("-inf"), 0.0, higher) if WINDOW else higher  # of rows that see no key yet
        fade = tl.exp2(highest - base)
        p_MN = tl.exp2(score_MN * score_scale - base[:, None])
        total = total * fade + tl.sum(p_MN, axis=1)
        sum_ME = tl.dot(p_MN.to(q_ME.dtype), v_NE, sum_ME * fade[:, None])
        highest = higher
    return highest, total, sum_ME


@triton.jit(
    do_not_specialize=["table_stride", "capacity"], do_not_specialize_on_alignment=["table", "starts", "contexts"]
)
def _chunk_kernel(
    q, keys, values, table, starts, contexts, sinks, out, score_scale, value_scale, table_stride, capacity,
    H: tl.constexpr, K: tl.constexpr, S: tl.constexpr, E: tl.constexpr, WINDOW: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, E4M3: tl.constexpr, GATHERED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    # One program serves all G query heads of a key/value head for BLOCK_M // G tokens, so a key is read once for all.
    G: tl.constexpr = H // K
    ROWS: tl.constexpr = BLOCK_M // G
    kv_head, chunk = tl.program_id(0), tl.program_id(1)
    first = (tl.num_programs(2) - 1 - tl.program_id(2)) * ROWS  # the last tokens see most keys, so they start first
    begin = tl.load(starts + chunk)
    rows = tl.load(starts + chunk + 1) - begin
    if first >= rows:
        return
    before = tl.load(contexts + chunk) - rows
    m = tl.arange(0, BLOCK_M)
    e = tl.arange(0, BLOCK_E)
    row = first + m // G
    at = ((begin + row).to(tl.int64) * H + kv_head * G + m % G)[:, None] * E + e[None, :]
    mask = ((m < ROWS * G) & (row < rows))[:, None] & (e < E)[None, :]
    q_ME = tl.load(q + at, mask=mask, other=0.0)
    if E4M3:
        q_ME = to_fp16(q_ME)
    elif INTERPRETED:
        q_ME = q_ME.to(tl.float32)

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:
        highest = tl.load(sinks + kv_head * G + m % G) * LOG2_E
        total += 1.0
    sum_ME = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    table += chunk.to(tl.int64) * table_stride
    first_row = (chunk * K + kv_head) * capacity
    visible = before + row + 1
    end = before + tl.minimum(first + ROWS, rows)
    if WINDOW:
        unmasked = tl.maximum(before + first + 1 - WINDOW, 0)  # no row sees earlier keys
    else:
        unmasked = (before + first + 1) // BLOCK_N * BLOCK_N  # every row sees these keys
        highest, total, sum_ME = _tiles(
            q_ME, highest, total, sum_ME, keys, values, table, first_row, 0, unmasked, visible, score_scale, kv_head,
            K, S, E, BLOCK_E, BLOCK_N, STAGES, False, GATHERED, 0,
        )  # fmt: skip
    highest, total, sum_ME = _tiles(
        q_ME, highest, total, sum_ME, keys, values, table, first_row, unmasked, end, visible, score_scale, kv_head,
        K, S, E, BLOCK_E, BLOCK_N, STAGES, True, GATHERED, WINDOW,
    )  # fmt: skip
    store(out + at, sum_ME * (value_scale / total)[:, None], mask)


def chunk_attention(
    q_THE: Tensor,  # bf16 [T, H, E]; chunk c has tokens chunk_starts[c] .. chunk_starts[c + 1] - 1.
    k_cache: Tensor,  # e4m3 or bf16 [P, K, S, E], like v_cache
    v_cache: Tensor,  # like k_cache
    page_table_CW: Tensor,  # int32 [C, W]. Rows may be strided.
    chunk_starts_C1: Tensor,  # int32 [C + 1], not decreasing
    contexts_C: Tensor,  # int32 [C], keys visible to the chunk's last token, at least the chunk's tokens
    out_THE: Tensor,  # written for the chunks' tokens: bf16 [T, H, E], or e4m3 with ``out_scale``
    *,
    softmax_scale: float,  # positive; usually E ** -0.5
    longest_chunk: int,  # at least the tokens of the longest chunk
    # the largest of ``contexts_C``; at most ``PAGED_CONTEXT`` in a recorded step, whose contexts vary
    max_context: int,
    k_scale: float = 1.0,  # positive
    v_scale: float = 1.0,  # any
    out_scale: float | None = None,  # None for a bf16 output
    window: int | None = None,  # how many keys a token sees, itself included; None for all
    sinks_H: Tensor | None = None,  # fp32 [H], of each head a score (scaled already) of one more key, whose value is 0
    config: ChunkConfig | None = None,  # tile sizes; None to choose
) -> Tensor:
    """Causal attention of prompt chunks whose keys and values are already in the cache.

    Token t of the N tokens of chunk c sees keys 0 .. contexts[c] - N + t, or the last of these.

    Returns:
        out_THE.

    Raises:
        ValueError: another shape, dtype or layout.
    """
    check(q_THE, k_cache, v_cache, out_THE, out_scale, sinks_H, page_table_CW, chunk_starts_C1, contexts_C)
    _, heads, head_dim = q_THE.shape
    _, kv_heads, page_size, _ = k_cache.shape
    chunks, e4m3 = len(contexts_C), k_cache.itemsize == 1
    if config is None:
        gathers = window is None and gathers_contexts(heads // kv_heads, chunks, longest_chunk, max_context)
        config = ways(head_dim, q_THE.device)[-1 if gathers else 0]
    keys, values, capacity = k_cache, v_cache, 0
    if config.gathered:
        capacity = gathered_tokens(max_context)
        shape, dtype = (chunks * kv_heads * capacity, head_dim), torch.float16 if e4m3 else k_cache.dtype
        keys, values = (torch.empty(shape, dtype=dtype, device=k_cache.device) for _ in "kv")
        _gather_kernel[(capacity // config.block_tokens, kv_heads, chunks)](
            k_cache, v_cache, page_table_CW, contexts_C, keys, values, page_table_CW.stride(0), capacity,
            K=kv_heads, S=page_size, E=head_dim, BLOCK_N=config.block_tokens,
        )  # fmt: skip
        keys, values = (TensorDescriptor.from_tensor(side, [config.block_tokens, head_dim]) for side in (keys, values))
    tiles = -(-longest_chunk // (config.block_rows // (heads // kv_heads)))
    _chunk_kernel[(kv_heads, chunks, tiles)](
        q_THE, keys, values, page_table_CW, chunk_starts_C1, contexts_C, sinks_H, out_THE,
        softmax_scale * k_scale * math.log2(math.e), v_scale / (out_scale or 1.0), page_table_CW.stride(0), capacity,
        H=heads, K=kv_heads, S=page_size, E=head_dim, WINDOW=window or 0, BLOCK_E=triton.next_power_of_2(head_dim),
        BLOCK_M=config.block_rows, BLOCK_N=config.block_tokens, STAGES=config.stages, E4M3=e4m3,
        GATHERED=config.gathered, INTERPRETED=IN_INTERPRETER, num_warps=config.warps,
    )  # fmt: skip
    return out_THE


def ways(head_dim: int, device: torch.device) -> list[ChunkConfig]:
    """Configurations that ``chunk_attention`` chooses from. Gathering was tested, and is faster, on Hopper only."""
    gathers = head_dim in GATHERED_HEAD_SIZES and device.type == "cuda" and _is_hopper(device)
    return [PAGED_CHUNKS, GATHERED_CHUNKS] if gathers else [PAGED_CHUNKS]


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9
