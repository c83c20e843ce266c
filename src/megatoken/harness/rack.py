"""``megatoken run --rack``: a cluster held for one run, from the first node asked to the last process ended."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megatoken.config import RunConfig
from megatoken.engine.checkpoint import open_model
from megatoken.engine.config import REFERENCE, EngineConfig, model_folder, sharded
from megatoken.engine.memory import MemoryPlan
from megatoken.engine.simulated import plan_simulation
from megatoken.errors import UsageError
from megatoken.harness.loadgen_plan import with_target_step
from megatoken.harness.progress import Progress
from megatoken.rack.actor import WorkerSpec
from megatoken.rack.cluster import Cluster, new_key
from megatoken.rack.hub import Hub
from megatoken.rack.placement import Node, Slot, Wanted, place_replicas, place_simulated
from megatoken.targets.rack import RackTarget
from megatoken.text import count_of


@dataclass(slots=True)
class Rack:
    """Processes on all nodes that have opened the model and not yet loaded it."""

    config: RunConfig
    cluster: Cluster
    slots: Sequence[Slot]
    memory: MemoryPlan
    found: Sequence[dict[str, Any]]  # what each process says, in the order of the slots

    def nodes(self) -> list[dict[str, Any]]:
        """Every node: name, address, replicas, and what its machine is."""
        nodes: dict[str, dict[str, Any]] = {}
        for slot, facts in zip(self.slots, self.found, strict=True):
            for place in slot.places:
                entry = nodes.setdefault(
                    place.node,
                    {
                        "node": place.node,
                        "address": slot.node.address,
                        "replicas": 0,
                        "gpus": 0,
                        "process_ids": [],
                        **_machine(facts),
                    },
                )
                if facts["process_id"] not in entry["process_ids"]:
                    entry["process_ids"].append(facts["process_id"])
                entry["replicas"] += 1
                entry["gpus"] += slot.gpus
        return list(nodes.values())

    def facts(self) -> dict[str, Any]:
        """Fields of ``result.json`` that stay the same, once the model is loaded."""
        first = self.found[0]
        return {
            "memory_plan": first["memory_plan"],
            "target": {**first["target"], "count": self.config.rack.count, "ray": version("ray")},
            "rack_nodes": self.nodes(),
        }

    @contextmanager
    def target(self, progress: Progress) -> Iterator[RackTarget]:
        """Loads the model everywhere and connects; ends the replicas afterwards."""
        config, cluster = self.config, self.cluster
        progress.stage(f"loading {config.model} on {count_of(sum(len(slot.places) for slot in self.slots), 'replica')}")
        self.found = cluster.load()
        key, streams = new_key(), config.scenario != "offline"
        hub = Hub(
            cluster.host,
            key,
            streams=streams,
            dead_after_seconds=config.rack.dead_after_seconds,
            wait_seconds=config.rack.wait_seconds,
        )
        try:
            cluster.serve(hub, key, lambda nodes: _slots(config, nodes, self.memory.device), config.rack.replace)
            yield RackTarget(hub, self.facts(), streams=streams)
        finally:
            hub.close()


@contextmanager
def open_rack(config: RunConfig, progress: Progress) -> Iterator[Rack]:
    """Takes a cluster, places the processes and has them open the model.

    Raises:
        CheckpointError, ConfigError, CapacityError: of what is simulated, before anything is started.
        UsageError: what does not fit together, with the numbers.
    """
    source = open_model(config.model, random_weights=config.random_weights, seed=config.seed)
    sharded(source.config, config.engine.tensor_parallel)
    if config.rack.simulated_gpu is not None:
        _check_simulated(config, config.rack.simulated_gpu)
    progress.stage("looking for the rack's nodes")
    # Ray prints messages of its daemons on standard output, which belongs to the command's result.
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        yield from _hold(config, None if config.rack.simulated_gpu else source.content_hash, progress)


def _hold(config: RunConfig, content_hash: str | None, progress: Progress) -> Iterator[Rack]:
    assert config.rack.cluster is not None
    cluster = Cluster(config.rack.cluster, note=progress.note)
    try:
        nodes = cluster.nodes()
        slots = _slots(config, nodes, config.engine.device)
        progress.stage(
            f"opening {config.model} in {count_of(len(slots), 'process', 'processes')} "
            f"on {count_of(len(nodes), 'node')}"
        )
        found = cluster.start(slots, _spec(config))
        if content_hash is not None and found[0]["content_hash"] != content_hash:
            raise UsageError(
                f"the nodes' checkpoint {found[0]['content_hash'][:12]} is not the driver's, "
                f"{content_hash[:12]}; copy the same files to every machine"
            )
        plans = [MemoryPlan(**facts["memory_plan"]) for facts in found]
        yield Rack(config, cluster, slots, min(plans, key=lambda plan: plan.max_length), found)
    finally:
        cluster.close()


def _check_simulated(config: RunConfig, gpu: str) -> None:
    """Says now what each simulated node would say after Ray and all of them have started."""
    spec, ranks, per_node = _spec(config), config.engine.tensor_parallel, config.rack.simulated_gpus
    plan_simulation(spec.model, EngineConfig(**spec.engine), gpu)
    if per_node % ranks:
        raise UsageError(
            f"engine.tensor_parallel {ranks} does not divide the {count_of(per_node, 'GPU')} of a simulated node; "
            "change it or rack.simulated_gpus"
        )


def _slots(config: RunConfig, nodes: Sequence[Node], device: str) -> list[Slot]:
    rack, ranks = config.rack, config.engine.tensor_parallel
    if rack.simulated_gpu is not None:
        here = next(node for node in nodes if node.is_driver)
        return place_simulated(here, rack.simulated_nodes, rack.simulated_gpus // ranks)
    on_gpus = device == "cuda" or (device == "auto" and any(node.gpus for node in nodes))
    return place_replicas(nodes, Wanted(rack.replicas, ranks, on_gpus, config.engine.threads))


def _spec(config: RunConfig) -> WorkerSpec:
    folder = model_folder(config.model)
    return WorkerSpec(
        model=str(folder.absolute()) if config.model != REFERENCE and folder.is_dir() else config.model,
        random_weights=config.random_weights,
        seed=config.seed,
        engine=asdict(with_target_step(config).engine_config()),
        simulated_gpu=config.rack.simulated_gpu,
        streams=config.scenario != "offline",
        keep_ids=config.mode == "accuracy" or config.text,
        dead_after_seconds=config.rack.dead_after_seconds,
        reconnect_seconds=config.rack.reconnect_seconds,
        driver_host=socket.gethostname(),
    )


def _machine(facts: dict[str, Any]) -> dict[str, Any]:
    inventory = facts["inventory"]
    return {
        "version": facts["version"],
        "machine": {key: inventory[key] for key in ("hostname", "cpu", "memory", "gpus")},
    }
