"""Repeats of a run: what ``repeats.json`` says of them, computed again from their run folders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatoken.analysis.repeats import REPEATS, summarise_repeats
from megatoken.audit.differences import differences
from megatoken.audit.discovery import Tree, below
from megatoken.audit.evidence import Where, places
from megatoken.audit.finding import Outcome, Severity, check, free_of, outcome, shown
from megatoken.errors import MegatokenError
from megatoken.files import UnreadableError, plain, read_json_object
from megatoken.runs.run import RESULT, Verdict, read_run
from megatoken.text import count_of

COMPARED = ("verdict", "verdicts", "metrics", "percentiles", "confidence", "seeds")
MOST_REPEATS = 1_000


@check("run_folder.repeats", "The summary of repeats follows from each of them", "A run may have been left out.")
def check_repeats(tree: Tree) -> Iterator[Outcome]:
    """Every repeats.json."""
    for path in sorted(path for path in tree.files if path.rpartition("/")[2] == REPEATS):
        yield _repeats(tree, path.rpartition("/")[0], places(path))


def _repeats(tree: Tree, folder: str, where: tuple[Where, ...]) -> Outcome:
    expected = "what the run folders next to it give together"
    try:
        stored, _, _ = read_json_object(tree.path(below(folder, REPEATS)))
        names = stored.get("runs")
        if not isinstance(names, list) or not 0 < len(names) <= MOST_REPEATS:
            raise UnreadableError("names no runs")
        runs = [read_run(tree.path(below(folder, str(name)))) for name in names]
        again: Mapping[str, Any] = plain(summarise_repeats(runs, len(runs)))
    except (UnreadableError, MegatokenError) as error:
        return outcome(False, expected, shown(str(error)), where)
    except Exception as error:  # results of no run can break any step of the arithmetic
        return outcome(False, expected, shown(f"{type(error).__name__}: {error}"), where)
    wrong = [name for name in COMPARED if any(differences(stored.get(name), again[name], name))]
    left_out = _left_out(tree, folder, {run.path.name for run in runs})
    found = [f"other {name}" for name in wrong] + [f"{name} is left out" for name in left_out]
    where += places(*(below(folder, name) for name in left_out))
    severity = Severity.FAIL if wrong else Severity.WARN  # a kill can come before this file is written
    return free_of(found, expected, f"{count_of(len(runs), 'run')}, all agree", where, severity)


def _left_out(tree: Tree, folder: str, listed: set[str]) -> list[str]:
    """Finished runs of the same folder that the file does not list."""
    start = below(folder, "") if folder else ""
    present = {path.removeprefix(start).split("/")[0] for path in tree.files if path.startswith(start)}
    paths = {name: below(folder, name) for name in sorted(present - listed)}
    return [name for name, path in paths.items() if f"{path}/{RESULT}" in tree.files and _finished(tree.path(path))]


def _finished(folder: Path) -> bool:
    with suppress(MegatokenError):
        return read_run(folder).verdict is not Verdict.INTERRUPTED
    return False
