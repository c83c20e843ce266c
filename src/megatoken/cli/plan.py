"""``megatoken plan capacity|fleet|energy|cost``: four commands on one rate, one set of profiles and assumptions.

``megatoken plan throughput`` is the fifth and needs none: it simulates where a rate could come from.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatoken.cli.flags import FLAGS, Command, EngineCommand
from megatoken.cli.output import Json, Out, counted, deliver
from megatoken.cli.streams import standard_output
from megatoken.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from megatoken.planning.commands import Common, Rate
    from megatoken.planning.figures import Plan

app = typer.Typer(rich_markup_mode=None, help="What a rate means in users, machines, watts and money.")

LENGTHS_MODEL = "llama2-70b"  # whose requests the lengths that ship are

Factors = Annotated[
    list[str] | None, typer.Option("--factor", metavar="NAME=SHARE", help="A share below the peak; repeatable.")
]
SecondRun = Annotated[Path | None, typer.Option(metavar="RUN", help="The same system under another mix of tokens.")]
Watts = Annotated[float | None, typer.Option(metavar="N", help="Power; default that of the run, else by data sheet.")]
Boundary = Annotated[
    str | None, typer.Option(metavar="wall|accelerators", help="Where --watts was measured; default wall.")
]
WattsState = Annotated[str | None, typer.Option(metavar="STATE", help="How sure --watts is; default given.")]


@app.callback(invoke_without_command=True)
def _plan(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        with standard_output():
            print(ctx.get_help())


def _start(
    run: Annotated[Path | None, typer.Argument(metavar="RUN", help="Run folder or repeats; else a number.")] = None,
    tokens_per_second: Annotated[float | None, typer.Option(metavar="N", help="The rate, without a run.")] = None,
    per: Annotated[str | None, typer.Option(metavar="accelerator|node|rack|system", help="Scope of it.")] = None,
    counted: Annotated[str | None, typer.Option(metavar="output|total", help="What it counts; default output.")] = None,
    accelerators: Annotated[int | None, typer.Option(metavar="N", help="How many produce it.")] = None,
    accelerator: Annotated[str | None, typer.Option(metavar="NAME", help="Which, such as GB300.")] = None,
    scenario: Annotated[str | None, typer.Option(metavar="offline|server|interactive", help="How load came.")] = None,
    state: Annotated[str | None, typer.Option(metavar="STATE", help="How sure it is; default unverified.")] = None,
    source: Annotated[str | None, typer.Option(metavar="TEXT", help="Where it is from.")] = None,
    input_per_output: Annotated[
        float | None, typer.Option(metavar="X", help="Input tokens per output token of its requests.")
    ] = None,
    profile: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Workload profile; repeatable.")] = None,
    profiles: Annotated[Path | None, typer.Option(metavar="FILE", help="Workload profiles of your own, YAML.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE[:LOW:HIGH]", help="An assumption; repeatable.")
    ] = None,
    assumptions: Annotated[Path | None, typer.Option(metavar="FILE", help="Assumptions of your own, YAML.")] = None,
) -> "tuple[Rate, Common]":
    """What all four start from."""
    from megatoken.planning.commands import Common, Rate

    rate = Rate(
        run, tokens_per_second, per, counted, accelerators, accelerator, scenario, state, source, input_per_output
    )
    return rate, Common(profiles, profile or (), assumptions, settings or ())


def _end(out: Out = None, json_only: Json = False) -> None:
    """What all four end with."""


def _command(plan: "Callable[..., Plan]") -> "Callable[..., Plan]":
    """Makes a command of ``plan(rate, common, *flags)``: takes the shared flags beside its own, prints the plan."""
    shared, delivery = (dict(signature(part).parameters) for part in (_start, _end))
    own = dict(list(signature(plan).parameters.items())[2:])

    def command(**flags: Any) -> int:
        rate, common = _start(**{name: flags[name] for name in shared})
        made = plan(rate, common, **{name: flags[name] for name in own})
        deliver(made.to_document(), **{name: flags[name] for name in delivery})
        return ExitCode.OK

    parameters: dict[str, Parameter] = shared | own | delivery
    command.__signature__ = Signature(list(parameters.values()))  # type: ignore[attr-defined]
    command.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    app.command(plan.__name__, cls=Command, help=plan.__doc__)(command)
    return plan


@_command
def capacity(rate: "Rate", common: "Common", second_run: SecondRun = None, factors: Factors = None) -> "Plan":
    """How many requests and users a rate serves. By the usual formula and by what that hides."""
    from megatoken.planning import commands

    return commands.capacity(rate, replace(common, factors=factors or ()), second_run=second_run)


@_command
def fleet(
    rate: "Rate",
    common: "Common",
    demand: Annotated[float | None, typer.Option(metavar="N", help="Constant demand, or peak of the curve.")] = None,
    unit: Annotated[str, typer.Option(metavar="interactions|users|output-tokens", help="Of it.")] = "interactions",
    curve: Annotated[str | None, typer.Option(metavar="NAME|FILE.csv", help="Demand over time.")] = None,
    accelerators_per_node: Annotated[int | None, typer.Option(metavar="N", help="Shape of a node.")] = None,
    nodes_per_rack: Annotated[int | None, typer.Option(metavar="N", help="Shape of a rack.")] = None,
    spare: Annotated[int, typer.Option(metavar="N", help="Fault domains that may fail without loss.")] = 1,
    fault_domain: Annotated[str, typer.Option(metavar="node|rack", help="What fails at once.")] = "node",
    burst_tokens_per_second: Annotated[
        float | None, typer.Option(metavar="N", help="Rate of a node of a second class, by the hour.")
    ] = None,
    burst_accelerators_per_node: Annotated[int | None, typer.Option(metavar="N", help="Shape of that node.")] = None,
    replace_nodes: Annotated[
        int | None, typer.Option(metavar="N", help="Ask how many nodes replace N old ones.")
    ] = None,
    replace_rate: Annotated[float | None, typer.Option(metavar="N", help="Rate of one old node, tokens/s.")] = None,
    factors: Factors = None,
) -> "Plan":
    """How many accelerators, nodes and racks a demand takes."""
    from megatoken.planning import commands

    burst = None
    if burst_tokens_per_second is not None:
        burst = commands.Rate(
            tokens_per_second=burst_tokens_per_second, per="node", accelerators=burst_accelerators_per_node
        )
    elif burst_accelerators_per_node is not None:
        raise UsageError("--burst-accelerators-per-node says nothing alone; give --burst-tokens-per-second too")
    flags = commands.FleetFlags(
        demand=demand,
        unit=unit,
        curve=curve,
        accelerators_per_node=accelerators_per_node,
        nodes_per_rack=nodes_per_rack,
        spare=spare,
        fault_domain=fault_domain,
        burst=burst,
        burst_accelerators_per_node=burst_accelerators_per_node,
        replace_nodes=replace_nodes,
        replace_rate=replace_rate,
    )
    return commands.fleet(rate, replace(common, factors=factors or ()), flags)


@_command
def energy(
    rate: "Rate", common: "Common", watts: Watts = None, boundary: Boundary = None, watts_state: WattsState = None
) -> "Plan":
    """Tokens per joule of accelerators, machines and site; carbon."""
    from megatoken.planning import commands

    return commands.energy(rate, common, commands.PowerFlags(watts, boundary, watts_state))


@_command
def cost(
    rate: "Rate",
    common: "Common",
    watts: Watts = None,
    boundary: Boundary = None,
    watts_state: WattsState = None,
    rent: Annotated[float | None, typer.Option(metavar="DOLLARS", help="Price of an accelerator hour.")] = None,
    second_run: SecondRun = None,
    factors: Factors = None,
) -> "Plan":
    """Dollars per million output tokens, and what moves them. Per request, per user and month too."""
    from megatoken.planning import commands

    power = commands.PowerFlags(watts, boundary, watts_state)
    return commands.cost(rate, replace(common, factors=factors or ()), power, rent=rent, second_run=second_run)


@app.command(cls=EngineCommand)
def throughput(
    ctx: typer.Context,
    gpu: Annotated[str, typer.Option(metavar="NAME", help="Such as H200 or GB300.")],
    model: Annotated[str, typer.Option(metavar="SHAPE", help="Named shape.")] = "llama2-70b",
    precision: Annotated[str, typer.Option(metavar="bf16|fp8|fp4", help="Of the layers' products.")] = "fp8",
    nodes: Annotated[int, typer.Option(metavar="N", help="Nodes of the rack.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(metavar="N", help="Of each node; a model copy on each.")] = 1,
    minutes: Annotated[float, typer.Option(metavar="N", help="Virtual time in which requests are begun.")] = 10.0,
    lengths: Annotated[Path | None, typer.Option(metavar="FILE", help="CSV of token lengths.")] = None,
    output_tokens: Annotated[float | None, typer.Option(metavar="N", help="Scale answers to this mean.")] = None,
    software: Annotated[
        str, typer.Option(metavar="megatoken|published", help="Whose overhead steps have.")
    ] = "megatoken",
    out: Out = None,
    json_only: Json = False,
) -> int:
    """What hardware that is not here would serve. Offline, simulated in virtual time."""
    import numpy as np

    from megatoken.config import load_run_config
    from megatoken.datasets.lengths import load_lengths
    from megatoken.planning.rack_simulation import Rack
    from megatoken.planning.throughput_plan import plan_throughput, scaled_answers

    for key in ("device", "threads"):
        if f"engine.{key}" in ctx.meta[FLAGS]:
            raise UsageError(f"--engine.{key}: nothing is computed on this machine; leave it out")
    if not 0 < minutes < math.inf:
        raise UsageError(f"--minutes is {minutes:g}; give a number above 0")
    config = load_run_config(None, {"precision": precision, "rack.simulated_gpu": gpu, **ctx.meta[FLAGS]}, rack="auto")
    rack = Rack.of(model, config.engine_config(), gpu, nodes=nodes, gpus_per_node=gpus_per_node)
    simulation = rack.simulation()
    table = load_lengths(
        lengths, vocabulary_size=simulation.model.vocabulary_size, max_length=simulation.memory.max_length
    )
    requests = np.stack((table.input_tokens, table.output_limits), axis=1)
    if output_tokens is not None:
        requests = scaled_answers(requests, output_tokens)
    with counted("simulating nodes") as progress:
        plan = plan_throughput(
            rack, requests, seconds=minutes * 60, software=software, lengths_source=table.name, progress=progress
        )
    if lengths is None and rack.model.name != LENGTHS_MODEL:
        note = f"The token lengths are those of MLPerf's {LENGTHS_MODEL}, not of {rack.model.name}; give --lengths."
        plan = replace(plan, notes=(note, *plan.notes))
    deliver(plan.to_document(), json_only=json_only, out=out)
    return ExitCode.OK
