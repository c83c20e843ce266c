"""What a sweep runs: its loads, one after the other, and the phases of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from megatoken.datasets.requests import Dataset
from megatoken.datasets.traces import Trace
from megatoken.errors import UsageError
from megatoken.harness.protocols import Answers
from megatoken.harness.sizing import OwnLoad
from megatoken.harness.sweep.loads import ArrivalKind, ClosedLoop, Load, OpenLoop, arrival_seconds, passes
from megatoken.harness.sweep.point import Phases
from megatoken.runs.reasons import Reason

LARGEST_CONCURRENCY = 1024  # of a sweep that finds its own end
RATE_SHARES = (0.1, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25)  # of the warm-up's rate


class Setup(NamedTuple):
    """One point: its load, its requests, and a reader of the answers."""

    load: Load
    data_set: Dataset
    answers: Answers | None = None


class Plan(Protocol):
    """The loads of a sweep."""

    @property
    def kind(self) -> str:
        """What the values are."""

    @property
    def phases(self) -> Phases:
        """Of every point."""

    @property
    def finds_its_end(self) -> bool:
        """Whether it ends when output no longer grows."""

    def own_load(self) -> OwnLoad:
        """What is known before the warm-up of the highest load."""

    def loads(self, estimated_rate: float) -> Iterator[float]:
        """The values to run, given the requests per second that the warm-up expects of a full target."""

    def setup(self, value: float, data_set: Dataset, seed: Sequence[int], folder: Path | None) -> Setup:
        """A point, given the requests that were prepared; texts of answers may go into the folder. None: a warm-up."""

    def facts(self, value: float, seed: int) -> Mapping[str, Any]:
        """The field ``load`` of a point's ``result.json``, as far as it is known before the point runs."""

    def notes(self) -> list[Reason]:
        """What a reader of a point must know."""


def load_facts(kind: str, value: float, seed: int, phases: Phases, *, waits: bool) -> dict[str, Any]:
    """What the field ``load`` has of every kind."""
    return {
        "kind": kind,
        "value": value,
        "waits": waits,
        "arrivals": None,
        "burstiness": None,
        "source": None,
        "seed": seed,
        "warm_up_seconds": phases.warm_up_seconds,
        "asked_window_seconds": phases.window_seconds,
        "window_seconds": None,
        "ended_by": None,
    }


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """The loads of a sweep."""

    kind: str  # ``concurrency`` (closed loop), ``rate`` (open loop) or ``speed`` (a trace, open loop)
    # requests at once, requests per second, or speeds of the trace, rising. Empty: concurrency doubles until output no
    # longer grows, and rates are ``RATE_SHARES`` of what the warm-up expects.
    values: tuple[float, ...]
    arrivals: ArrivalKind  # of the open loop
    burstiness: float  # of gamma arrivals: shape of their gaps
    phases: Phases  # of every point; those of a trace have no window, so it runs to its end
    trace: Trace | None = None  # whose requests come at their recorded times over the speed, in their order

    def own_load(self) -> OwnLoad:
        """That of the highest value; the lowest where the sweep finds its end, and none of rates yet to be found."""
        if self.kind == "concurrency":
            return OwnLoad(in_flight=max(self.values, default=1.0))
        return OwnLoad(rate=max(self.values)) if self.kind == "rate" and self.values else OwnLoad()

    def loads(self, estimated_rate: float) -> Iterator[float]:
        """The values to run, given the requests per second that the warm-up expects of a full target."""
        if self.values:
            return iter(self.values)
        if self.kind == "rate":
            return (float(f"{share * estimated_rate:.3g}") for share in RATE_SHARES)
        return (float(2**power) for power in range(LARGEST_CONCURRENCY.bit_length()))

    @property
    def finds_its_end(self) -> bool:
        """Whether a closed loop ends when output no longer grows; values that were asked for all run."""
        return not self.values and self.kind == "concurrency"

    def setup(self, value: float, data_set: Dataset, seed: Sequence[int], folder: Path | None) -> Setup:
        """One point; ``seed`` is of the order of the rows and of the arrivals."""
        return Setup(self._load(value, len(data_set.requests), seed), data_set)

    def _load(self, value: float, rows: int, seed: Sequence[int]) -> Load:
        order = passes(rows, (*seed, 0))
        if self.trace is not None:
            return OpenLoop(zip((self.trace.due_seconds / value).tolist(), range(rows), strict=True))
        if self.kind == "concurrency":
            return ClosedLoop(order, round(value))
        return OpenLoop(zip(arrival_seconds(self.arrivals, value, self.burstiness, (*seed, 1)), order, strict=False))

    def facts(self, value: float, seed: int) -> dict[str, Any]:
        """The field ``load`` of a point's ``result.json``, as far as it is known before the point runs."""
        open_loop, drawn = self.kind != "concurrency", self.kind == "rate"
        return {
            **load_facts(self.kind, value, seed, self.phases, waits=not open_loop),
            "arrivals": self.arrivals if drawn else None,
            "burstiness": self.burstiness if drawn and self.arrivals == "gamma" else None,
            "source": f"{self.trace.format} trace {self.trace.path.name}" if self.trace is not None else None,
        }

    def notes(self) -> list[Reason]:
        """None."""
        return []


def values_of(flag: str, text: str, *, whole: bool) -> tuple[float, ...]:
    """Rising values of a flag such as ``1,2,4``, ``1-64`` (doubling) or a mixture of both.

    Raises:
        UsageError: a value is no positive number, or a whole one is wanted.
    """
    values: list[float] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        try:
            first, last = float(low), float(high if dash else low)
        except ValueError:
            first = last = 0.0
        if not 0 < first <= last < 1e6 or (whole and not (first.is_integer() and last.is_integer())):
            kind = "whole numbers" if whole else "numbers"
            raise UsageError(
                f"{flag} {text}: expected {kind} above zero and below a million, of a range the smaller first, such as "
                f"1,2,4,8 or 1-64, got {part!r}"
            )
        while first < last:
            values.append(first)
            first *= 2
        values.append(last)
    return tuple(sorted(set(values)))
