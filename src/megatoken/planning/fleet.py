"""Arithmetic of fleets: nodes for a demand with spares, mixes of two classes, and what a wrong size costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from megatoken.analysis.series import Floats
from megatoken.errors import UsageError
from megatoken.planning.throughput import check_count
from megatoken.text import precise

ROUNDING = 1e-9  # a demand that exceeds the capacity by rounding only needs no further node
MOST_NODES = 1_000_000
DOMAINS = ("node", "rack")
LARGEST_LEVEL = 1e15
MOST_TRIALS = 20_000_000  # sizes x levels of demand; beyond, the cheapest mix is searched on a coarser grid of sizes


@dataclass(frozen=True, slots=True)
class SupplyClass:
    """Nodes of one kind. ``rate_per_node`` is the planning rate of one node, in the unit of the demand.

    The price is None where it is unknown. With ``whole_racks`` they are sold as racks of ``nodes_per_rack``.
    """

    name: str
    rate_per_node: float
    accelerators_per_node: int
    dollars_per_node_hour: float | None
    nodes_per_rack: int | None = None
    whole_racks: bool = False

    def price(self, nodes: float) -> float | None:
        """Dollars per hour of so many nodes; None where the price is unknown."""
        return None if self.dollars_per_node_hour is None else nodes * self.dollars_per_node_hour


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a fleet: ``exact_nodes`` before rounding up, ``serving_nodes`` after it, ``nodes`` with spares."""

    exact_nodes: float
    serving_nodes: int
    spare_nodes: int
    racks: int | None
    accelerators: int

    @property
    def nodes(self) -> int:
        """All nodes."""
        return self.serving_nodes + self.spare_nodes


def nodes_for(demand: float, rate_per_node: float) -> int:
    """Whole nodes that serve ``demand``, in the same unit as the rate. Raises UsageError above ``MOST_NODES``."""
    exact = demand / rate_per_node
    if exact > MOST_NODES:
        raise UsageError(
            f"a demand of {precise(demand)} needs {precise(exact)} nodes of {precise(rate_per_node)} each, at most"
            f" {MOST_NODES:,} can be planned; check the units and the size of the demand and of the rate"
        )
    return math.ceil(exact * (1 - ROUNDING))


def size(demand: float, supply: SupplyClass, *, spare_domains: int = 0, domain: str = "node") -> Size:
    """Nodes, racks and accelerators that serve a demand even if ``spare_domains`` fault domains fail at once.

    The demand has the unit of ``supply.rate_per_node``; ``domain`` is what fails as one unit, node or rack.

    Raises:
        UsageError: a number of spares out of range, an unknown domain, or racks of unknown size.
    """
    check_count("--spare", spare_domains, 0, MOST_NODES)
    if domain not in DOMAINS:
        raise UsageError(f"--fault-domain: expected node or rack, got '{domain}'")
    serving = nodes_for(demand, supply.rate_per_node)
    if domain == "rack" and supply.nodes_per_rack is None:
        raise UsageError("nodes per rack unknown; pass --nodes-per-rack, which --fault-domain rack needs")
    spares = spare_nodes(serving, supply, spare_domains, domain)
    nodes = serving + spares
    whole_racks = math.ceil(nodes / supply.nodes_per_rack) if supply.nodes_per_rack else None
    exact = demand / supply.rate_per_node
    return Size(exact, serving, spares, whole_racks, nodes * supply.accelerators_per_node)


def spare_nodes(serving: int, supply: SupplyClass, spare_domains: int, domain: str) -> int:
    """Nodes in addition to ``serving`` ones so that ``spare_domains`` fault domains may fail.

    Where racks fail or are sold as one unit, they are whole.
    """
    if not serving:
        return 0
    if domain == "rack" and spare_domains and supply.nodes_per_rack is not None:
        return (math.ceil(serving / supply.nodes_per_rack) + spare_domains) * supply.nodes_per_rack - serving
    if supply.whole_racks and supply.nodes_per_rack is not None:
        return math.ceil((serving + spare_domains) / supply.nodes_per_rack) * supply.nodes_per_rack - serving
    return spare_domains


def fit(levels: Sequence[float], supply: SupplyClass, nodes: int) -> dict[str, Any]:
    """How ``nodes`` nodes fit a demand of these ``levels``, one for each of the equal parts of a cycle."""
    capacity, total = nodes * supply.rate_per_node, math.fsum(levels)
    served = math.fsum(min(level, capacity) for level in levels)
    short = sum(level > capacity * (1 + ROUNDING) for level in levels) / len(levels)
    return {
        "nodes": nodes,
        "accelerators": nodes * supply.accelerators_per_node,
        "unserved_share": 1 - served / total if total and short else 0.0,
        "short_time_share": short,
        "idle_share": max(0.0, 1 - served / (capacity * len(levels))) if capacity else 0.0,
        "price_dollars_per_hour": supply.price(nodes),
    }


