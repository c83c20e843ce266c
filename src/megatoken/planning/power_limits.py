"""``megatoken plan energy --power-limit``: what a lower limit of the accelerators costs and saves, by a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from megatoken.analysis.energy import RunEnergy
from megatoken.analysis.published import accelerator_facts
from megatoken.errors import UsageError
from megatoken.planning.assumptions import Assumptions, read_shipped
from megatoken.planning.energy import ELECTRICITY, JOULES_PER_KWH, PUE, WALL, Power, plan_energy, rate_at
from megatoken.planning.figures import Input, Plan, State, Table, weakest
from megatoken.planning.throughput import DEFAULT_MODEL, Throughput
from megatoken.planning.workloads import Profile
from megatoken.text import exact, precise
from megatoken.yaml_files import Strict

AT_LIMIT_SHARE = 0.9
"""Of its limit, that an accelerator draws at least if the limit holds it back: a run's mean includes its ends."""
CURVE_PRECISION = "fp8"
RANGE = (
    "low: power grows with the fourth power of the clock, fitted to the lowest clocks alone; high: with its second"
    " power; else with its third; tokens per joule have the same range; the clock is about that of the products"
)
LEAST_SPEED, MOST_SPEED = 0.1, 1.0
HALVINGS = 50


class _Form(Strict):
    exponent: float
    constant_joules: float
    clock_joules: float


class _Layer(Strict):
    clock_mhz: float
    product_microseconds: float
    attention_microseconds: float
    attention_exponent: float
    forms: list[_Form]

    def microseconds(self, speed: float) -> float:
        return self.product_microseconds / speed + self.attention_microseconds / math.pow(
            speed, self.attention_exponent
        )


class _Curve(Strict):
    power_limits_watts: list[float]
    static_watts: float
    source: str
    workloads: dict[str, _Layer]

    @property
    def own_limit_watts(self) -> float:
        return self.power_limits_watts[0]


class _CurvesFile(Strict):
    accelerators: dict[str, _Curve]


@dataclass(frozen=True, slots=True)
class Limited:
    """A power limit: rates as shares of that at the accelerator's own limit, and about the clock of products."""

    watts: float
    rate_share: float
    rate_share_low: float
    rate_share_high: float
    clock_mhz: float


def limited(curve: _Curve, layer: _Layer, watts: float) -> Limited:
    """The rate at a limit by each form of the model, the first and the range of all."""
    power_share = watts / curve.own_limit_watts
    speeds = [_speed(curve, layer, form, power_share) for form in layer.forms]
    rates = [layer.microseconds(1.0) / layer.microseconds(speed) for speed in speeds]
    return Limited(watts, rates[0], min(rates), max(rates), layer.clock_mhz * speeds[0])


def _speed(curve: _Curve, layer: _Layer, form: _Form, power_share: float) -> float:
    """The speed of products at which a layer draws ``power_share`` of its power at speed 1, by halving."""

    def watts(speed: float) -> float:
        joules = form.constant_joules + form.clock_joules * math.pow(speed, form.exponent)
        return curve.static_watts + joules / layer.microseconds(speed) * 1e6

    low, high, wanted = LEAST_SPEED, MOST_SPEED, power_share * watts(1.0)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if watts(middle) < wanted else (low, middle)
    return high


