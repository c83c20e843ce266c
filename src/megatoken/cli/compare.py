"""``megatoken aggregate`` and ``megatoken compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatoken.cli.output import Json, Out, deliver
from megatoken.errors import ExitCode


def aggregate(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH", help="Run folders, folders of them, folders of LoadGen logs.")
    ],
    straggler_threshold: Annotated[
        float, typer.Option(metavar="SHARE", help="How far below the median a node is a straggler.")
    ] = 0.03,
    baseline: Annotated[float | None, typer.Option(metavar="TOKENS_PER_SECOND", help="Rate of one node alone.")] = None,
    out: Out = None,
    json_only: Json = False,
) -> int:
    """Make one result of many nodes. Three rates, spread, stragglers, overlap, what is left if nodes fail."""
    from megatoken.analysis.aggregation import aggregate as aggregated
    from megatoken.audit import read_evidence
    from megatoken.claims.references import aggregation_rows

    result = aggregated(
        aggregation_rows(paths, read_evidence),
        inputs=[str(path) for path in paths],
        straggler_threshold=straggler_threshold,
        baseline_tokens_per_second=baseline,
    )
    deliver(result.to_document(), json_only=json_only, out=out)
    return ExitCode.OK


def compare(
    references: Annotated[
        list[str],
        typer.Argument(
            metavar="RESULT",
            help="Run folder, folder of repeats, folder of LoadGen logs, published id, accelerator, CLAIMS.yaml#id.",
        ),
    ],
    benchmark: Annotated[
        str, typer.Option(metavar="NAME", help="Of published rows that the reference does not name in full.")
    ] = "llama2-70b-99",
    scenario: Annotated[str, typer.Option(metavar="NAME", help="Likewise.")] = "Offline",
    out: Out = None,
    json_only: Json = False,
) -> int:
    """Put results side by side. Per accelerator, node and rack; says which ratios compare like with like."""
    from megatoken.analysis.comparison import compare as compared
    from megatoken.audit import read_evidence
    from megatoken.claims.references import comparison_entry

    entries = [
        comparison_entry(reference, read_evidence, benchmark=benchmark, scenario=scenario) for reference in references
    ]
    deliver(compared(entries).to_document(), json_only=json_only, out=out)
    return ExitCode.OK
