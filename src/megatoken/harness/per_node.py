"""One LoadGen per node, all started at the same moment; their results are added up by the three stated rules.

On each node a process drives that node's replicas as a rack of one node. The main driver only measures clocks, sets the
start time and joins the results.
"""

from __future__ import annotations

import io
import json
import shutil
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatoken.analysis.machine import utc_text
from megatoken.config import RunConfig
from megatoken.engine.checkpoint import open_model
from megatoken.engine.memory import MemoryPlan
from megatoken.engine.tokenizer import Tokenizer
from megatoken.errors import MegatokenError, UsageError
from megatoken.harness.loadgen_plan import plan_test
from megatoken.harness.prepare import Prepared, prepare, resolve
from megatoken.harness.progress import Progress
from megatoken.harness.recording import interrupted_by_errors, record
from megatoken.harness.result import asked_facts
from megatoken.harness.session import TestSession
from megatoken.harness.stop import StopSignals
from megatoken.harness.together import concluded_nodes, gathered, joined_tables, node_starts
from megatoken.rack.clock import OffsetEstimate
from megatoken.rack.cluster import new_key
from megatoken.rack.hub import Hub
from megatoken.rack.records import Place
from megatoken.runs.reasons import reason
from megatoken.runs.run import NODES, Run, read_run
from megatoken.runs.writer import RunFolder
from megatoken.targets.backend import ServedModel, engine_model, model_files, tokenizer_of
from megatoken.targets.rack import RackTarget
from megatoken.targets.rack_backend import RackBackend
from megatoken.text import count_of

CLOCK_ROUNDS = 32
HEAD_START_SECONDS = 3.0  # for LoadGen's processes to start before the common start time
START_SECONDS = 120.0  # for a node's driver to start
WARM_UP_PATIENCE = 20.0  # timeout of a warm-up, in units of its planned duration


@dataclass(frozen=True, slots=True)
class _NodeBackend:
    """The replicas of one node, which are connected to ``hub``."""

    config: RunConfig
    memory: MemoryPlan
    target_facts: Mapping[str, Any]
    hub: Hub

    def served(self) -> ServedModel:
        """The model that every replica of the rack serves."""
        config = self.config
        source = open_model(config.model, random_weights=config.random_weights, seed=config.seed)
        return engine_model(config, source, self.memory, model_files(config, source))

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of this node's copy of the checkpoint."""
        return tokenizer_of(self.config.model)

    def facts(self) -> Mapping[str, Any]:
        """None: the whole run's folder has the nodes."""
        return {}

    @contextmanager
    def load(self) -> Iterator[RackTarget]:
        """The replicas, which have loaded the model; they serve until the hub is closed."""
        yield RackTarget(self.hub, self.target_facts)


