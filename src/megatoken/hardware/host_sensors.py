"""Sensors of the machine apart from its GPUs: processor energy, waiting of its tasks, and a power meter of the user.

Energy is the kernel's powercap interface to RAPL, which most systems let only root read. Waiting is pressure stall
information (PSI, Documentation/accounting/psi.rst of Linux): the time in which at least one task was stalled.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatoken.errors import UsageError

POWERCAP = Path("/sys/class/powercap")
PRESSURE = Path("/proc/pressure")
STALLS = {"cpu": "cpu_stalled_share", "memory": "memory_stalled_share", "io": "disk_stalled_share"}
METER_PERIOD_SECONDS, METER_LIMIT_SECONDS = 1.0, 5.0
KERNEL_LOG = Path("/dev/kmsg")
MOST_XIDS = 1000
_XID = re.compile(r"NVRM: Xid \(([^)]*)\): (\d+)")
_TOTAL = re.compile(r"^some .*total=(\d+)", re.MULTILINE)
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


@dataclass(frozen=True, slots=True)
class HostTotals:
    """Totals since the machine started; what the kernel does not let this process read is missing.

    ``stalled``: microseconds by resource. ``packages``: microjoules and the value at which the counter starts again,
    by package.
    """

    stalled: Mapping[str, int]
    packages: Mapping[str, tuple[int, int]]


def read_host() -> HostTotals:
    """The totals now; takes about 0.1 ms."""
    stalled = {}
    for resource in STALLS:
        with suppress(OSError):
            if found := _TOTAL.search((PRESSURE / resource).read_text()):
                stalled[resource] = int(found[1])
    packages = {}
    for zone in POWERCAP.glob("intel-rapl:[0-9]*"):
        with suppress(OSError, ValueError):
            if (zone / "name").read_text().startswith("package"):  # its parts, such as dram, are inside it
                joules, wraps = ((zone / name).read_text() for name in ("energy_uj", "max_energy_range_uj"))
                packages[zone.name] = int(joules), int(wraps)
    return HostTotals(stalled, packages)


def stalled_shares(before: HostTotals, now: HostTotals, seconds: float) -> dict[str, float]:
    """Shares of the time between, by field of ``Telemetry``."""
    return {
        name: min(1.0, (now.stalled[resource] - before.stalled[resource]) / 1e6 / seconds)
        for resource, name in STALLS.items()
        if resource in now.stalled and resource in before.stalled
    }


def package_watts(before: HostTotals, now: HostTotals, seconds: float) -> float | None:
    """Mean power of all packages between; None where it cannot be read."""
    if not now.packages or now.packages.keys() != before.packages.keys():
        return None
    spent = 0
    for name, (joules, wraps) in now.packages.items():
        grown = joules - before.packages[name][0]
        spent += grown if grown >= 0 else grown + wraps
    return spent / 1e6 / seconds


def logged_xids() -> list[dict[str, object]] | None:
    """Critical errors of NVIDIA GPUs in the kernel's log: seconds after its start, device and code.

    None where this process may not read the log, which most systems let only root do.
    """
    try:
        log = os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    found: list[dict[str, object]] = []
    try:
        while len(found) < MOST_XIDS:
            record = os.read(log, 8192).decode("utf-8", "replace")
            if not record:
                break
            if match := _XID.search(record):
                microseconds = record.split(",")[2:3]
                seconds = int(microseconds[0]) / 1e6 if microseconds and microseconds[0].isdigit() else None
                found.append({"seconds": seconds, "device": match[1], "xid": int(match[2])})
    except OSError:  # no more records
        pass
    finally:
        os.close(log)
    return found


class PowerMeter:
    """Power of the whole system, from a meter that the user names; a thread reads it once a second."""

    def __init__(self, source: str) -> None:
        """Start. ``source`` and errors as for ``read_meter``."""
        self._source = source
        self._watts: float | None = read_meter(source)
        threading.Thread(target=self._watch, name="power-meter", daemon=True).start()

    @property
    def watts(self) -> float | None:
        """The last reading; None if that failed."""
        return self._watts

    def _watch(self) -> None:
        while True:
            time.sleep(METER_PERIOD_SECONDS)
            try:
                self._watts = read_meter(self._source)
            except UsageError:
                self._watts = None


def read_meter(source: str) -> float:
    """Watts, the first number in a file, or in what a command prints. Raises UsageError: neither gives a number."""
    path = Path(source)
    try:
        if path.is_file() and not os.access(path, os.X_OK):
            text = path.read_text(encoding="utf-8", errors="replace")
        else:
            command = shlex.split(source)
            text = subprocess.run(
                command, capture_output=True, text=True, timeout=METER_LIMIT_SECONDS, check=True
            ).stdout
        if (found := _NUMBER.search(text)) is None:
            raise ValueError(f"no number in {text.strip()[:40]!r}")
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise UsageError(
            f"power_meter: {source}: {str(error).splitlines()[0]}; give a file that holds the watts of the whole"
            " system, or a command that prints them"
        ) from error
    return float(found[0])
