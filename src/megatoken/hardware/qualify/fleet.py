"""Several like parts together: which is slower than the others, and which node or link makes pairs of nodes slow.

Names stand for GPUs of a machine or nodes of a rack. How a pair is measured is an argument, so that simulated racks
exercise the same code.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatoken.hardware.qualify.judge import Verdict, graded
from megatoken.hardware.qualify.values import NORMAL_MAD, SPEEDS

LEAST_DIFFERENCE, DEVIATIONS = 0.03, 3.0
FEWEST = 3
"""With two parts there is no majority that could say which is slow."""
PROVEN = 2
"""Proven partners with which a node must be slow before it is called bad."""
LINK_SHARE, LINK_QUANTILE = 0.9, 0.75
"""A pair is slow below this share of the rate that a quarter of all pairs exceed: links of one rack are alike."""
Pair = tuple[str, str]
Measure = Callable[[Sequence[Pair]], Mapping[Pair, float | None]]
"""Rates of disjoint pairs that are measured at the same time; None: the pair failed."""


def graded_parts(values: Mapping[str, float], better: str) -> dict[str, Verdict]:
    """Those that are worse than the others, the worst first: MARGINAL up to 5 % behind the limit, then FAIL.

    The limit is 3 % behind the median, or three deviations if that is more. Empty for fewer than three values, whose
    majority is unknown, and for values that are not speeds.
    """
    if len(values) < FEWEST or better not in SPEEDS:
        return {}
    median = statistics.median(values.values())
    deviation = NORMAL_MAD * statistics.median(abs(one - median) for one in values.values())
    allowed = max(LEAST_DIFFERENCE * median, DEVIATIONS * deviation)
    lower = better == "lower"
    limit = median + allowed if lower else median - allowed
    worst_first = sorted(values, key=values.__getitem__, reverse=lower)
    verdicts = {name: graded(values[name], limit, better) for name in worst_first}
    return {name: verdict for name, verdict in verdicts.items() if verdict is not Verdict.PASS}


def different_parts(results: Mapping[str, float]) -> list[str]:
    """Those whose result is not that of the majority; all if no result has one; none if all agree."""
    (common, count), *others = Counter(results.values()).most_common()
    if not others:
        return []
    return [name for name, result in results.items() if result != common or 2 * count <= len(results)]


def rounds(names: Sequence[str]) -> Iterator[list[Pair]]:
    """Rounds of disjoint pairs in which every two meet once: n - 1 rounds for an even n, else n (circle method)."""
    ring: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        yield [(one, other) for one, other in pairs if one is not None and other is not None]
        ring = [ring[0], ring[-1], *ring[1:-1]]


@dataclass(frozen=True, slots=True)
class Isolated:
    """What the pairs of a rack showed."""

    rates: Mapping[Pair, float | None]  # of each pair that was measured, the better of its trials; None where it failed
    limit: float | None  # below which a pair is slow; None if no pair worked
    bad_nodes: tuple[str, ...]  # slow with several partners, of which each is fast with another node
    bad_links: tuple[Pair, ...]  # pairs that are slow although both nodes are fast with others
    undecided: tuple[str, ...]  # nodes that were fast with no other, and for which too few proven partners were left


def isolate(names: Sequence[str], measure: Measure, *, all_pairs: bool = False) -> Isolated:
    """Find the bad nodes and links of a rack.

    Every node is measured in two rounds of disjoint pairs (``all_pairs``: in all rounds). A fast pair proves its link
    and both nodes, so ``measure`` must give the rate of the slower direction. A slow pair is measured once more, alone.
    A node that was fast with no other is tried with nodes that are proven: slow with two of them, it is bad. A slow
    pair of two proven nodes has a bad link.
    """
    rates: dict[Pair, float | None] = {}

    def try_pairs(pairs: Sequence[Pair]) -> None:
        for pair, rate in measure(pairs).items():
            known, before = _pair(*pair), rates.get(_pair(*pair))
            rates[known] = rate if before is None else before if rate is None else max(rate, before)

    for number, pairs in enumerate(rounds(names)):
        if number < 2 or all_pairs:
            try_pairs(pairs)
    working = [rate for rate in rates.values() if rate is not None]
    limit = LINK_SHARE * sorted(working)[int(LINK_QUANTILE * (len(working) - 1))] if working else None

    def is_slow(pair: Pair) -> bool:
        rate = rates[pair]
        return rate is None or limit is None or rate < limit

    for pair in [pair for pair in rates if is_slow(pair)]:
        try_pairs([pair])
    proven = {name for pair in rates if not is_slow(pair) for name in pair}
    bad_nodes: list[str] = []
    undecided: list[str] = []
    for suspect in (name for name in names if name not in proven):
        partners = [name for name in names if name in proven]
        met = [name for name in partners if _pair(suspect, name) in rates]
        for partner in [name for name in partners if name not in met][: max(0, PROVEN - len(met))]:
            try_pairs([_pair(suspect, partner)])
            met.append(partner)
        if any(not is_slow(_pair(suspect, partner)) for partner in met):
            proven.add(suspect)
        else:
            (bad_nodes if len(met) >= PROVEN else undecided).append(suspect)
    bad_links = [pair for pair in rates if is_slow(pair) and proven >= set(pair)]
    if not proven:  # no pair is faster than another, as of two nodes
        bad_links, undecided = [pair for pair in rates if rates[pair] is None], []
    return Isolated(rates, limit, tuple(bad_nodes), tuple(bad_links), tuple(undecided))


def _pair(one: str, other: str) -> Pair:
    return (one, other) if one < other else (other, one)
