"""``megatoken plan energy``: tokens per joule, at what boundary and how surely, against published rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Literal

from megatoken.analysis.energy import RunEnergy, energy_together, run_energy, system_energy
from megatoken.analysis.published import accelerator_facts, accelerator_table
from megatoken.errors import UsageError
from megatoken.planning.assumptions import Assumptions, read_shipped
from megatoken.planning.bounds import Served
from megatoken.planning.figures import STATES_TO_GIVE, Input, Plan, Result, State, Table, weakest
from megatoken.planning.pricing import derating, price
from megatoken.planning.throughput import Throughput, check_positive, choose
from megatoken.planning.workloads import Profile
from megatoken.text import exact, precise, significant
from megatoken.yaml_files import Strict

if TYPE_CHECKING:
    from megatoken.runs.run import Run

WALL, PUE, CARBON = "wall_to_nameplate_power", "pue", "carbon_grams_per_kwh"
ELECTRICITY = "electricity_dollars_per_kwh"

Boundary = Literal["accelerators", "wall", "site"]
JOULES_PER_KWH = 3.6e6
BOUNDARIES: tuple[Boundary, ...] = ("accelerators", "wall")  # of power as given


@dataclass(frozen=True, slots=True)
class Power:
    """Power at a rate.

    The boundary ``accelerators`` counts them only, ``wall`` whole machines at the power supply, ``site`` cooling too.
    """

    watts: float
    boundary: Boundary
    state: State
    source: str


def power_given(watts: float, boundary: str, state: str) -> Power:
    """Power given by the user. Raises UsageError for a number out of range, an unknown boundary or state."""
    check_positive("--watts", watts, "700")
    boundary, state = choose("--boundary", boundary, BOUNDARIES), choose("--watts-state", state, STATES_TO_GIVE)
    return Power(watts, boundary, state, "given on the command line")


def power_of(throughput: Throughput, energy: RunEnergy | None = None) -> Power | None:
    """Power of a throughput: as its run recorded it, else the TDP of its accelerators.

    None without a measurement, if the accelerators or their number are not known. Raises UsageError: their TDP is not.
    """
    if energy is not None and energy.mean_watts is not None:
        return Power(energy.mean_watts, "wall" if energy.by_meter else "accelerators", "measured", energy.why)
    count, name = throughput.accelerators, throughput.accelerator
    if count is None or name is None:
        return None
    facts = accelerator_facts(name)
    if facts is None or facts.tdp_watts is None:
        raise UsageError(f"TDP of '{name}' unknown; pass --watts, or one of {', '.join(accelerator_table())}")
    source = f"{count:,} x {exact(facts.tdp_watts)} W TDP (gpu_specs.csv): accelerators only, not measured"
    return Power(count * facts.tdp_watts, "accelerators", "nameplate", source)


def energy_of(runs: Sequence[Run]) -> RunEnergy:
    """Energy of a run, or of all repeats together: of the whole system by its meter, else of the accelerators.

    A meter that reads less than the accelerators does not see the whole system, and is left out.
    """
    of_accelerators = accelerators_energy(runs)
    metered = energy_together([system_energy(run.series) for run in runs])
    watts, least = metered.mean_watts, of_accelerators.mean_watts
    if not watts:
        return of_accelerators
    if least is not None and watts < least:
        why = f"the power meter is left out: it read {precise(watts)} W, less than the accelerators drew"
        return replace(of_accelerators, why=f"{of_accelerators.why}; {why}")
    return replace(metered, why=f"power meter of the run: {metered.why}")


def accelerators_energy(runs: Sequence[Run]) -> RunEnergy:
    """The same of the accelerators alone, as they report it."""
    found = energy_together([run_energy(run.series) for run in runs])
    return found if found.joules is None else replace(found, why=f"power that the accelerators report: {found.why}")


def rate_at(throughput: Throughput, power: Power, energy: RunEnergy | None) -> float:
    """Output tokens per second while ``power`` was drawn: those of the time that a run's energy is of, if it is."""
    if energy is not None and energy.output_tokens and energy.seconds and power.state == "measured":
        return energy.output_tokens / energy.seconds
    return throughput.output_tokens_per_second


