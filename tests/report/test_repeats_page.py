"""Pages on repeats together, and on folders of runs."""

import shutil
from dataclasses import replace

import pytest
from pages import parsed, table_rows, words

from megatoken.analysis.repeats import REPEATS, summarise_repeats
from megatoken.audit import read_evidence
from megatoken.claims.references import comparison_entry
from megatoken.files import plain, to_json, write_text
from megatoken.planning.commands import Common, Rate, capacity
from megatoken.report import read_subject, write_report, write_reports
from megatoken.report.documents import checked
from megatoken.report.page import page
from megatoken.report.views import document_view
from megatoken.runs.reasons import reason
from megatoken.runs.run import Verdict
from run_folders import run_folder

PUBLISHED = {"benchmark": "llama2-70b-99", "scenario": "Offline"}
MINUTE = "2026-11-20T09:{:02}:00+00:00"


@pytest.fixture
def runs(tmp_path):
    p99s = (0.5, 1.5, 4.0)
    return [
        run_folder(
            tmp_path / "x-repeats", f"00{number}", "host", MINUTE.format(number),
            seconds=10.0 + number, loadgen_ttft_p99_seconds=p99, notes=[reason("RANDOM_WEIGHTS")],
        )
        for number, p99 in enumerate(p99s, 1)
    ]  # fmt: skip


def test_a_folder_of_repeats_has_a_page_on_all_and_one_on_each(runs, tmp_path):
    folder = tmp_path / "x-repeats"
    write_text(folder / REPEATS, to_json(summarise_repeats(runs, 5)))
    pages = list(write_reports(folder))
    assert [page.relative_to(folder).as_posix() for page in pages] == [
        "001/report.html", "002/report.html", "003/report.html", "repeats.html",
    ]  # fmt: skip
    root = parsed(pages[-1].read_text())
    text = words(root)
    for phrase in ("9.209", "mean of 3 runs, with 95 % confidence between", "of 5 requested", "MEASURED"):
        assert phrase in text
    assert table_rows(root, "What each run had")["002"] == ["MEASURED", "9.167", "0.8333", "1.5"]
    units = {name: cells[0] for name, cells in table_rows(root, "Mean of the runs").items() if cells}
    assert units == {"Output rate": "tokens/s", "Sample rate": "samples/s"}
    assert write_report(folder) == pages[-1]
    # The footer tells the second at which a page was written.
    written_once_more = write_report(folder, tmp_path / "page.html").read_text()
    assert written_once_more.split("<footer>")[0] == pages[-1].read_text().split("<footer>")[0]
    assert read_subject(folder).values["runs_wanted"] == 5


@pytest.mark.parametrize("lost", ["folder", "result.json"])
def test_a_repeat_that_was_deleted_is_told_by_page_comparison_and_plan(runs, tmp_path, lost):
    folder = tmp_path / "x-repeats"
    write_text(folder / REPEATS, to_json(summarise_repeats(runs, 3)))
    words_on_it = (
        f"missing although repeats.json lists them: 002 (its {lost} is gone); all numbers cover the other runs"
    )
    rate = Rate(run=folder, accelerators=1)
    assert words_on_it not in words(parsed(write_report(folder).read_text()))
    assert words_on_it not in (comparison_entry(str(folder), read_evidence, **PUBLISHED).note or "")
    assert not [note for note in capacity(rate, Common()).notes if words_on_it in note]
    if lost == "folder":
        shutil.rmtree(folder / "002")
    else:
        (folder / "002" / lost).unlink()
    assert [note for note in capacity(rate, Common()).notes if words_on_it in note]
    assert words_on_it in words(parsed(write_report(folder).read_text()))
    assert words_on_it in (comparison_entry(str(folder), read_evidence, **PUBLISHED).note or "")
    assert comparison_entry(str(folder / "001"), read_evidence, **PUBLISHED).note is None


def test_reasons_and_simulated_gpus_of_repeats_are_told(runs, tmp_path):
    run = runs[1]
    reason = {"code": "FAILED_SAMPLES", "message": "1 of 10 samples failed"}
    invalid = replace(run, verdict=Verdict.INVALID, reasons=[reason])
    document = summarise_repeats([runs[0], invalid, runs[2]], 3)
    assert document["reasons"] == [{"run": "002", **reason}]
    text = words(parsed(page(document_view(checked(plain(document))))))
    assert "INVALID the worst of 3 runs: a required condition was not met" in text
    assert "FAILED_SAMPLES 002: 1 of 10 samples failed" in text
    assert "simulated H200" not in text

    for one in runs:
        one.config["rack"] = {"simulated_gpu": "H200"}
    text = words(parsed(page(document_view(checked(plain(summarise_repeats(runs, 3)))))))
    assert "MEASURED simulated H200: rates and times come from a cost model; the worst of 3 runs" in text


def test_only_runs_of_a_repetition_have_a_page_of_repeats(runs, tmp_path):
    folder = tmp_path / "x-repeats"
    assert [page.name for page in write_reports(tmp_path)] == ["report.html"] * 3 + ["index.html"]
    write_text(folder / REPEATS, to_json(summarise_repeats(runs, 3)))
    assert list(write_reports(tmp_path))[-1] == folder / "repeats.html"
    run_folder(folder, "004", "host", MINUTE.format(10), precision="fp8")
    assert [page.name for page in write_reports(tmp_path)] == ["report.html"] * 4 + ["index.html"]


def test_the_one_page_on_repeats_and_another_run_leaves_out_none(runs, tmp_path):
    page = tmp_path / "page.html"
    write_text(tmp_path / "x-repeats" / REPEATS, to_json(summarise_repeats(runs, 3)))
    assert "Mean of the runs" in write_report(tmp_path, page).read_text()
    run_folder(tmp_path, "alone", "host", MINUTE.format(10))
    assert list(table_rows(parsed(write_report(tmp_path, page).read_text()), "Runs"))[1:] == [
        "alone", "003", "002", "001",
    ]  # fmt: skip
    assert "Mean of the runs" in write_report(tmp_path / "x-repeats", page).read_text()


def test_repeats_whose_runs_are_gone_are_shown_from_their_document(runs, tmp_path):
    moved = tmp_path / "moved"
    moved.mkdir()
    write_text(moved / REPEATS, to_json(summarise_repeats(runs, 3)))
    assert write_report(moved) == moved / "repeats.html"
    old = {key: value for key, value in summarise_repeats(runs, 3).items() if key not in ("title", "runs_in_the_mean")}
    write_text(moved / REPEATS, to_json(old))
    assert "What each run had" in write_report(moved).read_text()
