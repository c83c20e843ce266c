"""Goodput: late and failed samples are no work done; what was cut off is judged only if it was over a limit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatoken.analysis.goodput import Goodput, Span, counted_span, goodput, within_limits
from megatoken.analysis.statistics import Samples
from megatoken.analysis.summary import summarise_run
from megatoken.analysis.sweep_point import point_figures
from megatoken.planning.service_level import ServiceLevel, judge, judge_run
from megatoken.report.blocks import Table
from megatoken.report.views.goodput import goodput_blocks, goodput_curve
from megatoken.runs.reasons import reason
from megatoken.runs.run import Run, read_run
from megatoken.runs.tables import SampleRow, SeriesRow, to_table
from megatoken.runs.writer import RunFolder
from megatoken.text import precise

LIMITS = {"ttft_seconds": 1.0, "tpot_seconds": 0.1}
TPOT_ALONE = {"ttft_seconds": None, "tpot_seconds": 0.1}


def sample(first: float | None, per_token: float, tokens: int = 11, error: str | None = None, scheduled: float = 0.0):
    last = None if first is None else first + per_token * (tokens - 1)
    reason = None if error else "length"
    return SampleRow(0, 0, scheduled, scheduled, first, last, 5, tokens, reason, "n", error=error)


SAMPLES = Samples.of(
    to_table(
        SampleRow,
        [
            sample(0.5, 0.05),
            sample(5.5, 0.05, scheduled=5.0),
            sample(2.0, 0.05),  # first token late
            sample(0.5, 0.2),  # slow
            sample(0.5, 9.0, tokens=1),  # one token: nothing to be slow at
            sample(0.5, 0.05, error="lost"),
            sample(None, 0.0, error="lost"),
        ],
    )
)


def whole(samples: Samples, **limits: float | None) -> Goodput | None:
    return goodput(Span.whole(samples, 10.0), **limits)  # type: ignore[arg-type]


def test_only_samples_within_every_limit_count_and_all_scheduled_ones_are_the_whole():
    good = whole(SAMPLES, **LIMITS)
    assert good is not None and (good.judged, good.cut_off) == (7, 0)
    assert good.share == pytest.approx(3 / 7)
    assert good.samples_per_second == pytest.approx(0.3)
    assert good.output_tokens_per_second == pytest.approx(2.3)


def test_a_queue_of_all_samples_leaves_the_first_token_out():
    good = whole(SAMPLES, **TPOT_ALONE)
    assert good is not None and good.share == pytest.approx(4 / 7)


def test_the_curve_ends_at_all_completed_tokens_and_never_falls():
    curve = goodput_curve("c", Span.whole(SAMPLES, 10.0), None)
    assert (np.diff(curve.y) >= 0).all() and (np.diff(curve.x) >= 0).all()
    assert (curve.x[-1], curve.y[-1]) == pytest.approx((200.0, 4.4))
    assert goodput_curve("c", Span.whole(SAMPLES, 10.0), 1.0).y[-1] == pytest.approx(3.3)


def test_no_samples_are_no_goodput():
    empty = SAMPLES.only(np.zeros(7, dtype=bool))
    assert whole(empty, **LIMITS) is None
    assert goodput_curve("c", Span.whole(empty, 10.0), None).y.tolist() == [0]


def test_a_plan_judges_by_the_same_rule():
    verdict = judge(Span.whole(SAMPLES, 10.0), ServiceLevel(**LIMITS), offline=False, rate=4.5)
    good = whole(SAMPLES, **LIMITS)
    assert good is not None
    assert verdict.good_share == good.share
    assert verdict.good_requests_per_second == pytest.approx(good.samples_per_second)
    assert verdict.good_output_tokens_per_second == pytest.approx(good.output_tokens_per_second)


def made_run(folder: Path, rows: list[SampleRow], scenario: str, *, interrupted: bool = False, **facts: Any) -> Run:
    """A run with the limits 1 s and 0.2 s, whose series has its last row after 100 s."""
    given = {"ttft_limit_seconds": 1.0, "tpot_limit_seconds": 0.2, "rules_unmet": [], "notes": []}
    writer = RunFolder.create(folder, "run", {}, {}, scenario=scenario, summarise=summarise_run, facts=given | facts)
    writer.add_samples(rows)
    for seconds in (50.0, 100.0):
        writer.add_series(SeriesRow(seconds, "n", 0, round(100 * seconds), 0, 4, 8, 90, 100, 4, 0, 0))
    if interrupted:
        writer.interrupt(reason("INTERRUPTED", signal="SIGINT", ended=0, issued_so_far=0))
    else:
        writer.finish({"verdict": "MEASURED", "reasons": []})
    return read_run(writer.path)


def answer(
    number: int, due: float, *, wait: float = 0.1, cut_after: float | None = None, seconds: float = 1.0
) -> SampleRow:
    """Tokens come every 0.1 s: 11, or until the answer is cut off."""
    first = due + wait
    if cut_after is None:
        return SampleRow(number, number, due, due, first, first + seconds, 5, 11, "length", "n")
    return SampleRow(number, number, due, due, first, None, 5, round(10 * (cut_after - first)) + 1, "cancelled", "n")


def shown(run: Run) -> dict[str, str]:
    """The row of the page's table on the limits of the run."""
    table = next(block for block in goodput_blocks(run, Samples.of(run.requests)) if isinstance(block, Table))
    [row] = table.rows
    return {column.name: str(cell) for column, cell in zip(table.columns, row, strict=True)}


