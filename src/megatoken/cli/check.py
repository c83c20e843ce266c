"""``megatoken check``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatoken.cli.flags import FLAGS, flag, key_command, place
from megatoken.cli.output import Json, Out, deliver

Slo = Annotated[Path | None, flag("FILE.yaml", "Your limits on latencies, rates, accuracy and price.", "--slo")]
CheckCommand = key_command(
    {"dollars-per-hour": ("DOLLARS", "Price of the machine for an hour, for a limit on the price of a request.")},
    prefix="limits.",
)


def check(
    ctx: typer.Context,
    paths: Annotated[list[Path], place("RUN", "Run folders, or folders of run folders.")],
    slo: Slo = None,
    out: Out = None,
    json_only: Json = False,
) -> int:
    """Judge runs by your limits. Reports MET, NOT MET or CANNOT TELL for each limit."""
    from megatoken.analysis.lookup import read_runs
    from megatoken.config import load_limits
    from megatoken.planning.run_price import check_runs, exit_code_of

    asked = load_limits(slo, ctx.meta[FLAGS])
    document = check_runs([run for path in paths for run in read_runs(path)], asked)
    deliver(document, json_only=json_only, out=out)
    return exit_code_of(document["answer"])
