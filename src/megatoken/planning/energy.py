"""Arithmetic of energy: tokens per joule, nameplate power, carbon."""

from __future__ import annotations

import re

JOULES_PER_KWH = 3.6e6

# Parts that share a name with the one in the table but not its power.
OTHER_FORMS = {"PCIE", "NVL", "MIG"}


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


def power_at(utilisation_share: float, full_power: float, idle_share: float) -> float:
    """Mean power of a system busy for ``utilisation_share`` of the time: idle power, and the rest in proportion."""
    return full_power * (idle_share + (1 - idle_share) * utilisation_share)


def uplift(efficiency: float, over: float) -> float:
    """How many times as efficient."""
    return efficiency / over


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
