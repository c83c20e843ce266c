"""Caches and memory as one core sees them: the rate and latency of each, and copies between NUMA nodes."""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import TypeAlias

import numpy as np

from megatoken.hardware.qualify.processor import buffer_bytes, compiled
from megatoken.hardware.qualify.timing import call_seconds, rates
from megatoken.hardware.qualify.values import NotRun, Outcomes, Setting, Value
from megatoken.hardware.topology import data_caches, numa_nodes
from megatoken.processes import usable_core_numbers

# Sums of eight numbers at a time, four of them independent, keep up with the loads of every processor.
SOURCE = """
typedef unsigned long line __attribute__((vector_size(64)));

extern "C" unsigned long read_lines(const line *lines, long count, long repeats) {
    line a = {}, b = {}, c = {}, d = {};
    for (; repeats > 0; repeats--) {
        for (long i = 0; i < count; i += 4) {
            a += lines[i];
            b += lines[i + 1];
            c += lines[i + 2];
            d += lines[i + 3];
        }
        __asm__ volatile("" ::: "memory");  // so that the compiler reads again what it has read
    }
    a += b + c + d;
    return a[0] + a[1] + a[2] + a[3] + a[4] + a[5] + a[6] + a[7];
}

extern "C" const void *follow(const void *place, long loads) {
    for (; loads > 0; loads--) place = *(const void *const *)place;
    return place;
}
"""
LINE_BYTES, PAGE_BYTES = 64, 4096
CALL_BYTES = 2**24
CALL_LOADS, CALL_LOADS_OF_MEMORY, CACHED_BYTES = 2**15, 2**12, 2**22
"""Of one timed call, which takes 1 ms or so at most: fewer loads from a buffer of more bytes."""
TIME_SHARE = 0.25
"""Of the time of other values: the shortest of a few calls is found sooner than a mean."""
LEVELS = {1: "First", 2: "Second", 3: "Third", 4: "Fourth"}
PAGES = Path("/proc/self/smaps_rollup")
HUGE_SHARE = 0.9
"""The least share of a buffer in huge pages with which misses of the TLB no longer count."""
FASTER = 1.15
"""A cache is more than this many times as fast as memory. A virtual machine's kernel lists the last-level cache of the
host, of which the machine may get little."""
NO_CACHE = "no faster than memory, so no figure of this cache"

Lines: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.intp]]


