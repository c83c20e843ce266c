"""Places replicas: Ray's nodes -> slots, each a process with its replicas. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

from megatoken.errors import CapacityError
from megatoken.rack.records import Place
from megatoken.text import count_of

SIMULATED_CPUS = 0.01  # that Ray counts: simulated engines hardly compute


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster: its name here, Ray's id, and the resources that Ray may allocate there."""

    name: str
    ray_id: str
    address: str
    gpus: int
    cpus: float
    is_driver: bool = False


@dataclass(frozen=True, slots=True)
class Slot:
    """One process to start: its node, its replicas, and the node's resources that it takes.

    A replica's process itself starts the other ranks of its tensor-parallel group, so one bundle covers them all.
    """

    node: Node
    places: tuple[Place, ...]
    gpus: int
    cpus: float
    threads: int | None
    neighbours: int

    @property
    def bundle(self) -> dict[str, float]:
        """The resources, as Ray names them."""
        return {"CPU": self.cpus} | ({"GPU": float(self.gpus)} if self.gpus else {})


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a user asks of a rack."""

    replicas: int | None  # copies of the model; None: as many as the GPUs allow, without GPUs one per node
    tensor_parallel: int  # GPUs, or cores, of one copy
    on_gpus: bool  # whether the engines compute on GPUs
    threads: int | None = None  # CPU threads of an engine; None: the cores of its slot


def wanted_on(nodes: Sequence[Node], replicas: int | None, ranks: int, device: str, threads: int | None) -> Wanted:
    """What a user asks of these nodes. ``device`` is the engine's: ``auto`` takes GPUs if a node has one."""
    on_gpus = device == "cuda" or (device == "auto" and any(node.gpus for node in nodes))
    return Wanted(replicas, ranks, on_gpus, threads)


def name_nodes(found: Sequence[Node], known: dict[str, str]) -> list[Node]:
    """The nodes under distinct names, sorted by name; of nodes with equal names, later ones get numbers.

    ``known``: names by Ray's id, kept from call to call: a node keeps its name, and a lost node frees it.
    """
    for gone in known.keys() - {node.ray_id for node in found}:
        del known[gone]
    for node in sorted(found, key=lambda one: (one.name, one.address, one.ray_id)):
        if node.ray_id not in known:
            names = (node.name if number == 1 else f"{node.name}-{number}" for number in count(1))
            known[node.ray_id] = next(name for name in names if name not in known.values())
    return sorted((replace(node, name=known[node.ray_id]) for node in found), key=lambda one: one.name)


def place_replicas(nodes: Sequence[Node], wanted: Wanted) -> list[Slot]:
    """One slot for each replica, nodes filled evenly.

    Raises:
        CapacityError: more replicas than the nodes hold, with the numbers.
    """
    room = {node.name: _room(node, wanted) for node in nodes}
    total = sum(room.values())
    replicas = wanted.replicas
    if replicas is None:
        replicas = total if wanted.on_gpus else sum(1 for count in room.values() if count)
    if replicas > total or not replicas:
        unit = "GPUs" if wanted.on_gpus else "cores"
        have = {node.name: node.gpus if wanted.on_gpus else _cpus(node) for node in nodes}
        held = ", ".join(f"{name} {count:g}" for name, count in have.items())
        raise CapacityError(
            f"{count_of(replicas, 'replica')} need {replicas * wanted.tensor_parallel:,} {unit}; "
            f"the cluster has {sum(have.values()):g} ({held}); set rack.replicas to at most {total:,}"
        )
    shares = Counter[str]()
    while replicas:
        for node in nodes:
            if replicas and shares[node.name] < room[node.name]:
                shares[node.name] += 1
                replicas -= 1
    return [slot for node in nodes for slot in _slots(node, shares[node.name], wanted)]


def place_simulated(node: Node, nodes: int, gpus_per_node: int) -> list[Slot]:
    """One process per simulated node, all on one machine, each with the engines of its GPUs."""
    slots = []
    for number in range(nodes):
        name = f"node-{number + 1:0{len(str(nodes))}}"
        places = tuple(Place(name, gpu) for gpu in range(gpus_per_node))
        slots.append(Slot(node, places, 0, SIMULATED_CPUS, None, 1))
    return slots


def _cpus(node: Node) -> float:
    """Cores for replicas; on the driver's machine one less, if it has several, so that the driver never waits."""
    return max(1.0, node.cpus - 1) if node.is_driver and node.cpus >= 1 else node.cpus


def _room(node: Node, wanted: Wanted) -> int:
    return int(node.gpus if wanted.on_gpus else _cpus(node)) // wanted.tensor_parallel


def _slots(node: Node, replicas: int, wanted: Wanted) -> list[Slot]:
    slots = []
    for number in range(replicas):
        gpus, threads, neighbours = wanted.tensor_parallel * wanted.on_gpus, wanted.threads, 1
        cpus = min(1.0, node.cpus / max(1, node.gpus)) * gpus
        if not wanted.on_gpus:
            cpus = float(int(_cpus(node) / replicas))
            threads, neighbours = wanted.threads or int(cpus), replicas
        places = (Place(node.name, number),)
        slots.append(Slot(node, places, gpus, cpus, threads, neighbours))
    return slots
