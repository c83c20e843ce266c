"""Goodput: whatever is late, failed or cancelled is no work done."""

import numpy as np
import pytest

from megatoken.report.goodput import Limits, goodput, goodput_curve
from megatoken.results import SampleRow
from megatoken.results.statistics import Samples
from megatoken.results.tables import to_table

LIMITS = Limits("l", ttft_seconds=1.0, tpot_seconds=0.1)


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
    good = goodput(SAMPLES, LIMITS, 10.0, queued=False)
    assert good.share == pytest.approx(3 / 7)
    assert good.samples_per_second == pytest.approx(0.3)
    assert good.output_tokens_per_second == pytest.approx(2.3)


def test_a_queue_of_all_samples_leaves_the_first_token_out():
    assert goodput(SAMPLES, LIMITS, 10.0, queued=True).share == pytest.approx(4 / 7)


def test_the_curve_ends_at_all_completed_tokens_and_never_falls():
    curve = goodput_curve("c", SAMPLES, 10.0, None)
    assert (np.diff(curve.y) >= 0).all() and (np.diff(curve.x) >= 0).all()
    assert (curve.x[-1], curve.y[-1]) == pytest.approx((200.0, 4.4))
    assert goodput_curve("c", SAMPLES, 10.0, 1.0).y[-1] == pytest.approx(3.3)


def test_no_samples_are_no_goodput():
    empty = SAMPLES.only(np.zeros(7, dtype=bool))
    assert goodput(empty, LIMITS, 10.0, queued=False).share == 0
    assert goodput_curve("c", empty, 10.0, None).y.tolist() == [0]
