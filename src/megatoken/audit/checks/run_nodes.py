"""What a megatoken run folder tells of what a rack's nodes did together, with a LoadGen each or with one.

Of nodes with a LoadGen each nobody logged the whole, so rows, times and verdict are put together from theirs again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatoken.analysis.aggregation import aggregate, aggregate_fields
from megatoken.analysis.machine import unix_seconds
from megatoken.analysis.nodes import NodeRow, offsets_words, run_node_rows
from megatoken.analysis.verdict_of_nodes import replicas_left, shortfalls_of_nodes, verdict_of_nodes
from megatoken.audit.discovery import Tree, below
from megatoken.audit.evidence import Where
from megatoken.audit.finding import Observation, Severity, shown
from megatoken.audit.likeness import SAME, same
from megatoken.audit.view import observe
from megatoken.errors import UsageError
from megatoken.files import mapping
from megatoken.runs.reasons import Reason
from megatoken.runs.run import NODES, REQUESTS, RESULT, SERIES, Run, Verdict, read_run
from megatoken.runs.tables import joined_runs
from megatoken.text import count_of

ROUNDING = 1e-4  # relative, of rates and times; dates have whole microseconds
ROUNDING_SECONDS = 1e-5
MOST_OFFSET_SECONDS = 60.0  # of clocks that nobody sets
IN_WORDS = {
    *("notes", "basis", "reason", "formula", "coefficient_of_variation_formula"),
    *("statement", "observations"),
}  # which other versions word otherwise


@dataclass(frozen=True, slots=True)
class _Node:
    """A node that came to its end."""

    name: str
    run: Run
    started: float  # Unix seconds, by the driver's clock
    after: float  # seconds from the start of all


def check_together(tree: Tree, path: str, folder: Run, where: tuple[Where, ...]) -> Iterator[Observation]:
    """Rows, starts and verdicts of nodes that had a LoadGen each, and ``aggregate``, computed from rows again.

    Args:
        tree: all files.
        path: of the folder in it.
        folder: the run.
        where: its files.
    """
    result = folder.result
    apart = "node_verdicts" in result
    if folder.verdict is Verdict.INTERRUPTED or not (apart or len(result["nodes"]) > 1):
        return
    if not apart:
        try:
            rows = run_node_rows(folder)
        except UsageError as error:
            yield observe("run_folder.aggregate", False, "rates that their rows give", shown(str(error)), where)
            return
        yield _aggregate(folder, rows, None, SAME, where)
        return
    try:
        nodes = _nodes(tree, path, folder)
    except UsageError as error:  # run_folder.whole and run_folder.loadgen say so too
        yield observe("run_folder.node_rows", None, "the run folder of each node", shown(str(error)), where)
        return
    yield _rows(folder, nodes, where)
    yield from _starts(folder, nodes, where)
    yield _verdict(folder, nodes, where)
    rows = [
        replace(row, started_seconds=node.started, source=f"{NODES}/{node.name}")
        for node in nodes
        for row in run_node_rows(node.run)
    ]
    yield _aggregate(folder, rows, offsets_words(result["rack"]["clock_offsets"]), ROUNDING, where)


def _nodes(tree: Tree, path: str, folder: Run) -> list[_Node]:
    """Raises UsageError: there is none, or one is not there or damaged."""
    offsets = _offsets(folder)
    runs = {}
    for name, verdict in folder.result["node_verdicts"].items():
        if verdict is None:
            continue
        there = below(path, f"{NODES}/{name}")
        if f"{there}/{RESULT}" not in tree.files:  # a name may lead elsewhere
            raise UsageError(f"no {NODES}/{name}")
        runs[name] = read_run(tree.path(there))
    starts = {}
    for name, run in runs.items():
        started = unix_seconds(run.result.get("started_at"))
        if started is None:
            raise UsageError(f"{NODES}/{name} does not tell when it started")
        starts[name] = started - offsets.get(name, 0.0)
    if not runs:
        raise UsageError("no node that came to its end")
    first = min(starts.values())
    return [_Node(name, run, starts[name], starts[name] - first) for name, run in runs.items()]


def _offsets(folder: Run) -> dict[str, float]:
    return {one["node"]: one["wall_seconds"] for one in folder.result["rack"]["clock_offsets"]}


def _rows(folder: Run, nodes: Sequence[_Node], where: tuple[Where, ...]) -> Observation:
    problems = [*_unlike_rows(folder, nodes)]
    found = shown("; ".join(problems)) or f"{count_of(len(nodes), 'node')}, all rows the same"
    expected = "the rows of its nodes, one after the other, moved by their starts"
    return observe("run_folder.node_rows", not problems, expected, found, where)


def _unlike_rows(folder: Run, nodes: Sequence[_Node]) -> Iterator[str]:
    """Columns of the whole that are not those of its nodes."""
    requests, series = joined_runs([(node.run.requests, node.run.series, node.after) for node in nodes])
    for told, again, file in ((folder.requests, requests, REQUESTS), (folder.series, series, SERIES)):
        if len(told) != len(again):
            yield f"{file} has {count_of(len(told), 'row')}, those of the nodes {len(again):,}"
            continue
        if file == SERIES:  # rows of one moment have no order
            keys = [(name, "ascending") for name in ("node", "replica", "elapsed_seconds")]
            told, again = told.sort_by(keys), again.sort_by(keys)
        for name in told.column_names:
            if not same(told[name].to_pylist(), again[name].to_pylist(), absolute=ROUNDING_SECONDS):
                yield f"{name} of {file} is not that of the nodes"


def _starts(folder: Run, nodes: Sequence[_Node], where: tuple[Where, ...]) -> Iterator[Observation]:
    """When the nodes began, by the driver's clock: whether they ran together rests on it."""
    rack, offsets = folder.result["rack"], _offsets(folder)
    spread = max(node.after for node in nodes)
    started, first = unix_seconds(folder.result.get("started_at")), min(node.started for node in nodes)
    problems = [f"no clock offset of {node.name}" for node in nodes if node.name not in offsets]
    if started is None or abs(started - first) > ROUNDING_SECONDS:
        problems.append(f"started_at {folder.result.get('started_at')}, its first node {_distance(started, first)}")
    if abs(rack["start_spread_seconds"] - spread) > ROUNDING_SECONDS:
        problems.append(f"start_spread_seconds {rack['start_spread_seconds']}, by the nodes {spread:.6f}")
    expected = "starts as the nodes' own dates and the offsets of their clocks give them"
    found = shown("; ".join(problems)) or f"{count_of(len(nodes), 'node')} within {spread:.3g} s"
    yield observe("run_folder.node_starts", not problems, expected, found, where)
    # By an offset as long as one of them, runs that took turns look simultaneous.
    most = min(MOST_OFFSET_SECONDS, *(node.run.result["duration_seconds"] for node in nodes))
    far = [f"{name} {seconds:,.3g} s" for name, seconds in offsets.items() if abs(seconds) > most]
    if far:
        expected = f"clocks of nodes within {most:.3g} s of the driver's, which is no more than any of them ran"
        yield Observation("run_folder.node_starts", Severity.WARN, expected, shown("; ".join(far)), where)


