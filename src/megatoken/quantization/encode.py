"""Weights to fp8 and four bits: of a few scales for each block, the one with the smallest squared error.

Nothing is calibrated: the scales follow from the weights alone. Letters: N outputs, K inputs, G blocks of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from megatoken.engine.quantized_layouts import LARGEST_CODE, MXFP4_BLOCK, NVFP4_BLOCK
from megatoken.engine.schemes.fp8_weight import Fp8Weight, quantise_rows
from megatoken.engine.schemes.packed4 import MAGNITUDES, SYMMETRIC_ZERO, Packed4, pack

NVFP4_LARGEST_SCALE = 256.0
"""Scale of the block with the largest value. Half of what e4m3 holds, so that a block may take 4 instead of 6 as its
largest code ("four over six", arXiv 2512.02010)."""
INT4_STEPS = (7.0, 7.5, 8.0, 8.5, 9.5)
"""Largest magnitude of a block in steps of its scale: with more than 7.5 the largest values are clipped."""

_PART_ELEMENTS = 1 << 20  # encoded at a time
_SMALLEST_E4M3 = 2.0**-9


def nvfp4(weight_NK: Tensor, largest: float) -> Packed4:
    """Blocks of 16 with e4m3 scales; ``largest`` is that of the linears that an engine merges with this one."""
    divisor = torch.tensor(
        NVFP4_LARGEST_SCALE * LARGEST_CODE / largest if largest else 1.0, dtype=torch.float32
    ).double()

    def scales(largest_NG: Tensor) -> list[Tensor]:
        wanted = [largest_NG.double() * divisor / code for code in (LARGEST_CODE, 4.0)]
        return [one.float().clamp(_SMALLEST_E4M3, 448.0).to(torch.float8_e4m3fn) for one in wanted]

    def factor(scale_NG: Tensor) -> Tensor:
        return (scale_NG.double() * (1 / divisor)).float()

    codes_NB, scale_NG = _encode(weight_NK, NVFP4_BLOCK, scales, factor, _e2m1_codes)
    second_N1 = (1 / divisor).expand(len(weight_NK), 1)
    return Packed4(codes_NB, weight_NK.shape[1], "e2m1", scale_NG, second_N1)


def mxfp4(weight_NK: Tensor) -> Packed4:
    """Blocks of 32 with powers of two: the largest value is coded by 2 to 4, or by 4 to 6 with clipping."""

    def scales(largest_NG: Tensor) -> list[Tensor]:
        exponent = largest_NG.frexp().exponent - 3  # the largest is 4 to 8 times 2^exponent
        wanted = [(one + 127).clamp(0, 254).to(torch.uint8) for one in (exponent, exponent + 1)]
        return [one.view(torch.float8_e8m0fnu) for one in wanted]

    codes_NB, scale_NG = _encode(weight_NK, MXFP4_BLOCK, scales, Tensor.float, _e2m1_codes)
    return Packed4(codes_NB, weight_NK.shape[1], "e2m1", scale_NG)


def int4(weight_NK: Tensor, block: int, scale_dtype: torch.dtype) -> Packed4:
    """Symmetric, -8 to 7 times a scale for each block."""

    def scales(largest_NG: Tensor) -> list[Tensor]:
        smallest = torch.finfo(scale_dtype).tiny
        return [(largest_NG / steps).clamp_min(smallest).to(scale_dtype) for steps in INT4_STEPS]

    codes_NB, scale_NG = _encode(weight_NK, block, scales, Tensor.float, _int4_codes)
    return Packed4(codes_NB, weight_NK.shape[1], "int4", scale_NG)


def fp8(weight_NK: Tensor) -> Fp8Weight:
    """e4m3 with a scale for each row."""
    return Fp8Weight(*quantise_rows(weight_NK))


def _e2m1_codes(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest codes, the even one of two that are equally near, and their values."""
    middles = [(low + high) / 2 for low, high in pairwise(MAGNITUDES)]
    bounds = torch.tensor(middles)
    bounds[1::2] = torch.nextafter(bounds[1::2], torch.zeros(3))  # below, so that a middle goes to the even code above
    magnitude = torch.bucketize(scaled.abs(), bounds)
    values = torch.tensor(MAGNITUDES)[magnitude].copysign(scaled)
    return (magnitude + 8 * scaled.signbit()).to(torch.uint8), values


def _int4_codes(scaled: Tensor) -> tuple[Tensor, Tensor]:
    values = scaled.round().clamp(-SYMMETRIC_ZERO, SYMMETRIC_ZERO - 1)
    return (values + SYMMETRIC_ZERO).to(torch.uint8), values


def _encode(
    weight_NK: Tensor,
    block: int,
    scales: Callable[[Tensor], Sequence[Tensor]],
    factor: Callable[[Tensor], Tensor],
    encode: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Packed codes and scales [N, G]. ``scales``: candidates for blocks of these largest magnitudes."""
    rows = max(1, _PART_ELEMENTS // weight_NK.shape[1])
    parts = []
    for part_NK in torch.split(weight_NK.float(), rows):
        blocks = part_NK.view(len(part_NK), -1, block)
        candidates = scales(blocks.abs().amax(-1))
        codes, errors = [], []
        for scale_NG in candidates:
            factor_NG1 = factor(scale_NG).unsqueeze(-1)
            coded, values = encode(blocks / factor_NG1)
            codes.append(coded)
            errors.append((values * factor_NG1 - blocks).square().sum(-1))
        best_1NG = torch.stack(errors).argmin(0, keepdim=True)  # the first of those that are equally good
        best_codes = torch.stack(codes).gather(0, best_1NG.unsqueeze(-1).expand(-1, -1, -1, block))
        best_bits = torch.stack([_bits(one) for one in candidates]).gather(0, best_1NG)
        parts.append((pack(best_codes[0].flatten(1)), best_bits[0].view(candidates[0].dtype)))
    packed, scale = zip(*parts, strict=True)
    return torch.cat(packed), torch.cat(scale)


def _bits(scale: Tensor) -> Tensor:
    """As integers, since PyTorch chooses among no 8-bit floating-point numbers."""
    return scale.view(torch.uint8 if scale.itemsize == 1 else torch.int16)
