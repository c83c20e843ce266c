"""Tests of the CPU: sizes by what the kernel reports of the processor."""

import os
from dataclasses import replace

import pytest

from megatoken.hardware import inventory
from megatoken.hardware.qualify import cpu_tests, processor
from megatoken.hardware.qualify.catalog import CPU_QUICK
from megatoken.hardware.qualify.cpu_tests import memory
from megatoken.hardware.topology import Cache

MEBIBYTE = 2**20


@pytest.fixture
def two_dies(monkeypatch):
    """Four usable cores; each two share a last-level cache of 48 MiB."""

    def caches(core: int) -> list[Cache]:
        return [Cache(1, f"{core}", 32 * 2**10), Cache(3, "0-1" if core < 2 else "2-3", 48 * MEBIBYTE)]

    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: {0, 1, 2, 3})
    monkeypatch.setattr(processor, "data_caches", caches)


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