def caches(setting: Setting) -> Outcomes:
    """One core reads half of each cache, and memory: in order, and as loads each of which needs the one before."""
    library = compiled(SOURCE, "caches", "Caches and latency of memory")
    if isinstance(library, NotRun):
        yield library
        return
    read, follow = library.read_lines, library.follow
    read.argtypes, read.restype = (ctypes.c_void_p, ctypes.c_long, ctypes.c_long), ctypes.c_ulong
    follow.argtypes, follow.restype = (ctypes.c_void_p, ctypes.c_long), ctypes.c_void_p
    core = min(usable_core_numbers())
    with _only_on(core):  # the kernel may otherwise take another core, of other caches or far from this memory
        found = data_caches(core)
        size, note = buffer_bytes(setting, max((cache.size_bytes for cache in found), default=0), 1)
        lines = _lines(size)
        huge = _huge_bytes() > HUGE_SHARE * size
        pages = "in huge pages" if huge else "not all in huge pages: misses of the TLB count"
        speed_of_memory = _read_value("memory", "Memory", read, lines, setting)
        yield speed_of_memory
        latency_of_memory = _latency_value("memory", "Memory", follow, lines, setting)
        yield replace(latency_of_memory, note=f"{note}; {pages}" if note else pages)
        for cache in found:
            half = cache.size_bytes // 2 // PAGE_BYTES * PAGE_BYTES
            if half > size:
                continue
            name, title = f"level{cache.level}", f"{LEVELS[cache.level]}-level cache, {half / 2**10:,.0f} KiB"
            part = lines[: half // LINE_BYTES]
            speed = _read_value(name, title, read, part, setting)
            yield _of_cache(speed, speed.median / speed_of_memory.median)
            latency = _latency_value(name, title, follow, part, setting)
            yield _of_cache(latency, latency_of_memory.median / latency.median)


def _of_cache(value: Value, times_memory: float) -> Value:
    """The value, only recorded if it is no better than that of memory."""
    return value if times_memory > FASTER else replace(value, better="", note=NO_CACHE)


@contextmanager
def _only_on(core: int) -> Iterator[None]:
    """The calling thread runs on this core alone, where the system can say so."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def nodes(setting: Setting) -> Outcomes:
    """One core of each NUMA node copies memory that a thread on each node has touched first; bytes count once.

    The memory of each copy is new, because the kernel may move what the cores of another node use often.
    """
    found = numa_nodes()
    if len(found) < 2:
        reason, enable = "the usable cores are of one NUMA node", "take a machine, or cores, of several"
        yield NotRun("numa", "Copies between NUMA nodes", reason, enable)
        return
    last_levels = [cache.size_bytes for cores in found.values() for cache in data_caches(cores[0])[-1:]]
    size, note = buffer_bytes(setting, max(last_levels, default=0), 2)
    shorter = replace(
        setting, seconds=setting.seconds / len(found), warm_up_seconds=setting.warm_up_seconds / len(found)
    )
    with ExitStack() as stack:
        on = {
            node: stack.enter_context(ThreadPoolExecutor(1, initializer=os.sched_setaffinity, initargs=(0, cores)))
            for node, cores in found.items()
        }
        for to in found:
            target = on[to].submit(_lines, size).result()
            for source in found:
                copy = _copy_of_parts(target, on[source].submit(_lines, size).result())
                speed = rates(CALL_BYTES / 1e9, on[to].submit(call_seconds, copy, shorter).result())
                del copy  # and its memory, before the next
                title = f"Copy from memory of node {source} to node {to}, one core"
                yield Value(f"copy_node{source}_to_node{to}", title, "GB/s", speed, note=note)


def _copy_of_parts(target: Lines, memory: Lines) -> Callable[[], None]:
    """A function each of whose calls copies the next part, so that a call is short and none has its part in a cache."""
    count = CALL_BYTES // LINE_BYTES
    parts = cycle(range(0, len(memory) - count + 1, count))

    def copy() -> None:
        first = next(parts)
        np.copyto(target[first : first + count], memory[first : first + count])

    return copy


def _lines(size: int) -> Lines:
    """Memory in whole lines of a cache; for large arrays NumPy asks for transparent huge pages."""
    words = LINE_BYTES // np.intp().itemsize
    memory = np.empty(size // np.intp().itemsize + words, np.intp)
    first = -memory.ctypes.data % LINE_BYTES // memory.itemsize
    lines = memory[first : first + size // memory.itemsize].reshape(-1, words)
    lines.fill(1)
    return lines


def _huge_bytes() -> int:
    """Of this process's memory, in transparent huge pages; 0 where the kernel does not say."""
    try:
        listed = PAGES.read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 2**10 for line in listed.splitlines() if line.startswith("AnonHugePages:"))


def _read_value(name: str, title: str, read: Callable[[int, int, int], int], lines: Lines, setting: Setting) -> Value:
    """The rate of reads in order: a call reads a small buffer many times, or the next part of a large one."""
    part_bytes = min(lines.nbytes, CALL_BYTES)
    repeats = CALL_BYTES // part_bytes
    last = lines.ctypes.data + lines.nbytes - part_bytes
    parts = cycle(range(lines.ctypes.data, last + 1, part_bytes))
    seconds = _shortest(lambda: read(next(parts), part_bytes // LINE_BYTES, repeats), setting)
    speed = rates(part_bytes * repeats / 1e9, seconds)
    return Value(f"{name}_read_one_core", f"{title}: read, one core", "GB/s", speed)


def _latency_value(name: str, title: str, follow: Callable[[int, int], int], lines: Lines, setting: Setting) -> Value:
    """The time of a load: every line holds the address of another one, and all are one ring in random order."""
    order = np.random.default_rng(0).permutation(len(lines))
    addresses = lines.ctypes.data + LINE_BYTES * order
    lines[order, 0] = np.roll(addresses, -1)
    place, loads = int(addresses[0]), CALL_LOADS if lines.nbytes <= CACHED_BYTES else CALL_LOADS_OF_MEMORY

    def call() -> None:
        nonlocal place
        place = follow(place, loads)

    nanoseconds = [1e9 * one / loads for one in _shortest(call, setting)]
    return Value(f"{name}_latency", f"{title}: latency of a load", "ns", nanoseconds, "lower")


def _shortest(call: Callable[[], object], setting: Setting) -> list[float]:
    """Seconds of the shortest call of each window, after a warm-up: interruptions only make a call longer."""
    windows = []
    for seconds in (setting.warm_up_seconds, *[setting.seconds / setting.windows] * setting.windows):
        shortest, end = math.inf, time.perf_counter() + TIME_SHARE * seconds
        while shortest == math.inf or time.perf_counter() < end:
            began = time.perf_counter()
            call()
            shortest = min(shortest, time.perf_counter() - began)
        windows.append(shortest)
    return windows[1:]
