"""``megatoken plan cost``: dollars per million output tokens, per interaction and per user, with what moves them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatoken.errors import UsageError
from megatoken.planning.assumptions import Assumptions
from megatoken.planning.capacity import Factor
from megatoken.planning.cost import (
    OWNED_ONLY,
    CostInputs,
    dollars_per_million_output_tokens,
    hourly_lines,
    interaction_dollars,
    million_token_lines,
    output_tokens_per_hour,
    shares,
)
from megatoken.planning.energy_plan import WALL, Level, Power, levels
from megatoken.planning.figures import Input, Plan, Result, Sensitivity, State, Table, by_swing, weakest
from megatoken.planning.pricing import Derating, Priced, derating, price
from megatoken.planning.throughput import LENGTH, MIX, Throughput, check_positive
from megatoken.planning.workloads import Profile, profiles_document
from megatoken.text import precise

SHORTER_SHARE = 0.3
PRICE, PRICED = "system_price_dollars_per_accelerator", "GB300"  # the assumption, and what its default is the price of
NOT_COVERED = "Not in it: the network between racks, maintenance contracts, software licences, taxes, idle spare nodes."


@dataclass(frozen=True, slots=True)
class System:
    """What is paid for: a rate, its power, a rent if it is rented, and the user's own factors below the peak."""

    throughput: Throughput
    power: Power | None
    rent_dollars_per_accelerator_hour: float | None = None
    factors: Sequence[Factor] = ()

    @property
    def rented(self) -> bool:
        """Price, capital, power and space are the landlord's."""
        return self.rent_dollars_per_accelerator_hour is not None


def plan_cost(
    system: System, profiles: Sequence[Profile], assumptions: Assumptions, *, second: Throughput | None = None
) -> Plan:
    """Cost of tokens, interactions and users.

    Args:
        system: what is paid for; its throughput must say how many accelerators it has, and an owned one needs power.
        profiles: what users do.
        assumptions: prices and habits.
        second: the same system under another mix of tokens, which prices input and output apart by measurement.

    Raises:
        UsageError: no number of accelerators, no power of an owned system, or a rent that is no price.
    """
    inputs = _cost_inputs(system, assumptions)
    throughput = system.throughput
    derated = derating(throughput, assumptions, system.factors)
    names = [name for name in CostInputs.assumption_names() if not (system.rented and name in OWNED_ONLY)]
    wall = _wall(system, assumptions)
    own_states = (throughput.mix_state, _length(throughput, assumptions).state, *([wall.state] if wall else []))
    state = weakest((derated.latency_bound_state, *own_states, *assumptions.states(names)))
    priced = price(throughput, assumptions, second)
    lines = million_token_lines(inputs)
    used = [*_own_inputs(system, assumptions), *derated.latency_inputs, *assumptions.inputs(names)]
    assumed = [one.name for one in (*throughput.inputs, *used) if one == _default(assumptions, one.name)]
    return Plan(
        kind="plan_cost",
        title=f"Cost of {throughput.label}",
        inputs=(*throughput.inputs, *used, *priced.inputs),
        results=tuple(_results(inputs, state)),
        tables=(_lines(inputs, lines, state), _interactions(inputs, profiles, priced, derated, state)),
        profiles=profiles_document(profiles),
        sensitivities=_sensitivities(system, assumptions, assumed),
        notes=(*throughput.notes, *_notes(system, assumptions)),
        waterfall=_waterfall(lines, state),
    )


def _notes(system: System, assumptions: Assumptions) -> list[str]:
    notes = [NOT_COVERED]
    name = system.throughput.accelerator or "machine of unknown kind"
    if not system.rented and assumptions.entries[PRICE].state == "assumed" and PRICED.upper() not in name.upper():
        notes.append(
            f"The price assumed is that of a {PRICED}, not of a {name}: give yours with --set {PRICE}=DOLLARS."
        )
    return notes


def _cost_inputs(system: System, assumptions: Assumptions) -> CostInputs:
    throughput, rent = system.throughput, system.rent_dollars_per_accelerator_hour
    if throughput.accelerators is None:
        raise UsageError(
            "nobody says how many accelerators produce this rate; give the number (--accelerators), 1 for a machine"
            " without"
        )
    if rent is not None:
        check_positive("the rent in dollars per accelerator hour", rent)
    wall = _wall(system, assumptions)
    if wall is None and not system.rented:
        raise UsageError("the power is not known: give watts, or how many accelerators of which name, or a rent")
    return CostInputs(
        output_tokens_per_second=derating(throughput, assumptions, system.factors).latency_bound,
        accelerators=throughput.accelerators,
        full_watts=wall.watts if wall else 0.0,
        input_tokens_per_output_token=throughput.input_tokens_per_output_token,
        output_tokens_per_request=throughput.output_tokens_per_request,
        rent_dollars_per_accelerator_hour=rent,
        **{name: assumptions[name] for name in CostInputs.assumption_names()},
    )


def _wall(system: System, assumptions: Assumptions) -> Level | None:
    if system.rented or system.power is None:
        return None
    return next(one for one in levels(system.throughput, system.power, assumptions) if one.boundary == "wall")


