"""Which way to compute a layer's fp8 products takes the fewest joules, and what decides them?

At the power limit a joule saved is speed gained. Candidates for each product: every algorithm of cuBLASLt that can be
found (``cublaslt.py``), a persistent kernel in Triton, variants of a kernel of our own (``own_product.py``). All are
CUDA graphs over the same weights of up to 2 GiB, random over the whole range of e4m3. Each is compared with fp64 on a
sample of outputs; runs for a moment, and is left out if it takes a quarter longer than the fastest; then for 0.3 s at
the power limit; and the best of them, in turn with the algorithm that PyTorch takes, for seconds. Joules are those of
the energy counter, from renewal to renewal. ``--questions`` measures what else decides them. All products get an equal
share of ``--budget``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

import own_product
import triton_product
from cublaslt import Algorithm, Library, Problem, accepted
from gpu_measuring import EnergyMeter, distinct_weights, report, require_gpu, write_report
from megatoken.engine.config import SHAPES
from megatoken.engine.ops.gated_product import gated_product
from megatoken.errors import CapacityError, MegatokenError
from megatoken.hardware.power import PowerSampler
from megatoken.hardware.qualify.gpu_timing import (
    BF16,
    DEVICE,
    E4M3,
    E4M3_SPREAD,
    device_uuid,
    gaussian_e4m3,
    repeat_for,
)
from megatoken.hardware.qualify.shapes import Product, products_of

BURST_SECONDS, SCREEN_SECONDS, LEAST_FINAL_SECONDS = 0.02, 0.3, 1.0
MOST_SETTLING_SECONDS = 0.5
"""Before a run, while the clock settles; a third of its time at most."""
LONGEST_RETRY_SECONDS = 5.0
MOST_BURSTS, SCREENED, FINALISTS, ROUNDS = 150, 8, 2, 2
SLOWER = 1.25
SEARCHED_SHARE = 1 / 6
"""Of a product's time, in which algorithms of cuBLASLt are tried for a moment."""
GRAPH_LAUNCHES = 24
"""Fewest: long enough for the host to stay ahead."""
SAMPLED_ROWS, SAMPLED_COLUMNS = 64, 512
LARGEST_ERROR = 0.01
MOST_ANSWERS = 20
OTHER_TOKENS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192)
OWN = [
    *(own_product.Variant(columns) for columns in (256, 240, 192)),
    *(own_product.Variant(columns, overlapped=True) for columns in (192, 176)),
]
OWN_QUESTIONS = [own_product.Variant(cluster=1), own_product.Variant(rows_first=False)]
TRITON = [triton_product.Variant(flatten=True), triton_product.Variant(columns=128, stages=4, flatten=True)]
KINDS = ("own", "triton")
Launch = Callable[[Tensor, Tensor], Tensor]
"""Of x and a weight."""
Meters = tuple[EnergyMeter, PowerSampler]


@dataclass(frozen=True, slots=True)
class Measured:
    """One way over some seconds."""

    name: str
    seconds: float
    microseconds: float
    teraflops: float
    watts: float
    clock_mhz: float
    microjoules_per_token: float
    joules_per_teraflop: float


