"""The CPU back end: weights packed once for oneDNN, elementwise work fused into the products, paged attention by page.

Decode attention without compiled kernels never gathers keys. It multiplies every page in use with the query of its
owner in one batched product, brings the small score rows into sequence order for the softmax, and returns to page order
for the values: pages are read in place, once, in any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import linear as plain_linear
from torch.nn.functional import rms_norm as fused_rms_norm
from torch.nn.functional import scaled_dot_product_attention, silu

from megatoken.engine.batch import StepArrays
from megatoken.engine.cache import DUMP_PAGE, LayerCache
from megatoken.engine.config import ModelConfig
from megatoken.engine.ops import NO_TOKEN, Ranks, native
from megatoken.engine.schemes import LinearScheme
from megatoken.engine.schemes.fp8_weight import Fp8Weight, quantise_rows

MASKED = -1e30
IN_PLACE_SHARE = 0.6
"""Below this share of live pages in the used range of the pool, copying them out is cheaper than reading the range."""

EXACT_TOKENS_FROM_BYTES = 1_000_000_000

_pointwise: Any = torch.ops.mkldnn._linear_pointwise


@dataclass(frozen=True, slots=True)
class Linear:
    """A packed weight; with e4m3 values (stored as bf16, in which they are exact) also fp32 ``scale``, [N] or [1]."""

    packed: Tensor
    bias: Tensor | None
    scale: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionIndex:
    """Maps between page order and sequence order for one step; int32 unless said otherwise.

    ``pool`` is the number of leading pages to pass over, or the ids of the pages to copy out first.
    """

    pool: int | Tensor
    owner_P: Tensor
    bias_PKS: Tensor
    score_rows: Tensor
    weight_rows: Tensor
    table_B_P: Tensor


@dataclass(frozen=True, slots=True)
class PageTable:
    """Sequences for the compiled attention, see ``native.attention``; int32."""

    pages_RP: Tensor
    lengths_R: Tensor
    starts: Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive prompt tokens of one sequence, which see its first ``context`` keys."""

    tokens: slice
    pages: Tensor
    context: int


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's tensors, see ``StepArrays``.

    The first ``decodes`` tokens attend through ``decode_index``, the others through ``chunks``; with compiled attention
    all count as decodes.
    """

    token_ids: Tensor
    positions: Tensor
    cache_slots: Tensor
    decodes: int
    decode_index: AttentionIndex | PageTable | None
    chunks: list[Chunk]
    samples: int
    sample_indices: Tensor
    sample_slots: Tensor
    sample_index: AttentionIndex | PageTable | None


def kernels() -> dict[str, Any]:
    """Whether kernels were compiled, and why if not."""
    return native.status()


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this machine's oneDNN takes packed weights of ``dtype``."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def pack_linear(weight: Tensor | Fp8Weight, bias_N: Tensor | None, scheme: LinearScheme) -> Linear:
    """Reorder into oneDNN's blocked layout, which suits any number of tokens.

    An fp8 weight is held exactly. Its input scale is not needed: the input of each token gets its own.
    """
    if isinstance(weight, Tensor):
        weight = scheme.quantise(weight)
    if isinstance(weight, Tensor):
        packed, scale = weight, None
    else:
        packed, scale = weight.values_ND.to(torch.bfloat16), weight.scale_N1.view(-1)
    if can_pack(packed.dtype):
        packed = torch.ops.mkldnn._reorder_linear_weight(packed, 32)
    return Linear(packed, bias_N, scale)


def pack_gated(gate_up: list[tuple[Tensor | Fp8Weight, Tensor | None]], scheme: LinearScheme) -> tuple[Linear, Linear]:
    """Two matrices, so that each product can fuse its part of the elementwise work."""
    gate, up = (pack_linear(weight, bias, scheme) for weight, bias in gate_up)
    return gate, up


def linear(x_TD: Tensor, linear: Linear, activation: str = "none") -> Tensor:
    """``activation(x W^T + b)``, activation "none" or "swish"."""
    if linear.scale is not None:
        return _linear_fp8(x_TD, linear, linear.scale, activation)
    if linear.packed.is_mkldnn:
        return _product(x_TD, linear.packed, linear.bias, activation)
    y_TN = plain_linear(x_TD, linear.packed, linear.bias)
    return silu(y_TN) if activation == "swish" else y_TN


def _product(x_TD: Tensor, packed: Tensor, bias_N: Tensor | None, activation: str) -> Tensor:
    y_TN: Tensor = _pointwise(x_TD, packed, bias_N, activation, [], "")
    return y_TN


def _product_and(x_TD: Tensor, other_TN: Tensor, linear: Linear, operation: str) -> Tensor:
    y_TN: Tensor = _pointwise.binary(x_TD, other_TN, linear.packed, linear.bias, operation)
    return y_TN


def _linear_fp8(x_TD: Tensor, linear: Linear, scale: Tensor, activation: str) -> Tensor:
    # e4m3 values are exact in bf16 and oneDNN accumulates in fp32, so this is the fp8 product, not an approximation.
    values, scale_T1 = quantise_rows(x_TD)
    x = values.to(torch.bfloat16)
    y = _product(x, linear.packed, None, "none") if linear.packed.is_mkldnn else plain_linear(x, linear.packed)
    y_TN = y.float() * (scale_T1 * scale)
    if linear.bias is not None:
        y_TN += linear.bias
    return (silu(y_TN) if activation == "swish" else y_TN).to(x_TD.dtype)


def linear_add(x_TD: Tensor, linear_: Linear, residual_TN: Tensor) -> Tensor:
    """``residual + x W^T + b`` in one product."""
    if linear_.scale is None and linear_.packed.is_mkldnn:
        return _product_and(x_TD, residual_TN, linear_, "add")
    return residual_TN + linear(x_TD, linear_)


def linear_add_norm(
    x_TD: Tensor,
    linear_: Linear,
    residual_TN: Tensor,
    weight_N: Tensor,
    epsilon: float,
    consumer: Linear,
    ranks: Ranks | None = None,
) -> tuple[Tensor, Tensor]:
    """The product and the sum in one pass, then the norm."""
    if ranks is None:
        residual_TN = linear_add(x_TD, linear_, residual_TN)
        return residual_TN, rms_norm(residual_TN, weight_N, epsilon)
    residual_TN = residual_TN + ranks.add(linear(x_TD, linear_))
    return residual_TN, rms_norm(residual_TN, weight_N, epsilon)


def gated(x_TD: Tensor, gate_up: tuple[Linear, Linear], consumer: Linear | None = None) -> Tensor:
    """``silu(gate(x)) * up(x)`` in two products."""
    gate, up = gate_up
    gate_TN = linear(x_TD, gate, "swish")
    if up.scale is None and up.packed.is_mkldnn:
        return _product_and(x_TD, gate_TN, up, "mul")
    return gate_TN * linear(x_TD, up)


def rms_norm(x_TD: Tensor, weight_D: Tensor, epsilon: float, consumer: Linear | None = None) -> Tensor:
    """One pass if kernels were compiled, otherwise torch's."""
    h_TD = native.rms_norm(x_TD, weight_D, epsilon)
    return fused_rms_norm(x_TD, weight_D.shape, weight_D, epsilon) if h_TD is None else h_TD


