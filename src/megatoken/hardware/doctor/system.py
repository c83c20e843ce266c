"""Checks of processor, memory, disk and operating system."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from megatoken.hardware.doctor.finding import Finding, fix, ok, unknown
from megatoken.hardware.inventory import cpu, memory
from megatoken.text import count_of

CPUS = Path("/sys/devices/system/cpu")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SAMPLE_SECONDS = 0.5
BUSY_SHARE, STEAL_SHARE = 0.05, 0.02
"""Of all cores' time: what other processes, and other virtual machines, may take."""
MOST_NAMED = 3
FEWEST_FILES = 4096
FREE_DISK_BYTES = 10 * 10**9
FREE_MEMORY_SHARE = 0.25
CLOCK_UNSYNCHRONISED = 5
"""TIME_ERROR of adjtimex(2)."""


def check_system(folder: Path) -> Iterator[Finding]:
    """All of them; ``folder`` is where runs are written. Takes half a second, in which the load is watched."""
    yield _governor()
    yield from _cores_and_memory()
    yield from _load()
    yield _huge_pages()
    yield _open_files()
    yield _disk(folder)
    yield _clock()


def _governor() -> Finding:
    code = "cpu_governor"
    governors = [file.read_text().strip() for file in CPUS.glob("cpu[0-9]*/cpufreq/scaling_governor")]
    if not governors:
        return ok(code, "the system does not let the clock be governed (usual in virtual machines)")
    slow = [one for one in governors if one != "performance"]
    if not slow:
        return ok(code, "all cores use the governor performance")
    message = f"{len(slow)} of {count_of(len(governors), 'core')} use the governor {slow[0]}, which raises clocks late"
    return fix(code, message, "sudo cpupower frequency-set -g performance")


def _cores_and_memory() -> Iterator[Finding]:
    facts, all_cores = cpu(), psutil.cpu_count() or 1
    allowed = min(facts["usable_cores"] or all_cores, facts["quota_cores"] or all_cores)
    if allowed < all_cores:
        message = f"this process may use {allowed:g} of {all_cores} cores"
        yield fix("cpu_limit", message, "raise the container's --cpus or --cpuset-cpus, or leave out taskset")
    else:
        yield ok("cpu_limit", f"all {count_of(all_cores, 'core')} may be used")
    sizes = memory()
    limit, total = sizes["limit_bytes"], sizes["total_bytes"]
    if limit is not None and limit < total:
        message = f"the container may use {limit / 2**30:.1f} of {total / 2**30:.1f} GiB of memory"
        yield fix("memory_limit", message, "raise the container's --memory")
    available = sizes["available_bytes"]
    state = f"{available / 2**30:.1f} of {total / 2**30:.1f} GiB of memory are available"
    if available < FREE_MEMORY_SHARE * total:
        yield fix("memory_free", f"{state}; models may not fit", "ps aux --sort=-rss | head")
    else:
        yield ok("memory_free", state)


def _load() -> Iterator[Finding]:
    """CPU time of other processes and of other virtual machines over a short while."""
    before, started = _process_seconds(), time.monotonic()
    all_before = psutil.cpu_times()
    time.sleep(SAMPLE_SECONDS)
    seconds = (time.monotonic() - started) * (psutil.cpu_count() or 1)
    used = {
        process: spent - before.get(process, spent)
        for process, spent in _process_seconds().items()
        if process[0] != os.getpid()
    }
    share = sum(used.values()) / seconds
    if share > BUSY_SHARE:
        top = sorted(used.items(), key=lambda item: -item[1])[:MOST_NAMED]
        busiest = [(pid, name) for (pid, name), spent in top if spent > 0]
        names = ", ".join(f"{name} ({pid})" for pid, name in busiest)
        message = f"other processes use {share:.0%} of the cores: {names}"
        yield fix("cpu_load", message, f"stop them: kill {' '.join(str(pid) for pid, _ in busiest)}")
    else:
        yield ok("cpu_load", f"other processes use {share:.0%} of the cores")
    steal = getattr(psutil.cpu_times(), "steal", 0.0) - getattr(all_before, "steal", 0.0)
    if steal / seconds > STEAL_SHARE:
        message = f"other virtual machines on this host take {steal / seconds:.0%} of the cores' time"
        yield fix("cpu_steal", message, "move to a host or an instance type with cores of its own")
    else:
        yield ok("cpu_steal", "no core is taken away by the host")


def _process_seconds() -> dict[tuple[int, str], float]:
    """CPU seconds of each process, by id and name."""
    return {
        (process.pid, process.info["name"]): times.user + times.system
        for process in psutil.process_iter(["name", "cpu_times"])
        if (times := process.info["cpu_times"]) is not None
    }


def _huge_pages() -> Finding:
    code = "huge_pages"
    try:
        chosen = HUGE_PAGES.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return unknown(code, "the system does not say whether it has transparent huge pages")
    if chosen == "never":
        message = "transparent huge pages are off, which slows the reading of large weights"
        return fix(code, message, f"echo madvise | sudo tee {HUGE_PAGES}")
    return ok(code, f"transparent huge pages: {chosen}")


def _open_files() -> Finding:
    code = "open_files"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < FEWEST_FILES:
        message = f"a process may open {soft:,} files, so a server may refuse clients"
        most = FEWEST_FILES if hard < 0 else min(hard, 16 * FEWEST_FILES)
        return fix(code, message, f"ulimit -n {most}")
    return ok(code, f"a process may open {soft:,} files" if soft >= 0 else "a process may open any number of files")


def _disk(folder: Path) -> Finding:
    code = "disk_space"
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return unknown(code, f"{folder}: {error.strerror}")
    if free < FREE_DISK_BYTES:
        message = f"{free / 1e9:.1f} GB are free in {folder.resolve()}; runs and checkpoints may not fit"
        return fix(code, message, f"du -xh {folder.resolve()} | sort -h | tail")
    return ok(code, f"{free / 1e9:,.0f} GB are free in {folder.resolve()}")


def _clock() -> Finding:
    """Whether the kernel's clock is synchronised, which comparing the times of several nodes needs."""
    code = "clock_sync"
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))  # zeros: it reads only
    except (OSError, AttributeError):
        return unknown(code, "the system does not say whether its clock is synchronised")
    if state < 0:
        return unknown(code, "the system does not say whether its clock is synchronised")
    if state == CLOCK_UNSYNCHRONISED:
        message = "the clock is not synchronised, so times of several nodes cannot be compared"
        return fix(code, message, "sudo timedatectl set-ntp true")
    return ok(code, "the clock is synchronised")