class Bench:
    """One product: its matrices and the ways to compute it."""

    def __init__(self, library: Library, product: Product, tokens: int) -> None:
        self.library, self.product, self.tokens = library, product, tokens
        self.weights = distinct_weights(product.outputs, product.inputs)
        self.x = gaussian_e4m3(tokens, product.inputs)
        scales = 1 / E4M3_SPREAD, product.inputs**-0.5 / E4M3_SPREAD
        self.scales = torch.full((1,), scales[0], device=DEVICE), torch.full((1,), scales[1], device=DEVICE)
        self.y = torch.empty(tokens, product.outputs, dtype=BF16, device=DEVICE)
        self.graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {}

    def in_cublaslt(self) -> dict[str, Launch]:
        """cuBLASLt's ways by name, first what PyTorch takes."""
        problem = self._problem(fast=True)
        outputs = sorted({self.product.outputs, *(one.outputs for one in products_of(SHAPES["llama2-70b"]))})
        return {
            " ".join(f"{key}={value}" for key, value in asdict(settings).items()): self._of(problem, algorithm)
            for settings, algorithm in accepted(problem, outputs, OTHER_TOKENS).items()
        }

    def with_exact_sums(self) -> Launch:
        """What PyTorch takes without fast accumulation."""
        problem = self._problem(fast=False)
        return self._of(problem, problem.proposed()[0])

    def _problem(self, *, fast: bool) -> Problem:
        sides = self.tokens, self.product.outputs, self.product.inputs
        return Problem(self.library, sides, self.scales, fast=fast)

    def _of(self, problem: Problem, algorithm: Algorithm) -> Launch:
        def launch(x: Tensor, weight: Tensor) -> Tensor:
            problem.run(algorithm, x, weight, self.y)
            return self.y

        return launch

    def own(self, variants: Sequence[own_product.Variant]) -> dict[str, Launch]:
        """Our kernel's ways."""

        def launch(x: Tensor, weight: Tensor, variant: own_product.Variant) -> Tensor:
            return own_product.own_product(x, weight, *self.scales, variant)

        return {str(variant): partial(launch, variant=variant) for variant in variants}

    def in_triton(self) -> dict[str, Launch]:
        """Triton's ways."""

        def launch(x: Tensor, weight: Tensor, variant: triton_product.Variant) -> Tensor:
            return triton_product.triton_product(x, weight, *self.scales, variant)

        return {str(variant): partial(launch, variant=variant) for variant in TRITON}

    def error(self, launch: Launch) -> float:
        """Norm of the difference from fp64 over the norm of a sample of outputs; NaN if any output is not written."""
        rows = torch.randint(self.tokens, (SAMPLED_ROWS,), device=DEVICE)
        columns = torch.randint(self.product.outputs, (SAMPLED_COLUMNS,), device=DEVICE)
        some_x, some_weight = (  # e4m3 is indexed as bytes
            whole.view(torch.uint8)[chosen].view(E4M3).double()
            for whole, chosen in ((self.x, rows), (self.weights[0], columns))
        )
        exact = some_x @ some_weight.t() * (self.scales[0].double() * self.scales[1].double())
        self.y.fill_(float("nan"))
        poison = torch.full_like(self.y, float("nan"))
        del poison  # its memory is what the next result gets
        out = launch(self.x, self.weights[0])
        if not bool(out.isfinite().all()):
            return float("nan")
        return float((out[rows][:, columns].double() - exact).norm() / exact.norm())

    def record(self, name: str, launch: Launch, x: Tensor | None = None, weights: Sequence[Tensor] = ()) -> None:
        """A graph of launches on all weights in turn."""
        inputs, used = self.x if x is None else x, weights or self.weights
        count = len(used) * -(-GRAPH_LAUNCHES // len(used))
        launch(inputs, used[0])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for number in range(count):
                launch(inputs, used[number % len(used)])
        self.graphs[name] = graph, count

    def burst(self, name: str) -> float:
        """Microseconds a launch."""
        graph, count = self.graphs[name]
        passes, elapsed = repeat_for(BURST_SECONDS, graph.replay)
        return elapsed / passes / count * 1e6

    def measure(self, name: str, seconds: float, meters: Meters) -> Measured:
        """Back to back at the settled clock; longer if the counters were not renewed meanwhile."""
        graph, count = self.graphs[name]
        repeat_for(min(seconds / 3, MOST_SETTLING_SECONDS), graph.replay)
        begin = time.monotonic()
        passes, elapsed = repeat_for(seconds, graph.replay)
        end = time.monotonic()
        try:
            watts, clock = meters[0].watts(begin, end), meters[1].between(begin, end).clock_mhz
        except CapacityError:
            if seconds > LONGEST_RETRY_SECONDS:
                raise
            return self.measure(name, 2 * seconds, meters)
        each = elapsed / passes / count
        teraflop = self.product.operations(self.tokens) / 1e12
        joules = watts * each
        return Measured(
            name, elapsed, each * 1e6, teraflop / each, watts, clock, joules / self.tokens * 1e6, joules / teraflop
        )


def best_of(bench: Bench, options: argparse.Namespace, until: float, meters: Meters) -> dict[str, Any]:
    """All rounds for one product, at most until a time of ``time.monotonic()``."""
    searched = bench.in_cublaslt()
    default = next(iter(searched))
    own = bench.own(OWN if "own" in options.kernels else [])
    ways = {name: searched[name] for name in list(searched)[:MOST_BURSTS]} | own
    ways |= bench.in_triton() if "triton" in options.kernels else {}
    begin = time.monotonic()
    bursts: dict[str, float] = {}
    errors: dict[str, float] = {}
    refused: dict[str, str] = {}
    for name, launch in ways.items():
        if name != default and name in searched and time.monotonic() > begin + SEARCHED_SHARE * (until - begin):
            refused[name] = "no time"
            continue
        try:
            errors[name] = bench.error(launch)
            if not errors[name] < LARGEST_ERROR:
                refused[name] = f"error {errors[name]:.4f}"
                continue
            bench.record(name, launch)
            bursts[name] = bench.burst(name)
        except (RuntimeError, ValueError, MegatokenError) as error:  # of Triton, a driver, or sides that do not fit
            refused[name] = str(error).partition("\n")[0][:200]
    in_order = sorted(bursts, key=bursts.__getitem__)
    fast = [name for name in in_order if bursts[name] <= SLOWER * bursts[in_order[0]]]
    chosen = dict.fromkeys([default, *fast[:SCREENED], *(name for name in fast if name in own)])
    screened = [bench.measure(name, SCREEN_SECONDS, meters) for name in chosen]
    screened.sort(key=lambda one: one.joules_per_teraflop)
    best = [one.name for one in screened if one.name != default]
    names = list(dict.fromkeys([default, *best[:FINALISTS], *[name for name in best if name in own][:1]]))
    left = until - time.monotonic()
    each = max(LEAST_FINAL_SECONDS, min(options.seconds, left / (ROUNDS * len(names)) - MOST_SETTLING_SECONDS))
    final = [bench.measure(name, each, meters) for _ in range(ROUNDS) for name in names]
    return {
        "product": asdict(bench.product),
        "tokens": bench.tokens,
        "default": default,
        "found_in_cublaslt": len(searched),
        "refused": refused,
        "errors": errors,
        "burst_microseconds": {name: bursts[name] for name in in_order},
        "screened": [asdict(one) for one in screened],
        "final": [asdict(one) for one in final],
    }


def other_values(like: Tensor) -> dict[str, Tensor]:
    """Matrices of other values, of the same sides."""
    bits = torch.randint(256, like.shape, dtype=torch.uint8, device=DEVICE)
    bits[(bits & 0x7F) == 0x7F] = 0  # NaN
    heavy = torch.randn(like.shape, device=DEVICE) / torch.randn((len(like), 1), device=DEVICE).abs().clamp_(min=0.05)
    half = gaussian_e4m3(*like.shape).view(torch.uint8) * torch.randint_like(bits, 2)
    return {
        "zeros": torch.zeros_like(like),
        "every bit pattern": bits.view(E4M3),
        "deviation 1": torch.randn(like.shape, device=DEVICE).to(E4M3),
        "rows of very different size": (20 * heavy).clamp_(-448, 448).to(E4M3),
        "half of them zero": half.view(E4M3),
    }


def answers(bench: Bench, options: argparse.Namespace, meters: Meters) -> list[Measured]:
    """What else decides the joules: order of operands and tiles, clusters, exact sums, values."""
    x_scale, weight_scale = bench.scales
    default = next(iter(bench.in_cublaslt().values()))

    def swapped(x: Tensor, weight: Tensor) -> Tensor:
        return torch._scaled_mm(weight, x.t(), weight_scale, x_scale, out_dtype=BF16, use_fast_accum=True)

    def gated(x: Tensor, weight: Tensor) -> Tensor:
        return gated_product(x, weight, *bench.scales, x_scale)

    asked: dict[str, Launch] = {
        "as PyTorch": default,
        "exact sums": bench.with_exact_sums(),
        "weight as the left operand": swapped,
        **bench.own([OWN[0], *OWN_QUESTIONS] if "own" in options.kernels else []),
    }
    if bench.product.name == "gate_up":
        asked["gate, up and activation as one kernel"] = gated
    for name, launch in asked.items():
        bench.record(name, launch)
    weights, inputs = other_values(bench.weights[0]), other_values(bench.x)  # graphs read them at each replay
    for name in weights:
        bench.record(f"weights: {name}", default, weights=[weights[name]])
        bench.record(f"x: {name}", default, x=inputs[name])
    others = [f"{matrix}: {name}" for matrix in ("weights", "x") for name in weights]
    return [bench.measure(name, options.question_seconds, meters) for name in (*asked, *others, "as PyTorch")]


def show(all_measured: Sequence[Measured], default: str) -> None:
    """Means of each name next to the default's."""

    def mean(name: str, key: str) -> float:
        return fmean(float(getattr(one, key)) for one in all_measured if one.name == name)

    usual = mean(default, "joules_per_teraflop")
    for name in dict.fromkeys(one.name for one in all_measured):
        joules, watts, clock = (mean(name, key) for key in ("joules_per_teraflop", "watts", "clock_mhz"))
        print(
            f"    {joules:.4f} J/TFLOP ({joules / usual - 1:+.2%}) {mean(name, 'microjoules_per_token'):7.2f} uJ/token"
            f" {mean(name, 'microseconds'):7.1f} us {mean(name, 'teraflops'):6,.0f} TFLOP/s {watts:4.0f} W"
            f" {clock:5.0f} MHz  {name}",
            flush=True,
        )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama2-70b")
    parser.add_argument("--tokens", type=int, default=1536, help="tokens a step (default: 1536)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each last run, at most (default: 10)")
    parser.add_argument("--budget", type=float, default=400.0, help="seconds for all (default: 400)")
    parser.add_argument("--products", nargs="+", help="of the layer (default: all)")
    parser.add_argument("--kernels", nargs="*", choices=KINDS, default=list(KINDS), help="besides cuBLASLt's")
    parser.add_argument("--questions", nargs="*", default=[], help="products of which the questions are asked")
    parser.add_argument("--question-seconds", type=float, default=1.0, help="of each answer (default: 1)")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace, until: float) -> None:
    """Every product, until about a time of ``time.monotonic()``; the file is written after each."""
    torch.mm(torch.ones(16, 16, device=DEVICE, dtype=BF16), torch.ones(16, 16, device=DEVICE, dtype=BF16))
    library = Library()
    results: list[dict[str, Any]] = []
    products = products_of(SHAPES[options.shape])
    chosen = [one for one in products if not options.products or one.name in options.products]
    with EnergyMeter(device_uuid()) as energy, PowerSampler(device_uuid()) as power, torch.inference_mode():
        for number, product in enumerate(chosen):
            begin = time.monotonic()
            share = (until - begin) / (len(chosen) - number)
            bench = Bench(library, product, options.tokens)
            asked = product.name in options.questions
            for_answers = MOST_ANSWERS * 4 / 3 * options.question_seconds if asked else 0.0
            result = best_of(bench, options, begin + share - for_answers, (energy, power))
            print(f"{product.name}, {options.tokens} tokens: {result['found_in_cublaslt']} algorithms of cuBLASLt")
            for reason, number in Counter(result["refused"].values()).most_common(8):
                print(f"    {number} refused: {reason}")
            show([Measured(**one) for one in result["final"]], result["default"])
            results.append(result)
            if asked:
                answered = answers(bench, options, (energy, power))
                show(answered, "as PyTorch")
                result["answers"] = [asdict(one) for one in answered]
            fields = {"options": {**vars(options), "out": options.out.name}, "products": results}
            write_report(options.out, report("product_algorithms.py", fields))
            del bench
            torch.cuda.empty_cache()


def main() -> None:
    begin = time.monotonic()
    options = parse(sys.argv[1:])
    try:
        require_gpu()
        measure(options, begin + options.budget)
    except MegatokenError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
