"""The qualification that a new one would replace: it is kept under another name unless the new one holds as much."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatoken.files import free_names, storage_error
from megatoken.report.documents import read_document
from megatoken.text import count_of


@dataclass(frozen=True, slots=True)
class Earlier:
    """A document that was renamed from ``place``, or none was there; its page went with it."""

    place: Path
    kept: Path | None
    values: Mapping[str, Any]

    def settle(self, new: Mapping[str, Any]) -> str:
        """Remove the earlier document if ``new``, which is at its place, has all its tests; else a line on it."""
        if self.kept is None:
            return ""
        if not self.place.exists():  # nothing was written
            _move(self.kept, self.place)
            return ""
        tests = _names(self.values)
        complete = new.get("complete") or not self.values.get("complete")
        if complete and new["device"] == self.values["device"] and tests <= _names(new):
            for path in (self.kept, self.kept.with_suffix(".html")):
                path.unlink(missing_ok=True)
            return ""
        why = "lacks some of them or is of another machine" if new.get("complete") else "was interrupted"
        return f"{self.kept}: the earlier {self.place.name}, {count_of(len(tests), 'test')}; kept, as the new one {why}"


def set_aside(place: Path) -> Earlier:
    """Rename the qualification at ``place`` to ``<name>-older.json``, and its page. Raises StorageError."""
    if not place.is_file():
        return Earlier(place, None, {})
    values = read_document(place).values
    kept = next(free_names(place.with_name(f"{place.stem}-older.json")))
    try:
        _move(place, kept)
    except OSError as error:
        raise storage_error(kept, error) from error
    return Earlier(place, kept, values)


def _move(place: Path, other: Path) -> None:
    place.rename(other)
    with suppress(FileNotFoundError):
        place.with_suffix(".html").rename(other.with_suffix(".html"))


def _names(document: Mapping[str, Any]) -> set[str]:
    return {str(test.get("name")) for test in document["tests"]}
