"""A short sweep with the real engine, from the command line to its page; its figures against formulas written apart."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from cli_support import call_here, make_checkpoint
from megatoken.analysis.sweep import _too_few as sweep_notes
from megatoken.analysis.sweep import compare_sweeps, found, saturated, summarise_sweep
from megatoken.analysis.sweep_point import backlog_grows, point_figures
from megatoken.files import plain
from megatoken.planning.run_price import broken_limits
from megatoken.report import write_reports
from megatoken.report.console import show
from megatoken.report.documents import Document, checked
from megatoken.report.views.load_charts import Sweep, load_figures
from megatoken.runs.run import Run, read_run

ROWS = 20


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """A tiny model and short requests."""
    folder = tmp_path_factory.mktemp("load")
    lengths = folder / "lengths.csv"
    lengths.write_text("input_tokens,output_tokens\n" + "".join(f"{4 + i % 7},{2 + i % 5}\n" for i in range(ROWS)))
    model = make_checkpoint(folder / "model")
    engine = ("--engine.threads", 1, "--engine.max_sequences", 4)
    return ["--model", model, "--lengths", lengths, *engine, "--warm-up", 0.1, "--settle", 0.1, "--window", 1]


@pytest.fixture(scope="module")
def swept(flags: list[object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of two loads, each twice."""
    out = tmp_path_factory.mktemp("out")
    code, _, err = call_here("sweep", *flags, "--concurrency", "1,3", "--repeat", 2, "--out", out)
    assert code == 0, err
    (path,) = out.iterdir()
    return path


@pytest.fixture(scope="module")
def runs(swept: Path) -> list[Run]:
    return [read_run(folder) for folder in sorted(swept.iterdir()) if folder.is_dir()]


def test_a_sweep_leaves_a_run_folder_for_each_point_and_one_document(swept: Path, runs: list[Run]) -> None:
    assert [run.path.name for run in runs] == [
        *("01-concurrency-1-1", "01-concurrency-1-2", "02-concurrency-3-1", "02-concurrency-3-2")
    ]
    document = json.loads((swept / "sweep.json").read_text())
    assert document["verdict"] == "MEASURED"
    assert [point["value"] for point in document["points"]] == [1, 1, 3, 3]
    assert [row["runs"] for row in document["repeats"]] == [2, 2]
    page = (swept / "sweep.html").read_text()
    assert "<svg" in page and page.count('<table class="stacked"') >= 3  # wide tables become lines on a phone
    assert 'role="rowheader" data-column="Load"' in page
    for run in runs:
        assert (run.path / "report.html").is_file()
        assert (run.path / "tokens.parquet").is_file()


def test_the_document_follows_from_the_run_folders(swept: Path, runs: list[Run]) -> None:
    stored = json.loads((swept / "sweep.json").read_text())
    again = plain(summarise_sweep(runs, swept.name))
    assert {**again, "created_at": ""} == {**stored, "created_at": ""}


def test_an_edited_document_is_found_by_an_audit_and_refused_by_a_plan(swept: Path, tmp_path: Path) -> None:
    """Each names the point and the field; without its run folders a document cannot be checked."""
    copy, (_, out, _) = shutil.copytree(swept, tmp_path / "copy"), call_here("audit", swept, "--json")
    of_sweep = [one["severity"] for one in json.loads(out)["findings"] if one["id"] == "run_folder.sweep"]
    assert of_sweep == ["pass"]
    document = json.loads((copy / "sweep.json").read_text())
    document["points"][2]["output_tokens_per_second"] = 99_999.0
    (copy / "sweep.json").write_text(json.dumps(document))
    wrong = "point 02-concurrency-3-1: output_tokens_per_second 99999.0, recomputed "
    code, out, _ = call_here("audit", copy, "--full")
    assert code == 3 and wrong in " ".join(out.split())
    limits = ("--ttft-limit", 100, "--tpot-limit", 100, "--percentile", "p50")
    code, _, err = call_here("plan", "capacity", "--sweep", copy, *limits)
    assert code == 2 and wrong in err and f"megatoken report {copy} rebuilds it" in err
    (tmp_path / "alone.json").write_text(json.dumps(document))
    (copy / "sweep.json").write_text(json.dumps(document)[:-1])
    code, out, _ = call_here("audit", copy, "--full")
    assert code == 3 and "Found: is not JSON" in out
    assert call_here("plan", "capacity", "--sweep", tmp_path / "alone.json", *limits)[0] == 0
    for removed in (None, "01-concurrency-1-2"):
        if removed:
            shutil.rmtree(copy / removed)
            code, _, err = call_here("plan", "capacity", "--sweep", copy, *limits)
            assert code == 2 and f"missing: {removed}; megatoken report" in err
        assert call_here("report", copy)[0] == 0
        assert call_here("plan", "capacity", "--sweep", copy, *limits)[0] == 0


