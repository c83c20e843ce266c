"""The verdict on a soak: its statistics against known series, and each reason against a soak that has it alone."""

import inspect
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatoken.analysis.stability import (
    CONFIDENCE,
    GpuLimits,
    Stability,
    judge_soak,
    judge_stability,
    settled_spans,
    theil_sen,
    window_seconds,
    windows_of,
)
from megatoken.hardware.telemetry import COUNTS
from megatoken.runs.tables import SampleRow, SeriesRow, to_table

DOCS = Path(__file__).parents[2] / "docs"
Floats = NDArray[np.float64]
SECONDS = 800
LIFE_SECONDS = 4.0
RATE = 1000.0
LIMITS = {"here": GpuLimits(700.0, 1980.0)}


def noise(draws: np.random.Generator, count: int, autocorrelation: float) -> Floats:
    """An autoregressive series of variance 1."""
    values = np.empty(count)
    values[0] = draws.normal()
    for index in range(1, count):
        fresh = math.sqrt(1 - autocorrelation**2) * draws.normal()
        values[index] = autocorrelation * values[index - 1] + fresh
    return values


def series(rates: Floats, **columns: Callable[[int], float] | float) -> pa.Table:
    """A row each second: the tokens that ``rates`` [N] per second add up to, a load that is full from 2 s on."""
    tokens = np.cumsum(rates).astype(int)

    def value(name: str, second: int, default: float) -> float:
        given_value = columns.get(name, default)
        return given_value(second) if callable(given_value) else given_value

    rows = [
        SeriesRow(
            elapsed_seconds=second + 1.0,
            node="here",
            replica=0,
            output_tokens=int(tokens[second]),
            processed_tokens=int(tokens[second]),
            batched_tokens=8,
            max_batched_tokens=8,
            pages_free=1,
            pages=9,
            in_flight=12 if second > 0 else 2,
            waiting=int(value("waiting", second, 4 if second > 0 else 0)),
            preemptions=0,
            power_watts=value("power_watts", second, math.nan),
            clock_mhz=value("clock_mhz", second, math.nan),
            temperature_celsius=value("temperature_celsius", second, math.nan),
            **{name: int(value(name, second, 0)) for name in COUNTS if name in columns},
        )
        for second in range(len(rates))
    ]
    return to_table(SeriesRow, rows)


def requests() -> pa.Table:
    rows = [
        SampleRow(number, 0, 0.0, 0.0, float(number), number + LIFE_SECONDS, 4, 4, "length", "here")
        for number in range(50)
    ]
    return to_table(SampleRow, rows)


def judged(
    rates: Floats, segments: list[tuple[float, float]] | None = None, **columns: Callable[[int], float] | float
) -> dict[str, Any]:
    segments = segments or [(0.0, float(len(rates)))]
    return judge_stability(requests(), series(rates, **columns), segments, LIMITS)


def codes(stability) -> list[str]:
    return [reason["code"] for reason in stability["reasons"]]


def steady() -> Floats:
    return RATE * (1 + 0.01 * np.random.default_rng(5).normal(size=SECONDS))


@given(
    slope=st.floats(-5, 5),
    level=st.floats(-1e3, 1e3),
    outliers=st.integers(0, 4),
    count=st.integers(20, 60),
)
def test_a_slope_is_found_through_outliers(slope: float, level: float, outliers: int, count: int) -> None:
    x = np.arange(count) * 7.0
    y = level + slope * x
    y[:outliers] += 1e4
    trend = theil_sen(x, y)
    assert trend.slope == pytest.approx(slope, abs=1e-6)
    assert trend.low <= trend.slope <= trend.high


@given(st.integers(0, 2**32), st.floats(-3, 3), st.floats(0.1, 10))
def test_a_line_added_and_a_change_of_unit_move_the_slope_alone(seed: int, line: float, unit: float) -> None:
    x = np.arange(30.0)
    y = noise(np.random.default_rng(seed), 30, 0.3)
    before, after = theil_sen(x, y), theil_sen(x, unit * y + line * x)
    assert after.slope == pytest.approx(unit * before.slope + line, abs=1e-9)
    assert (after.low, after.high) == pytest.approx((unit * before.low + line, unit * before.high + line), abs=1e-6)


