"""An HTTP process: takes connections of the shared port and answers them from the engine process. No PyTorch."""

from __future__ import annotations

import os

from megatoken.serve.child import read_settings, run_loop
from megatoken.serve.options import HttpProcessSettings
from megatoken.serve.routes import ROUTES
from megatoken.serve.server import Server


def main() -> None:
    """Entry of the process."""
    control, settings = read_settings(HttpProcessSettings)
    server = Server(settings, ROUTES, control)
    run_loop(control, server.run())
    os._exit(0)  # no library's clean-up can hang an end that has been reported


if __name__ == "__main__":
    main()
