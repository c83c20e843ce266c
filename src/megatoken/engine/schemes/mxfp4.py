"""MXFP4 weights (OCP Microscaling Formats 1.0): e2m1 codes, and a power of two for every 32 along the inputs.

Two codes share a byte, that of the even column in the low bits. A code is a sign bit above three bits of magnitude; a
scale b stands for 2^(b - 127), 255 for NaN. Both forms here are exact: bf16 and fp32 hold every value, and e4m3 with a
power of two for a row holds rows whose blocks lie within 14 octaves of each other.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatoken.engine.schemes.fp8_weight import E4M3_MAX, Fp8Weight

BLOCK = 32
"""Columns that share a scale."""
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the codes 0 to 7; codes 8 to 15 are their negatives."""

_VALUES = (*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES))
_PAIRS = [[_VALUES[byte & 15], _VALUES[byte >> 4]] for byte in range(256)]
_SCALES = [*(2.0 ** (b - 127) for b in range(255)), math.nan]
_SMALLEST_EXPONENT = -100  # of a row's scale, so that its product with an input's scale is no subnormal


def decode(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values, exact in fp32 and bf16.

    Args:
        codes: uint8 [..., K / 2], K a multiple of 32.
        scales: uint8 [..., K / 32].
        dtype: of the result.

    Returns:
        [..., K]; NaN where a scale is 255, infinite where the product overflows.
    """
    pairs, powers = (torch.tensor(table, device=codes.device) for table in (_PAIRS, _SCALES))
    values = pairs[codes.int()].view(*scales.shape, BLOCK) * powers[scales.int()].unsqueeze(-1)
    return values.view(*codes.shape[:-1], -1).to(dtype)


def expand(codes_NB: Tensor, scales_NG: Tensor) -> tuple[Fp8Weight, bool]:
    """A finite weight as e4m3 with a power of two for each row, and whether every value is exact.

    Args:
        codes_NB: uint8 [N, K / 2], K a multiple of 32.
        scales_NG: uint8 [N, K / 32].
    """
    values_NK = decode(codes_NB, scales_NG)
    # The largest value of a row becomes 256 or 384. An exponent x of frexp means a value below 2^x.
    exponent_N1 = values_NK.abs().amax(-1, keepdim=True).frexp().exponent - 9
    scale_N1 = torch.exp2(exponent_N1.clamp_min(_SMALLEST_EXPONENT).float())
    scaled_NK = values_NK / scale_N1
    weight = Fp8Weight(scaled_NK.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale_N1)
    return weight, bool((weight.values_ND.float() == scaled_NK).all())
