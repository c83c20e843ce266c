"""What the GPU benchmarks share: facts of the device, clocks of work on it, power, ceilings, result files.

Random values fill their format's range; zeros are never timed: a product of zeros draws less power and runs faster.
"""

from __future__ import annotations

import json
import shlex
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor

from megatoken.engine import Engine
from megatoken.engine.device import gpu_obstacle
from megatoken.engine.runner import ModelRunner
from megatoken.engine.schemes import find_scheme
from megatoken.engine.schemes.fp8_weight import E4M3_MAX
from megatoken.errors import CapacityError
from megatoken.hardware.inventory import take_inventory
from megatoken.hardware.telemetry import GpuTelemetry, Telemetry

DEVICE = torch.device("cuda", 0)
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
E4M3_SPREAD = 90.0
"""Standard deviation of random e4m3 values: the whole range is used and little of it saturates."""
POWER_PERIOD_SECONDS = 0.2
COPY_BYTES = 2**32
PRODUCT_SIDE = 8192
FACTS = (
    "name",
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "power.draw",
    "power.limit",
    "temperature.gpu",
)


# Device -----------------------------------------------------------------------------------------------------------


def require_gpu() -> None:
    """Make the first GPU the current one.

    Raises:
        CapacityError: there is none that the CUDA back end can use.
    """
    if obstacle := gpu_obstacle(find_scheme("fp8")):
        raise CapacityError(f"this benchmark needs a GPU: {obstacle}")
    torch.cuda.set_device(DEVICE)
    torch.manual_seed(0)


def device_uuid() -> str:
    """The name by which the driver's own tools know the GPU, whatever CUDA_VISIBLE_DEVICES numbers it."""
    return f"GPU-{torch.cuda.get_device_properties(DEVICE).uuid}"


def device_state() -> dict[str, str]:
    """Name, driver, clocks, power and temperature now, as nvidia-smi prints them."""
    query = ["nvidia-smi", f"--query-gpu={','.join(FACTS)}", "--format=csv,noheader", f"--id={device_uuid()}"]
    values = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().split(", ")
    return dict(zip(FACTS, values, strict=True))


# Values -----------------------------------------------------------------------------------------------------------


def gaussian(*shape: int, spread: float = 1.0) -> Tensor:
    """Random bf16."""
    return torch.randn(shape, dtype=BF16, device=DEVICE) * spread


def gaussian_e4m3(rows: int, columns: int) -> Tensor:
    """Random e4m3 over the whole range, made in pieces so that no large bf16 copy of it exists."""
    values = torch.empty(rows, columns, dtype=E4M3, device=DEVICE)
    for first in range(0, rows, 8192):
        piece = values[first : first + 8192]
        piece.copy_(gaussian(*piece.shape, spread=E4M3_SPREAD).clamp_(-E4M3_MAX, E4M3_MAX))
    return values


# Time -------------------------------------------------------------------------------------------------------------


def timing_event() -> torch.cuda.Event:
    """An event that can be compared with others."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def graph_microseconds(launch: Callable[[int], Any], sets: int, launches: int = 16) -> float:
    """Median over replays of a CUDA graph of the mean time of a launch: the device's alone, gaps included.

    Args:
        launch: takes the number of an input set; what it returns has memory of its own.
        sets: of inputs, visited in turn.
        launches: fewest in the graph.
    """
    launch(0)
    graph = torch.cuda.CUDAGraph()
    count = sets * max(launches // sets, 1)
    with torch.cuda.graph(graph):
        results = [launch(number % sets) for number in range(count)]
    graph.replay()
    events = [timing_event() for _ in range(8)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    del results
    return median_milliseconds(events) / count * 1e3


def median_milliseconds(events: Sequence[torch.cuda.Event]) -> float:
    """Between neighbours, which the device has passed."""
    milliseconds: list[float] = [first.elapsed_time(second) for first, second in pairwise(events)]
    return statistics.median(milliseconds)


def repeat_for(seconds: float, run: Callable[[], Any]) -> tuple[int, float]:
    """Launch ``run`` again and again without a gap, at most two ahead of the device.

    Returns:
        How often, and the seconds that the device took for it; one run before does not count.
    """
    run()
    torch.cuda.synchronize()
    events = [timing_event()]
    events[0].record()
    deadline = time.monotonic() + seconds
    while len(events) == 1 or time.monotonic() < deadline:
        run()
        events.append(timing_event())
        events[-1].record()
        events[max(len(events) - 3, 0)].synchronize()
    events[-1].synchronize()
    return len(events) - 1, events[0].elapsed_time(events[-1]) / 1e3


# Power ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Power:
    """Means over a time; joules are watts times that time."""

    watts: float
    joules: float
    clock_mhz: float
    temperature_celsius: float


@dataclass(frozen=True, slots=True)
class Reading:
    """``state.power_watts`` is the mean from ``since_seconds`` to ``at_seconds`` (``time.monotonic()``)."""

    since_seconds: float
    at_seconds: float
    state: Telemetry


class PowerSampler:
    """Reads the GPU's energy counter, clock and temperature in a thread while a ``with`` block runs."""

    def __init__(self, period_seconds: float = POWER_PERIOD_SECONDS) -> None:
        """Open NVML.

        Raises:
            CapacityError: NVML does not know the GPU, or nvidia-ml-py is not installed.
        """
        telemetry = GpuTelemetry.open([device_uuid()])
        if telemetry is None:
            raise CapacityError(f"NVML does not know {device_uuid()}; install nvidia-ml-py")
        self._telemetry = telemetry
        self._period_seconds = period_seconds
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.readings: list[Reading] = []

    def __enter__(self) -> Self:
        self._telemetry.read()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        since = time.monotonic()
        while True:
            ended = self._done.wait(self._period_seconds)
            state, now = self._telemetry.read(), time.monotonic()
            self.readings.append(Reading(since, now, state))
            since = now
            if ended:
                return

    def between(self, begin_seconds: float, end_seconds: float) -> Power:
        """Means between two times of ``time.monotonic()``.

        Raises:
            CapacityError: nothing was read in between.
        """
        return mean_power(list(self.readings), begin_seconds, end_seconds)


