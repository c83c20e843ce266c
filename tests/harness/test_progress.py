import fcntl
import io
import math
import os
import re
import subprocess
import sys
import termios
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from cli_support import ENVIRONMENT
from megatoken.engine.state import ReplicaState
from megatoken.harness import progress
from megatoken.harness.progress import ERASE, ExpectedWork, Progress, duration, seconds_left

STATE = ReplicaState(in_flight=1234, pages_free=8, pages=2008)


def test_off_a_terminal_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    live = Progress()
    live.stage("loading")
    for _ in range(15):
        live.running(20.0, 60.0, 0.25, 4321.0, STATE)
        now += 1.0
    live.running(61.0, None, 1.0, 4321.0, STATE)
    live.clear()
    live.note("note: this stays")
    line = "20 s, 1 min 0 s left  25 %  4,321 tokens/s  1,234 in flight  2,000 of 2,008 pages"
    drain = "1 min 1 s, draining  4,321 tokens/s  1,234 in flight  2,000 of 2,008 pages"
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["loading", line, line, line, drain, "note: this stays"]


def test_quiet_says_nothing_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    live = Progress(quiet=True)
    live.stage("loading")
    live.note("note")
    live.running(1.0, 1.0, 0.0, 0.0, STATE)
    assert capsys.readouterr() == ("", "")


def test_the_line_says_for_how_long_no_request_was_answered(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PLAIN_PERIOD_SECONDS", 0.0)
    live = Progress()
    for silent_seconds in (2.9, 65.0):
        live.waiting("warming up for 5 s", 16, silent_seconds)
        live.running(70.0, math.inf, 0.0, 0.0, STATE, silent_seconds)
    assert capsys.readouterr().err.splitlines() == [
        "1 min 10 s, ? left  0 %  0 tokens/s  1,234 in flight  2,000 of 2,008 pages",
        "warming up for 5 s: no answer for 1 min 5 s  16 in flight",
        "1 min 10 s, ? left  0 %  no answer for 1 min 5 s  1,234 in flight  2,000 of 2,008 pages",
    ]


def test_what_stderr_cannot_take_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr("sys.stderr", io.TextIOWrapper(full, write_through=True))
        live = Progress()
        live.stage("loading")
        live.note("note")
        for _ in range(2):
            live.running(1.0, 1.0, 0.0, 0.0, STATE)
        live.clear()


def test_on_a_terminal_the_line_is_redrawn_in_place_and_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = os.openpty()
    with os.fdopen(master, "rb", buffering=0) as screen, os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        live = Progress(quiet=True)
        live.stage("x" * 40)
        live.running(0.0, math.inf, 0.0, 0.0, STATE)
        live.running(10.0, 10.0, 0.5, 1.0, STATE)
        live.clear()
        shown = ""
        while shown.count("\r") < 4:
            shown += screen.read(4096).decode()
    parts = shown.split("\r")[1:]
    assert parts[0] == "x" * 40 + ERASE
    bars = ("━" * 10, "─" * 10) if terminal.encoding.lower().startswith("utf") else ("#" * 10, "-" * 10)
    assert parts[1].startswith(f"{2 * bars[1]} 0 s, ? left  0 %")
    assert parts[2].startswith(f"{''.join(bars)} 10 s, 10 s left  50 %")
    assert parts[3] == ERASE
    assert all(len(part.removesuffix(ERASE)) < 80 for part in parts)


LIVE = """
import sys, time
from megatoken.engine.state import ReplicaState
from megatoken.harness.progress import Progress
from megatoken.harness.stop import StopSignals

live = Progress()
with StopSignals() as stop:
    stop.parting_words = "stopped"
    while not stop.received or sys.argv[1] == "hangs":
        live.running(1.0, 9.0, 0.1, 50.0, ReplicaState())
        time.sleep(0.02)
    live.clear()
"""


@pytest.mark.parametrize(("run", "rows"), [("ends", [""]), ("hangs", ["megatoken: stopped", ""])])
def test_control_c_leaves_nothing_of_the_line_on_the_terminal(run: str, rows: list[str]) -> None:
    """Nor the ^C that the terminal shows behind it."""
    master, slave = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", LIVE, run],
        **dict.fromkeys(("stdin", "stdout", "stderr"), slave),
        env={**ENVIRONMENT, "TERM": "xterm"},
        start_new_session=True,
        preexec_fn=partial(fcntl.ioctl, 0, termios.TIOCSCTTY, 0),
    ):
        os.close(slave)
        shown = b""
        while b"left" not in shown:
            shown += os.read(master, 4096)
        os.write(master, b"\x03")
        time.sleep(0.3)
        if run == "hangs":
            os.write(master, b"\x03")
        with suppress(OSError):  # its end
            while read := os.read(master, 4096):
                shown += read
    os.close(master)
    assert b"^C" in shown
    assert screen(shown.decode().replace("\x1b[?25h", "")) == rows


def screen(shown: str) -> list[str]:
    """The lines of a terminal after what was written, which moves by lines, returns and erasures."""
    lines = []
    for line in shown.replace("\r\n", "\n").split("\n"):
        row, at = "", 0
        for part in re.split(f"(\r|{re.escape(ERASE)})", line):
            if part == "\r":
                at = 0
            elif part == ERASE:
                row = row[:at]
            else:
                row, at = row[:at] + part + row[at + len(part) :], at + len(part)
        lines.append(row)
    return lines


def test_answers_that_end_before_their_limits_do_not_delay_the_end() -> None:
    """2,000 samples at a steady pace, 200 at a time; answers end after 40 of 1,024 tokens."""
    samples, prompt, limit, answer, seconds = 2000, 100, 1024, 40, 840
    work = ExpectedWork(samples * prompt, samples * limit)
    estimates = []
    for second in range(1, seconds):
        ended = second * samples // seconds
        while work.ended_limits < ended * limit:
            work.end(limit, answer)
        share = work.share(min(samples, ended + 200) * prompt + ended * answer + 200 * answer // 2)
        left = seconds_left(second, share, ended / samples)
        assert share == pytest.approx(second / seconds, abs=0.12)
        estimates.append(left)
    assert math.isinf(estimates[0]), "one second says nothing"
    assert max(left for left in estimates if math.isfinite(left)) < 1.2 * seconds
    assert estimates[-1] < 5


def test_a_run_is_not_done_while_its_longest_answers_are_open() -> None:
    work = ExpectedWork(prompt_tokens=15_000, open_limits=200 * 100)
    for _ in range(120):
        work.end(100, 20)
    done = 15_000 + 120 * 20 + 80 * 60  # those still open have three times as many tokens already
    share = work.share(done)
    assert 0.9 < share < 0.98
    assert 0.5 < seconds_left(18.0, share, 120 / 200) < 2.0
    for _ in range(80):
        work.end(100, 90)
    assert work.share(15_000 + 120 * 20 + 80 * 90) == 1.0


def test_without_an_answer_that_ended_the_limits_count() -> None:
    work = ExpectedWork(prompt_tokens=1000, open_limits=9000)
    assert work.share(2000) == 0.2
    assert math.isinf(seconds_left(20.0, 0.2, 0.0))
    assert seconds_left(40.0, 0.2, 0.0) == pytest.approx(160.0)
    assert ExpectedWork().share(0) == 0.0


def test_times_have_two_units() -> None:
    assert [duration(seconds) for seconds in (0.4, 59.4, 59.6, 725, 12_000)] == [
        "0 s",
        "59 s",
        "1 min 0 s",
        "12 min 5 s",
        "3 h 20 min",
    ]
