"""Times the two grouped products of a mixture of experts, and the whole mixture, on random data.

Tokens are as many as give the experts the wanted number of rows on average; each chooses at random, so the largest
expert has more (the imbalance is in the result; a trained router's may be larger). Bursts repeat a product over a few
layers' weights: the rate at a high clock. A sustained run goes through whole mixtures of those layers, router,
activation and sum over choices included, for seconds, with clocks and power. The bound is the larger of operations over
the datasheet's rate and bytes over a large copy's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton import OutOfResources

from gemm import peak_teraflops
from gpu_measuring import copy_gigabytes_per_second, graph_microseconds, report, require_gpu, write_report
from megatoken.engine.config import ClampedSwiglu, ExpertsConfig, gpt_oss_experts
from megatoken.engine.ops.cuda_experts import Experts, ExpertWeights
from megatoken.engine.ops.grouped_product import TileConfig, grouped_product, tile_config
from megatoken.engine.ops.routing_kernels import route
from megatoken.errors import MegatokenError
from megatoken.hardware.power import PowerSampler
from megatoken.hardware.qualify.gpu_timing import DEVICE, E4M3_SPREAD, device_uuid, gaussian, gaussian_e4m3, repeat_for

PRECISIONS = ("fp8", "bf16")
LAYERS = 2
"""Distinct ones: more bytes than the cache of a GPU holds."""
PAUSE_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Shape:
    """A layer's mixture."""

    name: str
    hidden_size: int
    mixture: ExpertsConfig

    def sides(self, product: str) -> tuple[int, int]:
        """Outputs and inputs of one expert's weight."""
        hidden, width = self.hidden_size, self.mixture.intermediate_size
        return (2 * width, hidden) if product == "gate_up" else (hidden, width)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen3-30b-a3b", 2048, ExpertsConfig(128, 8, 768, normalized=True, layers=(0,))),
        Shape("gpt-oss-120b", 2880, gpt_oss_experts(128, 4, 2880, 1, ClampedSwiglu(1.702, 7.0))),
        Shape("mixtral-8x7b", 4096, ExpertsConfig(8, 2, 14_336, normalized=True, layers=(0,))),
    )
}


@dataclass(frozen=True, slots=True)
class Burst:
    """One product with one size of tiles."""

    shape: str
    precision: str
    product: str
    rows_per_expert: int
    largest_expert_rows: int
    tile: TileConfig
    chosen: bool
    """Whether the engine takes this tile."""
    microseconds: float
    teraflops: float
    bound_share: float | None


def weights_of(shape: Shape, precision: str) -> list[Experts]:
    """Of each layer. Outputs have a spread of about 1."""

    def linear(outputs: int, inputs: int) -> ExpertWeights:
        count = shape.mixture.count
        bias_XN = gaussian(count, outputs) if shape.mixture.biases else None
        if precision == "bf16":
            return ExpertWeights(gaussian(count, outputs, inputs, spread=inputs**-0.5), None, bias_XN)
        values = gaussian_e4m3(count * outputs, inputs).view(count, outputs, inputs)
        scale_XN = torch.full((count, outputs), inputs**-0.5 / E4M3_SPREAD, device=DEVICE)
        return ExpertWeights(values, scale_XN, bias_XN)

    hidden, mixture = shape.hidden_size, shape.mixture
    return [
        Experts(
            gaussian(mixture.count, hidden, spread=hidden**-0.5),
            gaussian(mixture.count) if mixture.biases else None,
            gate_up=linear(*shape.sides("gate_up")),
            down=linear(*shape.sides("down")),
            config=mixture,
        )
        for _ in range(LAYERS)
    ]


def routing(shape: Shape, tokens: int) -> tuple[Tensor, Tensor, int]:
    """Sorted choices, the first of each expert, and the rows of the largest."""
    _, _, order_R, starts = route(torch.rand(tokens, shape.mixture.count, device=DEVICE), shape.mixture)
    return order_R, starts, int(starts.diff().max())


def tiles(rows: int, groups: int, *, tune: bool) -> list[TileConfig]:
    """The engine's choice first; with ``tune`` also others."""
    chosen = tile_config(rows, groups)
    if not tune:
        return [chosen]
    sides = [(16, 128), (64, 128), (64, 256), (128, 128), (128, 256)]
    others = [
        TileConfig(height, width, warps=warps, stages=stages, programs=programs)
        for height, width in sides
        for warps in ((4,) if height == 16 else (4, 8))
        for stages in (3, 4, 5)
        for programs in (1, 2)
    ]
    return [chosen, *(other for other in others if other != chosen)]


