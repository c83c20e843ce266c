"""What a megatoken run folder tells of a rack: its replicas, and what its nodes did together."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatoken.audit.discovery import Tree, below
from megatoken.audit.evidence import Where
from megatoken.audit.finding import Observation, shown
from megatoken.audit.reading import mapping
from megatoken.audit.view import observe
from megatoken.errors import UsageError
from megatoken.results import Run, Verdict, read_run
from megatoken.results.aggregation import aggregate, aggregate_fields
from megatoken.results.machine import simulated_gpu, unix_seconds
from megatoken.results.nodes import NodeRow, offsets_words, run_node_rows
from megatoken.results.numerals import count_of
from megatoken.results.run import NODES, REQUESTS, RESULT, SERIES
from megatoken.results.series import numbers, replicas
from megatoken.results.tables import joined_runs

SAME = 1e-9  # relative; the same arithmetic on the same rows
ROUNDING = 1e-4  # relative, of rates and times; dates have whole microseconds
ROUNDING_SECONDS = 1e-5
IN_WORDS = {
    *("notes", "sum_label", "basis", "reason", "formula", "coefficient_of_variation_formula"),
    *("statement", "observations"),
}  # which other versions word otherwise


def check_replicas(folder: Run, where: tuple[Where, ...]) -> Iterator[Observation]:
    """``rack_nodes`` and ``rack``, of a run that came to its end without going on after an interruption.

    A killed process may have written rows of replicas that joined after it last told of them, and a soak that went on
    tells of the nodes that it has since.
    """
    result, again = folder.result, mapping(folder.result.get("soak")).get("interruptions")
    absent = [name for name in ("rack", "rack_nodes") if not result.get(name)]
    asked = mapping(folder.config.get("rack")).get("cluster") is not None or "ray" in mapping(result.get("target"))
    nothing_served = not len(folder.requests)  # as of a search that found no rate, which tells of its nodes alone
    if folder.verdict is Verdict.INTERRUPTED or again or (absent and (nothing_served or not asked)):
        return
    if absent:
        yield observe(
            "run_folder.replicas", False, "what a rack tells of itself", f"no {' and no '.join(absent)}", where
        )
        return
    problems, expected = [*_replicas(folder)], f"as many replicas as {SERIES} has, but for what was lost"
    found = shown("; ".join(problems)) or f"{count_of(result['rack']['replicas'], 'replica')}, all there"
    yield observe("run_folder.replicas", not problems, expected, found, where)


def _replicas(folder: Run) -> Iterator[str]:
    rack, pages = folder.result["rack"], numbers(folder.series["pages"])
    told = {entry["node"]: entry["replicas"] for entry in folder.result["rack_nodes"]}
    places = {(node, number): bool(pages[rows].any()) for node, number, rows in replicas(folder.series)}
    counted = Counter(node for node, _ in places)
    if mapping(folder.result.get("target")).get("count") == "per_node" and sum(told.values()) != rack["replicas"]:
        told = {node: told.get(node, 0) for node in counted}  # the folder of one node tells of the others too
    planned = sum(told.values())
    if planned != rack["replicas"]:
        yield f"rack_nodes have {count_of(planned, 'replica')}, rack.replicas {rack['replicas']}"
    least, at_end, joined = rack["replicas_least"], rack["replicas_at_end"], len(rack["joined"])
    if not 0 <= least <= at_end <= rack["replicas"] + joined:
        yield f"replicas_least {least}, replicas_at_end {at_end} of {rack['replicas']} and {joined} that joined"
    if not math.isclose(rack["share_left"], least / rack["replicas"], rel_tol=SAME):
        yield f"share_left {rack['share_left']}, replicas_least {least} of {rack['replicas']}"
    target = mapping(folder.result.get("target"))
    ranks = target.get("tensor_parallel") or 1
    without = target.get("device") == "cpu" or simulated_gpu(folder) is not None
    for entry in folder.result["rack_nodes"]:
        if entry["gpus"] != (0 if without else entry["replicas"] * ranks):
            yield f"{entry['node']} has {count_of(entry['gpus'], 'GPU')}, {entry['replicas']} replicas of {ranks} each"
    absent = planned - len(places)
    if counted.keys() == told.keys():  # else a node that came may have taken over what another had
        absent = sum(max(0, planned_here - counted[node]) for node, planned_here in told.items())
    if absent > rack["replicas"] - least:
        yield f"{count_of(absent, 'replica')} of rack_nodes without rows in {SERIES}"
    # One that was lost before the start has rows without pages.
    served, lost = sum(places.values()), {(loss.get("node"), loss.get("replica")) for loss in rack.get("lost", ())}
    if served > at_end + len(lost):
        yield f"{served} replicas served in {SERIES}, rack.replicas_at_end {at_end} and {len(lost)} lost"


def check_together(tree: Tree, path: str, folder: Run, where: tuple[Where, ...]) -> Iterator[Observation]:
    """The rows of nodes that had a LoadGen each, against those of the whole; ``aggregate``, computed from them again.

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
        yield _aggregate(folder, run_node_rows(folder), None, SAME, where)
        return
    try:
        nodes = [*_nodes(tree, path, folder)]
    except UsageError as error:  # run_folder.whole and run_folder.loadgen say so too
        yield observe("run_folder.node_rows", None, "the run folder of each node", shown(str(error)), where)
        return
    problems = [*_unlike_nodes(folder, nodes)]
    found = shown("; ".join(problems)) or f"{count_of(len(nodes), 'node')}, all rows the same"
    yield observe("run_folder.node_rows", not problems, "the rows of its nodes, one after the other", found, where)
    first = unix_seconds(result["started_at"])
    rows = [
        replace(row, started_seconds=None if first is None else first + after, source=f"{NODES}/{name}")
        for name, own, after in nodes
        for row in run_node_rows(own)
    ]
    yield _aggregate(folder, rows, offsets_words(result["rack"]["clock_offsets"]), ROUNDING, where)


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
        if name not in IN_WORDS and (name not in again or not _same(told.get(name, ...), again[name], tolerance))
    ]
    unlike = "; ".join(f"{name} {told[name]}" if name in told else f"no {name}" for name in differing)
    return observe(
        "run_folder.aggregate",
        not differing,
        shown("; ".join(f"{name} {again.get(name)}" for name in differing)) or "what the rows of its nodes give",
        shown(unlike if told else "no aggregate") if differing else f"{count_of(len(again), 'field')}, all the same",
        where,
    )


