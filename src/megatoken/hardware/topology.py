"""Which cores share memory, as the kernel of Linux lists them. A kernel that does not gives empty answers."""

from __future__ import annotations

import os
from pathlib import Path

NODES = Path("/sys/devices/system/node")


def numa_nodes() -> dict[int, list[int]]:
    """NUMA nodes with cores that the calling thread may use, and those cores, in order.

    Nodes of memory alone are left out.
    """
    cores = {int(file.parent.name[len("node") :]): _usable(file) for file in NODES.glob("node[0-9]*/cpulist")}
    return {node: usable for node, usable in sorted(cores.items()) if usable}


def _usable(cpu_list: Path) -> list[int]:
    """The cores of a list such as ``0-3,8`` that the calling thread may use."""
    ranges = [part.partition("-") for part in cpu_list.read_text().strip().split(",") if part]
    cores = {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}
    return sorted(cores & os.sched_getaffinity(0))
