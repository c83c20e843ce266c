"""A Ray cluster on this machine, and drivers that run on it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rack_drivers import LENGTHS, Driver, RayNodes, environment

pytest.importorskip("ray", reason="the rack's tests need Ray: pip install 'megatoken[rack]'")


@pytest.fixture(scope="session")
def cluster() -> Iterator[RayNodes]:
    # A short name: Ray makes sockets in there.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with (
            (folder / "messages").open("w") as sink,
            subprocess.Popen(
                [sys.executable, str(Path(__file__).parent / "ray_nodes.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
                env=environment(folder),
                start_new_session=True,
            ) as process,
        ):
            assert process.stdout is not None
            try:
                address = process.stdout.readline().strip()
                assert address, (folder / "messages").read_text()
                yield RayNodes(address, process.pid, folder)
                process.communicate(timeout=60)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def drive(cluster: RayNodes, tmp_path: Path) -> Iterator[Any]:
    """Starts drivers; none outlives its test."""
    started = []
    lengths = tmp_path / "lengths.csv"
    lengths.write_text(LENGTHS)

    def start(*flags: str, out: str = "runs") -> Driver:
        command = [sys.executable, "-m", "megatoken", "run", "--rack", cluster.address]
        command += ["--lengths", str(lengths), "--warm-up", "0.5", "--out", str(tmp_path / out), "--json"]
        process = subprocess.Popen(
            [*command, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(cluster.folder),
        )
        started.append(process)
        return Driver(process, tmp_path / out)

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