@pytest.mark.parametrize(
    ("count", "autocorrelation", "most"),
    [(10, 0.0, 0.02), (20, 0.0, 0.02), (80, 0.0, 0.03), (20, 0.6, 0.06), (40, 0.6, 0.04), (80, 0.6, 0.04)],
)
def test_the_interval_holds_the_true_slope_as_often_as_it_says(count: int, autocorrelation: float, most: float) -> None:
    """1 % of the intervals may miss; 2.5 % where windows hang together (docs/run-folder.md)."""
    draws = np.random.default_rng(20261122)
    x, runs, missed = np.arange(count) * 60.0, 400, 0
    for _ in range(runs):
        trend = theil_sen(x, 0.02 * x + noise(draws, count, autocorrelation))
        missed += not trend.low <= 0.02 <= trend.high
    assert missed / runs <= most


def test_an_interval_that_takes_windows_for_independent_would_miss_far_more_often() -> None:
    draws = np.random.default_rng(1)
    x = np.arange(40.0)
    wider = [theil_sen(x, noise(draws, 40, 0.7)).inflation for _ in range(50)]
    assert np.median(wider) > 2.5  # (1 + 0.7) / (1 - 0.7) = 5.7 for very many


@pytest.mark.parametrize("autocorrelation", [0.0, 0.7, 0.95])
def test_noise_alone_is_hardly_ever_called_a_trend_or_a_drift(autocorrelation: float) -> None:
    """Windows of 10 s: from one to the next the last has an autocorrelation of 0.6, and spreads far over the limits."""
    draws = np.random.default_rng(9)
    called, runs = 0, 60
    for _ in range(runs):
        rates = RATE * (1 + 0.1 * noise(draws, SECONDS, autocorrelation))
        called += bool({"TREND", "DRIFT"} & set(codes(judged(rates))))
    assert called / runs <= 0.05


@pytest.mark.parametrize("change", [-0.06, 0.06])
def test_a_known_trend_is_found_in_noise(change: float) -> None:
    rates = steady() * (1 + change * np.arange(SECONDS) / SECONDS)
    stability = judged(rates)
    assert stability["verdict"] == "UNSTABLE"
    assert "TREND" in codes(stability)
    assert stability["trend"]["low_share"] <= change <= stability["trend"]["high_share"]
    assert stability["trend"]["change_share"] == pytest.approx(change, abs=0.01)


def test_a_steady_soak_is_stable_with_every_figure() -> None:
    stability = judged(steady())
    assert (stability["verdict"], stability["reasons"]) == ("STABLE", [])
    assert stability["window_seconds"] == 10.0 == window_seconds(SECONDS)
    assert stability["windows"] == 79  # the first ends with the ramp: 90 % generating at 2 s, and a life of 4 s
    assert stability["settled_spans_seconds"] == [[6.0, 800.0]]
    assert stability["median_output_tokens_per_second"] == pytest.approx(RATE, rel=0.01)
    assert stability["coefficient_of_variation"] == pytest.approx(0.01 / math.sqrt(10), rel=0.3)
    assert 0.98 < stability["worst_window"]["share_of_median"] < 1
    assert stability["gaps"] == []
    assert stability["full_share"] == 1.0
    assert stability["throttling"] is None


def test_a_late_fall_is_a_drift_that_the_robust_trend_does_not_see() -> None:
    rates = steady()
    rates[-80:] *= 0.93
    stability = judged(rates)
    assert "DRIFT" in codes(stability) and "TREND" not in codes(stability)
    assert stability["drift"]["change_share"] == pytest.approx(-0.07, abs=0.01)
    assert abs(stability["trend"]["change_share"]) < 0.02


def test_a_slow_window_is_named() -> None:
    rates = steady()
    rates[406:416] *= 0.8
    stability = judged(rates)
    assert codes(stability) == ["WORST_WINDOW"]
    assert stability["worst_window"]["begins_seconds"] == 406.0
    assert stability["worst_window"]["share_of_median"] == pytest.approx(0.8, abs=0.02)


def test_a_standstill_is_a_gap_even_where_windows_are_long() -> None:
    rates = steady()
    rates[300:307] = 0
    stability = judged(rates)
    assert {"GAP", "WORST_WINDOW"} <= set(codes(stability))
    (gap,) = stability["gaps"]
    assert gap == {"begins_seconds": 300.0, "seconds": 8.0}


def test_rates_that_scatter_are_not_steady() -> None:
    rates = RATE * (1 + 0.3 * np.random.default_rng(3).normal(size=SECONDS))
    assert "VARIATION" in codes(judged(rates))


def test_nothing_at_all_is_no_steady_rate() -> None:
    stability = judged(np.zeros(SECONDS))
    assert stability["verdict"] == "UNSTABLE"
    assert "STANDSTILL" in codes(stability)


