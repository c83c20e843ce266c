"""What the document of a sweep says that its run folders do not give."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatoken.audit.differences import Difference, differences
from megatoken.files import UnreadableError, mappings, plain
from megatoken.mlperf.endpoints import judged_sweep
from megatoken.runs.run import read_run

POINTS = ("points", "shared_points")
APART = {"created_at", "inputs", "title", "name", "notes", "rules", "message"}  # times, places and sentences


def listed_runs(stored: Mapping[str, Any], folder: Path) -> list[Path]:
    """The run folders in ``folder`` that the document was made from. Raises UnreadableError if it names none."""
    names = stored.get("inputs")
    if not isinstance(names, list) or not names:
        raise UnreadableError("names no runs")
    return [folder / Path(str(name)).name for name in names]


def unlike_its_runs(stored: Mapping[str, Any], folders: Sequence[Path]) -> Iterator[str]:
    """Each field that the run folders give otherwise, those of a point after the name of its run.

    Raises:
        MegatokenError: a run folder is damaged.
    """
    if missing := [folder.name for folder in folders if not folder.is_dir()]:
        yield f"missing: {', '.join(missing)}"
        return
    runs = list(map(read_run, folders))
    again = plain(judged_sweep(runs, folders[0].parent.name))
    for key in POINTS:
        yield from _unlike_points(mappings(stored.get(key)), again.pop(key, []))
    yield from map(str, _written(stored, again))


def _unlike_points(stored: Sequence[Mapping[str, Any]], again: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if len(stored) != len(again):
        yield str(Difference("number of points", len(stored), len(again)))
        return
    for one, other in zip(stored, again, strict=True):
        yield from (f"point {other['run']}: {found}" for found in _written(one, other))


def _written(stored: Mapping[str, Any], again: Mapping[str, Any]) -> Iterator[Difference]:
    """The differing fields of those that were written; another version writes others."""
    yield from differences(stored, {key: value for key, value in again.items() if key in stored}, ignoring=APART)
