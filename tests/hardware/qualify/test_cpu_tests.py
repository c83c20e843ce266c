"""Tests of the CPU's memory and caches: sizes by what the kernel reports of the processor, and what is measured."""

import ctypes
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatoken.engine.ops import cpu
from megatoken.hardware import inventory
from megatoken.hardware.qualify import catalog, cpu_memory, cpu_tests, processor
from megatoken.hardware.qualify.catalog import CPU_QUICK, TESTS, choose
from megatoken.hardware.qualify.cpu_memory import caches, nodes
from megatoken.hardware.qualify.cpu_tests import memory
from megatoken.hardware.qualify.values import NotRun, Setting, Value
from megatoken.hardware.topology import Cache

MEBIBYTE = 2**20


@pytest.fixture
def two_dies(monkeypatch):
    """Four usable cores; each two share a last-level cache of 48 MiB."""

    def two_levels(core: int) -> list[Cache]:
        return [Cache(1, f"{core}", 32 * 2**10), Cache(3, "0-1" if core < 2 else "2-3", 48 * MEBIBYTE)]

    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: {0, 1, 2, 3})
    monkeypatch.setattr(processor, "data_caches", two_levels)


def test_every_last_level_cache_counts_once(two_dies, monkeypatch):
    assert processor.last_level_cache_bytes() == 96 * MEBIBYTE
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: {1, 0})
    assert processor.last_level_cache_bytes() == 48 * MEBIBYTE
    monkeypatch.setattr(processor, "data_caches", lambda core: [])
    assert processor.last_level_cache_bytes() == 32 * MEBIBYTE


@pytest.mark.parametrize(
    ("available", "limit", "expected", "note"),
    [
        (8192, None, 384, ""),
        (1200, None, 200, "partly from caches of 96 MiB: memory had room for 200 MiB a buffer"),
        (8192, 1200, 200, "partly from caches of 96 MiB: memory had room for 200 MiB a buffer"),
    ],
)
def test_buffers_exceed_all_caches_but_not_half_of_the_memory(
    available, limit, expected, note, two_dies, tiny, monkeypatch
):
    facts = {"available_bytes": available * MEBIBYTE, "limit_bytes": limit and limit * MEBIBYTE}
    monkeypatch.setattr(inventory, "memory", lambda: facts)
    monkeypatch.setattr(cpu_tests, "call_seconds", lambda run, setting: [1.0])
    read, _, *_ = memory(replace(tiny, buffer_bytes=CPU_QUICK.buffer_bytes))
    assert read.windows == [pytest.approx(expected * MEBIBYTE / 1e9)]
    assert read.note == note


@pytest.fixture
def three_levels(monkeypatch):
    """Caches of 32 KiB, 1 MiB and 64 MiB, the last of which is too large for the tests' buffers."""
    sizes = (2**15, MEBIBYTE, 64 * MEBIBYTE)
    found = [Cache(level, "0", size) for level, size in enumerate(sizes, 1)]
    monkeypatch.setattr(cpu_memory, "data_caches", lambda core: found)


def test_each_cache_and_memory_are_read_and_loaded_from(three_levels, tiny):
    found = {value.name: value for value in caches(tiny)}
    assert list(found) == [
        f"{step}_{what}" for step in ("memory", "level1", "level2") for what in ("read_one_core", "latency")
    ]
    assert found["level1_read_one_core"].title == "First-level cache, 16 KiB: read, one core"
    assert found["level2_latency"].title == "Second-level cache, 512 KiB: latency of a load"
    assert [
        (found[f"level1_{what}"].unit, found[f"level1_{what}"].better) for what in ("read_one_core", "latency")
    ] == [
        ("GB/s", "higher"),
        ("ns", "lower"),
    ]
    assert all(len(value.windows) == tiny.windows for value in found.values())
    assert 0.3 < found["level1_latency"].median < found["memory_latency"].median < 10_000
    assert 1 < found["memory_read_one_core"].median < found["level1_read_one_core"].median < 5_000
    assert "huge pages" in found["memory_latency"].note


def test_a_cache_no_faster_than_memory_is_recorded_alone(three_levels, tiny, monkeypatch):
    """The kernel of a virtual machine lists the last-level cache of its host, which other machines use too."""
    gigabytes, nanoseconds = [16.0, 260.0, 16.5], [180.0, 5.0, 130.0]  # of memory and the two levels
    for name, seconds in (
        ("_read_value", (cpu_memory.CALL_BYTES / 1e9 / one for one in gigabytes)),
        ("_latency_value", (one / 1e9 for one in nanoseconds)),
    ):
        real = getattr(cpu_memory, name)

        def timed(*arguments, real=real, seconds=seconds):
            monkeypatch.setattr(cpu_memory, "_shortest", lambda call, setting: [next(seconds)])
            return real(*arguments)

        monkeypatch.setattr(cpu_memory, name, timed)
    for loads in ("CALL_LOADS", "CALL_LOADS_OF_MEMORY"):
        monkeypatch.setattr(cpu_memory, loads, 1)
    note = "no faster than memory, so no figure of this cache"
    found = {value.name: (value.better, value.note) for value in caches(tiny)}
    assert found["level1_read_one_core"] == ("higher", "")
    assert found["level1_latency"] == ("lower", "")
    assert found["level2_read_one_core"] == ("", note)
    assert found["level2_latency"] == ("lower", "")