def test_a_soak_that_is_too_short_is_undecided() -> None:
    stability = judged(steady()[:12])
    assert (stability["verdict"], codes(stability)) == ("UNDECIDED", ["TOO_SHORT"])


def test_a_trend_that_the_windows_cannot_exclude_is_undecided() -> None:
    rates = RATE * (1 + 0.025 * noise(np.random.default_rng(4), 40, 0.0))
    stability = judged(rates)
    assert (stability["verdict"], codes(stability)) == ("UNDECIDED", ["TREND_UNCERTAIN"])


def test_a_trend_without_an_interval_says_so() -> None:
    """Windows that wander: as uncertain as a few independent ones, of which an interval has no end."""
    stability = judged(RATE * (1 + 0.01 * np.cumsum(np.random.default_rng(3).normal(size=20)) / 3))
    (reason,) = stability["reasons"]
    assert reason["code"] == "TREND_UNCERTAIN"
    assert "% (too few windows for an interval), could be more than 2 %; run a longer soak" in reason["message"]


def test_a_target_that_waits_for_samples_is_not_soaked() -> None:
    stability = judged(steady(), waiting=lambda second: 0 if second % 5 == 0 else 4)
    assert (stability["verdict"], codes(stability)) == ("UNDECIDED", ["NOT_FULL"])
    assert stability["full_share"] == pytest.approx(0.8, abs=0.01)


def test_a_clock_below_its_maximum_with_power_at_the_limit_is_how_the_card_is_built() -> None:
    stability = judged(steady(), power_watts=698.0, clock_mhz=1500.0, temperature_celsius=64.0)
    assert stability["verdict"] == "STABLE"
    assert stability["throttling"] == {
        "otherwise_limited_share": 0.0,
        "otherwise_limited_replica": None,
        "otherwise_limited_causes": [],
        "power_limited_share": 1.0,
        "lowest_clock_mhz": 1500.0,
        "median_clock_mhz": 1500.0,
        "highest_temperature_celsius": 64.0,
    }


def test_the_drivers_reasons_decide_and_name_the_cause() -> None:
    hot = {"power_watts": 690.0, "clock_mhz": 1500.0, "clock_reasons": lambda second: 0x44 if second % 10 == 0 else 4}
    stability = judged(steady(), **hot)
    assert (stability["verdict"], codes(stability)) == ("UNSTABLE", ["THROTTLED"])
    assert "was slowed down by heat (hardware) in 9.9 % of the rows" in stability["reasons"][0]["message"]
    low = judged(steady(), power_watts=400.0, clock_mhz=lambda second: 1900.0 - second, clock_reasons=2)
    assert low["verdict"] == "STABLE"  # a user set the clocks


def test_errors_of_a_gpu_end_a_soak_as_unstable() -> None:
    stability = judged(steady(), xid_errors=lambda second: int(second > 300), pcie_replays=3)
    assert codes(stability) == ["GPU_ERRORS"]
    assert [error["field"] for error in stability["gpu_errors"]] == ["pcie_replays", "xid_errors"]


def test_a_clock_that_falls_with_power_to_spare_is_throttled() -> None:
    stability = judged(
        steady(),
        power_watts=lambda second: 690.0 if second < 700 else 480.0,
        clock_mhz=lambda second: 1800.0 if second < 700 else 1200.0,
        temperature_celsius=lambda second: 60.0 + second / 30,
    )
    assert codes(stability) == ["THROTTLED"]
    assert stability["throttling"]["otherwise_limited_share"] == pytest.approx(100 / 794, abs=0.01)
    assert stability["throttling"]["otherwise_limited_replica"] == "here/0"
    assert stability["throttling"]["highest_temperature_celsius"] == pytest.approx(60 + 798 / 30)


def test_a_soak_that_went_on_on_a_machine_of_another_name_is_judged_by_the_same_limits() -> None:
    result = {
        "soak": {"duration_seconds": float(SECONDS), "segments": [{"begins_seconds": 0.0}]},
    }
    gpus = [{"power_limit_watts": 700.0, "max_clock_mhz": 1980.0}]
    table = series(steady(), power_watts=480.0, clock_mhz=lambda second: 1800.0 if second < 400 else 1200.0)
    stability = judge_soak(result, {"hostname": "there", "gpus": gpus}, requests(), table)
    assert codes(stability) == ["THROTTLED"]

    shared = {**result, "target": {"tensor_parallel": 2}}  # their power together, at its limit
    table = series(steady(), power_watts=1390.0, clock_mhz=lambda second: 1800.0 if second < 400 else 1200.0)
    stability = judge_soak(shared, {"hostname": "there", "gpus": gpus}, requests(), table)
    assert codes(stability) == []
    assert stability["throttling"]["power_limited_share"] == 1.0


