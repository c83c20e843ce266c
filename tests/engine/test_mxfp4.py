"""MXFP4 weights against a decoder written from the format's definition."""

from __future__ import annotations

import math

import pytest
import torch

from megatoken.engine.schemes.packed4 import Packed4, expand


def mxfp4(codes: torch.Tensor, scales: torch.Tensor) -> Packed4:
    return Packed4(codes, 2 * codes.shape[1], "e2m1", scales.view(torch.float8_e8m0fnu))


def value(code: int, scale: int) -> float:
    """e2m1: sign, two bits of exponent with bias 1, one of mantissa; e8m0."""
    exponent, mantissa = code >> 1 & 3, code & 1
    magnitude = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)
    return math.nan if scale == 255 else (-1) ** (code >> 3) * magnitude * 2.0 ** (scale - 127)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_byte_with_every_scale(dtype: torch.dtype) -> None:
    """Row s has scale s in all of its 16 blocks, and each byte once."""
    codes = torch.arange(256, dtype=torch.uint8).expand(256, 256)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 16)
    expected = [[value(code, scale) for byte in range(256) for code in (byte & 15, byte >> 4)] for scale in range(256)]
    decoded = mxfp4(codes, scales).decode(dtype)
    assert decoded.dtype == dtype
    torch.testing.assert_close(
        decoded.double(), torch.tensor(expected).to(dtype).double(), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("octaves", [1, 14])
@pytest.mark.parametrize("highest", [40, 127, 252])
def test_e4m3_holds_blocks_within_14_octaves(octaves: int, highest: int) -> None:
    """Whatever the codes are."""
    random = torch.Generator().manual_seed(octaves)
    codes = torch.randint(256, (5, 96 // 2), generator=random, dtype=torch.uint8)
    scales = torch.randint(highest - octaves + 1, highest + 1, (5, 3), generator=random, dtype=torch.uint8)
    codes[0] = 0
    weight, exact = expand(mxfp4(codes, scales))
    assert exact
    assert (weight.scale_N1.frexp().mantissa == 0.5).all()
    torch.testing.assert_close(
        weight.values_ND.float() * weight.scale_N1, mxfp4(codes, scales).decode(torch.float32), rtol=0, atol=0
    )


def test_what_e4m3_cannot_hold_is_reported_and_rounded() -> None:
    codes = torch.full((1, 32), 0x77, dtype=torch.uint8)
    codes[:, 16:] = 0x33
    weight, exact = expand(mxfp4(codes, torch.tensor([[127, 109]], dtype=torch.uint8)))
    assert not exact
    assert weight.values_ND.float()[0, 0] * weight.scale_N1[0, 0] == 6.0