def test_figures_of_a_point_against_loops_over_its_rows(runs: list[Run]) -> None:
    run = runs[-1]
    figures = point_figures(run)
    start, end = run.result["load"]["window_seconds"]
    assert end - start >= 1.0
    rows = run.requests.to_pylist()
    inside = [row for row in rows if start <= row["scheduled_seconds"] < end]
    assert figures["requests"] == len(inside) > 0
    assert figures["requests_unended"] == figures["requests_failed"] == 0
    times = {row["sample_id"]: row["token_times_ns"] for row in pq.read_table(run.path / "tokens.parquet").to_pylist()}
    assert {row["sample_id"]: row["output_tokens"] for row in rows} == {id_: len(of) for id_, of in times.items()}
    seen = sum(start <= time / 1e9 < end for of in times.values() for time in of)
    assert figures["output_tokens_per_second"] == pytest.approx(seen / (end - start))
    ttft = [row["first_token_seconds"] - row["scheduled_seconds"] for row in inside]
    assert figures["ttft_seconds"]["p50"] == pytest.approx(float(np.median(ttft)))
    gaps = [b - a for row in inside for a, b in zip(times[row["sample_id"]], times[row["sample_id"]][1:], strict=False)]
    assert figures["itl_seconds"]["p90"] == pytest.approx(np.percentile([gap for gap in gaps if gap], 90) / 1e9)
    limits = run.result["ttft_limit_seconds"], run.result["tpot_limit_seconds"]
    good = sum(
        row["first_token_seconds"] - row["scheduled_seconds"] <= limits[0]
        and (row["last_token_seconds"] - row["first_token_seconds"]) <= limits[1] * (row["output_tokens"] - 1)
        for row in inside
    )
    assert figures["goodput"]["samples_per_second"] == pytest.approx(good / (end - start))
    assert figures["in_flight"] == pytest.approx(3, abs=0.2)
    assert sum(part["ttft_seconds"]["samples"] for part in figures["ttft_by_input_tokens"]) == len(inside)
    assert figures["user_tokens_per_second"]["p50"] == pytest.approx(1 / figures["tpot_seconds"]["p50"])


