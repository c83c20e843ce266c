"""Every operation written out in plain torch: what the fast back ends must agree with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatoken.engine.cache import LayerCache
from megatoken.engine.config import Precision
from megatoken.engine.quant import quantise_rows, quantise_tensor


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight [N, D] with optional bias [N]; ``scale`` is set when the weight holds e4m3 values."""

    weight: Tensor
    bias: Tensor | None
    scale: float | None


@dataclass(frozen=True, slots=True)
class AttentionIndex:
    """Page ids [B, pages] and visible keys [B] of the sequences that decode."""

    pages_BP: Tensor
    lengths_B: Tensor


def pack_linear(weight_ND: Tensor, bias_N: Tensor | None, precision: Precision) -> Linear:
    """Keep the weight as it is, or as e4m3 values and one scale."""
    if precision != "fp8":
        return Linear(weight_ND, bias_N, None)
    values, scale = quantise_tensor(weight_ND)
    return Linear(values, bias_N, scale)


def linear(x_TD: Tensor, linear: Linear) -> Tensor:
    """``x W^T + b``; with an e4m3 weight the rows of x are quantised too and products accumulate in fp32."""
    if linear.scale is None:
        return torch.nn.functional.linear(x_TD, linear.weight, linear.bias)
    values, scale_T1 = quantise_rows(x_TD)
    y_TN = (values.float() @ linear.weight.float().T) * (scale_T1 * linear.scale)
    return (y_TN if linear.bias is None else y_TN + linear.bias.float()).to(x_TD.dtype)


def linear_add(x_TD: Tensor, linear_: Linear, residual_TN: Tensor) -> Tensor:
    """``residual + x W^T + b``."""
    return residual_TN + linear(x_TD, linear_)


def gated(x_TD: Tensor, gate: Linear, up: Linear) -> Tensor:
    """``silu(gate(x)) * up(x)``."""
    return torch.nn.functional.silu(linear(x_TD, gate)) * linear(x_TD, up)


def rms_norm(x_TD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """Normalise in fp32, scale in the activations' dtype, as Hugging Face's Llama does."""
    x = x_TD.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    return weight_D * x.to(x_TD.dtype)


def rotate(x_THE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Rotate each (i, i + E/2) pair by its position's angle."""
    first, second = x_THE.chunk(2, dim=-1)
    return x_THE * cos_TE[:, None] + torch.cat((second, first), dim=-1) * sin_TE[:, None]


def greedy(logits_SV: Tensor) -> Tensor:
    """Argmax."""
    return logits_SV.argmax(-1)


def padded_rows(rows: int) -> int:
    """No padding."""
    return rows


def attention_index(
    pages_BP: NDArray[np.int32], lengths_B: NDArray[np.int32], cache: LayerCache, heads: int
) -> AttentionIndex:
    """Nothing to prepare."""
    return AttentionIndex(torch.from_numpy(pages_BP), torch.from_numpy(lengths_B))


def decode_attention(q_BHE: Tensor, cache: LayerCache, index: AttentionIndex) -> Tensor:
    """Sequence by sequence, softmax in fp32."""
    out_BHE = torch.empty_like(q_BHE)
    for sequence, length in enumerate(index.lengths_B.tolist()):
        used = -(-length // cache.page_size)
        k_LKE, v_LKE = cache.read(index.pages_BP[sequence, :used], length)
        out_BHE[sequence] = chunk_attention(q_BHE[sequence : sequence + 1], k_LKE, v_LKE)[0]
    return out_BHE


def chunk_attention(q_THE: Tensor, k_CKE: Tensor, v_CKE: Tensor) -> Tensor:
    """Query t sees keys 0 .. C - T + t."""
    rows, heads, head_dim = q_THE.shape
    keys, kv_heads, _ = k_CKE.shape
    k_CHE, v_CHE = (side.repeat_interleave(heads // kv_heads, dim=1).float() for side in (k_CKE, v_CKE))
    scores_HTC = torch.einsum("the,che->htc", q_THE.float(), k_CHE) * head_dim**-0.5
    visible_TC = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
    weights_HTC = scores_HTC.masked_fill(~visible_TC, float("-inf")).softmax(-1)
    return torch.einsum("htc,che->the", weights_HTC, v_CHE).to(q_THE.dtype)
