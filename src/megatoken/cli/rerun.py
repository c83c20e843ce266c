"""``megatoken rerun``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatoken.cli.flags import flag, place
from megatoken.cli.output import Json, deliver
from megatoken.errors import ExitCode


def rerun(
    path: Annotated[Path, place("RUN", "Run folder of megatoken run.")],
    check: Annotated[bool, typer.Option("--check", help="Only compare what would run now; measure nothing.")] = False,
    out: Annotated[Path | None, flag("DIR", "Folder to create the new run folder in. Default: that of RUN.")] = None,
    json_only: Json = False,
) -> int:
    """Make a run again. Names each difference in model, rows, seeds, packages and machine; compares the rates."""
    from megatoken.harness.progress import Progress
    from megatoken.harness.rerun import check_plan
    from megatoken.harness.rerun import rerun as made_again

    progress = Progress(json_only)
    document = check_plan(path, progress) if check else made_again(path, progress, out)[0]
    deliver(document, json_only=json_only, out=None)
    rates = document["rates"]
    differs = not document["equal"] or (rates is not None and rates["agree"] is False)
    return ExitCode.INVALID if differs else ExitCode.OK
