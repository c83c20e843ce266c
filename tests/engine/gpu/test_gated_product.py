"""Gate, up and activation in one kernel, against the same in fp32."""

import pytest
import torch
from gpu_kernels import DEVICE, assert_same_bits, full_size
from torch import Tensor

from megatoken.engine import Engine, EngineConfig
from megatoken.engine.ops import fused
from megatoken.engine.ops.gated_product import CLUSTERS, gated_product, interleaved, obstacle
from megatoken.engine.schemes.fp8_weight import E4M3_MAX

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or obstacle(128, 128, torch.device("cuda")) is not None,
        reason="the kernel needs compute capability 9.0 and cuda-bindings",
    ),
]
SHAPES = [(1, 128, 128), (3, 256, 640), (128, 128, 512), (129, 384, 1024), (300, 1024, 256)] + [
    full_size(*sides) for sides in ((1536, 28672, 8192), (2048, 14336, 4096), (77, 28672, 8192))
]


def e4m3(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (
        (90 * torch.randn(rows, columns, generator=generator, device=DEVICE)).clamp(-448, 448).to(torch.float8_e4m3fn)
    )


def scalar(value: float) -> Tensor:
    return torch.full((1,), value, device=DEVICE)


def packed(weight_ND: Tensor) -> Tensor:
    return interleaved(weight_ND.view(torch.uint8)).view(weight_ND.dtype)


@pytest.mark.parametrize(("tokens", "features", "depth"), SHAPES)
@pytest.mark.parametrize("cluster", [*CLUSTERS, None])
def test_equals_both_products_and_the_activation(tokens: int, features: int, depth: int, cluster: int | None) -> None:
    x, weight = e4m3(tokens, depth, 1), e4m3(2 * features, depth, 2)
    scales = scalar(1 / 90), scalar(depth**-0.5 / 90), scalar(0.02)
    gate, up = (x.float() @ weight.float().t() * (scales[0] * scales[1])).chunk(2, dim=1)
    exact = (torch.nn.functional.silu(gate) * up / scales[2]).clamp(-E4M3_MAX, E4M3_MAX)
    out = gated_product(x, packed(weight), *scales, cluster)
    # Half a step of e4m3 for the rounding; fast sums cut off each of depth / 32 sums; an up is about 4 at most.
    lost = 4 * depth / 32 * 2**-14
    assert ((out.float() - exact).abs() <= exact.abs() / 15 + lost / scales[2]).all()
    assert ((out.float() - exact).abs().mean() / exact.abs().mean()) < 0.04
    # The same sums as cuBLASLt's, so the same bytes but where its bf16 rounds to the other side.
    both = torch._scaled_mm(x, weight.t(), scales[0], scales[1], out_dtype=torch.bfloat16, use_fast_accum=True)
    assert (out.view(torch.uint8) != fused.silu_mul(both, scales[2]).view(torch.uint8)).float().mean() < 0.03


def test_large_gates() -> None:
    x, weight = torch.zeros(2, 128, device=DEVICE), torch.zeros(256, 128, device=DEVICE)
    x[:, 0] = torch.tensor([1.0, -1.0])
    weight[:128, 0], weight[128:, 0] = 448.0, 1.0
    out = gated_product(
        x.to(torch.float8_e4m3fn), packed(weight.to(torch.float8_e4m3fn)), scalar(1.0), scalar(1.0), scalar(10.0)
    ).float()
    assert (out[0] == 44.0).all()  # 448 / 10, rounded to e4m3
    assert (out[1].abs() == 0).all()


def test_what_is_not_finite_stays_in_its_row() -> None:
    x, weight = e4m3(140, 256, 3), packed(e4m3(512, 256, 4))
    scales = scalar(1 / 90), scalar(1 / 1440), scalar(0.02)
    good = gated_product(x, weight, *scales)
    x.view(torch.uint8)[7, 5] = 0x7F
    bad = gated_product(x, weight, *scales)
    assert bad[7].float().isnan().all()
    others = torch.arange(140, device=DEVICE) != 7
    assert (bad.view(torch.uint8)[others] == good.view(torch.uint8)[others]).all()


def test_repeats_and_replays() -> None:
    x, weight = e4m3(333, 512, 5), packed(e4m3(1024, 512, 6))
    scales = scalar(1 / 90), scalar(1 / 2000), scalar(0.02)
    assert_same_bits(lambda: [gated_product(x, weight, *scales, cluster) for cluster in CLUSTERS])
    expected = gated_product(x, weight, *scales)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gated_product(x, weight, *scales)
    graph.replay()
    assert (out.view(torch.uint8) == expected.view(torch.uint8)).all()


def test_an_engine_says_whether_it_is_used() -> None:
    sizes = {"cache_tokens": 4096, "max_length": 512, "max_sequences": 8}
    whys = [
        Engine("125m", EngineConfig(precision=precision, **sizes), random_weights=True).describe()["why_no_fused_gate"]
        for precision in ("fp8", "bf16")
    ]
    assert whys[0] is None and "fp8 with one scale" in whys[1]


def test_no_rows() -> None:
    assert gated_product(e4m3(0, 128, 7), packed(e4m3(256, 128, 8)), *[scalar(1.0)] * 3).shape == (0, 128)