@pytest.mark.timing
def test_an_open_loop_counts_from_the_time_due(flags: list[object], tmp_path: Path) -> None:
    code, out, err = call_here("sweep", *flags, "--rates", "20", "--json", "--out", tmp_path)
    assert code == 0, err
    (point,) = json.loads(out)["points"]
    assert point["kind"] == "rate"
    assert point["offered_requests_per_second"] == pytest.approx(20, rel=0.6)
    for name in ("p50", "p99"):
        assert point["ttft_seconds"][name] >= point["ttft_from_send_seconds"][name] > 0
    assert point["send_lag_seconds"]["p50"] > 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("--concurrency", "1", "--rates", "2"), "give one of them"),
        (("--arrivals", "gamma"), "give --rates"),
        (("--arrivals", "poisson", "--concurrency", "2"), "--arrivals poisson: only with --rates"),
        (("--arrivals", "constant", "--trace", "/x"), "--arrivals constant: only with --rates"),
        (("--arrivals", "gamma", "--users", "2", "--profile", "rag"), "--arrivals gamma: only with --rates"),
        (("--settle", "2", "--rules", "endpoints-v1.0"), "--settle 2: --rules decide"),
        (("--settle", "2", "--rates", "1@5"), "--settle: stages have their own lengths"),
        (("--burstiness", "1", "--rates", "2"), "--arrivals gamma"),
        (("--scenario", "offline"), "not a setting of a sweep"),
        (("--rate", "3"), "not a setting of a sweep"),
        (("--window", "0"), "--window 0: expected 1 to"),
        (("--settle", "-1"), "--settle -1: expected 0 to"),
        (("--burstiness", "0", "--rates", "2", "--arrivals", "gamma"), "--burstiness 0: expected a number above zero"),
        (("--disclosures", "/x"), "go with --rules"),
        (("--seed-set", "B"), "go with --rules"),
        (("--trace", "/x", "--window", "5"), "--rates and --window do not"),
        (("--window", "5", "--concurrency", "1@5"), "stages have their own lengths"),
        (("--rates", "1@5,2"), "expected stages such as"),
        (("--neighbour", "--concurrency 3"), "give --endpoint"),
        (("--neighbour", "--window 3", "--endpoint", "http://127.0.0.1:1/v1"), "names no load"),
        (("--concurrency", "0"), "whole numbers above zero"),
    ],
)
def test_what_a_sweep_refuses(wrong: tuple[str, ...], message: str, tmp_path: Path) -> None:
    code, _, err = call_here("sweep", *wrong, "--dry-run", "--out", tmp_path / "none")
    assert code == 2
    assert message in err
    assert not (tmp_path / "none").exists()


def made_point(value: float, rate: float, latency: float, good: float = 1.0, **more: Any) -> dict[str, Any]:
    usual = {"kind": "concurrency", "ended_by": None, "overloaded": False, "latency_seconds": {"p50": latency}}
    usual |= {"requests": 662, "requests_unended": 0, "window_seconds": [2.0, 12.0]}
    return {**usual, "value": value, "output_tokens_per_second": rate, "goodput": {"share": good}, **more}


def test_the_knee_the_limits_and_the_peak_of_a_known_curve() -> None:
    """A batch engine: a step takes 10 ms and 1 ms for each request, so the knee is at 10 requests."""
    loads = (1, 2, 4, 8, 10, 16, 32, 64, 128)
    points = [made_point(n, n / (0.01 + 0.001 * n), 0.01 + 0.001 * n, good=float(n <= 16)) for n in loads]
    result = found(points)
    assert result["knee"] == 10
    assert result["highest_within_limits"] == 16
    assert result["peak"] == 128
    assert not saturated(points)
    assert saturated([*points, made_point(256, 935, 0.27), made_point(512, 930, 0.55)])


def test_a_load_whose_answers_were_cut_off_is_no_knee() -> None:
    """The answers that ended are the short ones, so their median is too low."""
    points = [made_point(n, n / (0.01 + 0.001 * n), 0.01 + 0.001 * n) for n in (1, 4, 10, 16)]
    cut = [made_point(n, 400.0, 0.011, requests_unended=67) for n in (32, 64)]
    assert found([*points, *cut])["knee"] == 10
    assert found([*points, *({**point, "requests_unended": 66} for point in cut)])["knee"] == 32


def test_a_sweep_breaks_its_limits_where_each_load_does(swept: Path, tmp_path: Path) -> None:
    """A load breaks them if one of its repeats does."""
    sweep = tmp_path / "sweep"
    shutil.copytree(swept, sweep)

    def set_limit(folder: Path, seconds: float) -> None:
        config = yaml.safe_load((folder / "config.yaml").read_text())
        config["limits"]["ttft_seconds"]["p99"] = seconds
        (folder / "config.yaml").write_text(yaml.safe_dump(config))

    folders = sorted(path.parent for path in sweep.glob("*/config.yaml"))  # two repeats of each of two loads
    for seconds, broken in (
        ((1e-6, 1e-6, 1e-6, 1e-6), True),
        ((1e-6, 1e3, 1e3, 1e-6), True),
        ((1e-6, 1e-6, 1e3, 1e3), False),
    ):
        for folder, limit in zip(folders, seconds, strict=True):
            set_limit(folder, limit)
        assert broken_limits(sweep) is broken


