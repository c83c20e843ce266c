"""Real processes that write run folders and are killed, run out of disk, or fall over."""

import json
import random
import signal
import subprocess
import time
from contextlib import AbstractContextManager, ExitStack, suppress
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from cli_support import ENVIRONMENT, TIMEOUT_SECONDS
from forks import Process, forked
from megatoken.runs.run import Verdict, read_run

WRITER = """
import os, sys, time
from pathlib import Path
from megatoken.analysis.summary import summarise_run
from megatoken.runs.writer import RunFolder
from megatoken.runs.tables import SampleRow, SeriesRow
import pyarrow.parquet
out, log = Path(sys.argv[1]), os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
print("ready", flush=True)
folder = RunFolder.create(out, "run", {}, {}, scenario="offline", summarise=summarise_run, facts={})
start = time.monotonic()
for number in range(100_000):
    now = time.monotonic()
    os.write(log, b"%d %.6f\\n" % (number, now))
    elapsed = now - start
    folder.add_samples([SampleRow(number, number, 0.0, 0.0, elapsed, elapsed, 8, 2, "length", "here")])
    if number % 200 == 0:
        folder.add_series(SeriesRow(elapsed, "here", 0, number, number, 1, 1, 1, 1, 1, 0, 0))
    time.sleep(max(0.0, start + (number + 1) / 200 - time.monotonic()))
"""
MOMENTS = random.Random(20261120)
DELAYS_SECONDS = [MOMENTS.uniform(0.0, 0.5) for _ in range(4)] + [MOMENTS.uniform(1.0, 4.5) for _ in range(8)]


def start_writer(directory: Path) -> AbstractContextManager[Process]:
    directory.mkdir()
    return forked("-c", WRITER, directory / "runs", directory / "log", environment=ENVIRONMENT)


def ended(program: str, *arguments: object) -> tuple[int | None, str, str]:
    """Exit code, standard output and standard error of a program in a process of its own."""
    with forked("-c", program, *arguments, environment=ENVIRONMENT) as process:
        out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    return process.returncode, out, err


def kill_after(writer: Process, delay_seconds: float) -> float:
    """Monotonic time just before the kill; clocks of processes on one machine agree."""
    time.sleep(delay_seconds)
    moment = time.monotonic()
    writer.send_signal(signal.SIGKILL)
    assert writer.wait() == -signal.SIGKILL
    return moment


@pytest.mark.parametrize("group", range(4))
def test_a_killed_run_keeps_every_sample_but_those_of_the_last_second(tmp_path, group):
    delays = sorted(DELAYS_SECONDS[group::4])
    with ExitStack() as running:
        writers = [running.enter_context(start_writer(tmp_path / str(number))) for number in range(len(delays))]
        for writer in writers:
            assert writer.stdout.readline() == "ready\n"
        passed = 0.0
        for number, (writer, delay) in enumerate(zip(writers, delays, strict=True)):
            moment = kill_after(writer, delay - passed)
            passed = delay
            check_killed(tmp_path / str(number), moment)


def check_killed(directory: Path, moment: float) -> None:
    log = [line.split() for line in (directory / "log").read_text().splitlines()]
    completed = [float(seconds) for _, seconds in log]
    if not (directory / "runs" / "run").exists():
        assert not completed
        return
    run = read_run(directory / "runs" / "run")
    assert run.verdict is Verdict.INTERRUPTED
    assert run.reasons[0]["code"] == "NOT_FINISHED"
    kept = pq.read_table(directory / "runs" / "run" / "requests.parquet")["sample_id"].to_pylist()
    assert kept == list(range(len(kept)))  # none twice, none left out
    # A machine too busy to run the writer every 5 ms cannot run its thread in time either: grant it the same delay.
    starved = max((later - sooner for sooner, later in pairwise(completed)), default=0.0)
    due = [seconds for seconds in completed if seconds < moment - 1.2 - 3 * max(0.0, starved - 0.02)]
    assert len(due) <= len(kept) <= len(completed)
    assert json.loads((directory / "runs" / "run" / "result.json").read_text())["samples_completed"] <= len(kept)


def test_a_process_that_falls_over_leaves_its_folder_readable(tmp_path):
    broken = WRITER.replace("for number", "1 / 0\nfor number")
    code, _, err = ended(broken, tmp_path / "runs", tmp_path / "log")
    assert code == 1
    assert err.strip().endswith("ZeroDivisionError: division by zero")
    assert read_run(tmp_path / "runs" / "run").verdict is Verdict.INTERRUPTED


FULL_DISK = """
import resource, sys, time
from pathlib import Path
from megatoken.errors import StorageError
from megatoken.analysis.summary import summarise_run
from megatoken.runs.reasons import reason
from megatoken.runs.writer import RunFolder
from megatoken.runs.tables import SampleRow
from megatoken.runs.run import read_run
out = Path(sys.argv[1])
limit = int(sys.argv[2])
folder = RunFolder.create(out, "run", {}, {}, scenario="offline", summarise=summarise_run, facts={})
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
number = 0
try:
    while True:
        times = list(enumerate(number + i / 7 for i in range(2000)))
        folder.add_samples([SampleRow(number + i, 0, 0.0, t, t, t, 8, 2, "length", "here") for i, t in times])
        number += 2000
        time.sleep(0.4)
except StorageError as error:
    print(error)
try:
    folder.finish({"verdict": "MEASURED", "reasons": []})
except StorageError as error:
    print(error)
try:
    folder.interrupt(reason("INTERRUPTED", cause="disk full"))
except StorageError as error:
    print(error)
"""


def fill(out: Path, limit_bytes: int, mend: str) -> None:
    """Run until the disk is full, then check that the refusal is one line and that what was written can be read."""
    code, answer, err = ended(FULL_DISK, out, limit_bytes)
    assert (code, err) == (0, "")
    lines = answer.splitlines()
    assert len(lines) == 3
    assert all(line.startswith(f"{out / 'run'}/") and "cannot be written (" in line for line in lines)
    assert all(mend in line for line in lines)
    assert {path.name for path in (out / "run").iterdir() if path.name.startswith(".")} == set()
    run = read_run(out / "run")
    assert run.verdict is Verdict.INTERRUPTED
    kept = run.requests["sample_id"].to_pylist()
    assert kept == list(range(len(kept)))
    assert kept


def test_a_file_size_limit_is_a_storage_error(tmp_path):
    fill(tmp_path, 200_000, "ulimit -f")


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small disk: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_disk_that_fills_up_is_a_storage_error(small_disk):
    fill(small_disk / "runs", 0, "make room")


def test_a_full_disk_at_the_start_leaves_nothing(small_disk):
    with suppress(OSError), (small_disk / "ballast").open("wb", buffering=0) as ballast:
        while True:
            ballast.write(bytes(4096))
    code = FULL_DISK.split("if limit:")[0]
    _, _, err = ended(code, small_disk / "runs", 0)
    refusal = err.splitlines()[-1]
    assert refusal.startswith(
        f"megatoken.errors.StorageError: {small_disk / 'runs' / 'run'}: cannot be written (No space"
    )
    assert [path.name for path in small_disk.iterdir()] == ["ballast"]
