"""The GPU's tests on a CPU: the same code on small sizes, with the CPU's clock in place of the device's events."""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megatoken.engine.config import SHAPES
from megatoken.hardware.qualify.timing import call_seconds
from megatoken.hardware.qualify.values import NotRun, Outcome, Setting, Value
from stand_in_nvml import StandInNvml

pytest.importorskip("triton")
from megatoken.hardware.qualify import (
    collectives,
    exact,
    facts,
    gpu_copies,
    gpu_kernels,
    gpu_memory,
    gpu_power,
    gpu_products,
    gpu_timing,
)

CPU = torch.device("cpu")


def quick_product(
    x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, weight_scale: torch.Tensor, *, out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> torch.Tensor:  # fmt: skip
    """``torch._scaled_mm``, which some processors with fp8 instructions compute at some MFLOP/s."""
    return ((x.float() @ weight.float()) * x_scale * weight_scale).to(out_dtype)


GPU_SECONDS = gpu_timing.gpu_seconds
"""The real one, for which ``timed`` stands in."""
ASKED: list[tuple[float, int]] = []
"""Seconds of warm-up and kernels of each value that ``timed`` took."""


def timed(run: Callable[[], object], setting: Setting, kernels: int = 1) -> list[float]:
    """``gpu_seconds`` with the CPU's clock, and without a long warm-up."""
    ASKED.append((setting.warm_up_seconds, kernels))
    return call_seconds(run, replace(setting, warm_up_seconds=0.001))


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    modules: list[ModuleType] = [gpu_products, gpu_timing, gpu_memory, gpu_kernels, gpu_power, gpu_copies]
    for module in modules:
        monkeypatch.setattr(module, "DEVICE", CPU, raising=False)
        monkeypatch.setattr(module, "gpu_seconds", timed)
    ASKED.clear()
    for module in (gpu_products, gpu_power, exact):
        monkeypatch.setattr(module, "gpu_obstacle", lambda scheme: None)
    for name in ("set_device", "empty_cache", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *arguments: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch, "_scaled_mm", quick_product)
    small = replace(SHAPES["tiny"], hidden_size=64, intermediate_size=96, heads=2)
    for module in (gpu_products, gpu_power):
        monkeypatch.setattr(module, "SHAPES", {"llama2-70b": small, "llama3.1-8b": small})


def values(run: Callable[[Setting], object], setting: Setting) -> dict[str, Outcome]:
    return {one.name: one for one in run(setting)}  # type: ignore[attr-defined]


def test_products_have_the_bounds_of_the_data_sheet(tiny: Setting) -> None:
    found = values(gpu_products.gemm, tiny)
    assert list(found) == ["gemm_bf16_64", "gemm_fp8_64"]
    bounds = [one.bound.value for one in found.values() if isinstance(one, Value) and one.bound]
    assert bounds == [989.0, 1979.0]
    assert ASKED == [(gpu_timing.SWING_SECONDS, 1)] * 2


def test_layers_of_few_tokens_are_bound_by_bytes(tiny: Setting) -> None:
    found = values(gpu_products.layer_products, tiny)
    assert {name.removeprefix("layer_products_fp8_") for name in found} == {
        f"{shape}_{tokens}" for shape in ("llama2-70b", "llama3.1-8b") for tokens in (64, 1536)
    }
    few, many = (found[f"layer_products_fp8_llama2-70b_{tokens}"] for tokens in (64, 1536))
    assert isinstance(few, Value) and isinstance(many, Value) and few.bound and many.bound
    assert few.bound.value < many.bound.value < 1979.0
    assert ASKED == [(gpu_timing.SWING_SECONDS, gpu_products.LAYERS * 4)] * 4


def test_each_product_of_a_layer_has_a_rate_and_its_own_bound(tiny: Setting) -> None:
    found = values(gpu_products.one_by_one, tiny)
    assert list(found) == [
        f"product_{precision}_{product.name}_{tokens}"
        for precision in ("bf16", "fp8")
        for product in gpu_products.products_of(SHAPES["tiny"])
        for tokens in (64, 1536)
    ]
    assert [(gpu_timing.SWING_SECONDS, gpu_products.LAYERS)] * len(found) == ASKED
    bounds = {name: one.bound.value for name, one in found.items() if isinstance(one, Value) and one.bound}
    assert len(bounds) == len(found)
    for name, bound in bounds.items():
        assert bound <= (989.0 if "bf16" in name else 1979.0) and bounds[name.replace("_64", "_1536")] >= bound
        assert bound <= bounds[name.replace("bf16", "fp8")]


def test_zeros_are_zeros_and_the_ratio_is_of_both_rates(tiny: Setting) -> None:
    weights = gpu_products.Weights("tensor", gpu_products.products_of(SHAPES["tiny"])[:1], 1, equal=0.0)
    assert not weights.values[0][0].float().any() and not weights.call(0, 16)(0).any()
    found = values(gpu_products.zeros, tiny)
    assert list(found) == ["gemm_fp8_random", "gemm_fp8_zeros", "gemm_fp8_ones", "random_over_zeros"]
    random, zero, ratio = (found[name] for name in ("gemm_fp8_random", "gemm_fp8_zeros", "random_over_zeros"))
    assert isinstance(random, Value) and isinstance(zero, Value) and isinstance(ratio, Value)
    assert ratio.windows[0] == pytest.approx(random.windows[0] / zero.windows[0])
    assert [one.bound and one.bound.value for one in (random, zero)] == [1979.0] * 2


def test_products_in_other_formats_are_rated_and_int8_is_exact(tiny: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_products, "gpu_seconds", lambda run, setting: [run() is None or 1e-3])
    found = values(gpu_products.formats, tiny)
    assert list(found) == ["gemm_fp32_64", "gemm_tf32_64", "gemm_fp8_row_64", "gemm_int8_64", "exact_int8"]
    tf32, wrong = found["gemm_tf32_64"], found["exact_int8"]
    assert isinstance(tf32, Value) and tf32.bound and tf32.bound.value == 494.5
    assert isinstance(wrong, Value) and wrong.windows == [0]


@pytest.mark.parametrize(("now", "missing"), [(5, 0), (3, 2), (None, None)])
def test_a_link_to_the_host_below_its_generation_is_counted(
    now: int | None, missing: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", StandInNvml(CurrPcieLinkGeneration=now))
    monkeypatch.setattr(gpu_copies, "device_uuid", lambda: "GPU-0")
    assert gpu_copies._generations_missing(gpu_copies._gpu()) == missing


def test_a_gpu_without_a_link_that_the_others_have_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    library = StandInNvml()
    answer = library.nvmlDeviceGetFieldValues
    monkeypatch.setattr(
        library,
        "nvmlDeviceGetFieldValues",
        lambda gpu, wanted: _fewer_links(answer(gpu, wanted), wanted, gpu),
        raising=False,
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    (links,) = collectives._links(2)
    assert isinstance(links, Value) and (links.windows, links.note) == ([2], "GPU 1 lacks 2")


def _fewer_links(answers: list[Any], wanted: list[Any], gpu: int) -> list[Any]:
    for answer, field in zip(answers, wanted, strict=True):
        if field == 91 and gpu == 1:
            answer.value.dVal = 16
    return answers


def test_copies_by_node_take_memory_of_each_node_and_check_the_data(
    tiny: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *_ = cores = sorted(os.sched_getaffinity(0))
    nodes = {0: [first], 1: [cores[-1]]}
    taken: list[tuple[set[int], int]] = []
    empty = torch.empty

    def pinned(*sizes: int, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        memory = empty(*sizes, **options)
        if pin_memory:
            taken.append((os.sched_getaffinity(0), memory.data_ptr()))
        return memory

    monkeypatch.setattr(gpu_copies, "numa_nodes", lambda: nodes)
    monkeypatch.setattr(gpu_copies, "_link", lambda: None)
    monkeypatch.setattr(torch, "empty", pinned)
    found = values(gpu_copies.copies_by_node, tiny)
    assert [cores for cores, _ in taken] == [{first}, {cores[-1]}]
    assert taken[0][1] != taken[1][1], "memory of two nodes is not the same"
    assert sorted(os.sched_getaffinity(0)) == cores
    assert list(found) == [
        *("copy_from_gpu_node0", "copy_to_gpu_node0", "copy_from_gpu_node1", "copy_to_gpu_node1"),
        "copy_errors_of_nodes",
    ]
    wrong = found["copy_errors_of_nodes"]
    assert isinstance(wrong, Value) and wrong.windows == [0]


def test_the_slowest_pair_of_gpus_is_rated_and_slow_ones_are_named(
    tiny: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, seconds, windows = torch.device, [], []

    def of_pair(copies: list[tuple[torch.Tensor, torch.Tensor]], setting: Setting) -> list[float]:
        for target, source in copies:
            target.copy_(source)
        pair = len(seconds) // 2
        both = len(copies) == 2
        rate = {0: 200.0, 4: 383.0}.get(pair, 397.0) if not both else {5: 400.0}.get(pair, 790.0)
        windows.append(setting.seconds)
        seconds.append(len(copies) * source.nbytes / 1e9 / rate)
        return [seconds[-1]] * 3

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda first, second: (first, second) != (2, 3))
    monkeypatch.setattr(gpu_copies.torch, "device", lambda *name: device("cpu"))
    monkeypatch.setattr(gpu_copies, "_seconds", of_pair)
    monkeypatch.setattr(gpu_copies, "_facts", lambda: {"nvlinks": 18})
    found = {name: one for name, one in values(gpu_copies.pairs, tiny).items() if isinstance(one, Value)}
    assert sum(windows) == pytest.approx(2 * tiny.seconds), "all pairs share the time"
    one_way, both = found["p2p_one_way"], found["p2p_both_ways"]
    assert (one_way.median, one_way.note) == (pytest.approx(200.0), "GPUs 0-1")
    assert (both.median, both.note) == (pytest.approx(400.0), "GPUs 2-3")
    assert found["p2p_slow_pairs"].windows == [2]
    assert found["p2p_slow_pairs"].note == "GPUs 0-1: 200 GB/s, one direction; GPUs 2-3: 400 GB/s, both directions"
    behind = found["p2p_pairs_behind"]
    assert (behind.windows, behind.better, behind.note) == ([1], "rare", "GPUs 1-3: 383 GB/s, one direction")
    assert (found["p2p_indirect"].windows, found["p2p_indirect"].note) == ([1], "GPUs 2-3")
    assert found["p2p_errors"].windows == [0]


def test_memory_is_rated_by_the_bytes_of_each_pattern(tiny: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "gpu_seconds", lambda run, setting: [run() or 1e-3])
    found = values(gpu_memory.hbm, replace(tiny, buffer_bytes=2**16))
    rates = {name: one.median for name, one in found.items() if isinstance(one, Value)}
    one = 2**16 / 1e9 / 1e-3
    assert rates == pytest.approx({"hbm_read": one, "hbm_write": one, "hbm_copy": 2 * one, "hbm_triad": 3 * one})
    first = found["hbm_read"]
    assert isinstance(first, Value) and first.bound and first.bound.value == 4800.0


def test_kernels_of_the_engine_run(tiny: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SEQUENCES": 2, "CONTEXT": 64, "HEADS": 8, "HEAD_DIM": 32, "PROMPTS": 1}.items():
        monkeypatch.setattr(gpu_kernels, name, value)
    for name, value in {"KV_HEADS": 1, "TOKENS": 2, "HIDDEN": 64, "FEED_FORWARD": 64, "PROMPT_TOKENS": 32}.items():
        monkeypatch.setattr(gpu_kernels, name, value)
    monkeypatch.setattr(gpu_kernels, "gpu_seconds", lambda run, setting: [run() is None or 1e-3])
    assert list(values(gpu_kernels.kernels, tiny)) == [
        "decode_attention",
        "prompt_attention",
        "add_rms_norm",
        "silu_mul",
    ]


def test_exact_products_in_fp8_and_bf16_are_exact(tiny: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.device
    monkeypatch.setattr(exact.torch, "device", lambda *name: real("cpu"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**16, 2**20))
    found = values(exact.on_gpu, tiny)
    right = {name: one.windows for name, one in found.items() if isinstance(one, Value) and one.better == "zero"}
    assert list(right) == ["exact_bf16", "repeat_bf16", "exact_fp8", "repeat_fp8", "memory_pattern"]
    assert list(right.values()) == [[0]] * 5
    digests = [one.windows for one in found.values() if isinstance(one, Value) and one.better == "same"]
    assert len(digests) == 2 and digests[0] != digests[1]
    assert digests == [one.windows for one in values(exact.on_gpu, tiny).values() if one.name.startswith("digest")]


def test_a_digest_shows_each_bit_and_each_place() -> None:
    values = torch.randn(8, 16).bfloat16()
    right = exact.digest(values)
    assert 0 <= right < 2**32 and exact.digest(values.clone()) == right
    flipped, exchanged = values.clone(), values.clone()
    for bit in range(16):
        flipped.view(torch.int16)[3, 5] ^= -(2**15) if bit == 15 else 1 << bit
        assert exact.digest(flipped) != right
        flipped.copy_(values)
    exchanged[0, 0], exchanged[7, 15] = values[7, 15], values[0, 0]
    assert exact.digest(exchanged) != right


@pytest.mark.parametrize(("size", "text"), [(2**28, "0.25"), (126 * 2**30, "126")])
def test_the_size_of_the_pattern_has_no_exponent(size: int, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "_pieces", lambda buffer, seed: iter(()))
    monkeypatch.setattr(exact.torch, "empty", lambda *sizes, **_: torch.zeros(1, dtype=torch.int32))
    assert exact.memory_pattern(size, CPU).title == f"Pattern in {text} GiB of memory"


@pytest.mark.parametrize(
    ("reasons", "words"),
    [(0x4, ""), (0x4 | 0x20, "heat (driver)"), (0x48, "hardware slow-down, heat (hardware)")],
)
def test_a_power_cap_is_no_slow_down_but_heat_is(
    reasons: int, words: str, tiny: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = StandInNvml(CurrentClocksEventReasons=reasons)
    found = _power(library, tiny, monkeypatch)
    slow, rate = found["slow_down"], found["sustained_tflops"]
    assert isinstance(rate, Value) and rate.bound and rate.bound.value == 1979.0
    assert isinstance(slow, Value)
    assert (slow.note, slow.windows) == (words, [len(list(filter(None, words.split(", "))))])


def test_pulses_are_rated_one_by_one(tiny: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_power, "repeat_for", lambda seconds, run: (run() is None and 2, 0.5))
    rate = values(gpu_power.pulse, tiny)["pulse_tflops"]
    assert isinstance(rate, Value) and len(rate.windows) == gpu_power.PULSES
    assert rate.bound and rate.bound.value == 1979.0


def test_a_device_without_its_memory_and_lanes_is_found(tiny: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    library = StandInNvml(CurrPcieLinkWidth=8, RemappedRows=(1, 1, 1, 0))
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(gpu_timing, "device_uuid", lambda: "GPU-0")
    found = values(facts.on_gpu, tiny)
    wrong = {name: one.windows[0] for name, one in found.items() if isinstance(one, Value) and one.windows[0]}
    assert wrong == {"rows_pending": 1, "lanes_missing": 8, "rows_remapped": 2}
    recorded = [name for name, one in found.items() if isinstance(one, Value) and not one.better]
    assert recorded == ["ecc_corrected", "rows_remapped", "pcie_replays"]


@pytest.mark.parametrize(("device", "expected"), [("PCI:0000:19:00", [1]), ("PCI:0000:3b:00", [0])])
def test_critical_errors_in_the_log_count_if_they_are_of_this_gpu_and_of_hardware(
    device: str, expected: list[int], tiny: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = StandInNvml(PciInfo=SimpleNamespace(busId="00000000:19:00.0"))
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(gpu_timing, "device_uuid", lambda: "GPU-0")
    log = [{"seconds": 1.0, "device": device, "xid": xid} for xid in (79, 31)]
    monkeypatch.setattr(facts, "logged_xids", lambda: log)
    logged = values(facts.on_gpu, tiny)["xids_logged"]
    assert isinstance(logged, Value) and (logged.windows, logged.better) == (expected, "rare")
    assert logged.note == ("XID 79" if expected == [1] else "")


def _briefly(seconds: float, run: Callable[[], object]) -> tuple[int, float]:
    run()
    time.sleep(0.15)
    return 1, 0.15


def _power(library: StandInNvml, tiny: Setting, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(gpu_power, "repeat_for", _briefly)
    monkeypatch.setattr(gpu_power, "device_uuid", lambda: "GPU-0")
    return values(gpu_power.power, tiny)


def test_without_nvml_the_rate_is_measured_and_power_is_not_run(tiny: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_power, "repeat_for", lambda seconds, run: (run(), 1.0))
    monkeypatch.setattr(gpu_power, "device_uuid", lambda: "GPU-0")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    rate, power = list(gpu_power.power(tiny))
    assert isinstance(rate, Value) and rate.median > 0
    assert isinstance(power, NotRun) and power.reason == "NVML does not know GPU-0"


class StandInGraph:
    """Counts the calls that are captured."""

    calls = 0

    def replay(self) -> None:
        """The calls as one."""


@pytest.mark.parametrize(
    ("launching", "each", "calls"),
    [(2e-5, 1e-3, 0), (6e-4, 1e-3, 10), (2e-5, 1e-4, 10), (2e-5, 2e-5, 50), (2e-5, 9e-4, 10)],
)
def test_what_the_host_can_hardly_launch_in_time_is_captured(
    launching: float, each: float, calls: int, tiny: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten kernels a call: as they are, or short ones and those of a slow host in a graph of 100 kernels or more."""
    captured: list[int] = []
    monkeypatch.setattr(gpu_timing, "_launch_and_run_seconds", lambda run: (launching, each))
    monkeypatch.setattr(gpu_timing, "_windows", lambda run, each, setting: [each * max(1, len(captured))])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", StandInGraph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: nullcontext())
    assert GPU_SECONDS(lambda: captured.append(1), tiny, kernels=10) == [pytest.approx(each)]
    assert len(captured) == calls


class StandInEvent:
    """Reads a clock that each call moves on by its seconds."""

    now = 0.0

    def record(self) -> None:
        self.at = StandInEvent.now

    def synchronize(self) -> None:
        """All has run."""

    def elapsed_time(self, other: StandInEvent) -> float:
        return 1e3 * (other.at - self.at)


def test_windows_begin_without_a_gap_after_the_warm_up(tiny: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def run() -> None:
        done.append("call")
        StandInEvent.now += 0.001

    monkeypatch.setattr(gpu_timing, "timing_event", StandInEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("wait"))
    setting = replace(tiny, warm_up_seconds=0.05, seconds=0.03, windows=3)
    assert gpu_timing._windows(run, 0.001, setting) == [pytest.approx(0.001)] * 3
    assert done == ["call"] * (50 + 3 * 10) + ["wait"]


def test_windows_in_pieces_all_see_the_same_swing_of_the_clock(tiny: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls get slower and faster again by 8 %, once in the time of all windows."""
    calls = 700

    def run() -> None:
        StandInEvent.now += 0.001 * (1 + 0.04 * math.sin(2 * math.pi * StandInEvent.now / (calls * 0.001)))

    monkeypatch.setattr(gpu_timing, "timing_event", StandInEvent)
    monkeypatch.setattr(StandInEvent, "now", 0.0)
    setting = replace(tiny, warm_up_seconds=0.0, seconds=0.7, windows=7)
    in_pieces = replace(setting, pieces=gpu_timing.PIECES)
    whole, pieces = (gpu_timing._windows(run, 0.001, one) for one in (setting, in_pieces))
    assert max(whole) / min(whole) > 1.05 and max(pieces) / min(pieces) < 1.01
    assert statistics.mean(pieces) == pytest.approx(statistics.mean(whole), rel=0.002)
    few = gpu_timing._windows(run, 0.03, in_pieces)  # three calls a window
    assert len(few) == 7 and statistics.mean(few) == pytest.approx(0.001, rel=0.05)


@pytest.mark.parametrize("each", [0.0004, 0.0118, 0.016])
def test_windows_of_what_power_limits_last_whole_swings(
    each: float, tiny: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever the load began in the swing, the mean is the same, also where a window has few calls."""
    found = []
    for phase in (0.0, 0.25, 0.5, 0.75):

        def run(phase: float = phase) -> None:
            StandInEvent.now += each * (1 + 0.04 * math.sin(2 * math.pi * (StandInEvent.now + phase)))

        monkeypatch.setattr(gpu_timing, "timing_event", StandInEvent)
        monkeypatch.setattr(StandInEvent, "now", 0.0)
        setting = gpu_timing.limited_by_power(replace(tiny, seconds=0.7, windows=7))
        assert (setting.warm_up_seconds, setting.seconds) == (1.0, 1.0)
        found += [statistics.mean(gpu_timing._windows(run, each, setting))]
    assert max(found) / min(found) < 1.002
