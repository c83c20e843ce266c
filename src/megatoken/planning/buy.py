"""``megatoken plan buy``: racks, accelerators, money and energy for so many seats, with ranges and what moves them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatoken.errors import UsageError
from megatoken.planning.assumptions import Assumptions
from megatoken.planning.bounds import Served
from megatoken.planning.cost import (
    HOURS_PER_MONTH,
    UTILISATION,
    System,
    accelerator_hour,
    cost_inputs,
    interaction_dollars,
    price_notes,
)
from megatoken.planning.energy import PUE, levels, power_at
from megatoken.planning.figures import Input, Plan, Result, Sensitivity, Table, by_swing, weakest
from megatoken.planning.fleet import Size, SupplyClass, size
from megatoken.planning.fleet_plan import Supply
from megatoken.planning.pricing import derating, price
from megatoken.planning.throughput import Throughput, check_positive
from megatoken.planning.workloads import Profile
from megatoken.text import count_of, precise, significant

DEMAND = ("busiest_hour_share", "working_days_per_month")
SECONDS_PER_MONTH = HOURS_PER_MONTH * 3600
HEADLINE, NEED, USED = "Cost per month", "Accelerators needed", "Mean utilisation"
TOP = 3

# Name of each result: unit, formula, whether it is a whole number.
RESULTS = {
    "Racks": ("racks", "ceiling(nodes / nodes per rack)", True),
    "Nodes": ("nodes", "serving nodes + spares, in whole racks where the part is sold as a rack", True),
    "Accelerators": ("accelerators", "nodes x accelerators per node", True),
    NEED: ("accelerators", "peak demand / planning rate of an accelerator; without spares and rounding", False),
    HEADLINE: ("$/month", "accelerators x price of an accelerator hour x 730 h + egress + storage", False),
    "Cost per million output tokens": ("$", "cost per month / output tokens per month", False),
    USED: ("share", "interactions per month / what the fleet serves in a month", False),
    "Energy per month": ("MWh", "wall power at the mean utilisation x PUE x 730 h", False),
    "Energy per million output tokens": ("kWh", "energy per month / output tokens per month", False),
    "Peak demand": ("interactions/s", "seats x interactions a working day x busiest hour's share / 3,600 s", False),
}


@dataclass(frozen=True, slots=True)
class Order:
    """What is asked for: seats, their profile, and spare fault domains. ``supply`` makes the hardware's supply."""

    seats: int
    profile: Profile
    supply: Callable[[Assumptions], Supply]
    factors: Sequence[Input] = ()
    spare_domains: int = 1
    domain: str = "node"


@dataclass(frozen=True, slots=True)
class Answer:
    """The results of an order by their names in ``RESULTS``, and what they rest on."""

    values: Mapping[str, float | None]
    served: Served
    nodes: SupplyClass
    inputs: tuple[Input, ...]
    notes: tuple[str, ...]


def plan_buy(order: Order, assumptions: Assumptions) -> Plan:
    """The answer with its range: each result with every assumption at the ends of its range, one at a time.

    The distances, as logarithms, are taken as independent: low and high are the roots of the sums of their squares.
    Racks, nodes and accelerators are those bought for the low and the high number of accelerators needed.

    Raises:
        UsageError: the demand, the rate, the power or the price is unknown or out of range.
    """
    check_positive("--seats", order.seats, "5000")
    expected = answer(order, assumptions)
    ends, notes = _ends(order, assumptions, expected)
    served, state = expected.served, weakest((expected.served.state, *assumptions.states(DEMAND)))
    results = []
    needs = [pair[NEED] for pairs in ends.values() for pair in pairs]
    least, most = (
        _bought(order, expected.nodes, needed / expected.nodes.accelerators_per_node * expected.nodes.rate_per_node)[1]
        for needed in _range(expected.values[NEED] or 0.0, needs)
    )
    for name, (unit, formula, whole) in RESULTS.items():
        value = expected.values[name]
        if value is None:
            continue
        if whole:
            low, high = least[name], most[name]
        else:
            low, high = _range(value, [pair[name] for pairs in ends.values() for pair in pairs])
        results.append(Result(name, value, unit, formula, state, low, high))
    moves = {name: _moves(name, ends, assumptions) for name in (HEADLINE, NEED)}
    return Plan(
        kind="plan_buy",
        title=_title(order, results, served),
        inputs=(Input("seats", order.seats, "seats", "given", "--seats"), *expected.inputs),
        results=tuple(results),
        tables=(_top(HEADLINE, moves[HEADLINE]), _top(NEED, moves[NEED]), _bounds(served)),
        profiles=(order.profile.to_document(),),
        sensitivities=moves[HEADLINE],
        headline=HEADLINE,
        notes=(*notes, *expected.notes),
    )


