"""``megatoken audit``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from megatoken.cli.flags import flag, place
from megatoken.cli.output import Json, Out, counted, deliver


def audit(
    path: Annotated[Path, place("PATH", "LoadGen logs, submission, run folder, or zip or tar archive of one.")],
    claims: Annotated[
        list[Path] | None, flag("CLAIMS.yaml", "File of claims to check; repeatable.", "--claims")
    ] = None,
    mlperf_round: Annotated[
        str | None,
        flag("v5.1", "MLPerf round to check against. Default for submissions: the round of their seeds.", "--round"),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Print every claim and finding, nodes, artefacts and inputs.")
    ] = False,
    out: Out = None,
    json_only: Json = False,
) -> int:
    """Check published results and claims. Reports what holds, what does not, and what cannot be determined."""
    from megatoken.audit import audit as audited
    from megatoken.claims.judge import judge_files
    from megatoken.claims.schema import load_claims
    from megatoken.dossier.saved_audit import with_hash

    files = {file: load_claims(file) for file in claims or ()}
    with counted("reading runs", "listing files") as progress:
        result = audited(path, round=mlperf_round, progress=progress)
    answers = judge_files(files, result.evidence)
    result = replace(result, claims=tuple(answer.to_document() for answer in answers))
    deliver(with_hash(result.to_document()), json_only=json_only, out=out, full=full)
    return result.exit_code
