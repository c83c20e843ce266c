"""One thing that the doctor looked at."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """Of what was looked at."""

    OK = "OK"
    FIX = "FIX"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found."""

    code: str  # of the check; stays the same between versions
    state: State  # FIX where it costs speed, or makes a feature or a measurement fail
    message: str  # what was found, and what it costs
    command: str = ""  # what to type to fix it; empty if the state is OK or no command can


def ok(code: str, message: str) -> Finding:
    """Nothing to fix."""
    return Finding(code, State.OK, message)


def fix(code: str, message: str, command: str) -> Finding:
    """Something to fix."""
    return Finding(code, State.FIX, message, command)


def unknown(code: str, message: str, command: str = "") -> Finding:
    """The machine does not say."""
    return Finding(code, State.UNKNOWN, message, command)
