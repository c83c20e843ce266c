"""Matrix products on the GPU: squares, the products of decoder layers, and random values against zeros."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatoken.engine.config import SHAPES, Precision
from megatoken.engine.device import gpu_obstacle
from megatoken.engine.gpus import Gpu
from megatoken.engine.schemes import find_scheme
from megatoken.hardware.qualify.gpu_timing import (
    BF16,
    DEVICE,
    E4M3_SPREAD,
    SWING_SECONDS,
    gaussian,
    gaussian_e4m3,
    gpu_seconds,
    limited_by_power,
    start,
)
from megatoken.hardware.qualify.shapes import GPU_LAYERS, Product, bound_seconds, products_of
from megatoken.hardware.qualify.timing import rates
from megatoken.hardware.qualify.values import Bound, NotRun, Outcomes, Setting, Value

SCALINGS: dict[Precision, str] = {"bf16": "bf16", "fp8": "tensor"}
LAYERS = 8
"""Distinct layers: at least 1.7 GB of weights, so that they come from memory and not from the cache."""
ZEROS_TOKENS, ZEROS_LAYERS = 4096, 4
MOST_SIDE = 8192
"""Of the square in formats that the engine does not use."""


class Weights:
    """Several layers' weights in one format, and calls on them; random values, or all ``equal``."""

    def __init__(self, scaling: str, products: Sequence[Product], layers: int, *, equal: float | None = None) -> None:
        self.scaling, self.products, self.layers, self._equal = scaling, products, layers, equal
        make = gaussian if scaling == "bf16" else gaussian_e4m3
        self.values = [
            [self._filled(make(product.outputs, product.inputs)) for product in products] for _ in range(layers)
        ]

    def call(self, number: int, tokens: int) -> Callable[[int], Tensor]:
        """The product, with inputs of ``tokens`` rows, as a function of the layer. Outputs have a spread of about 1."""
        product = self.products[number]
        if self.scaling == "bf16":
            x_MK = self._filled(gaussian(tokens, product.inputs, spread=product.inputs**-0.5))
            return lambda layer: torch.nn.functional.linear(x_MK, self.values[layer][number])
        x_MK = self._filled(gaussian_e4m3(tokens, product.inputs))
        by_row = self.scaling == "row"
        x_scale = torch.full((tokens, 1) if by_row else (1,), 1 / E4M3_SPREAD, device=DEVICE)
        weight_scale = torch.full(
            (1, product.outputs) if by_row else (1,), product.inputs**-0.5 / E4M3_SPREAD, device=DEVICE
        )
        return lambda layer: torch._scaled_mm(
            x_MK, self.values[layer][number].t(), x_scale, weight_scale, out_dtype=BF16, use_fast_accum=True
        )

    def _filled(self, values: Tensor) -> Tensor:
        return values if self._equal is None else torch.full_like(values, self._equal)


@torch.inference_mode()
def gemm(setting: Setting) -> Outcomes:
    """Squares in bf16 and fp8, one after the other without a pause, so that power limits them as in real work."""
    sheet, setting = start(), limited_by_power(setting)
    for precision, scaling in SCALINGS.items():
        if obstacle := gpu_obstacle(find_scheme(precision)):
            yield NotRun(f"gemm_{precision}", f"{precision} products", obstacle, "take a GPU that has it")
            continue
        for side in setting.sides:
            call = Weights(scaling, [Product("square", side, side)], 1).call(0, side)
            rate = rates(2e-12 * side**3, gpu_seconds(lambda call=call: call(0), setting))  # type: ignore[misc]
            title = f"{precision} product of side {side:,}"
            yield Value(f"gemm_{precision}_{side}", title, "TFLOP/s", rate, bound=product_bound(sheet, precision))
            torch.cuda.empty_cache()


@torch.inference_mode()
def formats(setting: Setting) -> Outcomes:
    """One square in fp32, tf32, int8 and fp8 scaled by row, not by tensor."""
    sheet, setting = start(), limited_by_power(setting)
    side = min(MOST_SIDE, max(setting.sides))
    work = 2e-12 * side**3
    bf16 = None if sheet is None else sheet.operations_per_second.get("bf16")
    left, right = torch.randn(side, side, device=DEVICE), torch.randn(side, side, device=DEVICE)
    allowed = torch.backends.cuda.matmul.allow_tf32
    try:
        for name, tf32, bound in (
            ("fp32", False, None),
            ("tf32", True, bf16 and Bound(bf16 / 2e12, "half of the data sheet's dense bf16", certain=False)),
        ):
            torch.backends.cuda.matmul.allow_tf32 = tf32
            rate = rates(work, gpu_seconds(lambda: torch.mm(left, right), setting))
            yield Value(f"gemm_{name}_{side}", f"{name} product of side {side:,}", "TFLOP/s", rate, bound=bound or None)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    if gpu_obstacle(find_scheme("fp8")) is None:  # else ``gemm`` says so
        call = Weights("row", [Product("square", side, side)], 1).call(0, side)
        rate, bound = rates(work, gpu_seconds(lambda: call(0), setting)), product_bound(sheet, "fp8")
        title = f"fp8 product of side {side:,}, scaled by row"
        yield Value(f"gemm_fp8_row_{side}", title, "TFLOP/s", rate, bound=bound)
    a, b = (torch.randint(-128, 128, (side, side), dtype=torch.int8, device=DEVICE) for _ in range(2))
    bound = bf16 and Bound(bf16 / 5e11, "twice the data sheet's dense bf16", certain=False)
    rate = rates(work, gpu_seconds(lambda: torch._int_mm(a, b.t()), setting))
    yield Value(f"gemm_int8_{side}", f"int8 product of side {side:,}", "TOP/s", rate, bound=bound or None)
    wrong = int((torch._int_mm(a, b.t())[:16].cpu() != _exact_int_product(a[:16].cpu(), b.cpu())).sum())
    yield Value("exact_int8", "int8 products of whole numbers, 16 rows", "wrong", [wrong], "zero")


