"""``megatoken audit``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from megatoken.cli.output import Json, Out, counted, deliver
from megatoken.errors import UsageError


def audit(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="LoadGen logs, submission, run folder, or zip or tar archive of one.")
    ],
    claims: Annotated[
        list[Path] | None, typer.Option("--claims", metavar="CLAIMS.yaml", help="File of claims to check; repeatable.")
    ] = None,
    mlperf_round: Annotated[
        str | None,
        typer.Option(
            "--round",
            metavar="v5.1",
            help="MLPerf round to check against. Default for submissions: the round of their seeds.",
        ),
    ] = None,
    out: Out = None,
    json_only: Json = False,
) -> int:
    """Check published results and claims. Reports what holds, what does not, and what cannot be determined."""
    from megatoken.audit import audit as audited
    from megatoken.claims.judge import judge
    from megatoken.claims.schema import load_claims

    files = {file: load_claims(file) for file in claims or ()}
    with counted("reading runs", "listing files") as progress:
        result = audited(path, round=mlperf_round, progress=progress)
    answers: list[dict[str, Any]] = []
    for file, claimed in files.items():
        try:
            answers += [answer.to_document() for answer in judge(claimed, result.evidence)]
        except UsageError as error:
            raise UsageError(f"{file}: {error}") from error
    result = replace(result, claims=tuple(answers))
    deliver(result.to_document(), json_only=json_only, out=out)
    return result.exit_code
