"""What a megatoken run folder tells of a rack: its replicas, and what its nodes did together."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from megatoken.audit.discovery import Tree, below
from megatoken.audit.evidence import Where
from megatoken.audit.finding import Observation, shown
from megatoken.audit.reading import mapping
from megatoken.audit.view import observe
from megatoken.errors import UsageError
from megatoken.results import Run, Verdict, read_run
from megatoken.results.aggregation import aggregate, aggregate_fields
from megatoken.results.machine import unix_seconds
from megatoken.results.nodes import NodeRow, offsets_words, run_node_rows
from megatoken.results.numerals import count_of
from megatoken.results.run import NODES, RESULT, SERIES
from megatoken.results.series import numbers, replicas

SAME = 1e-9  # relative; the same arithmetic on the same rows
ROUNDING = 1e-5  # relative, of times; dates have whole microseconds


def check_replicas(folder: Run, where: tuple[Where, ...]) -> Iterator[Observation]:
    """``rack_nodes`` and ``rack``, of a run that came to its end without going on after an interruption.

    A killed process may have written rows of replicas that joined after it last told of them, and a soak that went on
    tells of the nodes that it has since.
    """
    result, again = folder.result, mapping(folder.result.get("soak")).get("interruptions")
    absent = [name for name in ("rack", "rack_nodes") if not result.get(name)]
    asked = mapping(folder.config.get("rack")).get("cluster") is not None or "ray" in mapping(result.get("target"))
    if folder.verdict is Verdict.INTERRUPTED or again or (absent and not asked):
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
    ranks = mapping(folder.result.get("target")).get("tensor_parallel") or 1
    for entry in folder.result["rack_nodes"]:
        if entry["gpus"] not in (0, entry["replicas"] * ranks):
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


def check_aggregate(tree: Tree, path: str, folder: Run, where: tuple[Where, ...]) -> Iterator[Observation]:
    """``aggregate``, computed again from the rows of the nodes.

    Args:
        tree: all files.
        path: of the folder in it.
        folder: the run.
        where: its files.
    """
    result = folder.result
    apart = "node_verdicts" in result  # each node had a LoadGen of its own
    if folder.verdict is Verdict.INTERRUPTED or not (apart or len(result["nodes"]) > 1):
        return
    try:
        rows = list(_rows_of_nodes(tree, path, folder)) if apart else run_node_rows(folder)
        clocks = offsets_words(result["rack"]["clock_offsets"]) if apart else None
        again: Mapping[str, Any] = aggregate_fields(aggregate(rows, clocks=clocks))
    except UsageError:
        again = {}  # a node completed nothing
    told = mapping(result.get("aggregate"))
    differing = [
        name for name in {**again, **told} if name not in again or not _same(told.get(name, ...), again[name], apart)
    ]
    unlike = "; ".join(f"{name} {told[name]}" if name in told else f"no {name}" for name in differing)
    yield observe(
        "run_folder.aggregate",
        not differing,
        shown("; ".join(f"{name} {again.get(name)}" for name in differing)) or "what the rows of its nodes give",
        shown(unlike if told else "no aggregate") if differing else f"{count_of(len(again), 'field')}, all the same",
        where,
    )


def _rows_of_nodes(tree: Tree, path: str, folder: Run) -> Iterator[NodeRow]:
    """Each node's own row, begun when its samples begin among those of all."""
    first = unix_seconds(folder.result["started_at"])
    nodes, scheduled = np.asarray(folder.requests["node"].to_pylist()), numbers(folder.requests["scheduled_seconds"])
    for name, verdict in folder.result["node_verdicts"].items():
        there = below(path, f"{NODES}/{name}")
        if verdict is None or f"{there}/{RESULT}" not in tree.files:  # a name may lead elsewhere
            continue
        own = read_run(tree.path(there))
        after = float(scheduled[nodes == name].min() - numbers(own.requests["scheduled_seconds"]).min())
        started = None if first is None else first + after
        yield from (replace(row, started_seconds=started, source=f"{NODES}/{name}") for row in run_node_rows(own))


def _same(told: Any, again: Any, apart: bool) -> bool:
    if isinstance(told, Mapping) and isinstance(again, Mapping):
        return told.keys() == again.keys() and all(_same(told[name], again[name], apart) for name in again)
    if isinstance(told, list) and isinstance(again, list):
        return len(told) == len(again) and all(_same(*pair, apart) for pair in zip(told, again, strict=True))
    if isinstance(told, float) and isinstance(again, float):
        return math.isclose(told, again, rel_tol=ROUNDING if apart else SAME, abs_tol=1e-12)
    return bool(told == again)
