"""Mixtures of experts on a GPU: choices are sorted by expert, and one launch computes all experts' products."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from megatoken.engine.config import ExpertsConfig
from megatoken.engine.ops import fused
from megatoken.engine.ops.cuda_linear import Linear
from megatoken.engine.ops.grouped_product import activation_scale, grouped_product
from megatoken.engine.ops.routing_kernels import route
from megatoken.engine.schemes import LinearScheme
from megatoken.errors import CapacityError


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One linear of all experts, values [X, N, D]; with e4m3 values also a scale for each output, fp32 [X, N].

    ``bias_XN`` is bf16, or None without biases.
    """

    values_XND: Tensor
    scale_XN: Tensor | None
    bias_XN: Tensor | None = None

    @classmethod
    def empty(cls, experts: int, rows: int, columns: int, like: Any, bias: Tensor | None) -> Self:
        """Room for the weights of all experts, in the format of ``like`` and ``bias``, the first."""
        bias_XN = None if bias is None else bias.new_empty(experts, rows)
        if isinstance(like, Tensor):
            return cls(like.new_empty(experts, rows, columns), None, bias_XN)
        values = like.values_ND.new_empty(experts, rows, columns)
        return cls(values, like.scale_N1.new_empty(experts, rows), bias_XN)

    def put(self, expert: int, rows: slice, weight: Any, bias: Tensor | None) -> None:
        """Some rows of one expert's weight [N, D], plain or ``Fp8Weight``, and bias."""
        values = weight if isinstance(weight, Tensor) else weight.values_ND
        self.values_XND[expert, rows].copy_(values)
        if self.scale_XN is not None:
            self.scale_XN[expert, rows] = weight.scale_N1[:, 0]
        if self.bias_XN is not None and bias is not None:
            self.bias_XN[expert, rows] = bias


@dataclass(slots=True)
class Experts(Linear):
    """A mixture. To the operations it is a linear that takes bf16; its own weight [X, D] and bias are the router's.

    e4m3 experts scale the input of each token, and of each of its choices between the two products. With a clamped
    activation the first product computes that too, so rows of gate and up alternate; its e4m3 output has one scale,
    which is part of the scales of ``down``.
    """

    gate_up: ExpertWeights = field(kw_only=True)  # gate first, [X, 2 F, D]
    down: ExpertWeights = field(kw_only=True)  # [X, D, F]
    config: ExpertsConfig = field(kw_only=True)

    @classmethod
    def pack(
        cls,
        router: tuple[Tensor, Tensor | None],
        experts: Iterable[list[tuple[Any, Tensor | None]]],
        config: ExpertsConfig,
        scheme: LinearScheme,
    ) -> Self:
        """Expert by expert, so that the peak is the packed mixture and one expert.

        Raises:
            CapacityError: the products cannot have these sides.
        """
        hidden, width, activation = router[0].shape[1], config.intermediate_size, config.activation
        gate_rows, up_rows = slice(0, width), slice(width, 2 * width)
        if activation is not None:
            gate_rows, up_rows = slice(0, None, 2), slice(1, None, 2)
        gate_up = down = None
        for number, parts in enumerate(experts):
            gate, up, out = (
                (scheme.quantise(weight) if isinstance(weight, Tensor) else weight, bias) for weight, bias in parts
            )
            if gate_up is None or down is None:
                item = (gate[0] if isinstance(gate[0], Tensor) else gate[0].values_ND).itemsize
                if hidden * item % 16 or width * item % 16:
                    raise CapacityError(f"experts of {hidden} x {width}: a GPU needs multiples of {16 // item}")
                gate_up = ExpertWeights.empty(config.count, 2 * width, hidden, *gate)
                down = ExpertWeights.empty(config.count, hidden, width, *out)
            gate_up.put(number, gate_rows, *gate)
            gate_up.put(number, up_rows, *up)
            down.put(number, slice(None), *out)
        assert gate_up is not None
        assert down is not None
        if activation is not None and down.scale_XN is not None:
            down.scale_XN.mul_(activation_scale(activation))
        return cls(*router, gate_up=gate_up, down=down, config=config)

    def product(self, x: Any, out_TN: Tensor | None = None) -> Tensor:
        """The mixture of bf16 [T, D], see ``reference.experts``, in ``out`` if there is one."""
        return self.mixture(x, torch.mm(x, self.weight.t(), out_dtype=torch.float32), out_TN)

    def mixture(self, x_TD: Tensor, logits_TX: Tensor, out_TD: Tensor | None = None) -> Tensor:
        """The same from the router's scores without its bias, fp32."""
        weights_TC, _, order_R, starts = route(logits_TX, self.config, self.bias)
        gate_up, down, activation = self.gate_up, self.down, self.config.activation
        quantised = gate_up.scale_XN is not None
        values, scale = fused.quantise_rows(x_TD) if quantised else (x_TD, None)
        values = grouped_product(
            *(values, scale, gate_up.values_XND, gate_up.scale_XN, order_R, starts),
            bias_XN=gate_up.bias_XN,
            choices=self.config.active,
            activation=activation,
        )
        if activation is not None:
            scale = None
        elif quantised:
            values, scale = fused.silu_mul_rows(values)
        else:
            values = fused.silu_mul(values)
        y_RD = grouped_product(
            *(values, scale, down.values_XND, down.scale_XN, order_R, starts),
            bias_XN=down.bias_XN,
            factors_R=weights_TC.view(-1),
        )
        return torch.sum(y_RD.view(*weights_TC.shape, -1), 1, out=out_TD)
