"""``megatoken plan``: capacity, fleet, energy and cost from a rate; throughput simulates the rate itself."""

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

app = typer.Typer(rich_markup_mode=None, help="Turn a rate into users, machines, watts and money.")

Factors = Annotated[
    list[str] | None,
    typer.Option(
        "--factor", metavar="NAME=SHARE", help="Factor that lowers the rate, for example makespan=0.936; repeatable."
    ),
]
SecondRun = Annotated[
    Path | None, typer.Option(metavar="RUN", help="Run of the same system with other input and output lengths.")
]
Watts = Annotated[
    float | None, typer.Option(metavar="N", help="Power in watts. Default: measured in RUN, otherwise nameplate.")
]
Boundary = Annotated[
    str | None, typer.Option(metavar="wall|accelerators", help="Where --watts was measured. Default: wall.")
]
WattsState = Annotated[
    str | None,
    typer.Option(metavar="STATE", help="State of --watts: measured, verified, estimate, nameplate. Default: given."),
]


@app.callback(invoke_without_command=True)
def _plan(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        with standard_output():
            print(ctx.get_help())


def _start(
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="Run folder or folder of repeats; or give --tokens-per-second.")
    ] = None,
    tokens_per_second: Annotated[float | None, typer.Option(metavar="N", help="The rate, instead of RUN.")] = None,
    per: Annotated[str | None, typer.Option(metavar="accelerator|node|rack|system", help="What has this rate.")] = None,
    counted: Annotated[
        str | None, typer.Option(metavar="output|total", help="Tokens that the rate counts. Default: output.")
    ] = None,
    accelerators: Annotated[int | None, typer.Option(metavar="N", help="Number of accelerators.")] = None,
    accelerator: Annotated[
        str | None, typer.Option(metavar="NAME", help="Accelerator model, for example GB300.")
    ] = None,
    scenario: Annotated[
        str | None, typer.Option(metavar="offline|server|interactive", help="Scenario in which the rate was measured.")
    ] = None,
    state: Annotated[
        str | None,
        typer.Option(
            metavar="STATE", help="State of the rate: measured, verified, unverified, estimate. Default: unverified."
        ),
    ] = None,
    source: Annotated[str | None, typer.Option(metavar="TEXT", help="Source of the rate.")] = None,
    input_per_output: Annotated[
        float | None, typer.Option(metavar="X", help="Input tokens per output token of the requests.")
    ] = None,
    profile: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Workload profile; repeatable.")] = None,
    profiles: Annotated[Path | None, typer.Option(metavar="FILE", help="Your own workload profiles (YAML).")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE[:LOW:HIGH]", help="Change an assumption; repeatable."),
    ] = None,
    assumptions: Annotated[Path | None, typer.Option(metavar="FILE", help="Your own assumptions (YAML).")] = None,
) -> "tuple[Rate, Common]":
    """The flags that all four begin with."""
    from megatoken.planning.commands import Common, Rate

    rate = Rate(
        run, tokens_per_second, per, counted, accelerators, accelerator, scenario, state, source, input_per_output
    )
    return rate, Common(profiles, profile or (), assumptions, settings or ())


def _end(out: Out = None, json_only: Json = False) -> None:
    """The flags that all four end with."""


def _command(plan: "Callable[..., Plan]") -> "Callable[..., Plan]":
    """Make a command of ``plan(rate, common, *flags)``: adds the shared flags and prints the plan."""
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
    """How many requests and users a rate serves. By the usual formula, and with its hidden assumptions stated."""
    from megatoken.planning import commands

    return commands.capacity(rate, replace(common, factors=factors or ()), second_run=second_run)


