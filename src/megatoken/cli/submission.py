"""``megatoken submission build`` and ``megatoken submission check``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from megatoken.cli.flags import Command
from megatoken.cli.output import Json
from megatoken.cli.streams import complain, standard_output
from megatoken.errors import ExitCode

app = typer.Typer(rich_markup_mode=None, help="MLPerf submissions: build one of run folders, check anybody's.")


@app.callback(invoke_without_command=True)
def _submission(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        with standard_output():
            print(ctx.get_help())


@app.command(cls=Command)
def build(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders: performance, accuracy, compliance.")],
    submitter: Annotated[str, typer.Option(metavar="NAME", help="Who submits; names a folder.")],
    division: Annotated[str, typer.Option(metavar="closed|open")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to make; it must not exist, or be empty.")],
    mlperf_round: Annotated[str, typer.Option("--round", metavar="v5.1", help="MLPerf round: v5.1, v6.0, v6.1.")],
    benchmark: Annotated[
        str | None, typer.Option(metavar="NAME", help="Default: by the model's name and the scores.")
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="NAME", help="Default: by the inventory.")] = None,
    json_only: Json = False,
) -> int:
    """Build a submission tree. Fields that nobody but you can know are listed, and marked in their files."""
    from megatoken.submission import RefusedRunsError
    from megatoken.submission import build as built

    try:
        made = built(
            runs,
            submitter=submitter,
            division=division,
            round_=mlperf_round,
            out=out,
            benchmark=benchmark,
            system=system,
        )
    except RefusedRunsError as error:
        for line in error.lines:
            complain(line, ExitCode.USAGE)
        return ExitCode.USAGE
    with standard_output(f"the submission is in {out}"):
        if json_only:
            print(json.dumps(made.to_document(), indent=2))
        else:
            print(*made.describe(), sep="\n")
    return ExitCode.OK


@app.command(cls=Command)
def check(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="The folder that holds closed or open.")],
    mlperf_round: Annotated[
        str | None, typer.Option("--round", metavar="v5.1", help="MLPerf round; default that of the seeds.")
    ] = None,
    json_only: Json = False,
) -> int:
    """Decide on a submission tree. By the rules of MLCommons' checker; says what to mend."""
    from megatoken.submission import check as checked

    result = checked(path, round=mlperf_round)
    with standard_output():
        if json_only:
            print(json.dumps(result.to_document(), indent=2, allow_nan=False))
        else:
            print(*result.describe(), sep="\n")
    return result.exit_code