def test_the_page_of_a_point_and_a_plan_judge_as_the_sweep_does(tmp_path: Path) -> None:
    """Of 2,000 requests 1,000 are due in the window: one is late, 100 are cut off, one of them was late before."""
    rows = []
    for number in range(2000):
        due = number / 10
        cut = 140 <= due < 150
        rows.append(answer(number, due, wait=5.0 if due in (60, 145) else 0.1, cut_after=201.0 if cut else None))
    load = {"kind": "rate", "value": 10.0, "waits": False, "ended_by": None, "window_seconds": [50.0, 150.0]}
    run = made_run(tmp_path, rows, "sweep", load=load)
    point, row, verdict = point_figures(run), shown(run), judge_run(run, ServiceLevel(1.0, 0.2))
    assert (point["requests"], point["requests_judged"], point["requests_cut_off"]) == (1000, 901, 99)
    good = point["goodput"]
    assert good["share"] == pytest.approx(899 / 901)
    assert good["samples_per_second"] == pytest.approx(899 / 100)
    assert 0 < point["output_tokens_per_second"] - good["output_tokens_per_second"] < 1
    assert [row[name] for name in ("Good", "Judged", "Cut off", "Goodput", "Output")] == [
        *(precise(100 * good["share"]), "901", "99"),
        *(precise(good[f"{name}_per_second"]) for name in ("samples", "output_tokens")),
    ]
    assert verdict.kept and verdict.why.startswith("99.78 % of 901 requests (99 more were cut off) kept")
    assert (verdict.good_share, verdict.good_requests_per_second) == (good["share"], good["samples_per_second"])
    assert verdict.bound_output_tokens_per_second == run.result["output_tokens_per_second"]
    assert verdict.good_output_tokens_per_second < verdict.bound_output_tokens_per_second


def test_an_interrupted_run_is_judged_until_its_last_row_by_what_had_ended(tmp_path: Path) -> None:
    """Answers that an interruption cut off broke nothing, but the slowest are missing, so it keeps no level either."""
    rows = [answer(number, number / 10, cut_after=100.0 if number >= 980 else None) for number in range(1000)]
    run = made_run(tmp_path, rows, "server", interrupted=True)
    row, verdict = shown(run), judge_run(run, ServiceLevel(1.0, 0.2))
    assert [row[name] for name in ("Good", "Judged", "Cut off", "Goodput")] == ["100", "980", "20", "9.8"]
    assert float(row["Output"]) == pytest.approx((980 * 11 + 20 * 10) / 100, rel=0.02)
    assert verdict.kept is None and "interrupted" in verdict.why and verdict.good_share == 1
    assert verdict.bound_output_tokens_per_second is None


def test_a_point_in_whose_window_no_request_ended_is_not_judged(tmp_path: Path) -> None:
    rows = [answer(number, number / 10, cut_after=None if number < 500 else 100.0) for number in range(600)]
    load = {"kind": "rate", "value": 10.0, "waits": False, "ended_by": None, "window_seconds": [50.0, 60.0]}
    run = made_run(tmp_path, rows, "sweep", load=load)
    verdict = judge_run(run, ServiceLevel(1.0, 0.2))
    assert point_figures(run)["goodput"] is None and not list(goodput_blocks(run, Samples.of(run.requests)))
    assert (verdict.kept, verdict.good_share) == (None, None) and "raise --window" in verdict.why


@pytest.mark.parametrize("tpot_limit", [0.2, None])
def test_answers_in_one_piece_are_no_work_within_a_limit_on_the_time_per_output_token(
    tpot_limit: float | None, tmp_path: Path
) -> None:
    rows = [answer(number, number / 10, seconds=1.0 if number % 50 else 1e-8) for number in range(1000)]
    load = {"kind": "rate", "value": 10.0, "waits": False, "ended_by": None, "window_seconds": [0.0, 100.0]}
    run = made_run(tmp_path, rows, "sweep", load=load, tpot_limit_seconds=tpot_limit)
    assert point_figures(run)["goodput"] is None
    (table,) = goodput_blocks(run, Samples.of(run.requests))
    assert isinstance(table, Table) and "came in one piece" in table.note
    assert shown(run)["Good"] == ("-" if tpot_limit else "100")


def test_a_run_that_ended_by_itself_counts_all_its_samples_over_its_duration() -> None:
    run = read_run(Path(__file__).parents[1] / "data" / "run_folder_version_1")
    span = counted_span(run, Samples.of(run.requests), run.result["duration_seconds"])
    assert span is not None
    good = goodput(span, ttft_seconds=None, tpot_seconds=0.2)
    kept = [
        row["output_tokens"]
        for row in run.requests.to_pylist()
        if row["last_token_seconds"] - row["first_token_seconds"] <= 0.2 * (row["output_tokens"] - 1)
    ]
    assert good is not None and (good.judged, good.cut_off) == (24, 0)
    assert (good.share, len(kept)) == (7 / 24, 7)
    assert good.samples_per_second == pytest.approx(7 / run.result["duration_seconds"])
    assert good.output_tokens_per_second == pytest.approx(sum(kept) / run.result["duration_seconds"])
    verdict = judge_run(run, ServiceLevel(2.0, 0.2))
    assert verdict.why.startswith("only 29.17 % of 24 requests kept 0.2 s per further token; 99 % must")


def test_times_per_output_token():
    assert SAMPLES.tpot[:5] == pytest.approx([0.05, 0.05, 0.05, 0.2, np.nan], nan_ok=True)
    assert np.isnan(SAMPLES.tpot[6])
    unseen = Samples.of(to_table(SampleRow, [sample(None, 0.0)._replace(last_token_seconds=4.0)]))
    assert unseen.completed.all() and not within_limits(unseen, None, 0.1).any()
