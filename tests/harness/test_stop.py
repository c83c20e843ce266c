"""Signals to a process that is busy inside ``StopSignals``."""

import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from cli_support import ENVIRONMENT, TIMEOUT_SECONDS

PROGRAM = """
import signal, sys, time
from megatoken.harness import stop

stop.GRACE_SECONDS = float(sys.argv[1])
with stop.StopSignals() as signals:
    signals.parting_words = "stopped at once; a folder keeps what was done"
    signals.write_seconds = lambda: float(sys.argv[2])
    print("ready", flush=True)
    while not signals.received:
        time.sleep(0.01)
    time.sleep(1)  # what a step still takes
print(signals.received)
"""
PARTING = "megatoken: stopped at once; a folder keeps what was done"


def outcome(
    *numbers: signal.Signals, grace_seconds: float = 100.0, write_seconds: float = 0.0, ignored: bool = False
) -> tuple[int, str, str]:
    """Exit code and output of the program, sent ``numbers`` at once when it is ready."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(grace_seconds), str(write_seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        preexec_fn=partial(signal.signal, signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for number in numbers:
            os.kill(process.pid, number)
            time.sleep(0.1)
        out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    return process.returncode, out.strip(), err.strip()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_one_signal_is_a_question(number: signal.Signals) -> None:
    assert outcome(number) == (0, number.name, "")


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_one_ends_the_process(second: signal.Signals) -> None:
    assert outcome(signal.SIGHUP, second) == (130, "", PARTING)


def test_the_end_of_the_grace_ends_the_process() -> None:
    assert outcome(signal.SIGHUP, grace_seconds=0.3) == (130, "", PARTING)
    assert outcome(signal.SIGTERM, signal.SIGHUP, grace_seconds=0.3) == (130, "", PARTING)


def test_what_takes_long_to_write_gets_as_long() -> None:
    assert outcome(signal.SIGTERM, grace_seconds=0.3, write_seconds=30.0) == (0, "SIGTERM", "")


def test_a_terminal_that_closes_may_say_so_twice() -> None:
    assert outcome(signal.SIGHUP, signal.SIGHUP) == (0, "SIGHUP", "")
    assert outcome(signal.SIGTERM, signal.SIGHUP)[0] == 0


def test_nohup_is_obeyed() -> None:
    assert outcome(signal.SIGHUP, signal.SIGINT, ignored=True) == (0, "SIGINT", "")
