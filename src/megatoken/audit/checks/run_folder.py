"""A run folder of megatoken: the numbers of result.json computed again from the raw rows, and against LoadGen's log."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatoken.audit.discovery import Tree, natural
from megatoken.audit.evidence import Run, Where
from megatoken.audit.finding import Observation, Severity, shown
from megatoken.audit.reading import display
from megatoken.audit.view import observe
from megatoken.errors import MegatokenError
from megatoken.results import Verdict, read_run, summarise
from megatoken.results.run_folder import REQUESTS, RESULT

FINISHED = (Verdict.MEASURED, Verdict.VALID, Verdict.INVALID)
SAME = 1e-9  # relative; the same arithmetic on the same rows
LOGGED = 1e-4  # LoadGen's clock runs until it has been told of the last sample, and its rates have six digits
_FROM_LOG = {
    "loadgen_output_tokens_per_second": "output_tokens_per_second",
    "loadgen_samples_per_second": "samples_per_second",
    "loadgen_version": "loadgen_version",
}


def run_folders_in(tree: Tree) -> list[str]:
    """Folders that look like run folders of megatoken."""
    names = (path.removesuffix(RESULT) for path in tree.files if path == RESULT or path.endswith(f"/{RESULT}"))
    return sorted((name.rstrip("/") for name in names if f"{name}{REQUESTS}" in tree.files), key=natural)


def check_run_folder(tree: Tree, path: str, runs: Sequence[Run]) -> Iterator[Observation]:
    """One run folder.

    Args:
        tree: all files.
        path: the folder in it.
        runs: all runs that LoadGen logged; those below the folder are its own.
    """
    prefix = f"{display(path)}/" if path else ""
    where = (Where(prefix + RESULT), Where(prefix + REQUESTS))
    logged = next((run for run in runs if f"{run.path}/".startswith(prefix)), None)
    try:
        folder = read_run(tree.path(path))
        again = summarise(
            folder.requests, folder.series, scenario=folder.result["scenario"], finished=folder.verdict in FINISHED
        )
    except MegatokenError as error:
        yield observe("run_folder.whole", False, "a whole run folder", shown(str(error)), where)
        return
    except Exception as error:  # rows that no run writes can break any step of the arithmetic
        found = shown(f"{type(error).__name__}: {error}")
        yield observe("run_folder.whole", False, "rows and numbers that can be computed with", found, where)
        return
    yield observe("run_folder.whole", True, "a whole run folder", f"{len(folder.requests):,} rows", where)
    result = folder.result
    differing = sorted(name for name, value in again.items() if name in result and not _same(result[name], value))
    yield observe(
        "run_folder.metrics",
        not differing,
        shown("; ".join(f"{name} {again[name]}" for name in differing)) or "the numbers that its raw rows give",
        shown("; ".join(f"{name} {result[name]}" for name in differing)) or f"{len(again)} metrics agree",
        where,
    )
    if logged is not None and folder.verdict in FINISHED:
        yield from _against_log(result, logged, where)


def _against_log(result: Mapping[str, Any], logged: Run, where: tuple[Where, ...]) -> Iterator[Observation]:
    figures = logged.figures
    differing = [
        name
        for name, attribute in _FROM_LOG.items()
        if result.get(name) is not None and not _same(result[name], getattr(figures, attribute))
    ]
    yield observe(
        "run_folder.loadgen",
        not differing,
        "LoadGen's own numbers as its log has them",
        shown("; ".join(f"{name} {result[name]}" for name in differing)) or "the same",
        (*where, logged.where()),
    )
    tokens, samples = result.get("output_tokens"), result.get("samples_completed")
    if figures.output_tokens is not None and isinstance(tokens, int) and result.get("mode") == "performance":
        yield observe(
            "run_folder.tokens",
            samples == figures.samples_issued and abs(tokens - figures.output_tokens) <= LOGGED * max(tokens, 1),
            f"{figures.samples_issued:,} samples and about {figures.output_tokens:,.0f} tokens, as LoadGen counted",
            f"{samples} samples and {tokens:,} tokens",
            (*where, logged.where("result_tokens_per_second")),
            Severity.FAIL,
        )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return all(_same(one.get(key), value) for key, value in other.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, int | float) and isinstance(other, int | float) and not isinstance(one, bool):
        return math.isclose(one, other, rel_tol=SAME, abs_tol=1e-12)
    return bool(one == other)
