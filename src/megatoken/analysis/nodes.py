"""Node rows: what one node of a result did, from any kind of log; and the rows of run folders."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatoken.analysis.contradictions import check_arithmetic
from megatoken.analysis.machine import name_of, run_accelerators, unix_seconds
from megatoken.analysis.series import Floats
from megatoken.analysis.statistics import Samples
from megatoken.errors import UsageError
from megatoken.text import natural, precise

if TYPE_CHECKING:
    from megatoken.runs.run import Run

WORKLOAD = ("scenario", "mode", "model", "precision", "data_set")
PROGRESS_POINTS = 1001
HASH_SHOWN = 12  # digits


@dataclass(frozen=True, slots=True)
class NodeRow:
    """What one node did over its own time, from its first sample's start to its last completion.

    ``started_seconds`` is Unix time of that start, None where nothing recorded it. ``progress`` are (seconds since that
    start, output tokens done by then), rising; empty where completion times are unknown. ``accelerators`` is None where
    the node computes on its CPUs or the number is unknown. ``fault_domain`` is the node itself if None.
    """

    node: str
    output_tokens_per_second: float
    duration_seconds: float
    output_tokens: float | None = None
    samples: int | None = None
    accelerators: int | None = None
    started_seconds: float | None = None
    progress: tuple[tuple[float, float], ...] = ()
    fault_domain: str | None = None
    scenario: str | None = None
    model: str | None = None
    precision: str | None = None
    verdict: str | None = None
    source: str = ""
    mode: str | None = None  # performance or accuracy
    data_set: str | None = None  # name and hash of its content
    clock: str | None = None  # of the starts of all rows from ``source``, as text; None: the clock of the node

    @property
    def tokens(self) -> float:
        """Output tokens as counted, or as rate and duration imply."""
        return (
            self.output_tokens_per_second * self.duration_seconds if self.output_tokens is None else self.output_tokens
        )

    @property
    def domain(self) -> str:
        """The set of hardware that fails together."""
        return self.fault_domain or self.node


def run_node_rows(run: Run) -> list[NodeRow]:
    """The nodes of one run folder; they share its clock.

    Raises:
        UsageError: rates of the run contradict its other fields.
    """
    check_arithmetic(run)
    result = run.result
    rack = result.get("rack") or {}
    measured = "start_spread_seconds" in rack
    clock_text = offsets_words(rack["clock_offsets"]) if measured else "the clock of the one driver"
    started = unix_seconds(result.get("started_at"))
    samples = Samples.of(run.requests)
    done = samples.completed
    names = np.asarray(run.requests["node"].to_pylist(), dtype=object)
    origin = float(samples.scheduled.min()) if len(samples) else 0.0
    rows = []
    for node in result.get("nodes", []):
        own = samples.only(done & (names == node["node"]))
        rows.append(
            NodeRow(
                node=node["node"],
                output_tokens_per_second=node["output_tokens_per_second"] or 0.0,
                duration_seconds=node["duration_seconds"],
                output_tokens=node["output_tokens"],
                samples=node["samples_completed"],
                accelerators=run_accelerators(run, node["node"]),
                started_seconds=None if started is None else started + origin,
                progress=progress(own.first - origin, own.last - origin, own.output_tokens),
                scenario=result.get("scenario"),
                model=result.get("model"),
                precision=result.get("precision"),
                verdict=run.verdict.value,
                source=str(run.path),
                mode=result.get("mode"),
                data_set=data_set_of(result.get("data_set"), result.get("data_set_sha256")),
                clock=clock_text,
            )
        )
    return rows


def offsets_words(offsets: Sequence[Mapping[str, Any]]) -> str:
    """Text on the driver's clock, with the worst uncertainty in ``rack.clock_offsets``."""
    worst = max((offset["uncertainty_seconds"] for offset in offsets), default=0.0)
    return f"the driver's clock (offsets of the nodes known within {worst * 1e3:.3g} ms)"


def data_set_of(name: str | None, digest: str | None) -> str | None:
    """A data set by its name and the start of the hash of its content."""
    return f"{name} (SHA-256 {digest[:HASH_SHOWN]})" if digest else name


