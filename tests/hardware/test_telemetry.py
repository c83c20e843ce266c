"""What several GPUs tell together, through a library of the calls that NVML has: there is no GPU to ask here."""

from __future__ import annotations

import time

import pytest

from megatoken.hardware.telemetry import GpuTelemetry


class NVMLError(Exception):
    pass


class Library:
    """NVML as two GPUs answer it that take 300 and 400 W; a GPU is its number."""

    NVMLError = NVMLError
    NVML_CLOCK_SM = NVML_TEMPERATURE_GPU = 0

    def __init__(self, *, counters: bool = True) -> None:
        self._counters = counters

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: int) -> int:  # noqa: N802
        if not self._counters:
            raise NVMLError
        return round(time.monotonic() * 1e3 * (300 + 100 * gpu))

    def nvmlDeviceGetPowerUsage(self, gpu: int) -> int:  # noqa: N802
        return 1000 * (300 + 100 * gpu)

    def nvmlDeviceGetClockInfo(self, gpu: int, kind: int) -> int:  # noqa: N802
        return 1800 - 300 * gpu

    def nvmlDeviceGetTemperature(self, gpu: int, kind: int) -> int:  # noqa: N802
        return 60 + 5 * gpu


@pytest.mark.parametrize("counters", [True, False])
def test_the_gpus_that_share_a_model_are_told_together(counters: bool) -> None:
    sensors = GpuTelemetry(Library(counters=counters), [0, 1])
    time.sleep(0.05)
    reading = sensors.read()
    assert reading.power_watts == pytest.approx(700, rel=0.02)
    assert (reading.clock_mhz, reading.temperature_celsius) == (1500, 65)


def test_without_a_gpu_nothing_is_read() -> None:
    assert GpuTelemetry.open([]) is None
