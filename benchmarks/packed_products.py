"""Times what is done with four-bit weights that stay packed on a GPU: products of few tokens, and expansion to e4m3.

The four linears of a decoder layer, with several launches of each kernel, in CUDA graphs over more weights than the
cache holds. Codes and scales are random. A rate is the bytes that must move (packed weights, and of an expansion also
its result) over the time; next to it is the fp8 product of as many tokens.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_measuring import (
    copy_gigabytes_per_second,
    distinct_weights,
    graph_microseconds,
    report,
    require_gpu,
    write_report,
)
from megatoken.engine.config import SHAPES
from megatoken.engine.ops import nvrtc
from megatoken.engine.ops.packed_product import EXPANSION, LAUNCHES, Launch, PackedTiles
from megatoken.errors import MegatokenError
from megatoken.hardware.qualify.gpu_timing import DEVICE, gaussian_e4m3
from megatoken.hardware.qualify.shapes import products_of

ROWS = (1, 4, 8, 16, 32, 64)
DISTINCT_BYTES = 2**29
CANDIDATES = (
    *LAUNCHES,
    *(Launch(1, 2, 8, 4), Launch(1, 4, 8, 3), Launch(4, 4, 8, 2), Launch(8, 4, 4, 2)),
)
EXPANSIONS = (EXPANSION, Launch(1, 1, 8, 2), Launch(1, 1, 4, 4), Launch(1, 1, 16, 2), Launch(1, 1, 4, 2))


def random_tiles(outputs: int, depth: int, group: int) -> PackedTiles:
    """Every code, and scales around 1."""
    tiles = outputs // 16, depth // 64
    codes = torch.randint(256, (*tiles, 8, 4, 4, 4), dtype=torch.uint8, device=DEVICE)
    scales = torch.randint(48, 64, (*tiles, 8, 64 // group, 2), dtype=torch.uint8, device=DEVICE)
    ones_N = torch.ones(outputs, device=DEVICE)
    return PackedTiles(codes, scales, ones_N, ones_N, ones_N, torch.ones((), device=DEVICE))


def packed_bytes(tiles: PackedTiles) -> int:
    return tiles.codes.numel() + tiles.scales.numel()


def expansions(weights: list[PackedTiles]) -> dict[str, float]:
    """Microseconds of each launch."""

    def time(launch: Launch) -> float:
        def into_the_same_memory(number: int) -> None:
            weights[number].expand(launch)

        return graph_microseconds(into_the_same_memory, len(weights))

    return {name(launch): time(launch) for launch in EXPANSIONS}


def products(weights: list[PackedTiles], rows: int) -> dict[str, float]:
    """Microseconds of each launch for so many rows."""
    x, scale = gaussian_e4m3(rows, weights[0].sides[1]), torch.ones(1, device=DEVICE)

    def time(launch: Launch, overlapping: bool) -> float:
        def multiply(number: int) -> Tensor:
            return weights[number].product(x, scale, None, config=launch, overlapping=overlapping)

        return graph_microseconds(multiply, len(weights))

    tokens = min(launch.token_tiles for launch in CANDIDATES if 8 * launch.token_tiles >= rows)
    output_tiles = len(weights[0].codes)
    candidates = [one for one in CANDIDATES if one.token_tiles == tokens and one.of(output_tiles) == one]
    times = {name(launch): time(launch, False) for launch in candidates}
    if nvrtc.overlaps(DEVICE, rows):
        times |= {f"{name(launch)} overlapping": time(launch, True) for launch in candidates}
    return times


def fp8_products(outputs: int, depth: int, rows: int) -> float:
    """Microseconds of the same product in fp8."""
    weights, x = distinct_weights(outputs, depth), gaussian_e4m3(rows, depth)
    scale = torch.ones(1, device=DEVICE)

    def multiply(number: int) -> Tensor:
        weight_KN = weights[number].t()
        return torch._scaled_mm(x, weight_KN, scale, scale, out_dtype=torch.bfloat16, use_fast_accum=True)

    return graph_microseconds(multiply, len(weights))


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every linear, expanded and multiplied."""
    figures: list[dict[str, Any]] = []
    for product in products_of(SHAPES[options.shape]):
        outputs, depth = product.outputs, product.inputs
        count = max(2, DISTINCT_BYTES // (outputs * depth // 2))
        weights = [random_tiles(outputs, depth, options.group) for _ in range(count)]
        size = packed_bytes(weights[0])
        print(f"{product.name}: {outputs} x {depth}, {size / 1e6:.1f} MB packed")
        times = expansions(weights)
        figures.append({"linear": product.name, "rows": None, "microseconds": times})
        rate = (size + outputs * depth) / min(times.values()) / 1e3
        print(f"  expansion  {show(times)}; best {rate:.0f} GB/s")
        for rows in options.rows:
            times, in_fp8 = products(weights, rows), fp8_products(outputs, depth, rows)
            figures.append({"linear": product.name, "rows": rows, "microseconds": times, "fp8_microseconds": in_fp8})
            print(
                f"  {rows:3} rows   {show(times)}; best {size / min(times.values()) / 1e3:.0f} GB/s; fp8 {in_fp8:.1f}"
            )
    return figures


def name(launch: Launch) -> str:
    return "x".join(map(str, launch))


def show(times: dict[str, float]) -> str:
    return ", ".join(f"{name} {time:.1f}" for name, time in times.items()) + " us"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama2-70b")
    parser.add_argument("--group", type=int, choices=[16, 32], default=16, help="16: NVFP4 (default); 32: MXFP4")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=ROWS, help=f"tokens (default: {' '.join(map(str, ROWS))})"
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    options = parser.parse_args()
    try:
        require_gpu()
        copy_rate = copy_gigabytes_per_second()
        torch.cuda.empty_cache()
        print(f"copy {copy_rate:.0f} GB/s; launches are token tiles x output tiles x warps x tiles ahead")
        figures = measure(options)
    except MegatokenError as error:
        print(f"packed_products.py: {error}", file=sys.stderr)
        return int(error.exit_code)
    fields = {"shape": options.shape, "group": options.group, "copy_gigabytes_per_second": copy_rate}
    layers = SHAPES[options.shape].layers
    for rows in (None, *options.rows):
        one = sum(min(figure["microseconds"].values()) for figure in figures if figure["rows"] == rows)
        print(f"{'expansion' if rows is None else f'{rows} rows'}: {layers} layers {layers * one / 1e3:.2f} ms")
    write_report(options.out, report("packed_products.py", {**fields, "linears": figures}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
