"""NVML, the driver's library about its GPUs: the only module that calls it (package nvidia-ml-py).

A GPU or driver that does not know an answer gives None, so that callers need no error handling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

from megatoken.errors import CapacityError, how_to_install

CLOCK_REASONS = {
    0x001: "idle",
    0x002: "clocks set by a user",
    0x004: "power cap",
    0x008: "hardware slow-down",
    0x010: "synchronised boost",
    0x020: "heat (driver)",
    0x040: "heat (hardware)",
    0x080: "power brake",
    0x100: "display clocks",
}
"""Bits of NVML's clock-event reasons: why a GPU's clock is below its maximum."""
POWER_CAP = 0x004
HARMFUL_REASONS = 0x008 | 0x020 | 0x040 | 0x080
"""Faults of cooling, power supply or hardware. The power cap is how such GPUs work at full load."""
HARDWARE_XIDS = {48, 56, 57, 58, 62, 63, 64, 65, 68, 69, 73, 74, 79, 80, 81, 92, 119, 120}
"""Critical errors that point to hardware, as Azure's health checks list them; others are also made by programs."""
MOST_LINKS = 18
LINK_ERROR_FIELDS = (161, 162, 163, 206, 207, 208, 210, 211, 212, 214, 219)
"""Per link: replays, recoveries and CRC errors up to NVLink 4; from NVLink 5 on packets, buffers, receivers, link
integrity, discards, failed recoveries and errors after correction."""
C2C_ERROR_FIELDS = (231, 232, 233)
MEMORY_TEMPERATURE, LINK_COUNT, C2C_COUNT, C2C_BANDWIDTH, RECOVERY_ACTION = 82, 91, 170, 172, 230
SLOW_DOWN_FIELDS = {75: "heat (driver)", 270: "heat (hardware)", 271: "power brake"}
"""Nanoseconds for which one of ``HARMFUL_REASONS`` lowered the clock."""
RENUMBERED, RENUMBERED_BY = (270, 271), (580, 82)
"""Fields that are settings of power smoothing to drivers before this one."""
RECOVERY_ACTIONS = {1: "reset the GPU", 2: "reboot the node", 3: "drain peer-to-peer traffic", 4: "drain and reset"}
_VALUES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # by NVML's valueType


@dataclass(frozen=True, slots=True)
class Counters:
    """Errors that a GPU has counted since its driver started; None: unknown."""

    ecc_corrected_errors: int | None = None
    ecc_uncorrected_errors: int | None = None
    rows_remapped: int | None = None
    pcie_replays: int | None = None
    nvlink_errors: int | None = None
    c2c_errors: int | None = None