def test_what_a_kill_left_unwritten_is_no_gap() -> None:
    """requests.parquet may be a write ahead of series.parquet: the soak goes on from its last token."""
    before = series(steady()[:400]).to_pylist()
    after = series(steady()[400:]).to_pylist()
    begins, tokens = 411.0, before[-1]["output_tokens"]
    rows = [SeriesRow(**row) for row in before]
    rows.append(rows[-1]._replace(elapsed_seconds=begins, in_flight=0, waiting=0))
    rows += [
        SeriesRow(**row)._replace(
            elapsed_seconds=begins + row["elapsed_seconds"], output_tokens=tokens + row["output_tokens"]
        )
        for row in after
    ]
    segments = [{"begins_seconds": moment} for moment in (0.0, begins)]
    result = {"soak": {"duration_seconds": begins + 400, "segments": segments}}
    stability = judge_soak(result, {"hostname": "here", "gpus": []}, requests(), to_table(SeriesRow, rows))
    assert stability["settled_spans_seconds"][0][1] == 400.0
    assert stability["verdict"] == "STABLE", stability["reasons"]


def test_ramps_after_an_interruption_are_in_no_window() -> None:
    rates = steady()
    rates[400:404] = 100.0  # a second ramp

    def waiting(second: int) -> float:
        return 10 if 400 <= second < 402 else 4

    apart = judged(rates, segments=[(0.0, 400.0), (400.0, float(SECONDS))], waiting=waiting)
    assert apart["settled_spans_seconds"] == [[6.0, 400.0], [407.0, 800.0]]
    assert apart["verdict"] == "STABLE"
    assert "WORST_WINDOW" in codes(judged(rates, waiting=waiting))


@settings(deadline=None)
@given(
    rates=st.lists(st.integers(0, 50), min_size=5, max_size=60),
    seconds=st.floats(1.0, 9.0),
    begin=st.floats(0.0, 10.0),
)
def test_windows_count_every_token_between_their_ends_once(rates: list[int], seconds: float, begin: float) -> None:
    table = series(np.array(rates, float))
    windows = windows_of(table, [(begin, float(len(rates)))], seconds)
    if not len(windows.rates):
        assert len(rates) - begin < seconds
        return
    assert np.allclose(np.diff(windows.begins), seconds)
    total = np.append(0.0, np.cumsum(rates))
    reached = np.interp([windows.begins[0], windows.begins[-1] + seconds], np.arange(len(total)), total)
    assert (windows.rates * seconds).sum() == pytest.approx(reached[1] - reached[0], abs=1e-6)


@pytest.mark.parametrize(
    ("duration", "window"), [(10, 1), (60, 1), (600, 7.5), (4800, 60), (86_400, 60), (7 * 86_400, 420)]
)
def test_windows_are_an_80th_between_a_second_and_a_minute(duration: float, window: float) -> None:
    assert window_seconds(duration) == window


def test_every_figure_and_every_reason_is_told() -> None:
    telemetry = {"power_watts": 698.0, "clock_mhz": 1500.0, "temperature_celsius": 64.0}
    rates = steady()
    rates[300:307] = 0
    stability = judged(rates, **telemetry)
    inner = [stability[name] for name in ("trend", "drift", "worst_window", "throttling")] + stability["gaps"]
    documented = (DOCS / "run-folder.md").read_text()
    assert {name for part in [stability, *inner] for name in part if f"`{name}`" not in documented} == set()
    source = Path(inspect.getfile(judge_stability)).read_text()
    reasons = set(re.findall(r'"([A-Z_]{3,})"', source)) - set(Stability)
    assert {"TREND", "TOO_SHORT", "THROTTLED"} < reasons
    commands = (DOCS / "commands.md").read_text()
    assert {name for name in reasons if f"| `{name}` |" not in commands} == set()


def test_a_segment_without_load_has_no_settled_span() -> None:
    assert settled_spans(requests(), series(steady()), [(0.0, 800.0), (801.0, 800.0)]) == [(6.0, 800.0)]
    assert settled_spans(requests(), to_table(SeriesRow, []), [(0.0, 800.0)]) == []
    assert CONFIDENCE == 0.99