class NodeDriver:
    """The harness of one node, for the replicas there. ``stop`` may be called while ``run`` runs."""

    def __init__(self, config: str, node: str) -> None:
        """Stores the configuration, which is JSON, and the name of the node."""
        self._config = RunConfig.model_validate_json(config)
        self._node = node
        self.received: str | None = None

    def listen(self, host: str, key: bytes, workers: Mapping[int, Sequence[int]]) -> tuple[str, int]:
        """Listens for the processes with these numbers, which have these replicas; returns its address."""
        rack, streams = self._config.rack, self._config.scenario != "offline"
        limits = {"dead_after_seconds": rack.dead_after_seconds, "wait_seconds": rack.wait_seconds}
        self._hub = Hub(host, key, streams=streams, **limits)
        self._workers = set(workers)
        for number, replicas in workers.items():
            self._hub.register(number, [Place(self._node, replica) for replica in replicas])
        return self._hub.address

    def clocks(self) -> tuple[int, int]:
        """Monotonic clock and wall clock, both in ns."""
        return time.monotonic_ns(), time.time_ns()

    def warm_up(self, facts: str, memory: str) -> str:
        """Loads the data set, warms up and plans; returns the expected rate, or an error, as JSON."""
        try:
            deadline = time.monotonic() + self._config.rack.wait_seconds
            while self._workers - self._hub.connected():
                if time.monotonic() > deadline:
                    raise MegatokenError("replicas of this node did not connect")
                time.sleep(0.05)
            backend = _NodeBackend(self._config, MemoryPlan(**json.loads(memory)), json.loads(facts), self._hub)
            prepared = prepare(self._config, backend)
            with backend.load() as target:
                self._session, self._settings, _ = TestSession.start(
                    resolve(prepared.config, prepared.model),
                    prepared.data_set,
                    target,
                    prepared.facts(),
                    Progress(quiet=True),
                    gate=prepared.gate,
                )
        except MegatokenError as error:
            return json.dumps({"error": str(error)})
        return json.dumps({"samples_per_second": self._session.facts["estimated_samples_per_second"]})

    def run(self, start_wall_ns: int) -> bytes:
        """Runs the test from that moment of this node's wall clock; returns the run folder as a tar file."""
        with tempfile.TemporaryDirectory(prefix="megatoken-node-") as out:
            config = self._session.config  # resolved
            folder = self._session.create_folder(config, self._settings, Path(out))
            self._session.run(config, self._settings, folder, self, start_wall_ns=start_wall_ns)
            packed = io.BytesIO()
            with tarfile.open(fileobj=packed, mode="w") as archive:
                archive.add(folder.path, arcname=".")
            self._hub.close()
            return packed.getvalue()

    def stop(self, why: str) -> None:
        """Ends the test early."""
        self.received = why


@dataclass(slots=True)
class _Node:
    """A node of the run and its result."""

    name: str
    driver: Any
    clock: OffsetEstimate
    answer: Any = None
    run: Run | None = None
    lost: str | None = None


def run_per_node(rack: RackBackend, prepared: Prepared, progress: Progress) -> Path:
    """Measures every node with its own LoadGen.

    Returns:
        The run folder; ``nodes/<node>/`` is the run folder of each node.

    Raises:
        MegatokenError: a node failed before the start.
    """
    nodes = _start(rack)
    progress.stage("warming up on every node")
    patience = WARM_UP_PATIENCE * (rack.config.warm_up_seconds + rack.config.rack.wait_seconds)
    facts, memory = json.dumps(rack.target_facts()), json.dumps(asdict(rack.memory))
    warmed = [node.driver.warm_up.remote(facts, memory) for node in nodes]
    for node, reference in zip(nodes, warmed, strict=True):
        answer = json.loads(_answer(rack, node.name, reference, patience))
        if "error" in answer:
            raise UsageError(f"{node.name}: {answer['error']}")
    with StopSignals() as stop:
        folder = _create_folder(rack, prepared)
        stop.parting_words = f"stopped at once; {folder.path} says INTERRUPTED"
        with interrupted_by_errors(folder, progress):
            _measure_clocks(rack, nodes)
            start_ns = time.time_ns() + round(HEAD_START_SECONDS * 1e9)
            asked = rack.config.samples
            own = "" if asked is None else f" and {count_of(asked, 'sample')}"
            progress.stage(f"measuring {count_of(len(nodes), 'node')}, each with its own LoadGen{own}")
            for node in nodes:
                offset = node.clock.offset()
                ahead_ns = round(offset.wall_seconds * 1e9) if offset else 0
                node.answer = node.driver.run.remote(start_ns + ahead_ns)
            _collect(rack, nodes, folder, stop)
            _conclude(nodes, folder, stop)
    return folder.path


