"""The benchmark of products by joules: what it compares with, and what it says of a wrong result."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

import product_algorithms
from cublaslt import Library
from megatoken.errors import CapacityError
from megatoken.hardware.qualify import gpu_timing
from megatoken.hardware.qualify.shapes import Product
from product_algorithms import Bench, Measured

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the benchmark itself runs on a GPU")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    for module in (gpu_timing, product_algorithms):
        monkeypatch.setattr(module, "DEVICE", CPU)
    monkeypatch.setattr(product_algorithms, "distinct_weights", lambda *sides: [gpu_timing.gaussian_e4m3(*sides)] * 2)
    torch.manual_seed(0)
    return Bench(None, Product("output", 96, 128), 40)  # type: ignore[arg-type]


def product(bench: Bench, x: Tensor, weight: Tensor) -> Tensor:
    return (x.float() @ weight.float().t() * (bench.scales[0] * bench.scales[1])).bfloat16()


def test_a_result_is_held_against_fp64(bench: Bench) -> None:
    assert 0 < bench.error(lambda x, weight: product(bench, x, weight)) < 0.003  # bf16's rounding
    wrong = bench.error(lambda x, weight: product(bench, x, weight) * 1.02)
    assert wrong == pytest.approx(0.02, abs=0.002) and wrong > product_algorithms.LARGEST_ERROR
    assert float(product(bench, bench.x, bench.weights[0]).float().std()) == pytest.approx(1, rel=0.1)


def test_an_output_that_is_not_written_is_an_error(bench: Bench) -> None:
    def all_but_one(x: Tensor, weight: Tensor) -> Tensor:
        bench.y[:-1] = product(bench, x, weight)[:-1]
        return bench.y

    assert math.isnan(bench.error(all_but_one))


def test_other_values_are_finite_and_of_the_same_sides(bench: Bench) -> None:
    others = product_algorithms.other_values(bench.weights[0])
    for name, values in others.items():
        assert values.shape == (96, 128) and values.dtype == gpu_timing.E4M3, name
        assert bool(values.float().isfinite().all()), name
    assert float((others["half of them zero"].float() == 0).float().mean()) == pytest.approx(0.5, abs=0.05)


def test_means_of_all_rounds_stand_next_to_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    def one(name: str, joules: float) -> Measured:
        return Measured(name, 1.0, 100.0, 1200.0, 690.0, 1400.0, 90.0, joules)

    rounds = [one("usual", 0.5), one("other", 0.48), one("usual", 0.52), one("other", 0.5)]
    product_algorithms.show(rounds, "usual")
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("    0.5100 J/TFLOP (+0.00%)") and first.endswith("usual")
    assert second.startswith("    0.4900 J/TFLOP (-3.92%)") and second.endswith("other")


def test_pytorch_without_cuda_has_no_cublaslt() -> None:
    with pytest.raises(CapacityError, match="cuBLASLt is not loaded"):
        Library()
