"""The user's limits: what breaks one is named, what too few samples show is left open, and the command says so."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli_support import call_here
from megatoken.analysis.limits import Answer, Limit, asked_limits, judge_limits
from megatoken.analysis.statistics import samples_needed
from megatoken.analysis.summary import summarise_run
from megatoken.runs.run import Run, read_run
from megatoken.runs.tables import SampleRow
from megatoken.runs.writer import RunFolder


def server_run(out: Path, seconds: list[float | None], *, config: dict | None = None, verdict: str = "MEASURED") -> Run:
    """A run whose samples have these times to first token; None: it failed. 10 tokens each, one every 0.1 s."""
    folder = RunFolder.create(
        out, "run", config or {}, {"hostname": "h"}, scenario="server", summarise=summarise_run, facts={"model": "tiny"}
    )
    rows = []
    for number, first in enumerate(seconds):
        due = 0.1 * number
        ends = (None, None) if first is None else (due + first, due + first + 0.9)
        error = "lost" if first is None else None
        rows.append(SampleRow(number, 0, due, due, *ends, 5, 10, None if error else "length", "h", error=error))
    folder.add_samples(rows)
    folder.finish({"verdict": verdict, "reasons": []})
    return read_run(folder.path)


def answer_of(run: Run, key: str, value: float, **price: float) -> Answer:
    (judged,) = judge_limits(run, [Limit(key, value, at_most=key.endswith(("request",)) or "seconds." in key)], **price)
    return judged.answer


@given(
    count=st.integers(1, 3000),
    over=st.integers(0, 60),
    percent=st.sampled_from([("p50", 50.0), ("p90", 90.0), ("p95", 95.0), ("p99", 99.0), ("p999", 99.9)]),
)
def test_the_answer_is_the_one_that_the_binomial_distribution_gives(tmp_path_factory, count, over, percent):
    over = min(over, count)
    name, share = percent[0], percent[1] / 100
    times = np.concatenate([np.full(count - over, 0.5), np.full(over, 2.0)])
    run = server_run_of(times)
    (judged,) = judge_limits(run, [Limit(f"ttft_seconds.{name}", 1.0, at_most=True)])
    at_most = math.fsum(
        math.exp(_log_choose(count, k) + k * math.log1p(-share) + (count - k) * math.log(share))
        for k in range(over + 1)
    )
    if judged.answer is Answer.MET:
        assert at_most < 0.01  # more than the allowed share being over would show so few in one case of a hundred
        assert count >= samples_needed(percent[1])
    elif judged.answer is Answer.NOT_MET:
        assert np.percentile(times, percent[1]) > 1.0
    else:
        assert judged.needed is not None and judged.needed > count
    if count >= samples_needed(percent[1]) and np.percentile(times, percent[1]) > 1.0:
        assert judged.answer is Answer.NOT_MET
    assert judged.over == over


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def server_run_of(times: np.ndarray) -> Run:
    """The same without a folder: only the table is read."""
    from megatoken.runs.run import Verdict
    from megatoken.runs.tables import SeriesRow, to_table

    rows = [SampleRow(i, 0, 0.0, 0.0, float(t), float(t), 5, 1, "length", "h") for i, t in enumerate(times)]
    table = to_table(SampleRow, rows)
    return Run(Path("none"), Verdict.MEASURED, [], [], [], {}, {}, {}, table, to_table(SeriesRow, []))


def test_more_samples_with_the_same_times_never_break_a_limit_that_few_left_open(tmp_path):
    few, many = server_run_of(np.full(100, 0.5)), server_run_of(np.full(700, 0.5))
    assert answer_of(few, "ttft_seconds.p99", 1.0) is Answer.CANNOT_TELL
    assert answer_of(many, "ttft_seconds.p99", 1.0) is Answer.MET


def test_the_time_per_token_of_answers_that_came_whole_is_unknown(tmp_path):
    folder = RunFolder.create(
        tmp_path, "run", {}, {"hostname": "h"}, scenario="server", summarise=summarise_run, facts={"model": "tiny"}
    )
    at = np.arange(700) / 10
    folder.add_samples([SampleRow(n, 0, t, t, t + 0.5, t + 0.5, 5, 10, "stop", "h") for n, t in enumerate(at)])
    folder.finish({"verdict": "MEASURED", "reasons": []})
    run = read_run(folder.path)
    assert answer_of(run, "tpot_seconds.p99", 1.0) is Answer.CANNOT_TELL
    assert answer_of(run, "ttft_seconds.p99", 1.0) is Answer.MET


def test_failed_requests_count_as_over_every_limit_on_a_latency(tmp_path):
    run = server_run(tmp_path, [0.5] * 690 + [None] * 10)
    assert answer_of(run, "ttft_seconds.p99", 1.0) is Answer.NOT_MET
    assert answer_of(run, "latency_seconds.p99", 10.0) is Answer.NOT_MET


def test_an_interrupted_run_meets_nothing_but_may_break_a_limit(tmp_path):
    run = server_run(tmp_path, [0.5] * 700, verdict="INTERRUPTED")
    assert answer_of(run, "ttft_seconds.p99", 1.0) is Answer.CANNOT_TELL
    assert answer_of(run, "ttft_seconds.p99", 0.1) is Answer.NOT_MET


def test_the_older_flags_are_limits_on_the_p99():
    limits = asked_limits({"ttft_limit_seconds": 2.0, "limits": {"tpot_seconds": {"p50": 0.1, "p99": None}}})
    assert {(one.key, one.value, one.at_most) for one in limits} == {
        ("ttft_seconds.p99", 2.0, True),
        ("tpot_seconds.p50", 0.1, True),
    }


def test_three_broken_limits_and_one_open_one_are_named_and_end_with_3(tmp_path):
    run = server_run(tmp_path / "runs", [0.5] * 700)
    slo = tmp_path / "limits.yaml"
    slo.write_text(
        "ttft_seconds: {p99: 0.1, p999: 9}\ntpot_seconds: {p50: 0.01}\nsamples_per_second: 99\n"
        "latency_seconds: {p90: 3}\ndollars_per_request: 1\n"
    )
    code, out, err = call_here("check", run.path, "--slo", slo, "--dollars-per-hour", 3, "--json")
    document = json.loads(out)
    limits = {one["key"]: one for one in document["runs"][0]["limits"]}
    answers = {key: one["answer"] for key, one in limits.items()}
    assert (code, err) == (3, "")
    assert answers == {
        "ttft_seconds.p99": "NOT MET",
        "ttft_seconds.p999": "CANNOT TELL",
        "tpot_seconds.p50": "NOT MET",
        "samples_per_second": "NOT MET",
        "latency_seconds.p90": "MET",
        "dollars_per_request": "MET",
    }
    assert limits["ttft_seconds.p999"]["needed"] == 6636
    served = run.result["samples_completed"] / run.result["duration_seconds"]  # drain included: no rules are claimed
    assert limits["dollars_per_request"]["found"] == pytest.approx(3 / 3600 / served)
    code, out, _ = call_here("check", run.path, "--slo", slo, "--out", tmp_path / "saved")
    assert code == 3 and out.count("NOT MET") == 4 and "6,636" in out  # with the answer on all
    assert "6,636" in (tmp_path / "saved" / "check.html").read_text()


def test_a_run_without_limits_a_wrong_key_and_an_open_limit_have_their_exit_codes(tmp_path):
    run = server_run(tmp_path, [0.5] * 20)
    assert call_here("check", run.path)[0] == 2
    slo = tmp_path / "limits.yaml"
    slo.write_text("ttft_seconds: {p98: 1}\n")
    code, _, err = call_here("check", run.path, "--slo", slo)
    assert code == 2 and "limits.yaml:1" in err
    assert call_here("check", run.path, "--limits.itl_seconds.p50", 1)[0] == 4
    assert call_here("check", run.path, "--limits.ttft_seconds.p50", 1)[0] == 0


def test_a_run_is_judged_when_it_ends_and_its_page_and_a_comparison_say_the_same(tmp_path):
    code, out, _ = call_here(
        *("run", "--scenario", "server", "--rate", 20, "--samples", 20, "--warm-up", 0.2, "--engine.threads", 1),
        *("--limits.ttft_seconds.p50", 0.000001, "--out", tmp_path / "runs"),
    )
    (folder,) = (tmp_path / "runs").iterdir()
    assert code == 3 and "MEASURED" in out and "NOT MET time to first token, p50" in out
    assert "NOT MET" in (folder / "report.html").read_text()
    code, out, _ = call_here("compare", folder, folder, "--json")
    assert json.loads(out)["rows"][0]["limits"] == "NOT MET (time to first token, p50)"


@pytest.mark.parametrize("verdict", ["INVALID", "INTERRUPTED"])
def test_a_run_that_does_not_stand_is_named_before_the_limits_that_it_keeps(tmp_path, verdict):
    run = server_run(tmp_path / "runs", [0.5] * 700, verdict=verdict)
    limit = ("--limits.samples_per_second", 0.1)
    code, out, _ = call_here("check", run.path, *limit, "--out", tmp_path / "saved")
    document = json.loads((tmp_path / "saved" / "check.json").read_text())
    assert code == 3 and out.splitlines()[1].startswith(f"RUN DOES NOT STAND  {run.path.name} is {verdict}")
    assert document["answer"] == document["runs"][0]["answer"] == "RUN DOES NOT STAND"
    assert "RUN DOES NOT STAND" in (tmp_path / "saved" / "check.html").read_text()
    sound = server_run(tmp_path / "other", [0.5] * 700)
    assert call_here("check", sound.path, *limit)[0] == 0
    slo = tmp_path / "limits.yaml"
    slo.write_text("samples_per_second: 0.1\n")
    _, out, _ = call_here("compare", sound.path, run.path, "--slo", slo, "--json")
    assert [row["limits"][:18] for row in json.loads(out)["rows"]] == ["MET", "RUN DOES NOT STAND"]
    _, out, _ = call_here("dossier", "--run", run.path, *limit, "--json")
    assert json.loads(out)["limits"][0]["answer"] == "RUN DOES NOT STAND"


def test_several_runs_that_do_not_stand_are_all_said_to_prove_nothing(tmp_path):
    runs = [server_run(tmp_path / verdict, [0.5] * 700, verdict=verdict) for verdict in ("INVALID", "INTERRUPTED")]
    _, out, _ = call_here("check", *(run.path for run in runs), "--limits.samples_per_second", 0.1)
    named = "; ".join(f"{run.path.name} is {run.verdict}" for run in runs)
    assert f"{named}: their numbers prove nothing, whatever the limits say" in " ".join(out.split())


def test_a_damaged_run_folder_is_named_in_its_place_and_the_others_are_judged(tmp_path):
    for name in ("a", "b", "c"):
        server_run(tmp_path / "runs" / name, [0.5] * 700)
    (tmp_path / "runs" / "b" / "run" / "series.parquet").unlink()
    limit = ("--limits.samples_per_second", 0.1)
    code, out, err = call_here("check", tmp_path / "runs", *limit, "--json")
    document = json.loads(out)
    assert (code, document["answer"]) == (2, "CANNOT TELL") and "series.parquet is missing" in err
    assert [run["answer"] for run in document["runs"]] == ["MET", "CANNOT TELL", "MET"]
    assert "series.parquet is missing" in document["runs"][1]["unreadable"]
    code, out, _ = call_here("check", tmp_path / "runs", *limit)
    assert code == 2 and out.index("MET   ") < out.index("CANNOT BE READ") < out.rindex("MET   ")
    code, out, err = call_here("check", tmp_path / "runs" / "b", *limit)
    assert (code, out) == (2, "") and "series.parquet is missing" in err


def test_answers_cut_off_at_the_end_of_a_load_are_over_a_limit_only_by_what_they_show(tmp_path):
    """Of 1,000 requests the last 100 are cut off after a first token at 0.1 s, or one of ``late`` seconds."""

    def run_with(name: str, late: float) -> Run:
        folder = RunFolder.create(
            tmp_path / name, "run", {}, {"hostname": "h"}, scenario="server", summarise=summarise_run, facts={}
        )
        for number in range(1000):
            due, cut = 0.1 * number, number >= 900
            first = due + (late if cut else 0.1)
            ends = (first, None) if cut else (first, first + 0.9)
            reason = "cancelled" if cut else "length"
            folder.add_samples([SampleRow(number, 0, due, due, *ends, 5, 10, reason, "h")])
        folder.finish({"verdict": "MEASURED", "reasons": []})
        return read_run(folder.path)

    soon, late = run_with("soon", 0.1), run_with("late", 2.0)
    assert answer_of(soon, "ttft_seconds.p99", 1.0) is Answer.MET
    assert answer_of(late, "ttft_seconds.p99", 1.0) is Answer.NOT_MET
    assert answer_of(soon, "latency_seconds.p99", 1.5) is Answer.CANNOT_TELL
    assert answer_of(soon, "latency_seconds.p50", 1.5) is Answer.MET  # whatever the others would have taken
    assert answer_of(soon, "latency_seconds.p50", 0.5) is Answer.NOT_MET
    shown = [
        judge_limits(soon, [Limit(f"latency_seconds.{of}", 1.5, at_most=True)])[0] for of in ("p50", "p99", "p999")
    ]
    assert [(one.samples, one.over) for one in shown] == [(1000, 0), (900, 0), (900, 0)]  # none is known to be over
    assert [one.why.split("; ", 1)[1] for one in shown] == [
        "100 answers were cut off within the limit, which could not change the answer",
        "100 answers were cut off within the limit, which could change the answer; raise --window, or let the run end",
        "at least 6,636 are needed; 100 answers were cut off within the limit",
    ]


def test_the_gaps_of_answers_that_were_cut_off_count_as_far_as_they_were_seen(tmp_path):
    folder = RunFolder.create(
        tmp_path / "run", "run", {}, {"hostname": "h"}, scenario="server", summarise=summarise_run, facts={}
    )
    for number in range(1000):  # the last 10 are cut off, after 200 slow tokens
        cut = number >= 990
        gap, tokens = (1.0, 200) if cut else (0.01, 100)
        last, reason = (None, "cancelled") if cut else (1 + gap * (tokens - 1), "length")
        folder.add_samples([SampleRow(number, 0, 0.0, 0.0, 1.0, last, 5, tokens, reason, "h")])
        folder.add_token_times(number, (1e9 * (1 + gap * np.arange(tokens))).astype(np.int64))
    folder.finish({"verdict": "MEASURED", "reasons": []})
    [judged] = judge_limits(read_run(folder.path), [Limit("itl_seconds.p99", 0.1, at_most=True)])
    assert (judged.answer, judged.over, judged.samples) == (Answer.NOT_MET, 10 * 199, 990 * 99 + 10 * 199)
