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

app = typer.Typer(rich_markup_mode=None, help="Build an MLPerf submission from run folders, or check one.")


@app.callback(invoke_without_command=True)
def _submission(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        with standard_output():
            print(ctx.get_help())


@app.command(cls=Command)
def build(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Run folders: performance, accuracy, compliance tests.")
    ],
    submitter: Annotated[str, typer.Option(metavar="NAME", help="Name of the submitter; also a folder name.")],
    division: Annotated[str, typer.Option(metavar="closed|open", help="MLPerf division.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to create; must not exist, or be empty.")],
    mlperf_round: Annotated[str, typer.Option("--round", metavar="v5.1", help="MLPerf round: v5.1, v6.0 or v6.1.")],
    benchmark: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="MLPerf benchmark. Default: from the model name and the accuracy scores."),
    ] = None,
    system: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the system. Default: from the hardware inventory.")
    ] = None,
    json_only: Json = False,
) -> int:
    """Build a submission tree from run folders. Lists the fields that you must fill in."""
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
    path: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that contains closed/ or open/.")],
    mlperf_round: Annotated[
        str | None,
        typer.Option("--round", metavar="v5.1", help="MLPerf round. Default: the round of the seeds in the logs."),
    ] = None,
    json_only: Json = False,
) -> int:
    """Check a submission tree by the rules of the MLCommons checker. Reports what to fix."""
    from megatoken.submission import check as checked

    result = checked(path, round=mlperf_round)
    with standard_output():
        if json_only:
            print(json.dumps(result.to_document(), indent=2, allow_nan=False))
        else:
            print(*result.describe(), sep="\n")
    return result.exit_code