def rotate(x_THE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Three passes: swap halves, multiply, multiply-add."""
    half = x_THE.shape[-1] // 2
    swapped = torch.cat((x_THE[..., half:], x_THE[..., :half]), dim=-1)
    return torch.addcmul(x_THE * cos_TE[:, None], swapped, sin_TE[:, None])


def greedy(logits_SV: Tensor) -> Tensor:
    """Argmax in three vectorised passes; torch's own is scalar for bf16 and eight times slower."""
    highest_S1 = logits_SV.amax(-1, keepdim=True)
    ids_S = torch.from_numpy((logits_SV == highest_S1).numpy().argmax(-1))
    return torch.where(highest_S1[:, 0].isfinite(), ids_S, NO_TOKEN)


def padded_tokens(tokens: int, weights_bytes: int) -> int:
    """The next of 1, 2, 4, 8, 16, ... 64, 96, 128, ...: oneDNN compiles kernels of some MB for each new number.

    Decodes of large weights are not padded: padding would cost more time, and the kernels are small in comparison.
    """
    if weights_bytes >= EXACT_TOKENS_FROM_BYTES and tokens <= 64:
        return tokens
    if tokens <= 8:
        return 1 << (tokens - 1).bit_length()
    step = 8 if tokens <= 64 else 32
    return -(-tokens // step) * step


def _padded_pages(pages: int) -> int:
    # The batched products compile for each number of pages too: at most a quarter is padding, in a dozen sizes.
    step = max(16, 1 << max(pages.bit_length() - 3, 0))
    return -(-pages // step) * step


def prepare(arrays: StepArrays, last_tokens: Tensor, cache: LayerCache, config: ModelConfig) -> Batch:
    """Views of the arrays, and the maps of the paged attention."""
    token_ids = torch.from_numpy(arrays.token_ids.astype(np.int64))
    decodes = arrays.decodes
    token_ids[:decodes] = last_tokens.index_select(0, torch.from_numpy(arrays.table_slots[:decodes]))
    decode_index: AttentionIndex | PageTable | None
    sample_index: AttentionIndex | PageTable | None
    if native.has_attention(config.heads, cache.k):
        decodes, chunks = len(token_ids), []
        decode_index, sample_index = page_tables(arrays)
    else:
        pages, lengths, sampled = arrays.pages, arrays.lengths, arrays.sampled
        chunks = prompt_chunks(arrays, cache.page_size)
        decode_index = sample_index = attention_index(pages[:decodes], lengths[:decodes], cache, config.heads)
        if chunks:
            sample_index = attention_index(pages[sampled], lengths[sampled], cache, config.heads)
    return Batch(
        token_ids=token_ids,
        positions=torch.from_numpy(arrays.positions),
        cache_slots=torch.from_numpy(arrays.cache_slots),
        decodes=decodes,
        decode_index=decode_index,
        chunks=chunks,
        samples=arrays.samples,
        sample_indices=torch.from_numpy(arrays.sample_indices),
        sample_slots=torch.from_numpy(arrays.sample_slots),
        sample_index=sample_index,
    )


def page_tables(arrays: StepArrays) -> tuple[PageTable, PageTable]:
    """Of all tokens, and of those that sample."""

    def table(pages_RP: NDArray[np.int32], lengths_R: NDArray[np.int32], starts: NDArray[np.int64]) -> PageTable:
        return PageTable(*map(torch.from_numpy, (pages_RP, lengths_R, starts.astype(np.int32))))

    # A token of padding is a sequence of one key in the dump page.
    tokens, sampled = int(arrays.chunk_starts[-1]), arrays.sampled
    padding = len(arrays.positions) - tokens
    dump_pages = np.full((padding, arrays.pages.shape[1]), DUMP_PAGE, dtype=np.int32)
    every = table(
        np.concatenate((arrays.pages, dump_pages)),
        np.concatenate((arrays.lengths, np.ones(padding, dtype=np.int32))),
        np.concatenate((np.arange(arrays.decodes), arrays.chunk_starts, tokens + 1 + np.arange(padding))),
    )
    return every, table(arrays.pages[sampled], arrays.lengths[sampled], np.arange(arrays.samples + 1))


def prompt_chunks(arrays: StepArrays, page_size: int) -> list[Chunk]:
    """The tokens after the decodes, sequence by sequence."""
    contexts = arrays.lengths[arrays.decodes :].tolist()
    pages = torch.from_numpy(arrays.pages[arrays.decodes :])
    return [
        Chunk(slice(*bounds), own[: -(-context // page_size)], context)
        for bounds, own, context in zip(pairwise(arrays.chunk_starts.tolist()), pages, contexts, strict=True)
    ]


def attention_index(
    pages_BP: NDArray[np.int32], lengths_B: NDArray[np.int32], cache: LayerCache, heads: int
) -> AttentionIndex | None:
    """Build the maps once per step, for every layer. None for no sequences."""
    if not len(lengths_B):
        return None
    page_size, kv_heads = cache.page_size, cache.k.shape[1]
    pages_BP = pages_BP[:, : -(-int(lengths_B.max()) // page_size)]
    sequences, width = pages_BP.shape
    used_B = -(-lengths_B // page_size)
    live_BP = np.arange(width) < used_B[:, None]
    sequence, order = np.nonzero(live_BP)
    page = pages_BP[live_BP]
    in_place = min(_padded_pages(int(page.max()) + 1), len(cache.k))
    if len(page) >= IN_PLACE_SHARE * in_place:
        pool: int | Tensor = in_place
        pool_pages, place = in_place, page
    else:
        pool_pages, place = _padded_pages(len(page) + 1), np.arange(1, len(page) + 1, dtype=np.int32)
        ids = np.full(pool_pages, DUMP_PAGE, dtype=np.int32)
        ids[place] = page
        pool = torch.from_numpy(ids)

    # For each place in the pool: the sequence that owns it, its number in that sequence, and its visible keys.
    owner_P, order_P, visible_P = np.zeros((3, pool_pages), dtype=np.int32)
    owner_P[place], order_P[place] = sequence, order
    visible_P[place] = lengths_B[sequence] - order * page_size
    table_BP = np.zeros((sequences, width), dtype=np.int32)
    table_BP[live_BP] = place

    head = np.arange(heads, dtype=np.int32)
    score_rows = table_BP[:, None, :] * np.int32(heads) + head[:, None]
    weight_rows = (owner_P[:, None] * np.int32(heads) + head) * np.int32(width) + order_P[:, None]
    if not live_BP.all():
        # The dump page takes the weights of a padded place, which are zero, so it adds nothing where tables are padded.
        at, padded = np.unravel_index(int(live_BP.argmin()), live_BP.shape)
        weight_rows[DUMP_PAGE] = (at * heads + head) * width + padded
    bias_PS = torch.from_numpy(np.where(np.arange(page_size) < visible_P[:, None], np.float32(0), np.float32(MASKED)))
    return AttentionIndex(
        pool=pool,
        owner_P=torch.from_numpy(owner_P),
        bias_PKS=bias_PS.to(cache.k.dtype).repeat_interleave(kv_heads, 0)[:, None],
        score_rows=torch.from_numpy(score_rows.reshape(-1)),
        weight_rows=torch.from_numpy(weight_rows.reshape(-1)),
        table_B_P=torch.from_numpy(table_BP.reshape(-1)),
    )


def rotate_and_write(
    qkv_TN: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    tables_LE: tuple[Tensor, Tensor],
    cache: LayerCache,
    batch: Batch,
    config: ModelConfig,
) -> Tensor:
    """One pass if kernels were compiled and keys are not rounded, otherwise several of torch."""
    if isinstance(batch.decode_index, PageTable):
        return _rotate_and_write(qkv_TN, norms, tables_LE, cache, batch, config)
    # The batched products pass over whole pages and the dump page; zero times what is not finite would not be zero.
    fresh = (batch.cache_slots[batch.cache_slots % cache.page_size == 0] // cache.page_size).long()
    cache.k[fresh], cache.v[fresh] = 0.0, 0.0
    q_THE = _rotate_and_write(qkv_TN, norms, tables_LE, cache, batch, config)
    cache.k[DUMP_PAGE], cache.v[DUMP_PAGE] = 0.0, 0.0
    return q_THE


def _rotate_and_write(
    qkv_TN: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    tables_LE: tuple[Tensor, Tensor],
    cache: LayerCache,
    batch: Batch,
    config: ModelConfig,
) -> Tensor:
    if norms is None and not cache.round_to_fp8:
        q = native.rotate_and_write(
            qkv_TN, *tables_LE, batch.positions, batch.cache_slots, cache.k, cache.v, config.heads
        )
        if q is not None:
            return q
    heads, kv_heads = config.heads, config.kv_heads
    qkv = qkv_TN.view(len(qkv_TN), heads + 2 * kv_heads, config.head_dim)
    qk, v_TKE = torch.split(qkv, [heads + kv_heads, kv_heads], dim=1)
    if norms is not None:
        both = zip(torch.split(qk, [heads, kv_heads], dim=1), norms, strict=True)
        qk = torch.cat([rms_norm(x, weight_E, config.rms_norm_epsilon) for x, weight_E in both], dim=1)
    cos_TE, sin_TE = (table.index_select(0, batch.positions) for table in tables_LE)
    q_THE, k_TKE = torch.split(rotate(qk, cos_TE, sin_TE), [heads, kv_heads], dim=1)
    page_T, offset_T = batch.cache_slots.long() // cache.page_size, batch.cache_slots.long() % cache.page_size
    rows_TK = (page_T[:, None] * kv_heads + torch.arange(kv_heads)) * cache.page_size + offset_T[:, None]
    cache.write(cache.rounded(k_TKE, cache.k_scale), cache.rounded(v_TKE, cache.v_scale), rows_TK)
    return q_THE


def attention(q_THE: Tensor, cache: LayerCache, batch: Batch, consumer: Linear) -> Tensor:
    """All tokens together or, without kernels, decodes together and prompt chunks one by one."""
    tokens = len(q_THE)
    if batch.decodes == tokens and batch.decode_index is not None:
        return decode_attention(q_THE, cache, batch.decode_index).view(tokens, -1)
    a_THE = torch.zeros_like(q_THE, memory_format=torch.contiguous_format)
    if batch.decode_index is not None:
        a_THE[: batch.decodes] = decode_attention(q_THE[: batch.decodes], cache, batch.decode_index)
    for chunk in batch.chunks:
        a_THE[chunk.tokens] = chunk_attention(q_THE[chunk.tokens], *cache.read(chunk.pages, chunk.context))
    return a_THE.view(tokens, -1)


def sample_attention(q_SHE: Tensor, cache: LayerCache, batch: Batch, consumer: Linear) -> Tensor:
    """Each token sees its whole sequence, so all are decodes."""
    tokens = len(q_SHE)
    assert batch.sample_index is not None
    if batch.samples == tokens:
        return decode_attention(q_SHE, cache, batch.sample_index).view(tokens, -1)
    a_SHE = torch.zeros_like(q_SHE)
    a_SHE[: batch.samples] = decode_attention(q_SHE[: batch.samples], cache, batch.sample_index)
    return a_SHE.view(tokens, -1)


def decode_attention(q_BHE: Tensor, cache: LayerCache, index: AttentionIndex | PageTable) -> Tensor:
    """Compiled, or: scores by page, softmax by sequence, values by page, sum by sequence."""
    if isinstance(index, PageTable):
        return native.attention(q_BHE, cache.k, cache.v, index.pages_RP, index.lengths_R, index.starts)
    sequences, heads, head_dim = q_BHE.shape
    _, kv_heads, page_size, _ = cache.k.shape
    if isinstance(index.pool, int):
        k, v = cache.k[: index.pool], cache.v[: index.pool]
    else:
        k, v = cache.k.index_select(0, index.pool), cache.v.index_select(0, index.pool)
    pages, width = len(k), len(index.table_B_P) // sequences
    group = heads // kv_heads
    q = q_BHE.index_select(0, index.owner_P).view(pages * kv_heads, group, head_dim)
    k_T = k.view(pages * kv_heads, page_size, head_dim).transpose(1, 2)
    scores = torch.baddbmm(index.bias_PKS, q, k_T, alpha=head_dim**-0.5)
    by_sequence = scores.view(pages * heads, page_size).index_select(0, index.score_rows)
    weights = by_sequence.view(sequences * heads, width * page_size).softmax(-1)
    by_page = weights.view(-1, page_size).index_select(0, index.weight_rows).view(pages * kv_heads, group, page_size)
    partial = torch.bmm(by_page, v.view(pages * kv_heads, page_size, head_dim)).view(pages, heads * head_dim)
    gathered = partial.index_select(0, index.table_B_P).view(sequences, width, heads * head_dim)
    return gathered.sum(1).view(sequences, heads, head_dim)


def chunk_attention(q_THE: Tensor, k_CKE: Tensor, v_CKE: Tensor) -> Tensor:
    """Torch's flash attention, with the queries of a group as heads of their key/value head."""
    tokens, heads, head_dim = q_THE.shape
    keys, kv_heads, _ = k_CKE.shape
    group = heads // kv_heads
    q = q_THE.view(tokens, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    k = k_CKE.transpose(0, 1)[:, None].expand(kv_heads, group, keys, head_dim)
    v = v_CKE.transpose(0, 1)[:, None].expand(kv_heads, group, keys, head_dim)
    if tokens == keys:
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        visible_TC = torch.ones(tokens, keys, dtype=torch.bool).tril(keys - tokens)
        out = scaled_dot_product_attention(q, k, v, attn_mask=visible_TC)
    return out.permute(2, 0, 1, 3).reshape(tokens, heads, head_dim)
