"""Tests of the host: how long a process waits to be woken, and what the disk reads and writes."""

from __future__ import annotations

import mmap
import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import torch

from megatoken.files import FIXES
from megatoken.hardware.qualify.timing import call_seconds, on_the_best_core
from megatoken.hardware.qualify.values import NotRun, Outcomes, Setting, Value

SLEEP_SECONDS = 1e-3
BLOCK, SMALL = 2**20, 4096
QUEUE_DEPTHS = (1, 32)
FREE_SHARE = 4
"""The disk must have this many times the file's size free."""
IN_MEMORY = ("tmpfs", "ramfs")
OTHER_FOLDER = "name a folder on a disk with --disk DIR"


@torch.inference_mode()
def latency(setting: Setting) -> Outcomes:
    """An operation on one number, a round trip between two threads, and sleeps of a millisecond."""
    one = torch.ones(1)
    seconds, note = on_the_best_core(lambda: one.add_(1.0), setting)
    title = "Start of one PyTorch operation, fastest core"
    yield Value("operation_start", title, "us", _microseconds(seconds), "lower", note=note)
    yield Value("thread_round_trip", "Round trip between two threads", "us", _round_trips(setting), "lower")
    late = []
    for _ in range(setting.windows):
        delays = []
        for _ in range(max(2, round(setting.seconds / setting.windows / SLEEP_SECONDS))):
            began = time.perf_counter()
            time.sleep(SLEEP_SECONDS)
            delays.append(time.perf_counter() - began - SLEEP_SECONDS)
        late.append(sorted(delays)[round(0.9 * (len(delays) - 1))])
    title = "Lateness of a sleep of 1 ms, 90th percentile of each window"
    yield Value("sleep_lateness", title, "us", _microseconds(late), "lower")


def _round_trips(setting: Setting) -> list[float]:
    """Microseconds of a byte through a pipe to another thread and back through a second one."""
    (read_there, write_here), (read_here, write_there) = os.pipe(), os.pipe()

    def answer() -> None:
        while byte := os.read(read_there, 1):
            os.write(write_there, byte)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()

    def round_trip() -> None:
        os.write(write_here, b".")
        os.read(read_here, 1)

    seconds = call_seconds(round_trip, setting)
    os.close(write_here)
    thread.join()
    for descriptor in (read_there, read_here, write_there):
        os.close(descriptor)
    return _microseconds(seconds)


def _microseconds(seconds: list[float]) -> list[float]:
    return [1e6 * one for one in seconds]


def disk(setting: Setting) -> Outcomes:
    """Writes and reads of whole blocks in order, and random reads."""
    yield from _on_a_file("disk", "Disk", _reads, setting)


def disk_writes(setting: Setting) -> Outcomes:
    """Random writes without a flush after each, as fio does them by default: a disk may have them in its cache."""
    yield from _on_a_file("disk_writes", "Random writes to the disk", _writes, setting)


def _file_system(folder: Path) -> str:
    """What kind of file system a folder is in, such as ext4; empty where the system does not say."""
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    place = folder.resolve()
    return next((mounts[one] for one in (place, *place.parents) if one in mounts), "")


def _on_a_file(name: str, title: str, measure: Callable[[int, Setting], Outcomes], setting: Setting) -> Outcomes:
    """Open a file without the system's cache. It has no name, so that nothing stays behind."""
    folder = setting.folder
    if (kind := _file_system(folder)) in IN_MEMORY:
        yield NotRun(name, title, f"{folder} lies in memory ({kind})", OTHER_FOLDER)
        return
    try:
        if shutil.disk_usage(folder).free < FREE_SHARE * setting.file_bytes:
            need = FREE_SHARE * setting.file_bytes / 2**30
            yield NotRun(name, title, f"less than {need:.1f} GiB is free in {folder}", f"free some, or {OTHER_FOLDER}")
            return
        named, path = tempfile.mkstemp(prefix=".megatoken-qualify-", dir=folder)
    except OSError as error:
        yield NotRun(name, title, f"{folder}: {error.strerror}", OTHER_FOLDER)
        return
    try:
        file = os.open(path, os.O_RDWR | getattr(os, "O_DIRECT", 0))
    except OSError as error:
        yield NotRun(name, title, f"the file system of {folder} has no O_DIRECT ({error.strerror})", OTHER_FOLDER)
        return
    finally:
        os.unlink(path)  # noqa: PTH108 # a path as mkstemp gives it
        os.close(named)
    try:
        yield from measure(file, setting)
    except OSError as error:
        fix = FIXES.get(error.errno or 0, "free some space")
        yield NotRun(name, title, f"{folder}: {error.strerror}", f"{fix}, or {OTHER_FOLDER}")
    finally:
        os.close(file)


