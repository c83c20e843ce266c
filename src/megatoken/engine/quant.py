"""Number formats. fp8 here is e4m3, scaled so that the largest magnitude of a tensor or row becomes 448."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0


def quantise_tensor(weight: Tensor) -> tuple[Tensor, float]:
    """One scale for the whole tensor: ``weight ~ values.float() * scale`` with ``values`` e4m3."""
    smallest, largest = weight.aminmax()
    scale = max(max(-smallest.item(), largest.item()) / E4M3_MAX, 1e-12)
    return weight.to(torch.float32, copy=True).div_(scale).to(torch.float8_e4m3fn), scale


def quantise_rows(x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """One scale per row, so that a row's values never depend on the rows beside it.

    Returns:
        e4m3 values [T, D] and fp32 scales [T, 1].
    """
    scale_T1 = (x_TD.abs().amax(-1, keepdim=True).float() / E4M3_MAX).clamp_min(1e-12)
    return (x_TD.float() / scale_T1).to(torch.float8_e4m3fn), scale_T1