def _own_inputs(system: System, assumptions: Assumptions) -> list[Input]:
    """Inputs about the system and its requests."""
    length = _length(system.throughput, assumptions)
    if system.rented:
        return [
            length,
            Input("rent", system.rent_dollars_per_accelerator_hour, "$/(accelerator hour)", "given", "given"),
        ]
    power = system.power
    assert power is not None  # _cost_inputs has refused
    found = [length, Input("power", power.watts, f"W, {power.boundary}", power.state, power.source)]
    return [*found, *(assumptions.inputs([WALL]) if power.boundary == "accelerators" else ())]


def _results(inputs: CostInputs, state: State) -> list[Result]:
    hourly = math.fsum(hourly_lines(inputs).values())
    return [
        Result(
            "Cost per million output tokens",
            dollars_per_million_output_tokens(inputs),
            "$/million output tokens",
            "system $/h / million output tokens per hour + egress + storage",
            state,
        ),
        Result("Cost of the system", hourly, "$/h", "all lines but egress and storage", state),
        Result(
            "Output tokens per hour",
            output_tokens_per_hour(inputs) / 1e6,
            "million/h",
            f"latency-bound rate {precise(inputs.output_tokens_per_second)}/s x 3,600 x utilisation"
            f" {precise(inputs.utilisation_share)}",
            state,
        ),
        Result(
            "The same at the full latency-bound rate",
            dollars_per_million_output_tokens(replace(inputs, utilisation_share=1.0)),
            "$/million output tokens",
            "all lines at utilisation 1 and full power, egress and storage too: what a price without use hides",
            state,
        ),
    ]


def _lines(inputs: CostInputs, per_million: Mapping[str, float], state: State) -> Table:
    hourly = hourly_lines(inputs)
    of_all = shares(per_million)
    rows = [
        {
            "line": name.replace("_", " "),
            "cost_dollars_per_hour": hourly.get(name, dollars * output_tokens_per_hour(inputs) / 1e6),
            "cost_dollars_per_million_output_tokens": dollars,
            "cost_share": of_all[name],
            "state": state,
        }
        for name, dollars in per_million.items()
    ]
    return Table("lines", "Where the money goes, at the mean use", tuple(rows))


def _interactions(
    inputs: CostInputs, profiles: Sequence[Profile], priced: Priced, derated: Derating, state: State
) -> Table:
    prices = priced.prices.scaled(derated.latency_bound_share)
    rows = []
    for profile in profiles:
        whole, short = (
            interaction_dollars(
                inputs,
                system_seconds=prices.interaction_seconds(one),
                read_tokens=one.read_tokens(0.0),
                written_tokens=one.written_tokens,
                requests=one.turns,
            )
            for one in (profile, profile.shortened(SHORTER_SHARE))
        )
        rows.append(
            {
                "profile": profile.name,
                "cost_dollars_per_request": whole / profile.turns,
                "cost_dollars_per_thousand_interactions": whole * 1000,
                "cost_dollars_per_million_output_tokens": whole / profile.written_tokens * 1e6,
                "cost_dollars_per_user_month": whole * profile.interactions_per_user_month,
                "cost_with_prompts_30_percent_shorter_dollars_per_thousand_interactions": short * 1000,
                "state": weakest((state, priced.state, profile.state)),
            }
        )
    note = "input and output tokens each at their own price; an interaction may be several requests"
    return Table("interactions", "Cost of requests, interactions and users", tuple(rows), note)


def _sensitivities(system: System, assumptions: Assumptions, names: Sequence[str]) -> tuple[Sensitivity, ...]:
    """The headline with each input alone at the ends of its range."""
    found = []
    for name in names:
        entry = assumptions.entries[name]
        if entry.low is None or entry.high is None:
            continue
        low, high = (
            dollars_per_million_output_tokens(_changed_inputs(system, assumptions, name, value))
            for value in (entry.low, entry.high)
        )
        found.append(Sensitivity(name, entry.unit, entry.low, entry.high, low, high))
    return by_swing(found)


def _changed_inputs(system: System, assumptions: Assumptions, name: str, value: float) -> CostInputs:
    """With one assumption at another value, also one that became part of the throughput."""
    throughput = system.throughput
    if name == LENGTH:
        throughput = replace(throughput, output_tokens_per_request=value)
    elif name == MIX:
        rate = throughput.output_tokens_per_second
        if throughput.inputs[0].unit.startswith("total"):
            rate = throughput.total_tokens_per_second / (1 + value)
        throughput = replace(throughput, output_tokens_per_second=rate, input_tokens_per_output_token=value)
    return _cost_inputs(replace(system, throughput=throughput), assumptions.but(name, value))


def _default(assumptions: Assumptions, name: str) -> Input | None:
    """An assumption as an input, if there is one of that name."""
    return assumptions.entries[name].to_input() if name in assumptions else None


def _length(throughput: Throughput, assumptions: Assumptions) -> Input:
    """Output tokens of a request: those of the run, or of the benchmark that the rate is taken to be of."""
    if throughput.service is None:
        return assumptions.entries[LENGTH].to_input()
    length = throughput.output_tokens_per_request
    return Input(LENGTH, length, "output tokens/request", "measured", throughput.source)


def _waterfall(lines: Mapping[str, float], state: State) -> dict[str, Any]:
    steps = [{"name": name.replace("_", " "), "value": value, "state": state} for name, value in lines.items()]
    unit = "$/million output tokens"
    return {"title": "Cost of a million output tokens", "unit": unit, "total": "Total", "steps": steps}