def _distance(started: float | None, first: float) -> str:
    return "at another time" if started is None else f"{first - started:+.6f} s from it"


def _verdict(folder: Run, nodes: Sequence[_Node], where: tuple[Where, ...]) -> Observation:
    """The verdict and what speaks against the run, by what each node says, whose own folder is audited beside it."""
    runs, rack = {node.name: node.run for node in nodes}, folder.result["rack"]
    told_nodes = _planned(folder)
    planned = sum(replicas for replicas, _ in told_nodes.values())
    verdict, reasons = verdict_of_nodes(runs, planned, rack["lost"])
    stated = folder.result["node_verdicts"]
    problems = [
        f"node_verdicts.{name} {stated[name]}, the node says {run.verdict}"
        for name, run in runs.items()
        if stated[name] != run.verdict
    ]
    problems += [f"rack_nodes of {name} are others" for name, run in runs.items() if _planned(run) != told_nodes]
    gone = [name for name, verdict_there in stated.items() if verdict_there is None]
    if stated.keys() != told_nodes.keys():
        problems.append(f"node_verdicts of {', '.join(stated)}, rack_nodes {', '.join(told_nodes)}")
    if sorted(gone) != sorted(loss["node"] for loss in rack["lost"] if loss["replica"] is None):
        problems.append(f"no verdict of {', '.join(gone) or 'none'}, which rack.lost tells otherwise")
    if folder.verdict is not verdict:
        problems.append(f"verdict {folder.verdict}")
    if rack["replicas_least"] != replicas_left(runs):
        problems.append(f"replicas_least {rack['replicas_least']}, of the nodes {replicas_left(runs)}")
    again: Mapping[str, Sequence[Reason]] = {
        "reasons": reasons,
        "rules_unmet": shortfalls_of_nodes({name: run.rules_unmet for name, run in runs.items()}),
        "doubts": shortfalls_of_nodes({name: run.doubts for name, run in runs.items()}),
    }
    for name, shortfalls in again.items():
        told, codes = ([one["code"] for one in ones] for ones in (getattr(folder, name), shortfalls))
        if told != codes:
            problems.append(f"{name} {', '.join(told) or 'none'}; of the nodes {', '.join(codes) or 'none'}")
    grounds = ", ".join(reason["code"] for reason in reasons) or "no reason against it"
    return observe(
        "run_folder.verdict",
        not problems,
        shown(f"{verdict} ({grounds}), which the verdicts of its nodes give"),
        shown("; ".join(problems)) or f"{folder.verdict}, as its nodes",
        where,
    )


def _planned(run: Run) -> dict[str, tuple[int, int]]:
    """Replicas and GPUs of every node of the rack."""
    return {entry["node"]: (entry["replicas"], entry["gpus"]) for entry in run.result.get("rack_nodes") or ()}


def _aggregate(
    folder: Run, rows: Sequence[NodeRow], clocks: str | None, tolerance: float, where: tuple[Where, ...]
) -> Observation:
    try:
        again: Mapping[str, Any] = aggregate_fields(aggregate(rows, clocks=clocks))
    except UsageError:
        again = {}  # a node completed nothing
    told = mapping(folder.result.get("aggregate"))
    differing = [
        name
        for name in {**again, **told}
        if name not in IN_WORDS
        and not same(told.get(name, ...), again.get(name, ...), relative=tolerance, ignoring=IN_WORDS)
    ]
    unlike = "; ".join(f"{name} {told[name]}" if name in told else f"no {name}" for name in differing)
    return observe(
        "run_folder.aggregate",
        not differing,
        shown("; ".join(f"{name} {again.get(name)}" for name in differing)) or "what the rows of its nodes give",
        shown(unlike if told else "no aggregate") if differing else f"{count_of(len(again), 'field')}, all the same",
        where,
    )
