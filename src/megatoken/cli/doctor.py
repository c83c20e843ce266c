"""``megatoken doctor``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from megatoken.cli.flags import flag
from megatoken.cli.output import Json, print_result
from megatoken.errors import ExitCode


def doctor(
    folder: Annotated[Path, flag("DIR", "Folder for runs, whose disk is examined.", "--out")] = Path(),
    json_only: Json = False,
) -> int:
    """List what keeps this machine from its best speed. Each finding has the command that fixes it. Changes nothing."""
    from megatoken.hardware.doctor import examine
    from megatoken.text import count_of

    document = examine(folder)

    def show() -> None:
        shown = [one for one in document["findings"] if one["state"] != "OK"]
        for finding in shown:
            print(f"{finding['state']:8} {finding['message']}")
            if finding["command"]:
                print(f"         {finding['command']}")
        fine = [one for one in document["findings"] if one["state"] == "OK"]
        print(f"{'OK':8} {count_of(len(fine), 'check')}: {', '.join(one['code'] for one in fine)}")

    print_result(document, show, json_only=json_only)
    return ExitCode.OK
