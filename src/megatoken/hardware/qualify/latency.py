"""What the CPU makes work wait: starts of operations, threads that wake each other, sleeps that end late."""

from __future__ import annotations

import os
import threading
import time

import torch

from megatoken.hardware.qualify.timing import call_seconds
from megatoken.hardware.qualify.values import Outcomes, Setting, Value

SLEEP_SECONDS = 1e-3


@torch.inference_mode()
def latency(setting: Setting) -> Outcomes:
    """An operation on one number, a round trip between two threads, and sleeps of a millisecond."""
    one = torch.ones(1)
    seconds = call_seconds(lambda: one.add_(1.0), setting)
    yield Value("operation_start", "Start of one PyTorch operation", "us", _microseconds(seconds), "lower")
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