def _start(rack: RackBackend) -> list[_Node]:
    rack.load_replicas()
    config, key = rack.config.model_dump_json(), new_key()
    slots = rack.cluster.numbers()
    nodes, listening = [], {}
    for name in dict.fromkeys(slot.places[0].node for slot in slots.values()):
        own = {number: slot for number, slot in slots.items() if slot.places[0].node == name}
        machine = next(iter(own.values())).node
        driver = rack.cluster.start_unplaced(NodeDriver, machine, config, name)
        numbers = {number: [place.replica for place in slot.places] for number, slot in own.items()}
        listening[name] = driver.listen.remote(machine.address, key, numbers)
        nodes.append(_Node(name, driver, OffsetEstimate()))
    addresses = {name: _answer(rack, name, reference, START_SECONDS) for name, reference in listening.items()}
    rack.cluster.serve_at(addresses, key)
    return nodes


def _create_folder(rack: RackBackend, prepared: Prepared) -> RunFolder:
    config = resolve(prepared.config, rack.served())
    settings = plan_test(config, len(prepared.data_set.requests), config.rate or 1.0)
    asked = {**asked_facts(config, settings), "offered_samples_per_second": None}
    return record(config, {**prepared.facts(), **rack.target_facts(), **asked}, config.out)


def _measure_clocks(rack: RackBackend, nodes: Sequence[_Node]) -> None:
    for node in nodes:
        for _ in range(CLOCK_ROUNDS):
            sent_ns = time.monotonic_ns()
            reference = node.driver.clocks.remote()
            monotonic_ns, wall_ns = _answer(rack, node.name, reference, rack.config.rack.wait_seconds)
            node.clock.note(sent_ns, time.monotonic_ns(), time.time_ns(), monotonic_ns, wall_ns)


def _answer(rack: RackBackend, node: str, reference: Any, seconds: float) -> Any:
    """The answer of a node's driver. Raises MegatokenError if none comes in time, or the driver is lost."""
    try:
        return rack.cluster.ask(reference, seconds)
    except TimeoutError:
        raise MegatokenError(f"{node}: its driver did not answer within {seconds:g} s") from None


def _collect(rack: RackBackend, nodes: Sequence[_Node], folder: RunFolder, stop: StopSignals) -> None:
    """Waits for the results of all nodes; a node that no longer answers is lost, with its replicas and samples."""
    waiting = list(nodes)
    stopping = False
    while waiting:
        if stop.received and not stopping:
            stopping = True
            for node in waiting:
                node.driver.stop.remote(stop.received)
        for node in list(waiting):
            try:
                _unpack(rack.cluster.ask(node.answer, 0.2), folder.path / NODES / node.name)
                node.run = read_run(folder.path / NODES / node.name)
            except TimeoutError:
                try:
                    rack.cluster.ask(node.driver.clocks.remote(), rack.config.rack.dead_after_seconds)
                    continue
                except TimeoutError:
                    node.lost = f"silent for {rack.config.rack.dead_after_seconds:g} s"
                except MegatokenError as error:
                    node.lost = str(error)
            except MegatokenError as error:
                node.lost = str(error)
            waiting.remove(node)


def _conclude(nodes: Sequence[_Node], folder: RunFolder, stop: StopSignals) -> None:
    runs = {node.name: node.run for node in nodes if node.run is not None}
    silent = {node.name: node.lost for node in nodes if node.lost is not None}
    clocks = {node.name: node.clock.offset() for node in nodes}
    offsets = [{"node": name, **asdict(offset)} for name, offset in clocks.items() if offset]
    if runs:
        folder.add_tables(*joined_tables(runs, node_starts(runs, offsets)))
    shutil.rmtree(folder.mlperf_directory, ignore_errors=True)  # each node has its own
    folder.add_facts(gathered(folder.facts, runs, silent, offsets))
    if stop.received or not runs:
        losses = None if stop.received else [f"{name}: {why}" for name, why in silent.items()]
        folder.interrupt(reason("INTERRUPTED", signal=stop.received or None, losses=losses))
        return
    folder.finish({**concluded_nodes(folder.facts, runs), "ended_at": utc_text(datetime.now(UTC))})


def _unpack(packed: bytes, into: Path) -> None:
    into.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(into, filter="data")
