"""Products of the experts against their torch definitions: interpreted on the CPU, compiled and larger on a GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from gpu_kernels import BF16, DEVICE, E4M3, MARKS, ON_GPU, REPEATS, full_size, needs_gpu, normal
from torch import Tensor

from examples import every
from megatoken.engine.config import ClampedSwiglu, ExpertsConfig
from megatoken.engine.ops import reference
from megatoken.engine.ops.cuda_experts import Experts
from megatoken.engine.ops.grouped_product import FEW_ROWS, MANY_ROWS, SOME_ROWS, TileConfig, grouped_product
from megatoken.engine.ops.routing import choose_experts
from megatoken.engine.ops.routing_kernels import route
from megatoken.engine.schemes import LinearScheme, find_scheme
from megatoken.engine.schemes.fp8_weight import quantise_rows

pytestmark = MARKS
ROW_ERROR = 0.005
"""Largest norm of a row's error, as a share of the row's norm; one wrong element would exceed it. bf16 rounds by 0.2 %,
and Hopper's tensor cores keep about 14 bits of a sum of e4m3 products."""
SMALL = TileConfig(16, 32, depth_bytes=32, stages=2)
CONFIGS = [SMALL, FEW_ROWS, SOME_ROWS, MANY_ROWS] if ON_GPU else [SMALL, replace(SMALL, rows=32, columns=16)]


def routing(tokens: int, experts: int, choices: int, kind: str) -> tuple[Tensor, Tensor]:
    """The sorted choices and the first of each expert; a token chooses an expert once."""
    generator = torch.Generator().manual_seed(tokens)
    scores = torch.rand(tokens, experts, generator=generator)
    if kind == "skewed":  # the last expert is in every token, the first in none
        scores[:, -1], scores[:, 0] = 2.0, -1.0
    chosen, order = scores.topk(choices).indices.view(-1).sort(stable=True)
    starts = torch.searchsorted(chosen, torch.arange(experts + 1))
    return order.int().to(DEVICE), starts.int().to(DEVICE)


def expected(x: Tensor, weights_XNK: Tensor, starts: Tensor) -> Tensor:
    """fp32 [R, N], rows sorted."""
    parts = zip(starts.tolist(), starts.tolist()[1:], weights_XNK, strict=False)
    return torch.cat([x[begin:end].float() @ weight.float().T for begin, end, weight in parts])


def row_error(actual: Tensor, exact: Tensor) -> float:
    """The largest of any row."""
    return float(((actual.float() - exact).norm(dim=1) / exact.norm(dim=1)).max())


PRODUCTS = list(product(CONFIGS, (BF16, E4M3)))


