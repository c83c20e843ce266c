"""Detect a rate claimed for the wrong scope: the rate of the rack claimed for one node."""

from __future__ import annotations

import math

from megatoken.analysis.comparison import Entry
from megatoken.claims.facts import Facts
from megatoken.claims.lookups import Lookups
from megatoken.claims.schema import BASIS_OF, RATE_UNITS, Claim
from megatoken.text import exact

NAMES = {"gpu": "one GPU", "node": "one node", "rack": "the rack"}
CLOSE_BELOW = 0.9

Ranges = dict[str, tuple[float, float]]


def scope_error(claim: Claim, facts: Facts, lookups: Lookups) -> str | None:
    """A sentence that names the scope whose rate is claimed; None if the rate fits its own scope, or no scope."""
    if claim.unit not in RATE_UNITS or claim.scope is None or not isinstance(claim.value, float):
        return None
    for origin, ranges in [
        ("the artefacts", _of_artefacts(facts)),
        *((entry.name, _of_entry(entry)) for entry in lookups.published),
    ]:
        own = ranges.get(claim.scope)
        if own is None or _fits(claim, own):
            continue
        for scope, other in ranges.items():
            if scope != claim.scope and _fits(claim, other):
                did = f"{exact(claim.value)} tokens/s is the rate of {NAMES[scope]} in {origin}"
                return f"{did}, not of {NAMES[claim.scope]}, which has {_range(own)}"
    return None


def _of_artefacts(facts: Facts) -> Ranges:
    rates = [row.output_tokens_per_second for row in facts.nodes]
    if not rates:
        return {}
    total = math.fsum(rates)
    nodes = facts.node_count or len(rates)
    each = rates if len(rates) > 1 else [total / nodes]  # a single run may cover several nodes
    ranges = {"rack": (total, total), "node": (min(each), max(each))}
    accelerators = sum(row.accelerators or 0 for row in facts.nodes)
    if accelerators:
        ranges["gpu"] = (min(each) * nodes / accelerators, max(each) * nodes / accelerators)
    return ranges


def _of_entry(entry: Entry) -> Ranges:
    rates = {scope: entry.rate(basis) for scope, basis in BASIS_OF.items()}
    return {scope: (rate, rate) for scope, rate in rates.items() if rate is not None}


def _fits(claim: Claim, bounds: tuple[float, float]) -> bool:
    low, high = bounds
    value = claim.value
    assert isinstance(value, float)
    margin = max(claim.tolerance, 1e-9 * abs(value))
    if claim.relation == "equal":
        return low - margin <= value <= high + margin
    if claim.relation == "at least":
        return high * CLOSE_BELOW <= value <= high + margin
    return low - margin <= value <= low / CLOSE_BELOW


def _range(bounds: tuple[float, float]) -> str:
    low, high = bounds
    return f"{low:,.1f} tokens/s" if high - low < 0.05 else f"{low:,.1f} to {high:,.1f} tokens/s"
