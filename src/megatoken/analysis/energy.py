"""Energy of a run and the output tokens of the same stretch of time: the one rule, from ``series.parquet``.

``power_watts`` of a row is the mean since the row of its replica before it, or since the start, so power x time between
rows is the energy. The tokens are those in the same rows, samples in flight included, because an interrupted run spent
energy on them too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megatoken.analysis.series import numbers, replicas

if TYPE_CHECKING:
    import pyarrow as pa

LONGEST_GAP_SECONDS = 3.0  # a card without an energy counter reports only the mean of its last second
BASIS = "power x time between the rows of series.parquet, over the output tokens of the same rows"


@dataclass(frozen=True, slots=True)
class RunEnergy:
    """Energy of the accelerators from the start to the last row; if unknown, ``joules`` is None and ``why`` says why.

    ``seconds`` is the longest stretch of a replica.
    """

    joules: float | None
    output_tokens: int
    seconds: float
    why: str
    by_meter: bool = False  # of the whole system, not of the accelerators alone

    @property
    def mean_watts(self) -> float | None:
        """Mean power over the stretch."""
        return self.joules / self.seconds if self.joules is not None and self.seconds else None

    @property
    def joules_per_output_token(self) -> float | None:
        """Energy over the tokens of the same stretch."""
        return self.joules / self.output_tokens if self.joules is not None and self.output_tokens else None


def run_energy(series: pa.Table) -> RunEnergy:
    """The energy of one run, from its table of ``SeriesRow``."""
    elapsed, power, tokens = (numbers(series[name]) for name in ("elapsed_seconds", "power_watts", "output_tokens"))
    joules, seconds, output_tokens = 0.0, 0.0, 0
    why = "" if len(series) else "the run recorded no series"
    for node, replica, rows in replicas(series):
        spans = np.diff(elapsed[rows], prepend=0.0)
        if not np.isfinite(power[rows]).all():
            why = "the run recorded no power"
        elif spans.max() > LONGEST_GAP_SECONDS:
            gap = f"the power of replica {replica} of {node} was not read for {spans.max():.1f} s"
            why = f"{gap}; {LONGEST_GAP_SECONDS:g} s is the longest allowed gap"
        joules += float((power[rows] * spans).sum())
        seconds = max(seconds, float(elapsed[rows[-1]]))
        output_tokens += int(tokens[rows[-1]])
    if not why and joules <= 0:
        why = "the power that the run recorded is zero"
    return RunEnergy(None if why else joules, output_tokens, seconds, why or BASIS)


def system_energy(series: pa.Table) -> RunEnergy:
    """The same of the whole system, by the user's power meter: the first row of each moment has its reading."""
    import pyarrow.compute as pc

    metered = series.filter(pc.is_valid(series["system_power_watts"])).sort_by("elapsed_seconds")
    output_tokens = run_energy(series).output_tokens
    if not len(metered):
        return RunEnergy(None, output_tokens, 0.0, "the run recorded no power meter")
    times, watts = numbers(metered["elapsed_seconds"]), numbers(metered["system_power_watts"])
    spans = np.diff(times, prepend=0.0)
    if spans.max() > LONGEST_GAP_SECONDS:
        gap = f"the power meter was not read for {spans.max():.1f} s"
        why = f"{gap}; {LONGEST_GAP_SECONDS:g} s is the longest allowed gap"
        return RunEnergy(None, output_tokens, float(times[-1]), why)
    return RunEnergy(float((watts * spans).sum()), output_tokens, float(times[-1]), BASIS, by_meter=True)


def energy_together(energies: Sequence[RunEnergy]) -> RunEnergy:
    """The energy of consecutive runs; unknown if that of one is."""
    unknown = next((energy for energy in energies if energy.joules is None), None)
    return RunEnergy(
        None if unknown else sum(energy.joules or 0.0 for energy in energies),
        sum(energy.output_tokens for energy in energies),
        sum(energy.seconds for energy in energies),
        unknown.why if unknown else energies[0].why,
        all(energy.by_meter for energy in energies),
    )