@pytest.mark.parametrize(
    ("config", "dtype"),
    PRODUCTS if ON_GPU else [*PRODUCTS[::3], *every(*(one for one in PRODUCTS if one not in PRODUCTS[::3]))],
)
@pytest.mark.parametrize(
    ("tokens", "experts", "choices", "outputs", "inputs", "kind"),
    [
        (1, 8, 2, 48, 32, "even"),
        (23, 5, 3, 40, 48, "even"),
        (70, 4, 2, 32, 80, "skewed"),
        full_size(2048, 128, 8, 1536, 2048, "even"),
        full_size(500, 128, 4, 5760, 2880, "skewed"),
        full_size(16, 128, 8, 2048, 768, "even"),
    ],
)
def test_both_products_are_those_of_each_expert(
    tokens: int,
    experts: int,
    choices: int,
    outputs: int,
    inputs: int,
    kind: str,
    dtype: torch.dtype,
    config: TileConfig,
) -> None:
    order_R, starts = routing(tokens, experts, choices, kind)
    weights_XNK = normal(experts, outputs, inputs, seed=1, spread=inputs**-0.5)
    x_TK, x_RK = normal(tokens, inputs, seed=2), normal(tokens * choices, inputs, seed=3)
    factors_R = normal(tokens * choices, seed=4, dtype=torch.float32)
    weight_scale = x_scale = rows_scale = None
    if dtype == E4M3:
        weights_XNK, scale = quantise_rows(weights_XNK.view(-1, inputs))
        weights_XNK, weight_scale = weights_XNK.view(experts, outputs, inputs), scale.view(experts, outputs)
        (x_TK, x_scale), (x_RK, rows_scale) = quantise_rows(x_TK), quantise_rows(x_RK)

    def whole(x: Tensor, scale: Tensor | None) -> Tensor:
        return x.float() if scale is None else x.float() * scale

    exact_XNK = whole(weights_XNK, None if weight_scale is None else weight_scale[..., None])
    gathered = grouped_product(
        x_TK, x_scale, weights_XNK, weight_scale, order_R, starts, choices=choices, config=config
    )
    exact = expected(whole(x_TK, x_scale)[order_R // choices], exact_XNK, starts)
    assert row_error(gathered, exact) <= ROW_ERROR
    scattered = grouped_product(
        x_RK, rows_scale, weights_XNK, weight_scale, order_R, starts, factors_R=factors_R, config=config
    )
    exact = expected(whole(x_RK, rows_scale), exact_XNK, starts) * factors_R[order_R, None]
    assert row_error(scattered[order_R], exact) <= ROW_ERROR


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize(
    ("tokens", "experts", "choices"),
    [(1, 8, 2), (37, 6, 6), (50, 33, 3), full_size(5000, 128, 8), full_size(3, 256, 8)],
)
def test_routes_are_the_choices_sorted_by_expert(tokens: int, experts: int, choices: int, normalized: bool) -> None:
    config = ExpertsConfig(experts, choices, 16, normalized, (0,))
    logits_TX = normal(tokens, experts, seed=tokens, spread=4.0, dtype=torch.float32)
    routes = route(logits_TX, config)
    weights_TC, chosen_TC = choose_experts(logits_TX, config)
    assert torch.equal(routes.chosen_TC.long(), chosen_TC)
    torch.testing.assert_close(routes.weights_TC, weights_TC)
    sorted_R, _ = chosen_TC.view(-1).sort()
    assert torch.equal(chosen_TC.view(-1)[routes.order_R.long()], sorted_R)
    assert torch.equal(routes.order_R.sort().values, torch.arange(tokens * choices, dtype=torch.int32, device=DEVICE))
    boundaries = torch.arange(experts + 1, device=DEVICE)
    assert torch.equal(routes.starts.long(), torch.searchsorted(sorted_R, boundaries))


def test_equal_scores_choose_the_first() -> None:
    logits_TX = torch.zeros(2, 5, device=DEVICE)
    logits_TX[1, 3:] = 1.0
    routes = route(logits_TX, ExpertsConfig(5, 2, 16, normalized=True, layers=(0,)))
    assert routes.chosen_TC.tolist() == [[0, 1], [3, 4]]


@needs_gpu  # the interpreter refuses them
@pytest.mark.gpu
def test_scores_that_are_not_numbers_stay_inside() -> None:
    routes = route(
        torch.full((3, 5), float("nan"), device=DEVICE), ExpertsConfig(5, 2, 16, normalized=True, layers=(0,))
    )
    assert routes.chosen_TC.min() >= 0 and routes.chosen_TC.max() < 5
    assert routes.weights_TC.isnan().all()
    assert routes.starts[-1] == 6


Parts = list[tuple[Tensor, Tensor | None]]


def make_experts(scheme: LinearScheme, config: ExpertsConfig, hidden: int) -> tuple[Experts, list[Parts]]:
    width = config.intermediate_size
    shapes = ((width, hidden), (width, hidden), (hidden, width))

    def bias(rows: int, seed: int) -> Tensor | None:
        return normal(rows, seed=seed, spread=0.5) if config.biases else None

    each = [
        [
            (
                normal(*shape, seed=10 * number + part, spread=shape[1] ** -0.5),
                bias(shape[0], 1000 + 10 * number + part),
            )
            for part, shape in enumerate(shapes)
        ]
        for number in range(config.count)
    ]
    router = normal(config.count, hidden, seed=99, spread=3 * hidden**-0.5), bias(config.count, 999)
    return Experts.pack(router, iter(each), config, scheme), each


PRECISIONS = [("bf16", None), ("fp8", "tensor"), ("fp8", "row")]
CLAMPED, TIGHT = ClampedSwiglu(1.702, 7.0), ClampedSwiglu(1.2, 0.5)


@pytest.mark.parametrize(
    ("activation", "normalized", "precision", "fp8_scales"),
    [
        *((None, True, *precision) for precision in PRECISIONS),
        *((TIGHT, False, *precision) for precision in PRECISIONS),
        (CLAMPED, True, *PRECISIONS[0]),
        *every(*((CLAMPED, True, *precision) for precision in PRECISIONS[1:])),
        *every(*((one, False, *precision) for one in (None, CLAMPED) for precision in PRECISIONS)),
        *every(*((TIGHT, True, *precision) for precision in PRECISIONS)),
    ],
)
def test_a_mixture_is_its_definition(
    activation: ClampedSwiglu | None, normalized: bool, precision: str, fp8_scales: str | None
) -> None:
    config = ExpertsConfig(4, 2, 48, normalized, (0,), biases=activation is not None, activation=activation)
    scheme = find_scheme(precision, fp8_scales)
    mixture, each = make_experts(scheme, config, 64)
    x_TD = normal(11, 64, seed=5)
    linears = [tuple(reference.pack_linear(*part, scheme) for part in parts) for parts in each]
    exact = reference.experts(x_TD, (mixture.weight, mixture.bias), linears, config)
    logits_TX = x_TD.float() @ mixture.weight.float().T
    actual, *again = (mixture.mixture(x_TD, logits_TX) for _ in range(1 + REPEATS))
    if precision == "fp8" and activation is not None:  # values between the products have another scale: all may differ
        assert row_error(actual, exact.float()) <= 0.08
    else:  # fp8: a value between the two products may be rounded to the neighbour
        torch.testing.assert_close(actual, exact, rtol=0.02, atol=0.05 if precision == "fp8" else 0.02)
    assert all(torch.equal(actual, other) for other in again)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_recorded_mixture_follows_its_input(precision: str) -> None:
    """A CUDA graph routes what it is replayed with, not what it was recorded with."""
    config = ExpertsConfig(32, 4, 256, normalized=True, layers=(0,))
    mixture, _ = make_experts(find_scheme(precision), config, 512)
    x_TD = normal(64, 512, seed=6)
    mixture.product(x_TD)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y_TD = mixture.product(x_TD)
    for seed in (7, 8):
        x_TD.copy_(normal(64, 512, seed=seed))
        graph.replay()
        assert torch.equal(y_TD, mixture.product(x_TD))
