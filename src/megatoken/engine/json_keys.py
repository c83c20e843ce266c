"""Typed access to the keys of a JSON file."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import TypeGuard

from megatoken.errors import CheckpointError

LARGEST_INTEGER = 2**31 - 1  # positions, token ids and tensor sides live in int32 on the device


def is_integer(value: object, smallest: int, largest: int) -> TypeGuard[int]:
    """Whether ``value`` is an integer in the range, both ends included."""
    return type(value) is int and smallest <= value <= largest  # JSON's true and false are int to isinstance


class Keys:
    """Typed access to one JSON object. A key that is null counts as absent; a refusal names file, key and value."""

    def __init__(self, values: Mapping[str, object], source: Path, prefix: str = "") -> None:
        self._values = values
        self._source = source
        self._prefix = prefix

    def refuse(self, key: str, problem: str) -> CheckpointError:
        """The error to raise over a key."""
        state = f"is {reprlib.repr(self._values[key])}" if key in self._values else "is missing"
        return CheckpointError(f"{self._source}: {self._prefix}{key} {state}; {problem}")

    def get(self, key: str, default: object = None) -> object:
        """The value, null included."""
        return self._values.get(key, default)

    def absent(self, key: str) -> bool:
        """Whether the key is missing, rather than null."""
        return key not in self._values

    def has_sections(self) -> bool:
        """Whether any value is an object."""
        return any(isinstance(value, dict) for value in self._values.values())

    def section(self, key: str) -> Keys:
        """An object inside; empty if absent."""
        value = self.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.refuse(key, "expected an object")
        return Keys(value, self._source, f"{self._prefix}{key}.")

    def boolean(self, key: str, default: bool = False) -> bool:
        """True or false; ``default`` if absent."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(key, "expected true or false")
        return value

    def integer(self, key: str, default: int | None = None, *, largest: int = LARGEST_INTEGER) -> int:
        """At least 1; required without a default."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not is_integer(value, 1, largest):
            raise self.refuse(key, f"expected an integer from 1 to {largest}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Above 0; required without a default."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:  # also refuses NaN
            raise self.refuse(key, "expected a positive number")
        return float(value)
