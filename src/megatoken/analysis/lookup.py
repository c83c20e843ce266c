"""The runs that a path stands for: a run folder, repeats of one test, or a folder with several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from megatoken.analysis.contradictions import check_rates
from megatoken.errors import UsageError
from megatoken.runs.run import CONFIG, RESULT, Run, read_run

_Item = TypeVar("_Item")
_Found = TypeVar("_Found")

DEEPEST = 4  # folders between a path and its runs: runs/ of a machine, of a month, and their repeats


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A run folder that is damaged or contradicts itself, and the line that says how."""

    path: Path
    why: str


def run_folders(path: Path) -> list[Path]:
    """The run folder ``path``, or all that lie below it, sorted; none if there are none.

    Hidden folders are left out, and what lies inside a run folder is part of that run. A link to a run folder is one,
    but none is named twice; a link to any other folder is not followed.

    Raises:
        UsageError: a folder below ``path`` cannot be read.
    """
    found: dict[Path, Path] = {}
    try:
        for folder in _below(path, 0):
            found.setdefault(folder.resolve(), folder)
    except OSError as error:
        where = error.filename or path
        raise UsageError(f"{where}: cannot be read ({error.strerror}); name the run folders directly") from error
    return list(found.values())


def read_runs(path: Path) -> list[Run]:
    """The run folder ``path``, or all below it.

    Raises:
        UsageError: there is none, or one is damaged or contradicts itself.
    """
    return [read_consistent_run(folder) for folder in _some_folders(path)]


def read_each(paths: Sequence[Path]) -> list[Run | Unreadable]:
    """The run folders ``paths``, or all below them, once each; those that cannot be read in their places.

    Raises:
        UsageError: a path has no run folder, or none of the folders can be read.
    """
    folders = dict.fromkeys(folder for path in paths for folder in _some_folders(path))
    found = [_read_or_say(folder) for folder in folders]
    if not any(isinstance(one, Run) for one in found):
        raise UsageError("; ".join(one.why for one in found if isinstance(one, Unreadable)))
    return found


def _read_or_say(folder: Path) -> Run | Unreadable:
    try:
        return read_consistent_run(folder)
    except UsageError as error:
        return Unreadable(folder, str(error))


def readable(items: Iterable[_Item], read: Callable[[_Item], _Found]) -> tuple[list[_Found], list[str]]:
    """What ``read`` makes of the items, and of each damaged run folder the line that says why it cannot be read.

    Raises UsageError: none can be read, or an item has no run folder.
    """
    found, damaged = [], []
    for item in items:
        try:
            found.append(read(item))
        except UsageError as error:
            if not run_folders(Path(str(item))):  # a name that was mistyped is no damage
                raise
            damaged.append(str(error))
    if not found:
        raise UsageError("; ".join(damaged))
    return found, damaged


def _some_folders(path: Path) -> list[Path]:
    folders = run_folders(path)
    if not folders:
        what = "no run folder and none below it" if path.is_dir() else "no such folder"
        what = "a file, not a run folder" if path.is_file() else what
        raise UsageError(f"{path}: {what}; give a run folder, such as runs/20261120T091233Z-offline-tiny, or runs/")
    return folders


def read_consistent_run(folder: Path) -> Run:
    """A run folder whose rates are consistent.

    Raises:
        UsageError: it is damaged, or its rates contradict its other fields.
    """
    run = read_run(folder)
    check_rates(run)
    return run


def _below(path: Path, depth: int) -> Iterator[Path]:
    # Near the given path, result.json alone is a run, though a damaged one; deeper it may be another tool's file.
    if (path / RESULT).is_file() and (depth < 2 or (path / CONFIG).is_file()):
        yield path
    elif depth < DEEPEST and path.is_dir() and not (depth and path.is_symlink()):
        for folder in sorted(path.iterdir()):
            if not folder.name.startswith("."):
                yield from _below(folder, depth + 1)


def names_of(runs: Sequence[Path]) -> list[str]:
    """Short unique names of run folders: as many of the last parts of their paths as needed."""
    parts = [path.absolute().parts for path in runs]
    for count in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(path[-count:]) for path in parts]
        if len(set(names)) == len(set(parts)):
            return names
    return [str(path) for path in runs]
