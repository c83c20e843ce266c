"""``megatoken plan``: buy, capacity, fleet, energy and cost from a rate; throughput simulates the rate itself."""

from __future__ import annotations

from dataclasses import fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from megatoken.cli.flags import FLAGS, Command, flag, group, key_command, place
from megatoken.cli.output import Json, Out, counted, deliver
from megatoken.errors import ExitCode, UsageError
from megatoken.planning.flags import Common, FleetFlags, PowerFlags, Rate

if TYPE_CHECKING:
    from megatoken.planning.figures import Plan

app = group("Turn a rate into users, machines, watts and money.")

_RUN = "Run folder, folder of repeats, sweep, or aggregate.json; or give --tokens-per-second."
_OTHER_NAMES = {"settings": "--set", "factors": "--factor"}


def _flags_of(*parts: type[Any]) -> dict[str, tuple[Any, Any]]:
    """The flags that these parts of a plan describe: annotation and default by name."""
    found = {}
    for part in parts:
        hints = get_type_hints(part)
        for one in fields(part):
            if one.metadata:
                typed = _OTHER_NAMES.get(one.name, f"--{one.name.replace('_', '-')}")
                of = hints[one.name] | None if one.default == () else hints[one.name]
                option = flag(one.metadata["metavar"], one.metadata["help"], typed)
                found[one.name] = Annotated[of, option], one.default or None
    return found


_OF_FLEET, _OF_POWER = _flags_of(FleetFlags), _flags_of(PowerFlags)
_SEATS = Annotated[int, flag("N", "People who have access.", "--seats")], Parameter.empty
_MACHINE_HOUR = Annotated[float | None, flag("DOLLARS", "Price of the whole machine for an hour.")], None
_POWER_LIMIT = Annotated[float | None, flag("WATTS", "Lower power limit for each accelerator: a model of H200.")], None
_FLAGS = _flags_of(Rate, Common) | _OF_FLEET | _OF_POWER
_FLAGS |= {"seats": _SEATS, "dollars_per_hour": _MACHINE_HOUR, "power_limit": _POWER_LIMIT}
_OF_SOME = ("second_run", "factors")  # of the flags in Common


def _made(kind: str, flags: dict[str, Any]) -> Plan:
    from megatoken.planning import commands

    def part(parts: type[Any]) -> Any:
        names = [field.name for field in fields(parts)]
        return parts(**{name: flags[name] for name in names if flags.get(name) is not None})

    rate, common = commands.opened(part(Rate)), part(Common)
    if kind == "capacity":
        return commands.capacity(rate, common)
    if kind == "fleet":
        return commands.fleet(rate, common, part(FleetFlags))
    if kind == "buy":
        return commands.buy(rate, common, part(FleetFlags), seats=flags["seats"])
    power = part(PowerFlags)
    if kind == "energy":
        return commands.energy(rate, common, power, flags["power_limit"])
    return commands.cost(rate, common, power, flags["rent"], flags["dollars_per_hour"])


def _add(kind: str, words: str, *own: str) -> None:
    """Add the command of a plan, with the flags of all plans and its ``own``."""
    names = [name for name in _flags_of(Rate, Common) if name not in _OF_SOME]
    known = {"run": (Annotated[Path | None, place("RUN", _RUN)], None)} | {
        name: _FLAGS[name] for name in (*names, *own)
    }
    known |= {"out": (Out, None), "json_only": (Json, False)}

    def command(*, out: Path | None, json_only: bool, **flags: Any) -> int:
        deliver(_made(kind, flags).to_document(), json_only=json_only, out=out)
        return ExitCode.OK

    parameters = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=of) for name, (of, default) in known.items()
    ]
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {name: of for name, (of, _) in known.items()}
    app.command(kind, cls=Command, help=words)(command)


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
_add("fleet", "How many accelerators, nodes and racks a demand needs.", *_OF_FLEET, "factors")
_add("energy", "Energy and carbon per token. Of accelerators, machines and site.", *_OF_POWER, "power_limit")
_add(
    "cost",
    "Cost per million tokens, request and user. And what it depends on.",
    *_OF_POWER,
    "rent",
    "dollars_per_hour",
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
    model: Annotated[
        str | None, flag("SHAPE", "Named model shape. Default: llama2-70b; 125m with a processor's --machine.")
    ] = None,
    precision: Annotated[
        str | None,
        flag(
            "fp32|bf16|fp8|fp4",
            "Number format of the layers' matrix products; fp32 only with --machine, fp4 only with --gpu. Default: "
            "that of --machine, else fp8.",
        ),
    ] = None,
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
    from megatoken.analysis.qualified import read_machine
    from megatoken.config import load_run_config
    from megatoken.planning.throughput_plan import throughput as simulated

    for key in ("device", "threads"):
        if f"engine.{key}" in ctx.meta[FLAGS]:
            raise UsageError(f"--engine.{key}: this machine computes nothing here; leave it out")
    if (gpu is None) == (machine is None):
        raise UsageError("--gpu or --machine: give one of them, a GPU to simulate or the qualify.json of a machine")
    measured = None if machine is None else read_machine(machine)
    if precision is None:
        precision = "fp8" if measured is None or not measured.precisions else measured.precisions[0]
    if model is None:
        model = "125m" if measured is not None and measured.gpu is None else "llama2-70b"
    simulated_gpu = {} if gpu is None else {"rack.simulated_gpu": gpu}
    flags = {"precision": precision, **simulated_gpu, **ctx.meta[FLAGS]}
    config = load_run_config(None, flags, rack="auto" if gpu else None)
    with counted("simulating nodes") as progress:
        plan = simulated(
            model,
            config.engine_config(),
            gpu,
            machine=measured,
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