def policies(
    levels: Sequence[float], base: SupplyClass, burst: SupplyClass, *, spare_domains: int = 0, domain: str = "node"
) -> list[dict[str, Any]]:
    """All demand on ``base``, all on ``burst``, a base sized for the mean demand, and the cheapest mix.

    The base serves first; the excess goes to whole burst nodes, rented for each part of the cycle that needs them.
    A base has spare nodes as in ``size``, which serve nothing. Shares and prices are means over the cycle.

    Raises:
        UsageError: a price is unknown, or the numbers are out of proportion.
    """
    if base.dollars_per_node_hour is None or burst.dollars_per_node_hour is None:
        raise UsageError("the price of a base node is unknown; pass --accelerator or --rent")
    peak, mean = max(levels), math.fsum(levels) / len(levels)
    most = nodes_for(peak, base.rate_per_node)
    nodes_for(peak, burst.rate_per_node)  # raises if the numbers are out of proportion
    sizes = min(most + 1, max(2, MOST_TRIALS // len(levels)))
    candidates = np.unique(np.linspace(0, most, sizes).round())
    burst_nodes = np.zeros_like(candidates)
    for level in levels:
        burst_nodes += _burst_nodes(level - candidates * base.rate_per_node, level, burst.rate_per_node)
    spares = np.array([spare_nodes(int(nodes), base, spare_domains, domain) for nodes in candidates])
    cost = (candidates + spares) * base.dollars_per_node_hour
    cost += burst_nodes / len(levels) * burst.dollars_per_node_hour
    chosen = {
        "base only": most,
        "burst only": 0,
        "base for the mean": min(most, nodes_for(mean, base.rate_per_node)),
        "cheapest mix": int(candidates[cost.argmin()]),
    }
    return [
        {"policy": name, **_policy(nodes, levels, base, burst, spare_nodes(nodes, base, spare_domains, domain))}
        for name, nodes in chosen.items()
    ]


def _policy(
    nodes: int, levels: Sequence[float], base: SupplyClass, burst: SupplyClass, spares: int
) -> dict[str, float]:
    demand = np.asarray(levels, dtype=np.float64)
    excess = demand - nodes * base.rate_per_node
    burst_nodes = _burst_nodes(excess, demand, burst.rate_per_node)
    base_dollars = base.price(nodes + spares) or 0.0
    burst_dollars = burst.price(float(burst_nodes.mean())) or 0.0
    total = math.fsum(levels)
    return {
        "base_nodes": nodes + spares,
        "most_burst_nodes": int(burst_nodes.max()),
        "burst_demand_share": float(np.clip(excess, 0, None)[burst_nodes > 0].sum() / total) if total else 0.0,
        "base_price_dollars_per_hour": base_dollars,
        "burst_price_dollars_per_hour": burst_dollars,
        "price_dollars_per_hour": base_dollars + burst_dollars,
    }


def _burst_nodes(excess: Floats, level: object, rate: float) -> Floats:
    """Whole burst nodes for ``excess``, the demand beyond the base; a rounding error of ``level`` needs none."""
    nodes: Floats = np.ceil(np.clip(excess - ROUNDING * np.asarray(level), 0, None) / rate)
    return nodes


def parse_curve(rows: Sequence[Sequence[str]], place: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Hours and levels of a demand curve, from rows of hour and demand; hours rise in equal steps.

    Raises:
        UsageError: the rows have another form; the message names ``place`` and the row.
    """
    levels, hours = [], []
    for at, row in enumerate(rows, start=1):
        try:
            hour, level = (float(cell) for cell in row)
        except ValueError:
            if at == 1 and len(row) == 2:
                continue  # a header
            raise UsageError(f"{place}: row {at}: expected two numbers, hour and demand") from None
        if not (math.isfinite(hour) and 0 <= level <= LARGEST_LEVEL):
            raise UsageError(f"{place}: row {at}: expected a demand of 0 or more")
        hours.append(hour)
        levels.append(level)
    if not levels or max(levels) <= 0:
        raise UsageError(f"{place}: no demand found; give rows of hour and demand")
    steps = [after - before for before, after in pairwise(hours)]
    if steps and not (min(steps) > 0 and max(steps) - min(steps) <= 1e-6 * max(steps)):
        raise UsageError(f"{place}: expected hours that rise in equal steps")
    return tuple(hours), tuple(levels)
