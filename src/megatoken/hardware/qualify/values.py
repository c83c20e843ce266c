"""What a test returns: measured values with units and bounds, or why it did not run; and how hard it is to try."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from megatoken.engine.config import Precision

NORMAL_MAD = 1.4826
"""The median distance from the median times this is the standard deviation of normally distributed values."""
SPEEDS = ("higher", "lower")
"""What is better of a value that has a verdict on its speed."""
COUNTS = ("zero", "rare")
"""The same of counts of errors, which are never noisy."""
NOISY_SPREAD, NOISY_DRIFT = 0.05, 0.025


@dataclass(frozen=True, slots=True)
class Bound:
    """What no healthy machine exceeds, in the unit of its value, and where it comes from.

    ``certain``: by data sheet or instruction set, so that a value above it is an error of the measurement. Otherwise it
    was measured, and the value is only stated as a share of it.
    """

    value: float
    formula: str
    certain: bool = True


@dataclass(frozen=True, slots=True)
class Value:
    """One figure: the same quantity measured in several windows."""

    name: str  # stays the same between versions; references and baselines are found by it
    title: str  # for people
    unit: str  # of ``windows`` and ``bound``
    windows: Sequence[float]  # one value per window of time, in order
    # which direction is good; ``zero``: any other value is a fault; ``rare``: any other value is a warning;
    # ``same``: like parts must agree; empty: recorded only
    better: Literal["higher", "lower", "zero", "rare", "same", ""] = "higher"
    bound: Bound | None = None  # None: none is known
    note: str = ""  # what a reader must know about it
    precision: Precision | None = None  # of the engine that took the steps; None: no steps
    run_medians: Sequence[float] = ()  # medians of the runs that ``windows`` are from, if there were several

    @property
    def median(self) -> float:
        """Of the windows; NaN of none."""
        return statistics.median(self.windows) if self.windows else math.nan

    @property
    def best_median(self) -> float:
        """Of its best run."""
        return (min if self.better == "lower" else max)(self.run_medians or [self.median])

    @property
    def spread(self) -> float:
        """Robust standard deviation of the windows over their median; 0 for at most one window or a median of 0."""
        if not self.windows or not self.median:
            return 0.0
        return NORMAL_MAD * statistics.median(abs(one - self.median) for one in self.windows) / abs(self.median)

    @property
    def drift(self) -> float:
        """Difference between the medians of the first and the second half of the windows, over the median of all."""
        half = len(self.windows) // 2
        if not half or not self.median:
            return 0.0
        first, second = (statistics.median(part) for part in (self.windows[:half], self.windows[-half:]))
        return abs(first - second) / abs(self.median)

    @property
    def share(self) -> float | None:
        """Measured over bound, or bound over measured where lower is better; None without a bound."""
        return None if self.bound is None else share_of(self.median, self.bound.value, self.better)


def share_of(median: float, bound: float, better: str) -> float | None:
    """Measured over bound, or bound over measured where lower is better; None if either is zero."""
    if not median or not bound:
        return None
    return bound / median if better == "lower" else median / bound


@dataclass(frozen=True, slots=True)
class NotRun:
    """A value, or all of a test, that could not be measured: why, and how to enable it."""

    name: str
    title: str
    reason: str
    enable: str


Outcome: TypeAlias = Value | NotRun


@dataclass(frozen=True, slots=True)
class Setting:
    """How long and how large a test is, and what it may use."""

    seconds: float  # of timed windows for each value
    warm_up_seconds: float  # before them
    windows: int  # for each value
    sides: tuple[int, ...]  # of square matrix products
    buffer_bytes: int  # of each buffer that is read or written
    pattern_bytes: int  # of memory that the pattern test fills
    file_bytes: int  # of the file that the disk test writes
    repeats: int  # of a computation whose results must be equal
    power_seconds: float  # of the sustained load on a GPU
    idle_seconds: float = 60.0  # for which memory must keep a pattern
    pieces: int = 1  # of each window, between those of the others
    folder: Path = Path()  # on the disk to test
    precision: Precision | None = None  # of the engine's products on a CPU; None: the fastest one
    measured: Mapping[str, float] = field(default_factory=dict)  # medians of the tests before, by name


Outcomes: TypeAlias = Iterator[Outcome]
