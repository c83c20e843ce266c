"""The command's entry. Takes the signals before anything else, for one may come while Python still imports."""

from __future__ import annotations

from megatoken.signals import handle_stop_signals, leave_at_once

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def main() -> NoReturn:
    """Runs the command that ``sys.argv`` asks for and ends the process with its exit code."""
    handle_stop_signals(leave_at_once("interrupted; nothing was written"))
    from megatoken.cli.application import run_application

    run_application()
