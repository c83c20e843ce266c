"""Every error megatoken raises on purpose: what was wrong, where, how to fix it, and the exit code it maps to."""

from __future__ import annotations

import sys
from enum import IntEnum


class ExitCode(IntEnum):
    """What the process returns to the shell; the only place where the codes are defined."""

    OK = 0  # MEASURED or VALID
    ERROR = 1
    USAGE = 2
    INVALID = 3
    DEGRADED = 4
    INTERRUPTED = 130


class MegatokenError(Exception):
    """Base of all expected failures. ``str(error)`` is the one line a user sees."""

    exit_code = ExitCode.ERROR


class UsageError(MegatokenError):
    """What the user gave cannot be used: flag, file, key, number. Nothing has been written."""

    exit_code = ExitCode.USAGE


class ConfigError(UsageError):
    """A configuration key or value is wrong."""


class CheckpointError(UsageError):
    """A model directory cannot be loaded: missing, truncated, misshapen or unsupported."""


class DatasetError(UsageError):
    """A prompt file or data set cannot be read; the message names file and line or row."""


class RequestError(UsageError):
    """One request cannot be served: empty prompt, unknown token id, longer than the context."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field  # of the request, the one at fault; None: no single one


class CapacityError(UsageError):
    """Model, cache or request does not fit; the message carries the numbers in bytes or tokens."""


class NumericsError(MegatokenError):
    """What the model computes for a request is not finite."""


class ThreadError(MegatokenError):
    """Two threads call one engine at the same time."""


class StorageError(MegatokenError):
    """The run folder cannot be written: no space, no permission."""

    exit_code = ExitCode.USAGE


def need_packages(what: str, extra: str, *names: str) -> None:
    """Refuse ``what`` unless the packages of an extra are installed. Raises UsageError."""
    from importlib.util import find_spec  # here: a command imports this file before it handles signals

    for name in names:
        if find_spec(name) is None:
            raise UsageError(f"{what} needs the package {name}; {how_to_install(extra)}")


def how_to_install(extra: str) -> str:
    """A clause on how to get an extra of this package, ``report`` for one."""
    where, command = _installation(extra)
    return f"{where}install it with: {command}"


def install_command(extra: str) -> str:
    """The command alone."""
    return _installation(extra)[1]


def _installation(extra: str) -> tuple[str, str]:
    """Where to type the command, and the command: in a clone for the clone's own environment."""
    import shlex
    from pathlib import Path

    package = Path(__file__).resolve().parent
    clone = package.parents[1]
    if package.parent.name != "src" or not (clone / "pyproject.toml").is_file():
        return "in a checkout of megatoken, ", f".venv/bin/pip install -e '.[{extra}]'"
    own = Path(sys.prefix) == clone / ".venv"
    pip = ".venv/bin/pip" if own else f"{shlex.quote(sys.executable)} -m pip"
    there = "" if Path.cwd() == clone else f"cd {shlex.quote(str(clone))} && "
    return "", f"{there}{pip} install -e '.[{extra}]'"
