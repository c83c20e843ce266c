"""The runs of one result as nodes, for the aggregation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatoken.analysis.nodes import NodeRow
from megatoken.analysis.published import split_benchmark
from megatoken.audit.evidence import Evidence, Run

PERCENTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p97": 0.97, "p99": 0.99, "p99.9": 0.999, "max": 1.0}


def node_rows(evidence: Evidence, runs: Sequence[Run] | None = None) -> list[NodeRow]:
    """The runs of one result that have a rate and a duration: several are nodes, a single one the whole system."""
    runs = evidence.performance_runs if runs is None else runs
    rows = []
    for run in runs:
        figures = run.figures
        if figures.output_tokens_per_second is None or figures.duration_seconds is None:
            continue
        began = figures.began_at
        rows.append(
            NodeRow(
                node=run.node,
                output_tokens_per_second=figures.output_tokens_per_second,
                duration_seconds=figures.duration_seconds,
                output_tokens=figures.output_tokens,
                samples=figures.samples_issued,
                accelerators=_accelerators(evidence, run, alone=len(runs) == 1),
                started_seconds=began.timestamp() if began and began.tzinfo else None,
                progress=_progress(run),
                scenario=figures.scenario,
                model=split_benchmark(run.benchmark)[0] if run.benchmark else None,
                verdict=figures.validity,
                source=str(Path(evidence.root, run.path)),
            )
        )
    return rows


def _progress(run: Run) -> tuple[tuple[float, float], ...]:
    """Completions of an Offline run by its latency percentiles: one query, so latency is the time of completion."""
    figures = run.figures
    known = [(figures.latency_seconds.get(name), share) for name, share in PERCENTILES.items()]
    times = [figures.latency_seconds.get("min"), *(time for time, _ in known)]
    ordered = all(time is not None for time in times) and times == sorted(times)  # type: ignore[type-var]
    if figures.scenario != "Offline" or not ordered or not figures.output_tokens_per_second:
        return ()
    tokens = figures.output_tokens_per_second * (figures.duration_seconds or 0.0)
    first = (times[0] or 0.0, 0.0)
    return ((0.0, 0.0), first, *((time or 0.0, share * tokens) for time, share in known))


def _accelerators(evidence: Evidence, run: Run, *, alone: bool) -> int | None:
    system = evidence.system_of(run)
    each = system.accelerators_per_node if system else None
    return each * (system.nodes or 1) if system and each and alone else each or None
