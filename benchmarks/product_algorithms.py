"""Which of cuBLASLt's algorithms takes the fewest joules for a layer's fp8 products?

PyTorch takes the first algorithm of cuBLASLt's heuristic. This script calls cuBLASLt itself: every algorithm, tile,
number of stages, cluster shape and swizzle that it accepts for a product runs for a moment, the fastest run longer, and
the best of them for seconds at the power limit, where a joule saved is speed gained. The algorithm that PyTorch takes
runs first and last in each round. Values are random over the whole range of e4m3, weights differ from launch to launch.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from ctypes import byref, c_float, c_int, c_int32, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p, sizeof
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_measuring import back_to_back, distinct_weights, report, require_gpu, write_report
from megatoken.engine.config import SHAPES
from megatoken.errors import CapacityError, MegatokenError
from megatoken.hardware.power import PowerSampler
from megatoken.hardware.qualify.gpu_timing import BF16, DEVICE, E4M3_SPREAD, device_uuid, gaussian_e4m3, repeat_for
from megatoken.hardware.qualify.shapes import Product, products_of

# Values of cublasLt.h and library_types.h (CUDA 13).
REAL_32F, REAL_16BF, REAL_8F_E4M3, COMPUTE_32F = 0, 14, 28, 68
TRANSPOSE = 1
DESCRIPTION = {"transpose_a": 3, "scale_a": 17, "scale_b": 18, "fast_accumulation": 25}
WORKSPACE_LIMIT = 1
CAPABILITY = {"split_k": 0, "swizzling": 2, "tiles": 6, "custom_most": 7, "stages": 13}
SETTING = {"id": 0, "tile": 1, "split_k": 2, "reduction": 3, "swizzle": 4, "custom": 5, "stages": 6, "inner": 7}
SETTING["cluster"] = 8
WORKSPACE_BYTES = 64 * 2**20
MOST_HEURISTIC = 64
MOST_IDS = 200
MOST_CLUSTERS = 24
SEARCH_SECONDS = 2.0
"""For each algorithm id: its settings are tried in random order, as there can be millions of combinations."""
MOST_CANDIDATES = 150
BURST_SECONDS, SHORT_SECONDS = 0.06, 1.0
SHORT_LIST, FINAL_LIST = 20, 5


class Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t."""

    _fields_ = (("data", c_uint64 * 8),)


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", Algorithm),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


@dataclass(frozen=True, slots=True)
class Settings:
    """What distinguishes an algorithm, as cuBLASLt numbers it."""

    id: int
    tile: int
    split_k: int
    reduction: int
    swizzle: int
    custom: int
    stages: int
    inner: int
    cluster: int


@dataclass(frozen=True, slots=True)
class Measured:
    """One algorithm over some seconds."""

    settings: Settings
    seconds: float
    microseconds: float
    teraflops: float
    watts: float
    clock_mhz: float
    microjoules_per_token: float


class Library:
    """cuBLASLt as PyTorch has loaded it; every call that fails raises."""

    def __init__(self) -> None:
        names = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "cublasLt" in line]
        if not names:
            raise CapacityError("cuBLASLt is not loaded: PyTorch has no CUDA build here")
        self._library = ctypes.CDLL(names[0])
        self.handle = c_void_p()
        self.call("Create", byref(self.handle))

    def status(self, name: str, *arguments: Any) -> int:
        """The status that ``cublasLt<name>`` returns; 0 is success."""
        result: int = getattr(self._library, f"cublasLt{name}")(*arguments)
        return result

    def call(self, name: str, *arguments: Any) -> None:
        """Call ``cublasLt<name>``.

        Raises:
            CapacityError: it failed.
        """
        if status := self.status(name, *arguments):
            raise CapacityError(f"cublasLt{name} failed with status {status}")


