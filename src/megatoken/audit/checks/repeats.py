"""Repeats of a run: what ``repeats.json`` says of them, computed again from their run folders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatoken.analysis.repeats import REPEATS, summarise_repeats
from megatoken.audit.differences import differences
from megatoken.audit.discovery import Tree, below
from megatoken.audit.evidence import Where
from megatoken.audit.finding import Observation, Severity, check, shown
from megatoken.audit.view import observe
from megatoken.errors import MegatokenError
from megatoken.files import UnreadableError, display, plain, read_json_object
from megatoken.runs.run import RESULT, Run, read_run
from megatoken.text import count_of

COMPARED = ("verdict", "verdicts", "metrics", "percentiles", "confidence", "seeds")
MOST_REPEATS = 1_000


check(
    "run_folder.repeats",
    "The summary of repeats follows from each of them",
    "A run that was left out, or another interval, would be believed.",
)(lambda: None)


def check_repeats(tree: Tree) -> Iterator[Observation]:
    """Every repeats.json."""
    for path in sorted(path for path in tree.files if path.rpartition("/")[2] == REPEATS):
        yield from _check(tree, path.rpartition("/")[0], (Where(display(path)),))


def _check(tree: Tree, folder: str, where: tuple[Where, ...]) -> Iterator[Observation]:
    expected = "what the run folders next to it give together"
    try:
        stored, _, _ = read_json_object(tree.path(below(folder, REPEATS)))
        names = stored.get("runs")
        if not isinstance(names, list) or not 0 < len(names) <= MOST_REPEATS:
            raise UnreadableError("names no runs")
        runs = [read_run(tree.path(below(folder, str(name)))) for name in names]
        again: Mapping[str, Any] = plain(summarise_repeats(runs, len(runs)))
    except (UnreadableError, MegatokenError) as error:
        yield observe("run_folder.repeats", False, expected, shown(str(error)), where)
        return
    except Exception as error:  # results of no run can break any step of the arithmetic
        yield observe("run_folder.repeats", False, expected, shown(f"{type(error).__name__}: {error}"), where)
        return
    wrong = [name for name in COMPARED if any(differences(stored.get(name), again[name], name))]
    left_out = _left_out(tree, folder, {run.path.name for run in runs})
    found = [f"other {name}" for name in wrong] + [f"{name} is left out" for name in left_out]
    yield observe(
        "run_folder.repeats",
        not found,
        expected,
        shown("; ".join(found)) or f"{count_of(len(runs), 'run')}, all agree",
        (*where, *(Where(display(below(folder, name))) for name in left_out)),
        Severity.FAIL if wrong else Severity.WARN,  # a kill can come between a run's end and the writing of this file
    )


def _left_out(tree: Tree, folder: str, listed: set[str]) -> list[str]:
    """Finished runs of the same folder that the file does not list."""
    start = below(folder, "") if folder else ""
    present = {path.removeprefix(start).split("/")[0] for path in tree.files if path.startswith(start)}
    names = sorted(name for name in present - listed if below(folder, f"{name}/{RESULT}") in tree.files)
    return [name for name in names if _finished(tree, below(folder, name))]


def _finished(tree: Tree, folder: str) -> bool:
    try:
        run: Run = read_run(tree.path(folder))
    except MegatokenError:
        return False
    return run.verdict != "INTERRUPTED"
