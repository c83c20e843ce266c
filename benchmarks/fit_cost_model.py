"""The constants of ``megatoken.engine.cost_model`` out of what was measured on an H200, and how well they fit.

Reads products alone (``h200-gemm.json``), attention alone (``h200-attention.json``) and the anatomy of steps
(``h200-*-steps*.json``). Nothing of a whole run is used: those are what the model is tested with
(``tests/engine/test_cost_model.py``).
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatoken.engine import cost_model
from megatoken.engine.config import SHAPES, ModelConfig, Precision
from megatoken.engine.cost_model import DEPTH_OVERHEAD, HIGHEST_CLOCK_MHZ, CostModel
from megatoken.engine.gpus import find_gpu
from megatoken.engine.memory import gathers_contexts
from megatoken.engine.schemes import find_scheme

RESULTS = Path(__file__).parent / "results"
H200 = find_gpu("H200")
LLAMA_70B, LLAMA_8B = SHAPES["llama2-70b"], SHAPES["llama3.1-8b"]
ELEMENTWISE = ("norms", "rotation")
DEEP, SHALLOW = ("down",), ("qkv", "output")  # products of depth 28,672 and 8,192; gate_up takes kernels of its own
FULL_RATE_ROWS = (1024, 1536, 2048)
"""Of bursts: enough for the full rate, too few for the power limit to slow them."""
IDLE_WATTS_RANGE = (80.0, 150.0)
SCALINGS: dict[str, Precision] = {"tensor": "fp8", "bf16": "bf16"}


class Fit(NamedTuple):
    """One constant: its name, the value found, how well it fits."""

    name: str
    value: float
    residual: str


class Step(NamedTuple):
    """A measured step: milliseconds and work (bytes or operations) of its parts, and the means of its run."""

    model: ModelConfig
    result: dict[str, Any]

    @property
    def clock(self) -> float:
        """Mean, in MHz."""
        return float(self.result["clock_mhz"])

    def seconds(self, *parts: str) -> float:
        """Of these parts together."""
        return math.fsum(part["milliseconds"] for part in self.result["step"] if part["part"] in parts) / 1e3

    def work(self, *parts: str) -> float:
        """Operations or bytes of these parts together."""
        scale = {"GB/s": 1e9, "TFLOP/s": 1e12}
        return math.fsum(
            part["milliseconds"] / 1e3 * part["achieved"] * scale[part["unit"]]
            for part in self.result["step"]
            if part["part"] in parts
        )


def read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def measured_steps(files: tuple[str, str] = ("steps-2048-tokens", "steps-4096-tokens")) -> tuple[Step, Step]:
    """Of llama2-70b and of llama3.1-8b, by default both at MLPerf's lengths."""
    return (
        Step(LLAMA_70B, read(f"h200-llama2-70b-fp8-{files[0]}.json")["result"]),
        Step(LLAMA_8B, read(f"h200-llama3.1-8b-fp8-{files[1]}.json")["result"]),
    )


def linears(model: ModelConfig) -> list[tuple[int, int]]:
    """Depth and width of a layer's products."""
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    hidden, feed_forward = model.hidden_size, model.intermediate_size
    return [(hidden, queries + 2 * keys), (queries, hidden), (hidden, 2 * feed_forward), (feed_forward, hidden)]


def depth_share(model: ModelConfig) -> float:
    """Rate of a layer's products over that of products of endless depth."""
    layer = linears(model)
    return sum(depth * width for depth, width in layer) / sum(
        (depth + DEPTH_OVERHEAD) * width for depth, width in layer
    )


def depth_overhead(gemm: Any) -> Fit:
    deep, shallow = LLAMA_70B.intermediate_size, LLAMA_70B.hidden_size

    def rate(rows: int, products: tuple[str, ...]) -> float:
        return float(
            np.mean(
                [
                    burst["teraflops"]
                    for burst in gemm["bursts"]
                    if burst["scaling"] == "tensor" and burst["rows"] == rows and burst["product"] in products
                ]
            )
        )

    found = []
    for rows in (512, *FULL_RATE_ROWS):
        ratio = rate(rows, DEEP) / rate(rows, SHALLOW)
        found.append((ratio - 1) / (1 / shallow - ratio / deep))
    return Fit("DEPTH_OVERHEAD", float(np.mean(found)), f"{min(found):.0f} to {max(found):.0f} at four row counts")


def weights(gemm: Any) -> list[Fit]:
    rates = {burst["rows"]: burst["teraflops"] * 1e12 for burst in gemm["layer_bursts"] if burst["scaling"] == "tensor"}
    elements = sum(depth * width for depth, width in linears(LLAMA_70B))
    full = float(np.mean([rates[rows] for rows in FULL_RATE_ROWS]))

    def worst(share: float, exponent: float) -> float:
        errors: list[float] = []
        for rows in (64, 256, 512):
            operations = 2.0 * rows * elements
            reading = elements / (share * H200.memory_bytes_per_second)
            seconds: float = ((operations / full) ** exponent + reading**exponent) ** (1 / exponent)
            errors.append(abs(seconds * rates[rows] / operations - 1))
        return max(errors)

    share, exponent = min(
        itertools.product(np.arange(0.75, 0.95, 0.005), np.arange(2.0, 6.0, 0.25)), key=lambda pair: worst(*pair)
    )
    residual = f"{worst(share, exponent):.1%} at most, at 64, 256 and 512 rows"
    return [Fit("WEIGHTS_SHARE", float(share), residual), Fit("WEIGHTS_EXPONENT", float(exponent), residual)]


