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
from megatoken.engine.ops.grouped_product import grouped_product
from megatoken.engine.ops.routing_kernels import route
from megatoken.engine.schemes import LinearScheme
from megatoken.errors import CapacityError


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One linear of all experts, values [X, N, D]; with e4m3 values also a scale for each output, fp32 [X, N]."""

    values_XND: Tensor
    scale_XN: Tensor | None

    @classmethod
    def empty(cls, experts: int, rows: int, columns: int, like: Any) -> Self:
        """Room for the weights of all experts, in the format of ``like``, the first."""
        if isinstance(like, Tensor):
            return cls(like.new_empty(experts, rows, columns), None)
        values = like.values_ND.new_empty(experts, rows, columns)
        return cls(values, like.scale_N1.new_empty(experts, rows))

    def put(self, expert: int, weight: Any) -> None:
        """The weight of one expert [N, D], plain or ``Fp8Weight``."""
        if self.scale_XN is None:
            self.values_XND[expert] = weight
        else:
            self.values_XND[expert] = weight.values_ND
            self.scale_XN[expert] = weight.scale_N1[:, 0]


@dataclass(slots=True)
class Experts(Linear):
    """A mixture. To the operations it is a linear that takes bf16; its own weight is the router's [X, D].

    e4m3 experts scale the input of each token, and of each of its choices between the two products.
    """

    gate_up: ExpertWeights = field(kw_only=True)  # gate first, [X, 2 F, D]
    down: ExpertWeights = field(kw_only=True)  # [X, D, F]
    config: ExpertsConfig = field(kw_only=True)

    @classmethod
    def pack(cls, router_XD: Tensor, experts: Iterable[list[Any]], config: ExpertsConfig, scheme: LinearScheme) -> Self:
        """Expert by expert, so that the peak is the packed mixture and one expert.

        Raises:
            CapacityError: the products cannot have these sides.
        """
        hidden, width = router_XD.shape[1], config.intermediate_size
        gate_up = down = None
        for number, parts in enumerate(experts):
            gate, up, out = (scheme.quantise(part) if isinstance(part, Tensor) else part for part in parts)
            both = scheme.stack([gate, up])
            if gate_up is None or down is None:
                item = (both if isinstance(both, Tensor) else both.values_ND).itemsize
                if hidden * item % 16 or width * item % 16:
                    raise CapacityError(f"experts of {hidden} x {width}: a GPU needs multiples of {16 // item}")
                gate_up = ExpertWeights.empty(config.count, 2 * width, hidden, both)
                down = ExpertWeights.empty(config.count, hidden, width, out)
            gate_up.put(number, both)
            down.put(number, out)
        assert gate_up is not None
        assert down is not None
        return cls(router_XD, None, gate_up=gate_up, down=down, config=config)

    def product(self, x: Any, out_TN: Tensor | None = None) -> Tensor:
        """The mixture of bf16 [T, D], see ``reference.experts``, in ``out`` if there is one."""
        return self.mixture(x, torch.mm(x, self.weight.t(), out_dtype=torch.float32), out_TN)

    def mixture(self, x_TD: Tensor, logits_TX: Tensor, out_TD: Tensor | None = None) -> Tensor:
        """The same from the router's scores, fp32."""
        weights_TC, _, order_R, starts = route(logits_TX, self.config)
        quantised = self.gate_up.scale_XN is not None
        choices, values, scale = self.config.active, x_TD, None
        if quantised:
            values, scale = fused.quantise_rows(x_TD)
        h_R2F = grouped_product(
            values, scale, self.gate_up.values_XND, self.gate_up.scale_XN, order_R, starts, choices=choices
        )
        values, scale = fused.silu_mul_rows(h_R2F) if quantised else (fused.silu_mul(h_R2F), None)
        y_RD = grouped_product(
            values, scale, self.down.values_XND, self.down.scale_XN, order_R, starts, factors_R=weights_TC.view(-1)
        )
        return torch.sum(y_RD.view(*weights_TC.shape, -1), 1, out=out_TD)
