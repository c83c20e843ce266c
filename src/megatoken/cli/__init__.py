"""Entry of the command. Takes over the signals first, because one may come while Python still imports."""

from __future__ import annotations

from megatoken.signals import handle_stop_signals, leave_at_once

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def main() -> NoReturn:
    """Run the command of ``sys.argv`` and end the process with its exit code."""
    handle_stop_signals(leave_at_once("interrupted; nothing was written"))
    from megatoken.cli.application import run_application

    run_application()
