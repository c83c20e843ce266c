"""Arithmetic of fleets: demand to machines with ceilings and spares, mixes of two classes, what a wrong size costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megatoken.errors import UsageError
from megatoken.text import precise

ROUNDING = 1e-9  # a demand that a fleet meets but for rounding needs no further node
MOST_NODES = 1_000_000
DOMAINS = ("node", "rack")
LARGEST_LEVEL = 1e15
MOST_TRIALS = 20_000_000  # sizes x levels of demand; beyond, the cheapest mix is looked for on a coarser grid of sizes


@dataclass(frozen=True, slots=True)
class SupplyClass:
    """Nodes of one kind. ``rate`` is what one of them may be planned with, in the unit of the demand."""

    name: str
    rate_per_node: float
    accelerators_per_node: int
    dollars_per_node_hour: float
    nodes_per_rack: int | None = None


@dataclass(frozen=True, slots=True)
class Demand:
    """Demand over a cycle: levels in equal parts of it, in one unit."""

    levels: tuple[float, ...]
    unit: str

    @property
    def peak(self) -> float:
        """The highest level."""
        return max(self.levels)

    @property
    def mean(self) -> float:
        """Over the cycle."""
        return math.fsum(self.levels) / len(self.levels)


@dataclass(frozen=True, slots=True)
class Size:
    """What serves a demand. ``exact`` is before the ceiling; ``serving`` after it; ``nodes`` with spares."""

    exact_nodes: float
    serving_nodes: int
    spare_nodes: int
    racks: int | None
    accelerators: int

    @property
    def nodes(self) -> int:
        """All nodes."""
        return self.serving_nodes + self.spare_nodes


@dataclass(frozen=True, slots=True)
class Policy:
    """One way to divide a demand between nodes that are always there and nodes taken by the hour."""

    name: str
    base_nodes: int
    most_burst_nodes: int
    base_dollars_per_hour: float
    burst_dollars_per_hour: float
    burst_share: float  # of all demand

    @property
    def dollars_per_hour(self) -> float:
        """Mean over the cycle."""
        return self.base_dollars_per_hour + self.burst_dollars_per_hour


@dataclass(frozen=True, slots=True)
class Fit:
    """A fleet of a given size against a demand."""

    nodes: int
    unserved_share: float
    short_time_share: float
    idle_share: float
    dollars_per_hour: float


@dataclass(frozen=True, slots=True)
class Replacement:
    """Old nodes replaced by faster ones."""

    nodes_before: int
    speed_ratio: float
    exact_nodes: float
    nodes: int
    ratio_for_one_less: float | None


def nodes_for(demand: float, rate_per_node: float) -> int:
    """Whole nodes that serve ``demand``; both in one unit.

    Raises:
        UsageError: so many that a number was surely mistyped.
    """
    exact = demand / rate_per_node
    if exact > MOST_NODES:
        raise UsageError(
            f"a demand of {precise(demand)} needs {precise(exact)} nodes of {precise(rate_per_node)} each;"
            " check the units of both"
        )
    return math.ceil(exact * (1 - ROUNDING))


def size(demand: float, supply: SupplyClass, *, spare_domains: int = 0, domain: str = "node") -> Size:
    """Nodes, racks and accelerators for a demand, so that losing ``spare_domains`` fault domains loses nothing.

    Args:
        demand: in the unit of ``supply.rate_per_node``.
        supply: the class of nodes.
        spare_domains: how many fault domains may fail at once.
        domain: what fails together: node or rack.

    Raises:
        UsageError: a negative number of spares, an unknown domain, or racks of unknown size.
    """
    if not 0 <= spare_domains <= MOST_NODES:
        raise UsageError(f"spare fault domains are {spare_domains}; give a number from 0 to {MOST_NODES:,}")
    if domain not in DOMAINS:
        raise UsageError(f"the fault domain is '{domain}'; it must be node or rack")
    serving = nodes_for(demand, supply.rate_per_node)
    if domain == "rack" and supply.nodes_per_rack is None:
        raise UsageError("fault domains are racks, but nobody says how many nodes one has; give nodes per rack")
    spares = spare_nodes(serving, supply, spare_domains, domain)
    nodes = serving + spares
    whole_racks = math.ceil(nodes / supply.nodes_per_rack) if supply.nodes_per_rack else None
    exact = demand / supply.rate_per_node
    return Size(exact, serving, spares, whole_racks, nodes * supply.accelerators_per_node)


def spare_nodes(serving: int, supply: SupplyClass, spare_domains: int, domain: str) -> int:
    """Nodes beside ``serving`` ones so that ``spare_domains`` fault domains may fail; racks are taken whole."""
    if not serving or not spare_domains:
        return 0
    if domain == "rack" and supply.nodes_per_rack is not None:
        return (math.ceil(serving / supply.nodes_per_rack) + spare_domains) * supply.nodes_per_rack - serving
    return spare_domains


def replacement(nodes_before: int, rate_before: float, rate_after: float) -> Replacement:
    """How many nodes of ``rate_after`` do the work of ``nodes_before`` nodes of ``rate_before``."""
    if nodes_before < 1:
        raise UsageError(f"nodes to replace are {nodes_before}; give 1 or more")
    nodes = nodes_for(nodes_before * rate_before, rate_after)
    ratio_for_one_less = nodes_before / (nodes - 1) if nodes > 1 else None
    exact = nodes_before * rate_before / rate_after
    return Replacement(nodes_before, rate_after / rate_before, exact, nodes, ratio_for_one_less)


def fit(demand: Demand, supply: SupplyClass, nodes: int) -> Fit:
    """How ``nodes`` nodes stand to ``demand``: what they leave unserved, how long they are short, how idle they are."""
    capacity = nodes * supply.rate_per_node
    served = [min(level, capacity) for level in demand.levels]
    total = math.fsum(demand.levels)
    short = sum(level > capacity * (1 + ROUNDING) for level in demand.levels) / len(demand.levels)
    unserved = 1 - math.fsum(served) / total if total and short else 0.0
    idle = 1 - math.fsum(served) / (capacity * len(served)) if capacity else 0.0
    return Fit(nodes, unserved, short, max(0.0, idle), nodes * supply.dollars_per_node_hour)


def policies(
    demand: Demand, base: SupplyClass, burst: SupplyClass, *, spare_domains: int = 0, domain: str = "node"
) -> tuple[Policy, ...]:
    """Everything on ``base``, everything on ``burst``, the base sized to the mean, and the cheapest mix of all.

    Demand goes to the base first; what exceeds it goes to whole burst nodes, taken and paid for each part of the cycle
    in which they are needed. Spares stand by the base, where there is one, and serve nothing; they are those
    of ``size``, so of racks they are whole ones, and what fills the last rack.
    """
    most = nodes_for(demand.peak, base.rate_per_node)
    nodes_for(demand.peak, burst.rate_per_node)  # refuses what is out of all proportion
    sizes = min(most + 1, max(2, MOST_TRIALS // len(demand.levels)))
    candidates = np.unique(np.linspace(0, most, sizes).round())
    burst_nodes = np.zeros_like(candidates)
    for level in demand.levels:
        burst_nodes += _burst_nodes(level - candidates * base.rate_per_node, level, burst.rate_per_node)
    spares = np.array([spare_nodes(int(nodes), base, spare_domains, domain) for nodes in candidates])
    cost = (candidates + spares) * base.dollars_per_node_hour
    cost += burst_nodes / len(demand.levels) * burst.dollars_per_node_hour
    mean = min(most, nodes_for(demand.mean, base.rate_per_node))
    chosen = {
        "base_only": most,
        "burst_only": 0,
        "base_for_the_mean": mean,
        "cheapest_mix": int(candidates[cost.argmin()]),
    }
    return tuple(
        _policy(name, nodes, demand, base, burst, spare_nodes(nodes, base, spare_domains, domain))
        for name, nodes in chosen.items()
    )


def _policy(name: str, nodes: int, demand: Demand, base: SupplyClass, burst: SupplyClass, spares: int) -> Policy:
    levels = np.asarray(demand.levels, dtype=np.float64)
    excess = levels - nodes * base.rate_per_node
    burst_nodes = _burst_nodes(excess, levels, burst.rate_per_node)
    total = math.fsum(demand.levels)
    return Policy(
        name=name,
        base_nodes=nodes + spares,
        most_burst_nodes=int(burst_nodes.max()),
        base_dollars_per_hour=(nodes + spares) * base.dollars_per_node_hour,
        burst_dollars_per_hour=float(burst_nodes.mean()) * burst.dollars_per_node_hour,
        burst_share=float(np.clip(excess, 0, None)[burst_nodes > 0].sum() / total) if total else 0.0,
    )


def _burst_nodes(
    excess: np.ndarray[tuple[int], np.dtype[np.float64]], level: object, rate: float
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Whole nodes for what exceeds the base, ``excess``, of a demand of ``level``; rounding alone needs none."""
    return np.ceil(np.clip(excess - ROUNDING * np.asarray(level), 0, None) / rate)


def parse_curve(rows: Sequence[Sequence[str]], place: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Hours and levels of a demand curve from the rows of a table: time in hours, level; equal steps, rising.

    Raises:
        UsageError: not such a table; names ``place`` and the row.
    """
    levels, hours = [], []
    for at, row in enumerate(rows, start=1):
        try:
            hour, level = (float(cell) for cell in row)
        except ValueError:
            if at == 1 and len(row) == 2:
                continue  # a header
            raise UsageError(f"{place}: row {at}: give two numbers, hour and demand") from None
        if not (math.isfinite(hour) and 0 <= level <= LARGEST_LEVEL):
            raise UsageError(f"{place}: row {at}: a demand must be a number from 0 on")
        hours.append(hour)
        levels.append(level)
    if not levels or max(levels) <= 0:
        raise UsageError(f"{place}: no demand in it; give rows of hour and demand")
    steps = [after - before for before, after in pairwise(hours)]
    if steps and not (min(steps) > 0 and max(steps) - min(steps) <= 1e-6 * max(steps)):
        raise UsageError(f"{place}: the hours must rise in equal steps")
    return tuple(hours), tuple(levels)
