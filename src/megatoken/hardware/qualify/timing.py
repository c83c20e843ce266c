"""Timing of work on the CPU: windows of many calls each."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from megatoken.hardware.qualify.values import Setting


def call_seconds(run: Callable[[], object], setting: Setting) -> list[float]:
    """Mean seconds of a call in each window, after a warm-up.

    A window has as many calls as its share of ``setting.seconds`` has room for, at least one.
    """
    last = _calls_until(run, time.perf_counter() + setting.warm_up_seconds)[-1]
    in_window = max(1, round(setting.seconds / setting.windows / max(last, 1e-9)))
    windows = []
    for _ in range(setting.windows):
        began = time.perf_counter()
        for _ in range(in_window):
            run()
        windows.append((time.perf_counter() - began) / in_window)
    return windows


def undisturbed_seconds(run: Callable[[], object], setting: Setting) -> list[float]:
    """Seconds of a call that little else disturbs: in each window, what a tenth of the calls stay below.

    For calls of microseconds, whose mean is that of a few which waited for something else.
    """
    _calls_until(run, time.perf_counter() + setting.warm_up_seconds)
    windows = []
    for _ in range(setting.windows):
        calls = _calls_until(run, time.perf_counter() + setting.seconds / setting.windows)
        windows.append(float(np.percentile(calls, 10)))
    return windows


def _calls_until(run: Callable[[], object], end: float) -> list[float]:
    """Seconds of each call; at least one is made."""
    calls: list[float] = []
    before = time.perf_counter()
    while not calls or before < end:
        run()
        now = time.perf_counter()
        calls.append(now - before)
        before = now
    return calls


def rates(amount: float, seconds: list[float]) -> list[float]:
    """``amount`` of work per call over the seconds that a call took."""
    return [amount / one for one in seconds]
