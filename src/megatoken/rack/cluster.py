"""The Ray cluster: find or start it, start one process for each slot, notice which end, and replace them."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megatoken import __version__
from megatoken.errors import MegatokenError, UsageError, how_to_install
from megatoken.rack.actor import WorkerActor
from megatoken.rack.address import REACH_SECONDS, START, check_token, find_cluster
from megatoken.rack.placement import Node, Slot, name_nodes
from megatoken.rack.records import Place, WorkerSpec
from megatoken.rack.wire import KEY_BYTES

NAMESPACE = "megatoken"
LEASE = "megatoken-driver"
PLACE_SECONDS = 60.0  # for Ray to place a process in resources that it reported free
WATCH_SECONDS = 1.0
LOCAL_STORE_BYTES = 80 * 2**20  # Ray's minimum: samples do not go through its object store
MISSING = f"racks and client hosts need Ray; {how_to_install('rack')}"


@dataclass(slots=True)
class Process:
    """One process of the rack and its stage: opening the model, loading, serving, or refused."""

    number: int
    slot: Slot
    group: Any
    actor: Any
    stage: str
    answer: Any  # Ray's reference to the answer of the stage
    facts: dict[str, Any] = field(default_factory=dict)
    away_since: float | None = None  # when its connection was lost while it served


class Driver(Protocol):
    """What processes connect to: the hub of a run, or the router of a server."""

    address: tuple[str, int]

    def register(self, worker: int, places: Sequence[Place]) -> None:
        """Let the process with that number connect, which has replicas at ``places``."""

    def unregister(self, worker: int, cause: str) -> None:
        """Remove that process and refuse it from now on."""

    def connected(self) -> set[int]:
        """Numbers of the processes that serve now."""


class Lease:
    """A named actor that the one driver of a cluster holds: a name in Ray can be taken once."""

    def __init__(self, holder: str) -> None:
        self._holder = holder

    def holder(self) -> str:
        """The driver that holds the lease."""
        return self._holder


class Cluster:
    """A driver's hold on a Ray cluster. After ``start`` a thread watches it."""

    def __init__(self, address: str, note: Callable[[str], None], actor: type[WorkerActor] = WorkerActor) -> None:
        """Connects; ``auto`` without a cluster starts a local one that listens on 127.0.0.1 only.

        ``address``: ``auto`` or host:port. ``note`` is called with messages about events of the cluster. ``actor``: the
        processes to start.

        Raises:
            UsageError: Ray is missing, no cluster answers, or another driver holds this one.
        """
        self._note = note
        self._actor = actor
        found = find_cluster(address, note)
        environment = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
        if found is not None:
            check_token(found)
        if found is None:  # makes Ray use the loopback address; Ray reads it on import, its processes inherit it
            environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        for name, value in environment.items():
            os.environ.setdefault(name, value)
        try:
            import ray
        except ImportError:
            raise UsageError(MISSING) from None
        self._ray: Any = ray
        _connect(ray, found)
        self.host: str = self._ray.util.get_node_ip_address()
        self._processes: dict[int, Process] = {}
        self._names: dict[str, str] = {}  # of nodes, by Ray's id
        self._unplaced: list[Any] = []
        self._next = 0
        self._hub: Driver | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        try:
            self._take_lease()
        except BaseException:
            ray.shutdown()
            raise

    def nodes(self) -> list[Node]:
        """The machines that are alive, under their names."""
        own = self._ray.get_runtime_context().get_node_id()
        found = []
        for entry in self._ray.nodes():
            if not entry["Alive"]:
                continue
            address, resources = entry["NodeManagerAddress"], entry["Resources"]
            given = entry.get("NodeName")
            name = given if given and given != address else entry["NodeManagerHostname"]
            gpus, cpus = int(resources.get("GPU", 0)), float(resources.get("CPU", 0))
            found.append(Node(name, entry["NodeID"], address, gpus, cpus, entry["NodeID"] == own))
        return name_nodes(found, self._names)

    def start(self, slots: Sequence[Slot], spec: WorkerSpec, content_hash: str | None = None) -> list[dict[str, Any]]:
        """Starts a process for each slot, which opens the model; returns what each found, in the order of the slots.

        ``content_hash``: of the driver's checkpoint, which the nodes' must be; None: theirs need only be the same.

        Raises:
            MegatokenError: no free resources, a process that ended, or the error of a process.
            UsageError: nodes with different versions or checkpoints.
        """
        self._spec = spec
        self._ours = {"version": __version__, "content_hash": content_hash}
        with self._lock:
            for slot in slots:
                self._create(slot)
            processes = list(self._processes.values())
        for process in processes:
            process.facts = self._answer_of(process)
        _check_alike(processes, self._ours)
        return [process.facts for process in processes]

    def load(self) -> list[dict[str, Any]]:
        """Loads the weights in every process; returns what their engines run on."""
        processes = list(self._processes.values())
        for process in processes:
            process.stage, process.answer = "loading", process.actor.load.remote()
        for process in processes:
            process.facts |= self._answer_of(process)
        _check_alike(processes, {"weights_sha256": None})
        return [process.facts for process in processes]

    def serve(self, hub: Driver, key: bytes, replan: Callable[[Sequence[Node]], Sequence[Slot]], replace: bool) -> None:
        """Connects every process to ``hub``, waits until all are, and watches from now on.

        ``key``: secret of this run, which the hub knows. ``replan``: the slots that the nodes alive now should have.
        ``replace``: whether lost processes are restarted.

        Raises:
            MegatokenError: a process did not connect.
        """
        self._hub, self._key, self._replan, self._replace = hub, key, replan, replace
        numbers = set(self._processes)
        for process in self._processes.values():
            self._serve(process)
        deadline = time.monotonic() + PLACE_SECONDS
        while missing := numbers - hub.connected():
            if time.monotonic() > deadline:
                names = ", ".join(sorted({self._processes[number].slot.node.name for number in missing}))
                raise MegatokenError(
                    f"{len(missing)} of {len(numbers)} process{'es' * (len(numbers) != 1)} did not reach the driver at "
                    f"{hub.address[0]}:{hub.address[1]} within {PLACE_SECONDS:g} s ({names}); is there a firewall?"
                )
            time.sleep(0.05)
        self._thread = threading.Thread(target=self._watch, name="rack-cluster", daemon=True)
        self._thread.start()

    def serve_at(self, addresses: Mapping[str, tuple[str, int]], key: bytes) -> None:
        """Connects every process to the driver of its own node; nothing is watched or replaced.

        ``addresses``: of those drivers, by name of the node. ``key``: secret of this run, which they know.
        """
        for process in self._processes.values():
            host, port = addresses[process.slot.places[0].node]
            process.stage = "serving"
            process.answer = process.actor.serve.remote(host, port, key, process.number)

    def numbers(self) -> dict[int, Slot]:
        """Every process by its number."""
        return {process.number: process.slot for process in self._processes.values()}

    def start_unplaced(self, actor: type, node: Node, *arguments: object) -> Any:
        """Starts an actor on a node that takes none of Ray's resources. It takes ``max_concurrency`` calls at once."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        strategy = NodeAffinitySchedulingStrategy(node.ray_id, soft=False)
        options = {"num_cpus": 0, "max_concurrency": 3, "scheduling_strategy": strategy}
        handle: Any = self._ray.remote(actor).options(**options).remote(*arguments)
        self._unplaced.append(handle)
        return handle

    def ask(self, reference: Any, timeout_seconds: float) -> Any:
        """The answer of a call.

        Raises:
            TimeoutError: it has not answered yet.
            MegatokenError: the process is lost, or failed.
        """
        try:
            return self._ray.get(reference, timeout=timeout_seconds)
        except self._ray.exceptions.GetTimeoutError:
            raise TimeoutError from None
        except self._ray.exceptions.RayError as error:
            raise MegatokenError(_cause(error)) from None

    def close(self) -> None:
        """Ends all processes; a local cluster too."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        with suppress(Exception):  # a process that Ray no longer reaches is gone or ends by itself
            for process in self._processes.values():
                self._end(process)
            for actor in (*self._unplaced, self._lease):
                self._ray.kill(actor)
        with suppress(Exception):
            self._ray.shutdown()

    def _take_lease(self) -> None:
        ray = self._ray
        holder = f"{socket.gethostname()}, process {os.getpid()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}"
        lease = ray.remote(num_cpus=0)(Lease)
        try:
            self._lease = lease.options(name=LEASE).remote(holder)
            ray.get(self._lease.holder.remote(), timeout=PLACE_SECONDS)
        except ValueError:  # the name is taken
            other = "a driver that does not answer"
            with suppress(Exception):
                other = ray.get(ray.get_actor(LEASE).holder.remote(), timeout=REACH_SECONDS)
            resources, free = ray.cluster_resources(), ray.available_resources()
            held = ", ".join(
                f"{resources[unit] - free.get(unit, 0):g} of {resources[unit]:g} {unit}s"
                for unit in ("GPU", "CPU")
                if unit in resources
            )
            raise UsageError(
                f"another driver runs on this cluster ({other}; {held} in use); wait for it, or end it"
            ) from None
        except ray.exceptions.RayError:  # Ray takes seconds to notice that a node is dead
            raise UsageError("the Ray cluster starts nothing, so a node seems dead; check with: ray status") from None

    def _create(self, slot: Slot) -> Process:
        ray = self._ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        labels = [{"ray.io/node-id": slot.node.ray_id}]
        group = placement_group([slot.bundle], strategy="STRICT_PACK", bundle_label_selector=labels)
        actor = (
            ray.remote(self._actor)
            .options(
                num_cpus=slot.cpus,
                num_gpus=slot.gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
            )
            .remote(json.dumps(asdict(self._spec)), len(slot.places), slot.threads, slot.neighbours)
        )
        process = Process(self._next, slot, group, actor, "opening", actor.inspect.remote())
        self._next += 1
        self._processes[process.number] = process
        return process

    def _answer_of(self, process: Process) -> dict[str, Any]:
        """Waits for the answer of a stage; times out only if Ray has not placed the process."""
        ray, name = self._ray, process.slot.node.name
        placed_by = time.monotonic() + PLACE_SECONDS
        placed = False
        while True:
            done, _ = ray.wait([process.answer], timeout=WATCH_SECONDS)
            if done:
                break
            placed = placed or process.group.wait(0)
            if not placed and time.monotonic() > placed_by:
                free = ray.available_resources()
                raise MegatokenError(
                    f"{name}: no room for {process.slot.bundle} within {PLACE_SECONDS:g} s; the cluster has "
                    f"{free.get('GPU', 0):g} GPUs and {free.get('CPU', 0):g} CPUs free; stop other work on it"
                )
        try:
            return checked(ray.get(process.answer), name)
        except ray.exceptions.RayError as error:
            raise MegatokenError(f"{name}: {_cause(error)} while {process.stage} the model") from None

    def _serve(self, process: Process) -> None:
        if self._hub is None:
            return
        self._hub.register(process.number, process.slot.places)
        host, port = self._hub.address
        process.stage = "serving"
        process.answer = process.actor.serve.remote(host, port, self._key, process.number)

    def _watch(self) -> None:
        while not self._over.wait(WATCH_SECONDS):
            try:
                self._look()
            except Exception as error:  # Ray's head may be out of reach for a while; replicas continue to serve
                self._note(f"Ray: {_cause(error)}")

    def _look(self) -> None:
        """One round: removes lost processes, starts the next stage of others, starts missing ones."""
        if self._hub is None:
            return
        nodes = self.nodes()
        alive, connected = {node.ray_id for node in nodes}, self._hub.connected()
        for process in list(self._processes.values()):
            if process.number in connected:
                process.away_since = None
                continue
            if process.stage == "serving" and process.away_since is None:
                process.away_since = time.monotonic()
            away_seconds = 0.0 if process.away_since is None else time.monotonic() - process.away_since
            if process.slot.node.ray_id not in alive:
                self._remove(process, "its node left the cluster")
            elif away_seconds > self._spec.reconnect_seconds:
                self._remove(process, "it did not reconnect")
            else:
                self._advance(process)
        if self._replace:
            taken = {process.slot.places for process in self._processes.values()}
            for slot in self._replan(nodes):
                if slot.places not in taken:
                    self._create(slot)

    def _advance(self, process: Process) -> None:
        if process.stage == "refused":
            return
        done, _ = self._ray.wait([process.answer], timeout=0)
        if not done:
            return
        name = process.slot.node.name
        try:
            answer = self._ray.get(process.answer)
            if process.stage == "serving":
                self._remove(process, "its process ended")
                return
            process.facts |= checked(answer, name)
        except Exception as error:
            self._remove(process, _cause(error))
            return
        if process.stage == "opening":
            try:
                serving = [one for one in self._processes.values() if one.stage == "serving"]
                _check_alike([process, *serving], self._ours)
            except UsageError as error:
                self._note(f"{name} may not join: {error}")
                self._end(process)
                process.stage = "refused"  # its slot stays taken, so that it is not started again and again
                return
            process.stage, process.answer = "loading", process.actor.load.remote()
        elif process.stage == "loading":
            self._serve(process)

    def _remove(self, process: Process, cause: str) -> None:
        if self._hub is not None:
            self._hub.unregister(process.number, cause)
        self._end(process)
        del self._processes[process.number]

    def _end(self, process: Process) -> None:
        from ray.util.placement_group import remove_placement_group

        with suppress(Exception):
            self._ray.kill(process.actor)
        with suppress(Exception):
            remove_placement_group(process.group)