def progress(first: Floats, last: Floats, output_tokens: Floats) -> tuple[tuple[float, float], ...]:
    """Output tokens done over time [N samples], tokens of a sample evenly spaced between its first and its last.

    A first token at NaN counts as at the time of the last. Returns (seconds, tokens) at evenly spaced times from zero
    to the last completion; empty without samples.
    """
    if not len(last):
        return ()
    first = np.where(np.isfinite(first), np.minimum(first, last), last)
    spans = last - first
    times, position = np.unique(np.concatenate([first, last]), return_inverse=True)
    slopes = np.divide(output_tokens - 1, spans, out=np.zeros_like(spans), where=spans > 0)
    change = np.bincount(position, np.concatenate([slopes, -slopes]), minlength=len(times))
    at_once = np.bincount(position[: len(first)], np.where(spans > 0, 1.0, output_tokens), minlength=len(times))
    spread_out = np.concatenate([[0.0], np.cumsum(np.cumsum(change)[:-1] * np.diff(times))])
    jumps = np.concatenate([[0.0], np.cumsum(at_once)])
    grid = np.linspace(0.0, times[-1], PROGRESS_POINTS)
    tokens = np.interp(grid, times, spread_out) + jumps[np.searchsorted(times, grid, side="right")]
    return tuple(zip(grid.tolist(), tokens.tolist(), strict=True))


def check_rows(rows: Sequence[NodeRow]) -> None:
    """Refuse rows that cannot be one result.

    Raises:
        UsageError: no rows, one without tokens or time, or rows of different work.
    """
    if not rows:
        raise UsageError("no node to aggregate; give run folders or folders of LoadGen logs")
    for row in rows:
        figures = (row.output_tokens_per_second, row.duration_seconds, row.tokens)
        if not all(math.isfinite(figure) and figure > 0 for figure in figures):
            place = row.source or row.node
            raise UsageError(f"{place}: no output tokens were completed in a known time; leave this node out")
    for name in WORKLOAD:
        # LoadGen writes Offline, run folders offline.
        found = {value.lower(): row for row in rows if (value := getattr(row, name)) is not None}
        if len(found) > 1:
            shown = ", ".join(f"{getattr(row, name)} ({row.source or row.node})" for row in found.values())
            raise UsageError(f"nodes of one result must do the same work; these differ in {name}: {shown}")


def distinct(rows: Sequence[NodeRow]) -> list[NodeRow]:
    """The rows under unique names, in natural order: two on one node are two replicas if they ran at once.

    Raises:
        UsageError: a node is given twice and did not run both at once: those are repeats, or one result twice.
    """
    named = []
    for row in rows:
        twins = [other for other in rows if other is not row and other.node == row.node]
        for twin in twins:
            if row.source == twin.source:
                raise UsageError(f"node {row.node} is given twice ({row.source or 'unknown source'}); give it once")
            if not _overlap(row, twin):
                raise _repeats([row, *twins])
        named.append(replace(row, node=f"{row.node} ({row.source})", fault_domain=row.domain) if twins else row)
    return sorted(named, key=lambda row: natural(row.node))


def took_turns(rows: Sequence[NodeRow]) -> bool:
    """Whether there are two rows or more and the clocks show that no two ran at the same time."""
    timed = all(row.started_seconds is not None for row in rows)
    return len(rows) > 1 and timed and not any(_overlap(one, other) for one, other in combinations(rows, 2))


def clock(seconds: float) -> str:
    """Unix seconds as a date and time in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _repeats(rows: Sequence[NodeRow]) -> UsageError:
    """Runs of one node, one after the other, whose rates do not add up."""
    timed = all(row.started_seconds is not None for row in rows)
    verb = "did not all run" if timed else "are not shown to have run"
    shown = ", ".join(f"{name_of(Path(row.source)) if row.source else '-'} {_when(row)}" for row in rows[:3])
    shown += ", ..." if len(rows) > 3 else ""
    return UsageError(
        f"{len(rows)} runs of node {rows[0].node} {verb} at the same time ({shown}): they are repeats, or loads of"
        " a sweep, whose rates do not add up. Give one run of each node, use megatoken report FOLDER for their mean, or"
        " megatoken compare FOLDER OTHER"
    )


def _when(row: NodeRow) -> str:
    if row.started_seconds is None:
        return "at an unknown time"
    return f"from {clock(row.started_seconds)} for {precise(row.duration_seconds)} s"


def _overlap(one: NodeRow, other: NodeRow) -> bool:
    if one.started_seconds is None or other.started_seconds is None:
        return False
    start = max(one.started_seconds, other.started_seconds)
    return start < min(one.started_seconds + one.duration_seconds, other.started_seconds + other.duration_seconds)
