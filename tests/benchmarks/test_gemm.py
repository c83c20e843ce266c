"""The product benchmark's arithmetic: sides, bounds, weighted rates, kernels by product."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gemm
from gpu_trace import Kernel
from megatoken.engine.config import SHAPES
from megatoken.hardware.qualify import gpu_products, gpu_timing
from megatoken.hardware.qualify.shapes import Product, products_of


def burst(product: str, rows: int, microseconds: float) -> gemm.Burst:
    return gemm.Burst("tensor", product, rows, microseconds, 0.0, None, None, "")


@pytest.mark.parametrize("shape", ["llama2-70b", "llama3.1-8b", "1.1b"])
def test_products_are_all_linears_of_a_layer(shape: str) -> None:
    model = SHAPES[shape]
    parameters = sum(product.operations(1) // 2 for product in products_of(model))
    assert parameters * model.layers == model.linear_parameters


def test_bound_is_memory_for_few_rows_and_arithmetic_for_many() -> None:
    gate_up = products_of(SHAPES["llama2-70b"])[2]
    assert (gate_up.outputs, gate_up.inputs) == (57_344, 8192)
    few = gemm.bound_microseconds(gate_up, 16, 1, 1979.0, 4270.0)
    assert few == pytest.approx((57_344 * 8192 + 16 * 8192 + 2 * 16 * 57_344) / 4270e3)
    many = gemm.bound_microseconds(gate_up, 4096, 1, 1979.0, 4270.0)
    assert many == pytest.approx(2 * 4096 * 57_344 * 8192 / 1979e6)
    assert gemm.bound_microseconds(gate_up, 16, 1, None, 4270.0) is None


@given(st.floats(100, 1900), st.sampled_from([64, 1536, 8192]))
def test_weighted_rate_of_equal_rates_is_that_rate(teraflops: float, rows: int) -> None:
    products = products_of(SHAPES["llama2-70b"])
    results = [burst(one.name, rows, one.operations(rows) / teraflops / 1e6) for one in products]
    assert gemm.weighted_teraflops(results, products) == pytest.approx(teraflops)


def test_kernels_are_told_apart_by_the_fill_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, ...>"
    names = ["nvjet_a", fill, "nvjet_b", "splitKreduce", fill]
    monkeypatch.setattr(gemm, "DEVICE", torch.device("cpu"))

    def traced(run: object) -> list[Kernel]:
        run()  # type: ignore[operator]
        return [Kernel(name, float(number), number + 1.0) for number, name in enumerate(names)]

    monkeypatch.setattr(gemm, "traced", traced)
    called: list[int] = []
    calls = [lambda layer: called.append(layer) or torch.empty(0)] * 2  # type: ignore[func-returns-value]
    assert gemm.kernel_names(calls) == ["nvjet_a", "nvjet_b + splitKreduce"]
    assert called == [0, 0]
    assert gemm.kernel_names(calls * 2) == ["unknown"] * 4


@pytest.mark.parametrize("scaling", gemm.SCALINGS)
def test_calls_compute_products_with_a_spread_of_one(scaling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gpu_products, gpu_timing):
        monkeypatch.setattr(module, "DEVICE", torch.device("cpu"))
    torch.manual_seed(0)
    products = [Product("up", 96, 64), Product("down", 64, 96)]
    weights = gpu_products.Weights(scaling, products, layers=2)
    call = weights.call(1, 128)
    first, second = (call(layer).float() for layer in (0, 1))
    assert first.shape == (128, 64)
    assert float(first.std()) == pytest.approx(1.0, rel=0.1)
    assert not torch.equal(first, second)


def test_options_are_checked() -> None:
    options = gemm.parse(["--rows", "64", "128", "--sustained-rows", "--scalings", "row", "--out", "x.json"])
    assert (options.rows, options.sustained_rows, options.scalings) == ([64, 128], [], ["row"])
    for wrong in (["--rows", "0"], ["--seconds", "0"], ["--layers", "0"], ["--scalings", "int8"], ["--rows"]):
        with pytest.raises(SystemExit) as refusal:
            gemm.parse([*wrong, "--out", "x.json"])
        assert refusal.value.code == 2
