"""A linear on a GPU, with the operations that make its input, so that they write the format that it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatoken.engine.ops import fused


@dataclass(frozen=True, slots=True)
class InputScale:
    """The input of a linear is e4m3 of ``x / scale``: on the device for products, on the host for attention."""

    device: Tensor  # fp32, one element
    value: float


@dataclass(slots=True)
class Linear:
    """Weight [N, D] and bias [N] or None, both bf16; a subclass has another number format.

    Methods that make an input [T, D] return bf16, or e4m3 of ``x / input_scale`` where there is one.
    """

    weight: Tensor
    bias: Tensor | None
    input_scale: InputScale | None = None

    @property
    def device_scale(self) -> Tensor | None:
        """``input_scale`` for a kernel."""
        return None if self.input_scale is None else self.input_scale.device

    @property
    def takes_bf16(self) -> bool:
        """Whether inputs are plain."""
        return self.input_scale is None

    def product(self, x: Any, out_TN: Tensor | None = None) -> Tensor:
        """``x W^T + b``, bf16 [T, N], in ``out`` if there is one; ``x`` was made by the methods below."""
        weight_DN = self.weight.t()
        if self.bias is None:
            return torch.mm(x, weight_DN, out=out_TN)
        return torch.addmm(self.bias, x, weight_DN, out=out_TN)

    def normed(self, delta_TD: Tensor | None, residual_TD: Tensor, weight_D: Tensor, epsilon: float) -> Any:
        """``residual += delta`` in place, then RMSNorm of the sum, in one pass."""
        return fused.add_rms_norm(delta_TD, residual_TD, weight_D, epsilon, self.device_scale)

    def as_gated(self) -> Linear:
        """The form for a gate above its up whose products are only used by ``gated``."""
        return self

    def gated(self, x: Any, consumer: Linear) -> Any:
        """Input of ``consumer``: of the products of a gate above its up, ``silu(gate) * up``."""
        return consumer.activated(self.product(x))

    def activated(self, gate_up_T2F: Tensor) -> Any:
        """``silu(gate) * up``, in one pass."""
        return fused.silu_mul(gate_up_T2F, self.device_scale)

    def attention_output(self, q_THE: Tensor) -> tuple[Tensor, float | None]:
        """An output for attention over the queries ``q``, and the scale to divide it by."""
        scale = self.input_scale
        dtype = q_THE.dtype if scale is None else torch.float8_e4m3fn
        return torch.empty(q_THE.shape, dtype=dtype, device=q_THE.device), None if scale is None else scale.value

    def attended(self, a_TD: Tensor) -> Any:
        """The input, from attention's output."""
        return a_TD

    def fix_input_scale(self) -> bool:
        """Set an input scale that is missing from the inputs seen so far; returns whether one was missing."""
        return False
