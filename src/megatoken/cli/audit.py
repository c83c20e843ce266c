"""``megatoken audit``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from megatoken.cli.output import Json, Out, deliver


def audit(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="LoadGen logs, a submission, a run folder, an archive.")],
    claims: Annotated[
        list[Path] | None, typer.Option("--claims", metavar="CLAIMS.yaml", help="Claims to recompute; repeatable.")
    ] = None,
    mlperf_round: Annotated[
        str | None, typer.Option("--round", metavar="v5.1", help="MLPerf round whose rules are claimed.")
    ] = None,
    out: Out = None,
    json_only: Json = False,
) -> int:
    """Check somebody's artefacts: what stands, what does not, what cannot be known."""
    from megatoken.audit import audit as audited
    from megatoken.audit.claims import judge, load_claims

    files = [load_claims(file) for file in claims or ()]
    with _progress() as progress:
        result = audited(path, round=mlperf_round, progress=progress)
    answers = [answer.to_document() for file in files for answer in judge(file, result.evidence)]
    result = replace(result, claims=tuple(answers))
    deliver(result.to_document(), json_only=json_only, out=out)
    return result.exit_code


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None] | None]:
    """A bar on standard error while an audit runs, if that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("listing files", total=None)

        def report(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total or None, description="reading runs" if total else None)

        yield report