def bursts(
    shape: Shape, precision: str, layers: Sequence[Experts], rows: int, copy_gigabytes: float, *, tune: bool
) -> list[Burst]:
    """Both products with ``rows`` rows for each expert on average."""
    choices, count = shape.mixture.active, shape.mixture.count
    tokens = rows * count // choices
    order_R, starts, largest = routing(shape, tokens)
    peak, results = peak_teraflops("row" if precision == "fp8" else "bf16"), []
    for product in ("gate_up", "down"):
        outputs, inputs = shape.sides(product)
        inputs_rows = tokens if product == "gate_up" else tokens * choices
        x = gaussian(inputs_rows, inputs) if precision == "bf16" else gaussian_e4m3(inputs_rows, inputs)
        x_scale = None if precision == "bf16" else torch.full((inputs_rows, 1), 1 / E4M3_SPREAD, device=DEVICE)
        weights: list[ExpertWeights] = [getattr(layer, product) for layer in layers]
        launch = partial(
            launch_product,
            weights,
            (x, x_scale),
            order_R,
            starts,
            choices if product == "gate_up" else None,
            None if product == "gate_up" else torch.rand(tokens * choices, device=DEVICE),
            shape.mixture.activation if product == "gate_up" else None,
        )
        operations = 2 * tokens * choices * outputs * inputs
        moved = (count * outputs + inputs_rows) * inputs * x.itemsize + 2 * tokens * choices * outputs
        bound = None if peak is None else max(operations / peak / 1e6, moved / copy_gigabytes / 1e3)
        for number, tile in enumerate(tiles(tokens * choices, count, tune=tune)):
            time.sleep(PAUSE_SECONDS)
            try:
                microseconds = graph_microseconds(partial(launch, tile), len(layers))
            except OutOfResources as error:
                print(f"  {tile}: {error}")
                continue
            results.append(
                Burst(
                    *(shape.name, precision, product, rows, largest, tile, number == 0, microseconds),
                    operations / microseconds / 1e6,
                    None if bound is None else bound / microseconds,
                )
            )
    return results


def launch_product(
    weights: Sequence[ExpertWeights],
    x: tuple[Tensor, Tensor | None],
    order_R: Tensor,
    starts: Tensor,
    choices: int | None,
    factors_R: Tensor | None,
    activation: ClampedSwiglu | None,
    tile: TileConfig,
    layer: int,
) -> None:
    """One product of one layer; its result is dropped, so that the next may take its memory."""
    one = weights[layer]
    grouped_product(
        *(*x, one.values_XND, one.scale_XN, order_R, starts),
        bias_XN=one.bias_XN,
        choices=choices,
        factors_R=factors_R,
        activation=activation,
        config=tile,
    )


def sustained(
    shape: Shape, precision: str, layers: Sequence[Experts], rows: int, seconds: float, sampler: PowerSampler
) -> dict[str, Any]:
    """Whole mixtures, one after the other, as a CUDA graph."""
    tokens = rows * shape.mixture.count // shape.mixture.active
    x_TD = gaussian(tokens, shape.hidden_size)
    layers[0].product(x_TD)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in layers:
            layer.product(x_TD)
    begin = time.monotonic()
    passes, elapsed = repeat_for(seconds, graph.replay)
    power = sampler.between(begin, time.monotonic())
    operations = 2 * tokens * shape.mixture.active * 3 * shape.hidden_size * shape.mixture.intermediate_size
    return {
        "shape": shape.name,
        "precision": precision,
        "rows_per_expert": rows,
        "tokens": tokens,
        "microseconds": elapsed / passes / len(layers) * 1e6,
        "teraflops": operations * len(layers) * passes / elapsed / 1e12,
        "power": asdict(power),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    copy_rate = copy_gigabytes_per_second()
    print(f"large copy {copy_rate:,.0f} GB/s")
    all_bursts: list[Burst] = []
    long_runs: list[dict[str, Any]] = []
    with PowerSampler(device_uuid()) as sampler, torch.inference_mode():
        for name in options.shapes:
            for precision in options.precisions:
                torch.cuda.empty_cache()
                shape = SHAPES[name]
                layers = weights_of(shape, precision)
                for rows in options.rows:
                    results = bursts(shape, precision, layers, rows, copy_rate, tune=options.tune)
                    for one in sorted(results, key=lambda one: (one.product, one.microseconds)):
                        share = "-" if one.bound_share is None else f"{one.bound_share:.1%}"
                        print(
                            f"burst {name} {precision} {one.product:8}{rows:6} rows an expert "
                            f"(largest {one.largest_expert_rows}) {one.microseconds:9,.1f} us "
                            f"{one.teraflops:7,.0f} TFLOP/s {share} of bound {'* ' if one.chosen else '  '}{one.tile}",
                            flush=True,
                        )
                    all_bursts += results
                    run = sustained(shape, precision, layers, rows, options.seconds, sampler)
                    long_runs.append(run)
                    print(
                        f"mixture {name} {precision}{rows:6} rows an expert {run['microseconds']:9,.1f} us "
                        f"{run['teraflops']:7,.0f} TFLOP/s{run['power']['watts']:6.0f} W"
                        f"{run['power']['clock_mhz']:6.0f} MHz",
                        flush=True,
                    )
                del layers
    return {
        "copy_gigabytes_per_second": copy_rate,
        "bursts": [asdict(one) for one in all_bursts],
        "sustained": long_runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    names = ["qwen3-30b-a3b", "gpt-oss-120b"]
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=names, help=f"(default: {names})")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    rows = [256, 64, 4]
    parser.add_argument("--rows", nargs="+", type=int, default=rows, help=f"of an expert on average (default: {rows})")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each sustained run (default: 5)")
    parser.add_argument("--tune", action="store_true", help="time other tiles than the engine's too")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    options = parser.parse_args()
    if min([*options.rows, options.seconds]) <= 0:
        parser.error("--rows and --seconds must be above 0")
    try:
        require_gpu()
        fields = {"options": vars(options) | {"out": options.out.name}, **measure(options)}
        write_report(options.out, report("experts.py", fields))
    except torch.OutOfMemoryError as error:
        raise SystemExit(f"error: out of GPU memory ({str(error).splitlines()[0]})") from error
    except MegatokenError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
