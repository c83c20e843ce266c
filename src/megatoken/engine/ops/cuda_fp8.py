"""fp8 linears on a GPU, with one scale for a tensor or one for each row: cuBLASLt, and on Hopper a kernel for gates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from megatoken.engine.config import PACKED_TOKENS
from megatoken.engine.ops import fused
from megatoken.engine.ops.cuda_linear import InputScale, Linear
from megatoken.engine.ops.gated_product import FEWEST_TOKENS, ORDER, gated_product, interleaved, obstacle
from megatoken.engine.ops.packed_product import PackedTiles, compile_all
from megatoken.engine.schemes.fp8_weight import E4M3_MAX, Fp8Weight, with_one_scale
from megatoken.engine.schemes.packed4 import Packed4
from megatoken.errors import CapacityError

INPUT_MARGIN = 2.0
"""Room above the largest input that was measured. It costs nothing: e4m3 is as exact over 15 powers of two."""


@dataclass(slots=True)
class TensorScaledLinear(Linear):
    """Weight [N, D] in e4m3, with one scale for it and one for all inputs, from the checkpoint or measured at start.

    Without an input scale it takes bf16, scales each step by its largest input, and keeps the largest of all. A weight
    that stays ``packed`` in four bits is expanded for each product of many tokens; ``weight`` then has no memory.
    """

    weight_scale: Tensor = field(kw_only=True)  # fp32, one element
    largest_input: Tensor | None = None  # fp32, one element
    packed: PackedTiles | None = None

    @classmethod
    def pack(cls, weight: Fp8Weight, bias_N: Tensor | None) -> Self:
        """Rows that had another scale than the largest are rounded once more.

        Raises:
            CapacityError: an fp8 product cannot have these sides.
        """
        _check_sides(weight.values_ND)
        weight = with_one_scale(weight)
        linear = cls(weight.values_ND, bias_N, weight_scale=weight.scale_N1.view(()))
        if weight.input_scale is not None:
            linear._scale_inputs_by(weight.input_scale)
        return linear

    @classmethod
    def keep_packed(cls, weight: Packed4, bias_N: Tensor | None) -> Self:
        """``weight`` must be one that ``packed_product.fits``."""
        tiles = PackedTiles.pack(weight)
        compile_all(tiles.codes.device.index, tiles.group, len(tiles.codes))
        sides = torch.empty(tiles.sides, dtype=torch.float8_e4m3fn, device="meta")
        linear = cls(sides, bias_N, weight_scale=tiles.weight_scale, packed=tiles)
        if weight.largest_input:
            linear._scale_inputs_by(weight.largest_input / E4M3_MAX)
        return linear

    def values(self) -> Tensor:
        """The weight, e4m3 [N, D]."""
        return self.weight if self.packed is None else self.packed.expand()

    def product(self, x: Any, out_TN: Tensor | None = None) -> Tensor:
        """bf16 [T, N]; ``x`` is e4m3, or bf16 as long as there is no input scale."""
        input_scale = self.device_scale
        if input_scale is None:
            x, input_scale = self._measured(x)
        if self.packed is not None and len(x) <= PACKED_TOKENS:
            return self.packed.product(x, input_scale, self.bias, out_TN)
        return torch._scaled_mm(
            x,
            self.values().t(),
            input_scale,
            self.weight_scale,
            bias=self.bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
            out=out_TN,
        )

    def as_gated(self) -> Linear:
        """For one kernel of product and activation, where there is one for this device and these sides."""
        columns, depth = self.weight.shape
        if self.bias is not None or obstacle(columns // 2, depth, self.weight_scale.device) is not None:
            return self
        weight_ND, packed = self.weight, self.packed
        if packed is None:
            weight_ND = interleaved(weight_ND.view(torch.uint8)).view(weight_ND.dtype)
        else:
            packed = packed.in_order(interleaved(torch.arange(columns, device=packed.codes.device)[:, None])[:, 0])
        return GatedLinear(weight_ND, None, self.input_scale, weight_scale=self.weight_scale, packed=packed)

    def _measured(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """e4m3 values and their scale by the largest of this step."""
        largest = x_TD.abs().amax().float()
        self.largest_input = largest if self.largest_input is None else torch.maximum(self.largest_input, largest)
        scale = (largest / E4M3_MAX).clamp_min(1e-12).view(1)
        return (x_TD.float() / scale).to(torch.float8_e4m3fn), scale

    def fix_input_scale(self) -> bool:
        """With ``INPUT_MARGIN``, from the largest input seen."""
        if self.input_scale is not None or self.largest_input is None:
            return False
        self._scale_inputs_by(INPUT_MARGIN * max(self.largest_input.item(), 1e-6) / E4M3_MAX)
        self.largest_input = None
        return True

    def _scale_inputs_by(self, value: float) -> None:
        self.input_scale = InputScale(
            torch.tensor([value], dtype=torch.float32, device=self.weight_scale.device), value
        )


@dataclass(slots=True)
class GatedLinear(TensorScaledLinear):
    """A gate above its up, rows ``interleaved``."""

    def gated(self, x: Any, consumer: Linear) -> Any:
        """In one kernel if that is faster and both input scales are known. ``consumer``: scaled like this one."""
        assert isinstance(consumer, TensorScaledLinear)
        input_scale, out_scale = self.device_scale, consumer.device_scale
        if input_scale is None or out_scale is None or len(x) < FEWEST_TOKENS:
            return fused.silu_mul(self.product(x), out_scale, interleaved=ORDER)
        return gated_product(x, self.values(), input_scale, self.weight_scale, out_scale)


class ScaledTokens(NamedTuple):
    """Input of a linear: ``values.float() * scale``."""

    values_TD: Tensor  # e4m3
    scale_T1: Tensor  # fp32


@dataclass(slots=True)
class RowScaledLinear(Linear):
    """Weight [N, D] in e4m3 with a scale for each row; takes ``ScaledTokens``.

    The scale of a token's input is found as the input is computed, so the values never depend on other tokens.
    """

    weight_scale: Tensor = field(kw_only=True)  # fp32 [1, N]

    @classmethod
    def pack(cls, weight: Fp8Weight, bias_N: Tensor | None) -> Self:
        """Raises CapacityError if an fp8 product cannot have these sides."""
        values_ND = weight.values_ND
        _check_sides(values_ND)
        return cls(values_ND, bias_N, weight_scale=weight.scale_N1.expand(len(values_ND), 1).t().contiguous())

    @property
    def takes_bf16(self) -> bool:
        """Never."""
        return False

    def product(self, x: Any, out_TN: Tensor | None = None) -> Tensor:
        """bf16 [T, N]; ``x`` is ``ScaledTokens``."""
        return torch._scaled_mm(
            x.values_TD,
            self.weight.t(),
            x.scale_T1,
            self.weight_scale,
            bias=self.bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
            out=out_TN,
        )

    def normed(self, delta_TD: Tensor | None, residual_TD: Tensor, weight_D: Tensor, epsilon: float) -> ScaledTokens:
        """In one pass."""
        return ScaledTokens(*fused.add_rms_norm_rows(delta_TD, residual_TD, weight_D, epsilon))

    def activated(self, gate_up_T2F: Tensor) -> ScaledTokens:
        """In one pass, which reads its input twice."""
        return ScaledTokens(*fused.silu_mul_rows(gate_up_T2F))

    def attended(self, a_TD: Tensor) -> ScaledTokens:
        """One more pass: a token's heads are computed apart, and its scale is of all of them."""
        return ScaledTokens(*fused.quantise_rows(a_TD))


def _check_sides(values_ND: Tensor) -> None:
    if any(side % 16 for side in values_ND.shape):
        sides = " x ".join(map(str, values_ND.shape))
        raise CapacityError(f"a linear of {sides}: fp8 on a GPU needs multiples of 16; take bf16")