class SensorError(CapacityError):
    """What NVML does not report, and how to fix that."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what, fix)
        self.what, self.fix = what, fix

    def __str__(self) -> str:
        return f"{self.what}; {self.fix}"


class NvmlGpu:
    """One GPU."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self.nvml, self.handle = nvml, handle
        self._xids: Any = None
        links = [(field, link) for link in range(MOST_LINKS) for field in LINK_ERROR_FIELDS]
        self._link_fields = self._answered(links)
        self._c2c_fields = self._answered(C2C_ERROR_FIELDS)

    def ask(self, name: str, *arguments: Any) -> Any:
        """The answer of ``nvmlDeviceGet...``, named in full; None where driver, package or GPU does not know it."""
        question = getattr(self.nvml, name, None)
        try:
            return None if question is None else question(self.handle, *arguments)
        except self.nvml.NVMLError:
            return None

    def fields(self, wanted: Sequence[int | tuple[int, int]]) -> list[float | None]:
        """Values of NVML's fields, by number or number and scope, such as a link; None for those without an answer."""
        answers = self.ask("nvmlDeviceGetFieldValues", list(wanted)) if wanted else ()
        if answers is None:
            return [None] * len(wanted)
        return [None if one.nvmlReturn else float(getattr(one.value, _VALUES[one.valueType])) for one in answers]

    def clock_reasons(self) -> int | None:
        """The bits of ``CLOCK_REASONS`` that hold now."""
        reasons = self.ask("nvmlDeviceGetCurrentClocksEventReasons")
        # The name until driver 535; both return the same bits.
        if reasons is None:
            reasons = self.ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        return None if reasons is None else int(reasons)

    def slow_down_seconds(self) -> dict[str, float]:
        """Since the driver started, by cause in words; causes that are not reported are left out."""
        version = [int(part) for part in (driver_version(self.nvml) or "").split(".") if part.isdecimal()]
        wanted = [field for field in SLOW_DOWN_FIELDS if field not in RENUMBERED or tuple(version[:2]) >= RENUMBERED_BY]
        times = zip(wanted, self.fields(wanted), strict=True)
        return {SLOW_DOWN_FIELDS[field]: nanoseconds / 1e9 for field, nanoseconds in times if nanoseconds is not None}

    def joules(self) -> float | None:
        """The energy counter."""
        millijoules = self.ask("nvmlDeviceGetTotalEnergyConsumption")
        return None if millijoules is None else millijoules / 1e3

    def watts(self) -> float | None:
        """Mean power of about the last second."""
        milliwatts = self.ask("nvmlDeviceGetPowerUsage")
        return None if milliwatts is None else milliwatts / 1e3

    def power_limit_watts(self) -> float | None:
        """The limit that is in force."""
        milliwatts = self.ask("nvmlDeviceGetEnforcedPowerLimit")
        return None if milliwatts is None else milliwatts / 1e3

    def clock_mhz(self, *, of_memory: bool = False) -> float | None:
        """Of the multiprocessors, or of the memory."""
        mhz = self.ask("nvmlDeviceGetClockInfo", 2 if of_memory else 1)
        return None if mhz is None else float(mhz)

    def temperature_celsius(self) -> float | None:
        """Of the chip."""
        celsius = self.ask("nvmlDeviceGetTemperature", 0)
        return None if celsius is None else float(celsius)

    def memory_temperature_celsius(self) -> float | None:
        """Of the memory; a GPU without the sensor answers 0."""
        (celsius,) = self.fields([MEMORY_TEMPERATURE])
        return celsius or None

    def pcie_bytes_per_second(self, *, sent: bool) -> float | None:
        """Traffic over PCIe in the last 20 ms, which the call waits for."""
        kilobytes = self.ask("nvmlDeviceGetPcieThroughput", 0 if sent else 1)
        return None if kilobytes is None else kilobytes * 1e3

    def counters(self) -> Counters:
        """All counters of errors."""
        rows = self.ask("nvmlDeviceGetRemappedRows")
        return Counters(
            self.ask("nvmlDeviceGetTotalEccErrors", 0, 0),
            self.ask("nvmlDeviceGetTotalEccErrors", 1, 0),
            None if rows is None else rows[0] + rows[1],
            self.ask("nvmlDeviceGetPcieReplayCounter"),
            self._sum_of(self._link_fields),
            self._sum_of(self._c2c_fields),
        )

    def facts(self) -> dict[str, Any]:
        """What stays the same during a run, and the counters now; for ``environment.json``."""
        links, c2c_links, c2c_mbytes, recovery = self.fields([LINK_COUNT, C2C_COUNT, C2C_BANDWIDTH, RECOVERY_ACTION])
        memory, capability = self.ask("nvmlDeviceGetMemoryInfo"), self.ask("nvmlDeviceGetCudaComputeCapability")
        limit, usual = (self.ask(f"nvmlDeviceGetPowerManagement{name}") for name in ("Limit", "DefaultLimit"))
        ecc, rows = self.ask("nvmlDeviceGetEccMode"), self.ask("nvmlDeviceGetRemappedRows")
        return {
            "name": self.ask("nvmlDeviceGetName"),
            "uuid": self.ask("nvmlDeviceGetUUID"),
            "memory_bytes": memory and memory.total,
            "compute_capability": capability and "{}.{}".format(*capability),
            "power_limit_watts": limit and limit / 1000,
            "default_power_limit_watts": usual and usual / 1000,
            "max_clock_mhz": self.ask("nvmlDeviceGetMaxClockInfo", 1),
            "max_memory_clock_mhz": self.ask("nvmlDeviceGetMaxClockInfo", 2),
            "mig_enabled": bool((self.ask("nvmlDeviceGetMigMode") or [0])[0]),
            "ecc_enabled": None if ecc is None else bool(ecc[0]),
            "rows_pending": rows and bool(rows[2]),
            "rows_failed": rows and bool(rows[3]),
            "pcie_generation": self.ask("nvmlDeviceGetMaxPcieLinkGeneration"),
            "pcie_lanes": self.ask("nvmlDeviceGetCurrPcieLinkWidth"),
            "max_pcie_lanes": self.ask("nvmlDeviceGetMaxPcieLinkWidth"),
            "nvlinks": links and int(links),
            "c2c_links": c2c_links and int(c2c_links),
            "c2c_bytes_per_second": c2c_mbytes and c2c_mbytes * 1e6,
            "recovery_action": None if recovery is None else RECOVERY_ACTIONS.get(int(recovery)),
            "counters": asdict(self.counters()),
        }

    def watch_xids(self) -> bool:
        """Collect critical errors (XID) from now on; False where they are not reported."""
        try:
            self._xids = self.nvml.nvmlEventSetCreate()
            self.nvml.nvmlDeviceRegisterEvents(self.handle, self.nvml.nvmlEventTypeXidCriticalError, self._xids)
        except (self.nvml.NVMLError, AttributeError):
            self._xids = None
        return self._xids is not None

    def new_xids(self) -> list[int] | None:
        """Codes of the critical errors since the last call; None where they are not reported."""
        if self._xids is None:
            return None
        found: list[int] = []
        while True:
            try:
                found.append(int(self.nvml.nvmlEventSetWait_v2(self._xids, 0).eventData))
            except self.nvml.NVMLError:  # a timeout: no more
                return found

    def _answered(self, wanted: Sequence[int | tuple[int, int]]) -> list[int | tuple[int, int]]:
        return [one for one, value in zip(wanted, self.fields(wanted), strict=True) if value is not None]

    def _sum_of(self, wanted: Sequence[int | tuple[int, int]]) -> int | None:
        values = [value for value in self.fields(wanted) if value is not None]
        return int(sum(values)) if values else None


