"""Four-bit weights, in the one form that every layout of a checkpoint is read into.

A value is ``factor x (code - zero)``, rounded once to fp32 where the product has more bits than that: the factor is the
block's scale times the second scale, rounded to fp32. Nothing here knows which program wrote the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from megatoken.engine.schemes.fp8_weight import E4M3_MAX, Fp8Weight

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the e2m1 codes 0 to 7; codes 8 to 15 are their negatives."""

Kind = Literal["e2m1", "int4"]
"""What a code stands for: a sign bit above three bits of ``MAGNITUDES``, or an integer from 0 to 15."""

SYMMETRIC_ZERO = 8
"""The zero of int4 codes that have none of their own."""
VALUES: dict[Kind, tuple[float, ...]] = {
    "e2m1": (*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES)),
    "int4": tuple(range(16)),
}
_PART_ELEMENTS = 1 << 20  # decoded at a time, so that copies in fp32 stay small
_SMALLEST_EXPONENT = -100  # of an e4m3 scale, so that its product with an input's scale is no subnormal


@dataclass(frozen=True, slots=True)
class Packed4:
    """A weight [N, K] of four-bit codes with scales for groups of columns."""

    codes_NB: Tensor  # uint8 [N, K / 2, rounded up]; the even column in the low bits
    columns: int  # K
    kind: Kind  # of the codes
    scale_NG: Tensor  # for each group: e4m3, e8m0 (a power of two), fp16, bf16 or fp32
    # fp64 [N, 1], multiplies the scales of a row; fp64, so that the reciprocal of a stored divisor gives the same
    # factor as the division. None for 1.
    second_N1: Tensor | None = None
    zero_NG: Tensor | None = None  # uint8, subtracted from int4 codes; None for ``SYMMETRIC_ZERO``, and for e2m1
    group_K: Tensor | None = None  # int64, the group of each column; None where groups are equally many neighbours
    pre_scale_K: Tensor | None = None  # fp32, multiplies the linear's input; None for 1
    # magnitude that was measured of the input, after ``pre_scale_K``; None if it was not
    largest_input: float | None = None

    def factors(self) -> Tensor:
        """fp32 [N, G]: the scales times the second scale, rounded once."""
        if self.second_N1 is None:
            return self.scale_NG.float()
        return (self.scale_NG.double() * self.second_N1).float()

    def to(self, device: torch.device) -> Packed4:
        """The same on another device."""
        return self._with(lambda tensor: tensor.to(device), lambda tensor: tensor.to(device))

    def rows(self, rows: slice) -> Packed4:
        """Some rows, as views."""
        return self._with(lambda tensor: tensor[rows], lambda tensor: tensor)

    def decode(self, dtype: torch.dtype) -> Tensor:
        """The values [N, K], rounded once more to ``dtype``; factors of the input are multiplied into them.

        NaN or infinite where a scale is.
        """
        values_NK = torch.empty(len(self.codes_NB), self.columns, dtype=dtype, device=self.codes_NB.device)
        for rows in _parts(self):
            values_NK[rows] = _values(self.rows(rows), second=True)
        return values_NK

    def _with(self, by_row: Callable[[Tensor], Tensor], by_column: Callable[[Tensor], Tensor]) -> Packed4:
        row_tensors = {name: getattr(self, name) for name in ("codes_NB", "scale_NG", "second_N1", "zero_NG")}
        column_tensors = {name: getattr(self, name) for name in ("group_K", "pre_scale_K")}
        changed = {name: by_row(tensor) for name, tensor in row_tensors.items() if tensor is not None}
        changed |= {name: by_column(tensor) for name, tensor in column_tensors.items() if tensor is not None}
        return replace(self, **changed)  # type: ignore[arg-type]


