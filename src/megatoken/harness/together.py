"""One result of several nodes that had a LoadGen each; pure functions, as those of ``harness.result``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from megatoken.analysis.aggregation import aggregate, aggregate_fields
from megatoken.analysis.machine import unix_seconds, utc_text
from megatoken.analysis.nodes import offsets_words, run_node_rows
from megatoken.errors import UsageError
from megatoken.runs.reasons import Reason, on_node, reason
from megatoken.runs.run import NODES, Run, Verdict
from megatoken.runs.tables import joined_runs

if TYPE_CHECKING:
    import pyarrow as pa


def node_starts(runs: Mapping[str, Run], offsets: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Unix time at which each node started, by the driver's clock.

    ``runs``: of the nodes that finished, by name. ``offsets``: ``rack.clock_offsets``; a node without one has the
    driver's clock.

    Raises:
        UsageError: a run does not say when it started.
    """
    ahead = {one["node"]: one["wall_seconds"] for one in offsets}
    starts = {}
    for name, run in runs.items():
        started = unix_seconds(run.result.get("started_at"))
        if started is None:
            raise UsageError(f"{run.path}: started_at is missing or is not a date")
        starts[name] = started - ahead.get(name, 0.0)
    return starts


def joined_tables(runs: Mapping[str, Run], starts: Mapping[str, float]) -> tuple[pa.Table, pa.Table]:
    """Requests and series of all nodes, with times from the start of the first node."""
    first = min(starts.values())
    return joined_runs([(run.requests, run.series, starts[name] - first) for name, run in runs.items()])


def gathered(
    facts: Mapping[str, Any],
    runs: Mapping[str, Run],
    silent: Mapping[str, str],
    offsets: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Fields of ``result.json`` about the nodes together, whether the run finished or not.

    ``facts``: fields of ``result.json`` that are known by then. ``runs``: of the nodes that finished, by name.
    ``silent``: why the others were lost. ``offsets``: ``rack.clock_offsets``.
    """
    starts = node_starts(runs, offsets)
    first = min(starts.values(), default=0.0)
    planned, left = sum(node["replicas"] for node in facts["rack_nodes"]), replicas_left(runs)
    return {
        "started_at": utc_text(datetime.fromtimestamp(first, UTC)) if runs else None,
        "rack": {
            "replicas": planned,
            "replicas_least": left,
            "replicas_at_end": sum(run.result["rack"]["replicas_at_end"] for run in runs.values()),
            "share_left": left / planned,
            "lost": [
                *({"node": name, "replica": None, "cause": cause} for name, cause in silent.items()),
                *(loss for run in runs.values() for loss in run.result["rack"]["lost"]),
            ],
            "joined": [joined for run in runs.values() for joined in run.result["rack"]["joined"]],
            "clock_offsets": list(offsets),
            "start_spread_seconds": max(starts.values(), default=0.0) - first,
        },
        "node_verdicts": {
            node["node"]: runs[node["node"]].verdict if node["node"] in runs else None for node in facts["rack_nodes"]
        },
    }


def concluded_nodes(facts: Mapping[str, Any], runs: Mapping[str, Run]) -> dict[str, Any]:
    """What the end of all nodes adds to ``result.json``: verdict, reasons, notes and ``aggregate``.

    ``facts``: fields of ``result.json`` that are known by then, those of ``gathered`` too. ``runs``: of the nodes that
    finished, by name; at least one.
    """
    rack, common = facts["rack"], facts["notes"]
    verdict, reasons = verdict_of_nodes(runs, rack["replicas"], rack["lost"])
    starts = node_starts(runs, rack["clock_offsets"])
    rows = [
        replace(row, started_seconds=starts[name], source=f"{NODES}/{name}")
        for name, run in runs.items()
        for row in run_node_rows(run)
    ]
    try:
        together = aggregate_fields(aggregate(rows, clocks=offsets_words(rack["clock_offsets"])))
    except UsageError:
        together = None  # a node completed nothing
    own = [on_node(note, name) for name, run in runs.items() for note in run.result["notes"] if note not in common]
    return {
        "verdict": verdict,
        "reasons": reasons,
        "notes": [*common, *own],
        "rules_unmet": shortfalls_of_nodes({name: run.rules_unmet for name, run in runs.items()}),
        "doubts": shortfalls_of_nodes({name: run.doubts for name, run in runs.items()}),
        "aggregate": together,
    }


def replicas_left(runs: Mapping[str, Run]) -> int:
    """The lowest number of replicas, summed over the nodes; a lost node has none."""
    return sum(run.result["rack"]["replicas_least"] for run in runs.values())


def verdict_of_nodes(
    runs: Mapping[str, Run], planned: int, lost: Sequence[Mapping[str, Any]]
) -> tuple[Verdict, list[Reason]]:
    """The verdict of all nodes, and its reasons, from the runs of the nodes that finished, by name.

    ``planned`` is the number of replicas that all nodes should have; an entry of ``lost`` (``rack.lost``) without a
    replica is a whole node.
    """
    reasons = shortfalls_of_nodes({name: run.reasons for name, run in runs.items()})
    verdicts = {run.verdict for run in runs.values()}
    left = replicas_left(runs)
    if left < planned:
        losses = [f"{loss['node']} ({loss['cause']})" for loss in lost if loss["replica"] is None] or None
        counts = {"replicas": planned, "replicas_least": left, "share_left": left / planned}
        reasons.insert(0, reason("LOST_REPLICAS", **counts, losses=losses))
    if Verdict.INVALID in verdicts:
        return Verdict.INVALID, reasons
    if Verdict.INTERRUPTED in verdicts or left < planned:
        return Verdict.DEGRADED, reasons
    return (Verdict.VALID if verdicts == {Verdict.VALID} else Verdict.MEASURED), reasons


def shortfalls_of_nodes(found: Mapping[str, Sequence[Reason]]) -> list[Reason]:
    """The reasons of single nodes, with their names."""
    return [on_node(one, name) for name, ones in found.items() for one in ones]
