"""Tests that go wrong in every way or end soon, called in processes of their own by the tests of qualify."""

from __future__ import annotations

import math
import os
import signal
import time

import torch

from megatoken.engine import Completion, Engine, Request
from megatoken.errors import CapacityError
from megatoken.hardware.core_wait import CoreWait
from megatoken.hardware.qualify import cpu_tests, engine_answers, exact
from megatoken.hardware.qualify.host_tests import disk
from megatoken.hardware.qualify.timing import call_seconds, rates
from megatoken.hardware.qualify.values import Bound, NotRun, Outcomes, Setting, Value


def steady(setting: Setting) -> Outcomes:
    """A rate and an error count without a fault, and the tests before."""
    yield Value("rate", "Rate", "GB/s", [100.0, 101.0, 99.0], bound=Bound(200.0, "data sheet"))
    yield Value("errors", "Errors", "errors", [0], "zero")
    yield Value("measured_before", "Values measured before", "values", [len(setting.measured)], "")


def one_layer(setting: Setting) -> Outcomes:
    """The products of one layer in place of eight."""
    cpu_tests.LAYERS = 1
    yield from cpu_tests.layer_products(setting)


def real_disk(setting: Setting) -> Outcomes:
    """The disk that the tests run on."""
    yield from disk(setting)


def slow_disk(setting: Setting) -> Outcomes:
    """The same disk, each of whose reads takes 20 ms longer."""
    read = os.preadv

    def slowly(*arguments: object) -> int:
        time.sleep(0.02)
        return read(*arguments)  # type: ignore[arg-type]

    os.preadv = slowly
    yield from disk(setting)


def share_of_the_rate(setting: Setting) -> Outcomes:
    """Half of what another test has measured before."""
    bound = Bound(setting.measured["rate"], "rate, measured", certain=False)
    yield Value("part", "Part", "GB/s", [40.0] * 3, bound=bound)


def busy_core(setting: Setting) -> Outcomes:
    """Counts on one core, for as long as the setting says."""
    yield Value("count", "Counting", "GFLOP/s", rates(1.0, call_seconds(lambda: sum(range(10_000)), setting)))


def by_gpu(setting: Setting) -> Outcomes:
    """The rate of the GPU that this process sees; the third is slower than the others."""
    visible = os.environ["CUDA_VISIBLE_DEVICES"]
    yield Value("rate", "Rate", "GB/s", [80.0 if visible == "2" else 100.0 + int(visible)] * 3)


