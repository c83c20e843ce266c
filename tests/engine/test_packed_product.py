"""The kernels of four-bit weights on a GPU, compiled for this CPU, against the weights decoded by their definition."""

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatoken.engine.ops import nvrtc, packed_product
from megatoken.engine.ops.packed_product import EXPANSION, LAUNCHES, Launch, PackedTiles, choose, fits
from megatoken.engine.schemes.fp8_weight import with_one_scale
from megatoken.engine.schemes.packed4 import Packed4, expand, pack

HERE, KERNELS = Path(__file__).parent, Path(packed_product.__file__).parent
GROUPS = (16, 32)
PROGRAM = """
#define OWN_INSTRUCTIONS
#include "emulated_gpu.h"
#include "packed_product.cu"
extern "C" void product(int columns, int rows, const uint4* codes, const u16* scales, const float* factors,
                        const unsigned char* x, const float* x_scale, const u16* bias, u16* out, int tokens,
                        int outputs, int depth) {
  run(columns, rows, 32 * WARPS,
      [=] { packed_product(codes, scales, factors, x, x_scale, bias, out, tokens, outputs, depth); });
}
extern "C" void expansion(int columns, const uint4* codes, const u16* scales, const float* first, const float* second,
                          unsigned char* out, int depth) {
  run(columns, 1, 32 * WARPS, [=] { packed_expansion(codes, scales, first, second, out, depth); });
}
"""
Build = Callable[[int, Launch], ctypes.CDLL]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Compiles the kernels for groups of a size, once for each launch."""
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "kernels.cpp").write_text(PROGRAM)

    def library(group: int, launch: Launch) -> ctypes.CDLL:
        path = folder / f"{group}-{'-'.join(map(str, launch))}.so"
        if not path.exists():
            constants = {"group": group, **launch._asdict()}
            subprocess.run(
                [
                    *("g++", "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{HERE}", f"-I{KERNELS}", "-o", str(path)),
                    *(f"-D{name.upper()}={value}" for name, value in constants.items()),
                    str(folder / "kernels.cpp"),
                ],
                check=True,
            )
        return ctypes.CDLL(str(path))

    return library


def address(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def expanded(library: ctypes.CDLL, tiles: PackedTiles) -> Tensor:
    out = torch.empty(tiles.sides, dtype=torch.float8_e4m3fn)
    arguments = map(address, (tiles.codes, tiles.scales, tiles.first_N, tiles.second_N, out))
    library.expansion(len(tiles.codes), *arguments, tiles.sides[1])
    return out


def product(
    library: ctypes.CDLL, launch: Launch, tiles: PackedTiles, x: Tensor, scale: Tensor, bias: Tensor | None
) -> Tensor:
    outputs, depth = tiles.sides
    out = torch.empty(len(x), outputs, dtype=torch.bfloat16)
    arguments = map(address, (tiles.codes, tiles.scales, tiles.factor_N, x, scale, bias, out))
    assert launch.shared_bytes(tiles.group) <= 227 * 1024
    grid = len(tiles.codes) // launch.output_tiles, -(-len(x) // (8 * launch.token_tiles))
    library.product(*grid, *arguments, len(x), outputs, depth)
    return out


def random_weight(rows: int, columns: int, group: int, seed: int) -> Packed4:
    """Codes and scales of all kinds; of NVFP4 with second scales that differ from row to row."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    lowest, highest = (1, 127) if group == 16 else (100, 140)
    scales = torch.randint(lowest, highest, (rows, columns // group), generator=generator, dtype=torch.uint8)
    if group == 32:
        return Packed4(codes, columns, "e2m1", scales.view(torch.float8_e8m0fnu))
    second = torch.rand(rows, 1, generator=generator, dtype=torch.float64) / 100 + 1e-3
    return Packed4(codes, columns, "e2m1", scales.view(torch.float8_e4m3fn), second)


def every_code_with_every_scale(group: int) -> Packed4:
    """One scale a row next to the largest, so that a row's exponent differs; every group has every code."""
    scales = torch.arange(256) if group == 16 else torch.arange(250)
    scales = scales[(group == 32) | (scales & 127 != 127)]  # without NaN
    scales = torch.cat([scales, scales[: -len(scales) % 16]]).to(torch.uint8)
    groups = 64 // group
    bytes_NG = scales[:, None].repeat(1, groups)
    bytes_NG[1::2, 1:] = scales.flip(0)[1::2, None]
    codes = torch.arange(16, dtype=torch.uint8).repeat(len(scales), 4)
    codes[1::3] = codes[1::3].flip(1)
    dtype = torch.float8_e4m3fn if group == 16 else torch.float8_e8m0fnu
    return Packed4(pack(codes), 64, "e2m1", bytes_NG.view(dtype))


@pytest.mark.parametrize("group", GROUPS)
def test_the_expansion_has_the_bytes_of_a_weight_that_is_expanded_when_it_is_loaded(build: Build, group: int) -> None:
    weights = [
        every_code_with_every_scale(group),
        *(random_weight(*sides, group, 1) for sides in ((16, 64), (48, 1344))),
    ]
    for weight in weights:
        tiles, expected = PackedTiles.pack(weight), with_one_scale(expand(weight)[0])
        values = expanded(build(group, EXPANSION), tiles)
        assert torch.equal(values.view(torch.uint8), expected.values_ND.view(torch.uint8))
        assert torch.equal(tiles.weight_scale, expected.scale_N1.view(()))


@pytest.mark.parametrize(
    ("group", "launch", "rows", "columns", "tokens"),
    [
        (16, EXPANSION, 16, 64, 1),
        (16, LAUNCHES[2], 32, 2624, 8),
        (32, EXPANSION, 48, 704, 3),
        (16, LAUNCHES[1], 64, 1152, 11),
        (32, LAUNCHES[-1], 32, 128, 64),
        (32, LAUNCHES[-1], 64, 320, 65),
        (16, LAUNCHES[0], 80, 2624, 8),
        (32, LAUNCHES[4], 64, 704, 9),
    ],
)
def test_products_are_those_of_the_decoded_weight(
    build: Build, group: int, launch: Launch, rows: int, columns: int, tokens: int
) -> None:
    weight = random_weight(rows, columns, group, 2)
    generator = torch.Generator().manual_seed(3)
    x = (50 * torch.randn(tokens, columns, generator=generator)).to(torch.float8_e4m3fn)
    scale, bias = torch.tensor([0.03]), torch.randn(rows, generator=generator).bfloat16()
    for added, late in ((bias, 0), (None, 1)):
        ctypes.c_int.in_dll(build(group, launch), "late").value = late  # whether copies arrive as late as they may
        y = product(build(group, launch), launch, PackedTiles.pack(weight), x, scale, added)
        exact = x.double() @ weight.decode(torch.float64).t() * scale.double()
        magnitudes = x.double().abs() @ weight.decode(torch.float64).abs().t() * scale.double()
        if added is not None:
            exact += added.double()
        # One rounding to bf16, and those of sums in fp32.
        assert ((y.double() - exact).abs() <= exact.abs() * 2**-8 + magnitudes * columns * 2**-24).all()


@pytest.mark.parametrize("group", GROUPS)
def test_every_code_with_every_scale_is_multiplied_exactly(build: Build, group: int) -> None:
    weight = every_code_with_every_scale(group)
    x = torch.eye(64).to(torch.float8_e4m3fn)[:8]  # each output is one weight, which bf16 holds
    y = product(build(group, EXPANSION), EXPANSION, PackedTiles.pack(weight), x, torch.ones(1), None)
    values = weight.decode(torch.float64)[:, :8].t()
    # Of groups whose power of two is 25 octaves below the largest of their row, fp16 has no place for the last bits.
    lost = 0.0 if group == 16 else weight.decode(torch.float64).abs().amax(1) * 2**-28
    assert ((y.double() - values).abs() <= lost).all()


def test_rows_in_another_order(build: Build) -> None:
    for group in GROUPS:
        weight = random_weight(48, 192, group, 4)
        order = torch.randperm(48, generator=torch.Generator().manual_seed(5))
        tiles = PackedTiles.pack(weight)
        library = build(group, EXPANSION)
        mixed = expanded(library, tiles.in_order(order))
        assert torch.equal(mixed.view(torch.uint8), expanded(library, tiles).view(torch.uint8)[order])


def test_the_launch_of_few_tokens_deals_tiles_evenly() -> None:
    """Those that were the fastest for the products of 70B on an H200, and for a weight that is too small for it."""
    for outputs, output_tiles in ((57344, 2), (10240, 5), (8192, 4), (16, 1), (48, 1)):
        assert choose(8, outputs // 16, 132).output_tiles == output_tiles
    for outputs, output_tiles in ((57344, 4), (10240, 2), (8192, 4), (48, 1)):
        assert choose(16, outputs // 16, 132).output_tiles == output_tiles
    for tokens, token_tiles in ((1, 1), (9, 2), (17, 4), (33, 8), (65, 8)):
        assert choose(tokens, 640, 132).token_tiles == token_tiles
    assert choose(64, 3, 132) == LAUNCHES[-1]._replace(output_tiles=1)


def test_what_does_not_fit() -> None:
    good = random_weight(16, 64, 16, 6)
    assert fits(good)
    assert fits(random_weight(16, 64, 32, 6))
    assert not fits(random_weight(8, 64, 16, 6))
    assert not fits(random_weight(16, 96, 16, 6))
    assert not fits(Packed4(good.codes_NB, 64, "int4", torch.ones(16, 4)))
    assert not fits(Packed4(good.codes_NB, 64, "e2m1", good.scale_NG, pre_scale_K=torch.ones(64)))


@pytest.mark.skipif(nvrtc.compiler_obstacle() is not None, reason="NVRTC is not installed")
@pytest.mark.parametrize("group", GROUPS)
def test_the_kernels_are_compiled_without_a_gpu(group: int) -> None:
    for launch in (*LAUNCHES, EXPANSION):
        assert packed_product.machine_code("sm_90", group, launch).startswith(b"\x7fELF")
