"""The parts of a plan: inputs, results and tables with units, formulas and states; and the plan as a document."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from megatoken.files import new_document

State = Literal[
    "interrupted run",
    "invalid run",
    "assumed",
    "nameplate",
    "estimate",
    "unverified",
    "given",
    "measured",
    "verified",
]
STATES: tuple[State, ...] = get_args(State)  # weakest first
STATES_TO_GIVE: tuple[State, ...] = STATES[2:]  # of a number that has no run


@dataclass(frozen=True, slots=True)
class Input:
    """A number that a plan starts from; ``low`` and ``high`` if its range is known."""

    name: str
    value: float | int | str | None
    unit: str
    state: State
    source: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """A number that a plan computes; if it is unknown, ``value`` is None and ``formula`` says why.

    ``low`` and ``high`` are its range, where the plan computes one.
    """

    name: str
    value: float | int | None
    unit: str
    formula: str
    state: State
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """Rows with the same keys; units are part of the keys.

    Reports print its numbers with three significant digits, unless a row has a state that is stronger than an estimate
    or ``rounded`` is false, because the numbers are compared with published ones.
    """

    name: str
    title: str
    rows: tuple[Mapping[str, Any], ...]
    note: str = ""
    rounded: bool = True


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The headline of a plan with one input at the ends of its range, all others unchanged."""

    input: str
    unit: str
    low: float
    high: float
    result_low: float
    result_high: float

    @property
    def swing(self) -> float:
        """Width of the bar in a tornado chart."""
        return abs(self.result_high - self.result_low)


@dataclass(frozen=True, slots=True)
class Plan:
    """One plan; ``kind`` is plan_buy, plan_capacity, plan_fleet, plan_energy, plan_cost or plan_throughput.

    The sensitivities refer to the result ``headline``, by default the first. A ``waterfall`` has title, unit, total
    and steps of name, value and state.
    """

    kind: str
    title: str
    inputs: tuple[Input, ...]
    results: tuple[Result, ...]
    tables: tuple[Table, ...]
    profiles: tuple[Mapping[str, Any], ...] = ()
    sensitivities: tuple[Sensitivity, ...] = ()
    waterfall: Mapping[str, Any] | None = None
    headline: str | None = None
    notes: tuple[str, ...] = ()

    def result(self, name: str) -> Result:
        """The result called ``name``; KeyError if there is none."""
        return {result.name: result for result in self.results}[name]

    def table(self, name: str) -> Table:
        """The table called ``name``; KeyError if there is none."""
        return {table.name: table for table in self.tables}[name]

    def to_document(self) -> dict[str, Any]:
        """Plain JSON."""
        parts = asdict(self)
        optional = {name: value for name in ("waterfall", "headline") if (value := parts.pop(name))}
        return new_document(parts.pop("kind"), **parts, **optional)


def state_of_runs(verdicts: Iterable[str], otherwise: State) -> State:
    """The state of a number of these runs: ``otherwise``, unless one of them is INTERRUPTED or INVALID."""
    unsound: dict[str, State] = {"INTERRUPTED": "interrupted run", "INVALID": "invalid run"}
    return weakest((otherwise, *(unsound[verdict] for verdict in verdicts if verdict in unsound)))


def weakest(states: Iterable[State]) -> State:
    """The state of a result computed from figures with these states: the weakest of them."""
    return min(states, key=STATES.index)


def by_swing(sensitivities: Sequence[Sensitivity]) -> tuple[Sensitivity, ...]:
    """Largest first, without those that have no effect."""
    return tuple(sorted((one for one in sensitivities if one.swing), key=lambda one: -one.swing))