@contextmanager
def unheard() -> Iterator[None]:
    """Ray prints messages of its daemons on standard output, which is for the command's result."""
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        yield


def new_key() -> bytes:
    """A new secret for one run."""
    return secrets.token_bytes(KEY_BYTES)


def _connect(ray: Any, address: str | None) -> None:
    import logging

    logging.getLogger("ray").setLevel(logging.ERROR)
    quiet = {"log_to_driver": False, "configure_logging": False, "namespace": NAMESPACE}
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        if address is not None:
            ray.init(address=address, **quiet)
        else:
            ray.init(address="local", include_dashboard=False, object_store_memory=LOCAL_STORE_BYTES, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where, fix = address or "this machine", ""
        if address is not None:
            fix = (
                "; is the token this cluster's? set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN as for its nodes, or start "
                f"one with: {START} --head"
            )
        raise UsageError(f"Ray cannot be used at {where}: {_cause(error)}{fix}") from None
    finally:  # Ray replaces the signal handlers, which belong to the command
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)


def checked(answer: str, name: str) -> dict[str, Any]:
    """What a node's ``json_answer`` says. Raises MegatokenError: the error in it, with the node's name."""
    facts: dict[str, Any] = json.loads(answer)
    if "error" in facts:
        kind = UsageError if facts["exit_code"] == UsageError.exit_code else MegatokenError
        raise kind(f"{name}: {facts['error']}")
    return facts


_ALIKE = {
    "version": ("megatoken", "install the same version everywhere"),
    "content_hash": ("checkpoint", "copy the same files to every node"),
    "weights_sha256": ("weights", "copy the same files to every node"),
}


def _check_alike(processes: Sequence[Process], ours: Mapping[str, str | None]) -> None:
    """Refuses nodes that would not compute the same results. ``ours``: the facts to compare; None: the driver has none.

    Raises:
        UsageError: names what differs, and where.
    """
    for key, own in ours.items():
        what, fix = _ALIKE[key]
        found: dict[str, str] = {}
        for process in processes:
            found.setdefault(str(process.facts[key]), process.slot.node.name)
        if own is not None:
            found.setdefault(own, "the driver")
        if len(found) > 1:
            shown = ", ".join(f"{value[:12]} on {name}" for value, name in found.items())
            raise UsageError(f"nodes differ in {what}: {shown}; {fix}")


def _cause(error: BaseException) -> str:
    """One line from an error of Ray."""
    name = type(error).__name__
    if "ActorDied" in name or "WorkerCrashed" in name:
        return "its process was killed or crashed"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{name}: {lines[-1][:200] if lines else 'no reason given'}"
