"""Tests of the host: the disk, and what one core takes."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megatoken.hardware.qualify import host_tests, timing
from megatoken.hardware.qualify.catalog import TESTS, choose
from megatoken.hardware.qualify.host_tests import disk_writes
from megatoken.hardware.qualify.values import NotRun, Setting


def test_random_writes_are_of_4_kib_within_the_file(tiny, monkeypatch):
    places = []

    def record(file: int, buffers: list, place: int) -> int:
        places.append((len(buffers[0]), place))
        return write(file, buffers, place)

    write = os.pwritev
    monkeypatch.setattr(os, "pwritev", record)
    found = list(disk_writes(tiny))
    if isinstance(found[0], NotRun):
        pytest.skip(found[0].reason)
    assert [(one.name, one.unit, len(one.windows)) for one in found] == [
        (f"disk_random_write_{depth}", "writes/s", tiny.windows) for depth in (1, 32)
    ]
    assert all(one.median > 0 and one.note.startswith("99th percentile ") for one in found)
    blocks = tiny.file_bytes // host_tests.BLOCK
    assert places[:blocks] == [(host_tests.BLOCK, block * host_tests.BLOCK) for block in range(blocks)]
    written = places[blocks:]
    assert {size for size, _ in written} == {4096}
    assert all(place % 4096 == 0 and place + 4096 <= tiny.file_bytes for _, place in written)
    assert len({place for _, place in written}) > 32
    assert list(tiny.folder.iterdir()) == []


def test_a_folder_that_is_not_there_is_named_by_the_test(tiny):
    (found,) = disk_writes(replace(tiny, folder=tiny.folder / "missing"))
    assert (found.name, found.title) == ("disk_writes", "Random writes to the disk")
    assert "missing" in found.reason


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_random_writes_are_of_the_full_set_alone(device):
    names = [[test.name for test in choose(TESTS[device], [], full=full)] for full in (False, True)]
    assert ["disk_writes" in of_set for of_set in names] == [False, True]


def test_memory_that_looks_like_a_disk_is_none(tiny):
    folder = Path("/dev/shm")
    if host_tests._file_system(folder) not in host_tests.IN_MEMORY or not os.access(folder, os.W_OK):
        pytest.skip("needs a file system in memory")
    (found,) = disk_writes(replace(tiny, folder=folder))
    assert (found.reason, found.enable) == (
        "/dev/shm lies in memory (tmpfs)",
        "name a folder on a disk with --disk DIR",
    )


def test_the_start_of_an_operation_and_a_launch_are_of_the_fastest_core(tiny: Setting) -> None:
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("needs two cores")

    def slower_on_the_first() -> None:
        end = time.perf_counter() + (2e-3 if os.sched_getaffinity(0) == {min(before)} else 1e-4)
        while time.perf_counter() < end:
            pass

    seconds, note = timing.on_the_best_core(slower_on_the_first, replace(tiny, seconds=0.1))
    assert len(seconds) == tiny.windows and 1e-4 <= min(seconds) < 1e-3
    assert note.startswith(f"the fastest of {min(len(before), timing.MOST_CORES)} cores; the slowest takes ")
    assert os.sched_getaffinity(0) == before
