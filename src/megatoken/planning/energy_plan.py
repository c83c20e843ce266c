"""``megatoken plan energy``: tokens per joule, at what boundary and how surely, against published rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatoken.analysis.energy import RunEnergy, energy_together, run_energy
from megatoken.errors import UsageError
from megatoken.planning.assumptions import Assumptions
from megatoken.planning.capacity import Prices
from megatoken.planning.energy import (
    JOULES_PER_KWH,
    find_tdp,
    joules_per_token,
    kwh_per_million_tokens,
    nameplate_watts,
    tokens_per_joule,
)
from megatoken.planning.figures import STATES, Input, Plan, Result, State, Table, weakest
from megatoken.planning.pricing import price
from megatoken.planning.reference_rows import efficiency_table, tdp_watts, uplift_table
from megatoken.planning.throughput import Throughput, check_positive, choose
from megatoken.planning.workloads import Profile, profiles_document
from megatoken.text import exact, precise

if TYPE_CHECKING:
    from megatoken.runs.run import Run

WALL, PUE, CARBON = "wall_to_nameplate_power", "pue", "carbon_grams_per_kwh"

Boundary = Literal["accelerators", "wall"]
BOUNDARIES: tuple[Boundary, ...] = ("accelerators", "wall")


@dataclass(frozen=True, slots=True)
class Power:
    """Power at which a rate was or may be reached, and what of the system draws it.

    ``accelerators``: theirs alone; ``wall``: all of the machines, as their power supplies take it.
    """

    watts: float
    boundary: Boundary
    state: State
    source: str


@dataclass(frozen=True, slots=True)
class Level:
    """Power at one boundary."""

    boundary: str
    watts: float
    state: State


def power_given(watts: float, boundary: str, state: str, source: str = "given on the command line") -> Power:
    """Power that the user knows.

    Raises:
        UsageError: a number, boundary or state that is none.
    """
    check_positive("the power in watts", watts)
    return Power(
        watts,
        choose("boundary of the power", boundary, BOUNDARIES),
        choose("state of the power", state, STATES),
        source,
    )


def power_of(throughput: Throughput, energy: RunEnergy | None = None) -> Power:
    """Power of a throughput: that of its run if it was recorded, else by data sheet.

    Raises:
        UsageError: neither a measurement nor a known number of known accelerators.
    """
    if energy is not None and energy.mean_watts is not None:
        return Power(energy.mean_watts, "accelerators", "measured", energy.why)
    count, name = throughput.accelerators, throughput.accelerator
    if count is None or name is None:
        raise UsageError(
            "the power is not known: give watts (--watts), or accelerators and their name (--accelerators,"
            " --accelerator), whose TDP is taken"
        )
    tdp = find_tdp(name, tdp_watts())
    if tdp is None:
        raise UsageError(f"the TDP of '{name}' is not known; give watts (--watts), or one of {', '.join(tdp_watts())}")
    source = f"{count:,} x {exact(tdp)} W by data sheet (gpu_specs.csv): accelerators only, not measured"
    return Power(nameplate_watts(count, tdp), "accelerators", "nameplate", source)


def energy_of(runs: Sequence[Run]) -> RunEnergy:
    """Energy of a run, or of its repeats together, if they recorded power."""
    return energy_together([run_energy(run.series) for run in runs])


def levels(throughput: Throughput, power: Power, assumptions: Assumptions) -> tuple[Level, ...]:
    """Power at every boundary from that of ``power`` outwards: accelerators, wall, site."""
    state = weakest((throughput.state, power.state))
    found = [Level(power.boundary, power.watts, state)]
    for boundary, factor in (("wall", WALL), ("site", PUE)):
        if boundary != power.boundary:
            state = weakest((state, *assumptions.states([factor])))
            found.append(Level(boundary, found[-1].watts * assumptions[factor], state))
    return tuple(found)


def plan_energy(
    throughput: Throughput,
    power: Power,
    assumptions: Assumptions,
    *,
    profiles: Sequence[Profile] = (),
    energy: RunEnergy | None = None,
) -> Plan:
    """Energy and carbon of tokens.

    Args:
        throughput: the rate.
        power: at which it is reached.
        assumptions: wall power over nameplate, PUE, carbon.
        profiles: interactions to express in watt hours.
        energy: of the run that ``throughput`` is of; if it is known, its own tokens are set against its joules.
    """
    rate = throughput.output_tokens_per_second
    if energy is not None and energy.output_tokens and energy.seconds and power.state == "measured":
        rate = energy.output_tokens / energy.seconds
    found = levels(throughput, power, assumptions)
    site = found[-1]
    carbon_state = weakest((site.state, *assumptions.states([CARBON])))
    priced = price(throughput, assumptions)
    names = ([WALL] if power.boundary == "accelerators" else []) + [PUE, CARBON]
    tables = [_boundaries(rate, found, assumptions[CARBON]), efficiency_table(), uplift_table()]
    if profiles:
        state = weakest((carbon_state, priced.state))
        tables.insert(1, _interactions(profiles, priced.prices, found, assumptions[CARBON], state))
    grams = kwh_per_million_tokens(rate, site.watts) * assumptions[CARBON]
    return Plan(
        kind="plan_energy",
        title=f"Energy of {throughput.label}",
        inputs=(
            *throughput.inputs,
            Input("power", power.watts, f"W, {_words(power.boundary)}", power.state, power.source),
            *assumptions.inputs(names),
            *(priced.inputs if profiles else ()),
        ),
        results=(
            Result(
                f"Tokens per joule, {_words(power.boundary)}",
                tokens_per_joule(rate, power.watts),
                "output tokens/J",
                f"{precise(rate)} output tokens/s / {precise(power.watts)} W ({power.state});"
                " the same as tokens/s per watt",
                found[0].state,
            ),
            Result(
                "Tokens per joule, site",
                tokens_per_joule(rate, site.watts),
                "output tokens/J",
                f"{precise(rate)} output tokens/s / {precise(site.watts)} W",
                site.state,
            ),
            Result("Power of the site", site.watts / 1e3, "kW", " x ".join(["power", *names[:-1]]), site.state),
            Result("Carbon per million output tokens", grams, "g CO2", "site energy x carbon factor", carbon_state),
        ),
        tables=tuple(tables),
        profiles=profiles_document(profiles),
        notes=(*throughput.notes, *_notes(power, energy)),
    )


def _words(boundary: str) -> str:
    return {"accelerators": "accelerators only", "wall": "whole machines at the wall", "site": "site"}[boundary]


def _boundaries(rate: float, found: Sequence[Level], carbon_grams_per_kwh: float) -> Table:
    rows = [
        {
            "boundary": _words(level.boundary),
            "power_watts": level.watts,
            "output_tokens_per_joule": tokens_per_joule(rate, level.watts),
            "energy_joules_per_output_token": joules_per_token(rate, level.watts),
            "energy_kwh_per_million_output_tokens": kwh_per_million_tokens(rate, level.watts),
            "co2_grams_per_million_output_tokens": kwh_per_million_tokens(rate, level.watts) * carbon_grams_per_kwh,
            "state": level.state,
        }
        for level in found
    ]
    return Table("boundaries", "Energy of output tokens, by what is counted", tuple(rows))


def _interactions(
    profiles: Sequence[Profile], prices: Prices, found: Sequence[Level], carbon_grams_per_kwh: float, state: State
) -> Table:
    rows = []
    for profile in profiles:
        joules = prices.interaction_seconds(profile) * found[-1].watts
        rows.append(
            {
                "profile": profile.name,
                "site_energy_kwh_per_thousand_interactions": joules / JOULES_PER_KWH * 1000,
                "co2_grams_per_thousand_interactions": joules / JOULES_PER_KWH * 1000 * carbon_grams_per_kwh,
                "state": weakest((state, profile.state)),
            }
        )
    note = "of a system at its peak; one that idles spends more per interaction"
    return Table("interactions", "Energy of interactions", tuple(rows), note)


def _notes(power: Power, energy: RunEnergy | None) -> list[str]:
    notes = []
    if power.state == "nameplate":
        notes.append(
            "Power is nameplate: a number from a data sheet, not what the system drew. A measured system of 8 B200 drew"
            " 1.30 times as much at the wall."
        )
    if power.boundary == "accelerators" and power.state == "measured":
        notes.append(f"{WALL} was found against nameplate power; against measured power the wall may draw more.")
    if energy is not None and energy.joules is None:
        notes.append(f"The run does not tell its energy: {energy.why}.")
    return notes
