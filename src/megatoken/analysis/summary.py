"""The fields of ``result.json`` that follow from the tables and the other fields of a run; an audit replays it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatoken.analysis.aggregation import aggregate, aggregate_fields
from megatoken.analysis.nodes import run_node_rows
from megatoken.analysis.series import totals_over_time
from megatoken.analysis.statistics import seconds_under_load, summarise
from megatoken.engine.measured_costs import Window, keys_seen
from megatoken.errors import UsageError
from megatoken.runs.run import Run, Verdict

if TYPE_CHECKING:
    import pyarrow as pa


def summarise_run(result: Mapping[str, Any], requests: pa.Table, series: pa.Table) -> dict[str, Any]:
    """Every metric of the run, and ``aggregate`` of a finished run on several nodes that does not have it yet.

    ``result`` has the fields that are known, ``verdict`` and ``scenario`` among them.
    """
    verdict = Verdict(result["verdict"])
    finished = verdict is not Verdict.INTERRUPTED
    load_seconds = seconds_under_load(result)
    fields = summarise(requests, series, scenario=result["scenario"], finished=finished, load_seconds=load_seconds)
    fields |= utilisation(result, series)
    if finished and len(fields["nodes"]) > 1 and "aggregate" not in result:
        run = Run(Path(), verdict, [], [], [], {**result, **fields}, {}, {}, requests, series)
        try:
            fields["aggregate"] = aggregate_fields(aggregate(run_node_rows(run)))
        except UsageError:  # a node completed nothing
            fields["aggregate"] = None
    return fields


COUNTED = ("steps", "processed_tokens", "output_tokens", "decoded_tokens", "context_tokens", "recomputed_tokens")


def utilisation(result: Mapping[str, Any], series: pa.Table) -> dict[str, float | None]:
    """``mfu_share`` and ``mbu_share`` of a run with the facts ``work`` and ``peaks``; empty without them."""
    work, peaks = result.get("work"), result.get("peaks")
    if not work or not peaks or not len(series):
        return {}
    times, *totals = totals_over_time(series, list(COUNTED))
    last = dict(zip(COUNTED, (float(column[-1]) for column in totals), strict=True))
    seconds = float(times[-1])
    if seconds <= 0 or not all(map(np.isfinite, last.values())) or not last["steps"]:
        return {}
    windows = [Window(**one) for one in work.get("windows", ())]  # an older run does not have them
    keys = keys_seen(windows, last["context_tokens"], last["decoded_tokens"])
    operations = (
        (last["processed_tokens"] - last["recomputed_tokens"]) * work["token_operations"]
        + last["output_tokens"] * work["sample_operations"]
        + keys * work["pair_operations"]
    )
    moved = keys * work["cached_token_bytes"] + last["steps"] * (work["weights_bytes"] or 0.0)
    most_operations, most_bytes = (peaks[f"{name}_per_second"] for name in ("operations", "memory_bytes"))
    return {
        "mfu_share": operations / seconds / most_operations if most_operations else None,
        "mbu_share": moved / seconds / most_bytes if most_bytes and work["weights_bytes"] else None,
    }
