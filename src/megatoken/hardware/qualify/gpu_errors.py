"""Errors that GPUs count while the tests run, and during which test: of memory, links and the driver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from megatoken.hardware.nvml import NvmlGpu, gpus_of
from megatoken.hardware.qualify.catalog import HardwareTest
from megatoken.hardware.qualify.processes import Ended, Returned
from megatoken.hardware.qualify.values import Value
from megatoken.hardware.telemetry import ERROR_WORDS

CORRECTED = {"ecc_corrected_errors", "pcie_replays", "nvlink_errors", "c2c_errors"}
"""Counters whose growth loses no data. It is a warning; growth of any other is a fault."""
TITLES = {False: "Errors during the tests", True: "Corrected errors during the tests"}


class ErrorWatch:
    """Counters and critical errors of some GPUs, named ``GPU-...``, from now on."""

    def __init__(self, uuids: Sequence[str]) -> None:
        self._gpus: list[NvmlGpu] = gpus_of(uuids) or []
        self._counts = [asdict(gpu.counters()) for gpu in self._gpus]
        for gpu in self._gpus:
            gpu.watch_xids()
        self._found: list[tuple[str, int, str]] = []

    def look(self, test: HardwareTest) -> None:
        """Ascribe what is new to a test that has just ended."""
        for index, gpu in enumerate(self._gpus):
            before, self._counts[index] = self._counts[index], asdict(gpu.counters())
            for name, count in self._counts[index].items():
                if None not in (count, before[name]) and count > before[name]:
                    self._add(name, count - before[name], test)
            for code in gpu.new_xids() or ():
                self._add("xid_errors", 1, test, f" {code}")

    def _add(self, name: str, count: int, test: HardwareTest, which: str = "") -> None:
        self._found.append((name, count, f"{count} {ERROR_WORDS[name]}{which} during {test.title}"))

    def ended(self) -> Ended:
        """All of it, as if a test had returned it. Without NVML there is nothing: the test ``facts`` says so."""
        found = []
        for corrected, title in TITLES.items() if self._gpus else ():
            of_kind = [(count, words) for name, count, words in self._found if (name in CORRECTED) is corrected]
            total, note = sum(count for count, _ in of_kind), "; ".join(words for _, words in of_kind)
            name, better = ("errors_corrected", "rare") if corrected else ("errors_counted", "zero")
            found.append(Returned(Value(name, title, "errors", [total], better, note=note), None))  # type: ignore[arg-type]
        return Ended(tuple(found), 0.0, None)
