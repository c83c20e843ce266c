"""The assumptions of plans: shipped defaults with their sources, which the user can replace."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path
from typing import TypeVar

from pydantic import Field

from megatoken.analysis.published import accelerator_facts
from megatoken.errors import ConfigError
from megatoken.planning.figures import Input, State
from megatoken.text import exact, suggestion
from megatoken.yaml_files import Strict, one_line, read_strict

_Schema = TypeVar("_Schema", bound=Strict)

LARGEST_NUMBER = 1e15
PRICES = "accelerator_prices.yaml"


class _OwnEntry(Strict):
    value: float
    low: float | None = None
    high: float | None = None
    state: State = "given"
    source: str = ""


class _OwnFile(Strict):
    assumptions: dict[str, _OwnEntry] = Field(min_length=1)


class Assumption(Strict):
    """One assumption, with its range and the smallest and largest value it may have."""

    name: str = ""  # the key of a file
    value: float
    unit: str
    state: State
    source: str
    low: float | None = None
    high: float | None = None
    minimum: float | None = None
    maximum: float | None = None

    def to_input(self) -> Input:
        """The assumption as an input of a plan."""
        return Input(self.name, self.value, self.unit, self.state, self.source, self.low, self.high)


class _ShippedFile(Strict):
    assumptions: dict[str, Assumption]


class _Price(Strict):
    value: float
    low: float
    high: float
    source: str


class _PricesFile(Strict):
    accelerators: dict[str, dict[str, _Price]]


class Assumptions(Mapping[str, float]):
    """Values by name; ``entries`` has their units, states and sources."""

    def __init__(self, entries: Mapping[str, Assumption]) -> None:
        self.entries = dict(entries)

    def __getitem__(self, name: str) -> float:
        return self.entries[name].value

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def but(self, name: str, value: float) -> Assumptions:
        """The same assumptions with another value of ``name``."""
        return Assumptions({**self.entries, name: self.entries[name].model_copy(update={"value": value})})

    def priced_for(self, accelerator: str | None) -> Assumptions:
        """The same assumptions with the prices of a named accelerator, where known and not given by the user."""
        facts = accelerator_facts(accelerator)
        own = _prices().get(facts.name, {}) if facts else {}
        defaults = _defaults()
        changed = {
            name: _checked(defaults[name].model_copy(update=price.model_dump() | {"state": "assumed"}), PRICES)
            for name, price in own.items()
            if self.entries[name] == defaults[name]
        }
        return Assumptions({**self.entries, **changed})

    def inputs(self, names: Iterable[str]) -> tuple[Input, ...]:
        """The assumptions ``names`` as inputs of a plan, in that order."""
        return tuple(self.entries[name].to_input() for name in names)

    def states(self, names: Iterable[str]) -> tuple[State, ...]:
        """The states of the assumptions ``names``."""
        return tuple(self.entries[name].state for name in names)


def load_assumptions(path: Path | None = None, settings: Iterable[str] = ()) -> Assumptions:
    """The defaults, overridden by a file of the user, then by ``settings``.

    The file is YAML: ``assumptions: {name: {value, low, high, source}}``. A setting is ``name=value`` or
    ``name=value:low:high``, as typed after ``--set``.

    Raises:
        ConfigError: a name is unknown, or a value is not a number or outside its bounds.
    """
    entries = dict(_defaults())
    if path is not None:
        for name, own in read_strict(path, _OwnFile).assumptions.items():
            given = {**own.model_dump(), "source": own.source or str(path)}
            entries[name] = _checked(_known(entries, name, str(path)).model_copy(update=given), str(path))
    for setting in settings:
        name, equals, text = setting.partition("=")
        default = _known(entries, name.strip().replace("-", "_"), f"--set {setting}")
        if not equals:
            raise ConfigError(f"--set {setting}: give a value, as in --set {default.name}={default.value:.15g}")
        value, low, high = _numbers(text, setting)
        given = {"value": value, "low": low, "high": high, "state": "given", "source": "--set"}
        entries[default.name] = _checked(default.model_copy(update=given), f"--set {setting}")
    return Assumptions(entries)


def read_shipped(name: str, schema: type[_Schema]) -> _Schema:
    """A YAML file that ships with the package, as ``schema``."""
    with as_file(files("megatoken") / "data" / name) as path:
        return read_strict(path, schema)


@cache
def _defaults() -> dict[str, Assumption]:
    file = "planning_assumptions.yaml"
    shipped = read_shipped(file, _ShippedFile).assumptions
    return {name: _checked(entry.model_copy(update={"name": name}), file) for name, entry in shipped.items()}


@cache
def _prices() -> dict[str, dict[str, _Price]]:
    return read_shipped(PRICES, _PricesFile).accelerators


def _known(entries: Mapping[str, Assumption], name: str, place: str) -> Assumption:
    if name not in entries:
        raise ConfigError(f"{place}: " + one_line(f"unknown assumption '{name}'; {suggestion(name, entries)}"))
    return entries[name]


def _numbers(text: str, setting: str) -> tuple[float, float | None, float | None]:
    try:
        numbers = [float(part) for part in text.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 3) or not all(map(math.isfinite, numbers)):
        raise ConfigError(f"--set {setting}: expected a number, or VALUE:LOW:HIGH")
    return (numbers[0], None, None) if len(numbers) == 1 else (numbers[0], numbers[1], numbers[2])


def _checked(entry: Assumption, place: str) -> Assumption:
    for number in (entry.value, entry.low, entry.high):
        if number is None:
            continue
        if abs(number) > LARGEST_NUMBER:
            raise ConfigError(f"{place}: {entry.name} is {number:g}, which is too large")
        if entry.minimum is not None and number < entry.minimum:
            raise ConfigError(f"{place}: {entry.name} is {exact(number)}; it must be at least {exact(entry.minimum)}")
        if entry.maximum is not None and number > entry.maximum:
            raise ConfigError(f"{place}: {entry.name} is {exact(number)}; it must be at most {exact(entry.maximum)}")
    if (entry.low is None) != (entry.high is None):
        raise ConfigError(f"{place}: {entry.name} has only one end of a range; give both low and high, or neither")
    if entry.low is not None and entry.high is not None and not entry.low <= entry.value <= entry.high:
        raise ConfigError(
            f"{place}: {entry.name} is {exact(entry.value)}, outside its range"
            f" {exact(entry.low)} to {exact(entry.high)}"
        )
    return entry
