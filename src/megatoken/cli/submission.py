"""``megatoken submission build`` and ``megatoken submission check``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from megatoken.cli.flags import Command, flag, group, place
from megatoken.cli.output import Json, print_result
from megatoken.cli.streams import complain
from megatoken.errors import ExitCode

app = group("Build an MLPerf submission from run folders, or check one.")


@app.command(cls=Command)
def build(
    runs: Annotated[list[Path], place("RUN", "Run folders: performance, accuracy, compliance tests.")],
    submitter: Annotated[str, flag("NAME", "Name of the submitter; also a folder name.")],
    division: Annotated[str, flag("closed|open", "MLPerf division.")],
    out: Annotated[Path, flag("DIR", "Folder to create; must not exist, or be empty.")],
    mlperf_round: Annotated[str, flag("v5.1", "MLPerf round: v5.1, v6.0 or v6.1.", "--round")],
    benchmark: Annotated[
        str | None, flag("NAME", "MLPerf benchmark. Default: from the model name and the accuracy scores.")
    ] = None,
    system: Annotated[str | None, flag("NAME", "Name of the system. Default: from the hardware inventory.")] = None,
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
    kept = f"the submission is in {out}"
    print_result(made.to_document(), lambda: print(*made.describe(), sep="\n"), json_only=json_only, kept=kept)
    return ExitCode.OK


@app.command(cls=Command)
def check(
    path: Annotated[Path, place("DIR", "Folder that contains closed/ or open/.")],
    mlperf_round: Annotated[
        str | None, flag("v5.1", "MLPerf round. Default: the round of the seeds in the logs.", "--round")
    ] = None,
    json_only: Json = False,
) -> int:
    """Check a submission tree by the rules of the MLCommons checker. Reports what to fix."""
    from megatoken.submission import check as checked

    result = checked(path, round=mlperf_round)
    print_result(result.to_document(), lambda: print(*result.describe(), sep="\n"), json_only=json_only)
    return result.exit_code