def digest_by_gpu(setting: Setting) -> Outcomes:
    """A product of the same random numbers on each GPU; on the second one, one bit of it is wrong."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(64, 64, generator=generator) for _ in range(2))
    product = (left @ right).bfloat16()
    if os.environ["CUDA_VISIBLE_DEVICES"] == "1":
        product.view(torch.int16)[3, 7] ^= 1
    yield exact.digest_of(product, "bf16")


def together(setting: Setting) -> Outcomes:
    """A test of all GPUs at once."""
    yield Value(
        "all_gpus", "All", "GPUs", [float(len(os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(",")))], ""
    )


def slow(setting: Setting) -> Outcomes:
    """The same rate on a slower machine."""
    yield Value("rate", "Rate", "GB/s", [60.0, 61.0, 59.0], bound=Bound(200.0, "data sheet"))


def impossible(setting: Setting) -> Outcomes:
    """Above its bound: an error of units."""
    yield Value("rate", "Rate", "GB/s", [2000.0], bound=Bound(200.0, "data sheet"))


def not_run(setting: Setting) -> Outcomes:
    """Says why."""
    yield NotRun("rate", "Rate", "no such device", "plug one in")


def no_room(setting: Setting) -> Outcomes:
    """Raises what the engine raises where a model does not fit."""
    raise CapacityError("model does not fit; take a smaller one")
    yield


def no_room_for_more(setting: Setting) -> Outcomes:
    """The first value fits into memory, the second does not."""
    yield Value("errors", "Errors", "errors", [0], "zero")
    raise MemoryError


def no_room_for_a_tensor(setting: Setting) -> Outcomes:
    """Asks PyTorch for more than a processor can address."""
    yield Value("errors", "Errors", "errors", [0], "zero")
    torch.empty(2**50)


def no_windows(setting: Setting) -> Outcomes:
    """A value that was never measured."""
    yield Value("rate", "Rate", "GB/s", [])


def broken(setting: Setting) -> Outcomes:
    """Fails after its first value."""
    yield Value("rate", "Rate", "GB/s", [100.0])
    raise RuntimeError("illegal memory access")


def hang(setting: Setting) -> Outcomes:
    """Never returns after its first value."""
    yield Value("rate", "Rate", "GB/s", [100.0])
    time.sleep(1000)


def crash(setting: Setting) -> Outcomes:
    """Ends like a kernel that reads where it must not."""
    yield Value("rate", "Rate", "GB/s", [100.0])
    os.kill(os.getpid(), signal.SIGSEGV)


def flipped_product(setting: Setting) -> Outcomes:
    """One wrong bit in each product of one depth, of whole numbers."""
    multiply = torch.mm

    def wrong(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        result = multiply(a, b)
        if len(b) == exact.DEPTH:
            result.view(torch.int32)[17, 5] ^= 1 << 23
        return result

    torch.mm = wrong  # type: ignore[assignment]
    yield from exact.on_cpu(setting)


def flipped_repeat(setting: Setting) -> Outcomes:
    """The last bit of one element differs in one of several products of the same random numbers."""
    multiply, calls = torch.mm, [0]

    def wrong_once(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        result = multiply(a, b)
        if len(b) != exact.DEPTH:
            calls[0] += 1
            if calls[0] == 3:
                result.view(torch.int32)[2, 3] ^= 1
        return result

    torch.mm = wrong_once  # type: ignore[assignment]
    yield from exact.on_cpu(setting)


def flipped_memory(setting: Setting) -> Outcomes:
    """One bit of memory changes after it was written."""
    fill = exact.fill_pattern

    def fill_and_flip(buffer: torch.Tensor, seed: int) -> None:
        fill(buffer, seed)
        buffer[12_345] ^= 1 << 30

    exact.fill_pattern = fill_and_flip
    yield from exact.on_cpu(setting)


def flipped_inverse(setting: Setting) -> Outcomes:
    """One cell of memory keeps its bit when all are inverted."""
    count = exact.wrong_words

    def keep_and_count(buffer: torch.Tensor, seed: int, *, inverted: bool = False) -> int:
        if inverted:
            buffer[777] ^= 1
        return count(buffer, seed, inverted=inverted)

    exact.wrong_words = keep_and_count
    yield from exact.on_cpu(setting)


def kept_memory(setting: Setting) -> Outcomes:
    """A pattern in memory of the processor that stays as it is."""
    yield exact.kept_pattern(setting.pattern_bytes, torch.device("cpu"), setting.idle_seconds)


def lost_while_idle(setting: Setting) -> Outcomes:
    """One bit of memory changes while nothing happens."""
    flip_while_idle()
    yield from kept_memory(setting)


def flip_while_idle() -> None:
    """A bit of the pattern, in place of the wait."""
    fill, kept = exact.fill_pattern, []

    def fill_and_keep(buffer: torch.Tensor, seed: int) -> None:
        fill(buffer, seed)
        kept.append(buffer)

    def sleep(seconds: float) -> None:
        kept[0][4_321] ^= 1 << 7

    exact.fill_pattern, exact.time.sleep = fill_and_keep, sleep  # type: ignore[attr-defined]


def sleeps_a_second(setting: Setting) -> Outcomes:
    """Takes a second in which no core works."""
    time.sleep(1.0)
    yield Value("errors", "Errors", "errors", [0], "zero")


def flipped_weight(setting: Setting) -> Outcomes:
    """One bit of an exponent in the last norm changes between two passes of the same prompts."""
    flip_weight_between_passes()
    yield from engine_answers.on_cpu(setting)


def flip_weight_between_passes() -> None:
    """In this process, and so that the weight is sixteen times smaller."""
    generate, passes = Engine.generate, []

    def flip_and_generate(engine: Engine, requests: list[Request]) -> list[Completion]:
        if passes:
            norm = engine._runner._weights.norm_D  # type: ignore[attr-defined]
            if norm.element_size() == 4:
                norm.view(torch.int32)[17] ^= 1 << 25
            else:
                norm.view(torch.int16)[17] ^= 1 << 9
        passes.append(len(requests))
        return generate(engine, requests)

    Engine.generate = flip_and_generate  # type: ignore[assignment, method-assign]


def slow_once(setting: Setting) -> Outcomes:
    """Slow when it runs first, and then as fast as always."""
    mark = setting.folder / "ran before"
    rate = 100.0 if mark.exists() else 60.0
    mark.touch()
    yield Value("rate", "Rate", "GB/s", [rate, rate, rate])


def slow_for_runs(setting: Setting, runs: float, noise: float = 1.0) -> Outcomes:
    """Slow in so many runs and then as fast as always; cores that other tests take do not count."""
    CoreWait.share = lambda self: 0.0  # type: ignore[method-assign] # in this process alone
    before = len(list(setting.folder.glob("run *")))
    (setting.folder / f"run {before}").touch()
    rate = 60.0 if before < runs else 100.0
    yield Value("rate", "Rate", "GB/s", [rate, rate + noise, rate - noise])


def slow_four_times(setting: Setting) -> Outcomes:
    """Slow while another machine works on the same host."""
    yield from slow_for_runs(setting, 4)


def slow_always(setting: Setting) -> Outcomes:
    """Slow by itself."""
    yield from slow_for_runs(setting, math.inf)


def noisy_four_times(setting: Setting) -> Outcomes:
    """Slow while another machine works on the same host, and noisy."""
    yield from slow_for_runs(setting, 4, noise=8.0)


def noisy_always(setting: Setting) -> Outcomes:
    """Slow by itself on a noisy machine."""
    yield from slow_for_runs(setting, math.inf, noise=8.0)
