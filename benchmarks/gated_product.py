"""Time and joules of gate and up with their activation: PyTorch's product and our pass after it, and our one kernel.

Each way runs back to back for some seconds, which reaches the power limit at many tokens; a fifth of that time
before is not counted. Values are random over the whole range of e4m3, and weights differ from launch to launch.
What decides the joules of the product alone is asked by ``product_algorithms.py --questions``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_measuring import back_to_back, distinct_weights, graph_microseconds, report, require_gpu, write_report
from megatoken.engine.config import SHAPES
from megatoken.engine.ops import fused
from megatoken.engine.ops.gated_product import CLUSTERS, gated_product, interleaved
from megatoken.errors import MegatokenError
from megatoken.hardware.power import PowerSampler
from megatoken.hardware.qualify.gpu_timing import (
    BF16,
    DEVICE,
    E4M3,
    E4M3_SPREAD,
    device_uuid,
    gaussian_e4m3,
)

OUT_SCALE = 0.02
Scales = tuple[Tensor, Tensor]
Way = Callable[[Tensor], Any]


def scalar(value: float) -> Tensor:
    """fp32 [1] on the device."""
    return torch.full((1,), value, device=DEVICE)


def product(x: Tensor, weight: Tensor, scales: Scales) -> Tensor:
    """bf16 [T, N] through PyTorch."""
    return torch._scaled_mm(x, weight.t(), *scales, out_dtype=BF16, use_fast_accum=True)


def ways(x: Tensor, scales: Scales, out_scale: Tensor) -> dict[str, Way]:
    """What is compared, by name."""

    def in_one(cluster: int, weight: Tensor) -> Tensor:
        return gated_product(x, weight, *scales, out_scale, cluster)

    return {
        "product alone": lambda weight: product(x, weight, scales),
        "product, then activation": lambda weight: fused.silu_mul(product(x, weight, scales), out_scale),
        **{f"one kernel, clusters of {cluster}": partial(in_one, cluster) for cluster in CLUSTERS},
    }


def largest_error(x: Tensor, weight: Tensor, scales: Scales, out_scale: Tensor) -> float:
    """Of the one kernel, as a share of the largest value that e4m3 can hold."""
    gate, up = product(x, weight, scales).float().chunk(2, dim=1)
    exact = (torch.nn.functional.silu(gate) * up / out_scale).clamp(-448, 448)
    packed = interleaved(weight.view(torch.uint8)).view(E4M3)
    return float((gated_product(x, packed, *scales, out_scale).float() - exact).abs().max() / 448)


def measure(run: Way, weights: Sequence[Tensor], seconds: float, sampler: PowerSampler) -> dict[str, float]:
    """Back to back."""
    in_turn = cycle(weights)
    count, elapsed, power = back_to_back(lambda: run(next(in_turn)), seconds, sampler)
    launch_seconds = elapsed / count
    return {
        "microseconds": launch_seconds * 1e6,
        "watts": power.watts,
        "clock_mhz": power.clock_mhz,
        "millijoules": power.watts * launch_seconds * 1e3,
    }


def launch_one(run: Way, weights: Sequence[Tensor], number: int) -> Any:
    """On the weight of this number."""
    return run(weights[number])


def of_tokens(tokens: int, weights: list[Tensor], options: argparse.Namespace, sampler: PowerSampler) -> dict[str, Any]:
    """All ways for one number of tokens; the first runs again at the end."""
    columns, depth = weights[0].shape
    x = gaussian_e4m3(tokens, depth)
    scales = scalar(1 / E4M3_SPREAD), scalar(depth**-0.5 / E4M3_SPREAD)
    out_scale = scalar(OUT_SCALE)
    compared = ways(x, scales, out_scale)
    results: dict[str, Any] = {}
    for name, run in [*compared.items(), ("product alone, again", compared["product alone"])]:
        results[name] = measure(run, weights, options.seconds, sampler)
        in_graph = partial(launch_one, run, weights)
        results[name]["graph_microseconds"] = graph_microseconds(in_graph, len(weights), len(weights))
    error = largest_error(x, weights[0], scales, out_scale)
    print(f"{tokens} tokens, largest error {error:.4f} of e4m3's range")
    for name, one in results.items():
        rate = 2 * tokens * columns * depth / one["microseconds"] / 1e6
        print(
            f"    {name:28} {one['microseconds']:8.1f} us (graph {one.get('graph_microseconds', float('nan')):8.1f})"
            f" {rate:6,.0f} TFLOP/s {one['millijoules'] / tokens * 1e3:7.1f} uJ a token {one['watts']:4.0f} W"
            f" {one['clock_mhz']:5.0f} MHz",
            flush=True,
        )
    return {"tokens": tokens, "largest_error": error, "ways": results}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama2-70b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 128, 256, 512, 1024, 1536, 2048])
    parser.add_argument("--seconds", type=float, default=3.0, help="of each way (default: 3)")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse(sys.argv[1:])
    try:
        require_gpu()
        config = SHAPES[options.shape]
        columns, depth = 2 * config.intermediate_size, config.hidden_size
        with PowerSampler(device_uuid()) as sampler, torch.inference_mode():
            weights = distinct_weights(columns, depth)
            results = [of_tokens(tokens, weights, options, sampler) for tokens in options.tokens]
        chosen = {**vars(options), "out": options.out.name}
        write_report(options.out, report("gated_product.py", {"options": chosen, "results": results}))
    except MegatokenError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
