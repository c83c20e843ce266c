"""Arithmetic of fleets: nodes for a demand with spares, mixes of two classes, and what a wrong size costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megatoken.errors import UsageError
from megatoken.text import precise

ROUNDING = 1e-9  # a demand that exceeds the capacity by rounding only needs no further node
MOST_NODES = 1_000_000
DOMAINS = ("node", "rack")
LARGEST_LEVEL = 1e15
MOST_TRIALS = 20_000_000  # sizes x levels of demand; beyond, the cheapest mix is searched on a coarser grid of sizes


@dataclass(frozen=True, slots=True)
class SupplyClass:
    """Nodes of one kind. ``rate_per_node`` is the planning rate of one node, in the unit of the demand."""

    name: str
    rate_per_node: float
    accelerators_per_node: int
    dollars_per_node_hour: float
    nodes_per_rack: int | None = None


@dataclass(frozen=True, slots=True)
class Demand:
    """Demand over a cycle: one level for each of its equal parts, in one unit."""

    levels: tuple[float, ...]
    unit: str

    @property
    def peak(self) -> float:
        """The highest level."""
        return max(self.levels)

    @property
    def mean(self) -> float:
        """The mean level over the cycle."""
        return math.fsum(self.levels) / len(self.levels)


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


@dataclass(frozen=True, slots=True)
class Policy:
    """One way to divide a demand between permanent nodes (base) and nodes rented by the hour (burst)."""

    name: str
    base_nodes: int
    most_burst_nodes: int
    base_dollars_per_hour: float
    burst_dollars_per_hour: float
    burst_share: float  # of all demand

    @property
    def dollars_per_hour(self) -> float:
        """Mean price over the cycle."""
        return self.base_dollars_per_hour + self.burst_dollars_per_hour


@dataclass(frozen=True, slots=True)
class Fit:
    """How well a fleet of a given size fits a demand."""

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
    """Whole nodes that serve ``demand``, in the same unit as the rate. Raises UsageError above ``MOST_NODES``."""
    exact = demand / rate_per_node
    if exact > MOST_NODES:
        raise UsageError(
            f"a demand of {precise(demand)} needs {precise(exact)} nodes of {precise(rate_per_node)} each; check the"
            " units of --demand and of the rate"
        )
    return math.ceil(exact * (1 - ROUNDING))


def size(demand: float, supply: SupplyClass, *, spare_domains: int = 0, domain: str = "node") -> Size:
    """Nodes, racks and accelerators that serve a demand even if ``spare_domains`` fault domains fail.

    Args:
        demand: in the unit of ``supply.rate_per_node``.
        supply: the class of nodes.
        spare_domains: how many fault domains may fail at once.
        domain: what fails as one unit: node or rack.

    Raises:
        UsageError: a number of spares out of range, an unknown domain, or racks of unknown size.
    """
    if not 0 <= spare_domains <= MOST_NODES:
        raise UsageError(f"--spare: expected 0 to {MOST_NODES:,}, got {spare_domains}")
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
    """Nodes in addition to ``serving`` ones so that ``spare_domains`` fault domains may fail; racks are whole."""
    if not serving or not spare_domains:
        return 0
    if domain == "rack" and supply.nodes_per_rack is not None:
        return (math.ceil(serving / supply.nodes_per_rack) + spare_domains) * supply.nodes_per_rack - serving
    return spare_domains


def replacement(nodes_before: int, rate_before: float, rate_after: float) -> Replacement:
    """How many nodes of ``rate_after`` replace ``nodes_before`` nodes of ``rate_before``."""
    if nodes_before < 1:
        raise UsageError(f"--replace-nodes: expected 1 or more, got {nodes_before}")
    nodes = nodes_for(nodes_before * rate_before, rate_after)
    ratio_for_one_less = nodes_before / (nodes - 1) if nodes > 1 else None
    exact = nodes_before * rate_before / rate_after
    return Replacement(nodes_before, rate_after / rate_before, exact, nodes, ratio_for_one_less)


def fit(demand: Demand, supply: SupplyClass, nodes: int) -> Fit:
    """How ``nodes`` nodes fit ``demand``: unserved demand, time with too few nodes, and idle capacity."""
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
    """All demand on ``base``, all on ``burst``, a base sized for the mean demand, and the cheapest mix.

    The base serves first; the excess goes to whole burst nodes, rented for each part of the cycle that needs them.
    A base has spare nodes as in ``size``, which serve nothing.
    """
    most = nodes_for(demand.peak, base.rate_per_node)
    nodes_for(demand.peak, burst.rate_per_node)  # raises if the numbers are out of proportion
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
    """Whole burst nodes for ``excess``, the demand beyond the base; a rounding error of ``level`` needs none."""
    return np.ceil(np.clip(excess - ROUNDING * np.asarray(level), 0, None) / rate)


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
