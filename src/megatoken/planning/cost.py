"""``megatoken plan cost``: dollars per million output tokens, per interaction and per user, and what moves them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from megatoken.errors import UsageError
from megatoken.planning.assumptions import Assumptions, load_assumptions
from megatoken.planning.bounds import Served
from megatoken.planning.energy import WALL, Power, levels, power_at
from megatoken.planning.figures import Input, Plan, Result, Sensitivity, State, Table, by_swing, weakest
from megatoken.planning.pricing import Derating, Priced, derating, price
from megatoken.planning.throughput import LENGTH, MIX, Throughput, check_positive
from megatoken.planning.workloads import Profile
from megatoken.text import precise

HOURS_PER_YEAR = 8760.0
HOURS_PER_MONTH = HOURS_PER_YEAR / 12
BYTES_PER_GIGABYTE = 1e9
SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class CostInputs:
    """All inputs of a cost; the fields after the first six are assumptions of the same name.

    ``output_tokens_per_second`` is the rate while the system is busy, ``full_watts`` its wall power at that rate.
    ``input_tokens_per_output_token`` and ``output_tokens_per_request`` describe the requests. With
    ``rent_dollars_per_accelerator_hour`` the system is rented: the rent includes price, capital, power and space.
    """

    output_tokens_per_second: float
    accelerators: int
    full_watts: float
    input_tokens_per_output_token: float
    output_tokens_per_request: float
    rent_dollars_per_accelerator_hour: float | None
    system_price_dollars_per_accelerator: float
    system_life_years: float
    residual_value_share: float
    cost_of_capital_share_per_year: float
    idle_power_share: float
    pue: float
    electricity_dollars_per_kwh: float
    space_dollars_per_kilowatt_month: float
    egress_bytes_per_output_token: float
    egress_dollars_per_gigabyte: float
    storage_bytes_per_token: float
    storage_months: float
    storage_dollars_per_gigabyte_month: float
    storage_operations_per_request: float
    storage_dollars_per_million_operations: float
    staff_people_per_thousand_accelerators: float
    staff_dollars_per_person_year: float
    utilisation_share: float

    @classmethod
    def assumption_names(cls) -> tuple[str, ...]:
        """Names of the fields that are assumptions."""
        names = [field.name for field in fields(cls)]
        return tuple(names[names.index("system_price_dollars_per_accelerator") :])


# The assumptions that a rent includes.
OWNED_ONLY = CostInputs.assumption_names()[: CostInputs.assumption_names().index("egress_bytes_per_output_token")]


@dataclass(frozen=True, slots=True)
class Variable:
    """Dollars that one output token or one request adds on any system."""

    egress_dollars_per_output_token: float
    storage_dollars_per_token: float
    storage_dollars_per_request: float


def hourly_lines(inputs: CostInputs) -> dict[str, float]:
    """Dollars per hour of the system by line, whether it is busy or idle."""
    people = inputs.staff_people_per_thousand_accelerators * inputs.accelerators / 1000
    staff = people * inputs.staff_dollars_per_person_year / HOURS_PER_YEAR
    if inputs.rent_dollars_per_accelerator_hour is not None:
        return {"rent": inputs.rent_dollars_per_accelerator_hour * inputs.accelerators, "staff": staff}
    price = inputs.system_price_dollars_per_accelerator * inputs.accelerators
    kept = inputs.residual_value_share
    full_kilowatts = inputs.full_watts / 1e3
    machine_kilowatts = power_at(inputs.utilisation_share, full_kilowatts, inputs.idle_power_share)
    return {
        "amortisation": price * (1 - kept) / (inputs.system_life_years * HOURS_PER_YEAR),
        "capital": price * (1 + kept) / 2 * inputs.cost_of_capital_share_per_year / HOURS_PER_YEAR,
        "power": machine_kilowatts * inputs.electricity_dollars_per_kwh,
        "cooling_and_losses": machine_kilowatts * (inputs.pue - 1) * inputs.electricity_dollars_per_kwh,
        "space": full_kilowatts * inputs.space_dollars_per_kilowatt_month / HOURS_PER_MONTH,
        "staff": staff,
    }


def variable(inputs: CostInputs) -> Variable:
    """Costs that grow with tokens and requests."""
    months = inputs.storage_months * inputs.storage_dollars_per_gigabyte_month / BYTES_PER_GIGABYTE
    return Variable(
        inputs.egress_bytes_per_output_token * inputs.egress_dollars_per_gigabyte / BYTES_PER_GIGABYTE,
        inputs.storage_bytes_per_token * months,
        inputs.storage_operations_per_request * inputs.storage_dollars_per_million_operations / 1e6,
    )


def output_tokens_per_hour(inputs: CostInputs) -> float:
    """Output tokens of a mean hour."""
    return inputs.output_tokens_per_second * SECONDS_PER_HOUR * inputs.utilisation_share


def million_token_lines(inputs: CostInputs) -> dict[str, float]:
    """Dollars per million output tokens by line; the cost of input tokens is included."""
    millions = output_tokens_per_hour(inputs) / 1e6
    growing = variable(inputs)
    tokens = 1 + inputs.input_tokens_per_output_token
    storage = growing.storage_dollars_per_token * tokens
    storage += growing.storage_dollars_per_request / inputs.output_tokens_per_request
    return {
        **{name: dollars / millions for name, dollars in hourly_lines(inputs).items()},
        "network_egress": growing.egress_dollars_per_output_token * 1e6,
        "storage": storage * 1e6,
    }


def dollars_per_million_output_tokens(inputs: CostInputs) -> float:
    """Sum of all lines."""
    return math.fsum(million_token_lines(inputs).values())


def interaction_dollars(
    inputs: CostInputs, *, system_seconds: float, read_tokens: float, written_tokens: float, requests: int
) -> float:
    """Dollars of one interaction that takes the whole busy system for ``system_seconds``.

    ``read_tokens`` are all input tokens sent, including cached ones; ``requests`` are those to the model.
    """
    growing = variable(inputs)
    busy_hours = system_seconds / SECONDS_PER_HOUR / inputs.utilisation_share
    return (
        math.fsum(hourly_lines(inputs).values()) * busy_hours
        + written_tokens * growing.egress_dollars_per_output_token
        + (read_tokens + written_tokens) * growing.storage_dollars_per_token
        + requests * growing.storage_dollars_per_request
    )


SHORTER_SHARE = 0.3
UTILISATION = "utilisation_share"
PRICE = "system_price_dollars_per_accelerator"
PRICED = "GB300"  # the system that its default is the price of
UNPRICED = "the accelerator is unknown: pass --accelerator or --rent"
NOT_COVERED = (
    "Not included: the network between racks, maintenance contracts, software licences, taxes, idle spare nodes."
)


@dataclass(frozen=True, slots=True)
class System:
    """A system to pay for: its rate and power, its rent if rented, and the user's factors that lower the rate."""

    throughput: Throughput
    power: Power | None
    rent_dollars_per_accelerator_hour: float | None = None
    factors: Sequence[Input] = ()

    @property
    def rented(self) -> bool:
        """Whether the system is rented; price, capital, power and space are then part of the rent."""
        return self.rent_dollars_per_accelerator_hour is not None


