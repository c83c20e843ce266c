"""Sustained load on the GPU: rate, power, clock and temperature, and whether the card slowed itself down.

Errors that the card counts meanwhile are of ``gpu_errors``.
"""

from __future__ import annotations

import functools
import operator
import statistics
import time
from collections.abc import Callable

import torch

from megatoken.engine.config import SHAPES, Precision
from megatoken.engine.device import gpu_obstacle
from megatoken.engine.schemes import find_scheme
from megatoken.hardware.nvml import HARMFUL_REASONS, SensorError, nvml_gpu, words_of
from megatoken.hardware.power import PowerSampler
from megatoken.hardware.qualify.gpu_products import SCALINGS, Weights, product_bound
from megatoken.hardware.qualify.gpu_timing import device_uuid, gpu_seconds, repeat_for, start
from megatoken.hardware.qualify.shapes import products_of
from megatoken.hardware.qualify.timing import rates
from megatoken.hardware.qualify.values import Bound, NotRun, Outcomes, Setting, Value

TOKENS, LAYERS = 2048, 4
PERIOD_SECONDS = 0.1
"""Between readings of power, clock and the reasons of low clocks."""
PULSES, PULSE_SECONDS = 20, 1.0
TITLE = "Sustained product of a 70B layer"


def _full_load() -> tuple[Callable[[], None], float, Bound | None]:
    """Launches the gate and up product of some 70B layers, in fp8, or bf16 where there is no fp8.

    Also returns its TFLOP, and the bound of its rate.
    """
    sheet = start()
    precision: Precision = "bf16" if gpu_obstacle(find_scheme("fp8")) else "fp8"
    product = products_of(SHAPES["llama2-70b"])[2]
    call = Weights(SCALINGS[precision], [product], LAYERS).call(0, TOKENS)

    def run() -> None:
        for layer in range(LAYERS):
            call(layer)

    return run, LAYERS * product.operations(TOKENS) / 1e12, product_bound(sheet, precision)


@torch.inference_mode()
def power(setting: Setting) -> Outcomes:
    """The gate and up product of a 70B layer for ``setting.power_seconds``: fp8, or bf16 where there is no fp8."""
    run, work, bound = _full_load()
    repeat_for(max(1.0, setting.power_seconds / 12), run)  # the clock settles
    name, uuid = "sustained_tflops", device_uuid()
    try:
        limit = nvml_gpu(uuid).power_limit_watts()
        with PowerSampler(uuid, PERIOD_SECONDS) as sampler:
            began = time.monotonic()
            passes, elapsed = repeat_for(setting.power_seconds, run)
            found = sampler.between(began, time.monotonic())
    except SensorError as error:
        yield Value(name, TITLE, "TFLOP/s", rates(work, gpu_seconds(run, setting)), bound=bound)
        yield NotRun("power", "Power, clock and temperature", error.what, error.fix)
        return
    rate = work * passes / elapsed
    note = f"{found.watts / rate:.2f} J per TFLOP"
    yield Value(name, f"{TITLE}, {elapsed:.0f} s", "TFLOP/s", [rate], bound=bound, note=note)
    yield Value(
        "power_watts", "Power at full load", "W", [found.watts], "", note=f"limit {limit:.0f} W" if limit else ""
    )
    if limit:
        yield Value("power_of_limit", "Power at full load, of the limit", "%", [100 * found.watts / limit], "")
    yield Value("clock_mhz", "Clock at full load", "MHz", [found.clock_mhz], "")
    yield Value("temperature", "Temperature at full load", "C", [found.temperature_celsius], "")
    seen = [one.state.clock_reasons for one in sampler.readings if one.state.clock_reasons is not None]
    title = "Slow-down by heat or hardware"
    if seen:
        harmful = words_of(functools.reduce(operator.or_, seen) & HARMFUL_REASONS)
        yield Value("slow_down", title, "reasons", [len(harmful)], "zero", note=", ".join(harmful))
    else:
        yield NotRun("slow_down", title, "NVML does not report it", "update the driver")


@torch.inference_mode()
def pulse(setting: Setting) -> Outcomes:
    """Idle and full load in turn, as requests arrive: the rate must come back each time."""
    run, work, bound = _full_load()
    length = min(PULSE_SECONDS, setting.power_seconds / PULSES)
    rate = []
    for _ in range(PULSES):
        time.sleep(length)
        passes, elapsed = repeat_for(length, run)
        rate.append(work * passes / elapsed)
    title = f"{PULSES} pulses of a 70B product, {length:.2g} s each after as long a pause"
    yield Value("pulse_tflops", title, "TFLOP/s", rate, bound=bound)
    worst = min(rate) / statistics.median(rate)
    yield Value("pulse_worst", "The slowest pulse, of the median", "%", [100 * worst], "")
