"""What the sensors of a machine report while it works: its GPUs through NVML, its processors through the kernel.

A thread reads the sensors, so that a reading costs the engine nothing: some answers of a GPU take 20 ms.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Self, TypeVar

from megatoken.hardware.host_sensors import HostTotals, package_watts, read_host, stalled_shares
from megatoken.hardware.nvml import Counters, NvmlGpu, gpus_of

PERIOD_SECONDS = 0.25
SHORTEST_READING_SECONDS = 0.7
"""Sensors that are read more often than this return the reading before, as a rack's replicas report often."""
SLOW_PERIODS = 4
"""Counters of errors, memory and traffic are read in every so many periods."""
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class Telemetry(Counters):
    """What one replica's GPUs and its node report; None: unknown.

    Power and shares are means since the reading before. Of several GPUs, power and traffic are sums, clocks the lowest
    and temperatures the highest. Errors are counted since the sensors were opened.
    """

    power_watts: float | None = None  # of the GPUs only
    clock_mhz: float | None = None
    temperature_celsius: float | None = None
    memory_clock_mhz: float | None = None
    memory_temperature_celsius: float | None = None
    clock_reasons: int | None = None  # bits of nvml.CLOCK_REASONS, each that was seen since the reading before
    pcie_received_bytes_per_second: float | None = None
    pcie_sent_bytes_per_second: float | None = None
    xid_errors: int | None = None
    last_xid: int | None = None  # code of the last critical error
    package_power_watts: float | None = None  # of the node's processors (RAPL)
    cpu_stalled_share: float | None = None  # of the time, in which some task of the node waited for a core (PSI)
    memory_stalled_share: float | None = None
    disk_stalled_share: float | None = None

    def since(self, before: Telemetry | None) -> Telemetry:
        """The same reading with errors counted from an earlier one on."""
        if before is None:
            return self
        counts = {name: (getattr(self, name), getattr(before, name)) for name in ERRORS}
        return replace(self, **{name: now - then for name, (now, then) in counts.items() if now and then})


FIELDS = tuple(field.name for field in fields(Telemetry))
ERRORS = (*(field.name for field in fields(Counters)), "xid_errors")
"""Fields of ``Telemetry`` that count errors."""
ERROR_WORDS = {
    "ecc_corrected_errors": "corrected memory errors",
    "ecc_uncorrected_errors": "memory errors that could not be corrected",
    "rows_remapped": "replaced rows of memory",
    "pcie_replays": "repeated PCIe packets",
    "nvlink_errors": "NVLink errors",
    "c2c_errors": "errors of the link to the processor",
    "xid_errors": "critical errors (XID)",
}
COUNTS = (*ERRORS, "last_xid", "clock_reasons")
"""Fields of ``Telemetry`` that are whole numbers."""


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """Totals at one moment."""

    seconds: float
    joules: float | None
    host: HostTotals


class GpuTelemetry:
    """The sensors of the GPUs that share a model, read when asked: about a millisecond for each GPU."""

    def __init__(self, gpus: Sequence[NvmlGpu]) -> None:
        self._gpus = gpus

    @classmethod
    def open(cls, uuids: Sequence[str]) -> Self | None:
        """The GPUs named ``GPU-...``; None for none, and without package, driver or one of them."""
        gpus = gpus_of(uuids) if uuids else None
        return None if gpus is None else cls(gpus)

    def joules(self) -> float | None:
        """The energy counters of all."""
        return _together(sum, (gpu.joules() for gpu in self._gpus))

    def levels(self) -> Telemetry:
        """What changes quickly: power as the driver averages it, clock, temperature and the reasons of low clocks."""
        reasons = [one for gpu in self._gpus if (one := gpu.clock_reasons()) is not None]
        return Telemetry(
            power_watts=_together(sum, (gpu.watts() for gpu in self._gpus)),
            clock_mhz=_together(min, (gpu.clock_mhz() for gpu in self._gpus)),
            temperature_celsius=_together(max, (gpu.temperature_celsius() for gpu in self._gpus)),
            clock_reasons=_any_bit(reasons),
        )

    def slow_levels(self) -> dict[str, float | None]:
        """Fields of ``Telemetry`` that change slowly or take long to read."""
        gpus = self._gpus
        return {
            "memory_clock_mhz": _together(min, (gpu.clock_mhz(of_memory=True) for gpu in gpus)),
            "memory_temperature_celsius": _together(max, (gpu.memory_temperature_celsius() for gpu in gpus)),
            "pcie_received_bytes_per_second": _together(sum, (gpu.pcie_bytes_per_second(sent=False) for gpu in gpus)),
            "pcie_sent_bytes_per_second": _together(sum, (gpu.pcie_bytes_per_second(sent=True) for gpu in gpus)),
        }

    def counters(self) -> dict[str, int | None]:
        """Errors of all GPUs since their drivers started, by field."""
        counted = [asdict(gpu.counters()) for gpu in self._gpus]
        return {field.name: _together(sum, (one[field.name] for one in counted)) for field in fields(Counters)}

    def watch_xids(self) -> None:
        """Collect critical errors from now on."""
        for gpu in self._gpus:
            gpu.watch_xids()

    def new_xids(self) -> list[int] | None:
        """Codes of the critical errors since the last call; None where they are not reported."""
        found = [one for gpu in self._gpus if (one := gpu.new_xids()) is not None]
        return [code for codes in found for code in codes] if found else None


