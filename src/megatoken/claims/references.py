"""Resolve the arguments of aggregate and compare: folders, published ids, accelerators, claims."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from megatoken.analysis.aggregation import aggregate
from megatoken.analysis.comparison import Entry
from megatoken.analysis.entries import accelerator_entry, aggregate_entry, published_entry, run_entry
from megatoken.analysis.lookup import run_folders
from megatoken.analysis.nodes import NodeRow, run_node_rows
from megatoken.analysis.published import SUBMISSION_ID, published_result
from megatoken.analysis.repeats import missing_notes
from megatoken.audit.documents import system_next_to
from megatoken.audit.evidence import Evidence, node_rows
from megatoken.claims.facts import gather
from megatoken.claims.schema import load_claims
from megatoken.errors import UsageError
from megatoken.runs.run import Run, read_run

Reader = Callable[[Path], Evidence]


def aggregation_folders(paths: Iterable[Path]) -> list[Path]:
    """The run folders at or below each path; a path without any stands for itself. Raises UsageError: no folder."""
    return [folder for path in paths for folder in (_folders(path) or [path])]


def aggregation_rows(paths: Sequence[Path], read: Reader) -> list[NodeRow]:
    """The nodes below ``paths``: run folders, folders of run folders, and folders of LoadGen logs.

    Raises UsageError: a path contains neither, or logs of several results.
    """
    rows: list[NodeRow] = []
    for path in paths:
        runs = _runs(path)
        rows += [row for run in runs for row in run_node_rows(run)] if runs else _log_rows(path, read(path))
    return rows


def comparison_entry(reference: str, read: Reader, *, benchmark: str, scenario: str) -> Entry:
    """One result to compare.

    Args:
        reference: a run folder; a folder of repeats; a folder of LoadGen logs;
            ``CLAIMS.yaml#id``; ``5.1-0008`` or ``5.1-0008:benchmark:scenario``; an accelerator, ``GB200`` or
            ``GB200@v5.1``.
        read: reads LoadGen logs.
        benchmark: benchmark of published rows if the reference names none, ``llama2-70b``.
        scenario: scenario of published rows if the reference names none, ``Offline``.

    Raises UsageError: the reference is none of these, or has no rate.
    """
    path = Path(reference)
    if path.is_dir():
        runs = _runs(path)
        if not runs:
            return _logs_entry(path, read(path))
        entry = run_entry(runs, reference)
        return replace(entry, note="; ".join(filter(None, (*missing_notes(path, runs), entry.note))) or None)
    file, hash_sign, claim = reference.rpartition("#")
    if hash_sign:
        return _claim_entry(Path(file), claim)
    submission, *rest = reference.split(":")
    if SUBMISSION_ID.fullmatch(submission) and len(rest) in (0, 2):
        return published_entry(published_result(submission, *(rest or (benchmark, scenario))))
    if path.exists():
        raise UsageError(f"{reference}: a file; give the folder, or CLAIMS.yaml#id for a claim")
    if re.search(r"[/\\]", reference):
        raise UsageError(f"{reference}: no such folder")
    return accelerator_entry(reference, benchmark, scenario)


def _runs(path: Path) -> list[Run]:
    """The run folder ``path``, or the run folders below it."""
    return [read_run(folder) for folder in _folders(path)]


def _folders(path: Path) -> list[Path]:
    if not path.is_dir():
        raise UsageError(f"{path}: no such folder")
    return run_folders(path)


def _log_rows(path: Path, evidence: Evidence) -> list[NodeRow]:
    if evidence.kind == "submission" and len(evidence.performance_runs) > 1:
        raise UsageError(f"{path}: contains {len(evidence.performance_runs)} results; give the folder of one of them")
    rows = node_rows(evidence)
    if not rows:
        raise UsageError(f"{path}: neither run folders nor LoadGen logs of a performance run with a rate")
    return rows


def _logs_entry(path: Path, evidence: Evidence) -> Entry:
    if not evidence.systems and (system := system_next_to(path)) is not None:
        runs = tuple(replace(run, system=system.path) for run in evidence.runs)
        evidence = replace(evidence, systems=(system,), runs=runs)
    result = aggregate(_log_rows(path, evidence), inputs=[str(path)])
    facts = gather(evidence)
    entry = aggregate_entry(result, str(path), state="unverified", accelerator=facts.accelerator)
    return replace(entry, division=facts.division, precision=facts.text("config.precision"), nodes=facts.node_count)


def _claim_entry(file: Path, name: str) -> Entry:
    claims = load_claims(file)
    claim = next((claim for claim in claims.claims if claim.id == name), None)
    if claim is None:
        raise UsageError(f"{file} has no claim {name}; it has {', '.join(one.id for one in claims.claims)}")
    if not isinstance(claim.value, float) or claim.tokens_per_second is None:
        raise UsageError(f"{file}#{name}: only a claim in tokens/s can be compared, got {claim.value} {claim.unit}")
    return Entry(
        name=f"{file.name}#{name}",
        source=f"{claims.source}: {claim.text}",
        state="claimed",
        output_tokens_per_second=claim.value * claim.tokens_per_second,
        accelerators=claim.accelerators or (1 if claim.scope == "gpu" else None),
        nodes=1 if claim.scope == "node" else None,
        racks=1 if claim.scope == "rack" else None,
    )
