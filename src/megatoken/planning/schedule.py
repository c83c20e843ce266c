"""The schedule of a busy replica: how many requests it holds, how long its steps take, and which bound holds.

A replica that serves ``b`` requests decodes ``b`` tokens in each step and computes the prompts of the requests that
take the places of ended ones. The cost model (docs/simulation.md) gives the time of this mean step. Formulas:
docs/planning.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from megatoken.analysis.published import accelerator_facts
from megatoken.engine.config import EngineConfig, Precision
from megatoken.engine.cost_model import SECONDS_PER_SEQUENCE
from megatoken.engine.gpus import find_gpu
from megatoken.engine.simulated import Simulation, plan_simulation
from megatoken.errors import CapacityError, CheckpointError, ConfigError, UsageError

Bound = Literal["compute", "KV memory", "latency: time to first token", "latency: time per output token"]
PRECISIONS: tuple[Precision, ...] = ("fp4", "fp8", "bf16")  # fastest first
RANKS = (1, 2, 4, 8)
EVERY_COUNT_TO, COARSER = 64, 1.02  # the curve has every number of requests up to 64, then steps of 2 %
TAIL = 100  # waits are 99th percentiles: one request of 100 waits longer


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean tokens of a request: ``sent`` of its prompt, ``computed`` of them (not in a prefix cache), ``output``."""

    sent: float
    computed: float
    output: float

    @property
    def context(self) -> float:
        """Tokens in the KV cache when the request ends."""
        return self.sent + self.output


@dataclass(frozen=True, slots=True)
class Replica:
    """One copy of a model shape in a number format on ``ranks`` accelerators of one kind."""

    model: str
    precision: Precision
    gpu: str
    ranks: int = 1

    @property
    def simulation(self) -> Simulation:
        """Sizes and step times, with the overhead of published serving software."""
        return _simulation(self)

    @property
    def cache_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.simulation.memory.cache_tokens

    @property
    def step_tokens(self) -> int:
        """Most tokens of a step."""
        return self.simulation.memory.max_batched_tokens

    def memory_requests(self, lengths: Lengths) -> int:
        """Requests whose contexts, in whole pages, fit in the KV cache; with windows, these too."""
        memory, page = self.simulation.memory, self.simulation.memory.page_size
        whole = self.cache_tokens // (page * math.ceil(lengths.context / page))
        return min(whole, memory.max_sequences) if memory.window_pages else whole

    def step_seconds(self, lengths: Lengths, requests: int) -> float:
        """Time of the mean step with ``requests`` in flight; prompts of ended requests' successors are part of it."""
        prompts = math.ceil(requests / lengths.output)
        chunk = requests * lengths.computed / (lengths.output * prompts)
        start = lengths.sent - lengths.computed + max(0.0, lengths.computed - chunk) / 2
        cached = requests * (lengths.sent + lengths.output / 2)
        chunks = [(start, chunk)] * prompts if chunk else []
        samples = requests + requests / lengths.output
        return self.simulation.costs.step_of(requests, cached, chunks, samples).seconds  # type: ignore[arg-type]


@lru_cache
def _simulation(replica: Replica) -> Simulation:
    config = EngineConfig(precision=replica.precision, tensor_parallel=replica.ranks)
    overhead = SECONDS_PER_SEQUENCE["published"]
    return plan_simulation(replica.model, config, replica.gpu, seconds_per_sequence=overhead)


@dataclass(frozen=True, slots=True)
class Point:
    """A replica with so many requests in flight; ``ttft_seconds`` is the 99th percentile, infinite if prompts queue up.

    Times are those of the cost model, before calibration.
    """

    requests: int
    tpot_seconds: float
    ttft_seconds: float

    @property
    def output_tokens_per_second(self) -> float:
        """Of the replica."""
        return self.requests / self.tpot_seconds


@lru_cache(maxsize=4096)
def curve(replica: Replica, lengths: Lengths) -> tuple[Point, ...]:
    """Points up to what a step has tokens for, with ascending requests; those that memory cannot hold included."""
    points, requests = [], 1
    while requests < replica.step_tokens:
        step = replica.step_seconds(lengths, requests)
        prompt = lengths.computed / (replica.step_tokens - requests) * step
        points.append(Point(requests, step, step + prompt + _queue_seconds(prompt, requests / lengths.output / step)))
        requests = requests + 1 if requests < EVERY_COUNT_TO else math.ceil(requests * COARSER)
    return tuple(points)


