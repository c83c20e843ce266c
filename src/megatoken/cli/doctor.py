"""``megatoken doctor``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from megatoken.cli.flags import flag
from megatoken.cli.output import Json, print_result
from megatoken.errors import ExitCode


def doctor(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="A run folder: say why the run was slow.", show_default=False)
    ] = None,
    folder: Annotated[Path, flag("DIR", "Folder for runs, whose disk is examined.", "--out")] = Path(),
    json_only: Json = False,
) -> int:
    """List what slows this machine or a run, and the fix.

    It changes nothing.
    """
    from megatoken.text import count_of

    if run is None:
        from megatoken.hardware.doctor import examine

        document = examine(folder)
    else:
        from megatoken.analysis.diagnosis import diagnosis
        from megatoken.runs.run import read_run

        document = diagnosis(read_run(run))

    def show() -> None:
        shown = [one for one in document["findings"] if one["state"] != "OK"]
        for finding in shown:
            print(f"{finding['state']:8} {finding['message']}")
            if finding["command"]:
                print(f"         {finding['command']}")
        fine: list[dict[str, Any]] = [one for one in document["findings"] if one["state"] == "OK"]
        print(f"{'OK':8} {count_of(len(fine), 'check')}: {', '.join(one['code'] for one in fine)}")

    print_result(document, show, json_only=json_only)
    return ExitCode.OK
