"""``megatoken plan``: reads the files that the flags name, then calls the pure functions."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatoken.analysis.aggregation import SavedAggregate, read_aggregate
from megatoken.analysis.limits import SHORTCUTS, asked_limits
from megatoken.analysis.published import accelerator_facts, results_of
from megatoken.analysis.sweep import SWEEP
from megatoken.config import load_limits
from megatoken.engine.config import SHAPES
from megatoken.errors import UsageError
from megatoken.planning.assumptions import Assumptions, load_assumptions
from megatoken.planning.buy import Order, plan_buy
from megatoken.planning.capacity import plan_capacity
from megatoken.planning.cost import PRICE, System, plan_cost
from megatoken.planning.energy import Power, accelerators_energy, energy_of, plan_energy, power_given, power_of
from megatoken.planning.figures import Input, Plan
from megatoken.planning.flags import Common, FleetFlags, PowerFlags, Rate
from megatoken.planning.fleet_plan import Supply, load_demand, plan_fleet, plan_replacement
from megatoken.planning.power_limits import plan_power_limit
from megatoken.planning.pricing import parse_factor
from megatoken.planning.schedule import PRECISIONS, Lengths, find_replica, offline_rate
from megatoken.planning.sweep_rate import Chosen, from_sweep, with_curve
from megatoken.planning.throughput import (
    DEFAULT_MODEL,
    LENGTH,
    LIMITS,
    MIX,
    SCENARIOS,
    Throughput,
    check_positive,
    from_number,
    from_runs,
)
from megatoken.planning.workloads import Profile, load_profiles
from megatoken.runs.run import CONFIG

if TYPE_CHECKING:
    from megatoken.analysis.energy import RunEnergy
    from megatoken.runs.run import Run

BENCHMARK = "llama2-70b-99"  # whose published rates and lengths are the defaults


def _assumptions(common: Common, run: Path | None = None) -> Assumptions:
    """The defaults with the user's changes; p99 limits are those of the flags, of the file, else of the ``run``."""
    flags = zip(LIMITS, (common.ttft_limit, common.tpot_limit), strict=True)
    given = [f"{name}={value!r}" for name, value in flags if value is not None]
    return load_assumptions(common.assumptions, [*_limit_settings(common.slo, run), *common.settings, *given])


def _profiles(common: Common) -> tuple[Profile, ...]:
    return load_profiles(common.profiles, common.profile)


def _profile(common: Common, flag: str) -> Profile:
    """The one profile that ``flag`` needs. Raises UsageError: several or none are named."""
    profiles = _profiles(common)
    if len(profiles) != 1:
        names = ", ".join(profile.name for profile in profiles)
        raise UsageError(f"{flag} needs one workload profile; choose with --profile: {names}")
    return profiles[0]


def _factors(common: Common) -> list[Input]:
    return [parse_factor(text) for text in common.factors]


def _limit_settings(slo: Path | None, run: Path | None) -> list[str]:
    """The user's limits on p99 latencies as settings of assumptions: of a file, else those that a run was given."""
    if slo is None and (run is None or not (run / CONFIG).is_file()):
        return []
    from megatoken.runs.run import read_run  # imports pyarrow

    config = load_limits(slo, {}) if slo is not None or run is None else read_run(run).config
    p99s = {limit.key: limit.value for limit in asked_limits(config)}
    found = [f"{name}={p99s[key]!r}" for name, key in SHORTCUTS.items() if key in p99s]
    if slo is not None and not found:
        raise UsageError(f"{slo}: plans keep ttft_seconds.p99 and tpot_seconds.p99, and the file has neither")
    return found


def opened(rate: Rate) -> Rate:
    """The rate, with a sweep that was given as the run as its sweep: loads of a sweep are no repeats of a test."""
    run = rate.run
    if run is None or rate.sweep is not None or not ((run / SWEEP).is_file() or (run.name == SWEEP and run.is_file())):
        return rate
    return replace(rate, run=None, sweep=run)


def capacity(rate: Rate, common: Common) -> Plan:
    """``megatoken plan capacity``. Raises UsageError."""
    assumptions = _assumptions(common, rate.run)
    throughput, runs = _throughput(rate, assumptions)
    plan = plan_capacity(
        throughput,
        _profiles(common),
        assumptions,
        second=_second(common.second_run, runs, assumptions),
        factors=_factors(common),
    )
    return _on_curve(plan, rate, assumptions)


