"""``megatoken plan``: buy, capacity, fleet, energy and cost from a rate; throughput simulates the rate itself."""

from __future__ import annotations

from dataclasses import fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatoken.cli.flags import FLAGS, Command, flag, group, key_command, place
from megatoken.cli.output import Json, Out, counted, deliver
from megatoken.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from megatoken.planning.figures import Plan

app = group("Turn a rate into users, machines, watts and money.")

_TEXT, _NUMBER, _COUNT, _FILE, _LIST = str | None, float | None, int | None, Path | None, list[str] | None
# Flags by the name of their field in planning/commands.py: type, metavar, help.
_FIELDS: dict[str, tuple[Any, str, str]] = {
    "tokens_per_second": (_NUMBER, "N", "The rate, instead of RUN."),
    "per": (_TEXT, "accelerator|node|rack|system", "What has this rate."),
    "counted": (_TEXT, "output|total", "Tokens that the rate counts. Default: output."),
    "accelerators": (_COUNT, "N", "Number of accelerators."),
    "accelerator": (_TEXT, "NAME", "Accelerator model, for example GB300."),
    "scenario": (_TEXT, "offline|server|interactive", "Scenario in which the rate was measured."),
    "state": (_TEXT, "STATE", "State of the rate: measured, verified, unverified, estimate. Default: unverified."),
    "source": (_TEXT, "TEXT", "Source of the rate."),
    "input_per_output": (_NUMBER, "X", "Input tokens per output token of the requests."),
    "model": (_TEXT, "SHAPE", "Named model shape, for KV memory and step times. Default: llama2-70b."),
    "precision": (_TEXT, "bf16|fp8|fp4", "Number format. Default: the fastest of the accelerator."),
    "sweep": (_FILE, "FOLDER|sweep.json", "Measured curve, instead of RUN: the rate at which the limits are kept."),
    "percentile": (_TEXT, "p50|p90|p95|p99", "Of a sweep's requests, that must keep the limits. Default: p99."),
    "ttft_limit": (_NUMBER, "SECONDS", "Longest time to first token."),
    "tpot_limit": (_NUMBER, "SECONDS", "Longest time per output token."),
    "profile": (_LIST, "NAME", "Workload profile; repeatable."),
    "profiles": (_FILE, "FILE", "Your own workload profiles (YAML)."),
    "settings": (_LIST, "NAME=VALUE[:LOW:HIGH]", "Change an assumption; repeatable."),
    "assumptions": (_FILE, "FILE", "Your own assumptions (YAML)."),
    "slo": (_FILE, "FILE", "Your limits (YAML); a plan keeps p99 of ttft_seconds and tpot_seconds."),
    "factors": (_LIST, "NAME=SHARE", "Factor that lowers the rate, for example makespan=0.936; repeatable."),
    "second_run": (_FILE, "RUN", "Run of the same system with other input and output lengths."),
    "seats": (int, "N", "People who have access."),
    "demand": (_NUMBER, "N", "Constant demand, or peak of --curve."),
    "unit": (str, "interactions|users|output-tokens", "Unit of --demand."),
    "curve": (_TEXT, "NAME|FILE.csv", "Demand over time: a named curve or a CSV file."),
    "accelerators_per_node": (_COUNT, "N", "Accelerators per node."),
    "nodes_per_rack": (_COUNT, "N", "Nodes per rack."),
    "spare": (int, "N", "Spare fault domains: how many may fail without loss."),
    "fault_domain": (str, "node|rack", "What fails as one unit."),
    "burst_tokens_per_second": (_NUMBER, "N", "Tokens/s of one node of a second class, rented by the hour."),
    "burst_accelerators_per_node": (_COUNT, "N", "Accelerators per node of the second class."),
    "replace_nodes": (_COUNT, "N", "Compute how many nodes replace N old nodes."),
    "replace_rate": (_NUMBER, "N", "Tokens/s of one old node."),
    "watts": (_NUMBER, "N", "Power in watts. Default: measured in RUN, otherwise nameplate."),
    "boundary": (_TEXT, "wall|accelerators", "Where --watts was measured. Default: wall."),
    "watts_state": (_TEXT, "STATE", "State of --watts: measured, verified, estimate, nameplate. Default: given."),
    "rent": (_NUMBER, "DOLLARS", "Price of an accelerator hour, instead of buying."),
}
_NAMES = tuple(_FIELDS)
_OF_ALL = _NAMES[: _NAMES.index("factors")]
_OF_POWER = ("watts", "boundary", "watts_state")
_OTHER_NAMES = {"settings": "--set", "factors": "--factor"}
_DEFAULTS = {"unit": "interactions", "spare": 1, "fault_domain": "node"}


