"""Times the four products of a decoder layer: fp8 with one scale, fp8 with a scale per row, and bf16.

Bursts are short and repeat one product over a few layers' weights: the rate at the highest clock. Sustained runs go
through all products of many distinct layers back to back for seconds, as steps do: the rate that power allows. Weights
and activations are Gaussian over the full range of their format. The bound of a product is the larger of operations
over the datasheet's rate and bytes over a large copy's. PyTorch takes the first algorithm that cuBLASLt's heuristic
names and offers no choice on NVIDIA GPUs; the kernels that it took are listed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_measuring import copy_gigabytes_per_second, graph_microseconds, report, require_gpu, write_report
from gpu_trace import traced
from megatoken.engine.config import SHAPES
from megatoken.errors import MegatokenError
from megatoken.hardware.power import Power, PowerSampler
from megatoken.hardware.qualify.gpu_products import Weights
from megatoken.hardware.qualify.gpu_timing import DEVICE, device_uuid, repeat_for
from megatoken.hardware.qualify.shapes import Product, bound_seconds, products_of

SCALINGS = ("tensor", "row", "bf16")
BURST_LAYERS = 8
PAUSE_SECONDS = 0.2
"""Before a burst, so that the card is not held back by the one before."""
SXM_MULTIPROCESSORS = 132
SXM_TERAFLOPS = {"tensor": 1979.0, "row": 1979.0, "bf16": 989.5}
"""Dense rates of H100 and H200 SXM by their datasheet."""
SEPARATOR = "FillFunctor"


@dataclass(frozen=True, slots=True)
class Options:
    """What is timed."""

    shape: str
    scalings: list[str]
    rows: list[int]
    sustained_rows: list[int]
    seconds: float
    layers: int
    out: Path


@dataclass(frozen=True, slots=True)
class Burst:
    """One product at one number of rows; ``bound_share`` None where the datasheet's rate is not known."""

    scaling: str
    product: str
    rows: int
    microseconds: float
    teraflops: float
    bound_microseconds: float | None
    bound_share: float | None
    kernels: str


@dataclass(frozen=True, slots=True)
class Sustained:
    """All products of all layers, over and over."""

    scaling: str
    rows: int
    seconds: float
    passes: int
    teraflops: float
    peak_share: float | None
    power: Power
    joules_per_row_and_layer: float


