"""Simulates a rack in virtual time with real schedulers and computed step times; no tokens are generated.

Each node has a queue from which its replicas pull. Offline: all requests wait from the start, replicas pull no request
after ``seconds``, and pulled requests are completed. Nodes are independent, so they are simulated in parallel.
"""

from __future__ import annotations

import gc
import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from megatoken.analysis.qualified import Machine
from megatoken.engine.config import EngineConfig, ModelConfig, find_shape
from megatoken.engine.cost_model import SECONDS_PER_SEQUENCE, StepCost
from megatoken.engine.simulated import Simulation, plan_simulation
from megatoken.errors import MegatokenError, UsageError
from megatoken.processes import in_order, usable_cores

KEPT_WAITING = 64
"""Requests that a replica keeps waiting: more than one step admits, so that no step lacks requests."""
PRICED_IN_PARTS = 16
"""Every so many steps, the parts of the step's time are kept for their mean."""

Progress = Callable[[int, int], None]  # nodes done, all nodes


@dataclass(frozen=True, slots=True)
class Rack:
    """A rack to simulate; ``seconds_per_sequence`` as in ``CostModel``.

    With a ``machine`` each node is that one, and the times of steps follow from its measurements.
    """

    model: ModelConfig
    config: EngineConfig
    gpu: str
    nodes: int = 1
    replicas_per_node: int = 1
    seconds_per_sequence: float = 0.0
    machine: Machine | None = None

    @classmethod
    def of(cls, model: str, config: EngineConfig, gpu: str, *, nodes: int, gpus_per_node: int) -> Rack:
        """A rack that runs a named shape, with one replica per group of tensor-parallel GPUs.

        Raises:
            UsageError: the GPUs of a node do not divide into replicas.
            CheckpointError: the shape is unknown.
        """
        ranks = config.tensor_parallel
        for flag, number in (("--nodes", nodes), ("--gpus-per-node", gpus_per_node)):
            if number < 1:
                raise UsageError(f"{flag}: expected 1 or more, got {number}")
        if gpus_per_node % ranks:
            raise UsageError(
                f"--gpus-per-node: expected a multiple of {ranks} (engine.tensor_parallel), got {gpus_per_node}; give "
                f"--gpus-per-node {-(-gpus_per_node // ranks) * ranks}"
            )
        return cls(find_shape(model), config, gpu, nodes, gpus_per_node // ranks)

    @property
    def gpus_per_node(self) -> int:
        """GPUs of a node: its replicas times the ranks of each."""
        return self.replicas_per_node * self.config.tensor_parallel

    def with_software(self, software: str) -> Rack:
        """The same rack with the overhead of the named software, one of ``SECONDS_PER_SEQUENCE``."""
        return replace(self, seconds_per_sequence=SECONDS_PER_SEQUENCE[software])

    def simulation(self) -> Simulation:
        """Sizes and step times of a replica. Raises as ``plan_simulation``."""
        if self.machine is not None:
            memory = self.machine.memory(self.model, self.config)
            return Simulation(self.model, memory, self.machine.costs(self.model, self.config), self.machine.gpu)
        return plan_simulation(self.model, self.config, self.gpu, seconds_per_sequence=self.seconds_per_sequence)


@dataclass(frozen=True, slots=True)
class NodeRun:
    """The result of one node; times are seconds since its start."""

    output_tokens: int
    input_tokens: int
    samples: int
    seconds: float  # when its last step ended
    steps: int
    preemptions: int
    mean_sequences: float
    mean_rows: float
    progress: NDArray[np.float64]  # [N, 2] time, and output tokens until then
    completion_seconds: NDArray[np.float32]  # [samples] when each sample was complete, sorted
    parts: StepCost  # the mean step and its parts

    @property
    def output_tokens_per_second(self) -> float:
        """Over the whole run, including ramp and drain."""
        return self.output_tokens / self.seconds


def simulate_rack(
    rack: Rack,
    lengths: NDArray[np.int64],
    *,
    seconds: float,
    seed: int = 0,
    workers: int | None = None,
    progress: Progress | None = None,
) -> list[NodeRun]:
    """Simulates every node of a rack, in one process per core unless ``workers`` says otherwise.

    Each node repeats all requests, whose prompt and answer tokens are ``lengths`` ``[N, 2]``, each time in another
    order by ``seed``; after ``seconds`` of virtual time it starts none. ``progress`` is called after each node.

    Raises:
        UsageError: a size is out of range, or a request is too long for a replica.
        CheckpointError, ConfigError, CapacityError: as ``plan_simulation``.
    """
    if min(rack.nodes, rack.replicas_per_node) < 1 or not 0 < seconds < math.inf:
        raise UsageError("nodes, replicas per node and seconds: expected numbers above 0")
    memory = rack.simulation().memory
    longest = int(lengths.sum(axis=1).max())
    if lengths.min() < 1 or longest > memory.max_length:
        raise UsageError(
            f"the longest request has {longest:,} tokens; these settings allow {memory.max_length:,}, and every prompt "
            "and answer needs at least one; change the lengths or engine.max_length"
        )
    tasks = [(rack, lengths, seconds, seed + node) for node in range(rack.nodes)]
    workers = min(workers or usable_cores(), len(tasks))
    finished = None if progress is None else lambda done: progress(done, len(tasks))
    return list(in_order(_simulate_alone if workers > 1 else _simulate_node, tasks, workers, _lost, finished))


_Task = tuple[Rack, NDArray[np.int64], float, int]


def _lost(task: _Task) -> NoReturn:
    raise MegatokenError(
        "a process of the simulation ended early; is there enough memory? Simulate fewer nodes or less time"
    )


def _simulate_alone(task: _Task) -> NodeRun:
    """In a process of its own: there are no reference cycles, and a collection would visit all waiting requests."""
    gc.disable()
    return _simulate_node(task)


def _simulate_node(task: _Task) -> NodeRun:
    rack, lengths, seconds, seed = task
    simulation = rack.simulation()
    queue = _endless(lengths, seed)
    replicas = [_Replica(simulation, queue, seconds) for _ in range(rack.replicas_per_node)]
    due = [(0.0, number) for number in range(len(replicas))]
    while due:  # the replica whose step ends first pulls first
        now, number = due[0]
        ended = replicas[number].step(now)
        if ended is None:
            heapq.heappop(due)
        else:
            heapq.heapreplace(due, (ended, number))
    return _together(replicas)


def _endless(lengths: NDArray[np.int64], seed: int) -> Iterator[list[int]]:
    draw = np.random.default_rng(seed)
    return chain.from_iterable(lengths[draw.permutation(len(lengths))].tolist() for _ in repeat(None))


class _Replica:
    """One engine in virtual time, step by step."""

    def __init__(self, simulation: Simulation, queue: Iterator[list[int]], seconds: float) -> None:
        self._scheduler, self._costs = simulation.memory.scheduler(), simulation.costs
        self._queue, self._until = queue, seconds
        self.preemptions = self.samples = self.input_tokens = self.rows = self.sequences = 0
        self.times: list[float] = []  # for each step: its end, the tokens it made, the samples complete by then
        self.tokens: list[int] = []
        self.completed: list[int] = []
        self.parts: list[StepCost] = []

    def step(self, now: float) -> float | None:
        """Starts a step at ``now``; returns when it ends, or None if no request is left."""
        scheduler = self._scheduler
        if now < self._until:
            for _ in range(KEPT_WAITING - scheduler.waiting):
                prompt, answer = next(self._queue)
                scheduler.add(self.samples, prompt, answer)
                self.samples += 1
                self.input_tokens += prompt
        plan = scheduler.plan()
        if plan is None:
            self.preemptions = scheduler.preemptions
            return None
        cost = self._costs.step(plan)
        end = now + cost.seconds
        sequences = len(plan.sample)
        if not len(self.times) % PRICED_IN_PARTS:
            self.parts.append(cost)
            self.sequences += sequences
            self.rows += int(plan.count.sum())
        self.times.append(end)
        self.tokens.append(sequences - 1 + int(plan.sample[-1]))
        self.completed.append(self.samples - scheduler.waiting - scheduler.running)
        return end


def mean_cost(costs: Sequence[StepCost]) -> StepCost:
    """The mean step; its clock and power are means weighted by time."""
    *parts, clock, watts = (np.array(column) for column in zip(*costs, strict=True))
    seconds = parts[0]
    over_time = (np.average(column, weights=seconds) for column in (clock, watts))
    return StepCost(*(float(mean) for mean in (*map(np.mean, parts), *over_time)))


def _together(replicas: Sequence[_Replica]) -> NodeRun:
    times = np.concatenate([replica.times for replica in replicas])
    order = np.argsort(times)
    tokens = np.cumsum(np.concatenate([replica.tokens for replica in replicas])[order])
    completions = [np.repeat(replica.times, np.diff(replica.completed, prepend=0)) for replica in replicas]
    parts = [cost for replica in replicas for cost in replica.parts]
    return NodeRun(
        output_tokens=int(tokens[-1]),
        input_tokens=sum(replica.input_tokens for replica in replicas),
        samples=sum(replica.samples for replica in replicas),
        seconds=float(times[order[-1]]),
        steps=len(times),
        preemptions=sum(replica.preemptions for replica in replicas),
        mean_sequences=sum(replica.sequences for replica in replicas) / len(parts),
        mean_rows=sum(replica.rows for replica in replicas) / len(parts),
        progress=np.stack((times[order], tokens), axis=1),
        completion_seconds=np.sort(np.concatenate(completions)).astype(np.float32),
        parts=mean_cost(parts),
    )
