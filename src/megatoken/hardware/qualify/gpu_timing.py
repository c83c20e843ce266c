"""Timing of work on the first GPU by events around batches of calls; random values.

Random values fill their format's range: a product of zeros draws less power and runs faster.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megatoken.engine.gpus import Gpu
from megatoken.engine.schemes.fp8_weight import E4M3_MAX
from megatoken.hardware.qualify.values import Setting
from megatoken.hardware.specification import data_sheet

DEVICE = torch.device("cuda", 0)
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
MOST_LAUNCHING = 0.5
"""Share of the device's time that the host may need to launch what runs without a CUDA graph."""
SHORT_SECONDS = 50e-6 / MOST_LAUNCHING
"""Of kernels that always run in a graph: some hosts take 15 us to launch one, and 50 in some moments, and gaps between
kernels differ by a microsecond with and without a graph."""
GRAPH_SECONDS, GRAPH_KERNELS = 1e-3, 100
"""A graph takes about the first, and has at least so many kernels: a slow host makes each look long."""
SWING_SECONDS = 1.0
"""The power limit controls a mean of about a second. On an H200 of 700 W, products of fp8 draw 760 W for 0.75 seconds
and then 500 to 600 W; the clock swings with it, by two thirds at first and by a fifth after six seconds.
"""
PIECES = 10
"""Of each window, in turn with those of the others, so that all see the same swing."""
BATCH = 16
E4M3_SPREAD = 90.0
"""Standard deviation of random e4m3 values: the whole range is used and little of it saturates."""


def start() -> Gpu | None:
    """Choose the first GPU and the same random values each time; returns its data sheet. Raises if there is no GPU."""
    torch.cuda.set_device(DEVICE)
    torch.manual_seed(0)
    return data_sheet(torch.cuda.get_device_name(DEVICE))


def device_uuid() -> str:
    """The name by which the driver's own tools know the GPU, whatever CUDA_VISIBLE_DEVICES numbers it."""
    return f"GPU-{torch.cuda.get_device_properties(DEVICE).uuid}"


def gaussian(*shape: int, spread: float = 1.0) -> Tensor:
    """Random bf16."""
    return torch.randn(shape, dtype=BF16, device=DEVICE) * spread


def gaussian_e4m3(rows: int, columns: int) -> Tensor:
    """Random e4m3 over the whole range, made in pieces so that no large bf16 copy of it exists."""
    values = torch.empty(rows, columns, dtype=E4M3, device=DEVICE)
    for first in range(0, rows, 8192):
        piece = values[first : first + 8192]
        piece.copy_(gaussian(*piece.shape, spread=E4M3_SPREAD).clamp_(-E4M3_MAX, E4M3_MAX))
    return values


def timing_event() -> torch.cuda.Event:
    """An event that can be compared with others."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def limited_by_power(setting: Setting) -> Setting:
    """The setting of a value that power limits: whole swings of the clock are left out, and then measured."""
    swings = max(1, round(setting.seconds / SWING_SECONDS))
    warm_up_seconds = max(setting.warm_up_seconds, SWING_SECONDS)
    return replace(setting, warm_up_seconds=warm_up_seconds, seconds=swings * SWING_SECONDS, pieces=PIECES)


def repeat_for(seconds: float, run: Callable[[], Any]) -> tuple[int, float]:
    """Launch ``run`` again and again without a gap, at most two ahead of the device.

    Returns:
        How often, and the seconds that the device took for it; one run before does not count.
    """
    run()
    torch.cuda.synchronize()
    events = [timing_event()]
    events[0].record()
    deadline = time.monotonic() + seconds
    while len(events) == 1 or time.monotonic() < deadline:
        run()
        events.append(timing_event())
        events[-1].record()
        events[max(len(events) - 3, 0)].synchronize()
    events[-1].synchronize()
    return len(events) - 1, events[0].elapsed_time(events[-1]) / 1e3


def gpu_seconds(run: Callable[[], Any], setting: Setting, kernels: int = 1) -> list[float]:
    """Mean seconds of a call, which launches so many kernels, in each window; by events on the device, after a warm-up.

    Gaps between kernels are the device's own: the host launches warm-up and windows ahead, and short kernels, or those
    that it can hardly launch in time, from a CUDA graph.
    """
    launching, each = _launch_and_run_seconds(run)
    if each >= SHORT_SECONDS * kernels and launching < MOST_LAUNCHING * each:
        return _windows(run, each, setting)
    calls = math.ceil(max(GRAPH_SECONDS / each, GRAPH_KERNELS / kernels))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    _, each = _launch_and_run_seconds(graph.replay)
    return [one / calls for one in _windows(graph.replay, each, setting)]


def _windows(run: Callable[[], Any], each: float, setting: Setting) -> list[float]:
    """Mean seconds of a call in each window, where it takes about ``each``.

    There is no gap after the warm-up, in which the clock could rise. The windows take their pieces in turn.
    """
    for _ in range(round(setting.warm_up_seconds / each)):
        run()
    in_window = max(1, round(setting.seconds / setting.windows / each))
    in_piece = max(1, round(in_window / setting.pieces))
    pieces = round(in_window / in_piece)
    events = [timing_event()]
    events[0].record()
    for _ in range(pieces * setting.windows):
        for _ in range(in_piece):
            run()
        events.append(timing_event())
        events[-1].record()
    torch.cuda.synchronize()
    seconds = [first.elapsed_time(second) / 1e3 for first, second in pairwise(events)]
    return [sum(seconds[window :: setting.windows]) / (pieces * in_piece) for window in range(setting.windows)]


def _launch_and_run_seconds(run: Callable[[], Any]) -> tuple[float, float]:
    """Mean seconds that the host needs to launch a call, and the device to run it, of several after a first one."""
    run()
    torch.cuda.synchronize()
    first, last = timing_event(), timing_event()
    began = time.perf_counter()
    first.record()
    for _ in range(BATCH):
        run()
    last.record()
    launched = time.perf_counter()
    last.synchronize()
    return (launched - began) / BATCH, float(first.elapsed_time(last)) / 1e3 / BATCH