def mean_power(readings: Sequence[Reading], begin_seconds: float, end_seconds: float) -> Power:
    """Readings weighted by the part of their time that lies between the two.

    Raises:
        CapacityError: none does.
    """
    weighted = [
        (min(reading.at_seconds, end_seconds) - max(reading.since_seconds, begin_seconds), reading.state)
        for reading in readings
    ]
    inside = [(weight, state) for weight, state in weighted if weight > 0]

    def mean(name: str) -> float:
        known = [(weight, float(value)) for weight, state in inside if (value := getattr(state, name)) is not None]
        if not known:
            raise CapacityError(f"NVML reported no {name} in {end_seconds - begin_seconds:.1f} s; measure longer")
        return sum(weight * value for weight, value in known) / sum(weight for weight, _ in known)

    watts = mean("power_watts")
    joules = watts * (end_seconds - begin_seconds)
    return Power(watts, joules, mean("clock_mhz"), mean("temperature_celsius"))


# Ceilings ---------------------------------------------------------------------------------------------------------


def copy_gigabytes_per_second() -> float:
    """Rate of a large copy, bytes read and bytes written.

    Not from a graph: CUDA copies otherwise there, at two thirds of this rate. Takes 8.6 GB.
    """
    source = torch.randint(256, (COPY_BYTES,), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    events = [timing_event() for _ in range(9)]
    for event in events:
        target.copy_(source)
        event.record()
    torch.cuda.synchronize()
    return 2 * COPY_BYTES / median_milliseconds(events) / 1e6


def bf16_teraflops(seconds: float = 1.0) -> float:
    """Rate of a large square product in bf16, back to back."""
    left, right = gaussian(PRODUCT_SIDE, PRODUCT_SIDE), gaussian(PRODUCT_SIDE, PRODUCT_SIDE)
    out = torch.empty_like(left)
    passes, elapsed = repeat_for(seconds, lambda: torch.mm(left, right, out=out))
    return 2 * PRODUCT_SIDE**3 * passes / elapsed / 1e12


def operations_per_row(engine: Engine) -> int:
    """Floating-point operations of one row in the layers' linears; attention and head are left out.

    The last layer finishes sampling rows only, so what a step does is up to 1 / layers less.
    """
    return 2 * engine.model_config.linear_parameters


def gemm_bound_teraflops(engine: Engine, rows: int, seconds: float) -> float:
    """Rate of the layers' products alone: ``rows`` random rows through every one, back to back for ``seconds``.

    The engine's own weights and its own call, in the order of a step. The engine must have nothing on its way.
    """
    from megatoken.engine.ops.cuda_fp8 import RowScaledLinear, ScaledTokens, TensorScaledLinear
    from megatoken.engine.ops.cuda_linear import Linear

    runner = cast(ModelRunner, engine._runner)
    layers = runner._weights.layers
    products: list[Linear] = [
        product for layer in layers for product in (layer.qkv, layer.output, layer.gate_up, layer.down)
    ]

    def random_input(width: int) -> Tensor | ScaledTokens:
        match products[0]:
            case RowScaledLinear():
                return ScaledTokens(gaussian_e4m3(rows, width), torch.ones(rows, 1, device="cuda"))
            case TensorScaledLinear():
                return gaussian_e4m3(rows, width)
        return gaussian(rows, width)

    inputs = {width: random_input(width) for width in {product.weight.shape[1] for product in products}}

    @torch.inference_mode()
    def once() -> None:
        for product in products:
            runner._ops.linear(inputs[product.weight.shape[1]], product)

    passes, elapsed = repeat_for(seconds, once)
    return operations_per_row(engine) * rows * passes / elapsed / 1e12


# Results ----------------------------------------------------------------------------------------------------------


def report(script: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """``fields`` with date, command, source revision, device and versions."""
    inventory = take_inventory()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([f"benchmarks/{script}", *sys.argv[1:]]),
        "source": inventory["source"],
        "device": device_state(),
        "versions": {**inventory["packages"], "python": inventory["python"], "cuda": torch.version.cuda},
        **fields,
    }


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    """Write JSON, and say where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote {path}")
