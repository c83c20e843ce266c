"""From what is typed after ``megatoken plan`` to a plan: reads the files it names, then calls the pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from megatoken.errors import UsageError
from megatoken.planning.assumptions import Assumptions, load_assumptions
from megatoken.planning.capacity_plan import plan_capacity
from megatoken.planning.cost_plan import System, plan_cost
from megatoken.planning.energy_plan import BOUNDARIES, Power, energy_of, plan_energy, power_given, power_of
from megatoken.planning.figures import STATES, Plan
from megatoken.planning.fleet import DOMAINS
from megatoken.planning.fleet_plan import UNITS, Supply, load_demand, plan_fleet, plan_replacement
from megatoken.planning.pricing import parse_factor
from megatoken.planning.throughput import (
    SCENARIOS,
    Counted,
    Scope,
    Throughput,
    check_positive,
    choose,
    from_number,
    from_runs,
)
from megatoken.planning.workloads import Profile, load_profiles

if TYPE_CHECKING:
    from megatoken.runs.run import Run


@dataclass(frozen=True, slots=True)
class Rate:
    """What all four commands start from: a run folder or a folder of repeats, or a number with its scope.

    ``tokens_per_second`` to ``input_per_output`` are flags of the same name; with a run only ``accelerators`` and
    ``accelerator`` may be given beside it, for what its folder does not say.
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
    """What all four commands share: profiles, assumptions, the user's own factors below the peak."""

    profiles: Path | None = None
    profile: Sequence[str] = ()
    assumptions: Path | None = None
    settings: Sequence[str] = ()
    factors: Sequence[str] = ()

    def load_assumptions(self) -> Assumptions:
        """Defaults and the user's own."""
        return load_assumptions(self.assumptions, self.settings)

    def load_profiles(self) -> tuple[Profile, ...]:
        """Those asked for, or all."""
        return load_profiles(self.profiles, self.profile)


@dataclass(frozen=True, slots=True)
class PowerFlags:
    """Power as the user knows it; without ``watts`` that of the run, else by data sheet.

    By default the ``boundary`` is wall and the ``state`` given.
    """

    watts: float | None = None
    boundary: str | None = None
    state: str | None = None


@dataclass(frozen=True, slots=True)
class FleetFlags:
    """Demand and shape of a fleet; ``replace_nodes`` and ``replace_rate`` ask another question instead."""

    demand: float | None = None
    unit: str = "interactions"
    curve: str | None = None
    accelerators_per_node: int | None = None
    nodes_per_rack: int | None = None
    spare: int = 1
    fault_domain: str = "node"
    burst: Rate | None = None
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
    _choices(("--unit", flags.unit, tuple(UNITS)), ("--fault-domain", flags.fault_domain, DOMAINS))
    _positive(("--demand", flags.demand), ("--replace-rate", flags.replace_rate))
    assumptions = common.load_assumptions()
    supply = Supply(_throughput(rate, assumptions)[0], flags.accelerators_per_node, flags.nodes_per_rack)
    if flags.replace_nodes is not None or flags.replace_rate is not None:
        return _replacement(flags, common, supply)
    demand = load_demand(flags.unit, flags.demand, flags.curve)
    profile = None
    if flags.unit == "output-tokens":
        _only_one("--unit output-tokens", "a profile says nothing about tokens", ("--profile", common.profile))
    else:
        profiles = common.load_profiles()
        if len(profiles) != 1:
            names = ", ".join(profile.name for profile in profiles)
            raise UsageError(f"a demand in {flags.unit} is of one workload profile; choose with --profile: {names}")
        profile = profiles[0]
    burst = None
    if flags.burst is not None:
        second = _throughput(flags.burst, assumptions, "--burst-tokens-per-second")[0]
        burst = Supply(second, flags.burst_accelerators_per_node)
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
        raise UsageError("to replace nodes, give their number and the rate of one: --replace-nodes, --replace-rate")
    others = (
        ("--demand", flags.demand),
        ("--curve", flags.curve),
        ("--burst-tokens-per-second", flags.burst),
        ("--profile", common.profile),
        ("--factor", common.factors),
    )
    _only_one("--replace-nodes", "what nodes replace others is asked of their rates alone", *others)
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
    _positive(("--rent", rent))
    if rent is not None:
        _only_one("--rent", "power is the landlord's", ("--watts", flags.watts))
    assumptions = common.load_assumptions()
    throughput, runs = _throughput(rate, assumptions)
    power = None if rent is not None else _power(throughput, runs, flags)
    factors = [parse_factor(text) for text in common.factors]
    second = _second(second_run, runs, assumptions)
    return plan_cost(System(throughput, power, rent, factors), common.load_profiles(), assumptions, second=second)


