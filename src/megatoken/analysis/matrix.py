"""What ran where: the best run of each model on each target, out of many run folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatoken.analysis.history import Entry, entry_of
from megatoken.analysis.machine import run_accelerators, simulated_gpu
from megatoken.runs.run import Run, Verdict

Work = tuple[str, str, str]  # model, precision, scenario


@dataclass(frozen=True, slots=True)
class Cell:
    """The fastest of some runs, and how many there are; one that finished comes before an interrupted one."""

    best: Entry
    runs: int


@dataclass(frozen=True, slots=True)
class Matrix:
    """``cells`` by work and target; what was never run has none."""

    works: tuple[Work, ...]
    targets: tuple[str, ...]
    cells: dict[tuple[Work, str], Cell]


def matrix(runs: Sequence[Run]) -> Matrix:
    """The matrix of ``runs``, in any order."""
    found: dict[tuple[Work, str], list[Entry]] = {}
    for run in runs:
        entry = entry_of(run)
        work = (entry.model, entry.precision, entry.scenario)
        found.setdefault((work, _target(run, entry.machine)), []).append(entry)
    return Matrix(
        works=tuple(sorted({work for work, _ in found})),
        targets=tuple(sorted({target for _, target in found})),
        cells={place: Cell(max(entries, key=_rank), len(entries)) for place, entries in found.items()},
    )


def _target(run: Run, machine: str) -> str:
    """What served the requests and on which machine: our engine, a rack of it, or a server over HTTP."""
    urls = (run.config.get("endpoint") or {}).get("urls")
    if urls:
        return f"server {urls}"
    kind = "rack" if (run.config.get("rack") or {}).get("cluster") else "engine"
    on_gpu = simulated_gpu(run) or run_accelerators(run)
    return f"{kind} on {machine}" if on_gpu else f"{kind} on the CPU of {machine}"


def _rank(entry: Entry) -> tuple[bool, float]:
    return entry.verdict is not Verdict.INTERRUPTED, entry.output_tokens_per_second or 0.0