def _made(kind: str, flags: dict[str, Any]) -> Plan:
    from megatoken.planning import commands

    def part(parts: type[Any]) -> Any:
        names = [field.name for field in fields(parts)]
        return parts(**{name: flags[name] for name in names if flags.get(name) is not None})

    rate, common, second_run = part(commands.Rate), part(commands.Common), flags.get("second_run")
    if kind == "capacity":
        return commands.capacity(rate, common, second_run=second_run)
    if kind == "fleet":
        return commands.fleet(rate, common, part(commands.FleetFlags))
    if kind == "buy":
        return commands.buy(rate, common, part(commands.FleetFlags), seats=flags["seats"])
    power = part(commands.PowerFlags)
    if kind == "energy":
        return commands.energy(rate, common, power)
    return commands.cost(rate, common, power, rent=flags["rent"], second_run=second_run)


def _add(kind: str, words: str, *own: str) -> None:
    """Add the command of a plan, with the flags of all plans and its ``own``."""
    types: dict[str, Any] = {"run": Annotated[_FILE, place("RUN", _RUN)]}
    for name in (*_OF_ALL, *own):
        of, metavar, text = _FIELDS[name]
        typed = _OTHER_NAMES.get(name, f"--{name.replace('_', '-')}")
        types[name] = Annotated[of, flag(metavar, text, typed)]
    types |= {"out": Out, "json_only": Json}

    def command(*, out: Path | None, json_only: bool, **flags: Any) -> int:
        deliver(_made(kind, flags).to_document(), json_only=json_only, out=out)
        return ExitCode.OK

    defaults = {**_DEFAULTS, "json_only": False, "seats": Parameter.empty}
    command.__signature__ = Signature(  # type: ignore[attr-defined]
        [
            Parameter(name, Parameter.KEYWORD_ONLY, default=defaults.get(name), annotation=of)
            for name, of in types.items()
        ]
    )
    command.__annotations__ = types
    app.command(kind, cls=Command, help=words)(command)


_RUN = "Run folder, folder of repeats, or aggregate.json; or give --sweep or --tokens-per-second."
_add(
    "buy",
    "Racks, money and energy for so many seats. With ranges; for example: --seats 5000 --profile rag"
    " --accelerator GB300.",
    "seats",
    *("accelerators_per_node", "nodes_per_rack", "spare", "fault_domain", "rent", "factors"),
)
_add(
    "capacity",
    "How many requests and users a rate serves. By the usual formula, and with its hidden assumptions stated.",
    "second_run",
    "factors",
)
_OF_FLEET = _NAMES[_NAMES.index("demand") : _NAMES.index("watts")]
_add("fleet", "How many accelerators, nodes and racks a demand needs.", *_OF_FLEET, "rent", "factors")
_add("energy", "Energy and carbon per token. Of accelerators, machines and site.", *_OF_POWER)
_add(
    "cost",
    "Cost per million tokens, request and user. And what it depends on.",
    *_OF_POWER,
    "rent",
    "second_run",
    "factors",
)


@app.command(cls=key_command({}, prefix="engine."))
def throughput(
    ctx: typer.Context,
    gpu: Annotated[str | None, flag("NAME", "GPU to simulate, for example H200 or GB300.")] = None,
    machine: Annotated[
        Path | None, flag("FILE", "qualify.json of a machine, a CPU too: predict from its measurements.")
    ] = None,
    model: Annotated[str, flag("SHAPE", "Named model shape.")] = "llama2-70b",
    precision: Annotated[str, flag("bf16|fp8|fp4", "Number format of the layers' matrix products.")] = "fp8",
    nodes: Annotated[int, flag("N", "Nodes in the rack.")] = 1,
    gpus_per_node: Annotated[int, flag("N", "GPUs per node; each holds a copy of the model.")] = 1,
    minutes: Annotated[float, flag("N", "Simulated minutes in which requests start.")] = 10.0,
    lengths: Annotated[Path | None, flag("FILE", "CSV of token lengths.")] = None,
    output_tokens: Annotated[float | None, flag("N", "Scale the answer lengths to this mean.")] = None,
    software: Annotated[
        str, flag("megatoken|published", "Software whose overhead per step is simulated.")
    ] = "megatoken",
    out: Out = None,
    json_only: Json = False,
) -> int:
    """Simulate throughput on other hardware. Or predict it on a qualified machine. Offline, in simulated time."""
    from megatoken.config import load_run_config
    from megatoken.planning.throughput_plan import throughput as simulated

    for key in ("device", "threads"):
        if f"engine.{key}" in ctx.meta[FLAGS]:
            raise UsageError(f"--engine.{key}: this machine computes nothing here; leave it out")
    if (gpu is None) == (machine is None):
        raise UsageError("--gpu or --machine: give one of them, a GPU to simulate or the qualify.json of a machine")
    simulated_gpu = {} if gpu is None else {"rack.simulated_gpu": gpu}
    flags = {"precision": precision, **simulated_gpu, **ctx.meta[FLAGS]}
    config = load_run_config(None, flags, rack="auto" if gpu else None)
    with counted("simulating nodes") as progress:
        plan = simulated(
            model,
            config.engine_config(),
            gpu,
            machine=machine,
            nodes=nodes,
            gpus_per_node=gpus_per_node,
            minutes=minutes,
            lengths=lengths,
            output_tokens=output_tokens,
            software=software,
            progress=progress,
        )
    deliver(plan.to_document(), json_only=json_only, out=out)
    return ExitCode.OK
