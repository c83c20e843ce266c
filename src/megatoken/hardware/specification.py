"""Which data sheet a GPU belongs to, and what it reports that contradicts the sheet."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from megatoken.engine.gpus import Gpu, gpus

OTHER_VARIANTS = {"NVL", "PCIE", "40GB", "MIG"}
"""Words in the name of a GPU whose figures are not those of the SXM part of the data sheet."""
MEMORY_TOLERANCE = 0.04
"""Drivers keep up to 3 % of the memory for themselves."""
POWER_TOLERANCE = 1.02


def part_name(device_name: str) -> str:
    """The name in gpu_specs.csv of a GPU as the driver names it; the driver's name if it names none, or two."""
    words = set(re.split(r"[^A-Za-z0-9]+", device_name.upper()))
    named = words & gpus().keys()
    return named.pop() if len(named) == 1 and not OTHER_VARIANTS & words else device_name


def data_sheet(device_name: str) -> Gpu | None:
    """The data sheet of a GPU; None where it is not known."""
    return gpus().get(part_name(device_name))


def contradictions(facts: Mapping[str, Any]) -> Iterator[str]:
    """Sentences on what an entry of ``inventory.gpus`` reports that its part cannot have; none for unknown parts."""
    name, memory = facts.get("name"), facts.get("memory_bytes")
    sheet = gpus().get(part_name(str(name)))
    if sheet is None or facts.get("mig_enabled"):
        return
    if memory and abs(memory / sheet.memory_bytes - 1) > MEMORY_TOLERANCE:
        others = [one.name for one in gpus().values() if abs(memory / one.memory_bytes - 1) <= MEMORY_TOLERANCE]
        like = f", which is the memory of {' and '.join(others)}" if others else ""
        yield (
            f"{name} reports {memory / 2**20:,.0f} MiB of memory; by its data sheet it has about"
            f" {sheet.memory_bytes / 2**20:,.0f} MiB{like}"
        )
    usual = facts.get("default_power_limit_watts")
    if usual and usual > POWER_TOLERANCE * sheet.power_limit_watts:
        allowed = f"its data sheet allows {sheet.power_limit_watts:.0f} W"
        yield f"{name} has a default power limit of {usual:.0f} W; {allowed}"
    lanes, most = facts.get("pcie_lanes"), facts.get("max_pcie_lanes")
    if lanes and most and lanes < most:
        yield f"{name} uses {lanes} of {most} PCIe lanes"
