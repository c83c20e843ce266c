"""The product that only benchmarks call: what fits, how it is built, and on a GPU its results against fp64."""

from __future__ import annotations

import pytest
import torch
from gpu_kernels import DEVICE, assert_same_bits, full_size
from torch import Tensor

import own_product
from megatoken.engine.ops import nvrtc
from own_product import Variant

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available()
        or torch.cuda.get_device_capability() != (9, 0)
        or bool(nvrtc.compiler_obstacle()),
        reason="the kernel needs compute capability 9.0 and cuda-bindings",
    ),
]
VARIANTS = [
    Variant(),
    Variant(cluster=1),
    Variant(240),
    Variant(208, rows_first=False),
    Variant(192, overlapped=True),
    Variant(176, overlapped=True),
    Variant(160, cluster=1, overlapped=True),
]
SHAPES = [(1, 8, 512), (3, 256, 640), (128, 512, 512), (129, 264, 1024), (300, 1000, 768), (257, 4096, 512)] + [
    full_size(*sides) for sides in ((1536, 10240, 8192), (2048, 4096, 14336))
]


def test_what_does_not_fit_is_said() -> None:
    for wrong in ({"columns": 100}, {"columns": 272}, {"cluster": 3}, {"columns": 208, "overlapped": True}):
        with pytest.raises(ValueError, match=r"no tiles of|no registers"):
            Variant(**wrong)  # type: ignore[arg-type]
    one = torch.ones(1)
    for outputs, depth, scales in ((8, 100, 1), (9, 512, 1), (8, 128, 1), (8, 512, 2)):
        x, weight = torch.zeros(4, depth), torch.zeros(outputs, depth)
        with pytest.raises(ValueError, match=r"do not fit|expected a scale"):
            own_product.own_product(x, weight, one.repeat(scales), one, Variant(192, overlapped=True))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_ring_and_buffers_fill_the_shared_memory(variant: Variant) -> None:
    room = own_product.SHARED_BYTES - variant.shared_bytes - 16 * variant.stages
    assert room >= 0 and variant.stages >= 4
    assert room < (own_product.ROWS + variant.columns) * own_product.DEPTH + 256


@pytest.mark.skipif(nvrtc.compiler_obstacle() is not None, reason="NVRTC is not installed")
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_it_compiles(variant: Variant) -> None:
    """NVRTC needs no GPU."""
    assert own_product.machine_code(variant, row_scales=variant.cluster == 1).startswith(b"\x7fELF")


def e4m3(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    values = 90 * torch.randn(rows, columns, generator=generator, device=DEVICE)
    return values.clamp(-448, 448).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("variant", [pytest.param(variant, marks=ON_GPU, id=str(variant)) for variant in VARIANTS])
@pytest.mark.parametrize(("tokens", "outputs", "depth"), SHAPES)
def test_equals_the_product_in_fp64(tokens: int, outputs: int, depth: int, variant: Variant) -> None:
    x, weight = e4m3(tokens, depth, 1), e4m3(outputs, depth, 2)
    exact = x.double() @ weight.double().t()
    for rows, columns in ((1, 1), (tokens, outputs)):
        x_scale = torch.linspace(1, 2, rows, device=DEVICE) / 90
        weight_scale = torch.linspace(1, 2, columns, device=DEVICE) * depth**-0.5 / 90
        out = own_product.own_product(x, weight, x_scale, weight_scale, variant)
        scales = x_scale.double()[:, None] * weight_scale.double()
        # bf16 rounds by up to 1 / 256; fast sums keep 13 bits of the largest term, and their errors add up at random.
        allowed = (exact * scales).abs() / 250 + scales / scales.min() * 4 * depth**0.5 * 2**-13
        assert ((out.double() - exact * scales).abs() <= allowed).all()


@pytest.mark.parametrize("variant", [pytest.param(variant, marks=ON_GPU, id=str(variant)) for variant in VARIANTS])
def test_repeats(variant: Variant) -> None:
    """Also behind one another, so that a launch begins while the one before still ends."""
    x, weight, one = e4m3(333, 1024, 5), e4m3(3000, 1024, 6), torch.ones(1, device=DEVICE)
    assert_same_bits(lambda: [own_product.own_product(x, weight, one, one, variant) for _ in range(4)])
