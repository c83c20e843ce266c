"""Sustained load on the GPU: rate, power, clock and temperature, and whether the card slowed itself down."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from megatoken.engine.config import SHAPES
from megatoken.engine.device import gpu_obstacle
from megatoken.engine.schemes import find_scheme
from megatoken.errors import CapacityError
from megatoken.hardware.power import PowerSampler
from megatoken.hardware.qualify.gpu_parts import nvml_handle
from megatoken.hardware.qualify.gpu_products import Weights
from megatoken.hardware.qualify.gpu_timing import DEVICE, device_uuid, gpu_seconds, repeat_for
from megatoken.hardware.qualify.shapes import products_of
from megatoken.hardware.qualify.timing import rates
from megatoken.hardware.qualify.values import NotRun, Outcomes, Setting, Value

TOKENS, LAYERS = 2048, 4
HARMFUL_REASONS = {0x08: "hardware slow-down", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake"}
"""Bits of NVML's clock-event reasons that are faults; the power cap (4) is how such cards work at full load."""
PERIOD_SECONDS = 0.1
TITLE = "Sustained product of a 70B layer"


class ReasonSampler(threading.Thread):
    """Collects the clock-event reasons of a GPU while it works."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        super().__init__(daemon=True)
        self._nvml, self._handle, self._done = nvml, handle, threading.Event()
        # The name until driver 535; both return the same mask.
        self._ask = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None) or (
            nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        )
        self.seen = 0
        self.failed = False

    def run(self) -> None:
        """Ask until ``stop``."""
        while not self._done.wait(PERIOD_SECONDS):
            try:
                self.seen |= int(self._ask(self._handle))
            except self._nvml.NVMLError:
                self.failed = True
                return

    def stop(self) -> None:
        """End the thread."""
        self._done.set()
        self.join()


@torch.inference_mode()
def power(setting: Setting) -> Outcomes:
    """The gate and up product of a 70B layer for ``setting.power_seconds``: fp8, or bf16 where there is no fp8."""
    torch.cuda.set_device(DEVICE)
    torch.manual_seed(0)
    scaling = "bf16" if gpu_obstacle(find_scheme("fp8")) else "tensor"
    product = products_of(SHAPES["llama2-70b"])[2]
    call = Weights(scaling, [product], LAYERS).call(0, TOKENS)
    work = LAYERS * product.operations(TOKENS) / 1e12

    def run() -> None:
        for layer in range(LAYERS):
            call(layer)

    repeat_for(max(1.0, setting.power_seconds / 5), run)  # the clock settles
    name = "sustained_tflops"
    try:
        with nvml_handle(device_uuid()) as (nvml, handle):
            limit = nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3
            reasons = ReasonSampler(nvml, handle)
            reasons.start()
            with PowerSampler(device_uuid()) as sampler:
                began = time.monotonic()
                passes, elapsed = repeat_for(setting.power_seconds, run)
                found = sampler.between(began, time.monotonic())
            reasons.stop()
    except CapacityError as error:
        yield Value(name, TITLE, "TFLOP/s", rates(work, gpu_seconds(run, setting)))
        yield NotRun("power", "Power, clock and temperature", str(error).split("; ")[0], "install nvidia-ml-py")
        return
    rate = work * passes / elapsed
    note = f"{found.watts / rate:.2f} J per TFLOP"
    yield Value(name, f"{TITLE}, {elapsed:.0f} s", "TFLOP/s", [rate], note=note)
    yield Value("power_watts", "Power at full load", "W", [found.watts], "", note=f"limit {limit:.0f} W")
    yield Value("power_of_limit", "Power at full load, of the limit", "%", [100 * found.watts / limit], "")
    yield Value("clock_mhz", "Clock at full load", "MHz", [found.clock_mhz], "")
    yield Value("temperature", "Temperature at full load", "C", [found.temperature_celsius], "")
    if reasons.failed:
        yield NotRun("slow_down", "Slow-down by heat or hardware", "NVML does not report it", "update the driver")
        return
    bits = [words for bit, words in HARMFUL_REASONS.items() if reasons.seen & bit]
    title = "Slow-down by heat or hardware"
    yield Value("slow_down", title, "reasons", [len(bits)], "zero", note=", ".join(bits))
