"""A second load on the same servers while a point runs: another ``megatoken sweep``, in a process of its own."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatoken.errors import MegatokenError
from megatoken.targets.endpoint.address import AnswerError
from megatoken.targets.endpoint.server_process import started_server

LONGEST_START_SECONDS = 120.0
WINDOW_SECONDS = 86_400  # it ends with the point


@contextmanager
def neighbour(flags: Sequence[str], endpoints: Sequence[str], out: Path) -> Iterator[None]:
    """Runs a sweep with ``flags`` on the same ``endpoints`` from its first request on until the context ends.

    Args:
        flags: of the other sweep: its key, its load, its prompts.
        endpoints: addresses.
        out: folder for its folder and its output.

    Raises:
        UsageError: it does not begin; with the last lines of its output.
        MegatokenError: it ended before the context did, so the point did not have its neighbour all the time.
    """
    addresses = [part for endpoint in endpoints for part in ("--endpoint", endpoint)]
    own = [sys.executable, "-P", "-m", "megatoken", "sweep", *addresses, "--window", str(WINDOW_SECONDS)]
    begun = set(out.glob("*/01-*"))

    def has_begun() -> None:
        if set(out.glob("*/01-*")) == begun:
            raise AnswerError("its load has not begun")

    command = shlex.join([*own, "--out", str(out), *flags])
    server = started_server(command, out / "neighbour.log", has_begun, LONGEST_START_SECONDS, flag="--neighbour")
    with server as (process, log):
        yield
        if process.poll() is not None:
            raise MegatokenError(f"--neighbour: its load ended before that of the sweep; {log} may say why")
