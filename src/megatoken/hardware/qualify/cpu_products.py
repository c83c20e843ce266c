"""Matrix products on the CPU: large squares on one core and on all, and the engine's own shapes with packed weights."""

from __future__ import annotations

import torch

from megatoken.engine.config import SHAPES
from megatoken.engine.ops import cpu
from megatoken.engine.schemes import find_scheme
from megatoken.hardware.qualify.processor import engine_precision, peak, usable_cores
from megatoken.hardware.qualify.shapes import CPU_LOAD, CPU_TOKENS, products_of
from megatoken.hardware.qualify.timing import call_seconds, rates
from megatoken.hardware.qualify.values import Bound, NotRun, Outcomes, Setting, Value

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LAYERS = 8
"""Distinct layers of weights, so that they come from memory and not from a cache."""


@torch.inference_mode()
def gemm(setting: Setting) -> Outcomes:
    """fp32 and bf16: squares of random values on one core and on all."""
    cores = usable_cores()
    for name, dtype in DTYPES.items():
        if not cpu.can_pack(dtype):
            title = f"{name} product on the CPU"
            yield NotRun(f"gemm_{name}", title, f"oneDNN has no {name} on this processor", "take another processor")
            continue
        for side in setting.sides:
            left, right = torch.randn(side, side).to(dtype), torch.randn(side, side).to(dtype)
            for threads in sorted({1, cores}):
                torch.set_num_threads(threads)
                rate = rates(2e-9 * side**3, call_seconds(lambda a=left, b=right: torch.mm(a, b), setting))  # type: ignore[misc]
                of = "one core" if threads == 1 else f"{threads} cores"
                title = f"{name} product of side {side:,}, {of}"
                where = "one_core" if threads == 1 else "all_cores"
                bound = peak(name, threads, setting)
                yield Value(f"gemm_{name}_{side}_{where}", title, "GFLOP/s", rate, bound=bound)


@torch.inference_mode()
def layer_products(setting: Setting) -> Outcomes:
    """The four products of a layer in the engine's fastest format, back to back over distinct layers, as in a step."""
    torch.set_num_threads(usable_cores())
    precision = engine_precision()
    dtype, scheme, products = DTYPES[precision], find_scheme(precision), products_of(SHAPES[CPU_LOAD.shape])
    layers = [
        [cpu.pack_linear(torch.randn(one.outputs, one.inputs, dtype=dtype), None, scheme) for one in products]
        for _ in range(LAYERS)
    ]
    for tokens in CPU_TOKENS:
        inputs = [torch.randn(tokens, one.inputs, dtype=dtype) for one in products]

        def step(inputs: list[torch.Tensor] = inputs) -> None:
            for layer in layers:
                for x_TD, weight in zip(inputs, layer, strict=True):
                    cpu.linear(x_TD, weight)

        seconds = call_seconds(step, setting)
        operations = LAYERS * sum(one.operations(tokens) for one in products)
        title, unit, work, bound = (
            f"Layers of {CPU_LOAD.shape} {precision}, {tokens} tokens",
            "GFLOP/s",
            operations,
            None,
        )
        if tokens == 1:
            title, unit = f"Layers of {CPU_LOAD.shape} {precision}, 1 token", "GB/s"
            work = LAYERS * sum(one.moved_bytes(tokens, dtype.itemsize) for one in products)
            if (read := setting.measured.get("memory_read")) is not None:
                bound = Bound(read, "reading of memory, measured", certain=False)
        else:
            bound = peak(precision, usable_cores(), setting)
        yield Value(f"layer_products_{precision}_{tokens}", title, unit, rates(work / 1e9, seconds), bound=bound)