def fleet(rate: Rate, common: Common, flags: FleetFlags) -> Plan:
    """``megatoken plan fleet``. Raises UsageError."""
    if flags.burst_tokens_per_second is None and flags.burst_accelerators_per_node is not None:
        raise UsageError("--burst-accelerators-per-node needs --burst-tokens-per-second")
    assumptions = _assumptions(common, rate.run)
    make, runs = _source(rate)
    throughput = make(assumptions)
    assumptions = assumptions.priced_for(throughput.accelerator)
    supply = _supply(throughput, runs, flags)
    if flags.replace_nodes is not None or flags.replace_rate is not None:
        return _replacement(flags, common, supply)
    demand = load_demand(flags.unit, flags.demand, flags.curve)
    profile = None
    if flags.unit == "output-tokens":
        _only_one("--unit output-tokens", "a demand in tokens needs no profile", ("--profile", common.profile))
    else:
        profile = _profile(common, f"--unit {flags.unit}")
    burst, count = None, flags.burst_accelerators_per_node
    if flags.burst_tokens_per_second is not None:
        check_positive("--burst-tokens-per-second", flags.burst_tokens_per_second, "12000")
        second = Rate(tokens_per_second=flags.burst_tokens_per_second, per="node", accelerators=count)
        burst = Supply(_throughput(second, assumptions)[0], count)
    plan = plan_fleet(
        supply,
        demand,
        assumptions,
        profile=profile,
        spare_domains=flags.spare,
        domain=flags.fault_domain,
        burst=burst,
        factors=_factors(common),
    )
    return _on_curve(plan, rate, assumptions)


def buy(rate: Rate, common: Common, flags: FleetFlags, *, seats: int) -> Plan:
    """``megatoken plan buy``. Without a rate, that of the best published row of the accelerator. Raises UsageError."""
    if rate.run is None and rate.sweep is None and rate.tokens_per_second is None:
        rate = _published(rate)
    make, runs = _source(rate)
    profile = _profile(common, "--seats")
    assumptions = _assumptions(common, rate.run)
    assumptions = assumptions.priced_for(make(assumptions).accelerator)
    order = Order(
        seats,
        profile,
        lambda changed: _supply(make(changed), runs, flags),
        _factors(common),
        flags.spare,
        flags.fault_domain,
    )
    return plan_buy(order, assumptions)


def _published(rate: Rate) -> Rate:
    """The rate of the fastest verified system of the accelerator, else what the cost model computes for it."""
    name = rate.accelerator
    if name is None:
        raise UsageError("the hardware is unknown; pass --accelerator, such as GB300, or a run folder")
    rows = [] if rate.model not in (None, DEFAULT_MODEL) else results_of(name, BENCHMARK, "offline")
    if rows and rows[0].accelerators:
        best = rows[0]
        return replace(
            rate,
            tokens_per_second=best.output_tokens_per_second,
            per="system",
            accelerators=best.accelerators,
            state="verified",
            source=best.source,
        )
    model = rate.model or DEFAULT_MODEL
    assumptions = load_assumptions()
    prompt = assumptions[MIX] * assumptions[LENGTH]
    lengths = Lengths(prompt, prompt, assumptions[LENGTH])
    replica = find_replica(model, rate.precision, name, lengths)
    if isinstance(replica, str):
        raise UsageError(f"no published row and no cost model: {replica}; give --tokens-per-second with --per")
    return replace(
        rate,
        tokens_per_second=offline_rate(replica, lengths),
        per="system",
        accelerators=replica.ranks,
        state="estimate",
        source=f"cost model of {model} in {replica.precision}; no verified row of {name} in the shipped table",
    )


def _supply(throughput: Throughput, runs: Sequence[Run], flags: FleetFlags) -> Supply:
    """The hardware with its price, where power or rent are known."""
    known = accelerator_facts(throughput.accelerator) is not None and throughput.accelerators is not None
    power = _power(throughput, energy_of(runs) if runs else None, PowerFlags()) if known else None
    return Supply.of(System(throughput, power, flags.rent), flags.accelerators_per_node, flags.nodes_per_rack)


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