class Sensors:
    """Reads the sensors of some GPUs and of this machine in a thread, from its creation until ``close``."""

    def __init__(
        self,
        uuids: Sequence[str],
        period_seconds: float = PERIOD_SECONDS,
        shortest_reading_seconds: float = SHORTEST_READING_SECONDS,
    ) -> None:
        """Start; ``uuids`` name the GPUs (``GPU-...``), none for a model on the processor."""
        self._period_seconds, self._shortest_seconds = period_seconds, shortest_reading_seconds
        self._gpu = GpuTelemetry.open(uuids)
        self._lock = threading.Lock()
        self._slow: dict[str, float | None] = {}
        self._errors: dict[str, int | None] = {}
        self._xids: list[int] | None = None
        if self._gpu is not None:
            self._gpu.watch_xids()
            self._xids = self._gpu.new_xids()
        self._errors_before = self._gpu.counters() if self._gpu else {}
        self._levels: list[Telemetry] = []  # since the reading before
        self._snapshot = self._before = self._take()
        self._reading = Telemetry()
        self._thread_seconds, self._started = 0.0, time.monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sensors", daemon=True)
        self._thread.start()

    def read(self) -> Telemetry:
        """Means since the reading before, and the latest levels; calls no sensor."""
        with self._lock:
            before, now, levels = self._before, self._snapshot, self._levels
            if now is before or now.seconds - before.seconds < self._shortest_seconds:
                return self._reading
            self._before, self._levels = now, []
            seconds = now.seconds - before.seconds
            reading = _merged(levels)
            if now.joules is not None and before.joules is not None:
                reading = replace(reading, power_watts=(now.joules - before.joules) / seconds)
            self._reading = replace(
                reading,
                **self._slow,  # type: ignore[arg-type]
                **self._errors,
                **stalled_shares(before.host, now.host, seconds),  # type: ignore[arg-type]
                package_power_watts=package_watts(before.host, now.host, seconds),
            )
            return self._reading

    def core_share(self) -> float:
        """Processor time that the thread has used, as a share of the time since it started."""
        return self._thread_seconds / max(time.monotonic() - self._started, self._period_seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread."""
        self._done.set()
        self._thread.join()

    def _take(self) -> _Snapshot:
        return _Snapshot(time.monotonic(), self._gpu.joules() if self._gpu else None, read_host())

    def _watch(self) -> None:
        periods = 0
        while not self._done.wait(self._period_seconds):
            snapshot = self._take()
            levels = self._gpu.levels() if self._gpu else None
            slow, errors = self._slow, self._errors
            if self._gpu is not None and periods % SLOW_PERIODS == 0:
                slow, errors = self._gpu.slow_levels(), self._errors_since()
            periods += 1
            with self._lock:
                self._snapshot, self._slow, self._errors = snapshot, slow, errors
                if levels is not None:
                    self._levels.append(levels)
            self._thread_seconds = time.thread_time()

    def _errors_since(self) -> dict[str, int | None]:
        assert self._gpu is not None
        new = self._gpu.new_xids()
        if new is not None:
            self._xids = [*(self._xids or ()), *new]
        since = {
            name: None if count is None or (before := self._errors_before[name]) is None else count - before
            for name, count in self._gpu.counters().items()
        }
        xids = self._xids
        return since | {"xid_errors": None if xids is None else len(xids), "last_xid": xids[-1] if xids else None}


def _merged(levels: Sequence[Telemetry]) -> Telemetry:
    """Several readings as one: the last levels, the lowest clock, the highest temperature, every reason."""
    if not levels:
        return Telemetry()
    return replace(
        levels[-1],
        clock_mhz=_together(min, (one.clock_mhz for one in levels)),
        temperature_celsius=_together(max, (one.temperature_celsius for one in levels)),
        clock_reasons=_any_bit([one.clock_reasons for one in levels if one.clock_reasons is not None]),
    )


def _any_bit(masks: Iterable[int]) -> int | None:
    result: int | None = None
    for mask in masks:
        result = mask | (result or 0)
    return result


def _together(combine: object, values: Iterable[Number | None]) -> Number | None:
    """``combine`` (sum, min or max) of all; None if one is unknown."""
    known = list(values)
    return None if None in known else combine(known)  # type: ignore[operator]
