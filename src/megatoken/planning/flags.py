"""The flags of ``megatoken plan``, once: types and defaults for the plans, metavars and texts for the help."""

# ruff: noqa: RUF009 - ``_flag`` makes a field of a dataclass, with its default
from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def _flag(metavar: str, text: str, default: Any = None) -> Any:
    return field(default=default, metadata={"metavar": metavar, "help": text})


@dataclass(frozen=True, slots=True)
class Rate:
    """The rate that a plan starts from: a run folder, a folder of repeats, a sweep, or a number with its scope.

    With a run, only ``accelerators`` and ``accelerator`` may be given, for a folder that does not state them.
    """

    run: Path | None = None
    tokens_per_second: float | None = _flag("N", "The rate, instead of RUN.")
    per: str | None = _flag("accelerator|node|rack|system", "What has this rate.")
    counted: str | None = _flag("output|total", "Tokens that the rate counts. Default: output.")
    accelerators: int | None = _flag("N", "Number of accelerators.")
    accelerator: str | None = _flag("NAME", "Accelerator model, for example GB300.")
    scenario: str | None = _flag("offline|server|interactive", "Scenario in which the rate was measured.")
    state: str | None = _flag("STATE", "State: measured, verified, unverified or estimate. Default: unverified.")
    source: str | None = _flag("TEXT", "Source of the rate.")
    input_per_output: float | None = _flag("X", "Input tokens per output token of the requests.")
    model: str | None = _flag("SHAPE", "Named model shape, for KV memory and step times. Default: llama2-70b.")
    precision: str | None = _flag("bf16|fp8|fp4", "Number format. Default: the fastest of the accelerator.")
    sweep: Path | None = _flag(
        "FOLDER|sweep.json", "Measured curve, instead of RUN: the rate at which the limits are kept."
    )
    percentile: str | None = _flag("p50|p90|p95|p99", "Of a sweep's requests, that must keep the limits. Default: p99.")


@dataclass(frozen=True, slots=True)
class Common:
    """Flags of all plans: limits, profiles, assumptions, and factors that lower the rate."""

    ttft_limit: float | None = _flag("SECONDS", "Longest time to first token.")
    tpot_limit: float | None = _flag("SECONDS", "Longest time per output token.")
    profile: list[str] = _flag("NAME", "Workload profile; repeatable.", ())
    profiles: Path | None = _flag("FILE", "Your own workload profiles (YAML).")
    settings: list[str] = _flag("NAME=VALUE[:LOW:HIGH]", "Change an assumption; repeatable.", ())
    assumptions: Path | None = _flag("FILE", "Your own assumptions (YAML).")
    slo: Path | None = _flag("FILE", "Your limits (YAML); a plan keeps p99 of ttft_seconds and tpot_seconds.")
    second_run: Path | None = _flag("RUN", "Run of the same system with other input and output lengths.")
    factors: list[str] = _flag("NAME=SHARE", "Factor that lowers the rate, for example makespan=0.936; repeatable.", ())


@dataclass(frozen=True, slots=True)
class PowerFlags:
    """Power as given by the user; without ``watts``, the power of the run, else that of the data sheet."""

    watts: float | None = _flag("N", "Power in watts. Default: measured in RUN, otherwise nameplate.")
    boundary: str | None = _flag("wall|accelerators", "Where --watts was measured. Default: wall.")
    watts_state: str | None = _flag(
        "STATE", "State of --watts: measured, verified, estimate, nameplate. Default: given."
    )


@dataclass(frozen=True, slots=True)
class FleetFlags:
    """Demand and shape of a fleet; ``replace_nodes`` and ``replace_rate`` plan a replacement instead."""

    demand: float | None = _flag("N", "Constant demand, or peak of --curve.")
    unit: str = _flag("interactions|users|output-tokens", "Unit of --demand.", "interactions")
    curve: str | None = _flag("NAME|FILE.csv", "Demand over time: a named curve or a CSV file.")
    accelerators_per_node: int | None = _flag("N", "Accelerators per node.")
    nodes_per_rack: int | None = _flag("N", "Nodes per rack.")
    spare: int = _flag("N", "Spare fault domains: how many may fail without loss.", 1)
    fault_domain: str = _flag("node|rack", "What fails as one unit.", "node")
    burst_tokens_per_second: float | None = _flag("N", "Tokens/s of one node of a second class, rented by the hour.")
    burst_accelerators_per_node: int | None = _flag("N", "Accelerators per node of the second class.")
    replace_nodes: int | None = _flag("N", "Compute how many nodes replace N old nodes.")
    replace_rate: float | None = _flag("N", "Tokens/s of one old node.")
    rent: float | None = _flag("DOLLARS", "Price of an accelerator hour, instead of buying.")
