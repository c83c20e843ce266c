"""Charts: round axes, nothing outside the canvas, nothing lost when long runs are thinned."""

import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatoken.report.bars import Bar, Dot, Swing, bar_chart, dot_chart, tornado, waterfall
from megatoken.report.blocks import Figure
from megatoken.report.curves import (
    BINS,
    MAX_POINTS,
    distribution_chart,
    histogram_chart,
    level,
    panels_chart,
    rate,
    time_chart,
)
from megatoken.report.plots import Between, Line, Mark, Panel
from megatoken.report.scales import WIDE, WIDTH, shortened, tick_text, ticks

AMOUNTS = st.floats(-1e12, 1e12)


def inside(figure: Figure) -> ElementTree.Element:
    """The drawing, which must lie on its canvas."""
    drawing = ElementTree.fromstring(f"<svg>{figure.drawing}</svg>")
    width = WIDE if figure.wide else WIDTH
    for element in drawing.iter():
        left = [float(element.get(name)) for name in ("x", "x1", "x2", "cx") if element.get(name)]
        down = [float(element.get(name)) for name in ("y", "y1", "y2", "cy") if element.get(name)]
        points = [point.split(",") for point in element.get("points", "").split()]
        assert all(-0.1 <= x <= width + 0.1 for x in [*left, *(float(x) for x, _ in points)])
        assert all(0 <= y <= figure.height for y in [*down, *(float(y) for _, y in points)])
        if element.tag == "rect":
            assert left[0] + float(element.get("width")) <= width + 1
    return drawing


@settings(deadline=None)
@given(st.floats(0, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_round_and_enclose(low, span):
    top = low + span
    values = ticks(low, top)
    steps = np.diff(values)
    assert 2 <= len(values) <= 8
    assert steps == pytest.approx(steps[0], rel=1e-3)
    assert values[0] <= low + 1e-6 * steps[0] + 1e-9
    assert values[-1] >= top - 1e-6 * steps[0] - 1e-9
    mantissa = steps[0] / 10 ** math.floor(math.log10(steps[0]) + 1e-9)
    assert min(abs(mantissa - round_one) for round_one in (1, 2, 2.5, 5, 10)) < 0.02


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (0.25, "0.25"), (1500, "1.5k"), (2e6, "2M"), (-3e9, "-3G")])
def test_tick_text(value, text):
    assert tick_text(value) == text


def test_a_name_is_cut_where_it_tells_least():
    assert shortened("node-01", 7) == "node-01"
    assert shortened("a long name", 7) == "a long…"
    assert shortened("ND_GB300_v6_18", 7, keep_end=True) == "…_v6_18"


def test_a_rate_is_the_growth_between_rows():
    line = rate("r", np.array([1.0, 2.0, 4.0]), np.array([10.0, 30.0, 30.0]))
    assert line.x.tolist() == [0, 1, 1, 2, 2, 4]
    assert line.y.tolist() == [10, 10, 20, 20, 0, 0]


def test_a_total_that_falls_has_no_rate():
    """A lost replica takes back the tokens of answers that begin anew elsewhere."""
    line = rate("r", np.array([1.0, 2.0, 3.0]), np.array([10.0, 4.0, 9.0]))
    assert line.y.tolist() == [10, 10, 0, 0, 5, 5]


@settings(deadline=None)
@given(st.integers(1, 3000))
def test_long_runs_are_thinned_without_losing_tokens(seconds):
    times = np.arange(1.0, seconds + 1)
    totals = np.cumsum(times % 7)
    line = rate("r", times, totals)
    assert len(line.x) <= 2 * MAX_POINTS
    assert (np.diff(line.x)[::2] * line.y[::2]).sum() == pytest.approx(totals[-1])
    thin = level("l", times, times % 5)
    assert len(thin.x) <= MAX_POINTS
    assert thin.x[0] >= 1
    assert thin.x[-1] <= seconds


@settings(deadline=None)
@given(st.integers(2, 500))
def test_the_numbers_behind_a_rate_add_up_to_its_tokens(seconds):
    totals = np.cumsum(np.arange(seconds) % 7.0)
    figure = time_chart("t", "tokens/s", [rate("r", np.arange(1.0, seconds + 1), totals)])
    rows = [(float(end.replace(",", "")), float(mean.replace(",", ""))) for end, mean in figure.data.rows]
    spans = np.diff([0.0, *(end for end, _ in rows)])
    assert (spans * [mean for _, mean in rows]).sum() == pytest.approx(totals[-1], rel=2e-3, abs=0.01)


def test_a_flat_or_silent_line_still_draws():
    for value in (0.0, 3.0):
        times, flat = np.arange(3.0), np.full(3, value)
        inside(time_chart("t", "u", [Line("flat", times, flat)], marks=[Mark("m", value)]))
        inside(time_chart("t", "u", [Line("flat", np.zeros(1), np.zeros(1))]))
        for from_zero in (True, False):
            drawing = inside(distribution_chart("t", "s", [("v", flat)], x_label="s", from_zero=from_zero))
            assert "nan" not in ElementTree.tostring(drawing).decode()
            drawing = inside(histogram_chart("t", "s", [("v", flat)], x_label="s", from_zero=from_zero))
            assert "nan" not in ElementTree.tostring(drawing).decode()


def test_an_area_lies_between_its_bounds_and_is_named():
    x = np.arange(4.0)
    figure = time_chart("t", "u", [Line("l", x, x)], between=Between("all 9", x, x, x + 2))
    assert inside(figure).find(".//polygon") is not None
    assert ("keybetween", "all 9") in figure.legend
    assert [column.name for column in figure.data.columns] == ["Until", "l", "all 9, least", "all 9, most"]


