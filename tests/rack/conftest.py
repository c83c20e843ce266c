"""A Ray cluster of two nodes on this machine, and drivers that run on it as processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

import megatoken
from megatoken.errors import UsageError
from megatoken.results import Run, read_run

pytest.importorskip("ray", reason="the rack's tests need Ray: pip install 'megatoken[rack]'")

SOURCES = Path(megatoken.__file__).parents[1]
LENGTHS = "input_tokens,output_tokens\n" + "12,40\n20,24\n8,56\n30,32\n" * 25
SILENCE_SECONDS = 2.0


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SOURCES), str(Path(__file__).parent)]),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "a" * 64,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # loopback
        "OMP_NUM_THREADS": "1",
    }


@dataclass
class Nodes:
    """Raylets in a process of their own (``ray_nodes.py``), told what to do line by line."""

    process: subprocess.Popen[str]
    address: str = ""
    pids: dict[str, int] = field(default_factory=dict)

    def ask(self, line: str) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def kill_raylet(self, name: str) -> None:
        os.kill(self.pids.pop(name), signal.SIGKILL)

    def add(self, name: str) -> None:
        if name not in self.pids:
            self.pids[name] = self.ask(f"add {name}")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    messages = tmp_path_factory.mktemp("ray") / "messages"
    with messages.open("w") as sink:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "ray_nodes.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sink,
            text=True,
            env=environment(),
            start_new_session=True,
        )
    nodes = Nodes(process)
    nodes.address = nodes.ask("head")
    yield nodes
    try:
        process.communicate(timeout=30)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@pytest.fixture
def two_nodes(cluster: Nodes) -> Nodes:
    for name in ("alpha", "beta"):
        cluster.add(name)
    return cluster


@dataclass
class Driver:
    """``megatoken run --rack`` on its way."""

    process: subprocess.Popen[str]
    out: Path

    def folder(self) -> Path:
        """The run folder, once it is there."""
        found = [path for path in self.out.glob("*") if not path.name.startswith(".")] if self.out.exists() else []
        return found[0] if found else self.out / "none yet"

    def wait_for_samples(self, samples: int, seconds: float = 120) -> Run:
        """The run as it stands when that many samples have ended."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.process.communicate()
            if self.folder().exists():
                run = self.run()
                if len(run.requests) >= samples:
                    return run
            time.sleep(0.2)
        raise AssertionError(f"no {samples} samples within {seconds} s")

    def wait_for_node(self, name: str, seconds: float = 60) -> None:
        """Waits until a node of that name answers samples."""
        deadline = time.monotonic() + seconds
        while name not in self.run().requests["node"].to_pylist():
            assert time.monotonic() < deadline and self.process.poll() is None, self.process.communicate()
            time.sleep(0.2)

    def end(self, seconds: float = 400) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        output, messages = self.process.communicate(timeout=seconds)
        return self.process.returncode, output, messages

    def run(self) -> Run:
        while True:
            try:
                return read_run(self.folder())
            except UsageError:  # a table was replaced while it was read
                if self.process.poll() is not None:
                    raise


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Any]:
    """Starts drivers; none outlives its test."""
    started = []
    lengths = tmp_path / "lengths.csv"
    lengths.write_text(LENGTHS)

    def start(address: str, *flags: str, out: str = "runs") -> Driver:
        command = [sys.executable, "-m", "megatoken", "run", "--rack", address, "--model", "tiny"]
        command += ["--lengths", str(lengths), "--warm-up", "0.5", "--out", str(tmp_path / out), "--json"]
        command += ["--rack.dead-after-seconds", str(SILENCE_SECONDS), "--engine.max-length", "128"]
        process = subprocess.Popen(
            [*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
        )
        started.append(process)
        return Driver(process, tmp_path / out)

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def workers_of(run: Run) -> dict[str, int]:
    """Process of each node's replica, as the run folder names them."""
    return {node["node"]: node["process_ids"][0] for node in run.result["rack_nodes"]}


def gone(pid: int, seconds: float) -> bool:
    """Whether the process ends within that time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.1)
    return False