def test_the_core_whose_caches_are_listed_reads_them(tiny, monkeypatch):
    usable, asked, ran_on = os.sched_getaffinity(0), [], []
    real = cpu_memory._shortest

    def data_caches(core: int) -> list[Cache]:
        asked.append(core)
        return [Cache(1, f"{core}", 2**15)]

    def shortest(call, setting):
        ran_on.append(os.sched_getaffinity(0))
        return real(call, setting)

    monkeypatch.setattr(cpu_memory, "data_caches", data_caches)
    monkeypatch.setattr(cpu_memory, "_shortest", shortest)
    assert len(list(caches(tiny))) == 4
    assert ran_on == [{asked[0]}] * 4
    assert os.sched_getaffinity(0) == usable


def test_loads_visit_every_line_before_they_repeat_one(tiny):
    lines = cpu_memory._lines(64 * 100)
    visited = []

    def follow(place: int, loads: int) -> int:
        visited.append(place)
        return ctypes.c_ssize_t.from_address(place).value

    cpu_memory._latency_value("memory", "Memory", follow, lines, tiny)
    places = [int(place) for place in lines.ctypes.data + 64 * np.arange(100)]
    assert sorted(visited[:100]) == places
    assert visited[100] == visited[0]
    assert lines.ctypes.data % 64 == 0


@pytest.mark.parametrize(("compiler", "reason"), [("no-such-compiler", "no C++ compiler"), ("false", "false failed")])
def test_caches_need_a_compiler(compiler, reason, tiny, monkeypatch):
    monkeypatch.setenv("CXX", compiler)
    (answer,) = caches(tiny)
    assert isinstance(answer, NotRun)
    assert reason in answer.reason
    assert "g++" in answer.enable


def test_caches_are_of_the_full_set_alone():
    names = [[test.name for test in choose(TESTS["cpu"], [], full=full)] for full in (False, True)]
    assert ["caches" in of_set for of_set in names] == [False, True]


def test_each_node_copies_memory_that_each_node_has_touched(tiny, monkeypatch):
    """Two nodes of one core each, as far as this machine has two."""
    cores = sorted(os.sched_getaffinity(0))
    found = {0: cores[:1], 3: cores[-1:]}
    seen = []

    def on_cores(real):
        def wrapped(*arguments):
            seen.append((real.__name__, sorted(os.sched_getaffinity(0))))
            return real(*arguments)

        return wrapped

    monkeypatch.setattr(cpu_memory, "numa_nodes", lambda: found)
    for real in (cpu_memory._lines, cpu_memory.call_seconds):
        monkeypatch.setattr(cpu_memory, real.__name__, on_cores(real))
    values = list(nodes(tiny))
    pairs = [(to, source) for to in found for source in found]
    assert [value.title for value in values] == [
        f"Copy from memory of node {source} to node {to}, one core" for to, source in pairs
    ]
    assert len({value.name for value in values}) == 4
    assert all(value.unit == "GB/s" and value.median > 0.1 for value in values)
    assert [where for what, where in seen if what == "call_seconds"] == [found[to] for to, _ in pairs]
    assert [where for what, where in seen if what == "_lines"] == [
        where for to in found for where in (found[to], *found.values())
    ]
    assert sorted(os.sched_getaffinity(0)) == cores


@pytest.mark.parametrize("count", [1, 2])
def test_copies_between_nodes_are_of_machines_with_several(count, tiny, monkeypatch):
    of_machine = {node: [0] for node in range(count)}
    for module in (catalog, cpu_memory):
        monkeypatch.setattr(module, "numa_nodes", lambda: of_machine)
    assert ("numa" in [test.name for test in choose(TESTS["cpu"], [], full=True)]) is (count > 1)
    assert isinstance(next(nodes(tiny)), NotRun) is (count == 1)


@pytest.mark.skipif(not cpu.can_pack(torch.bfloat16), reason="oneDNN has no bf16 on this processor")
@pytest.mark.parametrize(("shared", "better"), [(True, ""), (False, "higher")])
def test_products_on_matrix_units_that_others_share_are_only_recorded(
    shared: bool, better: str, tiny: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_tests, "shares_matrix_units", lambda: shared)
    found = [one for one in cpu_tests.gemm(tiny) if isinstance(one, Value)]
    assert {one.better for one in found if one.name.startswith("gemm_bf16")} == {better}
    assert {one.better for one in found if one.name.startswith("gemm_fp32")} == {"higher"}
