"""What a person reads on the terminal."""

import io
import re

import pytest
from rich.console import Console

from megatoken.report import show
from megatoken.results import read_run


def shown(path, width: int, terminal: bool = False) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, highlight=False)
    show(read_run(path), console)
    return console.file.getvalue()


def test_one_table_then_verdict_rules_and_folder(make_run, unmet):
    path = make_run(rules_unmet=unmet)
    text = shown(path, 80)
    lines = text.splitlines()
    assert re.split(r"\s{2,}", lines[0].strip()) == ["Metric", "Unit", "Value", "p50", "p90", "p95", "p99"]
    assert text.count("Metric") == 1
    assert max(map(len, lines[: lines.index("MLPerf rules not met:")])) <= 80
    table = {line[:25].strip(): line[25:].split() for line in reversed(lines)}
    assert table["Output tokens"] == ["tokens/s", "105"]  # 80 x 26 in 19.829 s
    assert table["Time per output token"] == ["ms", "21.6", "22.8", "23.0*", "23.1*"]
    assert table["First token since query"][0] == "s"
    assert table["Peak memory"] == ["MiB", "300"]
    assert "Samples failed" not in table
    tail = lines[-6:]
    assert tail[0].startswith("* too few samples")
    assert tail[1] == "MEASURED: a healthy run that claims no MLPerf rules"
    assert tail[2:] == [
        "MLPerf rules not met:",
        "  MIN_DURATION ran 20 s of 600 s",
        "  SAMPLES 80 of 24,576 <b>",
        f"Run folder: {path}",
    ]


def test_reasons_follow_the_verdict(make_run):
    text = shown(make_run("INVALID", reasons=[{"code": "SEEDS", "message": "seeds [1] are not those of v5.1"}]), 80)
    assert "INVALID: a sample failed, or an MLPerf rule that it claims is not met\n" in text
    assert "met\n  SEEDS seeds [1] are not those of v5.1\n" in text


@pytest.mark.parametrize("width", [30, 45, 60, 79])
def test_a_narrow_terminal_gets_one_line_per_percentile(make_run, width):
    path = make_run()
    text = shown(path, width)
    words = re.sub(r"\s+", " ", text)
    assert text.count("Metric") == 1
    assert f"Run folder: {path}\n" in text
    for percentile in ("p50", "p90", "p95", "p99"):
        assert words.count(percentile) == 3
    if width >= 45:
        assert "Time per output token p50" in words
        assert all(len(line) <= width for line in text.split("*")[0].splitlines())


def test_no_colour_unless_on_a_terminal(make_run):
    path = make_run()
    assert "\x1b" not in shown(path, 80)
    assert "\x1b[1;36mMEASURED" in shown(path, 80, terminal=True)


def test_a_run_that_did_nothing_still_prints(make_run):
    text = shown(make_run("INTERRUPTED", samples=0, reasons=[{"code": "", "message": "stopped by Ctrl-C"}]), 80)
    assert re.search(r"(?m)^Output tokens +tokens/s +-", text)
    assert "  INTERRUPTED stopped by Ctrl-C" in text


def test_server_latencies_are_called_by_their_names(make_run):
    text = shown(make_run(scenario="server"), 80)
    assert "Time to first token" in text
    assert "since query" not in text
