"""What the benchmarks of the server share: ``megatoken serve`` as a child, its metrics, percentiles, result files."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatoken.errors import MegatokenError
from megatoken.files import write_text

READY_SECONDS = 400.0
DRAIN_SECONDS = 2.0
END_SECONDS = 30.0


@dataclass
class OwnServer:
    """A server that is ready."""

    process: subprocess.Popen[bytes]
    log: Path
    model: str
    port: int
    ready_seconds: float

    def end(self) -> int:
        """Ends it as a user would, at last with SIGKILL; its exit code."""
        for number, seconds in ((signal.SIGTERM, DRAIN_SECONDS), (signal.SIGTERM, END_SECONDS)):
            self.process.send_signal(number)
            try:
                return self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                continue
        self.process.kill()
        return self.process.wait()


@contextmanager
def own_server(flags: Sequence[str], environment: Mapping[str, str] | None = None) -> Iterator[OwnServer]:
    """``megatoken serve`` on a free port, without access log, from its readiness until the block ends.

    Raises:
        MegatokenError: it ended, or was not ready in time.
    """
    command = [sys.executable, "-m", "megatoken", "serve", "--port", "0", "--access-log", "false", *flags]
    began = time.monotonic()
    with tempfile.NamedTemporaryFile(suffix=".log") as stderr:
        log = Path(stderr.name)
        process = subprocess.Popen(command, stderr=stderr, env=os.environ | (environment or {}))
        try:
            while not (found := re.search(r"serving (\S+) on \S+:(\d+) \(ready", log.read_text())):
                if process.poll() is not None or time.monotonic() - began > READY_SECONDS:
                    raise MegatokenError(f"the server was not ready: {log.read_text()[-500:]}")
                time.sleep(0.05)
            server = OwnServer(process, log, found[1], int(found[2]), time.monotonic() - began)
            yield server
            server.end()
        finally:
            process.kill()
            process.wait()


def metric(port: int, name: str) -> float:
    """Sum of a metric of ``/metrics`` over its labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return sum(map(float, re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)))


def percentiles(values: Sequence[float] | np.ndarray[Any, Any]) -> dict[str, float]:
    """p50, p90 and p99; empty if there is no value."""
    return {f"p{p}": round(float(np.percentile(values, p)), 6) for p in (50, 90, 99)} if len(values) else {}


def save(report: Mapping[str, Any], out: Path | None) -> None:
    """Writes the report, with the command and the machine's cores, if ``--out`` names a file."""
    if out is not None:
        write_text(out, json.dumps({"command": sys.argv, "cores": os.cpu_count(), **report}, indent=1) + "\n")
