"""A stand-in for pynvml with two GPUs: the calls that megatoken makes, and answers like the driver's."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """As in pynvml."""


class StandInNvml:
    """Two H200 that draw 300 and 400 W; a handle is the GPU's number.

    ``answers`` replace what both GPUs answer, by the name of the call without ``nvmlDeviceGet``; an answer of
    ``NVMLError`` is raised. ``fields`` are values of NVML's numbered fields, by number or number and scope; ``xids``
    are critical errors that have happened.
    """

    NVMLError = NVMLError
    nvmlEventTypeXidCriticalError = 8

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.fields: dict[Any, float] = {82: 50, 91: 18}
        self.xids: list[int] = []
        self.watched: set[int] = set()
        self._own: dict[str, Any] = {
            "Count": 2,
            "Name": "NVIDIA H200",
            "MemoryInfo": SimpleNamespace(total=143_771 * 2**20),
            "CudaComputeCapability": (9, 0),
            "PowerManagementLimit": 700_000,
            "PowerManagementDefaultLimit": 700_000,
            "EnforcedPowerLimit": 700_000,
            "MaxClockInfo": 1980,
            "MigMode": (0, 0),
            "EccMode": (1, 1),
            "RemappedRows": (0, 0, 0, 0),
            "MaxPcieLinkGeneration": 5,
            "CurrPcieLinkGeneration": 5,
            "CurrPcieLinkWidth": 16,
            "MaxPcieLinkWidth": 16,
            "PersistenceMode": 1,
            "CurrentClocksEventReasons": 0x4,
            "TotalEccErrors": 0,
            "PcieReplayCounter": 0,
            "PcieThroughput": 1000,
            "ComputeRunningProcesses": [],
        }

    def nvmlInit(self) -> None:  # noqa: N802
        """Ready."""

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        """Of the driver."""
        return "570.1"

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        """The number."""
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        """``GPU-0`` or ``GPU-1``."""
        if uuid not in ("GPU-0", "GPU-1"):
            raise NVMLError("not found")
        return int(uuid[-1])

    def nvmlDeviceGetFieldValues(self, gpu: int, wanted: list[Any]) -> list[Any]:  # noqa: N802
        """Doubles, or the code for an unknown field."""
        return [
            SimpleNamespace(
                nvmlReturn=0 if one in self.fields else 3,
                valueType=0,
                value=SimpleNamespace(dVal=self.fields.get(one, 0)),
            )
            for one in wanted
        ]

    def nvmlEventSetCreate(self) -> str:  # noqa: N802
        """One set."""
        return "set"

    def nvmlDeviceRegisterEvents(self, gpu: int, kinds: int, events: str) -> None:  # noqa: N802
        """Watch a GPU."""
        self.watched.add(gpu)

    def nvmlEventSetWait_v2(self, events: str, milliseconds: int) -> Any:  # noqa: N802
        """The next critical error."""
        if not self.xids:
            raise NVMLError("timeout")
        return SimpleNamespace(eventData=self.xids.pop(0))

    def __getattr__(self, name: str) -> Any:
        key = name.removeprefix("nvmlDeviceGet")
        if key == name:
            raise AttributeError(name)

        def answer(gpu: int = 0, *arguments: Any) -> Any:
            if key in self.answers:
                found = self.answers[key]
                if found is NVMLError:
                    raise NVMLError("not supported")
                return found(gpu, *arguments) if callable(found) else found
            live = {
                "TotalEnergyConsumption": lambda: round(time.monotonic() * 1e3 * (300 + 100 * gpu)),
                "PowerUsage": lambda: 1000 * (300 + 100 * gpu),
                "ClockInfo": lambda: 2619 if arguments == (2,) else 1800 - 300 * gpu,
                "Temperature": lambda: 60 + 5 * gpu,
                "UUID": lambda: f"GPU-{gpu}",
            }
            if key in live:
                return live[key]()
            if key not in self._own:
                raise NVMLError("not supported")
            return self._own[key]

        return answer
