"""e4m3 weights and inputs, scaled so that the largest magnitude of a tensor or row becomes 448."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

E4M3_MAX = 448.0
_PART_ELEMENTS = 1 << 20  # decoded at a time, so that the copy in fp32 stays small


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A weight [N, D] that is ``values.float() * scale``."""

    values_ND: Tensor  # e4m3
    scale_N1: Tensor  # fp32 [N, 1], or [1, 1] where all rows have the same
    # the linear's input is meant to be e4m3 of ``x / input_scale``; None if it was not measured
    input_scale: float | None = None

    def to(self, device: torch.device) -> Fp8Weight:
        """The same on another device."""
        return Fp8Weight(self.values_ND.to(device), self.scale_N1.to(device), self.input_scale)

    def decode(self, dtype: torch.dtype) -> Tensor:
        """The values, computed in fp32 and rounded to ``dtype``."""
        decoded_ND = torch.empty(self.values_ND.shape, dtype=dtype, device=self.values_ND.device)
        scale_N1 = self.scale_N1.expand(len(decoded_ND), 1)
        rows = max(1, _PART_ELEMENTS // decoded_ND.shape[1])
        for part, values, scale in zip(
            *(torch.split(x, rows) for x in (decoded_ND, self.values_ND, scale_N1)), strict=True
        ):
            part.copy_(values.float() * scale)
        return decoded_ND

    def share(self, side: int, rank: int, ranks: int) -> Fp8Weight:
        """A rank's rows (``side`` 0) or columns (1) with their scales."""
        scale_N1 = share(self.scale_N1, 0, rank, ranks) if side == 0 and len(self.scale_N1) > 1 else self.scale_N1
        return Fp8Weight(share(self.values_ND, side, rank, ranks), scale_N1, self.input_scale)


def share(whole: Tensor, side: int, rank: int, ranks: int) -> Tensor:
    """A rank's rows (``side`` 0) or columns (1) of a matrix, or elements of a vector, as a contiguous copy."""
    return whole.chunk(ranks, dim=side)[rank].clone(memory_format=torch.contiguous_format)


def quantise_tensor(weight_ND: Tensor) -> Fp8Weight:
    """One scale for the whole tensor."""
    smallest, largest = weight_ND.aminmax()
    scale = max(max(-smallest.item(), largest.item()) / E4M3_MAX, 1e-12)
    values_ND = weight_ND.to(torch.float32, copy=True).div_(scale).to(torch.float8_e4m3fn)
    return Fp8Weight(values_ND, torch.full((1, 1), scale, dtype=torch.float32, device=weight_ND.device))


def quantise_rows(x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """One scale per row, so that a row's values never depend on other rows.

    Returns:
        e4m3 values [T, D] and fp32 scales [T, 1].
    """
    scale_T1 = (x_TD.abs().amax(-1, keepdim=True).float() / E4M3_MAX).clamp_min(1e-12)
    return x_TD.to(torch.float32, copy=True).div_(scale_T1).to(torch.float8_e4m3fn), scale_T1


def stack(weights: Sequence[Fp8Weight]) -> Fp8Weight:
    """Linears that read the same input as one, rows below each other; rows keep their scales, so this is exact.

    The common input scale is the largest, so that no input saturates that did not before.
    """
    input_scales = [weight.input_scale for weight in weights if weight.input_scale is not None]
    return Fp8Weight(
        torch.cat([weight.values_ND for weight in weights]),
        torch.cat([weight.scale_N1.expand(len(weight.values_ND), 1) for weight in weights]),
        max(input_scales) if len(input_scales) == len(weights) else None,
    )


def with_one_scale(weight: Fp8Weight) -> Fp8Weight:
    """The largest scale for all rows; values of rows that had another are rounded once more."""
    largest_11 = weight.scale_N1.amax().view(1, 1)
    if bool((weight.scale_N1 == largest_11).all()):
        return Fp8Weight(weight.values_ND, largest_11, weight.input_scale)
    values = weight.values_ND.float().mul_(weight.scale_N1 / largest_11)
    return Fp8Weight(values.to(torch.float8_e4m3fn), largest_11, weight.input_scale)