class ProductPlan:
    """``y [tokens, outputs] = x [tokens, inputs] W^T`` in e4m3 with a bf16 result, on several weights in turn."""

    def __init__(self, library: Library, product: Product, tokens: int) -> None:
        self.library, self.product, self.tokens = library, product, tokens
        self.weights = distinct_weights(product.outputs, product.inputs)
        self.x = gaussian_e4m3(tokens, product.inputs)
        self.y = torch.empty(tokens, product.outputs, dtype=BF16, device=DEVICE)
        self.x_scale = torch.full((1,), 1 / E4M3_SPREAD, device=DEVICE)
        self.weight_scale = torch.full((1,), product.inputs**-0.5 / E4M3_SPREAD, device=DEVICE)
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=DEVICE)
        self._one, self._zero = c_float(1.0), c_float(0.0)
        self._next = 0
        self.description = c_void_p()
        library.call("MatmulDescCreate", byref(self.description), c_int(COMPUTE_32F), c_int(REAL_32F))
        self._describe("transpose_a", c_int32(TRANSPOSE))
        self._describe("scale_a", c_void_p(self.weight_scale.data_ptr()))
        self._describe("scale_b", c_void_p(self.x_scale.data_ptr()))
        self._describe("fast_accumulation", ctypes.c_int8(1))
        # Column-major, as BLAS has it: W^T is A, x^T is B, y^T is C and D.
        self.a = self._layout(REAL_8F_E4M3, product.inputs, product.outputs)
        self.b = self._layout(REAL_8F_E4M3, product.inputs, tokens)
        self.d = self._layout(REAL_16BF, product.outputs, tokens)

    def _describe(self, name: str, value: Any) -> None:
        arguments = (self.description, c_int(DESCRIPTION[name]), byref(value), c_size_t(sizeof(value)))
        self.library.call("MatmulDescSetAttribute", *arguments)

    def _layout(self, kind: int, rows: int, columns: int) -> c_void_p:
        layout = c_void_p()
        arguments = (c_int(kind), c_uint64(rows), c_uint64(columns), ctypes.c_int64(rows))
        self.library.call("MatrixLayoutCreate", byref(layout), *arguments)
        return layout

    def heuristic(self) -> list[Algorithm]:
        """What cuBLASLt proposes, best first."""
        preference = c_void_p()
        self.library.call("MatmulPreferenceCreate", byref(preference))
        limit = c_uint64(WORKSPACE_BYTES)
        self.library.call("MatmulPreferenceSetAttribute", preference, c_int(WORKSPACE_LIMIT), byref(limit), c_size_t(8))
        found, count = (Heuristic * MOST_HEURISTIC)(), c_int()
        self.library.call(
            "MatmulAlgoGetHeuristic",
            self.library.handle,
            self.description,
            self.a,
            self.b,
            self.d,
            self.d,
            preference,
            c_int(MOST_HEURISTIC),
            found,
            byref(count),
        )
        return [found[place].algorithm for place in range(count.value) if found[place].state == 0]

    def accepted(self) -> Iterator[Algorithm]:
        """Every combination of settings that cuBLASLt accepts for this product."""
        kinds = [c_int(kind) for kind in (COMPUTE_32F, REAL_32F, REAL_8F_E4M3, REAL_8F_E4M3, REAL_16BF, REAL_16BF)]
        ids, count = (c_int * MOST_IDS)(), c_int()
        self.library.call("MatmulAlgoGetIds", self.library.handle, *kinds, c_int(MOST_IDS), ids, byref(count))
        for number in ids[: count.value]:
            base = Algorithm()
            if self.library.status("MatmulAlgoInit", self.library.handle, *kinds, c_int(number), byref(base)):
                continue
            tiles = self._capabilities(base, "tiles") or [0]
            stages = self._capabilities(base, "stages") or [0]
            swizzles = [0, 1] if any(self._capabilities(base, "swizzling")) else [0]
            customs = range(max(self._capabilities(base, "custom_most") or [0]) + 1)
            space = [tiles, stages, swizzles, customs, range(MOST_CLUSTERS)]
            for chosen in in_random_order(space, deadline=time.monotonic() + SEARCH_SECONDS):
                algorithm = Algorithm.from_buffer_copy(base)
                names = ("tile", "stages", "swizzle", "custom", "cluster")
                held = all(self._set(algorithm, name, value) for name, value in zip(names, chosen, strict=True))
                if held and self._fits(algorithm):
                    yield algorithm

    def _capabilities(self, algorithm: Algorithm, name: str) -> list[int]:
        values, written = (c_uint32 * 512)(), c_size_t()
        arguments = (byref(algorithm), c_int(CAPABILITY[name]), values, c_size_t(sizeof(values)), byref(written))
        if self.library.status("MatmulAlgoCapGetAttribute", *arguments):
            single, place = c_int32(), c_int(CAPABILITY[name])
            failed = self.library.status(
                "MatmulAlgoCapGetAttribute", byref(algorithm), place, byref(single), c_size_t(4), byref(written)
            )
            return [] if failed else [single.value]
        return list(values[: written.value // 4])

    def _set(self, algorithm: Algorithm, name: str, value: int) -> bool:
        held = c_uint16(value) if name in ("inner", "cluster") else c_uint32(value)
        arguments = (byref(algorithm), c_int(SETTING[name]), byref(held), c_size_t(sizeof(held)))
        return not self.library.status("MatmulAlgoConfigSetAttribute", *arguments)

    def _fits(self, algorithm: Algorithm) -> bool:
        result = Heuristic()
        layouts = (self.a, self.b, self.d, self.d)
        arguments = (self.library.handle, self.description, *layouts, byref(algorithm), byref(result))
        return not self.library.status("MatmulAlgoCheck", *arguments) and result.workspace_bytes <= WORKSPACE_BYTES

    def settings(self, algorithm: Algorithm) -> Settings:
        """The settings of an algorithm."""
        values = {}
        for name, number in SETTING.items():
            held: Any = c_uint16() if name in ("inner", "cluster") else c_uint32()
            arguments = (byref(algorithm), c_int(number), byref(held), c_size_t(sizeof(held)), byref(c_size_t()))
            failed = self.library.status("MatmulAlgoConfigGetAttribute", *arguments)
            values[name] = -1 if failed else held.value
        return Settings(**values)

    def run(self, algorithm: Algorithm, weight: Tensor | None = None) -> None:
        """Launch the product on the next weight.

        Raises:
            CapacityError: cuBLASLt refused to launch it.
        """
        if weight is None:
            weight = self.weights[self._next % len(self.weights)]
            self._next += 1
        self.library.call(
            "Matmul",
            self.library.handle,
            self.description,
            byref(self._one),
            c_void_p(weight.data_ptr()),
            self.a,
            c_void_p(self.x.data_ptr()),
            self.b,
            byref(self._zero),
            c_void_p(self.y.data_ptr()),
            self.d,
            c_void_p(self.y.data_ptr()),
            self.d,
            byref(algorithm),
            c_void_p(self.workspace.data_ptr()),
            c_size_t(WORKSPACE_BYTES),
            c_void_p(torch.cuda.current_stream().cuda_stream),
        )

    def error(self, algorithm: Algorithm) -> float:
        """Largest difference from PyTorch's product, as a share of the largest value; the output is poisoned before."""
        weight = self.weights[0]
        expected = torch._scaled_mm(
            self.x, weight.t(), self.x_scale, self.weight_scale, out_dtype=BF16, use_fast_accum=True
        )
        self.y.fill_(float("nan"))
        self.run(algorithm, weight)
        difference = (self.y.float() - expected.float()).abs().max()
        return float(difference / expected.float().abs().max())


def in_random_order(space: Sequence[Sequence[int]], deadline: float) -> Iterator[tuple[int, ...]]:
    """Members of the Cartesian product of ``space``, each at most once, until ``deadline``."""
    generator = random.Random(0)
    size = math.prod(map(len, space))
    seen: set[int] = set()
    while len(seen) < size and time.monotonic() < deadline:
        place = generator.randrange(size)
        if place in seen:
            continue
        seen.add(place)
        chosen = []
        for values in space:
            place, index = divmod(place, len(values))
            chosen.append(values[index])
        yield tuple(chosen)


def measure_one(plan: ProductPlan, algorithm: Algorithm, seconds: float, sampler: PowerSampler) -> Measured:
    """Run it back to back; the first fifth, in which the clock settles, does not count."""
    count, elapsed, power = back_to_back(lambda: plan.run(algorithm), seconds, sampler)
    return Measured(
        plan.settings(algorithm),
        elapsed,
        elapsed / count * 1e6,
        plan.product.operations(plan.tokens) * count / elapsed / 1e12,
        power.watts,
        power.clock_mhz,
        power.watts * elapsed / count / plan.tokens * 1e6,
    )


def best_of(plan: ProductPlan, seconds: float, sampler: PowerSampler) -> dict[str, Any]:
    """All rounds for one product: burst, short, final."""
    proposed = plan.heuristic()
    default = proposed[0]
    offered = itertools.islice(itertools.chain(proposed, plan.accepted()), MOST_CANDIDATES)
    candidates = {plan.settings(one): one for one in offered}
    bursts: list[tuple[float, Settings]] = []
    wrong = refused = 0
    for settings, algorithm in candidates.items():
        try:
            if not plan.error(algorithm) < 0.02:
                wrong += 1
                continue
            passes, elapsed = repeat_for(BURST_SECONDS, lambda one=algorithm: plan.run(one))  # type: ignore[misc]
        except CapacityError:
            refused += 1
            continue
        bursts.append((elapsed / passes * 1e6, settings))
    bursts.sort(key=lambda pair: pair[0])
    shortlist = [settings for _, settings in bursts[:SHORT_LIST]]
    short = [measure_one(plan, candidates[settings], SHORT_SECONDS, sampler) for settings in shortlist]
    short.sort(key=lambda one: one.microjoules_per_token)
    finalists = [candidates[one.settings] for one in short[:FINAL_LIST]]
    final = [measure_one(plan, one, seconds, sampler) for one in (default, *finalists, default)]
    return {
        "product": asdict(plan.product),
        "tokens": plan.tokens,
        "candidates": len(candidates),
        "refused_at_launch": refused,
        "wrong": wrong,
        "default": asdict(plan.settings(default)),
        "burst_microseconds": [{"microseconds": time_, **asdict(settings)} for time_, settings in bursts[:SHORT_LIST]],
        "short": [asdict(one) for one in short],
        "final": [asdict(one) for one in final],
    }


def show(result: dict[str, Any]) -> None:
    first, *others, last = result["final"]
    default = (first["microjoules_per_token"] + last["microjoules_per_token"]) / 2
    print(
        f"{result['product']['name']:8} {result['tokens']:5} tokens, {result['candidates']} algorithms: PyTorch's"
        f" {default:.2f} uJ a token ({first['teraflops']:,.0f} and {last['teraflops']:,.0f} TFLOP/s)"
    )
    for one in others:
        print(
            f"    {one['microjoules_per_token']:.2f} uJ ({one['microjoules_per_token'] / default - 1:+.2%})"
            f" {one['teraflops']:,.0f} TFLOP/s {one['watts']:.0f} W {one['clock_mhz']:.0f} MHz {one['settings']}",
            flush=True,
        )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama2-70b")
    parser.add_argument("--tokens", type=int, default=1536, help="tokens a step (default: 1536)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run of the last round (default: 5)")
    parser.add_argument("--products", nargs="+", help="of the layer (default: all)")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse(sys.argv[1:])
    try:
        require_gpu()
        torch.mm(torch.ones(16, 16, device=DEVICE, dtype=BF16), torch.ones(16, 16, device=DEVICE, dtype=BF16))
        library = Library()
        results = []
        with PowerSampler(device_uuid()) as sampler, torch.inference_mode():
            for product in products_of(SHAPES[options.shape]):
                if options.products and product.name not in options.products:
                    continue
                plan = ProductPlan(library, product, options.tokens)
                results.append(best_of(plan, options.seconds, sampler))
                show(results[-1])
                del plan
                torch.cuda.empty_cache()
        chosen = {**vars(options), "out": options.out.name}
        write_report(options.out, report("product_algorithms.py", {"options": chosen, "products": results}))
    except MegatokenError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
