"""Goodput: whatever is late, failed or cancelled is no work done."""

import numpy as np
import pytest

from megatoken.analysis.goodput import goodput, within_limits
from megatoken.analysis.statistics import Samples
from megatoken.planning.service_level import ServiceLevel, judge
from megatoken.report.views.goodput import goodput_curve
from megatoken.runs.tables import SampleRow, to_table

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


def test_only_samples_within_every_limit_count_and_all_scheduled_ones_are_the_whole():
    good = goodput(SAMPLES, **LIMITS, duration_seconds=10.0)
    assert good.share == pytest.approx(3 / 7)
    assert good.samples_per_second == pytest.approx(0.3)
    assert good.output_tokens_per_second == pytest.approx(2.3)


def test_a_queue_of_all_samples_leaves_the_first_token_out():
    assert goodput(SAMPLES, **TPOT_ALONE, duration_seconds=10.0).share == pytest.approx(4 / 7)


def test_the_curve_ends_at_all_completed_tokens_and_never_falls():
    curve = goodput_curve("c", SAMPLES, 10.0, None)
    assert (np.diff(curve.y) >= 0).all() and (np.diff(curve.x) >= 0).all()
    assert (curve.x[-1], curve.y[-1]) == pytest.approx((200.0, 4.4))
    assert goodput_curve("c", SAMPLES, 10.0, 1.0).y[-1] == pytest.approx(3.3)


def test_no_samples_are_no_goodput():
    empty = SAMPLES.only(np.zeros(7, dtype=bool))
    assert goodput(empty, **LIMITS, duration_seconds=10.0).share == 0
    assert goodput_curve("c", empty, 10.0, None).y.tolist() == [0]


def test_a_plan_judges_by_the_same_rule():
    seconds = 6.0  # from the first that was due to the end of the last that was completed
    verdict = judge(SAMPLES, ServiceLevel(**LIMITS), offline=False, seconds=seconds)
    good = goodput(SAMPLES, **LIMITS, duration_seconds=seconds)
    assert verdict.good_share == good.share
    assert verdict.good_requests_per_second == pytest.approx(good.samples_per_second)
    assert verdict.good_output_tokens_per_second == pytest.approx(good.output_tokens_per_second)


def test_times_per_output_token():
    assert SAMPLES.tpot[:5] == pytest.approx([0.05, 0.05, 0.05, 0.2, np.nan], nan_ok=True)
    assert np.isnan(SAMPLES.tpot[6])
    unseen = Samples.of(to_table(SampleRow, [sample(None, 0.0)._replace(last_token_seconds=4.0)]))
    assert unseen.completed.all() and not within_limits(unseen, None, 0.1).any()
