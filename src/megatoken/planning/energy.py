"""Arithmetic of energy: tokens per joule, energy of a run over its own tokens, carbon."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

LONGEST_GAP_SECONDS = 3.0
JOULES_PER_KWH = 3.6e6

# Parts that share a name with the one in the table but not its power.
OTHER_FORMS = {"PCIE", "NVL", "MIG"}


@dataclass(frozen=True, slots=True)
class RunEnergy:
    """Energy of a run and the output tokens of the same stretch of time; None with ``why`` where it is not known."""

    joules: float | None
    output_tokens: int | None
    seconds: float | None
    why: str

    @property
    def mean_watts(self) -> float | None:
        """Mean power over the stretch."""
        return self.joules / self.seconds if self.joules is not None and self.seconds else None


def tokens_per_joule(tokens_per_second: float, watts: float) -> float:
    """The same number as tokens per second per watt."""
    return tokens_per_second / watts


def joules_per_token(tokens_per_second: float, watts: float) -> float:
    """Its inverse."""
    return watts / tokens_per_second


def kwh_per_million_tokens(tokens_per_second: float, watts: float) -> float:
    """Energy of a million tokens."""
    return joules_per_token(tokens_per_second, watts) * 1e6 / JOULES_PER_KWH


def nameplate_watts(accelerators: int, tdp_watts: float) -> float:
    """What the accelerators may draw by their data sheet: no CPU, no network, no fan, no loss, and no measurement."""
    return accelerators * tdp_watts


def power_at(utilisation_share: float, full_watts: float, idle_share: float) -> float:
    """Mean power of a system busy for ``utilisation_share`` of the time: idle power, and the rest in proportion."""
    return full_watts * (idle_share + (1 - idle_share) * utilisation_share)


def uplift(efficiency: float, over: float) -> float:
    """How many times as efficient."""
    return efficiency / over


def run_energy(rows: Sequence[dict[str, Any]]) -> RunEnergy:
    """Energy from the rows of ``series.parquet``.

    ``power_watts`` of a row is the mean since the row before, so the sum of power x time between rows is the energy;
    the tokens are those written between the first row of each replica and its last. Power is that of the accelerators.

    Args:
        rows: with elapsed_seconds, node, replica, output_tokens, power_watts.
    """
    replicas: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: float(row["elapsed_seconds"])):
        replicas.setdefault((row["node"], row["replica"]), []).append(row)
    joules, tokens, seconds = 0.0, 0, 0.0
    for (node, replica), own in replicas.items():
        if len(own) < 2:
            return RunEnergy(None, None, None, f"replica {replica} of {node} was seen fewer than two times")
        for before, after in pairwise(own):
            span = after["elapsed_seconds"] - before["elapsed_seconds"]
            if after["power_watts"] is None:
                return RunEnergy(None, None, None, "the run recorded no power")
            if span > LONGEST_GAP_SECONDS:
                why = f"power was not read for {span:.1f} s; {LONGEST_GAP_SECONDS:g} s is the most that counts"
                return RunEnergy(None, None, None, why)
            joules += after["power_watts"] * span
        tokens += own[-1]["output_tokens"] - own[0]["output_tokens"]
        seconds = max(seconds, own[-1]["elapsed_seconds"] - own[0]["elapsed_seconds"])
    if not tokens or not joules:
        return RunEnergy(None, None, None, "the run recorded no tokens" if replicas else "the run recorded no series")
    return RunEnergy(joules, tokens, seconds, "power x time between the rows of series.parquet, over the same tokens")


def find_tdp(accelerator: str, tdp_watts: dict[str, float]) -> float | None:
    """TDP of an accelerator by any of its usual names, such as "NVIDIA H200-SXM-141GB"; None if it is none of them.

    Args:
        accelerator: the name.
        tdp_watts: by short name, such as "H200".
    """
    words = {word.upper() for word in re.split(r"[^A-Za-z0-9]+", accelerator)}
    if words & OTHER_FORMS:
        return None
    found = [watts for name, watts in tdp_watts.items() if name.upper() in words]
    return found[0] if len(found) == 1 else None