def levels(throughput: Throughput, power: Power, assumptions: Assumptions) -> tuple[Power, ...]:
    """Power at the boundary of ``power`` and at each wider one: accelerators, wall, site."""
    state = weakest((throughput.state, power.state))
    found = [replace(power, state=state)]
    if power.boundary == "accelerators":
        state = weakest((state, *assumptions.states([WALL])))
        found.append(Power(power.watts * assumptions[WALL], "wall", state, WALL))
    state = weakest((state, *assumptions.states([PUE])))
    return (*found, Power(found[-1].watts * assumptions[PUE], "site", state, PUE))


def plan_energy(
    throughput: Throughput,
    power: Power,
    assumptions: Assumptions,
    *,
    profiles: Sequence[Profile] = (),
    energy: RunEnergy | None = None,
) -> Plan:
    """Energy and carbon of tokens, of the interactions of ``profiles`` in kWh.

    ``energy`` is that of the run; if known, tokens per joule come from its tokens and joules.
    """
    rate = rate_at(throughput, power, energy)
    found = levels(throughput, power, assumptions)
    site = found[-1]
    carbon_state = weakest((site.state, *assumptions.states([CARBON])))
    priced, derated = price(throughput, assumptions), derating(throughput, assumptions)
    names = ([WALL] if power.boundary == "accelerators" else []) + [PUE, CARBON]
    tables = [_boundaries(rate, found, assumptions[CARBON]), efficiency_table(), uplift_table()]
    if profiles:
        served = [Served(profile, throughput, priced, derated, assumptions) for profile in profiles]
        state = weakest((carbon_state, priced.state, derated.latency_bound_state))
        tables.insert(1, _interactions(served, found, assumptions[CARBON], state))
    kwh = site.watts / rate * 1e6 / JOULES_PER_KWH
    grams = kwh * assumptions[CARBON]
    return Plan(
        kind="plan_energy",
        title=f"Energy of {throughput.label}",
        inputs=(
            *throughput.inputs,
            Input("power", power.watts, f"W, {_words(power.boundary)}", power.state, power.source),
            *assumptions.inputs([*names, ELECTRICITY]),
            *((*priced.inputs, *derated.factors[:-1]) if profiles else ()),
        ),
        results=(
            Result(
                f"Tokens per joule, {_words(power.boundary)}",
                rate / power.watts,
                "output tokens/J",
                f"{precise(rate)} output tokens/s / {precise(power.watts)} W ({power.state});"
                " the same as tokens/s per watt",
                found[0].state,
            ),
            Result(
                "Tokens per joule, site",
                rate / site.watts,
                "output tokens/J",
                f"{precise(rate)} output tokens/s / {significant(site.watts)} W",
                site.state,
            ),
            Result("Power of the site", site.watts / 1e3, "kW", " x ".join(["power", *names[:-1]]), site.state),
            Result(
                "Electricity per million output tokens",
                kwh * assumptions[ELECTRICITY],
                "$",
                "site energy x price of electricity, at full utilisation",
                weakest((site.state, *assumptions.states([ELECTRICITY]))),
            ),
            Result("Carbon per million output tokens", grams, "g CO2", "site energy x carbon factor", carbon_state),
        ),
        tables=tuple(tables),
        profiles=tuple(profile.to_document() for profile in profiles),
        notes=(*throughput.notes, *_notes(power, energy)),
    )


def _words(boundary: str) -> str:
    return {"accelerators": "accelerators only", "wall": "whole machines at the wall", "site": "site"}[boundary]


def _boundaries(rate: float, found: Sequence[Power], carbon_grams_per_kwh: float) -> Table:
    rows = []
    for level in found:
        joules = level.watts / rate
        kwh = joules * 1e6 / JOULES_PER_KWH
        rows.append(
            {
                "boundary": _words(level.boundary),
                "power_watts": level.watts,
                "output_tokens_per_joule": rate / level.watts,
                "energy_joules_per_output_token": joules,
                "energy_kwh_per_million_output_tokens": kwh,
                "co2_grams_per_million_output_tokens": kwh * carbon_grams_per_kwh,
                "state": level.state,
            }
        )
    return Table("boundaries", "Energy of output tokens, by boundary", tuple(rows))