def product_shares(gemm: Any, step: Step) -> list[Fit]:
    """Of the data sheet at the highest clock: the rate over the clock, for endless depth."""

    def share(rate: float, clock: float, precision: Precision) -> float:
        return rate / clock * HIGHEST_CLOCK_MHZ / depth_share(LLAMA_70B) / H200.operations_per_second[precision]

    products = step.work("layers' products") / step.seconds("layers' products")
    fp8 = share(products, step.clock, "fp8")
    sustained = {
        scaling: [
            share(run["teraflops"] * 1e12, run["power"]["clock_mhz"], precision)
            for run in gemm["sustained"]
            if run["scaling"] == scaling
        ]
        for scaling, precision in SCALINGS.items()
    }
    off = max(abs(one / fp8 - 1) for one in sustained["tensor"])
    bf16 = float(np.mean(sustained["bf16"]))
    scatter = max(abs(one / bf16 - 1) for one in sustained["bf16"])
    settled = products / depth_share(LLAMA_70B) / H200.operations_per_second["fp8"]
    settled_bf16 = np.mean([run["teraflops"] for run in gemm["sustained"] if run["scaling"] == "bf16"]) * 1e12
    return [
        Fit("PRODUCT_SHARE fp8", fp8, f"sustained products are up to {off:.1%} off it"),
        Fit("PRODUCT_SHARE bf16", bf16, f"{scatter:.1%}"),
        Fit("SUSTAINED_SHARE fp8", settled, "one step"),
        Fit(
            "SUSTAINED_SHARE bf16",
            float(settled_bf16) / depth_share(LLAMA_70B) / H200.operations_per_second["bf16"],
            "three sustained runs",
        ),
    ]


def decode_attention(programs: str, steps: tuple[Step, Step]) -> list[Fit]:
    """Two unknowns, two steps: seconds of a layer = tail / clock + bytes / rate."""
    rows = [[HIGHEST_CLOCK_MHZ / s.clock, s.work("decode attention") / s.model.layers] for s in steps]
    tail, per_byte = np.linalg.solve(rows, [s.seconds("decode attention") / s.model.layers for s in steps])
    residual = "two steps, solved exactly"
    return [
        Fit(f"{programs}_SHARE", float(1 / per_byte / H200.memory_bytes_per_second), residual),
        Fit(f"{programs}_TAIL_SECONDS", float(tail), residual),
    ]


