"""The page: well formed, self-contained, readable without eyes, and saying what the folder says."""

import math
import re
import shutil
import subprocess
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatoken.errors import UsageError
from megatoken.report import write_report
from megatoken.report.charts import MAX_POINTS, Line, level, line_chart, rate, tick_text, ticks
from megatoken.report.html import page
from megatoken.results import read_run

LOADING_ATTRIBUTES = {"src", "srcset", "href", "action", "data", "poster", "background"}


def parsed(path) -> tuple[str, ElementTree.Element]:
    text = write_report(path).read_text(encoding="utf-8")
    start, _, rest = text.partition("\n")
    assert start == "<!DOCTYPE html>"
    return text, ElementTree.fromstring(rest)


def words(element: ElementTree.Element) -> str:
    return " ".join("".join(element.itertext()).split())


def test_the_page_loads_nothing(make_run, unmet):
    text, root = parsed(make_run(rules_unmet=unmet))
    assert not re.search(r"https?:|//[a-z]|@import|url\(", text)
    for element in root.iter():
        assert element.tag not in {"script", "img", "iframe", "object", "embed", "video", "audio", "base"}
        for name, value in element.attrib.items():
            assert not name.startswith("on")
            assert name not in LOADING_ATTRIBUTES or value == "data:,"
    assert "default-src 'none'" in root.find("head/meta[@http-equiv]").get("content")


def test_the_page_can_be_read_without_eyes(make_run):
    _, root = parsed(make_run())
    assert root.get("lang") == "en"
    assert words(root.find("head/title")) == "20261120T091233Z-offline-tiny · MEASURED · megatoken"
    assert "width=device-width" in root.find("head/meta[@name='viewport']").get("content")
    assert len(root.findall(".//h1")) == len(root.findall(".//main")) == 1
    assert all(cell.get("scope") in {"row", "col"} for cell in root.iter("th"))
    identifiers = {element.get("id"): words(element) for element in root.iter() if element.get("id")}
    charts = list(root.iter("svg"))
    assert len(charts) == 6
    for chart in charts:
        assert chart.get("role") == "img"
        labels = chart.get("aria-labelledby").split()
        assert len(labels) == 2
        assert all(identifiers[label] for label in labels)
    assert len(identifiers) == 12


def test_the_page_says_what_the_folder_says(make_run, unmet):
    path = make_run("INVALID", rules_unmet=unmet, reasons=[{"code": "SEEDS", "message": "wrong & <odd>"}])
    _, root = parsed(path)
    text = words(root)
    result = read_run(path).result
    assert f"{result['output_tokens_per_second']:.0f} output tokens/s" in text
    assert "80 samples in 19.8 s" in text
    assert words(root.find(".//span[@class='badge INVALID']")) == "INVALID"
    for told in ("SEEDS", "wrong & <odd>", "MIN_DURATION", "ran 20 s of 600 s", "80 of 24,576 <b>", "a<b>&\"c'"):
        assert told in text
    rows = {words(row.find("th")): [words(cell) for cell in row.findall("td")] for row in root.iter("tr")}
    assert rows["Time per output token ms"] == ["21.6", "22.8", "23.0*", "23.1*"]
    assert rows["Peak memory MiB"] == ["300"]
    assert rows["nested.list.0.x"] == ["-"]
    assert rows["hostname"] == ["host"]


def test_the_page_says_what_ran_on_what_and_what_to_know_about_it(make_run):
    path = make_run(
        notes=["random weights: the speed is real & the text is not"],
        weights="random, seed 0",
        data_set="lengths.csv",
        data_set_rows=24576,
        target={"threads": 3, "back_end": "cpu, compiled kernels"},
        environment={
            "cpu": {"model": "Fast <1>", "usable_cores": 3, "logical_cores": 8},
            "gpus": [{"name": "H200"}, {"name": "H200"}],
            "packages": {"megatoken": "0.1.0", "mlcommons-loadgen": "5.1.2"},
        },
    )
    _, root = parsed(path)
    assert "Note: random weights: the speed is real & the text is not" in words(root.find(".//header"))
    section = next(found for found in root.iter("section") if words(found).startswith("What ran, and on what"))
    assert {words(row.find("th")): words(row.find("td")) for row in section.iter("tr")} == {
        "Model": "tiny",
        "Weights": "random, seed 0",
        "Data set": "lengths.csv · 24,576 rows",
        "CPU": "Fast <1> · 3 of 8 logical cores usable",
        "GPU": "2 × H200",
        "Threads": "3",
        "Back end": "cpu, compiled kernels",
        "LoadGen": "5.1.2",
        "megatoken": "0.1.0",
    }


def test_every_curve_stays_inside_its_chart(make_run):
    _, root = parsed(make_run())
    curves = list(root.iter("polyline"))
    assert len(curves) == 9
    for curve in curves:
        points = [tuple(map(float, point.split(","))) for point in curve.get("points").split()]
        assert all(48 <= x <= 384 and 12 <= y <= 190 for x, y in points)
        assert points == sorted(points, key=lambda point: point[0])


@pytest.mark.parametrize("samples", [0, 1, 2, 4, 8])
def test_few_samples_make_a_page_too(make_run, samples):
    _, root = parsed(make_run("INTERRUPTED", samples=samples, reasons=[{"code": "", "message": "stopped"}]))
    assert "INTERRUPTED stopped" in words(root)


def test_a_page_depends_on_the_folder_alone(make_run):
    path = make_run()
    first = write_report(path).read_bytes()
    assert write_report(path).read_bytes() == first
    assert page(read_run(path)).encode() == first


def test_a_damaged_folder_gets_no_page(make_run):
    path = make_run()
    (path / "series.parquet").unlink()
    with pytest.raises(UsageError, match=r"series\.parquet is missing"):
        write_report(path)
    assert not (path / "report.html").exists()


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


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (0.25, "0.25"), (1500, "1.5k"), (2e6, "2M"), (3e9, "3G")])
def test_tick_text(value, text):
    assert tick_text(value) == text


def test_a_rate_is_the_growth_between_rows():
    line = rate("r", np.array([1.0, 2.0, 4.0]), np.array([10.0, 30.0, 30.0]))
    assert line.x.tolist() == [0, 1, 1, 2, 2, 4]
    assert line.y.tolist() == [10, 10, 20, 20, 0, 0]


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


def test_a_flat_or_silent_line_still_draws():
    for value in (0.0, 3.0):
        flat = Line("flat", np.full(3, value), np.full(3, value))
        for from_zero in (True, False):
            drawn = line_chart("t", [flat], x_label="x", y_label="y", x_from_zero=from_zero, identifier="i")
            assert "nan" not in drawn
            ElementTree.fromstring(drawn)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="no chromium on this machine")
def test_a_browser_renders_the_page_without_a_complaint(make_run, tmp_path):
    report = write_report(make_run())
    answer = subprocess.run(
        [
            "chromium",
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--enable-logging=stderr",
            "--virtual-time-budget=2000",
            "--dump-dom",
            report.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert answer.stdout.count("<polyline") == 9
    assert "CONSOLE" not in answer.stderr