def _exact_int_product(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    """In fp64, which holds every sum of products of int8."""
    return (a_MK.double() @ b_NK.double().t()).to(torch.int32)


@torch.inference_mode()
def layer_products(setting: Setting) -> Outcomes:
    """The four products of a layer in fp8, back to back over distinct layers, as steps do them."""
    sheet = start()
    if obstacle := gpu_obstacle(find_scheme("fp8")):
        yield NotRun("layer_products_fp8", "fp8 products of layers", obstacle, "take a GPU that has fp8")
        return
    for shape in GPU_LAYERS.shapes:
        weights = Weights("tensor", products_of(SHAPES[shape]), LAYERS)
        for tokens in GPU_LAYERS.tokens:
            rate = _rate(weights, weights.products, tokens, setting)
            bound = _bound_of(weights.products, tokens, "fp8", sheet)
            title = f"Layers of {shape} fp8, {tokens:,} tokens"
            yield Value(f"layer_products_fp8_{shape}_{tokens}", title, "TFLOP/s", rate, bound=bound)
        del weights
        torch.cuda.empty_cache()


@torch.inference_mode()
def one_by_one(setting: Setting) -> Outcomes:
    """Each product of a 70B layer by itself, in bf16 and fp8: it shows which of them is slow."""
    sheet, shape = start(), GPU_LAYERS.shapes[0]
    for precision, scaling in SCALINGS.items():
        if gpu_obstacle(find_scheme(precision)):  # ``gemm`` says so
            continue
        weights = Weights(scaling, products_of(SHAPES[shape]), LAYERS)
        for product in weights.products:
            for tokens in GPU_LAYERS.tokens:
                rate = _rate(weights, [product], tokens, replace(setting, seconds=SWING_SECONDS))
                bound = _bound_of([product], tokens, precision, sheet)
                title = f"Product {product.name} of {shape} {precision}, {tokens:,} tokens"
                yield Value(f"product_{precision}_{product.name}_{tokens}", title, "TFLOP/s", rate, bound=bound)
        del weights
        torch.cuda.empty_cache()


def _rate(weights: Weights, products: Sequence[Product], tokens: int, setting: Setting) -> list[float]:
    """TFLOP/s in each window, of some products of all layers one after the other."""
    calls = [weights.call(weights.products.index(product), tokens) for product in products]

    def step() -> None:
        for layer in range(LAYERS):
            for call in calls:
                call(layer)

    seconds = gpu_seconds(step, limited_by_power(setting), kernels=LAYERS * len(calls))
    return rates(LAYERS * sum(product.operations(tokens) for product in products) / 1e12, seconds)


def _bound_of(products: Sequence[Product], tokens: int, precision: Precision, sheet: Gpu | None) -> Bound | None:
    """Of the rate of products one after the other, in TFLOP/s; None without a data sheet."""
    if sheet is None:
        return None
    item = 2 if precision == "bf16" else 1
    operations, read = sheet.operations_per_second[precision], sheet.memory_bytes_per_second
    least = sum(bound_seconds(one, tokens, item, operations, read) for one in products)
    work = sum(one.operations(tokens) for one in products) / 1e12
    return Bound(work / least, "the larger of operations and bytes over the data sheet's rates")


@torch.inference_mode()
def zeros(setting: Setting) -> Outcomes:
    """The gate and up product of a 70B layer on random values, and on zeros and ones, which draw less power."""
    bound = product_bound(start(), "fp8")
    if obstacle := gpu_obstacle(find_scheme("fp8")):
        yield NotRun("random_over_zeros", "Random values against zeros", obstacle, "take a GPU that has fp8")
        return
    product = products_of(SHAPES["llama2-70b"])[2]
    work = ZEROS_LAYERS * product.operations(ZEROS_TOKENS) / 1e12
    setting = limited_by_power(setting)
    found = []
    for equal in (None, 0.0, 1.0):
        call = Weights("tensor", [product], ZEROS_LAYERS, equal=equal).call(0, ZEROS_TOKENS)

        def run(call: Callable[[int], Tensor] = call) -> None:
            for layer in range(ZEROS_LAYERS):
                call(layer)

        found.append(rates(work, gpu_seconds(run, setting)))
    random, zero, ones = found
    title = f"70B gate and up product, {ZEROS_TOKENS:,} tokens of"
    yield Value("gemm_fp8_random", f"{title} random values", "TFLOP/s", random, bound=bound)
    yield Value("gemm_fp8_zeros", f"{title} zeros", "TFLOP/s", zero, bound=bound)
    yield Value("gemm_fp8_ones", f"{title} ones", "TFLOP/s", ones, bound=bound)
    ratios = [one / other for one, other in zip(random, zero, strict=True)]
    title = "Rate of random values over that of zeros"
    yield Value("random_over_zeros", title, "of zeros", ratios, note="below 1 where power limits the clock")


def product_bound(sheet: Gpu | None, precision: str) -> Bound | None:
    """The data sheet's rate of products, in TFLOP/s; None where it has none."""
    rate = None if sheet is None else sheet.operations_per_second.get(precision)  # type: ignore[call-overload]
    return None if rate is None else Bound(rate / 1e12, f"data sheet, dense {precision}")
