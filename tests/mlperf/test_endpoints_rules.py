"""MLPerf Endpoints: regions against the public checker, windows of made runs, verdicts of points and curves."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatoken.errors import UsageError
from megatoken.mlperf.endpoints import (
    HIGH,
    LOW,
    MARGIN,
    MEDIUM,
    ULTRA_LOW,
    chosen_points,
    drawn_rows,
    endpoint_rules,
    judge_curve,
    min_seconds,
    regions,
)
from megatoken.mlperf.endpoints_window import Requests, find_window

LIMITS = endpoint_rules()["steady_state"]
ROWS = 200


@pytest.mark.parametrize(
    ("c_min", "c_max", "low_end", "medium_end"), [(32, 8192, 52, 437), (1, 256, 7, 41), (16, 1024, 26, 117)]
)
def test_regions_are_those_of_the_public_checker(c_min: int, c_max: int, low_end: int, medium_end: int) -> None:
    found = regions(c_min, c_max)
    assert (found.low, found.medium) == ((c_min + 1, low_end), (low_end + 1, medium_end))
    assert found.high == (medium_end + 1, c_max)
    assert [found.of(one) for one in (c_min, low_end, medium_end, c_max, c_max + 1)] == [
        *(ULTRA_LOW, LOW, MEDIUM, HIGH, MARGIN)
    ]
    assert found.of(math.ceil(1.1 * c_max) + 1) is None


@given(st.integers(1, 32), st.integers(33, 50_000))
def test_every_concurrency_up_to_the_margin_is_in_one_region_and_the_chosen_points_cover_all(
    c_min: int, c_max: int
) -> None:
    found = regions(c_min, c_max)
    bounds = [(1, c_min), found.low, found.medium, found.high, (c_max + 1, found.margin_end)]
    assert all(end + 1 == start for (_, end), (start, _) in itertools.pairwise(bounds))
    held = {found.of(one) for one in chosen_points(c_max, c_min)}
    assert {name for name, (start, end) in zip((LOW, MEDIUM, HIGH), bounds[1:4], strict=True) if start <= end} <= held


@pytest.mark.parametrize(("c_min", "c_max"), [(33, 100), (0, 100), (1, 32)])
def test_a_curve_outside_the_rules_is_refused(c_min: int, c_max: int) -> None:
    with pytest.raises(UsageError):
        regions(c_min, c_max)


def test_rules_of_loadgen_are_none_of_a_sweep() -> None:
    with pytest.raises(UsageError, match=r"endpoints-v1\.0"):
        endpoint_rules("v5.1")


def test_rows_are_drawn_with_replacement_from_the_published_seed() -> None:
    rows = drawn_rows(1000, endpoint_rules()["seed_sets"]["A"]["sample_index_rng_seed"])
    drawn = [next(rows) for _ in range(1000)]
    assert drawn[:5] == [401, 678, 226, 864, 169]  # random.Random(seed).randint(0, 999)
    assert len(set(drawn)) < 700


def made(tpot: np.ndarray, gap_seconds: float = 0.1) -> Requests:
    """A run whose requests are issued at equal gaps and have these times per output token [N]."""
    count = len(tpot)
    issued = gap_seconds * np.arange(count)
    draws = np.random.default_rng(1)
    noisy = tpot * draws.normal(1, 0.02, count)
    return Requests(issued, np.full(count, 0.2), noisy, 0.2 + 50 * noisy, np.full(count, 51.0))


def test_a_ramp_is_cropped_and_the_rest_is_the_window() -> None:
    passes = 12
    levels = np.concatenate([[0.010, 0.016], np.full(passes - 2, 0.020)])
    found = find_window(made(np.repeat(levels, ROWS)), ROWS, 60.0, LIMITS)
    assert (found.shape, found.cropped, found.start, found.end) == ("STEADY STATE", 2, 2, passes)
    assert found.seconds == pytest.approx(0.1 * (10 * ROWS - 1))
    assert found.states == {"tpot_p50": "Plateau", "tpot_p90": "Plateau"}


def test_a_run_that_climbs_throughout_has_no_window() -> None:
    climbing = np.repeat(0.02 * 1.10 ** np.arange(16), ROWS)
    found = find_window(made(climbing), ROWS, 60.0, LIMITS)
    assert (found.shape, found.passes) == ("not found", 0)
    assert found.states == {"tpot_p50": "Drifting Up", "tpot_p90": "Drifting Up"}


def test_a_step_late_in_the_run_is_an_anomaly_of_the_first_plateau() -> None:
    stepped = np.repeat([0.02] * 24 + [0.03] * 6, ROWS)
    found = find_window(made(stepped), ROWS, 60.0, LIMITS)
    assert found.shape == "anomaly"
    assert (found.start, found.end) == (1, 24)
    assert found.level_shift == pytest.approx(0.5, abs=0.02)


def test_noise_alone_is_steady_and_too_few_passes_are_not() -> None:
    flat = np.full(12 * ROWS, 0.02)
    assert find_window(made(flat), ROWS, 60.0, LIMITS).shape == "STEADY STATE"
    short = find_window(made(flat[: 4 * ROWS]), ROWS, 60.0, LIMITS)
    assert (short.shape, short.super_passes, short.passes) == ("not found", 4, 0)


def test_a_window_lasts_several_latencies() -> None:
    found = find_window(made(np.full(12 * ROWS, 2.0)), ROWS, 1.0, LIMITS)
    assert found.needed_seconds == pytest.approx(5 * (0.2 + 50 * 2.0), rel=0.05)


def point(concurrency: int, rate: float, *, offline: bool = False) -> dict[str, Any]:
    return {
        "version": "endpoints-v1.0",
        "concurrency": concurrency,
        "offline": offline,
        "official": {"system_tps": rate},
    }


CURVE = [*(point(one, 100.0 * one) for one in (1, 4, 16, 64, 128, 256, 512)), point(13_368, 51_000.0, offline=True)]


def test_a_whole_curve_breaks_no_rule() -> None:
    found = judge_curve(CURVE)
    assert found["reasons"] == []
    assert found["offline_share_of_c_max"] == pytest.approx(51_000 / 51_200)


@pytest.mark.parametrize(
    ("points", "code"),
    [
        (CURVE[1:], "FEW_POINTS"),
        (CURVE[:-1], "OFFLINE_RUNS"),
        ([*CURVE[:-1], point(13_368, 50_000.0, offline=True)], "OFFLINE_BELOW_C_MAX"),
        ([*CURVE[:-1], point(100, 52_000.0, offline=True)], "OFFLINE_CONCURRENCY"),
        (CURVE[3:], "CURVE_SPAN"),
        ([*(point(one, 1.0) for one in range(1, 40)), CURVE[-1]], "MANY_POINTS"),
        ([*(point(one, 1.0) for one in (1, 2, 3, 4, 5, 6, 512)), CURVE[-1]], "REGION_EMPTY"),
    ],
)
def test_what_a_curve_may_lack(points: list[dict[str, Any]], code: str) -> None:
    assert code in {reason["code"] for reason in judge_curve(points)["reasons"]}


def test_windows_last_as_long_as_their_regions_ask() -> None:
    assert [min_seconds(1), min_seconds(32), min_seconds(33), min_seconds(1, offline=True)] == [600, 600, 1200, 1200]
