"""What a megatoken run folder tells of the replicas of a rack."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from megatoken.analysis.machine import simulated_gpu
from megatoken.analysis.series import numbers, replicas
from megatoken.audit.evidence import Where
from megatoken.audit.finding import Observation, shown
from megatoken.audit.likeness import SAME
from megatoken.audit.view import observe
from megatoken.files import mapping
from megatoken.runs.run import SERIES, Run, Verdict
from megatoken.text import count_of


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
    if mapping(folder.result.get("target")).get("count") == "per_node" and "node_verdicts" not in folder.result:
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
    served, lost = sum(places.values()), {(loss["node"], loss["replica"]) for loss in rack["lost"]}
    if served > at_end + len(lost):
        yield f"{served} replicas served in {SERIES}, rack.replicas_at_end {at_end} and {len(lost)} lost"