def _reads(file: int, setting: Setting) -> Outcomes:
    """Fill the file and read it, then read it at random places."""
    blocks = setting.file_bytes // BLOCK
    with _filled(BLOCK) as buffer:

        def write(block: int) -> None:
            os.pwritev(file, [buffer], block * BLOCK)

        def read(block: int) -> None:
            os.preadv(file, [buffer], block * BLOCK)

        for name, one in (("write", write), ("read", read)):
            rate = _windows(one, blocks, setting, lambda: os.fsync(file))
            title = f"Disk, sequential {name} of 1 MiB"
            yield Value(f"disk_sequential_{name}", title, "MB/s", [BLOCK / 1e6 * each for each in rate])
    for depth in QUEUE_DEPTHS:
        yield _at_random("read", os.preadv, file, depth, setting)


def _writes(file: int, setting: Setting) -> Outcomes:
    """Fill the file, so that the file system need not find new blocks, then write at random places."""
    with _filled(BLOCK) as buffer:
        for block in range(setting.file_bytes // BLOCK):
            os.pwritev(file, [buffer], block * BLOCK)
    os.fsync(file)
    for depth in QUEUE_DEPTHS:
        yield _at_random("write", os.pwritev, file, depth, setting)


def _filled(size: int) -> mmap.mmap:
    """Memory with random bytes, which no disk compresses; O_DIRECT needs it aligned, and pages are."""
    buffer = mmap.mmap(-1, size)
    buffer[:] = random.Random(0).randbytes(size)
    return buffer


def _windows(one: Callable[[int], None], count: int, setting: Setting, flush: Callable[[], None]) -> list[float]:
    """Calls per second of each window; numbers below ``count`` in order, over and over, all of them at least once."""
    rates, number = [], 0
    for window in range(1, setting.windows + 1):
        first, began = number, time.perf_counter()
        while (
            time.perf_counter() - began < setting.seconds / setting.windows or number * setting.windows < count * window
        ):
            one(number % count)
            number += 1
        flush()
        rates.append((number - first) / (time.perf_counter() - began))
    return rates


def _at_random(
    kind: str, one: Callable[[int, list[mmap.mmap], int], int], file: int, depth: int, setting: Setting
) -> Value:
    """Reads or writes of 4 KiB at random places by ``depth`` threads, which wait for the disk without Python's lock."""
    places = setting.file_bytes // SMALL
    seconds_each = setting.seconds / setting.windows
    waits: list[float] = []

    def thread(seed: int) -> int:
        draw, calls = random.Random(seed), 0
        end = time.perf_counter() + seconds_each
        with _filled(SMALL) as buffer:
            while (began := time.perf_counter()) < end or not calls:
                one(file, [buffer], draw.randrange(places) * SMALL)
                waits.append(time.perf_counter() - began)
                calls += 1
        return calls

    rates = []
    with ThreadPoolExecutor(depth) as pool:
        for window in range(setting.windows):
            began = time.perf_counter()
            calls = sum(pool.map(thread, range(window * depth, (window + 1) * depth)))
            rates.append(calls / (time.perf_counter() - began))
    title = f"Disk, random {kind}s of 4 KiB, {depth} at once"
    slowest = 1e3 * sorted(waits)[round(0.99 * (len(waits) - 1))]
    return Value(f"disk_random_{kind}_{depth}", title, f"{kind}s/s", rates, note=f"99th percentile {slowest:.2f} ms")
