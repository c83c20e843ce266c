"""Timing of work on the CPU: windows of many calls each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from megatoken.hardware.qualify.values import Setting


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


def rates(amount: float, seconds: list[float]) -> list[float]:
    """``amount`` of work per call over the seconds that a call took."""
    return [amount / one for one in seconds]
