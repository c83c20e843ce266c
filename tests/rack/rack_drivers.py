"""Drivers as processes of their own, and what tests ask of them and of their workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

import megatoken
from forks import Process
from megatoken.runs.run import Run, read_run

SOURCES = Path(megatoken.__file__).parents[1]
LENGTHS = "input_tokens,output_tokens\n" + "12,40\n20,24\n8,56\n30,32\n" * 25
PATIENCE_SECONDS = 300.0  # for whatever must come: a machine that is busy with other things is slow, not broken


@dataclass(frozen=True)
class RayNodes:
    """The cluster: where its head is, the process above all others, and where they keep temporary files."""

    address: str
    process_id: int
    folder: Path


@contextmanager
def ray_nodes(**other: str) -> Iterator[RayNodes]:
    """The cluster of ``ray_nodes.py``, until it is left; whatever is dead by then; ``other`` is of its environment."""
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
                env=environment(folder) | other,
                start_new_session=True,
            ) as process,
        ):
            assert process.stdout is not None
            try:
                address = process.stdout.readline().strip()
                assert address, (folder / "messages").read_text()
                yield RayNodes(address, process.pid, folder)
                with suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=60)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SOURCES), str(Path(__file__).parent)]),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "a" * 64,
        "RAY_TMPDIR": str(folder),
        "RAY_worker_niceness": "0",  # not the 15 of Ray, with which replicas starve beside whatever else runs
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # loopback
        "TMPDIR": str(folder),
        "OMP_NUM_THREADS": "1",
    }


@dataclass
class Driver:
    """``megatoken run --rack`` on its way."""

    process: Process
    out: Path

    def folder(self) -> Path:
        """The run folder, once it is there."""
        found = [path for path in self.out.glob("*") if not path.name.startswith(".")] if self.out.exists() else []
        return found[0] if found else self.out / "none yet"

    def until(self, true: Callable[[Run], bool]) -> Run:
        """The run as it stands when something has become true of its folder."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.process.communicate()
            if self.folder().exists():
                run = self.run()
                if true(run):
                    return run
            time.sleep(0.2)
        raise AssertionError(f"not within {PATIENCE_SECONDS} s: {self.run().result.get('rack')}")

    def end(self) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        output, messages = self.process.communicate(timeout=PATIENCE_SECONDS)
        return self.process.returncode, output, messages

    def run(self) -> Run:
        return read_run(self.folder())


def workers_of(run: Run) -> dict[str, int]:
    """Process of each node's replica, as the run folder names them."""
    return {node["node"]: node["process_ids"][0] for node in run.result["rack_nodes"]}


def gone(pid: int) -> bool:
    """Whether the process ends."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.1)
    return False
