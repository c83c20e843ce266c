"""What the GPU benchmarks share: facts of the device, CUDA graphs, ceilings, result files.

Values and events are those of ``megatoken.hardware.qualify.gpu_timing``.
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
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor

from megatoken.engine import Engine, Request
from megatoken.engine.device import gpu_obstacle
from megatoken.engine.runner import ModelRunner
from megatoken.engine.schemes import find_scheme
from megatoken.errors import CapacityError, how_to_install
from megatoken.hardware.inventory import take_inventory
from megatoken.hardware.power import Power, PowerSampler
from megatoken.hardware.qualify.gpu_timing import DEVICE, device_uuid, gaussian, gaussian_e4m3, repeat_for, timing_event
from megatoken.hardware.telemetry import GpuTelemetry

PRODUCT_SIDE = 8192
COPY_BYTES = 2**32
DISTINCT_WEIGHT_BYTES = 2 * 2**30
LAUNCHES = 8
"""Of sustained load, between two events."""
POLL_SECONDS = 0.001
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


def device_state() -> dict[str, str]:
    """Name, driver, clocks, power and temperature now, as nvidia-smi prints them."""
    query = ["nvidia-smi", f"--query-gpu={','.join(FACTS)}", "--format=csv,noheader", f"--id={device_uuid()}"]
    values = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().split(", ")
    return dict(zip(FACTS, values, strict=True))


# Sustained load ---------------------------------------------------------------------------------------------------


def distinct_weights(rows: int, columns: int) -> list[Tensor]:
    """Random e4m3 matrices [rows, columns] of 2 GiB together, 2 to 40 of them, to be used in turn."""
    count = max(2, min(40, DISTINCT_WEIGHT_BYTES // (rows * columns)))
    return [gaussian_e4m3(rows, columns) for _ in range(count)]


def back_to_back(launch: Callable[[], Any], seconds: float, sampler: PowerSampler) -> tuple[int, float, Power]:
    """Launch again and again; a fifth of the time before, in which the clock settles, does not count.

    Returns:
        How often, the seconds that the device took for it, and the power meanwhile.
    """

    def once() -> None:
        for _ in range(LAUNCHES):
            launch()

    repeat_for(seconds / 5, once)
    begin = time.monotonic()
    passes, elapsed = repeat_for(seconds, once)
    return passes * LAUNCHES, elapsed, sampler.between(begin, time.monotonic())


class EnergyMeter:
    """Follows the GPU's energy counter, which the driver renews every 20 to 100 ms, from renewal to renewal.

    Means are taken between two renewals, so that 0.3 s are enough where ``PowerSampler`` needs seconds.
    """

    def __init__(self, uuid: str) -> None:
        """Raises CapacityError: NVML does not know the GPU named ``GPU-...``, or it counts no energy."""
        telemetry = GpuTelemetry.open([uuid])
        if telemetry is None or telemetry.joules() is None:
            raise CapacityError(f"NVML counts no energy of {uuid}; {how_to_install('gpu')}")
        self._telemetry = telemetry
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self.renewals: list[tuple[float, float]] = []
        """``time.monotonic()`` and joules."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _follow(self) -> None:
        last = self._telemetry.joules()
        while not self._ended.wait(POLL_SECONDS):
            joules, now = self._telemetry.joules(), time.monotonic()
            if joules is not None and joules != last:
                self.renewals.append((now, joules))
                last = joules

    def watts(self, begin_seconds: float, end_seconds: float) -> float:
        """Mean between the first and the last renewal in this time, of ``time.monotonic()``.

        Raises:
            CapacityError: there are no two.
        """
        return watts_between(list(self.renewals), begin_seconds, end_seconds)


def watts_between(renewals: Sequence[tuple[float, float]], begin_seconds: float, end_seconds: float) -> float:
    """Of an energy counter. Raises CapacityError: it was not renewed twice."""
    inside = [renewal for renewal in renewals if begin_seconds <= renewal[0] <= end_seconds]
    if len(inside) < 2:
        raise CapacityError(f"the energy counter was not renewed twice in {end_seconds - begin_seconds:.2f} s")
    (begin, before), (end, after) = inside[0], inside[-1]
    return (after - before) / (end - begin)


# Ceilings ---------------------------------------------------------------------------------------------------------


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
    return 2 * engine.model_config.active_linear_parameters


def expert_imbalance(engine: Engine) -> float | None:
    """Largest over mean rows of an expert in steps of random prompts, averaged over the layers; None if all are dense.

    Random weights route about evenly; trained routers need not.
    """
    from megatoken.engine.ops import cuda_experts

    module = cast(Any, cuda_experts)
    if engine._runner.model_config.experts is None:
        return None
    rows_XL: list[Tensor] = []
    route = module.route

    def noted(*arguments: Any) -> Any:
        routes = route(*arguments)
        rows_XL.append(routes.starts.diff())
        return routes

    module.route = noted
    try:
        most = min(engine.memory_plan.max_batched_tokens, engine.memory_plan.max_length - 1)
        ids = torch.randint(engine._runner.model_config.vocabulary_size, (most,)).tolist()
        engine.generate([Request(ids, 1)])
    finally:
        module.route = route
    whole = [rows for rows in rows_XL if rows.sum() >= most]  # the last layer computes what samples alone
    return float(torch.stack([rows.max() / rows.float().mean() for rows in whole]).mean())


def gemm_bound_teraflops(engine: Engine, rows: int, seconds: float) -> float:
    """Rate of the layers' products alone: ``rows`` random rows through every one, back to back for ``seconds``.

    The engine's own weights and its own call, in the order of a step; of mixtures with all that they do between their
    products. The engine must have nothing on its way.
    """
    from megatoken.engine.ops.cuda_fp8 import RowScaledLinear, ScaledTokens, TensorScaledLinear
    from megatoken.engine.ops.cuda_linear import Linear

    runner = cast(ModelRunner, engine._runner)
    layers = runner._weights.layers
    products: list[Linear] = [
        product
        for layer in layers
        for product in (layer.qkv, layer.output, layer.gate_up, layer.down, layer.experts)
        if product is not None
    ]

    def random_input(product: Linear) -> Tensor | ScaledTokens:
        width = product.weight.shape[1]
        match product:
            case RowScaledLinear():
                return ScaledTokens(gaussian_e4m3(rows, width), torch.ones(rows, 1, device="cuda"))
            case TensorScaledLinear():
                return gaussian_e4m3(rows, width)
        return gaussian(rows, width)

    inputs: dict[tuple[type[Linear], int], Tensor | ScaledTokens] = {}
    for product in products:
        kind = type(product), product.weight.shape[1]
        if kind not in inputs:
            inputs[kind] = random_input(product)

    @torch.inference_mode()
    def once() -> None:
        for product in products:
            runner._ops.linear(inputs[type(product), product.weight.shape[1]], product)

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
