"""Products and expansion of four-bit weights on a GPU, against the weights decoded by their definition."""

import pytest
import torch
from gpu_kernels import assert_same_bits
from torch import Tensor

from megatoken.engine.ops.packed_product import LAUNCHES, Launch, PackedTiles, obstacle
from megatoken.engine.schemes.fp8_weight import with_one_scale
from megatoken.engine.schemes.packed4 import Packed4, expand

DEVICE = torch.device("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or obstacle(DEVICE) is not None, reason="needs such a GPU and cuda-bindings"
    ),
]
SIDES = [(16, 64), (48, 320), (1024, 4096), (10240, 8192), (8192, 28672)]


def random_weight(rows: int, columns: int, group: int) -> Packed4:
    generator = torch.Generator(DEVICE).manual_seed(1)
    codes = torch.randint(256, (rows, columns // 2), generator=generator, dtype=torch.uint8, device=DEVICE)
    lowest, highest = (1, 127) if group == 16 else (115, 135)
    shape = rows, columns // group
    scales = torch.randint(lowest, highest, shape, generator=generator, dtype=torch.uint8, device=DEVICE)
    if group == 32:
        return Packed4(codes, columns, "e2m1", scales.view(torch.float8_e8m0fnu))
    second = torch.rand(rows, 1, generator=generator, dtype=torch.float64, device=DEVICE) / 100 + 1e-3
    return Packed4(codes, columns, "e2m1", scales.view(torch.float8_e4m3fn), second)


def random_input(tokens: int, columns: int) -> Tensor:
    return (50 * torch.randn(tokens, columns, device=DEVICE)).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize(("rows", "columns"), SIDES)
def test_the_expansion_has_the_bytes_of_a_weight_that_is_expanded_when_it_is_loaded(
    rows: int, columns: int, group: int
) -> None:
    weight = random_weight(rows, columns, group)
    tiles, expected = PackedTiles.pack(weight), with_one_scale(expand(weight)[0])
    assert torch.equal(tiles.expand().view(torch.uint8), expected.values_ND.view(torch.uint8))
    assert torch.equal(tiles.weight_scale, expected.scale_N1.view(()))


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize(("rows", "columns"), SIDES)
def test_products_are_those_of_the_decoded_weight(rows: int, columns: int, group: int) -> None:
    weight = random_weight(rows, columns, group)
    tiles, values = PackedTiles.pack(weight), weight.decode(torch.float64)
    scale, bias = torch.tensor([0.03], device=DEVICE), torch.randn(rows, device=DEVICE).bfloat16()
    for tokens in (1, 2, 7, 8, 9, 16, 17, 33, 64, 65):
        x = random_input(tokens, columns)
        exact = x.double() @ values.t() * scale.double() + bias.double()
        magnitudes = x.double().abs() @ values.abs().t() * scale.double()
        y = tiles.product(x, scale, bias)
        assert ((y.double() - exact).abs() <= exact.abs() * 2**-8 + magnitudes * columns * 2**-24).all()


@pytest.mark.parametrize("launch", LAUNCHES)
def test_the_same_bytes_every_time_and_in_a_graph(launch: Launch) -> None:
    tiles, scale = PackedTiles.pack(random_weight(1280, 4096, 16)), torch.ones(1, device=DEVICE)
    x = random_input(64, 4096)
    assert_same_bits(lambda: [tiles.product(x, scale, None, config=launch)])
    plain, graph = tiles.product(x, scale, None, config=launch), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = tiles.product(x, scale, None, config=launch)
    graph.replay()
    assert torch.equal(recorded, plain)
