"""LoadGen's early stopping (loadgen/early_stopping.cc): how many slow queries a percentile allows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

CONFIDENCE = 0.99
MOST_QUERIES = 50_000_000
RANKS = {
    "p50": 0.5,
    "p90": 0.9,
    "p95": 0.95,
    "p97": 0.97,
    "p99": 0.99,
    "p99.9": 0.999,
}  # of the percentiles that LoadGen logs


@lru_cache(maxsize=256)
def queries_needed(over: int, percentile: float) -> int:
    """The smallest number of queries that confirms the percentile with ``over`` of them over the limit."""
    low, high = 0, math.ceil((over + 1) * 1000 / (1 - percentile))
    while low < high:
        passing = (low + high) // 2
        if odds(passing, over, percentile) < 1 - CONFIDENCE:
            high = passing
        else:
            low = passing + 1
    return low + over


@lru_cache(maxsize=256)
def most_over(queries: int, percentile: float) -> int:
    """How many queries over the limit ``queries`` queries may have to confirm the percentile; -1: none suffices."""
    if queries_needed(0, percentile) > queries:
        return -1
    low, high = 0, math.ceil(queries * (1 - percentile)) + 1
    while high - low > 1:
        over = (low + high) // 2
        if queries_needed(over, percentile) <= queries:
            low = over
        else:
            high = over
    return low


def odds(passing: int, over: int, percentile: float) -> float:
    """Probability of at most ``over`` slow queries among all, if each is slow with probability 1 - percentile.

    The cumulative binomial distribution, summed downwards from its largest term.
    """
    total = passing + over
    slow, fast = 1 - percentile, percentile
    log_term = (
        math.lgamma(total + 1)
        - math.lgamma(over + 1)
        - math.lgamma(passing + 1)
        + over * math.log(slow)
        + passing * math.log(fast)
    )
    share = result = 1.0
    for count in range(over, 0, -1):
        share *= count * fast / ((total - count + 1) * slow)
        result += share
        if share < 1e-16 * result:
            break
    return min(1.0, math.exp(log_term + math.log(result)))


def places_over(values: Mapping[str, float], limit: float, queries: int) -> tuple[int, int]:
    """Fewest and most of ``queries`` values that may be above ``limit``, by their percentiles; in the same unit."""
    at_most, at_least = queries, 0
    for name, rank in RANKS.items():
        if name in values:
            place = math.floor(queries * rank)
            if values[name] <= limit:
                at_most = min(at_most, queries - place - 1)
            else:
                at_least = max(at_least, queries - place)
    if "max" in values:
        at_most, at_least = (0, at_least) if values["max"] <= limit else (at_most, max(at_least, 1))
    if "min" in values and values["min"] > limit:
        at_least = queries
    return at_least, at_most


def discarded(queries: int, percentile: float) -> int:
    """How many of the slowest queries the streams' estimate of a percentile discards."""
    return max(0, most_over(queries, percentile) - 1)


def bounds(values: Mapping[str, float], place: int, queries: int) -> tuple[float, float]:
    """The nearest percentiles below and above the value at a place of the sorted values."""
    places = {name: math.floor(queries * rank) for name, rank in RANKS.items()} | {"min": 0, "max": queries - 1}
    below = [values[name] for name, at in places.items() if name in values and at <= place]
    above = [values[name] for name, at in places.items() if name in values and at >= place]
    return max(below, default=0.0), min(above, default=math.inf)
