"""Steady output tokens per second of engine steps on one GPU, and how near that is to the matrix products' own rate.

Unofficial: random fp8 weights, no LoadGen, no accuracy. What is real: the scheduler, the kernels, prompt and output
lengths, one step in flight while the next is planned. Requests run to their forced length. Rates are taken over the
second half of the run. The bound is the rate of the same products back to back, measured first in the same process.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import shlex
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pynvml
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from megatoken.engine.batch import step_arrays
from megatoken.engine.cache import LayerCache
from megatoken.engine.config import SHAPES, ModelConfig
from megatoken.engine.model import LayerWeights, Weights, forward, rotary_tables
from megatoken.engine.ops import cuda as ops
from megatoken.engine.scheduler import Scheduler, StepPlan
from megatoken.errors import CapacityError
from megatoken.hardware.inventory import source_revision

DEVICE = torch.device("cuda", 0)
E4M3 = torch.float8_e4m3fn
PAGE_SIZE, MAX_LENGTH = 32, 4096
WEIGHT_SPREAD = 90.0
"""Standard deviation of random e4m3 values: the whole range is used and little of it saturates."""
BOUND_SECONDS = 6.0
POWER_PERIOD_SECONDS = 0.2
NOTE = "unofficial: engine steps without LoadGen, random weights, forced output lengths"


@dataclass(frozen=True, slots=True)
class Options:
    """What runs and for how long."""

    shape: str
    seconds: float
    max_rows: int
    max_sequences: int
    pages: int
    lengths: str
    out: Path


@dataclass(frozen=True, slots=True)
class Step:
    """One finished step; ``idle_ms`` lasts until the next step's model starts and includes the copy of its input."""

    seconds: float
    rows: int
    decodes: int
    output_tokens: int
    device_ms: float
    idle_ms: float
    host_ms: float


@dataclass(slots=True)
class Power:
    """Samples of NVML: time (monotonic), watts, megahertz of the multiprocessors."""

    samples: list[tuple[float, float, int]] = field(default_factory=list)

    @contextmanager
    def watch(self) -> Any:
        """Sample in the background."""
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(DEVICE.index)
        done = threading.Event()

        def sample() -> None:
            while not done.wait(POWER_PERIOD_SECONDS):
                watts = pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3
                clock = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
                self.samples.append((time.perf_counter(), watts, clock))

        thread = threading.Thread(target=sample)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def means(self, begin: float, end: float) -> tuple[float, float]:
        """Watts and megahertz between two times."""
        inside = np.array([sample[1:] for sample in self.samples if begin < sample[0] <= end])
        watts, clock = inside.mean(0).tolist()
        return watts, clock