def test_a_load_with_failed_requests_is_no_peak() -> None:
    points = [made_point(1, 10, 1), made_point(2, 15, 1), made_point(4, 30, 1, requests_failed=2)]
    assert [found(points)[name] for name in ("peak", "peak_output_tokens_per_second")] == [2, 15]
    assert found(points[2:])["peak"] == 4  # there is no other


def test_a_load_that_overloads_is_not_within_the_limits() -> None:
    points = [made_point(1, 10, 1), made_point(2, 20, 1, overloaded=True)]
    assert found(points)["highest_within_limits"] == 1


def test_too_few_requests_do_not_show_that_a_load_is_within_the_limits() -> None:
    """662 show a p99, as on every page; repeats count together, and what was broken stays broken."""
    points = [
        *(made_point(1, 10, 1, requests=331) for _ in range(2)),
        made_point(2, 20, 1, requests=100),
        made_point(4, 40, 1, requests=1),
        made_point(8, 80, 1, good=0.5, requests=1),
    ]
    result = found(points)
    assert (result["highest_within_limits"], result["highest_limits_met"], result["limits_unknown"]) == (1, 1, [2, 4])
    assert found(points[1:])["highest_within_limits"] is None
    [note] = sweep_notes(points)
    assert note.endswith("at load 2, 4: load 4 had 1 of the 662 that the percentile needs; raise --window to 6,620")
    assert sweep_notes([*points[:2], points[-1]]) == []
    [note] = sweep_notes([point | {"kind": "speed"} for point in points])
    assert note.endswith("replay a longer trace")
    staged = [point | {"kind": "stages", "stage": {}} for point in points]
    assert found(staged)["limits_unknown"] == sweep_notes(staged) == []


@pytest.mark.parametrize(
    ("key", "needed"), [("ttft_seconds.p50", 11), ("ttft_seconds.p90", 64), ("ttft_seconds.p99", 662)]
)
def test_the_percentile_of_a_limit_says_how_many_requests_it_needs(key: str, needed: int) -> None:
    def point(samples: int) -> dict[str, Any]:
        limit = {"key": key, "limit": 1.0, "found": 0.5, "at_most": True, "answer": "CANNOT TELL", "samples": samples}
        rate = {**limit, "key": "samples_per_second", "at_most": False, "answer": "MET", "found": 2.0, "samples": None}
        return made_point(1, 10, 1, limits=[limit, rate])

    assert found([point(needed)])["highest_within_limits"] == 1
    few = found([point(needed - 1)])
    assert few["highest_within_limits"] is None and few["limits_unknown"] == [1]


def test_a_sweep_of_few_requests_ends_with_a_verdict_and_says_that_its_limits_are_unknown(
    runs: list[Run], capsys: pytest.CaptureFixture[str]
) -> None:
    start, end = runs[0].result["load"]["window_seconds"]
    load = {**runs[0].result["load"], "window_seconds": [start, start + (end - start) / 2]}
    document = plain(summarise_sweep([replace(runs[0], result={**runs[0].result, "load": load})], "few"))
    assert document["verdict"] == "MEASURED" and 0 < document["points"][0]["requests"] < 662
    show(checked(document))
    out = " ".join(capsys.readouterr().out.split())
    assert "ms per output token: not known; too few requests to judge 1" in out
    assert "too few requests to judge the limits at load 1" in out and "raise --window to" in out


@pytest.mark.parametrize(
    ("before", "after", "due", "grows"),
    [(5, 9, 100, False), (5, 46, 100, True), (5, 100, 1000, False), (0, 127, 1000, True)],
)
def test_a_backlog_grows_only_beyond_chance(before: int, after: int, due: int, grows: bool) -> None:
    assert backlog_grows(before, after, due) is grows


