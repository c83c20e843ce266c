"""Where the replicas of a server run: on the nodes of a cluster, or in processes of this machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import replace

from megatoken.hardware.inventory import gpus
from megatoken.processes import usable_cores
from megatoken.rack.placement import SIMULATED_CPUS, Node, Slot, place_replicas, wanted_on
from megatoken.serve.options import ServeConfig

MOCK_CPUS = 1e6  # of any node: mock engines compute nothing
VISIBLE = "CUDA_VISIBLE_DEVICES"


def slots_on(options: ServeConfig, nodes: Sequence[Node]) -> list[Slot]:
    """A slot for each replica. Raises CapacityError if the nodes do not hold them, with the numbers."""
    engine = options.engine
    if options.engine_kind == "real":
        wanted = wanted_on(nodes, options.rack.replicas, engine.tensor_parallel, engine.device, engine.threads)
        return place_replicas(nodes, wanted)
    large = [replace(node, cpus=MOCK_CPUS, gpus=0) for node in nodes]
    slots = place_replicas(large, wanted_on(large, options.rack.replicas, 1, "cpu", None))
    return [replace(slot, cpus=SIMULATED_CPUS, threads=None, neighbours=1) for slot in slots]


def this_machine(options: ServeConfig) -> Node:
    """This machine as the only node."""
    cores = float(usable_cores())
    return Node(socket.gethostname(), "", "127.0.0.1", len(visible_gpus(options)), cores)


def visible_gpus(options: ServeConfig) -> list[str]:
    """The GPUs that replicas on this machine may use, as CUDA names them."""
    if options.engine_kind == "mock" or options.engine.device == "cpu":
        return []
    named = os.environ.get(VISIBLE)
    if named is not None:
        return [one for one in named.split(",") if one.strip()]
    return [str(number) for number in range(len(gpus()))]