def _throughput(
    rate: Rate, assumptions: Assumptions, number: str = "--tokens-per-second"
) -> tuple[Throughput, Sequence[Run]]:
    """The rate that ``number`` and its fellow flags give, or that of a run or of repeats, which come with it."""
    if rate.run is not None:
        beside = ("tokens_per_second", "per", "counted", "scenario", "state", "source", "input_per_output")
        for name in beside:
            if getattr(rate, name) is not None:
                flag = name.replace("_", "-")
                raise UsageError(f"{rate.run}: a run says its own --{flag}; give a run or a number, not both")
        from megatoken.analysis.repeats import missing_notes, read_repeats_in  # pyarrow with it

        runs = read_repeats_in(rate.run)
        told = from_runs(runs, assumptions, accelerators=rate.accelerators, accelerator=rate.accelerator)
        missing = (f"{rate.run}: {note}" for note in missing_notes(rate.run, runs))
        return replace(told, notes=(*missing, *told.notes)), runs
    if rate.tokens_per_second is None:
        raise UsageError("nothing to plan with: give a run folder, or --tokens-per-second with --per")
    if rate.per is None:
        raise UsageError("a rate without scope means nothing: give --per accelerator, node, rack or system")
    _positive((number, rate.tokens_per_second))
    _choices(
        ("--per", rate.per, get_args(Scope)),
        ("--counted", rate.counted, get_args(Counted)),
        ("--scenario", rate.scenario, SCENARIOS),
        ("--state", rate.state, STATES),
    )
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
        raise UsageError(f"{path}: a second run prices tokens beside a first run, not beside a number")
    for name in ("model", "precision"):
        one, other = first[0].result.get(name), second[0].result.get(name)
        if one != other:
            raise UsageError(f"{path}: its {name} is {other}, that of {first[0].path} is {one}; prices need one system")
    return throughput


def _power(throughput: Throughput, runs: Sequence[Run], flags: PowerFlags) -> Power:
    _positive(("--watts", flags.watts))
    _choices(("--boundary", flags.boundary, BOUNDARIES), ("--watts-state", flags.state, STATES))
    if flags.watts is not None:
        return power_given(flags.watts, flags.boundary or "wall", flags.state or "given")
    for flag, value in (("--boundary", flags.boundary), ("--watts-state", flags.state)):
        if value is not None:
            raise UsageError(f"{flag} {value} says nothing alone; give --watts too")
    return power_of(throughput, energy_of(runs) if runs else None)


def _choices(*flags: tuple[str, str | None, tuple[str, ...]]) -> None:
    """Refuses a word that is none of what its flag takes."""
    for flag, word, known in flags:
        if word is not None:
            choose(flag, word, known)


def _positive(*flags: tuple[str, float | None]) -> None:
    """Refuses a number that no machine has."""
    for flag, number in flags:
        if number is not None:
            check_positive(flag, number)


def _only_one(flag: str, why: str, *others: tuple[str, object]) -> None:
    """Refuses flags that would be ignored beside ``flag``."""
    for other, value in others:
        if value:
            raise UsageError(f"{other} beside {flag}: {why}; give one of them")
