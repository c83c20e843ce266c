"""A load that changes within one run: stages that hold a number of requests at once, or a rate, or change it evenly."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megatoken.datasets.requests import Dataset
from megatoken.errors import UsageError
from megatoken.harness.sizing import OwnLoad
from megatoken.harness.sweep.loads import Arrival, ArrivalKind, Load, OpenLoop, arrival_seconds, passes
from megatoken.harness.sweep.plan import Setup, load_facts
from megatoken.harness.sweep.point import Phases
from megatoken.runs.reasons import Reason

FORM = "expected stages such as 8@20,8-64@60,64@20 (requests at once or per second, for so many seconds)"
LONGEST_SECONDS = 86_400.0
ROUNDING = 1e-6  # of a load, which is a whole number at the moment that was computed for it


class Stage(NamedTuple):
    """A load that goes evenly from ``first`` to ``last`` in ``seconds``."""

    first: float
    last: float
    seconds: float


def are_stages(text: str) -> bool:
    """Whether the value of a flag is meant as stages."""
    return "@" in text


def stages_of(flag: str, text: str, *, whole: bool) -> tuple[Stage, ...]:
    """The stages of a flag: ``LOAD@SECONDS`` or ``FROM-TO@SECONDS``, separated by commas.

    Raises:
        UsageError: a load is no positive number, or a whole one is wanted; a stage is shorter than a second.
    """
    stages = []
    for part in text.split(","):
        loads, _, seconds = part.strip().partition("@")
        low, dash, high = loads.partition("-")
        try:
            stage = Stage(float(low), float(high if dash else low), float(seconds))
        except ValueError:
            stage = Stage(0.0, 0.0, 0.0)
        ends = (stage.first, stage.last)
        if not all(0 < one < 1e6 and (one.is_integer() or not whole) for one in ends) or not stage.seconds >= 1:
            raise UsageError(f"{flag} {text}: {FORM}, got {part!r}")
        stages.append(stage)
    if sum(stage.seconds for stage in stages) > LONGEST_SECONDS:
        raise UsageError(f"{flag} {text}: longer than {LONGEST_SECONDS:,.0f} s in all")
    return tuple(stages)


def load_at(stages: Sequence[Stage], seconds: float) -> float:
    """The load so long after the start; that of the end stays."""
    for stage in stages:
        if seconds < stage.seconds:
            return stage.first + (stage.last - stage.first) * seconds / stage.seconds
        seconds -= stage.seconds
    return stages[-1].last


def time_of(stages: Sequence[Stage], load: float, after: float) -> float | None:
    """The first moment, from ``after`` on, at which the load is at least ``load``; None: never."""
    begin = 0.0
    for stage in stages:
        end = begin + stage.seconds
        if end > after:
            start = max(after, begin)
            if load_at(stages, start) >= load:
                return start
            if stage.last >= load:
                return begin + stage.seconds * (load - stage.first) / (stage.last - stage.first)
        begin = end
    return max(after, begin) if stages[-1].last >= load else None


class StagedClosedLoop:
    """Keeps as many requests under way as the stages ask for; where they ask for fewer, no new ones come."""

    waits = True

    def __init__(self, rows: Iterator[int], stages: Sequence[Stage]) -> None:
        self._rows = rows
        self._stages = stages
        self._start_ns = self._looked_ns = 0
        self._open = 0
        self._ends_ns: deque[int] = deque()  # of requests whose places are free

    def start(self, now_ns: int) -> None:
        """The stages begin."""
        self._start_ns = self._looked_ns = now_ns

    def take_due(self, now_ns: int) -> list[Arrival]:
        """One request for each place that is free; a place is due when it became free, or when the load rose."""
        self._looked_ns = now_ns
        wanted = int(load_at(self._stages, (now_ns - self._start_ns) / 1e9) + ROUNDING)
        due = []
        while self._open < wanted:
            self._open += 1
            due.append(Arrival(self._ends_ns.popleft() if self._ends_ns else now_ns, next(self._rows)))
        self._ends_ns.clear()
        return due

    def ended(self, request: int, now_ns: int) -> None:
        """Makes room for another request."""
        self._open -= 1
        self._ends_ns.append(now_ns)

    def next_due_ns(self) -> int | None:
        """When the stages ask for one more; a place that became free is due at once, if they still ask for it."""
        after_ns = self._ends_ns[0] if self._ends_ns else self._looked_ns
        seconds = time_of(self._stages, self._open + 1, (after_ns - self._start_ns) / 1e9)
        return None if seconds is None else self._start_ns + math.ceil(seconds * 1e9)


def staged_seconds(stages: Sequence[Stage], counts: Iterator[float]) -> Iterator[float]:
    """Due times whose expected number by then, at the rates of the stages, is ``counts``, which never fall."""
    begin, before, left = 0.0, 0.0, list(stages)
    for count in counts:
        while left and before + (area := (left[0].first + left[0].last) / 2 * left[0].seconds) <= count:
            before, begin = before + area, begin + left.pop(0).seconds
        if not left:
            yield begin + (count - before) / stages[-1].last
            continue
        first, last, seconds = left[0]
        slope, within = (last - first) / seconds, count - before
        # first * t + slope * t^2 / 2 = within, in the form that also holds for a slope of zero
        yield begin + 2 * within / (first + math.sqrt(first * first + 2 * slope * within))


@dataclass(frozen=True, slots=True)
class StagesPlan:
    """One run through all stages, of which each is a window of its own."""

    of: Literal["concurrency", "rate"]  # ``concurrency`` (closed loop) or ``rate`` (open loop)
    stages: tuple[Stage, ...]  # in their order
    arrivals: ArrivalKind  # of the open loop
    burstiness: float  # of gamma arrivals
    kind: str = field(default="stages", init=False)
    finds_its_end: bool = field(default=False, init=False)

    @property
    def phases(self) -> Phases:
        """The window begins at once and lasts for all stages, whatever becomes of the target."""
        return Phases(0.0, sum(stage.seconds for stage in self.stages), stops_overload=False)

    def own_load(self) -> OwnLoad:
        """The highest of all stages."""
        most = max(max(stage.first, stage.last) for stage in self.stages)
        return OwnLoad(in_flight=most) if self.of == "concurrency" else OwnLoad(rate=most)

    def loads(self, estimated_rate: float) -> Iterator[float]:
        """One run."""
        return iter((1.0,))

    def setup(self, value: float, data_set: Dataset, seed: Sequence[int], folder: Path | None) -> Setup:
        """The run."""
        order = passes(len(data_set.requests), (*seed, 0))
        load: Load = StagedClosedLoop(order, self.stages)
        if self.of == "rate":
            counts = arrival_seconds(self.arrivals, 1.0, self.burstiness, (*seed, 1))
            load = OpenLoop(zip(staged_seconds(self.stages, counts), order, strict=False))
        return Setup(load, data_set)

    def facts(self, value: float, seed: int) -> Mapping[str, Any]:
        """The field ``load`` of a point's ``result.json``, as far as it is known before the run."""
        drawn = self.of == "rate"
        return {
            **load_facts(self.kind, value, seed, self.phases, waits=not drawn),
            "arrivals": self.arrivals if drawn else None,
            "burstiness": self.burstiness if drawn and self.arrivals == "gamma" else None,
            "of": self.of,
            "stages": [stage._asdict() for stage in self.stages],
        }

    def notes(self) -> list[Reason]:
        """None."""
        return []
