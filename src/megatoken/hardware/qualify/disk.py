"""The disk under a folder, past the cache of the operating system: O_DIRECT, sequential and random."""

from __future__ import annotations

import mmap
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from megatoken.hardware.qualify.values import NotRun, Outcomes, Setting, Value

TITLE = "Disk"
BLOCK, SMALL = 2**20, 4096
QUEUE_DEPTHS = (1, 32)
FREE_SHARE = 4
"""The disk must have this many times the file's size free."""
OTHER_FOLDER = "name a folder on a disk with --disk DIR"


def disk(setting: Setting) -> Outcomes:
    """Writes and reads one file that has no name, so that nothing stays behind."""
    folder = setting.folder
    try:
        if shutil.disk_usage(folder).free < FREE_SHARE * setting.file_bytes:
            need = FREE_SHARE * setting.file_bytes / 2**30
            yield NotRun(
                "disk", TITLE, f"less than {need:.1f} GiB is free in {folder}", f"free some, or {OTHER_FOLDER}"
            )
            return
        named, path = tempfile.mkstemp(prefix=".megatoken-qualify-", dir=folder)
    except OSError as error:
        yield NotRun("disk", TITLE, f"{folder}: {error.strerror}", OTHER_FOLDER)
        return
    try:
        file = os.open(path, os.O_RDWR | getattr(os, "O_DIRECT", 0))
    except OSError as error:
        yield NotRun("disk", TITLE, f"the file system of {folder} has no O_DIRECT ({error.strerror})", OTHER_FOLDER)
        return
    finally:
        os.unlink(path)  # noqa: PTH108 # a path as mkstemp gives it
        os.close(named)
    try:
        yield from _measured(file, setting)
    except OSError as error:
        yield NotRun("disk", TITLE, f"{folder}: {error.strerror}", f"free some space, or {OTHER_FOLDER}")
    finally:
        os.close(file)


def _measured(file: int, setting: Setting) -> Outcomes:
    blocks = setting.file_bytes // BLOCK
    with mmap.mmap(-1, BLOCK) as buffer:  # O_DIRECT needs aligned memory, and pages are
        buffer.write(random.Random(0).randbytes(BLOCK))

        def write(block: int) -> None:
            os.pwritev(file, [buffer], block * BLOCK)

        def read(block: int) -> None:
            os.preadv(file, [buffer], block * BLOCK)

        for name, one in (("write", write), ("read", read)):
            rate = _windows(one, blocks, setting, lambda: os.fsync(file))
            title = f"Disk, sequential {name} of 1 MiB"
            yield Value(f"disk_sequential_{name}", title, "MB/s", [BLOCK / 1e6 * each for each in rate])
    for depth in QUEUE_DEPTHS:
        yield from _random_reads(file, depth, setting)


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


def _random_reads(file: int, depth: int, setting: Setting) -> Outcomes:
    """Reads of 4 KiB at random places by ``depth`` threads, which wait for the disk without Python's lock."""
    places = setting.file_bytes // SMALL
    seconds_each = setting.seconds / setting.windows
    waits: list[float] = []

    def reader(seed: int) -> int:
        draw, reads = random.Random(seed), 0
        end = time.perf_counter() + seconds_each
        with mmap.mmap(-1, SMALL) as buffer:
            while (began := time.perf_counter()) < end or not reads:
                os.preadv(file, [buffer], draw.randrange(places) * SMALL)
                waits.append(time.perf_counter() - began)
                reads += 1
        return reads

    rates = []
    with ThreadPoolExecutor(depth) as pool:
        for window in range(setting.windows):
            began = time.perf_counter()
            reads = sum(pool.map(reader, range(window * depth, (window + 1) * depth)))
            rates.append(reads / (time.perf_counter() - began))
    title = f"Disk, random reads of 4 KiB, {depth} at once"
    slowest = 1e3 * sorted(waits)[round(0.99 * (len(waits) - 1))]
    yield Value(f"disk_random_read_{depth}", title, "reads/s", rates, note=f"99th percentile {slowest:.2f} ms")
