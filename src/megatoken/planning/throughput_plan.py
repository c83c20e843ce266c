"""``megatoken plan throughput``: simulates the throughput of other hardware."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatoken.analysis.qualified import Machine
from megatoken.datasets.lengths import load_lengths
from megatoken.engine.config import EngineConfig
from megatoken.engine.cost_model import SECONDS_PER_SEQUENCE, StepCost
from megatoken.engine.measured_costs import CorrectedCosts
from megatoken.engine.schemes import scheme_of
from megatoken.engine.simulated import Simulation
from megatoken.errors import UsageError
from megatoken.planning.figures import Input, Plan, Result, State, Table
from megatoken.planning.rack_simulation import NodeRun, Progress, Rack, mean_cost, simulate_rack
from megatoken.planning.throughput import choose
from megatoken.text import count_of

SOFTWARE = tuple(SECONDS_PER_SEQUENCE)
MOST_MINUTES = 24 * 60  # a rate settles long before
LENGTHS_MODEL = "llama2-70b"  # whose request lengths ship with the package

_PARTS = {
    "products": "products of the layers",
    "decode_attention": "attention of decodes",
    "chunk_attention": "attention of prompts",
    "elementwise": "elementwise",
    "head": "head",
    "gaps": "gaps between kernels",
    "transfers": "sums and gathers over ranks",
    "stack": "software, per sequence",
}
_LIMITS = (
    "Computed, not measured: a hardware model computes the time of each step, and the real scheduler plans the "
    "requests. docs/simulation.md compares the model with measurements and lists its limits."
)
_MIXTURES = (
    "A mixture of experts: its products are taken at the rate of dense ones, so this is an upper bound. On one H200 "
    "gpt-oss-20b made 57 % of its bound and gpt-oss-120b 90 %, at 1,000 tokens in and out."
)
_SOURCES = {
    "megatoken": "this engine; in measurements, its GPU never waited for the host",
    "published": "extra time per step of MLPerf v5.1 result 5.1-0008 (4 GB200) relative to this engine",
}


def throughput(
    model: str,
    config: EngineConfig,
    gpu: str | None,
    *,
    machine: Machine | None = None,
    nodes: int,
    gpus_per_node: int,
    minutes: float,
    lengths: Path | None = None,
    output_tokens: float | None = None,
    software: str = "megatoken",
    progress: Progress | None = None,
) -> Plan:
    """The plan of ``megatoken plan throughput``, by its flags, on a GPU or a qualified machine.

    Raises as ``plan_throughput`` and ``load_lengths``, and UsageError for several GPUs of a processor."""
    if not 0 < minutes <= MOST_MINUTES:
        raise UsageError(f"--minutes is {minutes:g}; give a number above 0, at most {MOST_MINUTES:,}: a simulated day")
    name = gpu if machine is None else machine.name
    if name is None:
        raise UsageError("--gpu or --machine: give the GPU to simulate, or the qualify.json of a machine")
    if machine is not None and machine.gpu is None and gpus_per_node > 1:
        raise UsageError(
            f"--gpus-per-node {gpus_per_node}: {machine.source} is of a processor, {machine.name}, and the engine uses "
            "all of it once; leave it out, or give --nodes for several such machines"
        )
    if machine is not None and software != "megatoken":
        raise UsageError(
            f"--software {software}: a prediction from {machine.source} is of this engine; leave it out, or simulate a "
            "GPU with --gpu"
        )
    rack = Rack.of(model, config, name, nodes=nodes, gpus_per_node=gpus_per_node)
    rack = replace(rack, machine=machine)
    simulation = rack.simulation()
    table = load_lengths(
        lengths, vocabulary_size=simulation.model.vocabulary_size, max_length=simulation.memory.max_length
    )
    requests = np.stack((table.input_tokens, table.output_limits), axis=1)
    if output_tokens is not None:
        requests = scaled_answers(requests, output_tokens)
    plan = plan_throughput(
        rack, requests, seconds=minutes * 60, software=software, lengths_source=table.name, progress=progress
    )
    if lengths is None and rack.model.name != LENGTHS_MODEL:
        note = f"The token lengths are those of MLPerf's {LENGTHS_MODEL}, not of {rack.model.name}; give --lengths."
        return replace(plan, notes=(note, *plan.notes))
    return plan


def plan_throughput(
    rack: Rack,
    lengths: NDArray[np.int64],
    *,
    seconds: float,
    software: str = "megatoken",
    lengths_source: str = "given",
    progress: Progress | None = None,
) -> Plan:
    """The Offline rate of a rack for requests of ``lengths`` ``[N, 2]``: prompt and answer tokens.

    ``seconds`` of virtual time start requests, in a shuffled order; every step takes the overhead of ``software``,
    one of ``SOFTWARE``.

    Raises:
        UsageError: as ``simulate_rack``, or the software is unknown.
        CheckpointError, ConfigError, CapacityError: as ``plan_simulation``.
    """
    choose("--software", software, SOFTWARE)
    rack = rack.with_software(software)
    simulation = rack.simulation()
    runs = simulate_rack(rack, lengths, seconds=seconds, progress=progress)
    parts = mean_cost([run.parts for run in runs])
    return Plan(
        kind="plan_throughput",
        title=f"{rack.model.name} in {rack.config.precision} on {_hardware(rack)}, "
        + ("simulated" if rack.machine is None else "predicted from its qualification"),
        inputs=_inputs(rack, simulation, lengths, seconds, software, lengths_source),
        results=tuple(_results(rack, runs, parts)),
        tables=(_step_table(parts), *((_nodes_table(runs),) if len(runs) > 1 else ())),
        notes=(
            *(() if rack.machine is None else rack.machine.warnings(rack.config)),
            f"Rate of matrix products: {simulation.costs.basis}.",
            *((_MIXTURES,) if rack.model.experts is not None else ()),
            _LIMITS,
        ),
    )


def scaled_answers(lengths: NDArray[np.int64], mean_tokens: float) -> NDArray[np.int64]:
    """The same requests with answers scaled to another mean length. Raises UsageError unless 1 <= mean < 1e6."""
    if not 1 <= mean_tokens < 1e6:
        raise UsageError(f"--output-tokens: expected a mean of 1 to 999,999, got {mean_tokens:g}")
    answers = np.maximum(1, np.rint(lengths[:, 1] * (mean_tokens / lengths[:, 1].mean()))).astype(np.int64)
    return np.stack((lengths[:, 0], answers), axis=1)


def _hardware(rack: Rack) -> str:
    nodes = f"{rack.nodes} nodes of " if rack.nodes > 1 else ""
    if rack.machine is not None and rack.machine.gpu is None:
        return f"{nodes}{rack.gpu}"
    ranks = rack.config.tensor_parallel
    sharing = f", {ranks} per replica" if ranks > 1 else ""
    return f"{nodes}{rack.gpus_per_node} x {rack.gpu}{sharing}"


def _inputs(
    rack: Rack, simulation: Simulation, lengths: NDArray[np.int64], seconds: float, software: str, lengths_source: str
) -> tuple[Input, ...]:
    memory = simulation.memory
    state: State = "measured" if software == "megatoken" else "estimate"
    per_sequence = SECONDS_PER_SEQUENCE[software] * 1e6
    overhead = [Input("software", per_sequence, "us per step and sequence", state, _SOURCES[software])]
    if simulation.gpu is None:  # a processor waits for no host, and the time beyond its kernels has rows of its own
        overhead = []
    derived = "memory plan of the engine"
    mean_input, mean_output = (float(mean) for mean in lengths.mean(axis=0))
    return (
        *_rates(rack, simulation),
        Input("tokens per step", memory.max_batched_tokens, "tokens at most", "given", derived),
        Input("sequences", memory.max_sequences, "at most", "given", derived),
        Input("cache", memory.cache_tokens, "tokens", "estimate", derived),
        Input("input tokens", mean_input, "tokens/request, mean", "given", lengths_source),
        Input("output tokens", mean_output, "tokens/request, mean", "given", lengths_source),
        *overhead,
        Input("requests start within", seconds, "s", "given", "virtual time"),
    )


def _rates(rack: Rack, simulation: Simulation) -> Iterator[Input]:
    """What the times of steps rest on: the data sheet, or what qualify measured."""
    precision, machine, gpu = rack.config.precision, rack.machine, simulation.gpu
    if gpu is not None:
        sheet = "gpu_specs.csv"
        peak = gpu.operations_per_second[precision] / 1e12
        yield Input("matrix products, data sheet", peak, f"TFLOP/s, {precision}", "nameplate", sheet)
        yield Input("memory bandwidth", gpu.memory_bytes_per_second / 1e12, "TB/s", "nameplate", sheet)
    if machine is not None and gpu is None:
        rates = machine.processor_rates(scheme_of(rack.config), rack.model.layers)
        for tokens, rate in rates.products:
            name = f"products of {count_of(round(tokens), 'token')}"
            yield Input(name, rate / 1e9, "GFLOP/s", "measured", machine.source)
        yield Input("attention of decodes", rates.decode_attention / 1e9, "GB/s", "measured", machine.source)
        yield Input("attention of prompts", rates.prompt_attention / 1e9, "GFLOP/s", "measured", machine.source)
        yield Input("a step beyond its kernels", rates.step_seconds * 1e3, "ms", "estimate", machine.source)
        yield Input("a layer beyond its kernels", rates.layer_seconds * 1e3, "ms", "estimate", machine.source)
        yield Input("a token beyond its kernels", rates.token_seconds * 1e3, "ms", "estimate", machine.source)
    elif machine is not None:
        costs = machine.costs(rack.model, rack.config)
        if isinstance(costs, CorrectedCosts):
            for name, factor in asdict(costs.factors).items():
                title = f"{name.replace('_', ' ')}, against the model"
                if factor is None:
                    yield Input(title, 1.0, "of its time", "estimate", "not measured; as in the cost model")
                else:
                    yield Input(title, factor, "of its time", "measured", machine.source)


def _results(rack: Rack, runs: Sequence[NodeRun], parts: StepCost) -> list[Result]:
    gpus = rack.nodes * rack.gpus_per_node
    total = math.fsum(run.output_tokens_per_second for run in runs)
    tokens, longest = sum(run.output_tokens for run in runs), max(run.seconds for run in runs)
    processed = math.fsum((run.input_tokens + run.output_tokens) / run.seconds for run in runs)
    steps = sum(run.steps for run in runs)

    def mean(name: str) -> float:
        return math.fsum(getattr(run, name) * run.steps for run in runs) / steps

    unit = "output tokens/s"
    results = [
        Result("Per accelerator", total / gpus, unit, "whole run, including ramp and drain", "estimate"),
        Result("All nodes", total, unit, "sum of the rates of the nodes", "estimate"),
        Result("All nodes, makespan", tokens / longest, unit, "all tokens / time of the slowest node", "estimate"),
        Result("Input + output", processed, "tokens/s", "sum of the rates of the nodes", "estimate"),
        Result("Simulated time", longest, "s", "until the last answer was complete", "given"),
        Result("Samples", sum(run.samples for run in runs), "samples", "all nodes", "estimate"),
        Result("Sequences per step", mean("mean_sequences"), "sequences", "mean per replica", "estimate"),
        Result("Tokens per step", mean("mean_rows"), "tokens", "mean per replica", "estimate"),
        Result("Step", parts.seconds * 1e3, "ms", "mean per replica", "estimate"),
        Result("Preemptions", sum(run.preemptions for run in runs), "sequences", "all nodes", "estimate"),
    ]
    if not math.isnan(parts.watts):
        results.append(Result("Power per accelerator", parts.watts, "W", "from its clock and load", "estimate"))
        joules = parts.watts * gpus / total
        results.append(Result("Energy per output token", joules, "J", "accelerators only", "estimate"))
    return results


def _step_table(parts: StepCost) -> Table:
    rows = [
        {"part": label, "time_ms": seconds * 1e3, "share": seconds / parts.seconds}
        for name, label in _PARTS.items()
        if (seconds := getattr(parts, name))
    ]
    return Table("step", "Time of the mean step, by part", tuple(rows))


def _nodes_table(runs: Sequence[NodeRun]) -> Table:
    rows = [
        {
            "node": number,
            "output_tokens_per_second": run.output_tokens_per_second,
            "duration_seconds": run.seconds,
            "samples": run.samples,
            "latency_p50_seconds": float(np.quantile(run.completion_seconds, 0.5)),
            "latency_p99_seconds": float(np.quantile(run.completion_seconds, 0.99)),
        }
        for number, run in enumerate(runs, 1)
    ]
    note = "nodes differ only in the order of their requests; real nodes differ more"
    return Table("nodes", "Nodes", tuple(rows), note)
