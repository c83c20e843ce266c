"""Every operation in plain torch: the definition that the back ends must agree with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatoken.engine.cache import LayerCache
from megatoken.engine.config import ClampedSwiglu, ExpertsConfig
from megatoken.engine.ops import NO_TOKEN
from megatoken.engine.ops.routing import choose_experts
from megatoken.engine.schemes import LinearScheme
from megatoken.engine.schemes.fp8_weight import quantise_rows


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight [N, D] with optional bias [N]; with e4m3 values also fp32 ``scale``, [N] or [1]."""

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None


def pack_linear(weight_ND: Tensor, bias_N: Tensor | None, scheme: LinearScheme) -> Linear:
    """The weight in the scheme's format: plain, or e4m3 values with their scales."""
    weight = scheme.quantise(weight_ND)
    if isinstance(weight, Tensor):
        return Linear(weight, bias_N, None)
    return Linear(weight.values_ND, bias_N, weight.scale_N1.view(-1))


def linear(x_TD: Tensor, linear: Linear) -> Tensor:
    """``x W^T + b``; with an e4m3 weight the rows of x are quantised too, and products accumulate in fp32."""
    if linear.scale is None:
        return torch.nn.functional.linear(x_TD, linear.weight, linear.bias)
    values, scale_T1 = quantise_rows(x_TD)
    y_TN = (values.float() @ linear.weight.float().T) * (scale_T1 * linear.scale)
    return (y_TN if linear.bias is None else y_TN + linear.bias.float()).to(x_TD.dtype)


def linear_add(x_TD: Tensor, linear_: Linear, residual_TN: Tensor) -> Tensor:
    """``residual + x W^T + b``."""
    return residual_TN + linear(x_TD, linear_)


def gated(x_TD: Tensor, gate: Linear, up: Linear, clamped: ClampedSwiglu | None = None) -> Tensor:
    """``silu(gate(x)) * up(x)``, or ``clamped`` of both."""
    if clamped is not None:
        return clamped_swiglu(linear(x_TD, gate), linear(x_TD, up), clamped)
    return torch.nn.functional.silu(linear(x_TD, gate)) * linear(x_TD, up)


def clamped_swiglu(gate_TF: Tensor, up_TF: Tensor, config: ClampedSwiglu) -> Tensor:
    """Computed in fp32 and rounded once."""
    gate, up = gate_TF.float().clamp(max=config.limit), up_TF.float().clamp(-config.limit, config.limit)
    return (gate * torch.sigmoid(config.alpha * gate) * (up + 1)).to(gate_TF.dtype)


def experts(
    x_TD: Tensor,
    router: tuple[Tensor, Tensor | None],
    each: list[tuple[Linear, Linear, Linear]],
    config: ExpertsConfig,
) -> Tensor:
    """The outputs of the experts that a token chooses, times their weights, summed in fp32.

    ``router``: weight [X, D] and bias [X] or None, which score in fp32. ``each``: gate, up and down projection of an
    expert.
    """
    router_XD, bias_X = router
    logits_TX = x_TD.float() @ router_XD.float().T + (0.0 if bias_X is None else bias_X.float())
    weights_TC, chosen_TC = choose_experts(logits_TX, config)
    y_TD = torch.zeros_like(x_TD, dtype=torch.float32)
    for number, (gate, up, down) in enumerate(each):
        token, choice = (chosen_TC == number).nonzero(as_tuple=True)
        f_TF = gated(x_TD[token], gate, up, config.activation)
        y_TD[token] += linear(f_TF, down).float() * weights_TC[token, choice, None]
    return y_TD.to(x_TD.dtype)


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
    """Argmax; ``NO_TOKEN`` if the highest is not finite."""
    highest_S, ids_S = logits_SV.max(-1)
    return torch.where(highest_S.isfinite(), ids_S, NO_TOKEN)


def decode_attention(
    q_RHE: Tensor, cache: LayerCache, pages_RP: Tensor, lengths_R: Tensor, sinks_H: Tensor | None = None
) -> Tensor:
    """One query a sequence, which sees its first ``lengths`` keys, in ``pages``, those in its window."""
    rows = []
    for q_HE, pages, length in zip(q_RHE, pages_RP, lengths_R.tolist(), strict=True):
        k_LKE, v_LKE = cache.read(pages[: -(-length // cache.page_size)], length)
        rows.append(chunk_attention(q_HE[None], k_LKE, v_LKE, cache.window, sinks_H))
    return torch.cat(rows)


def chunk_attention(
    q_THE: Tensor, k_CKE: Tensor, v_CKE: Tensor, window: int | None = None, sinks_H: Tensor | None = None
) -> Tensor:
    """Query t sees keys 0 .. C - T + t, of these the last ``window``, and the sink of its head, whose value is 0."""
    rows, heads, head_dim = q_THE.shape
    keys, kv_heads, _ = k_CKE.shape
    k_CHE, v_CHE = (side.repeat_interleave(heads // kv_heads, dim=1).float() for side in (k_CKE, v_CKE))
    scores_HTC = torch.einsum("the,che->htc", q_THE.float(), k_CHE) * head_dim**-0.5
    visible_TC = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
    if window is not None:
        visible_TC = visible_TC.triu(keys - rows - window + 1)
    scores_HTC = scores_HTC.masked_fill(~visible_TC, float("-inf"))
    if sinks_H is not None:
        scores_HTC = torch.cat((scores_HTC, sinks_H.float()[:, None, None].expand(-1, rows, 1)), -1)
    weights_HTC = scores_HTC.softmax(-1)[..., :keys]
    return torch.einsum("htc,che->the", weights_HTC, v_CHE).to(q_THE.dtype)


def rotate_and_write(
    qkv_TN: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    tables_LE: tuple[Tensor, Tensor],
    cache: LayerCache,
    positions_T: Tensor,
    cache_slots_T: Tensor,
    heads: int,
    epsilon: float,
) -> Tensor:
    """Normalise each head if there are norms, rotate by position, store keys and values -> queries [T, H, E]."""
    _, kv_heads, page_size, head_dim = cache.k.shape
    q, k, v = qkv_TN.view(len(qkv_TN), -1, head_dim).split([heads, kv_heads, kv_heads], dim=1)  # type: ignore[no-untyped-call]
    if norms is not None:
        q, k = rms_norm(q, norms[0], epsilon), rms_norm(k, norms[1], epsilon)
    cos_TE, sin_TE = (table_LE[positions_T] for table_LE in tables_LE)
    page, offset = cache_slots_T // page_size, cache_slots_T % page_size
    cache.k[page, :, offset] = cache.rounded(rotate(k, cos_TE, sin_TE), cache.k_scale)
    cache.v[page, :, offset] = cache.rounded(v, cache.v_scale)
    return rotate(q, cos_TE, sin_TE)