def answer(order: Order, assumptions: Assumptions) -> Answer:
    """The results of ``order`` under these assumptions. Raises UsageError as ``plan_buy``."""
    supply, profile = order.supply(assumptions), order.profile
    throughput, system = supply.throughput, supply.system
    per_node = supply.accelerators_per_node or (throughput.accelerators if throughput.scope == "node" else None)
    if throughput.accelerators is None or per_node is None or system is None:
        known = system is not None and (system.rented or system.power is not None)
        raise UsageError(_unknown_hardware(throughput, per_node, priced=known))
    priced = price(throughput, assumptions)
    derated = derating(throughput, assumptions, order.factors)
    served = Served(profile, throughput, priced, derated, assumptions)
    share = per_node / throughput.accelerators
    monthly = order.seats * profile.interactions_per_user_month
    if not monthly:
        raise UsageError(f"profile {profile.name}: interactions_per_user_month is 0; set it above 0")
    busiest_hour_share, working_days = (assumptions[name] for name in DEMAND)
    demand = monthly / working_days * busiest_hour_share / 3600
    nodes = SupplyClass("base", served.planning * share, per_node, None, supply.nodes_per_rack, supply.whole_racks)
    sized, bought = _bought(order, nodes, demand)
    millions = monthly * profile.written_tokens / 1e6
    capacity = served.highest_with_factors * share * sized.nodes * SECONDS_PER_MONTH
    utilisation = min(1.0, monthly / capacity)
    used = assumptions.but(UTILISATION, max(utilisation, assumptions.entries[UTILISATION].minimum or 0.0))
    hour = accelerator_hour(system, used)
    if hour is None:
        raise UsageError(_unknown_hardware(throughput, per_node, priced=False))
    dollars, _, inputs = hour
    stored = {"read_tokens": profile.read_tokens(0.0), "written_tokens": profile.written_tokens}
    growing = monthly * interaction_dollars(
        cost_inputs(system, used), system_seconds=0.0, requests=profile.turns, **stored
    )
    cost = dollars * sized.accelerators * HOURS_PER_MONTH + growing
    energy = _site_kwh(system, used, sized.accelerators / throughput.accelerators)
    values = {
        **bought,
        NEED: sized.exact_nodes * per_node,
        HEADLINE: cost,
        "Cost per million output tokens": cost / millions if millions else None,
        "Energy per month": None if energy is None else energy / 1e3,
        "Energy per million output tokens": energy / millions if energy and millions else None,
        "Peak demand": demand,
        USED: utilisation,
    }
    shown = [one for one in inputs if one.name != UTILISATION]
    every = (
        *throughput.inputs,
        *assumptions.inputs(DEMAND),
        *priced.inputs,
        *derated.factors,
        Input("accelerator_hour", dollars, "$/(accelerator hour)", "assumed", "system $/h of plan cost / accelerators"),
        *shown,
    )
    return Answer(
        values, served, nodes, tuple(dict.fromkeys(every)), (*throughput.notes, *price_notes(system, assumptions))
    )


def _bought(order: Order, nodes: SupplyClass, demand: float) -> tuple[Size, dict[str, float | None]]:
    """The nodes that serve ``demand``, with spares, as one purchase in the unit of each result."""
    sized = size(demand, nodes, spare_domains=order.spare_domains, domain=order.domain)
    return sized, {"Racks": sized.racks, "Nodes": sized.nodes, "Accelerators": sized.accelerators}


def _unknown_hardware(throughput: Throughput, per_node: int | None, *, priced: bool) -> str:
    """All that an order lacks, in one line, and flags that would do."""
    missing, example = [], []
    if not priced:
        other = "--accelerator, such as GB300, or for any other machine " * (throughput.accelerator is None)
        missing.append(f"{other}--rent, dollars an hour for each accelerator")
        example.append("--rent 0.2")
    if throughput.accelerators is None:
        missing.append("--accelerators, how many make that rate (1 for a machine without any)")
        example.append("--accelerators 1")
    if per_node is None and throughput.scope != "node":
        missing.append("--accelerators-per-node")
        example.append(f"--accelerators-per-node {throughput.accelerators or 1}")
    return f"the hardware is unknown; pass {', and '.join(missing)}; for example: {' '.join(example)}"


