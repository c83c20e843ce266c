"""How long threads had to wait for a core."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatoken.hardware import core_wait
from megatoken.hardware.core_wait import CoreWait


def tell(folder: Path, **threads: str) -> None:
    for thread, text in threads.items():
        (folder / thread).mkdir(exist_ok=True)
        (folder / thread / "schedstat").write_text(text)


def test_the_share_is_of_the_time_that_all_threads_wanted_a_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_wait, "TASKS", tmp_path)
    assert CoreWait().share() is None  # a kernel that does not tell
    tell(tmp_path, first="1000 500 3\n", second="70 0 1\n")
    wait = CoreWait()
    assert wait.share() is None  # nobody wanted one yet
    tell(tmp_path, first="1030 510 4\n", third="50 10 1\n")
    assert wait.share() == (10 + 10) / (30 + 10 + 50 + 10)
    tell(tmp_path, second="170 0 1\n")
    assert wait.share() == 20 / 200


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel does not count")
@pytest.mark.timing
def test_two_processes_on_one_core_wait_for_each_other() -> None:
    cores = os.sched_getaffinity(0)
    core = {min(cores)}
    os.sched_setaffinity(0, core)
    try:
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
            try:
                wait = CoreWait()
                end = time.process_time() + 0.5
                while time.process_time() < end:
                    pass
                share = wait.share()
                assert share is not None and 0.05 < share < 1  # not half: the rest of the machine has its say
            finally:
                other.kill()
    finally:
        os.sched_setaffinity(0, cores)