def _interactions(served: Sequence[Served], found: Sequence[Power], carbon_grams_per_kwh: float, state: State) -> Table:
    rows = []
    for one in served:
        kwh = 1 / one.highest_with_factors * found[-1].watts / JOULES_PER_KWH * 1000
        rows.append(
            {
                "profile": one.profile.name,
                "site_energy_kwh_per_thousand_interactions": kwh,
                "co2_grams_per_thousand_interactions": kwh * carbon_grams_per_kwh,
                "state": weakest((state, one.profile.state)),
            }
        )
    note = (
        "at full power and the highest rate within KV memory and the latency limits; an idle system spends more energy"
    )
    return Table("interactions", "Energy of interactions", tuple(rows), note)


def _notes(power: Power, energy: RunEnergy | None) -> list[str]:
    notes = []
    if power.state == "nameplate":
        notes.append(
            "Power is nameplate (from a data sheet), not measured. A measured system of 8 B200 drew 1.30 times its"
            " nameplate power at the wall."
        )
    if power.boundary == "accelerators" and power.state == "measured":
        notes.append(
            f"{WALL} was measured relative to nameplate power; relative to measured power, wall power may be higher."
        )
    if energy is not None and energy.joules is None:
        notes.append(f"The energy of the run is unknown: {energy.why}.")
    return notes


class _Row(Strict):
    title: str
    output_tokens_per_second: float
    accelerators: int
    watts: float | None = None
    watts_per_accelerator: float = 0.0
    power_state: State
    state: State
    published_tokens_per_second_per_watt: float | None = None
    source: str

    @property
    def power_watts(self) -> float:
        """Measured power, or accelerators x TDP."""
        return self.watts or self.accelerators * self.watts_per_accelerator

    @property
    def efficiency(self) -> float:
        """Output tokens per joule."""
        return self.output_tokens_per_second / self.power_watts


class _Uplift(Strict):
    of: str
    over: str
    published_share: float | None = None


class _RowsFile(Strict):
    rows: dict[str, _Row]
    uplifts: list[_Uplift]


def efficiency_table() -> Table:
    """Tokens per joule of every reference row, next to the value that its source states."""
    rows = [
        {
            "name": name,
            "system": row.title,
            "output_tokens_per_second": row.output_tokens_per_second,
            "state": row.state,
            "power_watts": row.power_watts,
            "power_state": row.power_state,
            "output_tokens_per_joule": row.efficiency,
            "published_output_tokens_per_joule": row.published_tokens_per_second_per_watt,
            "source": row.source,
        }
        for name, row in _file().rows.items()
    ]
    note = "nameplate power is accelerators x TDP, without CPUs, network, fans and losses; it is not measured"
    return Table("efficiency", "Published rates over power, recomputed", tuple(rows), note, rounded=False)


def uplift_table() -> Table:
    """The gain of one reference row over another, next to the gain that the documents state."""
    known = _file().rows
    rows = []
    for pair in _file().uplifts:
        of, over = known[pair.of], known[pair.over]
        ratio = of.efficiency / over.efficiency
        rows.append(
            {
                "of": of.title,
                "over": over.title,
                "ratio": ratio,
                "gain_share": ratio - 1,
                "published_gain_share": pair.published_share,
                "power": of.power_state if of.power_state == over.power_state else "measured vs nameplate",
                "state": weakest((of.state, over.state, of.power_state, over.power_state)),
            }
        )
    return Table("uplifts", "Gains in tokens per joule", tuple(rows), rounded=False)


@cache
def _file() -> _RowsFile:
    return read_shipped("efficiency_rows.yaml", _RowsFile)


def power_at(utilisation_share: float, full_power: float, idle_share: float) -> float:
    """Mean power of a system that is busy for ``utilisation_share`` of the time and else draws idle power."""
    return full_power * (idle_share + (1 - idle_share) * utilisation_share)
