"""Linears of four-bit weights on a CPU, in bf16: they stay packed in memory, and compiled kernels multiply their codes.

Few tokens are bound by the bytes of the weights, a quarter of bf16's. In fp32, and where no kernel fits, a weight is
multiplied out when it is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import linear as plain_linear
from torch.nn.functional import pad

from megatoken.engine.config import ModelConfig
from megatoken.engine.ops import native
from megatoken.engine.ops.native import PackedWeight
from megatoken.engine.quantized_layouts import Groups, stacked_with
from megatoken.engine.schemes.packed4 import Packed4

MOST_TOKENS = 16
"""With more, rows are expanded to fp32 once for all tokens, a block that the cache holds at a time."""
BLOCK_WEIGHTS = 2**17
CHUNK = 128
"""Most columns that the kernel takes at once; weights of 64 more get columns of zeros."""


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """``x W^T + b``."""

    weight: PackedWeight
    bias: Tensor | None


def fits(weight: Packed4) -> bool:
    """Whether the kernels can multiply this weight; they must have been compiled."""
    if weight.group_K is not None or weight.pre_scale_K is not None:
        return False
    return _fits(weight.columns, weight.columns // weight.scale_NG.shape[1])


def _fits(columns: int, group: int) -> bool:
    return columns % 64 == 0 and (group in (16, 32, 64) or group % CHUNK == 0)


def saved_bytes(model: ModelConfig, groups: Mapping[str, Groups], item: int) -> int:
    """What weights that stay packed take less than their values of ``item`` bytes: those of ``groups`` that fit.

    Query, key and value projection are one linear, which stays packed if all three have the same groups.
    """
    fitting = {
        name: shape
        for name, shape in model.linear_shapes.items()
        if name in groups and _fits(shape[1], groups[name].columns)
    }
    saved = 0
    for name, (rows, columns) in fitting.items():
        if any(one not in fitting or groups[one] != groups[name] for one in stacked_with(name, ("q", "k", "v"))):
            continue
        padded, (group, zeros, _) = columns + -columns % CHUNK, groups[name]
        saved += rows * (columns * item - padded // 2 - 4 * (1 + zeros) * padded // group)
    return saved


def pack(weight: Packed4, bias_N: Tensor | None) -> PackedLinear:
    """``weight`` must be one that ``fits``."""
    codes_NB, factor_NG = weight.codes_NB, weight.factors()
    zero_NG = None if weight.zero_NG is None else weight.zero_NG.float()
    if more := -weight.columns % CHUNK:
        groups = more * factor_NG.shape[1] // weight.columns
        codes_NB, factor_NG = pad(codes_NB, (0, more // 2)), pad(factor_NG, (0, groups))
        zero_NG = None if zero_NG is None else pad(zero_NG, (0, groups))
    return PackedLinear(PackedWeight(codes_NB, factor_NG, zero_NG, weight.kind == "e2m1"), bias_N)


def product(x_TD: Tensor, linear: PackedLinear) -> Tensor:
    """``x W^T + b``, summed in fp32 and rounded once to the type of ``x``."""
    x, weight = x_TD.float().contiguous(), linear.weight
    if more := weight.columns - x.shape[1]:
        x = pad(x, (0, more))
    if len(x) <= MOST_TOKENS:
        y_TN = native.packed_product(x, weight)
    else:
        outputs = len(weight.codes_NB)
        y_TN = x.new_empty(len(x), outputs)
        rows = max(1, BLOCK_WEIGHTS // weight.columns)
        for first in range(0, outputs, rows):
            last = min(first + rows, outputs)
            y_TN[:, first:last] = plain_linear(x, native.packed_decode(weight, first, last))
    if linear.bias is not None:
        y_TN += linear.bias
    return y_TN.to(x_TD.dtype)
