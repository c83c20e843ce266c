"""``megatoken report``."""

import csv
import io
import json
import shutil
import signal
import time
from pathlib import Path

import pytest

from cli_results import RACK, hostile_paths, refused, two_runs
from cli_support import TIMEOUT_SECONDS, call, call_here, redirected, started
from run_folders import run_folder

SQL = "select run, verdict, output_tokens from runs order by run"


def test_pages_of_runs_are_made_anew(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    runs = [Path(shutil.copytree(run, tmp_path / run.name)) for run in two_runs(tmp_path_factory)]
    for run in runs:
        (run / "report.html").unlink()
    code, stdout, err = call("report", *runs)
    assert (code, err) == (0, "")
    assert stdout.splitlines() == [str(run / "report.html") for run in runs]
    assert all("MEASURED" in (run / "report.html").read_text() for run in runs)


def test_the_page_of_a_saved_document(tmp_path: Path) -> None:
    assert call_here("plan", "energy", *RACK, "--out", tmp_path / "plan")[0] == 0
    saved = (tmp_path / "plan" / "plan_energy.html").read_text()
    (tmp_path / "plan" / "plan_energy.html").unlink()
    assert call_here("report", tmp_path / "plan")[:2] == (0, f"{tmp_path / 'plan' / 'plan_energy.html'}\n")
    assert (tmp_path / "plan" / "plan_energy.html").read_text() == saved
    elsewhere = tmp_path / "page.html"
    assert call_here("report", tmp_path / "plan" / "plan_energy.json", "--out", elsewhere)[:2] == (0, f"{elsewhere}\n")
    assert elsewhere.read_text() == saved


def test_a_folder_of_runs_has_a_page_on_each_and_an_index(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(two_runs(tmp_path_factory)[0].parent, tmp_path / "runs"))
    runs = sorted(folder.iterdir())
    code, stdout, err = call_here("report", folder)
    assert (code, stdout.splitlines(), err) == (
        0,
        [*(str(run / "report.html") for run in runs), str(folder / "index.html")],
        "",
    )
    assert sorted(folder.iterdir()) == [*runs, folder / "index.html"]


def test_the_page_of_a_document_lies_beside_it_wherever_the_command_is_called(tmp_path: Path) -> None:
    assert call_here("plan", "energy", *RACK, "--out", tmp_path)[0] == 0
    (tmp_path / "plan_energy.json").rename(tmp_path / "ours.json")
    assert call_here("report", tmp_path / "ours.json")[:2] == (0, f"{tmp_path / 'ours.html'}\n")
    (tmp_path / "ours.html").write_text("my own notes")
    assert "ours.html: this file is not a megatoken page" in refused("report", tmp_path / "ours.json")
    assert (tmp_path / "ours.html").read_text() == "my own notes"
    assert not Path("report.html").exists()


def test_questions_to_many_runs(tmp_path_factory: pytest.TempPathFactory) -> None:
    pytest.importorskip("duckdb")
    runs = two_runs(tmp_path_factory)
    expected = [(run.name, "MEASURED", json.loads((run / "result.json").read_text())["output_tokens"]) for run in runs]
    code, stdout, err = call_here("report", runs[0].parent, "--query", SQL, "--json")
    assert (code, err) == (0, "")
    assert [tuple(row.values()) for row in json.loads(stdout)] == expected
    _, stdout, _ = call_here("report", *runs, "--query", SQL, "--csv")
    assert list(csv.reader(io.StringIO(stdout)))[1:] == [[str(value) for value in row] for row in expected]
    code, stdout, _ = call_here("report", *runs, "--query", SQL)
    assert code == 0
    assert all(run.name in stdout for run in runs)


def test_runs_as_csv(tmp_path_factory: pytest.TempPathFactory) -> None:
    runs = two_runs(tmp_path_factory)
    code, stdout, err = call_here("report", runs[0].parent, "--csv")
    assert (code, err) == (0, "")
    rows = list(csv.DictReader(io.StringIO(stdout)))
    assert [Path(row["run"]) for row in rows] == list(runs)
    for row, run in zip(rows, runs, strict=True):
        result = json.loads((run / "result.json").read_text())
        assert row["verdict"] == result["verdict"]
        assert float(row["output_tokens_per_second"]) == result["output_tokens_per_second"]


def test_the_latest_runs_against_a_chosen_baseline(tmp_path: Path) -> None:
    # The slow one last: runs stand in the order in which they were written, and that can take more than a second.
    *others, slow = [
        run_folder(tmp_path / "runs", f"{day:02}", "host", f"2026-11-{day:02}T09:00:00Z", seconds=seconds)
        for day, seconds in ((1, 10.0), (2, 10.1), (3, 9.9), (4, 20.0))
    ]
    code, stdout, err = call_here("report", tmp_path / "runs", "--baseline", others[0].path)
    assert (code, err) == (3, "")
    verdict = stdout.splitlines()[-1]
    assert verdict.startswith("regression: tiny bf16 offline host: Rate 5.5 tokens/s; the baseline 01, 11, puts")
    page = (tmp_path / "runs" / "index.html").read_text()
    assert "1 regression against the baseline 01 in the 1 of 1 group" in page
    shutil.rmtree(slow.path)
    code, stdout, _ = call_here("report", tmp_path / "runs", "--baseline", others[0].path)
    assert (code, stdout.splitlines()[-1].split(":")[0]) == (0, "within the spread")
    assert "--baseline: give no --csv, no --matrix" in refused(
        "report", tmp_path / "runs", "--baseline", slow.path, "--csv"
    )


def test_questions_that_have_no_answer(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    run = two_runs(tmp_path_factory)[0]
    assert "query: " in refused("report", run, "--query", "selec 1")
    assert "query: " in refused("report", run, "--query", "select * from read_text('/etc/hostname')")
    target = tmp_path / "copy.csv"
    assert "query: " in refused("report", run, "--query", f"copy runs to '{target}'")
    assert not target.exists()
    assert str(tmp_path) in refused("report", tmp_path, "--query", "select 1")


def test_what_has_no_page(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    run = two_runs(tmp_path_factory)[0]
    for path in hostile_paths(tmp_path).values():
        assert str(path) in refused("report", path)
    for arguments, why in (
        ((), "Missing argument"),
        ((run, "--json"), "needs --query"),
        ((run, "--csv", "--out", tmp_path / "page.html"), "give no --out"),
        ((run, run, "--out", tmp_path / "page.html"), "give only one PATH"),
        ((run, "--query", SQL, "--csv", "--json"), "at most one of --csv and --json"),
        ((run, "--query", SQL, "--out", tmp_path / "page.html"), "no --out"),
        ((run, "--out", tmp_path / "absent" / "page.html"), "cannot be written"),
        ((run, "--out", tmp_path), f"{tmp_path}: not a regular file; name another"),
        ((run, "--out", "."), ".: not a regular file; name another"),
        ((run, "--querry", SQL), "--querry: unknown flag; did you mean --query?"),
    ):
        assert why in refused("report", *arguments)
    assert not (tmp_path / "page.html").exists()


def test_a_closed_output_names_the_page(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    code, _, err = redirected(">&-", "report", two_runs(tmp_path_factory)[0], "--out", page)
    assert code == 1
    assert err == f"megatoken: cannot write to standard output: Bad file descriptor; the page is {page}\n"
    assert page.exists()


def test_a_question_without_end_can_be_interrupted(tmp_path_factory: pytest.TempPathFactory) -> None:
    pytest.importorskip("duckdb")
    endless = "select sum(a.range * b.range) from range(100000000) a, range(100000000) b"
    with started("report", two_runs(tmp_path_factory)[0], "--query", endless) as process:
        while "duckdb" not in Path(f"/proc/{process.pid}/maps").read_text():
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=TIMEOUT_SECONDS) == ("", "megatoken: interrupted; nothing was written\n")
        assert process.returncode == 130


def test_a_rate_written_over_by_hand(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    run = Path(shutil.copytree(two_runs(tmp_path_factory)[0], tmp_path / "run"))
    result = json.loads((run / "result.json").read_text())
    rate = 2 * result["output_tokens_per_second"]
    (run / "result.json").write_text(json.dumps({**result, "output_tokens_per_second": rate}))
    query = ("report", run, "--query", "select model from runs")
    commands = (("compare", run, "GB200"), ("plan", "capacity", run), ("report", run), ("aggregate", run), query)
    for arguments in commands:
        why = refused(*arguments)
        assert f"{run}: result.json contradicts itself" in why
        assert f"megatoken audit {run} lists every contradiction" in why
    code, _, err = call_here("audit", run)
    assert (code, err) == (3, "")
