"""``megatoken plan``: reads the files that the flags name, then calls the pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatoken.errors import UsageError
from megatoken.planning.assumptions import Assumptions, load_assumptions
from megatoken.planning.capacity import plan_capacity
from megatoken.planning.cost import System, plan_cost
from megatoken.planning.energy import Power, energy_of, plan_energy, power_given, power_of
from megatoken.planning.figures import Plan
from megatoken.planning.fleet_plan import Supply, load_demand, plan_fleet, plan_replacement
from megatoken.planning.pricing import parse_factor
from megatoken.planning.throughput import Throughput, check_positive, from_number, from_runs
from megatoken.planning.workloads import Profile, load_profiles

if TYPE_CHECKING:
    from megatoken.runs.run import Run


@dataclass(frozen=True, slots=True)
class Rate:
    """The rate that a plan starts from: a run folder, a folder of repeats, or a number with its scope.

    ``tokens_per_second`` to ``input_per_output`` are flags of the same name. With a run, only ``accelerators`` and
    ``accelerator`` may be given, for a folder that does not state them.
    """

    run: Path | None = None
    tokens_per_second: float | None = None
    per: str | None = None
    counted: str | None = None
    accelerators: int | None = None
    accelerator: str | None = None
    scenario: str | None = None
    state: str | None = None
    source: str | None = None
    input_per_output: float | None = None


@dataclass(frozen=True, slots=True)
class Common:
    """Flags of all four commands: profiles, assumptions, and factors that lower the rate."""

    profiles: Path | None = None
    profile: Sequence[str] = ()
    assumptions: Path | None = None
    settings: Sequence[str] = ()
    factors: Sequence[str] = ()

    def load_assumptions(self) -> Assumptions:
        """The defaults with the user's changes."""
        return load_assumptions(self.assumptions, self.settings)

    def load_profiles(self) -> tuple[Profile, ...]:
        """The profiles named, or all."""
        return load_profiles(self.profiles, self.profile)


@dataclass(frozen=True, slots=True)
class PowerFlags:
    """Power as given by the user; without ``watts``, the power of the run, else that of the data sheet.

    The default ``boundary`` is wall, the default ``watts_state`` given.
    """

    watts: float | None = None
    boundary: str | None = None
    watts_state: str | None = None


@dataclass(frozen=True, slots=True)
class FleetFlags:
    """Demand and shape of a fleet; ``replace_nodes`` and ``replace_rate`` plan a replacement instead."""

    demand: float | None = None
    unit: str = "interactions"
    curve: str | None = None
    accelerators_per_node: int | None = None
    nodes_per_rack: int | None = None
    spare: int = 1
    fault_domain: str = "node"
    burst_tokens_per_second: float | None = None
    burst_accelerators_per_node: int | None = None
    replace_nodes: int | None = None
    replace_rate: float | None = None


def capacity(rate: Rate, common: Common, *, second_run: Path | None = None) -> Plan:
    """``megatoken plan capacity``. Raises UsageError."""
    assumptions = common.load_assumptions()
    throughput, runs = _throughput(rate, assumptions)
    return plan_capacity(
        throughput,
        common.load_profiles(),
        assumptions,
        second=_second(second_run, runs, assumptions),
        factors=[parse_factor(text) for text in common.factors],
    )


def fleet(rate: Rate, common: Common, flags: FleetFlags) -> Plan:
    """``megatoken plan fleet``. Raises UsageError."""
    if flags.burst_tokens_per_second is None and flags.burst_accelerators_per_node is not None:
        raise UsageError("--burst-accelerators-per-node needs --burst-tokens-per-second")
    assumptions = common.load_assumptions()
    supply = Supply(_throughput(rate, assumptions)[0], flags.accelerators_per_node, flags.nodes_per_rack)
    if flags.replace_nodes is not None or flags.replace_rate is not None:
        return _replacement(flags, common, supply)
    demand = load_demand(flags.unit, flags.demand, flags.curve)
    profile = None
    if flags.unit == "output-tokens":
        _only_one("--unit output-tokens", "a demand in tokens needs no profile", ("--profile", common.profile))
    else:
        profiles = common.load_profiles()
        if len(profiles) != 1:
            names = ", ".join(profile.name for profile in profiles)
            raise UsageError(f"--unit {flags.unit} needs one workload profile; choose with --profile: {names}")
        profile = profiles[0]
    burst, count = None, flags.burst_accelerators_per_node
    if flags.burst_tokens_per_second is not None:
        check_positive("--burst-tokens-per-second", flags.burst_tokens_per_second)
        second = Rate(tokens_per_second=flags.burst_tokens_per_second, per="node", accelerators=count)
        burst = Supply(_throughput(second, assumptions)[0], count)
    return plan_fleet(
        supply,
        demand,
        assumptions,
        profile=profile,
        spare_domains=flags.spare,
        domain=flags.fault_domain,
        burst=burst,
        factors=[parse_factor(text) for text in common.factors],
    )