def _queue_seconds(service_seconds: float, prompts_per_second: float) -> float:
    """99th percentile of the wait of Poisson arrivals for a server with a constant service time (heavy traffic)."""
    busy = service_seconds * prompts_per_second
    if busy >= 1:
        return math.inf
    return service_seconds * max(0.0, math.log(TAIL * busy) if busy else 0.0) / (2 * (1 - busy))


@dataclass(frozen=True, slots=True)
class Schedule:
    """The highest rate of a replica within its bounds; ``bound`` is the one that holds.

    ``memory_requests`` and ``latency_requests`` are the most requests in flight that KV memory and latency allow;
    None: latency allows every number on the curve.
    """

    replica: Replica
    requests: int
    output_tokens_per_second: float
    tpot_seconds: float
    ttft_seconds: float
    bound: Bound
    memory_requests: int
    latency_requests: int | None


def schedule(
    replica: Replica,
    lengths: Lengths,
    *,
    speed: float = 1.0,
    ttft_limit_seconds: float = math.inf,
    tpot_limit_seconds: float = math.inf,
) -> Schedule:
    """The schedule of a replica that is ``speed`` times as fast as the cost model says.

    Raises:
        UsageError: memory holds no request, or a request alone breaks a limit.
    """
    memory = replica.memory_requests(lengths)
    if not memory:
        raise UsageError(
            f"a request of {lengths.context:,.0f} tokens does not fit in the KV cache of {replica.model} on"
            f" {replica.gpu} ({replica.cache_tokens:,} tokens); shorten its context"
        )
    bound: Bound = "compute"
    best, latency, late = None, None, False
    for point in curve(replica, lengths):
        if point.requests > memory:
            bound = "KV memory"
            break
        late = point.tpot_seconds > tpot_limit_seconds * speed
        if late or point.ttft_seconds > ttft_limit_seconds * speed:
            latency = point.requests - 1
            bound = "latency: time per output token" if late else "latency: time to first token"
            break
        if best is None or point.output_tokens_per_second >= best.output_tokens_per_second:
            best = point
    if best is None:
        limit, flag = ("time per output token", "--tpot-limit") if late else ("time to first token", "--ttft-limit")
        raise UsageError(f"one request alone on {replica.gpu} breaks the limit on {limit}; raise {flag}")
    return Schedule(
        replica,
        best.requests,
        best.output_tokens_per_second * speed,
        best.tpot_seconds / speed,
        best.ttft_seconds / speed,
        bound,
        memory,
        latency,
    )


def offline_rate(replica: Replica, lengths: Lengths) -> float:
    """Output tokens/s of a full replica without latency limits: memory and the tokens of a step bound it."""
    full = int(replica.step_tokens / (1 + lengths.computed / lengths.output))
    most = max(1, min(full, replica.memory_requests(lengths)))
    return most / replica.step_seconds(lengths, most)


def find_replica(model: str, precision: str | None, accelerator: str | None, lengths: Lengths) -> Replica | str:
    """The replica that serves ``lengths`` with the highest rate per accelerator, or why the cost model knows none.

    Without a ``precision`` it is the fastest that the accelerator has.
    """
    facts = accelerator_facts(accelerator)
    if facts is None:
        return f"the accelerator {accelerator or 'is not named'}{' is not in gpu_specs.csv' if accelerator else ''}"
    known = find_gpu(facts.name).operations_per_second
    chosen = precision or next(one for one in PRECISIONS if one in known)
    rates, why = {}, ""
    for ranks in RANKS:
        replica = Replica(model, chosen, facts.name, ranks)  # type: ignore[arg-type]
        try:
            if replica.memory_requests(lengths):
                rates[replica] = offline_rate(replica, lengths) / ranks
        except (CapacityError, CheckpointError, ConfigError) as error:
            why = str(error)
    return max(rates, key=lambda one: rates[one]) if rates else why or f"{model} does not fit on {facts.name}"
