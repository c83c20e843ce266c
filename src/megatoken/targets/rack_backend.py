"""A rack as a backend: a Ray cluster that one run holds, from the first node found to the last process ended."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from megatoken.config import RunConfig
from megatoken.engine.checkpoint import Checkpoint, RandomWeights, open_model
from megatoken.engine.config import EngineConfig, absolute_model, sharded
from megatoken.engine.memory import MemoryPlan
from megatoken.engine.simulated import plan_simulation
from megatoken.engine.tokenizer import Tokenizer
from megatoken.errors import UsageError
from megatoken.rack.cluster import Cluster, new_key, unheard
from megatoken.rack.hub import Hub
from megatoken.rack.placement import Node, Slot, place_replicas, place_simulated, wanted_on
from megatoken.rack.records import WorkerSpec
from megatoken.targets.backend import Reporter, ServedModel, engine_model, model_files, tokenizer_of
from megatoken.targets.rack import RackTarget
from megatoken.text import count_of


@dataclass(slots=True)
class RackBackend:
    """Processes on all nodes that have opened the model and not yet loaded it."""

    config: RunConfig  # what to run
    cluster: Cluster  # the Ray cluster
    slots: Sequence[Slot]  # one per process
    memory: MemoryPlan  # the smallest memory plan of all nodes
    model: ServedModel  # what every replica serves, by that plan
    found: Sequence[dict[str, Any]]  # what each process reports, in the order of the slots
    reporter: Reporter  # where to report how far it is

    def served(self) -> ServedModel:
        """The model that every replica serves."""
        return self.model

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the driver's copy of the checkpoint."""
        return tokenizer_of(self.config.model)

    def facts(self) -> dict[str, Any]:
        """The nodes."""
        return {"rack_nodes": self.nodes()}

    def nodes(self) -> list[dict[str, Any]]:
        """Every node: name, address, replicas, machine."""
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

    def target_facts(self) -> dict[str, Any]:
        """Fields of ``result.json`` about the replicas, once the model is loaded."""
        first = self.found[0]
        return {
            "memory_plan": first["memory_plan"],
            "target": {**first["target"], "count": self.config.rack.count, "ray": version("ray")},
            "rack_nodes": self.nodes(),
        }

    def load_replicas(self) -> None:
        """Loads the model in every process."""
        replicas = sum(len(slot.places) for slot in self.slots)
        self.reporter.stage(f"loading {self.config.model} on {count_of(replicas, 'replica')}")
        if self.model.files is not None:
            self.model.files.start()
        self.found = self.cluster.load()
        theirs = self.found[0].get("weights_sha256")
        if theirs is not None and self.model.files is not None:
            mine = self.model.files.identity()["weights_sha256"]
            if mine != theirs:
                raise UsageError(
                    f"the nodes' weights {theirs[:12]} are not the driver's, {mine[:12]}; copy the same files to every"
                    " machine"
                )

    @contextmanager
    def load(self) -> Iterator[RackTarget]:
        """Loads the model everywhere and connects every process to one hub; ends the replicas afterwards."""
        self.load_replicas()
        config, cluster = self.config, self.cluster
        key = new_key()
        hub = Hub(
            cluster.host,
            key,
            streams=config.scenario != "offline",
            dead_after_seconds=config.rack.dead_after_seconds,
            wait_seconds=config.rack.wait_seconds,
        )
        try:
            cluster.serve(hub, key, lambda nodes: _slots(config, nodes, self.memory.device), config.rack.replace)
            yield RackTarget(hub, self.target_facts())
        finally:
            hub.close()


@contextmanager
def open_rack(config: RunConfig, reporter: Reporter) -> Iterator[RackBackend]:
    """Connects to a cluster, places the processes and opens the model in them.

    Raises:
        CheckpointError, ConfigError, CapacityError: the model, or a simulated GPU, cannot be used.
        UsageError: cluster, nodes or checkpoints do not fit; the message has the numbers.
    """
    source = open_model(config.model, random_weights=config.random_weights, seed=config.seed)
    sharded(source.config, config.engine.tensor_parallel)
    if config.rack.simulated_gpu is not None:
        _check_simulated(config, config.rack.simulated_gpu)
    reporter.stage("looking for the rack's nodes")
    with unheard():
        yield from _hold(config, source, reporter)


def _hold(config: RunConfig, source: Checkpoint | RandomWeights, reporter: Reporter) -> Iterator[RackBackend]:
    assert config.rack.cluster is not None
    cluster = Cluster(config.rack.cluster, note=reporter.note)
    try:
        nodes = cluster.nodes()
        slots = _slots(config, nodes, config.engine.device)
        reporter.stage(
            f"opening {config.model} in {count_of(len(slots), 'process', 'processes')} "
            f"on {count_of(len(nodes), 'node')}"
        )
        found = cluster.start(
            slots, _spec(config), None if config.rack.simulated_gpu is not None else source.content_hash
        )
        plans = [MemoryPlan(**facts["memory_plan"]) for facts in found]
        memory = min(plans, key=lambda plan: plan.max_length)
        model = engine_model(config, source, memory, model_files(config, source))
        yield RackBackend(config, cluster, slots, memory, model, found, reporter)
    finally:
        cluster.close()


def _check_simulated(config: RunConfig, gpu: str) -> None:
    """Checks before Ray starts what each simulated node would refuse."""
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
    return place_replicas(nodes, wanted_on(nodes, rack.replicas, ranks, device, config.engine.threads))


def _spec(config: RunConfig) -> WorkerSpec:
    return WorkerSpec(
        model=absolute_model(config.model),
        random_weights=config.random_weights,
        seed=config.seed,
        engine=asdict(config.engine_config()),
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
