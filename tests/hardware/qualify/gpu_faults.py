"""Tests of a real GPU in which something is wrong, called in processes of their own by the tests of qualify."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from qualify_faults import flip_weight_between_passes, flip_while_idle

from megatoken.hardware.qualify import collectives, engine_answers, exact, facts, gpu_copies, gpu_power, gpu_products
from megatoken.hardware.qualify.values import Outcomes, Setting, Value
from stand_in_nvml import StandInNvml

EXTRA_CYCLES = 200_000  # 0.1 ms, about as long as a product of side 4,096
UUID = "GPU-0"  # of the stand-in's first GPU
THERMAL_SLOW_DOWN = 0x20


def slow_products(setting: Setting) -> Outcomes:
    """Products on a GPU whose clock is about half of what it should be: each is followed by as long a wait."""
    timed = gpu_products.gpu_seconds

    def slowly(run: Callable[[], Any], setting: Setting) -> list[float]:
        return timed(lambda: (run(), torch.cuda._sleep(EXTRA_CYCLES)), setting)

    gpu_products.gpu_seconds = slowly
    yield from gpu_products.gemm(setting)


def products(setting: Setting) -> Outcomes:
    """Products without a fault."""
    yield from gpu_products.gemm(setting)


def throttled(setting: Setting) -> Outcomes:
    """A real load on a GPU that says it is too hot."""
    gpu_power.device_uuid = lambda: UUID
    sys.modules["pynvml"] = StandInNvml(CurrentClocksEventReasons=THERMAL_SLOW_DOWN)  # type: ignore[assignment]
    yield from gpu_power.power(setting)


def missing_lanes(setting: Setting) -> Outcomes:
    """Half of the lanes to the host, and a row of memory that waits for its replacement."""
    from megatoken.hardware.qualify import gpu_timing

    gpu_timing.device_uuid = lambda: UUID
    library = StandInNvml(CurrPcieLinkWidth=8, RemappedRows=(1, 1, 1, 0))
    sys.modules["pynvml"] = library  # type: ignore[assignment]
    yield from facts.on_gpu(setting)


def missing_links(setting: Setting) -> Outcomes:
    """Two GPUs of which the second has two links fewer."""
    library = StandInNvml()
    answer = library.nvmlDeviceGetFieldValues

    def fewer(gpu: int, wanted: list[Any]) -> list[Any]:
        answers = answer(gpu, wanted)
        for one, field in zip(answers, wanted, strict=True):
            if field == 91 and gpu == 1:
                one.value.dVal = 16
        return answers

    library.nvmlDeviceGetFieldValues = fewer  # type: ignore[method-assign]
    sys.modules["pynvml"] = library  # type: ignore[assignment]
    yield from collectives._links(2)


def flipped_product(setting: Setting) -> Outcomes:
    """One wrong bit in each product in fp8."""
    multiply = torch._scaled_mm

    def wrong(*arguments: Any, **options: Any) -> torch.Tensor:
        result = multiply(*arguments, **options)
        result.view(torch.int16)[17, 5] ^= 1 << 13
        return result

    torch._scaled_mm = wrong
    yield from exact.on_gpu(setting)


def flipped_repeat(setting: Setting) -> Outcomes:
    """The last bit of one element differs in one of several products of the same random numbers in bf16."""
    multiply, calls = torch.mm, [0]
    exact_calls = max(1, setting.repeats // 8)

    def wrong_once(*arguments: Any, **options: Any) -> torch.Tensor:
        result = multiply(*arguments, **options)
        calls[0] += 1
        if calls[0] == exact_calls + 3:
            result.view(torch.int16)[2, 3] ^= 1
        return result

    torch.mm = wrong_once  # type: ignore[assignment]
    yield from exact.on_gpu(setting)


def flipped_memory(setting: Setting) -> Outcomes:
    """One bit of the GPU's memory changes after it was written."""
    fill = exact.fill_pattern

    def fill_and_flip(buffer: torch.Tensor, seed: int) -> None:
        fill(buffer, seed)
        buffer[123_456] ^= 1 << 30

    exact.fill_pattern = fill_and_flip
    yield exact.memory_pattern(setting.pattern_bytes, torch.device("cuda", 0))


def lost_while_idle(setting: Setting) -> Outcomes:
    """One bit of the GPU's memory changes while it has no work."""
    flip_while_idle()
    yield from exact.idle_memory(setting)


def flipped_weight(setting: Setting) -> Outcomes:
    """One bit of a weight changes between two passes of the same prompts, which then have other answers."""
    flip_weight_between_passes()
    yield from engine_answers.on_gpu(setting)


def flipped_copy(setting: Setting) -> Outcomes:
    """One bit changes on the way to the host and back."""
    compare = gpu_copies.different_elements

    def flip_and_compare(first: torch.Tensor, second: torch.Tensor) -> int:
        second[3] ^= 1
        return compare(first, second)

    gpu_copies.different_elements = flip_and_compare
    yield from gpu_copies.copies(setting)


def hanging_kernel(setting: Setting) -> Outcomes:
    """A kernel that runs for days, after a first value."""
    yield Value("rate", "Rate", "GB/s", [100.0])
    torch.cuda.init()
    torch.cuda._sleep(10**15)
    torch.cuda.synchronize()


def crashing_kernel(setting: Setting) -> Outcomes:
    """A kernel that reads where it must not, after a first value."""
    yield Value("rate", "Rate", "GB/s", [100.0])
    torch.zeros(4, device="cuda")[torch.tensor([10**9], device="cuda")].sum().item()
