"""Power, clock and temperature of GPUs while they work, through NVML (package nvidia-ml-py)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Telemetry:
    """``power_watts`` is the mean since the reading before; the others are current values. None: unknown."""

    power_watts: float | None = None
    clock_mhz: float | None = None
    temperature_celsius: float | None = None


class GpuTelemetry:
    """The sensors of the GPUs that share a model. A reading takes about a millisecond for each."""

    def __init__(self, nvml: Any, handles: Sequence[Any]) -> None:
        self._nvml, self._handles = nvml, handles
        self._joules_before = self._joules()
        self._seconds_before = time.monotonic()

    @classmethod
    def open(cls, uuids: Sequence[str]) -> Self | None:
        """The GPUs named ``GPU-...``; None for none, and without package, driver or one of them."""
        if not uuids:
            return None
        try:
            nvml = import_module("pynvml")
        except ImportError:
            return None
        try:
            nvml.nvmlInit()
            return cls(nvml, [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids])
        except nvml.NVMLError:
            return None

    def read(self) -> Telemetry:
        """The power of all together, the clock of the slowest and the temperature of the hottest.

        Power is from the cards' energy counters, or the driver's average where one has none.
        """
        nvml = self._nvml
        joules, seconds = self._joules(), time.monotonic()
        power = None
        if joules is None or self._joules_before is None:
            milliwatts = self._ask(sum, nvml.nvmlDeviceGetPowerUsage)
            power = None if milliwatts is None else milliwatts / 1e3
        elif seconds > self._seconds_before:
            power = (joules - self._joules_before) / (seconds - self._seconds_before)
        self._joules_before, self._seconds_before = joules, seconds
        return Telemetry(
            power,
            self._ask(min, nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            self._ask(max, nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
        )

    def _joules(self) -> float | None:
        millijoules = self._ask(sum, self._nvml.nvmlDeviceGetTotalEnergyConsumption)
        return None if millijoules is None else millijoules / 1e3

    def _ask(self, together: Any, question: Any, *arguments: Any) -> Any:
        """The combined answer of all GPUs; None if one does not answer."""
        try:
            return together(question(handle, *arguments) for handle in self._handles)
        except self._nvml.NVMLError:
            return None
