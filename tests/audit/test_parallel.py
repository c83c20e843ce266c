"""Many runs in processes of their own: what happens when one of them ends."""

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from cli_support import COMMAND, ENVIRONMENT
from megatoken.audit import Severity, audit
from megatoken.audit.discovery import runs_in, walk
from megatoken.audit.examine import Job, examine_all

BUSY_SECONDS = 10  # half a second where nothing else runs; what is left of the audit takes longer
LOGS = ("mlperf_log_detail.txt", "mlperf_log_summary.txt", "mlperf_log_accuracy.json")


@pytest.fixture(scope="module")
def tree(originals: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """A folder of so many nodes, made once; their logs are the same ones, which takes no room on the disk."""

    @functools.cache
    def make(nodes: int) -> Path:
        source = originals("Offline", "PerformanceOnly", "llama2-70b", "", 24_576)
        root = tmp_path_factory.mktemp("tree")
        for node in range(nodes):
            folder = root / f"node_{node}"
            folder.mkdir()
            for name in LOGS:
                os.link(source / name, folder / name)
        return root

    return make


def workers_of(process: psutil.Process) -> list[psutil.Process]:
    found = []
    for child in process.children(recursive=True):
        try:
            if "megatoken.processes" in child.cmdline():
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def wait_for_workers(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    for _ in range(20_000):
        if workers := workers_of(psutil.Process(process.pid)):
            return workers
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    raise AssertionError("no worker has started")


@pytest.fixture
def auditing(tree: Callable[[int], Path]) -> Iterator["subprocess.Popen[str]"]:
    """An audit that takes long, in a process group of its own as a terminal makes one."""
    command = [*COMMAND, "audit", str(tree(1200)), "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, process_group=0
    ) as process:
        yield process
        process.kill()


@pytest.mark.timing
@pytest.mark.parametrize("seconds", [0.0, 0.3, 2.0])  # as they start, as they import, as they work
def test_ctrl_c_ends_all_at_once_and_in_one_line(auditing: "subprocess.Popen[str]", seconds: float) -> None:
    workers = wait_for_workers(auditing)
    time.sleep(seconds)
    os.killpg(auditing.pid, signal.SIGINT)
    stdout, stderr = auditing.communicate(timeout=BUSY_SECONDS)
    assert (auditing.returncode, stdout, stderr) == (130, "", "megatoken: interrupted; nothing was written\n")
    assert not any(worker.is_running() for worker in workers)


@pytest.mark.timing
def test_workers_do_not_outlive_an_audit_that_is_killed(auditing: "subprocess.Popen[str]") -> None:
    workers = wait_for_workers(auditing)
    time.sleep(1.0)
    auditing.kill()
    _, alive = psutil.wait_procs(workers, timeout=BUSY_SECONDS)
    assert not alive


def test_a_worker_that_dies_costs_the_run_it_had_and_no_other(tree: Callable[[int], Path]) -> None:
    killed: list[psutil.Process] = []

    def kill_one(done: int, total: int) -> None:
        if total and not killed:
            victim = workers_of(psutil.Process())[0]
            victim.suspend()  # so that it has a run in hand
            victim.kill()
            killed.append(victim)

    result = audit(tree(60), workers=2, progress=kill_one)
    assert killed
    lost = [item for item in result.findings if item.id == "log.examined"]  # none if it was just between two runs
    assert all((item.severity, item.count) == (Severity.UNKNOWN, 1) and "died" in item.found for item in lost)
    assert len(lost) <= 1
    examined = [run.node for run in result.evidence.runs if run.figures.scenario == "Offline"]
    assert len(examined) == 60 - len(lost)
    assert [run.node for run in result.evidence.runs] == [f"node_{node}" for node in range(60)]
    assert not workers_of(psutil.Process())


def test_processes_that_cannot_start(tree: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree(30)
    jobs = [Job(str(root), run, None, None, False) for run in runs_in(walk(root))]
    for interpreter in ("/bin/false", "/nowhere/python"):
        monkeypatch.setattr(sys, "executable", interpreter)
        done: list[tuple[int, int]] = []
        examined = list(examine_all(jobs, lambda *numbers, done=done: done.append(numbers), workers=2))
        assert [item.run.path for item in examined] == [f"node_{node}" for node in range(30)]
        assert all(item.run.figures.validity == "VALID" for item in examined)
        assert done == [(number, 30) for number in range(1, 31)]
