"""What LoadGen's percentiles imply: their order, and bounds of the mean."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

from megatoken.analysis.early_stopping import RANKS

_ORDERED = ("min", *RANKS, "max")


def disorder(values: Mapping[str, float], unit: str = " s") -> str:
    """The first two of minimum, percentiles and maximum that are in the wrong order; empty if none are."""
    known = [(name, values[name]) for name in _ORDERED if name in values]
    for (lower, low), (upper, high) in itertools.pairwise(known):
        if low > high:
            return f"{lower} is {low:.9g}{unit}, {upper} is {high:.9g}{unit}"
    return ""


def impossible_mean(values: Mapping[str, float], samples: int | None, unit: str = " s", slack: float = 0.0) -> str:
    """The mean, if it is outside the bounds that the percentiles set; empty if not, or if some are not known.

    Args:
        values: Minimum, percentiles, maximum and mean.
        samples: How many values the percentiles are of.
        unit: As shown.
        slack: For percentiles that lie between samples.
    """
    if not samples or any(name not in values for name in (*_ORDERED, "mean")):
        return ""
    points = [values[name] for name in _ORDERED]
    ranks = [0, *(math.floor(samples * rank) for rank in RANKS.values()), samples]
    shares = [(b - a) / samples for a, b in itertools.pairwise(ranks)]
    low = sum(share * point for share, point in zip(shares, points, strict=False))
    high = sum(share * point for share, point in zip(shares, points[1:], strict=False))
    mean = values["mean"]
    # LoadGen's sum of nanoseconds overflows, or is below zero for answers of one token: then its mean is meaningless.
    if high * samples * 1e9 >= 2.0**63 or low < 0:
        return ""
    if low * (1 - 1e-9) - 1e-8 - slack <= mean <= high * (1 + 1e-9) + 1e-8 + slack:
        return ""
    return f"a mean of {mean:.9g}{unit}, though its percentiles put it between {low:.9g} and {high:.9g}{unit}"
