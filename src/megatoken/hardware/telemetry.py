"""Power, clock and temperature of a GPU while it works, through NVML (package nvidia-ml-py)."""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Telemetry:
    """``power_watts`` is the mean since the reading before; the others are of the moment. None: not told."""

    power_watts: float | None = None
    clock_mhz: float | None = None
    temperature_celsius: float | None = None


class GpuTelemetry:
    """One GPU's sensors. A reading takes about a millisecond."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._joules_before = self._joules()
        self._seconds_before = time.monotonic()

    @classmethod
    def open(cls, uuid: str) -> Self | None:
        """The GPU named ``GPU-...``; None without package, driver or such a GPU."""
        try:
            nvml = import_module("pynvml")
        except ImportError:
            return None
        try:
            nvml.nvmlInit()
            return cls(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
        except nvml.NVMLError:
            return None

    def read(self) -> Telemetry:
        """The state now; power from the card's energy counter, or the driver's own average where it has none."""
        nvml = self._nvml
        joules, seconds = self._joules(), time.monotonic()
        power = None
        if joules is None or self._joules_before is None:
            milliwatts = self._ask(nvml.nvmlDeviceGetPowerUsage)
            power = None if milliwatts is None else milliwatts / 1e3
        elif seconds > self._seconds_before:
            power = (joules - self._joules_before) / (seconds - self._seconds_before)
        self._joules_before, self._seconds_before = joules, seconds
        return Telemetry(
            power,
            self._ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            self._ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
        )

    def _joules(self) -> float | None:
        millijoules = self._ask(self._nvml.nvmlDeviceGetTotalEnergyConsumption)
        return None if millijoules is None else millijoules / 1e3

    def _ask(self, question: Any, *arguments: Any) -> Any:
        try:
            return question(self._handle, *arguments)
        except self._nvml.NVMLError:
            return None
