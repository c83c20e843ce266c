"""NUMA nodes and caches as the kernel lists them."""

import os

import pytest

from megatoken.hardware import topology
from megatoken.hardware.topology import Cache, data_caches, numa_nodes


@pytest.fixture
def node_lists(tmp_path, monkeypatch):
    """Write the kernel's list of cores of each node, for a process that may use cores 0 to 5."""

    def write(**lists: str) -> None:
        for node, cores in lists.items():
            (tmp_path / node).mkdir()
            (tmp_path / node / "cpulist").write_text(f"{cores}\n")

    monkeypatch.setattr(topology, "NODES", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: set(range(6)))
    return write


def test_nodes_have_the_cores_that_this_process_may_use(node_lists):
    node_lists(node0="0-1,4", node1="2-3,5-7")
    assert numa_nodes() == {0: [0, 1, 4], 1: [2, 3, 5]}


def test_nodes_without_usable_cores_are_left_out(node_lists):
    node_lists(node10="8-9", node2="", node1="3", node0="0")
    assert list(numa_nodes().items()) == [(0, [0]), (1, [3])]


def test_a_kernel_that_lists_no_nodes(node_lists):
    assert numa_nodes() == {}


def test_nodes_of_this_machine_hold_each_usable_core_at_most_once():
    cores = [core for node in numa_nodes().values() for core in node]
    assert len(set(cores)) == len(cores)
    assert set(cores) <= os.sched_getaffinity(0)


def test_caches_of_data_without_those_of_unknown_size(tmp_path, monkeypatch):
    monkeypatch.setattr(topology, "CORES", tmp_path)
    listed = {"index0": "1 Data 2 32K", "index1": "1 Instruction 2 32K", "index2": "3 Unified 0-3 8192K", "index3": "2"}
    for name, facts in listed.items():
        folder = tmp_path / "cpu2" / "cache" / name
        folder.mkdir(parents=True)
        for fact, text in zip(("level", "type", "shared_cpu_list", "size"), facts.split(), strict=False):
            (folder / fact).write_text(f"{text}\n")
    assert data_caches(2) == [Cache(1, "2", 32 * 2**10), Cache(3, "0-3", 8 * 2**20)]
    assert data_caches(0) == []
