"""Power, clock and temperature of a GPU over a time, from samples in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from megatoken.hardware.nvml import SensorError, unknown_gpu
from megatoken.hardware.telemetry import GpuTelemetry, Telemetry

POWER_PERIOD_SECONDS = 0.2


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

    def __init__(self, uuid: str, period_seconds: float = POWER_PERIOD_SECONDS) -> None:
        """Open NVML for the GPU named ``GPU-...``.

        Raises:
            SensorError: NVML does not know the GPU, or nvidia-ml-py is not installed.
        """
        telemetry = GpuTelemetry.open([uuid])
        if telemetry is None:
            raise unknown_gpu(uuid)
        self._telemetry = telemetry
        self._joules = telemetry.joules()
        self._period_seconds = period_seconds
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.readings: list[Reading] = []

    def __enter__(self) -> Self:
        self._joules = self._telemetry.joules()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        since = time.monotonic()
        while True:
            ended = self._done.wait(self._period_seconds)
            state, joules, now = self._telemetry.levels(), self._telemetry.joules(), time.monotonic()
            if joules is not None and self._joules is not None:
                state = replace(state, power_watts=(joules - self._joules) / (now - since))
            self._joules = joules
            self.readings.append(Reading(since, now, state))
            since = now
            if ended:
                return

    def between(self, begin_seconds: float, end_seconds: float) -> Power:
        """Means between two times of ``time.monotonic()``. Raises SensorError: nothing was read in between."""
        return mean_power(list(self.readings), begin_seconds, end_seconds)


def mean_power(readings: Sequence[Reading], begin_seconds: float, end_seconds: float) -> Power:
    """Readings weighted by the part of their time that lies between the two. Raises SensorError: none does."""
    weighted = [
        (min(reading.at_seconds, end_seconds) - max(reading.since_seconds, begin_seconds), reading.state)
        for reading in readings
    ]
    inside = [(weight, state) for weight, state in weighted if weight > 0]

    def mean(name: str) -> float:
        known = [(weight, float(value)) for weight, state in inside if (value := getattr(state, name)) is not None]
        if not known:
            raise SensorError(f"NVML reported no {name} in {end_seconds - begin_seconds:.1f} s", "measure longer")
        return sum(weight * value for weight, value in known) / sum(weight for weight, _ in known)

    watts = mean("power_watts")
    joules = watts * (end_seconds - begin_seconds)
    return Power(watts, joules, mean("clock_mhz"), mean("temperature_celsius"))