def plan_cost(
    system: System, profiles: Sequence[Profile], assumptions: Assumptions, *, second: Throughput | None = None
) -> Plan:
    """Cost of tokens, interactions and users, each token at its own price; ``second`` as in ``plan_capacity``.

    Raises:
        UsageError: the number of accelerators or the power is unknown, or the rent is out of range.
    """
    inputs = cost_inputs(system, assumptions)
    throughput = system.throughput
    derated = derating(throughput, assumptions, system.factors)
    names = [name for name in CostInputs.assumption_names() if not (system.rented and name in OWNED_ONLY)]
    wall = _wall(system, assumptions)
    own_states = (throughput.mix_state, _length(throughput, assumptions).state, *([wall.state] if wall else []))
    state = weakest((derated.latency_bound_state, *own_states, *assumptions.states(names)))
    priced = price(throughput, assumptions, second)
    lines = million_token_lines(inputs)
    used = [*_own_inputs(system, assumptions), *derated.factors[:-1], *assumptions.inputs(names)]
    assumed = [
        one.name
        for one in (*throughput.inputs, *used)
        if one.name in assumptions and one == assumptions.entries[one.name].to_input()
    ]
    return Plan(
        kind="plan_cost",
        title=f"Cost of {throughput.label}",
        inputs=(*throughput.inputs, *used, *priced.inputs),
        results=tuple(_results(inputs, state)),
        tables=(
            *_own_request(inputs, throughput, state),
            _lines(inputs, lines, state),
            _interactions(inputs, profiles, throughput, priced, derated, assumptions, state),
        ),
        profiles=tuple(profile.to_document() for profile in profiles),
        sensitivities=_sensitivities(system, assumptions, assumed),
        notes=(*throughput.notes, NOT_COVERED, *price_notes(system, assumptions)),
        waterfall=_waterfall(lines, state),
    )


