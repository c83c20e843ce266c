"""The fields of ``result.json`` that follow from the tables and the other fields of a run; an audit replays it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatoken.analysis.aggregation import aggregate, aggregate_fields
from megatoken.analysis.nodes import run_node_rows
from megatoken.analysis.statistics import seconds_under_load, summarise
from megatoken.analysis.utilisation import utilisation
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
