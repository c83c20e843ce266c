"""Run a child process and watch, from outside, its memory and who uses the processor."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

INTERVAL_SECONDS = 0.1
# Reading the memory of a large process costs milliseconds of processor time: rather than disturb it, watch less often.
WATCHING_SHARE = 0.02
LONGEST_INTERVAL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at a tree of processes and at the whole machine.

    ``memory_bytes`` is the unique set size (memory that would be free without the tree); processor times are totals
    over all cores, the tree's only of processes alive.
    """

    time_seconds: float
    memory_bytes: int
    tree_processor_seconds: float
    machine_processor_seconds: float


@dataclass(frozen=True, slots=True)
class WatchedRun:
    """What a child wrote on standard output, when it started (monotonic clock) and how it behaved."""

    output: str
    started_seconds: float
    readings: list[Reading]

    @property
    def peak_memory_bytes(self) -> int:
        """Largest memory seen, loading included."""
        return max(reading.memory_bytes for reading in self.readings)


class ChildFailedError(Exception):
    """A child ended with an error; the message says which, and where its log is."""


def run_watched(command: Sequence[str], directory: Path, environment: Mapping[str, str], log: Path) -> WatchedRun:
    """Run ``command`` to its end; its standard error goes to ``log``, and no process of its tree survives.

    Raises:
        ChildFailedError: it returned a status other than 0.
    """
    with tempfile.TemporaryFile("w+") as output, log.open("w") as errors:
        started = time.monotonic()
        child = subprocess.Popen(
            command, cwd=directory, env=environment, stdout=output, stderr=errors, start_new_session=True
        )
        try:
            readings = _watch(child)
        finally:
            _end_session(child)
        if child.returncode:
            name, last_line = shlex.join(command[:3]), log.read_text(errors="replace").rstrip().rpartition("\n")[2]
            raise ChildFailedError(f"{name} ended with status {child.returncode}: {last_line} (log: {log})")
        output.seek(0)
        return WatchedRun(output.read(), started, readings)


def share_of_others(readings: Sequence[Reading], start_seconds: float, end_seconds: float, cores: int) -> float | None:
    """Share of the machine's processor time, 0 to 1, that went to processes outside the tree between two moments.

    None when fewer than two readings lie between them.
    """
    inside = [reading for reading in readings if start_seconds <= reading.time_seconds <= end_seconds]
    if len(inside) < 2:
        return None
    first, last = inside[0], inside[-1]
    machine = last.machine_processor_seconds - first.machine_processor_seconds
    tree = last.tree_processor_seconds - first.tree_processor_seconds
    return max(0.0, machine - tree) / ((last.time_seconds - first.time_seconds) * cores)


def _watch(child: subprocess.Popen[bytes]) -> list[Reading]:
    readings: list[Reading] = []
    root = psutil.Process(child.pid)
    while child.poll() is None:
        before = time.process_time()
        readings.append(_read(root))
        spent = time.process_time() - before
        try:
            child.wait(min(max(INTERVAL_SECONDS, spent / WATCHING_SHARE), LONGEST_INTERVAL_SECONDS))
        except subprocess.TimeoutExpired:
            continue
    return readings


def _read(root: psutil.Process) -> Reading:
    memory, processor = 0, 0.0
    for process in _tree(root):
        try:
            memory += process.memory_full_info().uss
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        processor += times.user + times.system
    machine = psutil.cpu_times()
    busy = machine.user + machine.nice + machine.system + machine.irq + machine.softirq + machine.steal
    return Reading(time.monotonic(), memory, processor, busy)


def _tree(root: psutil.Process) -> list[psutil.Process]:
    try:
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _end_session(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