def parse(arguments: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama2-70b")
    parser.add_argument("--seconds", type=float, default=75.0, help="of which the second half counts")
    parser.add_argument("--max-rows", type=int, default=1536, help="tokens in a step")
    parser.add_argument("--max-sequences", type=int, default=1152)
    parser.add_argument("--pages", type=int, default=13_500, help=f"pages of cache, {PAGE_SIZE} tokens each")
    parser.add_argument("--lengths", default="csv", help="IN/OUT tokens of every request; default: the shipped lengths")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    options = Options(**vars(parser.parse_args(arguments)))
    if options.lengths != "csv" and not re.fullmatch(r"[1-9]\d*/[1-9]\d*", options.lengths):
        parser.error(f"--lengths {options.lengths}: give IN/OUT, such as 128/2048")
    if options.seconds <= 0:
        parser.error(f"--seconds {options.seconds}: must be above 0")
    return options


def request_lengths(lengths: str) -> NDArray[np.int64]:
    """Prompt and output tokens of each request, [requests, 2]."""
    if lengths != "csv":
        return np.tile(np.array(lengths.split("/"), dtype=np.int64), (40_000, 1))
    path = files("megatoken") / "data" / "llama2_70b_offline_lengths.csv"
    return np.loadtxt(str(path), dtype=np.int64, delimiter=",", comments="#", skiprows=2)


def random_weights(config: ModelConfig) -> Weights:
    """fp8 linears, bf16 embedding, norms and head, all Gaussian; input scales by the size of what arrives there."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    D, F, E = config.hidden_size, config.intermediate_size, config.head_dim
    H, K, V = config.heads, config.kv_heads, config.vocabulary_size

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, generator=generator)

    def linear(outputs: int, inputs: int, largest_input: float) -> ops.Linear:
        values = torch.empty(outputs, inputs, dtype=E4M3, device=DEVICE)
        for first in range(0, outputs, 8192):
            rows = values[first : first + 8192]
            rows.copy_((gaussian(len(rows), inputs) * WEIGHT_SPREAD).clamp_(-448, 448))
        return ops.fp8_linear(values, inputs**-0.5 / WEIGHT_SPREAD, largest_input / 448)

    def norm() -> Tensor:
        return 1 + 0.1 * gaussian(D)

    layers = [
        LayerWeights(
            input_norm_D=norm(),
            qkv=linear((H + 2 * K) * E, D, 6.0),
            qk_norms_E=None,
            output=linear(D, H * E, 3.0),
            post_norm_D=norm(),
            gate_up=linear(2 * F, D, 6.0),
            down=linear(D, F, 16.0),
        )
        for _ in range(config.layers)
    ]
    cos_LE, sin_LE = rotary_tables(config.rope, E, MAX_LENGTH)
    head = ops.pack_linear(gaussian(V, D) * D**-0.5, None, "bf16")
    return Weights(gaussian(V, D), layers, norm(), head, (cos_LE.to(DEVICE), sin_LE.to(DEVICE)))


def allocate_cache(config: ModelConfig, pages: int) -> list[LayerCache]:
    """e4m3 zeros, dump page included."""
    shape = (pages + 1, config.kv_heads, PAGE_SIZE, config.head_dim)

    def side() -> Tensor:
        return torch.zeros(shape, dtype=E4M3, device=DEVICE)

    return [LayerCache(side(), side(), False) for _ in range(config.layers)]


def linears(weights: Weights) -> list[ops.Linear]:
    return [linear for layer in weights.layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)]


def operations_per_row(weights: Weights) -> int:
    """Floating-point operations of one row in the layers' linears; attention and head are left out."""
    return sum(2 * linear.weight.numel() for linear in linears(weights))


def bound_teraflops_per_second(weights: Weights, rows: int) -> float:
    """Rate of all layers' products of ``rows`` rows, back to back."""
    sizes = {linear.weight.shape[1] for linear in linears(weights)}
    inputs = {
        size: torch.randn(rows, size, device=DEVICE).mul_(WEIGHT_SPREAD).clamp_(-448, 448).to(E4M3) for size in sizes
    }
    passes = 0
    torch.cuda.synchronize()
    begin = time.perf_counter()
    while time.perf_counter() - begin < BOUND_SECONDS or not passes:
        for linear in linears(weights):
            ops.linear(inputs[linear.weight.shape[1]], linear)
        passes += 1
        if passes % 2 == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return operations_per_row(weights) * rows * passes / (time.perf_counter() - begin) / 1e12


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step on the device."""

    plan: StepPlan
    ids: Tensor
    begin: torch.cuda.Event
    end: torch.cuda.Event
    host_ms: float


class Engine:
    """Scheduler, weights and cache with one step in flight, as the engine's loop has it, but without answers."""

    def __init__(self, options: Options, config: ModelConfig, weights: Weights) -> None:
        """Queue all requests."""
        self.config, self.weights = config, weights
        self.cache = allocate_cache(config, options.pages)
        self.scheduler = Scheduler(
            max_rows=options.max_rows,
            max_sequences=options.max_sequences,
            page_size=PAGE_SIZE,
            num_pages=options.pages,
            max_length=MAX_LENGTH,
        )
        for ticket, (prompt_tokens, output_tokens) in enumerate(request_lengths(options.lengths).tolist()):
            self.scheduler.add(ticket, prompt_tokens, output_tokens)
        self.last_tokens = torch.zeros(options.max_sequences, dtype=torch.int64, device=DEVICE)
        vocabulary = config.vocabulary_size
        self.ids: list[int] = np.random.default_rng(1).integers(0, vocabulary, 2 * MAX_LENGTH).tolist()
        self.batch: Any = None

    def host_tokens(self, ticket: int, start: int, count: int) -> list[int]:
        """Random ids; a prompt's place in the pool follows from its ticket."""
        first = (ticket * 37 + start) % MAX_LENGTH
        return self.ids[first : first + count]

    def launch(self) -> InFlight:
        """Plan a step and queue it on the device."""
        host_begin = time.perf_counter()
        plan = self.scheduler.plan()
        if plan is None:
            raise CapacityError("all requests are finished before the time is over; lower --seconds")
        arrays = step_arrays(plan, self.scheduler.page_table, PAGE_SIZE, self.host_tokens, ops.padded_rows)
        self.batch = ops.prepare(arrays, self.last_tokens, self.cache[0], self.config)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        ids_S = ops.greedy(self.logits())
        self.last_tokens.index_copy_(0, self.batch.sample_slots.long(), ids_S)
        host_ids = torch.empty(len(ids_S), dtype=torch.int64, pin_memory=True)
        host_ids.copy_(ids_S, non_blocking=True)
        end.record()
        return InFlight(plan, host_ids, begin, end, (time.perf_counter() - host_begin) * 1e3)

    def logits(self) -> Tensor:
        """Of the newest step."""
        return forward(self.weights, self.config, ops, self.cache, self.batch)

    def run(self, seconds: float, begin: float) -> list[Step]:
        """Steps until the time is over."""
        in_flight: deque[InFlight] = deque([self.launch()])
        finished: list[tuple[InFlight, float]] = []
        while not finished or finished[-1][1] <= seconds:
            in_flight.append(self.launch())
            step = in_flight.popleft()
            step.end.synchronize()
            step.ids.tolist()
            finished.append((step, time.perf_counter() - begin))
        torch.cuda.synchronize()
        following = [step for step, _ in finished[1:]] + [in_flight[0]]
        return [
            Step(
                seconds=at,
                rows=int(step.plan.count.sum()),
                decodes=step.plan.decodes,
                output_tokens=int(step.plan.sample.sum()),
                device_ms=step.begin.elapsed_time(step.end),
                idle_ms=step.end.elapsed_time(after.begin),
                host_ms=step.host_ms,
            )
            for (step, at), after in zip(finished, following, strict=True)
        ]


def summarise(steps: list[Step], seconds: float) -> dict[str, float]:
    """Rates and means over the second half of the run."""
    steady = [step for step in steps if step.seconds > seconds / 2]
    if len(steady) < 2:
        raise CapacityError(f"fewer than two steps in the second half of {seconds} s; raise --seconds")
    elapsed = steady[-1].seconds - steady[0].seconds

    def mean(name: str) -> float:
        return float(np.mean([getattr(step, name) for step in steady]))

    return {
        "steady_output_tokens_per_second": sum(step.output_tokens for step in steady[1:]) / elapsed,
        "processed_tokens_per_second": sum(step.rows for step in steady[1:]) / elapsed,
        "mean_rows": mean("rows"),
        "mean_decodes": mean("decodes"),
        "step_ms": mean("device_ms"),
        "gpu_idle_ms": mean("idle_ms"),
        "host_ms": mean("host_ms"),
    }


def measure(options: Options) -> dict[str, Any]:
    config = SHAPES[options.shape]
    weights = random_weights(config)
    engine = Engine(options, config, weights)
    power = Power()
    with torch.inference_mode(), power.watch():
        bound = bound_teraflops_per_second(weights, options.max_rows)
        gc.collect()
        gc.freeze()
        gc.disable()
        begin = time.perf_counter()
        steps = engine.run(options.seconds, begin)
        logits_finite = bool(torch.isfinite(engine.logits()).all())
    result: dict[str, Any] = summarise(steps, options.seconds)
    watts, clock = power.means(begin + options.seconds / 2, begin + steps[-1].seconds)
    teraflops = result["processed_tokens_per_second"] * operations_per_row(weights) / 1e12
    return result | {
        "gemm_bound_teraflops_per_second": bound,
        "model_teraflops_per_second": teraflops,
        "gemm_bound_share": teraflops / bound,
        "power_watts": watts,
        "clock_mhz": clock,
        "joules_per_output_token": watts / result["steady_output_tokens_per_second"],
        "preemptions": engine.scheduler.preemptions,
        "logits_finite": logits_finite,
    }


def device_state() -> dict[str, str]:
    names = ("name", "driver_version", "power.limit", "temperature.gpu")
    query = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader", f"--id={DEVICE.index}"]
    values = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().split(", ")
    return dict(zip(names, values, strict=True))


def main() -> None:
    options = parse(sys.argv[1:])
    torch.cuda.set_device(DEVICE)
    try:
        result = measure(options)
    except CapacityError as error:
        raise SystemExit(str(error)) from error
    report = {
        "note": NOTE,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["benchmarks/gpu_throughput.py", *sys.argv[1:]]),
        "source": source_revision(Path(__file__).parent),
        "device": device_state(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda},
        "options": asdict(options) | {"out": options.out.name},
        "result": result,
    }
    text = json.dumps(report, indent=1)
    print(text)
    options.out.write_text(text + "\n")
    if not result["logits_finite"]:
        raise SystemExit("logits are not finite: the figures are of a model that computes nothing")


if __name__ == "__main__":
    main()
