"""Linears of four-bit weights on a CPU: they stay packed in memory, and compiled kernels expand them in registers.

Without a kernel that fits, ``can_keep`` says so, and the weight is multiplied out when it is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear as plain_linear

from megatoken.engine.ops import native
from megatoken.engine.schemes.packed4 import SYMMETRIC_ZERO, Packed4

MOST_TOKENS = 8
"""With more, rows are expanded to fp32 once for all tokens, a block that the cache holds at a time."""
BLOCK_WEIGHTS = 2**17


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """Codes as in ``Packed4``, a factor for each group of columns, and for int4 a zero; both fp32."""

    codes_NB: Tensor
    factor_NG: Tensor
    zero_NG: Tensor | None
    bias: Tensor | None

    @property
    def columns(self) -> int:
        """K."""
        return 2 * self.codes_NB.shape[1]


def can_keep(weight: Packed4) -> bool:
    """Whether the kernels can multiply this weight."""
    regular = weight.group_K is None and weight.pre_scale_K is None
    return regular and weight.columns // weight.scale_NG.shape[1] % 8 == 0 and native.has_packed()


def pack(weight: Packed4, bias_N: Tensor | None) -> PackedLinear:
    """``weight`` must satisfy ``can_keep``."""
    zero_NG = None
    if weight.kind == "int4":
        zero_NG = torch.full(weight.scale_NG.shape, float(SYMMETRIC_ZERO))
        if weight.zero_NG is not None:
            zero_NG.copy_(weight.zero_NG)
    return PackedLinear(weight.codes_NB, weight.factors(), zero_NG, bias_N)


def product(x_TD: Tensor, linear: PackedLinear) -> Tensor:
    """``x W^T + b``, summed in fp32 and rounded once to the type of ``x``."""
    x = x_TD.float().contiguous()
    operands = (linear.codes_NB, linear.factor_NG, linear.zero_NG)
    if len(x) <= MOST_TOKENS:
        y_TN = native.packed_product(x, *operands)
    else:
        outputs, inputs = len(linear.codes_NB), linear.columns
        y_TN = x.new_empty(len(x), outputs)
        rows = max(1, BLOCK_WEIGHTS // inputs)
        for first in range(0, outputs, rows):
            last = min(first + rows, outputs)
            y_TN[:, first:last] = plain_linear(x, native.packed_decode(*operands, first, last))
    if linear.bias is not None:
        y_TN += linear.bias
    return y_TN.to(x_TD.dtype)