@_command
def fleet(
    rate: "Rate",
    common: "Common",
    demand: Annotated[float | None, typer.Option(metavar="N", help="Constant demand, or peak of --curve.")] = None,
    unit: Annotated[
        str, typer.Option(metavar="interactions|users|output-tokens", help="Unit of --demand.")
    ] = "interactions",
    curve: Annotated[
        str | None, typer.Option(metavar="NAME|FILE.csv", help="Demand over time: a named curve or a CSV file.")
    ] = None,
    accelerators_per_node: Annotated[int | None, typer.Option(metavar="N", help="Accelerators per node.")] = None,
    nodes_per_rack: Annotated[int | None, typer.Option(metavar="N", help="Nodes per rack.")] = None,
    spare: Annotated[int, typer.Option(metavar="N", help="Spare fault domains: how many may fail without loss.")] = 1,
    fault_domain: Annotated[str, typer.Option(metavar="node|rack", help="What fails as one unit.")] = "node",
    burst_tokens_per_second: Annotated[
        float | None, typer.Option(metavar="N", help="Tokens/s of one node of a second class, rented by the hour.")
    ] = None,
    burst_accelerators_per_node: Annotated[
        int | None, typer.Option(metavar="N", help="Accelerators per node of the second class.")
    ] = None,
    replace_nodes: Annotated[
        int | None, typer.Option(metavar="N", help="Compute how many nodes replace N old nodes.")
    ] = None,
    replace_rate: Annotated[float | None, typer.Option(metavar="N", help="Tokens/s of one old node.")] = None,
    factors: Factors = None,
) -> "Plan":
    """How many accelerators, nodes and racks a demand needs."""
    from megatoken.planning import commands

    burst = None
    if burst_tokens_per_second is not None:
        burst = commands.Rate(
            tokens_per_second=burst_tokens_per_second, per="node", accelerators=burst_accelerators_per_node
        )
    elif burst_accelerators_per_node is not None:
        raise UsageError("--burst-accelerators-per-node needs --burst-tokens-per-second")
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
    """Energy per token of accelerators, machines and site, and carbon."""
    from megatoken.planning import commands

    return commands.energy(rate, common, commands.PowerFlags(watts, boundary, watts_state))


@_command
def cost(
    rate: "Rate",
    common: "Common",
    watts: Watts = None,
    boundary: Boundary = None,
    watts_state: WattsState = None,
    rent: Annotated[
        float | None, typer.Option(metavar="DOLLARS", help="Price of an accelerator hour, instead of buying.")
    ] = None,
    second_run: SecondRun = None,
    factors: Factors = None,
) -> "Plan":
    """Cost per million output tokens, per request and per user, and what it depends on."""
    from megatoken.planning import commands

    power = commands.PowerFlags(watts, boundary, watts_state)
    return commands.cost(rate, replace(common, factors=factors or ()), power, rent=rent, second_run=second_run)


@app.command(cls=EngineCommand)
def throughput(
    ctx: typer.Context,
    gpu: Annotated[str, typer.Option(metavar="NAME", help="GPU to simulate, for example H200 or GB300.")],
    model: Annotated[str, typer.Option(metavar="SHAPE", help="Named model shape.")] = "llama2-70b",
    precision: Annotated[
        str, typer.Option(metavar="bf16|fp8|fp4", help="Number format of the layers' matrix products.")
    ] = "fp8",
    nodes: Annotated[int, typer.Option(metavar="N", help="Nodes in the rack.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(metavar="N", help="GPUs per node; each holds a copy of the model.")] = 1,
    minutes: Annotated[float, typer.Option(metavar="N", help="Simulated minutes in which requests start.")] = 10.0,
    lengths: Annotated[Path | None, typer.Option(metavar="FILE", help="CSV of token lengths.")] = None,
    output_tokens: Annotated[
        float | None, typer.Option(metavar="N", help="Scale the answer lengths to this mean.")
    ] = None,
    software: Annotated[
        str, typer.Option(metavar="megatoken|published", help="Software whose overhead per step is simulated.")
    ] = "megatoken",
    out: Out = None,
    json_only: Json = False,
) -> int:
    """Simulate throughput on other hardware. Offline scenario, in simulated time."""
    from megatoken.config import load_run_config
    from megatoken.planning.throughput_plan import throughput as simulated

    for key in ("device", "threads"):
        if f"engine.{key}" in ctx.meta[FLAGS]:
            raise UsageError(f"--engine.{key}: this machine computes nothing here; leave it out")
    config = load_run_config(None, {"precision": precision, "rack.simulated_gpu": gpu, **ctx.meta[FLAGS]}, rack="auto")
    with counted("simulating nodes") as progress:
        plan = simulated(
            model,
            config.engine_config(),
            gpu,
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
