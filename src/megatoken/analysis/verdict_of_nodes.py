"""The verdict of a rack whose nodes each had a LoadGen, from the verdicts of the nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatoken.runs.reasons import Reason, on_node, reason
from megatoken.runs.run import Run, Verdict


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
