"""Timing of work on the CPU: windows of many calls each."""

from __future__ import annotations

import math
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

from megatoken.hardware.qualify.values import Setting
from megatoken.processes import usable_core_numbers

MOST_CORES = 8


def call_seconds(run: Callable[[], object], setting: Setting) -> list[float]:
    """Mean seconds of a call in each window, after a warm-up.

    A window has as many calls as its share of ``setting.seconds`` has room for, at least one.
    """
    one, began = math.inf, time.perf_counter()
    while one == math.inf or time.perf_counter() - began < setting.warm_up_seconds:
        first = time.perf_counter()
        run()
        one = min(one, time.perf_counter() - first)  # a single call may have waited for a core
    in_window = max(1, round(setting.seconds / setting.windows / max(one, 1e-9)))
    windows = []
    for _ in range(setting.windows):
        began = time.perf_counter()
        for _ in range(in_window):
            run()
        windows.append((time.perf_counter() - began) / in_window)
    return windows


def on_the_best_core(run: Callable[[], object], setting: Setting) -> tuple[list[float], str]:
    """Seconds of a call on whichever of several cores is fastest in each window, and what the slowest core needs.

    What another machine does on the other thread of a core takes up to half of its speed for seconds, so one core says
    little about the machine. Processes that test several GPUs at once choose cores of their own.
    """
    usable, order = sorted(usable_core_numbers()), random.Random(os.getpid())
    cores = order.sample(usable, min(len(usable), MOST_CORES))
    if len(cores) == 1 or not hasattr(os, "sched_setaffinity"):
        return call_seconds(run, setting), ""
    share = setting.seconds / setting.windows / len(cores)
    brief = replace(setting, seconds=share, warm_up_seconds=share / 4, windows=1)
    by_core: dict[int, list[float]] = {core: [] for core in cores}
    try:
        for _ in range(setting.windows):
            for core in order.sample(cores, len(cores)):
                os.sched_setaffinity(0, {core})
                by_core[core] += call_seconds(run, brief)
    finally:
        os.sched_setaffinity(0, usable)
    medians = [statistics.median(seconds) for seconds in by_core.values()]
    note = f"the fastest of {len(cores)} cores; the slowest takes {max(medians) / min(medians):.1f} times as long"
    return [min(window) for window in zip(*by_core.values(), strict=True)], note


def rates(amount: float, seconds: list[float]) -> list[float]:
    """``amount`` of work per call over the seconds that a call took."""
    return [amount / one for one in seconds]