def energy(rate: Rate, common: Common, flags: PowerFlags, power_limit: float | None = None) -> Plan:
    """``megatoken plan energy``; ``power_limit`` in watts for each accelerator. Raises UsageError."""
    assumptions = _assumptions(common, rate.run)
    throughput, runs = _throughput(rate, assumptions)
    measured = None
    if runs and flags.watts is None:  # the curve of a power limit is that of the accelerators alone
        measured = energy_of(runs) if power_limit is None else accelerators_energy(runs)
    power = _power(throughput, measured, flags)
    if power is None:
        raise UsageError(
            "power unknown; pass --watts, or --accelerators and --accelerator to use their TDP; for example:"
            f" {_example('energy', rate, '--watts 100')}"
        )
    profiles = _profiles(common)
    if power_limit is not None:
        return plan_power_limit(throughput, power, power_limit, assumptions, profiles=profiles, energy=measured)
    return plan_energy(throughput, power, assumptions, profiles=profiles, energy=measured)


def cost(
    rate: Rate, common: Common, flags: PowerFlags, rent: float | None = None, machine_hour: float | None = None
) -> Plan:
    """``megatoken plan cost``; ``rent`` of an accelerator or ``machine_hour`` of all. Raises UsageError."""
    if machine_hour is not None:
        why = "it is the rent of the whole machine, which includes power"
        _only_one("--dollars-per-hour", why, ("--rent", rent), ("--watts", flags.watts))
    if rent is not None:
        _only_one("--rent", "the rent includes power", ("--watts", flags.watts))
    assumptions = _assumptions(common, rate.run)
    throughput, runs = _throughput(rate, assumptions)
    assumptions = assumptions.priced_for(throughput.accelerator)
    if machine_hour is not None:
        check_positive("--dollars-per-hour", machine_hour, "0.2")
        if throughput.accelerators is None:
            if rate.per in ("node", "rack"):
                raise UsageError(
                    f"--per {rate.per}: staff grows with the accelerators; give their number, such as --accelerators 72"
                )
            throughput = replace(throughput, accelerators=1, notes=(*throughput.notes, COUNTED_AS_ONE))
        rent = machine_hour / (throughput.accelerators or 1)
    power = None if rent is not None else _power(throughput, energy_of(runs) if runs else None, flags)
    _check_priced(rate, throughput, power, rent)
    second = _second(common.second_run, runs, assumptions)
    plan = plan_cost(System(throughput, power, rent, _factors(common)), _profiles(common), assumptions, second=second)
    return _on_curve(plan, rate, assumptions)


COUNTED_AS_ONE = "Staff is that of one accelerator, as the number of accelerators is unknown; give --accelerators."


def _check_priced(rate: Rate, throughput: Throughput, power: Power | None, rent: float | None) -> None:
    """Names at once all that a cost lacks, with commands that have it. Raises UsageError."""
    missing = []
    if throughput.accelerators is None:
        missing.append("the number of accelerators (--accelerators; 1 for a machine without any)")
    if power is None and rent is None:
        missing.append(
            "what the machine costs (--rent, dollars an hour for each; or its power, --watts, and its price)"
        )
    if not missing:
        return
    count = f"--accelerators {throughput.accelerators or 1}"
    examples = []
    if power is None:
        examples.append(_example("cost", rate, f"{count} --rent {rent or 0.2:g}"))
    if rent is None:
        watts = power.watts if power is not None else 100.0
        examples.append(_example("cost", rate, f"{count} --watts {watts:g} --set {PRICE}=2000"))
    be = "are" if len(missing) > 1 else "is"
    raise UsageError(f"{' and '.join(missing)} {be} unknown; for example: {'; or: '.join(examples)}")


def _example(kind: str, rate: Rate, flags: str) -> str:
    """A command of the same rate with other flags."""
    if rate.sweep is not None:
        of = f"--sweep {shlex.quote(str(rate.sweep))}"
    elif rate.run is not None:
        of = shlex.quote(str(rate.run))
    else:
        of = f"--tokens-per-second {rate.tokens_per_second!r} --per {rate.per}"
        of += f" --counted {rate.counted}" if rate.counted else ""
    return f"megatoken plan {kind} {of} {flags}"


def _on_curve(plan: Plan, rate: Rate, assumptions: Assumptions) -> Plan:
    """A plan from a sweep with its curve; others as they are."""
    if rate.sweep is None:
        return plan
    throughput, chosen = _of_sweep(rate, rate.sweep, assumptions)
    return with_curve(plan, chosen, throughput.state)


def _of_sweep(rate: Rate, path: Path, assumptions: Assumptions) -> tuple[Throughput, Chosen]:
    percentile = rate.percentile or "p99"
    return from_sweep(path, assumptions, percentile, accelerators=rate.accelerators, accelerator=rate.accelerator)