def chunk_attention(attention: Any, steps: tuple[Step, Step]) -> list[Fit]:
    """Operations of whole tiles over time, of the fastest launches of every piece of work, in the engine's way.

    Page by page the median rate. Gathered: seconds of a layer = a constant + operations / rate, relative errors least.
    """
    tile, queries = cost_model.CHUNK_TILE, LLAMA_70B.heads * LLAMA_70B.head_dim
    group = LLAMA_70B.heads // LLAMA_70B.kv_heads
    fastest: dict[bool, dict[float, float]] = {False: {}, True: {}}
    for run in attention["results"]:
        if (run["kernel"], run["model"], run["cache"], run["page_size"]) != ("chunk", "70b", "e4m3", 32):
            continue
        prompts, rows, *start = (int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", run["work"]))
        before, tiles = sum(start), -(-rows // tile)
        gathered = gathers_contexts(group, prompts, rows, before + rows)
        if run["configuration"]["gathered"] == gathered:
            operations = 4.0 * queries * prompts * tile * tiles * (before + tile * (tiles + 1) / 2)
            seconds = run["microseconds"] / 1e6
            fastest[gathered][operations] = min(seconds, fastest[gathered].get(operations, seconds))
    peak = H200.operations_per_second["bf16"]
    shares = [operations / seconds / peak for operations, seconds in fastest[False].items()]
    share = float(np.median(shares))
    in_steps = []
    for s in steps:
        rate = s.work("chunk attention") / s.seconds("chunk attention") / s.clock * HIGHEST_CLOCK_MHZ
        in_steps.append(f"{rate / peak / share:.0%}")
    terms = np.array([[1 / seconds, operations / seconds] for operations, seconds in fastest[True].items()])
    (constant_seconds, per_operation), *_ = np.linalg.lstsq(terms, np.ones(len(terms)), rcond=None)
    off = terms @ (constant_seconds, per_operation) - 1
    residual = f"{off.min():+.0%} to {off.max():+.0%} of the time of {len(off)} pieces of work"
    return [
        Fit(
            "CHUNK_SHARE",
            share,
            f"{min(shares):.3f} to {max(shares):.3f} for {len(shares)} pieces of work; in steps {', '.join(in_steps)} "
            "of it before rounding up to tiles",
        ),
        Fit("GATHERED_SHARE", float(1 / per_operation / peak), residual),
        Fit("GATHERED_SECONDS", float(constant_seconds), residual),
    ]


def elementwise(steps: tuple[Step, Step]) -> Fit:
    shares = [s.work(*ELEMENTWISE) / s.seconds(*ELEMENTWISE) / H200.memory_bytes_per_second for s in steps]
    return Fit("ELEMENTWISE_SHARE", float(np.mean(shares)), " and ".join(f"{share:.3f}" for share in shares))


def gaps(steps: tuple[Step, ...]) -> Fit:
    seconds = [s.seconds("gaps", "ids and copies") / s.model.layers for s in steps]
    return Fit("GAP_SECONDS", float(np.mean(seconds)), ", ".join(f"{one * 1e6:.1f} us" for one in seconds))


class Load(NamedTuple):
    """What ran at a measured clock and power: operations/s by precision, bytes/s."""

    name: str
    watts: float
    clock: float
    fp8: float
    bf16: float
    moved: float


def products_load(run: Any) -> Load:
    """Products back to back."""
    item, rate, rows = (1 if run["scaling"] == "tensor" else 2), run["teraflops"] * 1e12, run["rows"]
    layer = linears(LLAMA_70B)
    seconds = 2.0 * rows * sum(depth * width for depth, width in layer) / rate
    moved = sum(depth * width * item + rows * (depth * item + 2 * width) for depth, width in layer) / seconds
    fp8, bf16 = (rate, 0.0) if item == 1 else (0.0, rate)
    return Load(f"{run['scaling']} {rows} rows", run["power"]["watts"], run["power"]["clock_mhz"], fp8, bf16, moved)


def step_load(step: Step) -> Load:
    """A step, its bytes as the model counts those of products and as they were counted for the other parts."""
    result, model = step.result, CostModel(step.model, find_scheme("fp8"), H200)
    seconds, rows, samples = result["step_ms"] / 1e3, result["mean_rows"], result["mean_decodes"]
    assert model._screen is not None
    products = rows * model._token.operations + samples * (model._sample.operations + model._screen.operations)
    moved = model._weights_bytes + rows * model._token.bytes + samples * model._sample.bytes
    moved += model._screen.weights_bytes + step.work("decode attention", "argmax", *ELEMENTWISE)
    rates = (amount / seconds for amount in (products, step.work("chunk attention"), moved))
    return Load(f"step of {step.model.name}", result["power_watts"], result["clock_mhz"], *rates)


def power(loads: list[Load], idle_watts: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Watts per operation/s in fp8 and bf16 and per byte/s, by least squares; and what is left of each load."""
    squares = [(load.clock / cost_model.FITTED_CLOCK_MHZ) ** 2 for load in loads]
    terms = np.array(
        [[load.fp8 * square, load.bf16 * square, load.moved] for load, square in zip(loads, squares, strict=True)]
    )
    watts = np.array([load.watts - idle_watts for load in loads])
    scale = terms.max(axis=0)
    found = np.linalg.lstsq(terms / scale, watts, rcond=None)[0] / scale
    return found, terms @ found - watts


def power_fits(gemm: Any, steps: tuple[Step, Step]) -> Iterator[Fit]:
    loads = [products_load(run) for run in gemm["sustained"] if run["scaling"] != "row"]
    loads += map(step_load, steps)
    found, left = power(loads, cost_model.IDLE_WATTS)
    ends = [power(loads, idle)[0] for idle in IDLE_WATTS_RANGE]
    residual = f"{np.abs(left).max():.0f} W at most of {len(loads)} loads of 690 W"
    for number, name in enumerate(("WATTS_PER_OPERATION fp8", "WATTS_PER_OPERATION bf16", "WATTS_PER_BYTE")):
        ranges = " to ".join(f"{end[number]:.3g}" for end in ends)
        yield Fit(name, float(found[number]), f"{residual}; {ranges} if idle at 80 or 150 W")


def fits() -> list[Fit]:
    """Every constant that was fitted."""
    gemm, steps, earlier_steps = read("h200-gemm.json"), measured_steps(), measured_steps(("steps", "steps-128-128"))
    return [
        depth_overhead(gemm),
        *weights(gemm),
        *product_shares(gemm, steps[0]),
        *decode_attention("DECODE", earlier_steps),
        *decode_attention("MANY", steps),
        *chunk_attention(read("h200-attention.json"), steps),
        elementwise(steps),
        gaps(steps + earlier_steps),
        *power_fits(gemm, steps),
    ]


def constant(name: str) -> float:
    """What the model has under the name of a fit: a constant, or a scheme's field."""
    constant_name, *precision = name.split()
    if precision:
        return float(getattr(find_scheme(precision[0]), constant_name.lower()))
    return float(getattr(cost_model, constant_name))


def main() -> None:
    print(f"{'constant':26}{'fitted':>12}{'in the model':>14}  residual")
    for fit in fits():
        print(f"{fit.name:26}{fit.value:12.4g}{constant(fit.name):14.4g}  {fit.residual}")


if __name__ == "__main__":
    main()