def _nodes(tree: Tree, path: str, folder: Run) -> Iterator[tuple[str, Run, float]]:
    """Each node that came to its end: name, run, and seconds from the start of all to its own.

    Raises:
        UsageError: one is not there or damaged.
    """
    begun = numbers(folder.requests["scheduled_seconds"])
    for name, verdict in folder.result["node_verdicts"].items():
        if verdict is None:
            continue
        there = below(path, f"{NODES}/{name}")
        if f"{there}/{RESULT}" not in tree.files:  # a name may lead elsewhere
            raise UsageError(f"no {NODES}/{name}")
        own = read_run(tree.path(there))
        block, begun = begun[: len(own.requests)], begun[len(own.requests) :]
        scheduled = numbers(own.requests["scheduled_seconds"])
        yield name, own, float(block.min() - scheduled.min()) if len(block) else 0.0


def _unlike_nodes(folder: Run, nodes: Sequence[tuple[str, Run, float]]) -> Iterator[str]:
    """Columns of the whole that are not those of its nodes; times to whole microseconds."""
    requests, series = joined_runs([(own.requests, own.series, after) for _, own, after in nodes])
    for told, again, file in ((folder.requests, requests, REQUESTS), (folder.series, series, SERIES)):
        if len(told) != len(again):
            yield f"{file} has {count_of(len(told), 'row')}, those of the nodes {len(again):,}"
            continue
        for name in told.column_names:
            one, other = (table[name].to_pylist() for table in (told, again))
            if file == SERIES:  # rows of one moment have no order
                one, other = (sorted(values, key=lambda value: (value is not None, value)) for values in (one, other))
            if not all(_same(*pair, SAME, ROUNDING_SECONDS) for pair in zip(one, other, strict=True)):
                yield f"{name} of {file} is not that of the nodes"


def _same(told: Any, again: Any, relative: float, absolute: float = 1e-12) -> bool:
    """Numbers and names, and not what is said of them in words."""
    if isinstance(told, Mapping) and isinstance(again, Mapping):
        known = (told.keys() & again.keys()) - IN_WORDS
        return all(_same(told[name], again[name], relative, absolute) for name in known)
    if isinstance(told, list) and isinstance(again, list):
        return len(told) == len(again) and all(
            _same(*pair, relative, absolute) for pair in zip(told, again, strict=True)
        )
    if isinstance(told, float) and isinstance(again, float):
        alike = math.isclose(told, again, rel_tol=relative, abs_tol=absolute)
        return alike or (math.isnan(told) and math.isnan(again))
    return bool(told == again)
