"""Intervals of 95 %: a share of independent trials, and statistics of rows by resampling them together."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Z = 1.959963984540054  # of 95 %, two-sided
RESAMPLES = 2000
_BLOCK_DRAWS = 2**22  # indices drawn at a time

Floats = NDArray[np.float64]


class Interval(NamedTuple):
    """A value and its interval of 95 %."""

    value: float
    low: float
    high: float


def wilson(found: int, trials: int) -> Interval:
    """A share by Wilson's score interval (1927), which is right for shares near 1 too."""
    share, weight = found / trials, Z * Z / trials
    middle = (share + weight / 2) / (1 + weight)
    half = Z / (1 + weight) * math.sqrt(share * (1 - share) / trials + weight / (4 * trials))
    return Interval(share, max(0.0, middle - half), min(1.0, middle + half))


def bootstrap(statistic: Callable[..., Floats], *columns: Floats, seed: int = 0) -> Interval:
    """A statistic of rows with its percentile interval over ``RESAMPLES`` draws of as many rows.

    Args:
        statistic: of the means of the columns, for arrays of means.
        columns: one value for each row; a draw takes the same rows of all, so differences between columns are paired.
        seed: of the draws.
    """
    rows = len(columns[0])
    draw = np.random.default_rng(seed)
    size = max(1, min(RESAMPLES, _BLOCK_DRAWS // rows))
    parts = []
    for first in range(0, RESAMPLES, size):
        chosen = draw.integers(0, rows, (min(size, RESAMPLES - first), rows))
        parts.append(statistic(*(column[chosen].mean(axis=1) for column in columns)))
    low, high = np.percentile(np.concatenate(parts), [2.5, 97.5])
    value = statistic(*(np.array(column.mean()) for column in columns))
    return Interval(float(value), float(low), float(high))


def ratio(numerators: Floats, denominators: Floats) -> Floats:
    """Of means; 1 of nothing to nothing."""
    both_zero = (numerators == 0) & (denominators == 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient: Floats = np.where(both_zero, 1.0, numerators / denominators)
    return quotient


def mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided exact probability of so uneven a split of the rows that one of two alone answered right."""
    trials, fewer = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(trials, count) for count in range(fewer + 1)) / 2**trials
    return min(1.0, float(2 * tail))