def test_percentiles_behind_a_distribution_are_exact():
    figure = distribution_chart("t", "s", [("v", np.arange(101.0))], x_label="s")
    assert figure.data.rows[5] == ("75", "75")
    assert figure.description == "v: from 0 to 100 s"


def test_a_histogram_counts_every_sample_and_marks_its_percentiles():
    values = np.arange(1.0, 101.0)
    figure = histogram_chart("t", "s", [("v", values)], x_label="s", limits=[Mark("mine", 120.0, upright=True)])
    drawing = inside(figure)
    group = drawing.find("g")
    floor, top, most = map(float, group.get("data-y").split())
    points = [tuple(map(float, point.split(","))) for point in drawing.find(".//polyline").get("points").split()]
    heights = [(floor - y) * most / (floor - top) for _, y in points[::2]]
    assert len(heights) == BINS and sum(heights) == pytest.approx(100, abs=1)
    names = [mark.get("data-name") for mark in drawing.iter("line") if mark.get("data-name")]
    assert names == ["p50, 50.5 s", "p90, 90.1 s", "p99, 99.0 s", "mine"]
    far = histogram_chart("t", "s", [("v", values)], x_label="s", limits=[Mark("mine", 1000.0, upright=True)])
    assert far.legend == (("keymark", "mine, beyond the axis"),)
    assert max(x for x, _ in points) <= 384.1


def test_panels_share_their_seconds_and_events_are_numbered_once():
    x = np.arange(1.0, 11.0)
    panels = [Panel("tokens/s", [Line("output", x, x)]), Panel("ms", [Line("median", x, 2 * x)], first_key=1)]
    happened = [Mark(f"event {at}", at, upright=True, event=True) for at in (3.0, 3.1, 8.0)]
    figure = panels_chart("t", panels, window=(2.0, 5.0), events=happened)
    drawing = inside(figure)
    signs = [(text.text, float(text.get("y"))) for text in drawing.iter("text") if text.get("class").startswith("sign")]
    assert [sign for sign, _ in signs] == ["1", "2", "3"]
    assert signs[0][1] < signs[1][1] and signs[2][1] == signs[0][1]  # the second would touch the first
    assert sum(line.get("class") == "event" for line in drawing.iter("line")) == 6
    assert [name for _, name in figure.legend][2:] == ["1: event 3.0", "2: event 3.1", "3: event 8.0", "steady window"]
    assert [(column.name, column.unit) for column in figure.data.columns[1:]] == [
        ("output", "tokens/s"),
        ("median", "ms"),
    ]


@settings(deadline=None)
@given(
    st.lists(st.builds(Bar, st.text(max_size=60), AMOUNTS, st.sampled_from(["", "verified", "estimate"])), min_size=1)
)
def test_bars_and_waterfalls_stay_on_the_canvas(bars):
    inside(bar_chart("t", "u", bars))
    inside(waterfall("t", "u", bars, "sum"))


def test_bars_are_told_apart_by_pattern_and_word_not_by_colour_alone():
    states = ("verified", "unverified", "estimate")
    drawing = inside(bar_chart("t", "u", [Bar(state, 2.0, state) for state in states]))
    assert [rect.get("class") for rect in drawing.iter("rect")] == ["bar", "bar hatched", "bar outlined"]
    words = [text.text for text in drawing.iter("text") if text.get("class") == "value end"]
    assert words == list(states)


def test_a_waterfall_starts_each_bar_where_the_last_ended():
    figure = waterfall("t", "$", [Bar("a", 3.0), Bar("b", -1.0), Bar("c", 2.0)], "sum")
    spans = [(float(rect.get("x")), float(rect.get("width"))) for rect in inside(figure).iter("rect")]
    assert spans == [(0, 196.5), (131, 65.5), (131, 131), (0, 262)]
    assert figure.data.rows[-1] == ("sum", "4")
    assert "b: -1 $; c: 2 $; sum: 4 $" in figure.description
    assert "75 %" in figure.drawing


@settings(deadline=None)
@given(
    AMOUNTS, st.lists(st.builds(Swing, st.text(max_size=9), st.just("1"), st.just("2"), AMOUNTS, AMOUNTS), min_size=1)
)
def test_a_tornado_stays_on_the_canvas_widest_first(base, swings):
    figure = tornado("t", "u", base, swings)
    inside(figure)
    assert len(figure.data.rows) == len(swings)


def test_a_tornado_has_the_widest_swing_first_and_both_ends_in_words():
    swings = [Swing("pue", "1", "2", 9.0, 11.0), Swing("price", "3", "4", 5.0, 15.0)]
    figure = tornado("t", "$", 10.0, swings)
    assert [row[0] for row in figure.data.rows] == ["price", "pue"]
    words = re.findall(r">([^<]+)</text>", figure.drawing)
    assert words == ["price", "3 … 4", "5", "15", "pue", "1 … 2", "9", "11", "10 at the planned inputs"]


@settings(deadline=None)
@given(st.lists(st.builds(Dot, st.text(max_size=30), AMOUNTS, st.booleans()), min_size=1, max_size=40))
@example([Dot("", 366503875926.3136, False)] * 3)  # whose mean is another number
def test_dots_stay_on_the_canvas_slow_ones_in_another_shape(dots):
    figure = dot_chart("t", "u", dots, [("mean", sum(dot.value for dot in dots) / len(dots))])
    drawing = inside(figure)
    assert len(drawing.findall("path")) == sum(dot.apart for dot in dots)
    assert len(drawing.findall("circle")) == sum(not dot.apart for dot in dots)