def _replacement(flags: FleetFlags, common: Common, supply: Supply) -> Plan:
    if flags.replace_nodes is None or flags.replace_rate is None:
        raise UsageError("a replacement needs both the old nodes and their rate: --replace-nodes, --replace-rate")
    others = (
        ("--demand", flags.demand),
        ("--curve", flags.curve),
        ("--burst-tokens-per-second", flags.burst_tokens_per_second),
        ("--profile", common.profile),
        ("--factor", common.factors),
    )
    _only_one("--replace-nodes", "a replacement depends on the two rates only", *others)
    return plan_replacement(flags.replace_nodes, flags.replace_rate, supply)


def energy(rate: Rate, common: Common, flags: PowerFlags) -> Plan:
    """``megatoken plan energy``. Raises UsageError."""
    assumptions = common.load_assumptions()
    throughput, runs = _throughput(rate, assumptions)
    measured = energy_of(runs) if runs and flags.watts is None else None
    power = _power(throughput, runs, flags)
    return plan_energy(throughput, power, assumptions, profiles=common.load_profiles(), energy=measured)


def cost(
    rate: Rate, common: Common, flags: PowerFlags, *, rent: float | None = None, second_run: Path | None = None
) -> Plan:
    """``megatoken plan cost``. Raises UsageError."""
    if rent is not None:
        _only_one("--rent", "the rent includes power", ("--watts", flags.watts))
    assumptions = common.load_assumptions()
    throughput, runs = _throughput(rate, assumptions)
    power = None if rent is not None else _power(throughput, runs, flags)
    factors = [parse_factor(text) for text in common.factors]
    second = _second(second_run, runs, assumptions)
    return plan_cost(System(throughput, power, rent, factors), common.load_profiles(), assumptions, second=second)


def _throughput(rate: Rate, assumptions: Assumptions) -> tuple[Throughput, Sequence[Run]]:
    """The throughput of a run or of repeats, with these runs; or the throughput given as a number."""
    if rate.run is not None:
        for name in ("tokens_per_second", "per", "counted", "scenario", "state", "source", "input_per_output"):
            if getattr(rate, name) is not None:
                flag = name.replace("_", "-")
                raise UsageError(f"{rate.run}: --{flag} comes from the run; give a run or a number, not both")
        from megatoken.analysis.repeats import missing_notes, read_repeats_in  # imports pyarrow

        runs = read_repeats_in(rate.run)
        found = from_runs(runs, assumptions, accelerators=rate.accelerators, accelerator=rate.accelerator)
        missing = (f"{rate.run}: {note}" for note in missing_notes(rate.run, runs))
        return replace(found, notes=(*missing, *found.notes)), runs
    if rate.tokens_per_second is None:
        raise UsageError("no rate to plan with: give a run folder, or --tokens-per-second with --per")
    if rate.per is None:
        raise UsageError("the scope of the rate is unknown: give --per accelerator, node, rack or system")
    throughput = from_number(
        rate.tokens_per_second,
        scope=rate.per,
        counted=rate.counted or "output",
        accelerators=rate.accelerators,
        accelerator=rate.accelerator,
        scenario=rate.scenario,
        state=rate.state or "unverified",
        source=rate.source or "given on the command line",
        input_tokens_per_output_token=rate.input_per_output,
        assumptions=assumptions,
    )
    return throughput, ()


def _second(path: Path | None, first: Sequence[Run], assumptions: Assumptions) -> Throughput | None:
    if path is None:
        return None
    throughput, second = _throughput(Rate(run=path), assumptions)
    if not first:
        raise UsageError(f"{path}: a second run needs a first run, not a number")
    for name in ("model", "precision"):
        one, other = first[0].result.get(name), second[0].result.get(name)
        if one != other:
            raise UsageError(f"{path}: expected {name} {one}, as in {first[0].path}, got {other}")
    return throughput


def _power(throughput: Throughput, runs: Sequence[Run], flags: PowerFlags) -> Power:
    if flags.watts is not None:
        return power_given(flags.watts, flags.boundary or "wall", flags.watts_state or "given")
    for flag, value in (("--boundary", flags.boundary), ("--watts-state", flags.watts_state)):
        if value is not None:
            raise UsageError(f"{flag} {value} needs --watts")
    return power_of(throughput, energy_of(runs) if runs else None)


def _only_one(flag: str, why: str, *others: tuple[str, object]) -> None:
    """Refuses flags that have no effect together with ``flag``."""
    for other, value in others:
        if value:
            raise UsageError(f"{other} with {flag}: {why}; give one of them")
