"""The CUDA back end for fp8 with a scale per row: of each output for a weight, of each token for its inputs.

An input's scales are found as it is computed, so none is fixed beforehand, and a row's values never depend on the rows
beside it. Everything else, the head too, is as in ``cuda``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatoken.engine.cache import LayerCache
from megatoken.engine.config import Precision
from megatoken.engine.ops import Ranks, cuda, fused
from megatoken.engine.ops.cuda import Batch, Linear, greedy, kernels, padded_rows, prepare, rotate_and_write
from megatoken.engine.quant import Fp8Weight, stack

__all__ = [
    "attention",
    "gated",
    "greedy",
    "kernels",
    "linear",
    "linear_add_norm",
    "pack_gated",
    "pack_linear",
    "padded_rows",
    "prepare",
    "rms_norm",
    "rotate_and_write",
    "sample_attention",
]


class ScaledRows(NamedTuple):
    """Input of a linear: ``values.float() * scale``."""

    values_TD: Tensor  # e4m3
    scale_T1: Tensor  # fp32


@dataclass(slots=True)
class RowScaledLinear(Linear):
    """Weight [N, D] in e4m3, ``weight_scale`` fp32 [1, N]; takes ``ScaledRows``."""


def pack_linear(weight_ND: Tensor | Fp8Weight, bias_N: Tensor | None, precision: Precision) -> Linear:
    """An fp8 weight as it is, with a scale for each row; others, as the head's, for bf16 inputs.

    Raises:
        CapacityError: an fp8 product cannot have these sides.
    """
    if isinstance(weight_ND, Tensor):
        return cuda.pack_linear(weight_ND, bias_N, precision)
    values_ND = weight_ND.values_ND
    cuda.check_sides(values_ND)
    return RowScaledLinear(values_ND, bias_N, weight_ND.scale_N1.expand(len(values_ND), 1).t().contiguous())


def pack_gated(gate_up: list[tuple[Tensor | Fp8Weight, Tensor | None]], precision: Precision) -> Linear:
    """One matrix [2 F, D], gate first."""
    weights, biases = zip(*gate_up, strict=True)
    return pack_linear(stack(weights), None if biases[0] is None else torch.cat(biases), precision)


def rms_norm(x_TD: Tensor, weight_D: Tensor, epsilon: float, consumer: Linear | None = None) -> Tensor | ScaledRows:
    """One pass, quantised for the consumer."""
    return _add_rms_norm(None, x_TD, weight_D, epsilon, consumer)


def _add_rms_norm(
    delta_TD: Tensor | None, residual_TD: Tensor, weight_D: Tensor, epsilon: float, consumer: Linear | None
) -> Tensor | ScaledRows:
    if isinstance(consumer, RowScaledLinear):
        return ScaledRows(*fused.add_rms_norm_rows(delta_TD, residual_TD, weight_D, epsilon))
    return fused.add_rms_norm(delta_TD, residual_TD, weight_D, epsilon)


def linear(x: Tensor | ScaledRows, linear: Linear) -> Tensor:
    """bf16 [T, N]; ``x`` is in the linear's input format."""
    if isinstance(x, Tensor):
        return cuda.linear(x, linear)
    assert linear.weight_scale is not None
    return torch._scaled_mm(
        x.values_TD,
        linear.weight.t(),
        x.scale_T1,
        linear.weight_scale,
        bias=linear.bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def linear_add_norm(
    x: Tensor | ScaledRows,
    linear_: Linear,
    residual_TN: Tensor,
    weight_N: Tensor,
    epsilon: float,
    consumer: Linear,
    ranks: Ranks | None = None,
) -> tuple[Tensor, Tensor | ScaledRows]:
    """A product, then sum, norm and quantisation in one pass; the residual, of all rows, is written in place."""
    delta_TN = linear(x, linear_)
    if ranks is not None:
        ranks.add(delta_TN)
    return residual_TN, _add_rms_norm(delta_TN, residual_TN, weight_N, epsilon, consumer)


def gated(x: Tensor | ScaledRows, gate_up: Linear, consumer: Linear) -> Tensor | ScaledRows:
    """One product, then activation, product and quantisation in one pass."""
    return ScaledRows(*fused.silu_mul_rows(linear(x, gate_up)))


def attention(q_THE: Tensor, cache: LayerCache, batch: Batch, consumer: Linear) -> ScaledRows:
    """In bf16, then one pass that quantises: a row's heads are computed apart, and its scale is of all of them."""
    return ScaledRows(*fused.quantise_rows(cuda.attention(q_THE, cache, batch, consumer)))


def sample_attention(q_SHE: Tensor, cache: LayerCache, batch: Batch, consumer: Linear) -> ScaledRows:
    """Likewise."""
    return ScaledRows(*fused.quantise_rows(cuda.sample_attention(q_SHE, cache, batch, consumer)))
