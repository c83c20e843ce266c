"""Arithmetic of cost: what an hour of a system costs, line by line, and what its tokens and requests cost then."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from megatoken.planning.energy import power_at

HOURS_PER_YEAR = 8760.0
HOURS_PER_MONTH = HOURS_PER_YEAR / 12
BYTES_PER_GIGABYTE = 1e9
SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class CostInputs:
    """Everything that decides a cost; the fields after the first six are assumptions of the same name.

    ``output_tokens_per_second`` is the rate while the system is busy, ``full_watts`` its power then, at the wall.
    ``input_tokens_per_output_token`` and ``output_tokens_per_request`` describe the requests. With
    ``rent_dollars_per_accelerator_hour`` the system is rented: price, capital, power and space are the landlord's.
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
        """Fields that are assumptions."""
        names = [field.name for field in fields(cls)]
        return tuple(names[names.index("system_price_dollars_per_accelerator") :])


OWNED_ONLY = (
    "system_price_dollars_per_accelerator",
    "system_life_years",
    "residual_value_share",
    "cost_of_capital_share_per_year",
    "idle_power_share",
    "pue",
    "electricity_dollars_per_kwh",
    "space_dollars_per_kilowatt_month",
)


@dataclass(frozen=True, slots=True)
class Variable:
    """Dollars that one output token or one request adds, whatever the system."""

    egress_dollars_per_output_token: float
    storage_dollars_per_token: float
    storage_dollars_per_request: float


def hourly_lines(inputs: CostInputs) -> dict[str, float]:
    """Dollars per hour of the system, used or not, by line."""
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
    """What grows with tokens and requests."""
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
    """Dollars per million output tokens, by line; input tokens have no price of their own here, they are in it."""
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
    """All lines together."""
    return math.fsum(million_token_lines(inputs).values())


def interaction_dollars(
    inputs: CostInputs,
    *,
    system_seconds: float,
    read_tokens: float,
    written_tokens: float,
    requests: int,
) -> float:
    """Dollars of one interaction.

    Args:
        inputs: of the system.
        system_seconds: of the whole system, busy, that the interaction takes.
        read_tokens: input tokens sent, those that a cache spares included.
        written_tokens: output tokens.
        requests: to the model.
    """
    growing = variable(inputs)
    busy_hours = system_seconds / SECONDS_PER_HOUR / inputs.utilisation_share
    return (
        math.fsum(hourly_lines(inputs).values()) * busy_hours
        + written_tokens * growing.egress_dollars_per_output_token
        + (read_tokens + written_tokens) * growing.storage_dollars_per_token
        + requests * growing.storage_dollars_per_request
    )


def shares(lines: Mapping[str, float]) -> dict[str, float]:
    """Each line's share of all; zeros where all are zero."""
    total = math.fsum(lines.values())
    return {name: value / total if total else 0.0 for name, value in lines.items()}