def plan_power_limit(
    throughput: Throughput,
    power: Power,
    power_limit_watts: float,
    assumptions: Assumptions,
    *,
    profiles: Sequence[Profile] = (),
    energy: RunEnergy | None = None,
) -> Plan:
    """``plan_energy`` at another power limit of each accelerator than its own, which the rate and ``power`` are at.

    Raises:
        UsageError: the curve of the accelerator is not known, the limit is outside it, or the rate is not one at which
            the accelerator's own limit holds it back.
    """
    name, curve = _curve_of(throughput)
    _check(name, curve, throughput, power, power_limit_watts)
    model = throughput.replica.model if throughput.replica is not None else None
    known = model if model in curve.workloads else DEFAULT_MODEL
    layer, most = curve.workloads[known], curve.own_limit_watts
    found = limited(curve, layer, power_limit_watts)
    rate = rate_at(throughput, power, energy)
    state = weakest(("estimate", throughput.state, power.state))
    shown = sorted({*curve.power_limits_watts, power_limit_watts}, reverse=True)
    table = _table(rate, power, [limited(curve, layer, watts) for watts in shown], most, assumptions, state)
    share = found.rate_share
    plan = plan_energy(
        replace(throughput, output_tokens_per_second=rate * share, state=state),
        replace(
            power,
            watts=power.watts * power_limit_watts / most,
            state=weakest(("estimate", power.state)),
            source=f"model: {precise(power.watts)} W x {exact(power_limit_watts)} / {exact(most)}",
        ),
        assumptions,
        profiles=profiles,
    )
    limit = Input("power_limit", power_limit_watts, f"W for each {name}", "given", "--power-limit")
    range_ = found.rate_share_low, found.rate_share_high
    factor = Input("rate_share_at_power_limit", share, "share of the rate", "estimate", curve.source, *range_)
    what = f"Energy at a power limit of {exact(power_limit_watts)} W, by a model, not measured"
    return replace(
        plan,
        title=f"{what}: {plan.title.removeprefix('Energy of ')}",
        inputs=(*plan.inputs, limit, factor),
        results=tuple(replace(one, formula=f"by the model: {one.formula}") for one in plan.results),
        tables=(table, *plan.tables),
        notes=(*_notes(name, curve, known, throughput), *plan.notes),
    )


def _curve_of(throughput: Throughput) -> tuple[str, _Curve]:
    facts = accelerator_facts(throughput.accelerator)
    if facts is None or facts.name not in _curves():
        raise UsageError(
            f"--power-limit: the curve of {throughput.accelerator or 'an unknown accelerator'} is not known; it is of"
            f" {', '.join(_curves())} only"
        )
    return facts.name, _curves()[facts.name]


def _check(name: str, curve: _Curve, throughput: Throughput, power: Power, watts: float) -> None:
    least, most = curve.power_limits_watts[-1], curve.own_limit_watts
    if not least <= watts <= most:
        raise UsageError(f"--power-limit: expected {exact(least)} to {exact(most)} W for {name}, got {exact(watts)}")
    if power.boundary != "accelerators" or throughput.accelerators is None:
        raise UsageError(
            "--power-limit needs the power of the accelerators only: --boundary accelerators, or no --watts"
        )
    drawn = power.watts / throughput.accelerators
    if drawn < AT_LIMIT_SHARE * most:
        raise UsageError(
            f"--power-limit: {precise(drawn)} W for each {name} is not held back by its limit of {exact(most)} W; the"
            " curve is that of a card at its limit"
        )


def _table(
    rate: float, power: Power, found: Sequence[Limited], most_watts: float, assumptions: Assumptions, state: State
) -> Table:
    dollars_per_joule = assumptions[WALL] * assumptions[PUE] * assumptions[ELECTRICITY] / JOULES_PER_KWH
    rows = []
    for one in found:
        joules = power.watts * one.watts / most_watts / (rate * one.rate_share)
        rows.append(
            {
                "power_limit_watts": one.watts,
                "output_tokens_per_second": rate * one.rate_share,
                "low_output_tokens_per_second": rate * one.rate_share_low,
                "high_output_tokens_per_second": rate * one.rate_share_high,
                "output_tokens_per_joule": 1 / joules,
                "energy_joules_per_output_token": joules,
                "electricity_dollars_per_million_output_tokens": joules * dollars_per_joule * 1e6,
                "product_clock_mhz": one.clock_mhz,
                "state": state,
            }
        )
    title = "Power limits in W for each accelerator, by a model: not measured"
    return Table("power_limits", title, tuple(rows), RANGE)


def _notes(name: str, curve: _Curve, known: str, throughput: Throughput) -> list[str]:
    notes = [f"What {name} does at a lower power limit is computed, not measured; {curve.source}."]
    replica = throughput.replica
    if replica is None or (replica.model, replica.precision) != (known, CURVE_PRECISION):
        of = (
            "the model of this rate is not known"
            if replica is None
            else f"this is {replica.model} in {replica.precision}"
        )
        notes.append(f"The curve is that of {known} in {CURVE_PRECISION} at MLPerf's lengths; {of}.")
    return notes


@cache
def _curves() -> dict[str, _Curve]:
    return read_shipped("power_curves.yaml", _CurvesFile).accelerators