def test_the_terminal_shows_the_points(swept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(checked(json.loads((swept / "sweep.json").read_text())))
    shown = capsys.readouterr().out
    assert "Points" in shown
    assert "requests at once" in shown


def test_the_rate_that_came_due_stands_next_to_the_rate_asked_for(
    swept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads((swept / "sweep.json").read_text()) | {"load_kind": "rate", "load_unit": "requests/s"}
    for point in document["points"]:
        point |= {"kind": "rate", "offered_requests_per_second": 1.5 * point["value"]}
    show(checked(document))
    out = capsys.readouterr().out
    assert "highest, at 3 requests/s, of which 4.50 came due ·" in out.replace("4.5 ", "4.50 ")
    assert "Due: requests that came due within the window, a second." in out


def test_a_load_that_was_interrupted_is_not_called_steady(swept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads((swept / "sweep.json").read_text())
    for point in document["points"]:
        point |= {"verdict": "INTERRUPTED", "steady": True, "overloaded": False}
    show(checked(document))
    out = capsys.readouterr().out
    assert "interrupted" in out and "steady" not in out.replace("steady state", "")


def test_a_page_says_how_many_requests_were_judged_and_cut_off(swept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads((swept / "sweep.json").read_text())
    assert all(
        (point["requests_judged"], point["requests_cut_off"]) == (point["requests"], 0) for point in document["points"]
    )
    show(checked(document))
    out = capsys.readouterr().out
    assert "Judged" not in out and "Cut off" not in out  # the table is as wide as a terminal
    document["points"][0]["requests_cut_off"] = 5
    show(checked(document))
    out = capsys.readouterr().out
    assert "Judged" in out and "Cut off" in out


def test_a_window_shorter_than_an_answer_judges_nothing(runs: list[Run], capsys: pytest.CaptureFixture[str]) -> None:
    long = next(row for row in runs[0].requests.to_pylist() if row["output_tokens"] > 3)
    window = [np.nextafter(long["first_token_seconds"], 1e9), long["last_token_seconds"]]
    limit = {"limits": {"ttft_seconds": {"p50": 5.0}, "samples_per_second": 1e-9}}
    load = {**runs[0].result["load"], "window_seconds": window}
    short = replace(runs[0], result={**runs[0].result, "load": load})
    (point,) = summarise_sweep([short], "short")["points"]
    assert (point["requests"], point["requests_completed"], point["steady"]) == (0, 0, None)
    assert point["output_tokens_per_second"] > 0
    document = plain(summarise_sweep([replace(short, config={**short.config, **limit})], "short"))
    assert [one["answer"] for one in document["points"][0]["limits"]] == ["CANNOT TELL"] * 2
    assert document["found"]["highest_within_limits"] is None
    assert "unknown at load 1: no request that came in the window ended; raise --window" in str(document["notes"])
    load["stage"] = {"first": 1, "last": 1}
    (staged,) = summarise_sweep([replace(short, result={**short.result, "load": load})], "staged")["points"]
    assert staged["unjudged"].endswith("; give the stage more seconds, LOAD@SECONDS")
    show(checked(document))
    out = capsys.readouterr().out
    assert "Within your limits: not known" in out and "unknown" in out and "at no load" not in out


def test_a_request_that_waits_for_its_first_token_is_judged_though_none_ended(runs: list[Run]) -> None:
    def point(*unknown: str) -> dict[str, Any]:
        table, start = runs[0].requests, runs[0].result["load"]["window_seconds"][0]
        due = table["scheduled_seconds"].to_numpy() >= start
        for name in unknown:
            values = np.where(due, np.nan, table[name].to_numpy())
            column = pa.array(values, pa.float64(), from_pandas=True)
            table = table.set_column(table.schema.get_field_index(name), name, column)
        return point_figures(replace(runs[0], requests=table))

    assert point()["unjudged"] is None
    assert point("last_token_seconds")["unjudged"] and point("last_token_seconds")["goodput"] is None
    waiting = point("last_token_seconds", "first_token_seconds")
    assert waiting["unjudged"] is None and waiting["goodput"]["share"] == 0


def test_a_limit_that_no_request_shows_leaves_its_load_unknown() -> None:
    shown = {"answer": "CANNOT TELL", "found": None, "limit": 0.1, "at_most": True, "samples": None}
    point = made_point(1, 10, 1, limits=[{**shown, "key": "tpot_seconds.p99"}])
    result = found([point])
    assert result["limits_unknown"] == [1] and result["highest_within_limits"] is None


def test_a_load_that_was_interrupted_keeps_no_limits_and_is_no_peak() -> None:
    points = [made_point(1, 10, 1), made_point(2, 20, 1, verdict="INTERRUPTED")]
    result = found(points)
    assert (result["highest_within_limits"], result["peak"], result["limits_unknown"]) == (1, 1, [])


def test_a_report_writes_the_document_that_its_page_shows(swept: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(swept, folder)
    known = json.loads((folder / "sweep.json").read_text())
    (folder / "sweep.json").write_text(json.dumps({**known, "points": []}))  # as an earlier version counted
    list(write_reports(folder, tmp_path / "sweep.html"))
    assert json.loads((folder / "sweep.json").read_text())["points"] == [] and not (tmp_path / "sweep.json").exists()
    list(write_reports(folder))
    assert json.loads((folder / "sweep.json").read_text())["points"] == known["points"]


def test_no_knee_is_said_of_loads_whose_latencies_are_known(swept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads((swept / "sweep.json").read_text())
    points = [{**document["points"][0], "value": load} for load in (1, 2, 4, 8)]
    points[-1]["latency_seconds"] = dict.fromkeys(points[-1]["latency_seconds"])
    show(checked({**document, "points": points, "found": {**document["found"], "knee": None}}))
    assert "No knee up to 4 " in capsys.readouterr().out


def test_answers_that_were_cut_off_are_no_requests_that_kept_the_limits() -> None:
    point = made_point(1, 10, 1, requests=1000, requests_unended=400)
    result = found([point])
    assert result["limits_unknown"] == [1] and result["highest_within_limits"] is None
    assert found([{**point, "requests_unended": 338}])["highest_within_limits"] == 1


def test_two_sweeps_are_compared_load_by_load(swept: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(swept, other)
    code, out, err = call_here("compare", swept, other, "--json", "--out", tmp_path / "both")
    assert code == 0, err
    document = json.loads(out)
    assert all("too few requests to judge" in note for note in document["notes"])
    assert [row["value"] for row in document["ratios"]] == [1, 3]
    assert {row["output"] for row in document["ratios"]} == {1.0}
    assert "<svg" in (tmp_path / "both" / "sweep_comparison.html").read_text()


def test_a_comparison_says_which_sweep_proves_nothing(swept: Path) -> None:
    document = json.loads((swept / "sweep.json").read_text())
    points = [
        {**point, "verdict": "INTERRUPTED" if point["value"] == 3 else "MEASURED"} for point in document["points"]
    ]
    ended = {**document, "verdict": "INTERRUPTED", "points": points}
    notes = compare_sweeps([document, ended])["notes"]
    assert [note for note in notes if "prove nothing" in note] == [
        f"{swept.name} (2): INTERRUPTED: its figures at load 3 prove nothing, nor do ratios with them"
    ]


def titles_of(points: list[dict[str, Any]]) -> list[str]:
    sweep = Sweep.of(Document({"name": "one", "points": points}, "here"))
    return [figure.title for figure in load_figures([sweep], [])]


def test_the_rate_of_a_window_in_which_none_ended_is_compared_with_none(runs: list[Run]) -> None:
    """Its rate may be that of a ramp."""
    whole = summarise_sweep(runs, "whole")
    of_ramp = {"unjudged": "raise --window", "output_tokens_per_second": 1e9}
    points = [point | (of_ramp if point["value"] == 3 else {}) for point in whole["points"]]
    both = compare_sweeps([whole, whole | {"name": "ramp", "points": points}])
    assert [row["output"] for row in both["ratios"]] == [1.0, None]
    [note] = [note for note in both["notes"] if "too few requests" not in note]
    assert "unknown at load 3: raise --window" in note
    assert found(points)["peak"] == 1
    assert "Throughput against load" in titles_of([whole["points"][0], whole["points"][-1]])
    assert "Throughput against load" not in titles_of([points[0], points[-1]])  # one point is no curve
    one_load = titles_of([point for point in whole["points"] if point["value"] == 1])
    assert not [title for title in one_load if "against load" in title]  # nor are two of one load


def test_a_sweep_is_compared_with_nothing_else(swept: Path, runs: list[Run]) -> None:
    code, _, err = call_here("compare", swept, runs[0].path)
    assert code == 2
    assert "sweeps only" in err
    code, _, err = call_here("compare", swept, swept.parent / "nope")
    assert code == 2
    assert "nope: no such file or folder" in err


@pytest.mark.timing
def test_the_load_changes_within_one_run_and_each_stage_is_a_point(flags: list[object], tmp_path: Path) -> None:
    load = flags[: flags.index("--settle")]
    code, out, err = call_here("sweep", *load, "--concurrency", "1@1,1-6@2,2@1", "--json", "--out", tmp_path)
    assert code == 0, err
    document = json.loads(out)
    first, rising, after = document["points"]
    assert [point["stage"]["last"] for point in document["points"]] == [1, 6, 2]
    assert [point["window_seconds"][1] for point in document["points"]] == pytest.approx([1, 3, 4], abs=0.01)
    assert len({point["run"] for point in document["points"]}) == 1
    assert first["in_flight"] == pytest.approx(1, abs=0.2)
    assert rising["in_flight"] == pytest.approx(3, abs=0.7)  # the mean of whole numbers from 1 to 6
    assert after["in_flight"] < 3
    assert first["timeline"]["in_flight"][-1] < rising["timeline"]["in_flight"][-1]
    assert {"at_seconds", "ttft_p50_seconds", "tpot_p50_seconds"} <= rising["timeline"]["latencies"][0].keys()
    assert document["found"]["knee"] is None and document["found"]["peak"] in (1, 2, 3)
    (folder,) = tmp_path.iterdir()
    page = (folder / "sweep.html").read_text()
    assert "Load asked for" in page and "First token over the sweep" in page
    assert not {word for word in ("at no load", "Knee", "a point of a sweep", ">Load<") if word in page}
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    code, out, err = call_here("compare", folder, other, "--out", tmp_path / "both")
    assert code == 0, err
    assert "Stage   Output   TTFT p50" in out and f"other over {folder.name}" in out and "Knee" not in out
    both = (tmp_path / "both" / "sweep_comparison.html").read_text()
    assert "Time per output token over the sweep, p50" in both and "against load" not in both


@pytest.mark.timing
def test_a_trace_is_replayed_at_its_times(flags: list[object], tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = "".join(f"{100 + i / 10},x,{5 + i % 3},{3 + i % 2},0,y\n" for i in range(39))
    rows += "103.9,x,3000,3000,0,y\n103.9,x,5,0,0,y\n"
    trace.write_text(f"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n{rows}")
    only = [flag for flag in flags[: flags.index("--window")] if flag != flags[3]]
    only.remove("--lengths")
    code, out, err = call_here("sweep", *only, "--trace", trace, "--speed", 4, "--json", "--out", tmp_path / "out")
    assert code == 0, err
    document = json.loads(out)
    (point,) = document["points"]
    assert document["load_kind"] == point["kind"] == "speed"
    assert point["requests_completed"] == point["requests"] > 0
    (run,) = [read_run(folder) for folder in next((tmp_path / "out").iterdir()).iterdir() if folder.is_dir()]
    due = np.sort(run.requests["scheduled_seconds"].to_numpy())
    assert len(due) == 40
    assert np.diff(due) == pytest.approx(0.025, abs=1e-4)
    scaled, left_out = (note for note in document["notes"] if "row" in note)
    assert scaled.startswith("1 of 40 rows exceeded the context of ")
    assert left_out == "1 row without a prompt or an answer left out"


def test_an_audit_of_a_point_finds_nothing(runs: list[Run]) -> None:
    code, out, _ = call_here("audit", runs[0].path)
    assert code == 0, out
