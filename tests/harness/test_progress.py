import io
import math
import os
from pathlib import Path

import pytest

from megatoken.engine.state import ReplicaState
from megatoken.harness import progress
from megatoken.harness.progress import Progress

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
    line = "20 s, 60 s left  25 %  4,321 tokens/s  1,234 in flight  2,000 of 2,008 pages"
    drain = "61 s, draining  4,321 tokens/s  1,234 in flight  2,000 of 2,008 pages"
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["loading", line, line, line, drain, "note: this stays"]


def test_quiet_says_nothing_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    live = Progress(quiet=True)
    live.stage("loading")
    live.note("note")
    live.running(1.0, 1.0, 0.0, 0.0, STATE)
    assert capsys.readouterr() == ("", "")


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
        while shown.count("\r") < 5:
            shown += screen.read(4096).decode()
    parts = shown.split("\r")[1:]
    assert parts[0] == "x" * 40
    assert parts[1].startswith("0 s, ? left  0 %")
    assert parts[2].startswith("10 s, 10 s left  50 %")
    assert parts[3].isspace()
    assert len(parts[3]) >= len(parts[2].rstrip())
    assert parts[4] == ""
    assert all(len(part) < 80 for part in parts)