def parse(arguments: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama2-70b")
    parser.add_argument("--scalings", nargs="+", choices=SCALINGS, default=list(SCALINGS))
    rows = [64, 256, 512, 1024, 1536, 2048, 4096, 8192]
    parser.add_argument("--rows", nargs="+", type=int, default=rows, help=f"of bursts (default: {rows})")
    sustained = [1024, 1536, 2048]
    parser.add_argument("--sustained-rows", nargs="*", type=int, default=sustained, help=f"(default: {sustained})")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each sustained run (default: 10)")
    parser.add_argument("--layers", type=int, default=40, help="distinct layers, at most the shape's (default: 40)")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    options = Options(**vars(parser.parse_args(arguments)))
    if min([*options.rows, *options.sustained_rows, options.seconds, options.layers]) <= 0:
        parser.error("--rows, --sustained-rows, --seconds and --layers must be above 0")
    return options


def peak_teraflops(scaling: str) -> float | None:
    """By the datasheet; None for other GPUs than H100 and H200 SXM."""
    properties = torch.cuda.get_device_properties(DEVICE)
    sxm = (properties.major, properties.minor, properties.multi_processor_count) == (9, 0, SXM_MULTIPROCESSORS)
    return SXM_TERAFLOPS[scaling] if sxm else None


def bound_microseconds(
    product: Product, rows: int, item: int, teraflops: float | None, copy_gigabytes: float
) -> float | None:
    """The least time: operations at ``teraflops`` or bytes at the copy's rate, whichever takes longer."""
    if teraflops is None:
        return None
    return 1e6 * bound_seconds(product, rows, item, 1e12 * teraflops, 1e9 * copy_gigabytes)


def kernel_names(calls: Sequence[Callable[[int], Tensor]]) -> list[str]:
    """What ran for each call."""
    separator = torch.empty(1, device=DEVICE)

    def run() -> None:
        for call in calls:
            call(0)
            separator.fill_(1.0)

    groups: list[list[str]] = [[]]
    for kernel in traced(run):
        if SEPARATOR in kernel.name:
            groups.append([])
        else:
            groups[-1].append(kernel.name)
    names = [" + ".join(group) for group in groups[:-1]]
    return names if len(names) == len(calls) else ["unknown"] * len(calls)


def bursts(weights: Weights, all_rows: Sequence[int], copy_gigabytes: float) -> Iterator[Burst]:
    """Every product at every number of rows."""
    teraflops, item = peak_teraflops(weights.scaling), weights.values[0][0].itemsize
    sets = min(weights.layers, BURST_LAYERS)
    for rows in all_rows:
        calls = [weights.call(number, rows) for number in range(len(weights.products))]
        for product, call, kernels in zip(weights.products, calls, kernel_names(calls), strict=True):
            time.sleep(PAUSE_SECONDS)
            microseconds = graph_microseconds(_dropping(call), sets, sets)
            bound = bound_microseconds(product, rows, item, teraflops, copy_gigabytes)
            yield Burst(
                weights.scaling,
                product.name,
                rows,
                microseconds,
                product.operations(rows) / microseconds / 1e6,
                bound,
                None if bound is None else bound / microseconds,
                kernels,
            )


def _dropping(call: Callable[[int], Tensor]) -> Callable[[int], None]:
    """The call without its result, whose memory the next one may take."""

    def run(layer: int) -> None:
        call(layer)

    return run


def sustained(weights: Weights, rows: int, seconds: float, sampler: PowerSampler) -> Sustained:
    """All products of all layers in the order of a step."""
    calls = [weights.call(number, rows) for number in range(len(weights.products))]

    def once() -> None:
        for layer in range(weights.layers):
            for call in calls:
                call(layer)

    begin = time.monotonic()
    passes, elapsed = repeat_for(seconds, once)
    power = sampler.between(begin, time.monotonic())
    operations = sum(product.operations(rows) for product in weights.products) * weights.layers * passes
    teraflops, peak = operations / elapsed / 1e12, peak_teraflops(weights.scaling)
    return Sustained(
        weights.scaling,
        rows,
        elapsed,
        passes,
        teraflops,
        None if peak is None else teraflops / peak,
        power,
        power.watts * elapsed / (rows * weights.layers * passes),
    )


def weighted_teraflops(results: Sequence[Burst], products: Sequence[Product]) -> float:
    """Of one layer: its operations over its products' times. One result per product."""
    operations = {product.name: product.operations(results[0].rows) for product in products}
    return sum(operations[one.product] for one in results) / sum(one.microseconds for one in results) / 1e6


def share(value: float | None) -> str:
    return "     -" if value is None else f"{value:6.1%}"


def measure(options: Options) -> dict[str, Any]:
    model = SHAPES[options.shape]
    products, layers = products_of(model), min(options.layers, model.layers)
    copy_rate = copy_gigabytes_per_second()
    print(f"{options.shape}, {layers} layers; large copy {copy_rate:,.0f} GB/s")
    all_bursts: list[Burst] = []
    layer_rates: list[dict[str, Any]] = []
    long_runs: list[Sustained] = []
    with PowerSampler(device_uuid()) as sampler, torch.inference_mode():
        for scaling in options.scalings:
            torch.cuda.empty_cache()
            weights = Weights(scaling, products, layers)
            burst_results = list(bursts(weights, options.rows, copy_rate))
            for rows in options.rows:
                results = [one for one in burst_results if one.rows == rows]
                rate = weighted_teraflops(results, products)
                layer_rates.append({"scaling": scaling, "rows": rows, "teraflops": rate})
                each = "".join(f"{one.product:>9} {one.teraflops:6,.0f} {share(one.bound_share)}" for one in results)
                print(f"burst {scaling:6}{rows:6} rows {rate:7,.0f} TFLOP/s:{each}", flush=True)
            all_bursts += burst_results
            for rows in options.sustained_rows:
                one = sustained(weights, rows, options.seconds, sampler)
                long_runs.append(one)
                print(
                    f"sustained {scaling:6}{rows:6} rows {one.teraflops:7,.0f} TFLOP/s {share(one.peak_share)} of peak"
                    f"{one.power.watts:6.0f} W{one.power.clock_mhz:6.0f} MHz{one.power.temperature_celsius:4.0f} C"
                    f"{one.joules_per_row_and_layer * 1e6:7,.1f} uJ per row and layer",
                    flush=True,
                )
            del weights
    return {
        "copy_gigabytes_per_second": copy_rate,
        "peak_teraflops": {scaling: peak_teraflops(scaling) for scaling in options.scalings},
        "cublaslt_workspace": os.environ.get("CUBLASLT_WORKSPACE_SIZE"),
        "layer_bursts": layer_rates,
        "bursts": [asdict(one) for one in all_bursts],
        "sustained": [asdict(one) for one in long_runs],
    }


def main() -> None:
    options = parse(sys.argv[1:])
    try:
        require_gpu()
        result = measure(options)
        fields = {"options": asdict(options) | {"out": options.out.name}, **result}
        write_report(options.out, report("gemm.py", fields))
    except torch.OutOfMemoryError as error:
        raise SystemExit(f"error: out of GPU memory; lower --layers ({str(error).splitlines()[0]})") from error
    except MegatokenError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
