"""Which cores share memory and caches, as the kernel of Linux lists them. One that lists none gives empty answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatoken.processes import usable_core_numbers

CORES = Path("/sys/devices/system/cpu")
NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True, slots=True)
class Cache:
    """A cache of data. Two cores share it if theirs are equal."""

    level: int  # 1 is next to the core
    cores: str  # that share it, as the kernel lists them: ``0-3,8``
    size_bytes: int


def data_caches(core: int) -> list[Cache]:
    """The caches of data that a core reaches, the first level first. Those of unknown size are left out."""
    found = []
    for folder in CORES.glob(f"cpu{core}/cache/index[0-9]*"):
        try:
            level, kind, cores, size = (
                (folder / name).read_text().strip() for name in ("level", "type", "shared_cpu_list", "size")
            )
        except OSError:
            continue
        if kind != "Instruction" and size.endswith("K"):
            found.append(Cache(int(level), cores, int(size[:-1]) * 2**10))
    return sorted(found, key=lambda cache: cache.level)


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
    return sorted(cores & usable_core_numbers())
