"""The CPU back end: weights packed once for oneDNN, elementwise work fused into the products, paged attention by page.

Decode attention never gathers keys. It multiplies every page in use with the query of its owner in one batched product,
brings the small score rows into sequence order for the softmax, and goes back to page order for the values: the pages
are read in place, once, whatever order they are in.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import linear as plain_linear
from torch.nn.functional import rms_norm as fused_rms_norm
from torch.nn.functional import scaled_dot_product_attention, silu

from megatoken.engine.cache import DUMP_PAGE, LayerCache
from megatoken.engine.config import Precision
from megatoken.engine.quant import quantise_rows, quantise_tensor

MASKED = -1e30
IN_PLACE_SHARE = 0.6
"""Below this share of live pages in the used range of the pool, copying those out is cheaper than passing over all."""

_product = torch.ops.mkldnn._linear_pointwise


@dataclass(frozen=True, slots=True)
class Linear:
    """A packed weight; ``scale`` is set when it holds e4m3 values (stored as bf16, in which they are exact)."""

    packed: Tensor
    bias: Tensor | None
    scale: float | None


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


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this machine's oneDNN takes packed weights of ``dtype``."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_linear(weight_ND: Tensor, bias_N: Tensor | None, precision: Precision) -> Linear:
    """Reorder into oneDNN's blocked layout, good for any number of rows."""
    scale = None
    if precision == "fp8":
        values, scale = quantise_tensor(weight_ND)
        weight_ND = values.to(torch.bfloat16)
    if can_pack(weight_ND.dtype):
        weight_ND = torch.ops.mkldnn._reorder_linear_weight(weight_ND, 32)
    return Linear(weight_ND, bias_N, scale)


def linear(x_TD: Tensor, linear: Linear, activation: str = "none") -> Tensor:
    """``activation(x W^T + b)``, activation "none" or "swish"."""
    if linear.scale is not None:
        return _linear_fp8(x_TD, linear, linear.scale, activation)
    if linear.packed.is_mkldnn:
        fused_TN: Tensor = _product(x_TD, linear.packed, linear.bias, activation, [], "")
        return fused_TN
    y_TN = plain_linear(x_TD, linear.packed, linear.bias)
    return silu(y_TN) if activation == "swish" else y_TN


def _linear_fp8(x_TD: Tensor, linear: Linear, scale: float, activation: str) -> Tensor:
    # Every e4m3 value is exact in bf16 and oneDNN accumulates in fp32, so this is the fp8 product itself.
    values, scale_T1 = quantise_rows(x_TD)
    x = values.to(torch.bfloat16)
    y = _product(x, linear.packed, None, "none", [], "") if linear.packed.is_mkldnn else plain_linear(x, linear.packed)
    y_TN = y.float() * (scale_T1 * scale)
    if linear.bias is not None:
        y_TN += linear.bias
    return (silu(y_TN) if activation == "swish" else y_TN).to(x_TD.dtype)


def linear_add(x_TD: Tensor, linear_: Linear, residual_TN: Tensor) -> Tensor:
    """``residual + x W^T + b`` in one product."""
    if linear_.scale is None and linear_.packed.is_mkldnn:
        y_TN: Tensor = _product.binary(x_TD, residual_TN, linear_.packed, linear_.bias, "add")
        return y_TN
    return residual_TN + linear(x_TD, linear_)


def gated(x_TD: Tensor, gate: Linear, up: Linear) -> Tensor:
    """``silu(gate(x)) * up(x)`` in two products."""
    gate_TN = linear(x_TD, gate, "swish")
    if up.scale is None and up.packed.is_mkldnn:
        y_TN: Tensor = _product.binary(x_TD, gate_TN, up.packed, up.bias, "mul")
        return y_TN
    return gate_TN * linear(x_TD, up)


def rms_norm(x_TD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """Torch's own kernel."""
    return fused_rms_norm(x_TD, weight_D.shape, weight_D, epsilon)


def rotate(x_THE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Three passes: swap halves, multiply, multiply-add."""
    half = x_THE.shape[-1] // 2
    swapped = torch.cat((x_THE[..., half:], x_THE[..., :half]), dim=-1)
    return torch.addcmul(x_THE * cos_TE[:, None], swapped, sin_TE[:, None])


def greedy(logits_SV: Tensor) -> Tensor:
    """Argmax in three vectorised passes; torch's own walks bf16 rows one value at a time, eight times slower."""
    highest_S1 = logits_SV.amax(-1, keepdim=True)
    return torch.from_numpy((logits_SV == highest_S1).numpy().argmax(-1))


def padded_rows(rows: int) -> int:
    """The next of 1, 2, 4, 8, 16, ... 64, 96, 128, ...: oneDNN compiles a kernel of some 0.6 MB for each new number."""
    if rows <= 8:
        return 1 << (rows - 1).bit_length()
    step = 8 if rows <= 64 else 32
    return -(-rows // step) * step


def _padded_pages(pages: int) -> int:
    # The batched products compile for each number of pages too: at most a quarter more, in a dozen sizes.
    step = max(16, 1 << max(pages.bit_length() - 3, 0))
    return -(-pages // step) * step


def attention_index(
    pages_BP: NDArray[np.int32], lengths_B: NDArray[np.int32], cache: LayerCache, heads: int
) -> AttentionIndex:
    """Build the maps once per step; they serve every layer."""
    page_size, kv_heads = cache.page_size, cache.k.shape[1]
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

    # Of each place in the pool: the sequence that owns it, its number in that sequence, and how many keys are visible.
    owner_P, order_P, visible_P = np.zeros((3, pool_pages), dtype=np.int32)
    owner_P[place], order_P[place] = sequence, order
    visible_P[place] = lengths_B[sequence] - order * page_size
    table_BP = np.zeros((sequences, width), dtype=np.int32)
    table_BP[live_BP] = place

    head = np.arange(heads, dtype=np.int32)
    score_rows = table_BP[:, None, :] * np.int32(heads) + head[:, None]
    weight_rows = (owner_P[:, None] * np.int32(heads) + head) * np.int32(width) + order_P[:, None]
    if not live_BP.all():
        # The dump page takes its weights from a padded place: zeros, so that it adds nothing where tables are padded.
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


def decode_attention(q_BHE: Tensor, cache: LayerCache, index: AttentionIndex) -> Tensor:
    """Scores by page, softmax by sequence, values by page, sum by sequence."""
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
    """Torch's flash attention with the query group folded into the heads of one key/value head."""
    rows, heads, head_dim = q_THE.shape
    keys, kv_heads, _ = k_CKE.shape
    group = heads // kv_heads
    q = q_THE.view(rows, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    k = k_CKE.transpose(0, 1)[:, None].expand(kv_heads, group, keys, head_dim)
    v = v_CKE.transpose(0, 1)[:, None].expand(kv_heads, group, keys, head_dim)
    if rows == keys:
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        visible_TC = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
        out = scaled_dot_product_attention(q, k, v, attn_mask=visible_TC)
    return out.permute(2, 0, 1, 3).reshape(rows, heads, head_dim)
