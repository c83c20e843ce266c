"""Whether the decoder of four-bit weights gives the values that the formats define, for every code and scale.

The values here come from the bits by Python's own exact arithmetic, not from the decoder's tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import torch

from megatoken.engine.schemes.packed4 import Kind, Packed4, pack

_LARGEST_E8M0 = 252  # six times as much is finite in fp32


@dataclass(frozen=True, slots=True)
class DecoderCheck:
    """A format's decoder: ``values`` compared, ``wrong`` of them."""

    name: str
    values: int
    wrong: int


def check_decoders() -> list[DecoderCheck]:
    """All formats that are read."""
    every_e4m3 = [bits for bits in range(256) if bits & 127 != 127]
    return [
        _check("e2m1 with e4m3 scales (NVFP4)", "e2m1", every_e4m3, torch.float8_e4m3fn),
        _check("e2m1 with powers of two (MXFP4)", "e2m1", range(_LARGEST_E8M0 + 1), torch.float8_e8m0fnu),
        *(_check(f"int4 with zero {zero}", "int4", range(0, 0x7C00, 37), torch.float16, zero) for zero in (0, 8, 15)),
    ]


def e2m1(code: int) -> Fraction:
    """A sign, two bits of exponent with bias 1, one bit of mantissa."""
    exponent, mantissa = code >> 1 & 3, Fraction(code & 1, 2)
    magnitude = mantissa if exponent == 0 else (1 + mantissa) * 2 ** (exponent - 1)
    return -magnitude if code & 8 else magnitude


def _scale(bits: int, dtype: torch.dtype) -> Fraction:
    if dtype == torch.float8_e8m0fnu:
        return Fraction(2) ** (bits - 127)
    mantissa_bits, bias = (3, 7) if dtype == torch.float8_e4m3fn else (10, 15)
    sign_bit = 1 << (7 if dtype == torch.float8_e4m3fn else 15)
    exponent, mantissa = (bits & sign_bit - 1) >> mantissa_bits, bits & (1 << mantissa_bits) - 1
    share = Fraction(mantissa, 1 << mantissa_bits)
    magnitude = share * Fraction(2) ** (1 - bias) if exponent == 0 else (1 + share) * Fraction(2) ** (exponent - bias)
    return -magnitude if bits & sign_bit else magnitude


def _check(name: str, kind: Kind, scales: range | list[int], dtype: torch.dtype, zero: int = 0) -> DecoderCheck:
    """Each scale in a row of its own, with all sixteen codes. The products here are exact in fp32."""
    codes = torch.arange(16, dtype=torch.uint8).expand(len(scales), 16)
    bits = torch.tensor(list(scales), dtype=torch.int32)[:, None]
    stored = bits.to(torch.uint8 if dtype.itemsize == 1 else torch.int16).view(dtype)
    zeros = torch.full((len(scales), 1), zero, dtype=torch.uint8) if kind == "int4" else None
    found = Packed4(pack(codes), 16, kind, stored, zero_NG=zeros).decode(torch.float32)
    meant = [
        [(e2m1(code) if kind == "e2m1" else code - zero) * _scale(one, dtype) for code in range(16)] for one in scales
    ]
    wrong = sum(
        Fraction(value) != wanted
        for row, wanted_row in zip(found.tolist(), meant, strict=True)
        for value, wanted in zip(row, wanted_row, strict=True)
    )
    return DecoderCheck(name, found.numel(), wrong)
