"""Verdicts: a value against its bound, published values and an earlier qualification."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from megatoken.hardware.qualify.references import Band, Earlier
from megatoken.hardware.qualify.values import NOISY_DRIFT, NOISY_SPREAD, Outcome, Value
from megatoken.text import number

IMPOSSIBLE_SHARE = 1.02
MARGIN = 0.05
SPREADS = 3
"""A difference from a baseline within so many spreads is noise."""
MOST_TOLERANCE = 0.5
"""However noisy two values are, half of the rate is no noise."""
CONTENTION = 0.05
"""Share of its time that a value waited for cores, above which it counts as noisy."""


class Verdict(StrEnum):
    """Of a value or a test, the worst last."""

    NO_REFERENCE = "NO REFERENCE"
    PASS = "PASS"
    NOT_RUN = "NOT RUN"
    MARGINAL = "MARGINAL"
    FAIL = "FAIL"


ORDER = list(Verdict)


@dataclass(frozen=True, slots=True)
class Judged:
    """A verdict and the sentence that explains it; empty where the verdict needs none."""

    verdict: Verdict
    reason: str = ""


def worst(verdicts: list[Verdict]) -> Verdict:
    """The verdict on all of them together."""
    return max(verdicts, key=ORDER.index, default=Verdict.NOT_RUN)


def is_noisy(value: Value, core_wait_share: float | None) -> bool:
    """Whether a repetition could differ by more than 5 %; counts of errors never are."""
    if value.better == "zero":
        return False
    return value.spread > NOISY_SPREAD or value.drift > NOISY_DRIFT or (core_wait_share or 0.0) > CONTENTION


def judge(outcome: Outcome, band: Band | None, earlier: Earlier | None, *, noisy: bool) -> Judged:
    """The verdict on one value."""
    if not isinstance(outcome, Value):
        return Judged(Verdict.NOT_RUN, f"{outcome.reason}; {outcome.enable}")
    if not outcome.windows or not all(map(math.isfinite, outcome.windows)):
        return Judged(Verdict.FAIL, "the test returned no finite number")
    if outcome.better == "zero":
        wrong = max(outcome.windows)
        return Judged(Verdict.FAIL, f"{number(wrong)} {outcome.unit}; expected 0") if wrong else Judged(Verdict.PASS)
    if not outcome.better:
        return Judged(Verdict.NO_REFERENCE)
    share, bound = outcome.share, outcome.bound
    if bound is not None and bound.certain and share is not None and share > IMPOSSIBLE_SHARE:
        return Judged(Verdict.FAIL, f"measurement error: {share:.0%} of what is possible ({bound.formula})")
    found = []
    if band is not None:
        found.append(_against_band(outcome, band))
    if earlier is not None:
        found.append(_against_earlier(outcome, earlier))
    if not found:
        return Judged(Verdict.NO_REFERENCE)
    judged = max(found, key=lambda one: ORDER.index(one.verdict))
    if judged.verdict is Verdict.FAIL and noisy:
        return Judged(Verdict.MARGINAL, f"{judged.reason}, but the value is noisy: repeat it on an idle machine")
    return judged


def _against_band(value: Value, band: Band) -> Judged:
    """Better than the band is no fault; the bound decides whether it is possible."""
    limit = band.highest if value.better == "lower" else band.lowest
    return _graded(value, limit, MARGIN, f"published values allow {number(limit)} {value.unit}")


def _against_earlier(value: Value, earlier: Earlier) -> Judged:
    tolerance = min(MOST_TOLERANCE, max(MARGIN, SPREADS * math.hypot(value.spread, earlier.spread)))
    limit = earlier.median * (1 + tolerance if value.better == "lower" else 1 - tolerance)
    return _graded(value, limit, tolerance, f"the baseline had {number(earlier.median)} {value.unit}")


def _graded(value: Value, limit: float, margin: float, reference: str) -> Judged:
    """PASS up to the limit, MARGINAL within a margin behind it."""
    lower = value.better == "lower"
    if value.median <= limit if lower else value.median >= limit:
        return Judged(Verdict.PASS)
    near = value.median <= limit * (1 + margin) if lower else value.median >= limit * (1 - margin)
    reason = f"{number(value.median)} {value.unit}; {reference}"
    return Judged(Verdict.MARGINAL if near else Verdict.FAIL, reason)