def _throughput(rate: Rate, assumptions: Assumptions) -> tuple[Throughput, Sequence[Run]]:
    """The throughput of a run or of repeats, with these runs; or the throughput given as a number."""
    make, runs = _source(rate)
    return make(assumptions), runs


def _source(rate: Rate) -> tuple[Callable[[Assumptions], Throughput], Sequence[Run]]:
    """How the throughput follows from assumptions: of a run or of repeats, an aggregate, a number; and the runs."""
    if rate.sweep is None and rate.percentile is not None:
        raise UsageError("--percentile: only with --sweep")
    if rate.run is not None and rate.sweep is not None:
        raise UsageError(f"{rate.run}: give a run or --sweep, not both")
    if measured := rate.run or rate.sweep:
        for name in _OF_NUMBERS:
            if getattr(rate, name) is not None:
                flag = name.replace("_", "-")
                raise UsageError(f"{measured}: --{flag} comes from the run; give a run or a number, not both")
    if (sweep := rate.sweep) is not None:
        return lambda assumptions: _of_sweep(rate, sweep, assumptions)[0], ()
    if rate.run is not None:
        if rate.run.is_file():
            known = rate_of_nodes(read_aggregate(rate.run), rate, str(rate.run))
            assert known.tokens_per_second is not None
            return _number(known, known.tokens_per_second, "system"), ()
        return _of_runs(rate, rate.run)
    if rate.tokens_per_second is None:
        raise UsageError("no rate to plan with: give a run folder, or --tokens-per-second with --per")
    if rate.per is None:
        raise UsageError("the scope of the rate is unknown: give --per accelerator, node, rack or system")
    return _number(rate, rate.tokens_per_second, rate.per), ()


_OF_NUMBERS = (
    *("tokens_per_second", "per", "counted", "scenario", "state", "source", "input_per_output", "model", "precision"),
)


def _number(rate: Rate, tokens_per_second: float, per: str) -> Callable[[Assumptions], Throughput]:
    names = ("counted", "accelerators", "accelerator", "scenario", "state", "source", "model", "precision")
    given: dict[str, Any] = {name: value for name in names if (value := getattr(rate, name)) is not None}
    given |= {"scope": per, "input_tokens_per_output_token": rate.input_per_output}
    return lambda assumptions: from_number(tokens_per_second, assumptions=assumptions, **given)


def _of_runs(rate: Rate, path: Path) -> tuple[Callable[[Assumptions], Throughput], Sequence[Run]]:
    from megatoken.analysis.repeats import missing_notes, read_repeats_in  # imports pyarrow

    runs = read_repeats_in(path)
    missing = [f"{path}: {note}" for note in missing_notes(path, runs)]

    def make(assumptions: Assumptions) -> Throughput:
        found = from_runs(runs, assumptions, accelerators=rate.accelerators, accelerator=rate.accelerator)
        return replace(found, notes=(*missing, *found.notes))

    return make, runs


def rate_of_nodes(found: SavedAggregate, rate: Rate, where: str) -> Rate:
    """The sum of the nodes' rates of an aggregate as a rate; ``rate`` names its accelerator, ``where`` its source."""
    workload = found.workload
    scenario = (workload["scenario"] or "").lower()
    return replace(
        rate,
        tokens_per_second=found.sum_of_rates_tokens_per_second,
        per="system",
        accelerators=rate.accelerators or found.accelerators,
        scenario=scenario if scenario in SCENARIOS else None,
        source=f"{where}: {found.sum_label}",
        model=workload["model"] if workload["model"] in SHAPES else None,
        precision=workload["precision"] if workload["precision"] in PRECISIONS else None,
    )


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


def _power(throughput: Throughput, measured: RunEnergy | None, flags: PowerFlags) -> Power | None:
    if flags.watts is not None:
        return power_given(flags.watts, flags.boundary or "wall", flags.watts_state or "given")
    for flag, value in (("--boundary", flags.boundary), ("--watts-state", flags.watts_state)):
        if value is not None:
            raise UsageError(f"{flag} {value} needs --watts")
    return power_of(throughput, measured)


def _only_one(flag: str, why: str, *others: tuple[str, object]) -> None:
    """Refuses flags that have no effect together with ``flag``."""
    for other, value in others:
        if value:
            raise UsageError(f"{other} with {flag}: {why}; give one of them")
