"""A damaged run folder among others: the commands on several folders name it, and do their work on the rest."""

import json
from pathlib import Path

import pytest

from cli_support import call_here
from run_folders import run_folder

WHY = "series.parquet is missing"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Runs of three nodes at the same time, the second of them damaged."""
    for node in ("a", "b", "c"):
        run_folder(tmp_path / "runs", node, node, "2026-11-20T10:00:00+00:00")
    (tmp_path / "runs" / "b" / "series.parquet").unlink()
    return tmp_path / "runs"


def test_aggregate_adds_up_the_others_and_says_which_one_is_left_out(runs: Path) -> None:
    code, out, err = call_here("aggregate", runs, "--json")
    document = json.loads(out)
    assert code == 2 and WHY in err and err.count("\n") == 1
    assert [node["node"] for node in document["nodes"]] == ["a", "c"]
    assert document["notes"][0].startswith("left out") and WHY in document["notes"][0]


def test_compare_compares_the_others_but_not_one_with_nothing(runs: Path) -> None:
    code, out, err = call_here("compare", runs / "a", runs / "b", runs / "c", "--json")
    document = json.loads(out)
    assert code == 2 and WHY in err
    assert [row["name"] for row in document["rows"]] == ["a", "c"] and WHY in document["notes"][0]
    code, out, err = call_here("compare", runs / "a", runs / "b")
    assert (code, out) == (2, "") and WHY in err


def test_report_makes_the_other_pages_and_names_what_is_left_out_on_the_page_of_all(runs: Path) -> None:
    code, out, err = call_here("report", runs)
    assert code == 2 and WHY in err
    assert out.split() == [str(runs / name) for name in ("a/report.html", "c/report.html", "index.html")]
    assert WHY in (runs / "index.html").read_text()
    code, out, err = call_here("report", runs / "b", runs / "c")
    assert code == 2 and WHY in err and out.split() == [str(runs / "c" / "report.html")]
    for flag in ("--csv", "--matrix"):
        code, out, err = call_here("report", runs, flag)
        assert code == 2 and WHY in err and out


def test_a_mistyped_path_still_stops_the_command(runs: Path) -> None:
    for command in ("aggregate", "compare", "check"):
        code, out, err = call_here(command, runs / "a", runs / "absent")
        assert (code, out) == (2, "") and "absent" in err