def _site_kwh(system: System, assumptions: Assumptions, systems: float) -> float | None:
    """Energy of so many systems in a month at mean utilisation, cooling included; None if the power is unknown."""
    if system.power is None:
        return None
    wall = next(one for one in levels(system.throughput, system.power, assumptions) if one.boundary == "wall")
    kilowatts = power_at(assumptions[UTILISATION], wall.watts / 1e3, assumptions["idle_power_share"])
    return kilowatts * systems * assumptions[PUE] * HOURS_PER_MONTH


_Ends = dict[str, tuple[Mapping[str, float | None], Mapping[str, float | None]]]


def _ends(order: Order, assumptions: Assumptions, expected: Answer) -> tuple[_Ends, list[str]]:
    """The results with one assumption at a time at the ends of its range; notes on ends that cannot be served."""
    found, notes = {}, []
    for name, entry in assumptions.entries.items():
        if entry.low is None or entry.high is None:
            continue
        pair = []
        for value in (entry.low, entry.high):
            try:
                pair.append(answer(order, assumptions.but(name, value)).values)
            except UsageError as error:
                notes.append(f"With {name} at {precise(value)} there is no plan: {error}.")
                pair.append(expected.values)
        found[name] = (pair[0], pair[1])
    return found, notes


def _range(value: float, others: Sequence[float | None]) -> tuple[float, float]:
    """Low and high of a result by ``plan_buy``'s rule; each pair of ``others`` belongs to one assumption."""
    if not value:
        return value, value
    below = above = 0.0
    for first, second in zip(others[::2], others[1::2], strict=True):
        logs = [math.log(one / value) for one in (first, second) if one]
        below += min(0.0, *logs) ** 2
        above += max(0.0, *logs) ** 2
    return value * math.exp(-math.sqrt(below)), value * math.exp(math.sqrt(above))


def _moves(name: str, ends: _Ends, assumptions: Assumptions) -> tuple[Sensitivity, ...]:
    found = []
    for assumption, (low, high) in ends.items():
        entry, at_low, at_high = assumptions.entries[assumption], low[name], high[name]
        if at_low is not None and at_high is not None and entry.low is not None and entry.high is not None:
            found.append(Sensitivity(assumption, entry.unit, entry.low, entry.high, at_low, at_high))
    return by_swing(found)


def _top(name: str, moves: Sequence[Sensitivity]) -> Table:
    rows = tuple(
        {
            "assumption": one.input.replace("_", " "),
            "from": one.low,
            "to": one.high,
            "result_low": min(one.result_low, one.result_high),
            "result_high": max(one.result_low, one.result_high),
        }
        for one in moves[:TOP]
    )
    note = f"{RESULTS[name][0]}, with this assumption alone at the ends of its range"
    return Table(f"top_{name.lower().replace(' ', '_')}", f"What moves most: {name.lower()}", rows, note)


def _bounds(served: Served) -> Table:
    row = {
        "profile": served.profile.name,
        "bound": served.bound,
        "planning_interactions_per_second": served.planning,
        "in_flight_requests": served.most_in_flight,
        "memory_holds_requests": served.memory_requests,
        "users": served.users,
        "state": served.state,
    }
    return Table("bounds", f"What {served.throughput.label.split(' (')[0]} serves, and what bounds it", (row,))


def _title(order: Order, results: Sequence[Result], served: Served) -> str:
    """The answer in one sentence."""
    by_name = {result.name: result for result in results}

    def shown(name: str) -> str:
        one = by_name[name]
        return f"{significant(one.value)} ({significant(one.low)} to {significant(one.high)})"

    name = served.throughput.accelerator
    racks = by_name.get("Racks")
    nodes, accelerators = by_name["Nodes"].value or 0, by_name["Accelerators"].value or 0
    parts = f"{round(accelerators):,} x {name}" if name else count_of(round(accelerators), "accelerator")
    size_text = f"{count_of(round(nodes), 'node')}, {parts}"
    if racks is not None:
        size_text = f"{count_of(round(racks.value or 0), 'rack')} ({size_text})"
    return (
        f"{order.seats:,} seats of {order.profile.name}: {size_text}, {shown(NEED)} accelerators"
        f" needed; {shown(HEADLINE)} dollars a month at a mean utilisation of"
        f" {significant(100 * (by_name[USED].value or 0.0))} %"
    )
