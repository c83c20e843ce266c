"""Results as JSON documents: finding and reading them, taking values out with an error that names the key."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatoken.errors import UsageError
from megatoken.files import deeper_than, plain
from megatoken.hardware.qualify.document import KIND as QUALIFY
from megatoken.hardware.qualify.document import check_document
from megatoken.report.words import clean
from megatoken.text import is_number

PLANS = ("plan_buy", "plan_capacity", "plan_fleet", "plan_energy", "plan_cost", "plan_throughput")
KINDS = (
    "audit",
    "aggregate",
    "comparison",
    "repeats",
    "sweep",
    "sweep_comparison",
    "qualify",
    "check",
    "rerun",
    "dossier",
    "accuracy_against",
    *PLANS,
)
SCHEMA_VERSION = 1
LARGEST_BYTES = 64 * 2**20
DEEPEST = 40


@dataclass(frozen=True, slots=True)
class Document:
    """An object of a document; ``where`` names its file and key, ``asked`` has the keys that were looked at so far."""

    values: Mapping[str, Any]
    where: str
    asked: set[str] = field(default_factory=set, compare=False, repr=False)

    def __contains__(self, key: str) -> bool:
        self.asked.add(key)
        return self.values.get(key) is not None

    def text(self, key: str, default: str = "") -> str:
        """Text under ``key``; numbers and booleans count as text, absent and null give ``default``."""
        value = self._value(key, lambda value: not isinstance(value, list | dict), "a text")
        return default if value is None else clean(str(value))

    def number(self, key: str) -> float | None:
        """Number under ``key``, None where it is absent or null."""
        number: float | None = self._value(key, is_number, "a number")
        return number

    def flag(self, key: str) -> bool | None:
        """True or false under ``key``, None where it is absent or null."""
        flag: bool | None = self._value(key, lambda value: isinstance(value, bool), "true or false")
        return flag

    def part(self, key: str) -> Document:
        """The object under ``key``, an empty one where it is absent or null."""
        value = self._value(key, lambda value: isinstance(value, dict), "an object")
        return Document(value or {}, f"{self.where}: {_name(key)}")

    def parts(self, key: str) -> list[Document]:
        """The objects listed under ``key``."""
        listed = self._value(key, lambda value: isinstance(value, list), "a list of objects") or []
        for index, item in enumerate(listed):
            if not isinstance(item, dict):
                raise self._wrong(f"{key}[{index}]", "an object")
        return [Document(item, f"{self.where}: {_name(key)}[{index}]") for index, item in enumerate(listed)]

    def numbers(self, key: str) -> list[float]:
        """The numbers listed under ``key``."""
        value = self._value(
            key, lambda value: isinstance(value, list) and all(map(is_number, value)), "a list of numbers"
        )
        return value or []

    def texts(self, key: str) -> list[str]:
        """The texts listed under ``key``; a single text counts as a list of one."""
        value = self._value(key, lambda value: True, "")
        listed = value if isinstance(value, list) else [value]
        if any(isinstance(item, list | dict) for item in listed):
            raise self._wrong(key, "a list of texts")
        return [clean(str(item)) for item in listed if item is not None]

    def without(self, keys: Iterable[str]) -> dict[str, Any]:
        """The values under all other keys."""
        left = frozenset(keys)
        return {key: value for key, value in self.values.items() if key not in left}

    def _value(self, key: str, fits: Callable[[Any], bool], wanted: str) -> Any:
        """The value under ``key`` if it fits, None where it is absent or null."""
        self.asked.add(key)
        value = self.values.get(key)
        if value is not None and not fits(value):
            raise self._wrong(key, wanted)
        return value

    def _wrong(self, key: str, wanted: str) -> UsageError:
        key = _name(key)
        return UsageError(f"{self.where}: {key} is not {wanted}; rebuild the file with the command that wrote it")


def _name(key: str) -> str:
    """``key`` in one line; a damaged file may hold any."""
    return " ".join(clean(key).split())


def read_document(path: Path) -> Document:
    """Read a document that a command saved, such as ``audit.json``.

    Raises:
        UsageError: no such file, not JSON, or no document of a kind and version known here.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a pipe could wait forever
            raise UsageError(f"{path}: not a regular file; give a run folder or a saved document")
        if status.st_size > LARGEST_BYTES:
            raise UsageError(f"{path}: larger than {LARGEST_BYTES // 2**20} MiB; no command writes such a document")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}); give a run folder or a saved document") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON ({' '.join(str(error).split())[:120]}); give a saved document") from error
    document = checked(value, str(path))
    if document.values["kind"] == QUALIFY:
        check_document(document.values, str(path))
    return document


def checked(value: Any, where: str = "document") -> Document:
    """``value`` as a document, whole enough to be shown.

    Raises:
        UsageError: it is not of a kind and version known here.
    """
    if not isinstance(value, dict) or value.get("kind") not in KINDS:
        kind = value.get("kind") if isinstance(value, dict) else None
        raise UsageError(f"{where}: kind {kind!r:.80} is none of {', '.join(KINDS)}; give a saved document")
    if value.get("schema_version") != SCHEMA_VERSION:
        version = value.get("schema_version")
        raise UsageError(f"{where}: schema_version {version!r:.80}; this megatoken reads {SCHEMA_VERSION}")
    if deeper_than(value, DEEPEST):
        raise UsageError(f"{where}: nested more than {DEEPEST} deep; no command writes such a document")
    return Document(plain(value), where)


def document_in(folder: Path) -> Path:
    """The one saved document of ``folder``. Raises UsageError: there is none, or there are several to choose from."""
    found = [path for kind in KINDS if (path := folder / f"{kind}.json").is_file()]
    if not found:
        raise UsageError(
            f"{folder}: neither a run folder (result.json) nor a folder with a saved document ({KINDS[0]}.json, ...)"
        )
    if len(found) > 1:
        raise UsageError(f"{folder}: holds {', '.join(path.name for path in found)}; give the file to be shown")
    return found[0]