def accelerator_hour(system: System, assumptions: Assumptions) -> tuple[float, State, tuple[Input, ...]] | None:
    """Dollars per accelerator hour of a system, idle or busy, at mean utilisation: the basis of all plans.

    With the state of the price and the inputs that it uses; None if neither rent nor power of the system is known.
    """
    if not system.rented and system.power is None:
        return None
    inputs = cost_inputs(system, assumptions, output_tokens_per_second=system.throughput.output_tokens_per_second)
    names = _hourly_names(system)
    wall = _wall(system, assumptions)
    state = weakest((*assumptions.states(names), *([wall.state] if wall else ["given"])))
    own = _own_inputs(system, assumptions)[1:]
    return math.fsum(hourly_lines(inputs).values()) / inputs.accelerators, state, (*own, *assumptions.inputs(names))


def _hourly_names(system: System) -> list[str]:
    """The assumptions that ``hourly_lines`` uses."""
    used = [*OWNED_ONLY, "staff_people_per_thousand_accelerators", "staff_dollars_per_person_year", UTILISATION]
    return used[len(OWNED_ONLY) : -1] if system.rented else used


def price_notes(system: System, assumptions: Assumptions) -> list[str]:
    """Says so if the price is the default, which is that of another accelerator."""
    name = system.throughput.accelerator or "unknown accelerator"
    if (
        not system.rented
        and assumptions.entries[PRICE] == load_assumptions().entries[PRICE]
        and PRICED.upper() not in name.upper()
    ):
        return [
            f"The assumed price is that of a {PRICED}, this is a {name}: give its price with --set {PRICE}=DOLLARS."
        ]
    return []


def cost_inputs(
    system: System, assumptions: Assumptions, *, output_tokens_per_second: float | None = None
) -> CostInputs:
    """All inputs of the cost of a system, by default at the rate that keeps the latency limits.

    Raises:
        UsageError: as ``plan_cost``.
    """
    throughput, rent = system.throughput, system.rent_dollars_per_accelerator_hour
    if throughput.accelerators is None:
        raise UsageError("number of accelerators unknown; pass --accelerators (1 for a machine without any)")
    if rent is not None:
        check_positive("--rent", rent, "2.5")
    wall = _wall(system, assumptions)
    if wall is None and not system.rented:
        raise UsageError("power unknown; pass --watts, or --accelerators and --accelerator, or --rent")
    if output_tokens_per_second is None:
        output_tokens_per_second = derating(throughput, assumptions, system.factors).latency_bound
    return CostInputs(
        output_tokens_per_second=output_tokens_per_second,
        accelerators=throughput.accelerators,
        full_watts=wall.watts if wall else 0.0,
        input_tokens_per_output_token=throughput.input_tokens_per_output_token,
        output_tokens_per_request=throughput.output_tokens_per_request,
        rent_dollars_per_accelerator_hour=rent,
        **{name: assumptions[name] for name in CostInputs.assumption_names()},
    )


def _wall(system: System, assumptions: Assumptions) -> Power | None:
    if system.rented or system.power is None:
        return None
    return next(one for one in levels(system.throughput, system.power, assumptions) if one.boundary == "wall")


def _own_inputs(system: System, assumptions: Assumptions) -> list[Input]:
    """The inputs that describe the system and its requests."""
    length = _length(system.throughput, assumptions)
    power = system.power
    rent = system.rent_dollars_per_accelerator_hour
    if system.rented or power is None:
        return [length, Input("rent", rent, "$/(accelerator hour)", "given", "given")]
    found = [length, Input("power", power.watts, f"W, {power.boundary}", power.state, power.source)]
    return [*found, *(assumptions.inputs([WALL]) if power.boundary == "accelerators" else ())]


