"""``megatoken init``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from megatoken.cli.flags import place
from megatoken.cli.streams import standard_output
from megatoken.errors import ExitCode


def init(folder: Annotated[Path, place("DIR", "Folder to make; files that are there stay unchanged.")]) -> int:
    """Make a workspace: configuration, prompts, limits and claims. Files have comments; an evidence form is added."""
    from megatoken.dossier import workspace

    made = workspace.make_workspace(folder)
    with standard_output(f"the workspace is {folder}"):
        for path, new in made:
            print(f"{'made' if new else 'kept'}  {path}")
        print(f"Next, in {folder}:")
        print(f"  megatoken run {workspace.CONFIG} --slo {workspace.LIMITS}")
        print(f"  megatoken audit runs/RUN --claims {workspace.CLAIMS} --out audit")
        print(
            f"  megatoken dossier --audit audit --run runs/RUN --slo {workspace.LIMITS} --form {workspace.FORM}"
            " --out dossier"
        )
    return ExitCode.OK