def open_nvml() -> Any | None:
    """The library, ready; None without the package or a driver."""
    try:
        nvml = import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml


def all_gpus(nvml: Any) -> list[NvmlGpu]:
    """Every GPU that the library knows, in its order."""
    try:
        return [NvmlGpu(nvml, nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:
        return []


def gpus_of(uuids: Sequence[str]) -> list[NvmlGpu] | None:
    """The GPUs named ``GPU-...``; None without package, driver or one of them."""
    nvml = open_nvml()
    if nvml is None:
        return None
    try:
        return [NvmlGpu(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid)) for uuid in uuids]
    except nvml.NVMLError:
        return None


def nvml_gpu(uuid: str) -> NvmlGpu:
    """The GPU named ``GPU-...`` for questions to the driver.

    Raises:
        SensorError: nvidia-ml-py is not installed, or the driver does not know the GPU.
    """
    gpus = gpus_of([uuid])
    if gpus is None:
        raise unknown_gpu(uuid)
    return gpus[0]


def unknown_gpu(uuid: str) -> SensorError:
    """The error to raise where NVML has no such GPU, or is not installed."""
    return SensorError(f"NVML does not know {uuid}", f"{how_to_install('gpu')}, and check nvidia-smi")


def driver_version(nvml: Any) -> str | None:
    """Of the driver."""
    try:
        return str(nvml.nvmlSystemGetDriverVersion())
    except nvml.NVMLError:
        return None


def words_of(reasons: int) -> list[str]:
    """The bits of ``CLOCK_REASONS`` in words."""
    return [words for bit, words in CLOCK_REASONS.items() if reasons & bit]
