"""Number formats. fp8 here is e4m3 (largest finite 448), scaled so that a tensor's or row's largest magnitude is 448."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0


def quantise_tensor(weight: Tensor) -> tuple[Tensor, float]:
    """One scale for the whole tensor: ``weight ~ values.float() * scale`` with ``values`` e4m3."""
    scale = max(weight.abs().amax().item() / E4M3_MAX, 1e-12)
    return (weight.float() / scale).to(torch.float8_e4m3fn), scale


def quantise_rows(x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """One scale per row, so that a row's values never depend on the rows beside it -> (e4m3 [T, D], fp32 scale [T, 1])."""
    scale_T1 = (x_TD.abs().amax(-1, keepdim=True).float() / E4M3_MAX).clamp_min(1e-12)
    return (x_TD.float() / scale_T1).to(torch.float8_e4m3fn), scale_T1