def draw(weight_NK: Tensor) -> Packed4:
    """Plain weights as NVFP4, each block's largest value as its largest code: for random weights.

    ``megatoken.quantization`` looks for better scales.
    """
    rows, columns = weight_NK.shape
    second = max(weight_NK.abs().amax().item(), 1e-30) / (E4M3_MAX * MAGNITUDES[-1])
    bounds = torch.tensor(MAGNITUDES, device=weight_NK.device)
    bounds = (bounds[1:] + bounds[:-1]) / 2
    codes, scales = [], []
    for part in torch.split(weight_NK, max(1, _PART_ELEMENTS // columns)):
        blocks = part.float().view(len(part), -1, 16)
        scale = (blocks.abs().amax(-1) / (second * MAGNITUDES[-1])).clamp_min(2.0**-9).to(torch.float8_e4m3fn)
        blocks = blocks / (scale.float() * second).unsqueeze(-1)
        codes.append(pack((torch.bucketize(blocks.abs(), bounds) | blocks.signbit() * 8).view(len(part), -1).byte()))
        scales.append(scale)
    second_N1 = torch.full((rows, 1), second, dtype=torch.float64, device=weight_NK.device)
    return Packed4(torch.cat(codes), columns, "e2m1", torch.cat(scales), second_N1)


def pack(codes_NK: Tensor) -> Tensor:
    """Codes, one in each uint8 [N, K], as [N, K / 2, rounded up]."""
    if codes_NK.shape[1] % 2:
        codes_NK = torch.nn.functional.pad(codes_NK, (0, 1))
    return (codes_NK[:, ::2] | codes_NK[:, 1::2] << 4).contiguous()


def unpack(codes_NB: Tensor, columns: int) -> Tensor:
    """The inverse of ``pack``: uint8 [N, K]."""
    return torch.stack((codes_NB & 15, codes_NB >> 4), dim=-1).view(len(codes_NB), -1)[:, :columns]


def expand(weight: Packed4) -> tuple[Fp8Weight, bool]:
    """A finite weight as e4m3, and whether that holds every value exactly.

    The scale of a row is its second scale times the smallest power of two with which no value saturates. So e4m3 holds
    e2m1 whose scales are powers of two within 14 octaves of each other.
    """
    rows, device = len(weight.codes_NB), weight.codes_NB.device
    second_N1 = torch.ones(1, 1, dtype=torch.float64, device=device) if weight.second_N1 is None else weight.second_N1
    second_N1 = second_N1.expand(rows, 1)
    values_ND = torch.empty(rows, weight.columns, dtype=torch.float8_e4m3fn, device=device)
    scale_N1 = torch.empty(rows, 1, device=device)
    exact = True
    for part in _parts(weight):
        values = _values(weight.rows(part), second=False).double()
        fraction, exponent = (values.abs().amax(-1, keepdim=True) / E4M3_MAX).frexp()
        exponent -= (fraction == 0.5).int()  # the largest is 448 times a power of two
        exponent = torch.maximum(exponent, _SMALLEST_EXPONENT - second_N1[part].frexp().exponent)
        scaled = torch.ldexp(values, -exponent)
        values_ND[part] = scaled.float().to(torch.float8_e4m3fn)
        scale_N1[part] = torch.ldexp(second_N1[part], exponent).float()
        exact = exact and bool((values_ND[part].double() == scaled).all())
    measured = None if weight.pre_scale_K is not None or not weight.largest_input else weight.largest_input / E4M3_MAX
    return Fp8Weight(values_ND, scale_N1, measured), exact


def stack(weights: Sequence[Packed4]) -> Packed4 | None:
    """Linears that read the same input as one, rows below each other, with unchanged codes and scales.

    None where one form cannot hold them: other kinds, groups or factors of the input.
    """
    first = weights[0]
    for other in weights[1:]:
        same = (other.kind, other.columns, other.scale_NG.dtype, other.scale_NG.shape[1:]) == (
            *(first.kind, first.columns, first.scale_NG.dtype, first.scale_NG.shape[1:]),
        )
        if not same or not (_equal(other.group_K, first.group_K) and _equal(other.pre_scale_K, first.pre_scale_K)):
            return None

    def below(name: str, missing: float, dtype: torch.dtype, width: int) -> Tensor | None:
        parts = [getattr(weight, name) for weight in weights]
        if all(part is None for part in parts):
            return None
        shapes = [(len(weight.codes_NB), width) for weight in weights]
        filled = [
            torch.full(shape, missing, dtype=dtype, device=first.codes_NB.device)
            if part is None
            else part.expand(shape)
            for part, shape in zip(parts, shapes, strict=True)
        ]
        return torch.cat(filled)

    largest = [weight.largest_input for weight in weights if weight.largest_input is not None]
    return replace(
        first,
        codes_NB=torch.cat([weight.codes_NB for weight in weights]),
        # As bytes, because PyTorch need not know how to put powers of two below each other on every device.
        scale_NG=torch.cat([weight.scale_NG.view(torch.uint8) for weight in weights]).view(first.scale_NG.dtype),
        second_N1=below("second_N1", 1.0, torch.float64, 1),
        zero_NG=below("zero_NG", SYMMETRIC_ZERO, torch.uint8, first.scale_NG.shape[1]),
        largest_input=max(largest) if len(largest) == len(weights) else None,
    )


def _parts(weight: Packed4) -> list[slice]:
    rows = max(1, _PART_ELEMENTS // max(1, weight.columns))
    return [slice(start, start + rows) for start in range(0, len(weight.codes_NB), rows)]


def _values(weight: Packed4, *, second: bool) -> Tensor:
    """fp32 [N, K], with or without the second scale."""
    device, (rows, groups) = weight.codes_NB.device, weight.scale_NG.shape
    pairs = [[VALUES[weight.kind][byte & 15], VALUES[weight.kind][byte >> 4]] for byte in range(256)]
    values_NK = torch.tensor(pairs, device=device)[weight.codes_NB.int()].view(rows, -1)[:, : weight.columns]
    factor_NG = weight.factors() if second else weight.scale_NG.float()
    zero_NG = weight.zero_NG
    if weight.group_K is not None:
        factor_NG = factor_NG[:, weight.group_K]
        zero_NG = None if zero_NG is None else zero_NG[:, weight.group_K]
        groups = weight.columns
    values = values_NK.reshape(rows, groups, -1)
    if weight.kind == "int4":
        values = values - (SYMMETRIC_ZERO if zero_NG is None else zero_NG.float().unsqueeze(-1))
    values_NK = (values * factor_NG.unsqueeze(-1)).view(rows, weight.columns)
    return values_NK if weight.pre_scale_K is None else values_NK * weight.pre_scale_K


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