def _results(inputs: CostInputs, state: State) -> list[Result]:
    hourly, unit = math.fsum(hourly_lines(inputs).values()), "$/million output tokens"
    busy = f"{precise(inputs.output_tokens_per_second)}/s x 3,600 x utilisation {precise(inputs.utilisation_share)}"
    full = dollars_per_million_output_tokens(replace(inputs, utilisation_share=1.0))
    return [
        Result(
            "Cost per million output tokens",
            dollars_per_million_output_tokens(inputs),
            unit,
            "system $/h / million output tokens per hour + egress + storage",
            state,
        ),
        Result("Cost of the system", hourly, "$/h", "all lines except egress and storage", state),
        Result(
            "Output tokens per hour",
            output_tokens_per_hour(inputs) / 1e6,
            "million/h",
            f"latency-bound rate {busy}",
            state,
        ),
        Result(
            "Cost per million output tokens at full utilisation",
            full,
            unit,
            "all lines at the latency-bound rate with utilisation 1 and full power",
            state,
        ),
    ]


def _own_request(inputs: CostInputs, throughput: Throughput, state: State) -> list[Table]:
    """The price of a mean request of the run that the rate is of; nothing for a rate that was given as a number."""
    if throughput.service is None:
        return []
    tokens = throughput.output_tokens_per_request
    rows = []
    for share in (inputs.utilisation_share, 1.0):
        million = dollars_per_million_output_tokens(replace(inputs, utilisation_share=share))
        rows.append(
            {
                "request": f"of {throughput.source}",
                "utilisation_share": share,
                "output_tokens": tokens,
                "dollars_per_million_output_tokens": million,
                "dollars_per_request": million * tokens / 1e6,
                "state": state,
            }
        )
    note = "dollars per request = dollars per million output tokens x output tokens of a mean request / 1,000,000"
    return [Table("own_request", "The run's own requests", tuple(rows), note)]


def _lines(inputs: CostInputs, per_million: Mapping[str, float], state: State) -> Table:
    hourly = hourly_lines(inputs)
    total = math.fsum(per_million.values())
    rows = [
        {
            "line": name.replace("_", " "),
            "cost_dollars_per_hour": hourly.get(name, dollars * output_tokens_per_hour(inputs) / 1e6),
            "cost_dollars_per_million_output_tokens": dollars,
            "cost_share": dollars / total if total else 0.0,
            "state": state,
        }
        for name, dollars in per_million.items()
    ]
    note = "Each state is that of the cost per million output tokens, which rests on the rate and the utilisation too"
    return Table("lines", "Cost by line, at mean utilisation", tuple(rows), note)


def _interactions(
    inputs: CostInputs,
    profiles: Sequence[Profile],
    throughput: Throughput,
    priced: Priced,
    derated: Derating,
    assumptions: Assumptions,
    state: State,
) -> Table:
    rows = []
    for profile in profiles:
        whole, short = (
            interaction_dollars(
                inputs,
                system_seconds=1 / Served(one, throughput, priced, derated, assumptions).highest_with_factors,
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
    note = "input and output tokens each at their own price; an interaction may have several requests"
    return Table("interactions", "Cost of requests, interactions and users", tuple(rows), note)


def _sensitivities(system: System, assumptions: Assumptions, names: Sequence[str]) -> tuple[Sensitivity, ...]:
    """The headline with one input at a time at the ends of its range."""
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
    """The inputs with one assumption at another value, including those that are part of the throughput."""
    throughput = system.throughput
    if name == LENGTH:
        throughput = replace(throughput, output_tokens_per_request=value)
    elif name == MIX:
        rate = throughput.output_tokens_per_second
        if throughput.counted == "total":
            rate = throughput.total_tokens_per_second / (1 + value)
        throughput = replace(throughput, output_tokens_per_second=rate, input_tokens_per_output_token=value)
    return cost_inputs(replace(system, throughput=throughput), assumptions.but(name, value))


def _length(throughput: Throughput, assumptions: Assumptions) -> Input:
    """Output tokens per request: of the run, or of the assumed benchmark."""
    if throughput.service is None:
        return assumptions.entries[LENGTH].to_input()
    length = throughput.output_tokens_per_request
    return Input(LENGTH, length, "output tokens/request", "measured", throughput.source)


def _waterfall(lines: Mapping[str, float], state: State) -> dict[str, Any]:
    steps = [{"name": name.replace("_", " "), "value": value, "state": state} for name, value in lines.items()]
    unit = "$/million output tokens"
    return {"title": "Cost of a million output tokens", "unit": unit, "total": "Total", "steps": steps}
