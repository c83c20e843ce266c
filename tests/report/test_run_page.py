"""The page of a run: saying what the folder says."""

import re

import numpy as np
import pytest
import yaml
from pages import parsed, table_rows, words

from megatoken.errors import UsageError
from megatoken.report import write_report
from megatoken.report.console import lines
from megatoken.report.page import page
from megatoken.report.views import run_view
from megatoken.report.views.over_time import events, pauses
from megatoken.report.views.rate_search import search_answer
from megatoken.runs.reasons import reason
from megatoken.runs.run import read_run


def page_of(path):
    return parsed(write_report(path).read_text(encoding="utf-8"))


def figures(root) -> list[str]:
    return [words(figure.find("figcaption")) for figure in root.iter("figure")]


def test_the_page_says_what_the_folder_says(make_run, unmet):
    path = make_run("INVALID", rules_unmet=unmet, reasons=[{"code": "SEEDS", "message": "wrong & <odd>"}])
    root = page_of(path)
    text = words(root)
    result = read_run(path).result
    assert words(root.find("head/title")) == "tiny bf16 offline on host · INVALID · megatoken"
    assert "20261120T091233Z-offline-tiny" in words(root.find(".//header"))
    assert "MLPerf rules not met (none claimed): MIN_DURATION, SAMPLES" in words(root.find(".//header"))
    assert table_rows(root, "MLPerf rules not met")["MIN_DURATION"] == ["ran 20 s of 600 s"]
    assert f"{result['output_tokens_per_second']:.0f} output tokens/s" in text
    assert "80 samples in 19.8 s" in text
    assert words(root.find(".//span[@class='badge bad']")) == "✕ INVALID"
    for phrase in ("SEEDS", "wrong & <odd>", "MIN_DURATION", "ran 20 s of 600 s", "80 of 24,576 <b>", "a<b>&\"c'"):
        assert phrase in text
    assert table_rows(root, "Percentiles")["Time per output token"] == ["ms", "21.6", "22.8", "23.0*", "23.1*"]
    assert table_rows(root, "Rates and counts")["Peak memory"] == ["MiB", "300"]
    assert table_rows(root, "Configuration")["nested.list.0.x"] == ["-"]
    assert table_rows(root, "Machine and versions")["hostname"] == ["host"]


def test_the_page_has_loadgens_own_word_as_the_terminal_has(make_run):
    assert "LoadGen result: INVALID" in words(page_of(make_run(loadgen_validity="INVALID")))
    assert "own word" not in words(page_of(make_run(scenario="server", loadgen_validity=None)))


def test_the_page_says_how_its_sample_rate_differs_from_that_of_the_file(make_run):
    path = make_run(scenario="server")
    result, root = read_run(path).result, page_of(path)
    shown = result["samples_completed"] / result["duration_seconds"]
    assert float(table_rows(root, "Rates and counts")["Sample rate"][1]) == pytest.approx(shown, rel=1e-2)
    assert "in Server and Interactive it counts one sample less" in words(root)


def test_doubts_about_the_measurement_have_a_heading_of_their_own(make_run):
    text = words(page_of(make_run(doubts=[{"code": "SEND_LAG", "message": "samples were sent late"}])))
    for phrase in ("Doubts about the measurement:", "SEND_LAG", "samples were sent late"):
        assert phrase in text
    assert "MLPerf rules not met" not in text


def test_the_page_says_what_ran_on_what_and_what_to_know_about_it(make_run):
    path = make_run(
        notes=[reason("NOTE", text="random weights: the speed is real & the text is not")],
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
    root = page_of(path)
    (section,) = (part for part in root.iter("section") if words(part.find("h2")) == "Over time")
    assert "random weights: the speed is real & the text is not" in words(section)
    assert [part.tag for part in section][:4] == ["h2", "figure", "p", "ul"]  # below the first picture
    assert table_rows(root, "Model and environment") == {
        "Model": ["tiny"],
        "Weights": ["random, seed 0"],
        "Data set": ["lengths.csv · 24,576 rows"],
        "CPU": ["Fast <1> · 3 of 8 logical cores usable"],
        "GPU": ["2 × H200"],
        "Threads": ["3"],
        "Back end": ["cpu, compiled kernels"],
        "LoadGen": ["5.1.2"],
        "megatoken": ["0.1.0"],
    }


def test_a_soak_does_not_list_loadgen(make_run):
    packages = {"packages": {"megatoken": "0.1.0", "mlcommons-loadgen": "5.1.2"}}
    root = page_of(make_run(scenario="soak", environment=packages))
    assert list(table_rows(root, "Model and environment")) == ["Model", "megatoken"]
    assert "mlperf/" not in table_rows(root, "Files in this folder")


def test_one_node_without_telemetry_has_eight_charts(make_run):
    root = page_of(make_run())
    assert figures(root) == [
        "Throughput and latency over time",
        "Samples being computed samples",
        "Engine utilisation %",
        "First token samples",
        "Last token samples",
        "Time per output token samples",
        "Lengths of the samples samples",
        "Goodput by limit output tokens/s",
    ]
    assert "Work within limits" not in words(root)  # neither the run nor the rules of MLPerf state a limit
    root = page_of(make_run(tpot_limit_seconds=0.04))
    rows = table_rows(root, "Work within limits")  # 20.0 to 23.2 ms a token; Offline counts no first token
    assert rows == {"Limits": [], "This run's limits": ["does not apply", "40 ms", "100", "80", "0", "4.034", "104.9"]}


def test_pictures_come_before_tables_and_the_first_has_the_whole_width(make_run):
    root = page_of(make_run())
    titles = [words(heading) for heading in root.iter("h2")]
    assert titles[:3] == ["Over time", "Over samples", "Numbers"]
    first, *others = root.iter("figure")
    assert (first.get("class"), words(first.find("figcaption"))) == ("wide", "Throughput and latency over time")
    assert first.find("svg").get("viewBox").startswith("0 0 640 ")
    assert {figure.get("class") for figure in others} == {None}


def test_what_happened_to_a_run_is_marked_on_its_first_chart(make_run):
    lost = {"node": "node-3", "replica": None, "cause": "kill", "at_seconds": 7.5}
    joined = {"node": "node-3", "replica": 0, "at_seconds": 900.0}  # after the last row of the series
    served = {"replicas": 2, "replicas_least": 1, "replicas_at_end": 2, "share_left": 0.5, "late_answers": 0}
    root = page_of(make_run(rack={**served, "lost": [lost], "joined": [joined], "clock_offsets": []}))
    chart = next(root.iter("figure"))
    legend = [words(item) for item in chart.find("ul").findall("li")]
    assert legend[-3:-1] == ["1: node-3 lost at 7.50 s", "2: node-3 joined at 900 s"]
    first, *_ = chart.iter("g")
    places = [float(line.get("x1")) for line in first.iter("line") if line.get("class") == "event"]
    assert len(places) == 2
    assert 68 < places[0] < places[1] <= 624
    (pause,) = events({"soak": {"interruptions": [{"at_seconds": 4.0, "gap_seconds": 61.0}, {}]}})
    assert (pause.name, pause.at, pause.upright) == ("stopped, resumed after 61.0 s at 4.00 s", 4.0, True)
    (gap,) = pauses(np.array([1.0, 2.0, 3.0, 15.0, 16.0]))
    assert (gap.name, gap.at) == ("no reading for 12.0 s from 3.00 s", 3.0)
    assert list(pauses(np.arange(0.0, 60.0, 6.0))) == []  # a target that answers each six seconds is not paused


def test_in_server_the_first_token_counts_for_goodput(make_run):
    own = {"ttft_limit_seconds": 1.5, "tpot_limit_seconds": None}
    rows = table_rows(page_of(make_run(scenario="server", rules="v5.1", **own)), "Work within limits")
    # first tokens come at 0.25, 1.25, 2.25 ... s, four samples each of 80
    assert rows["This run's limits"][:3] == ["1.5 s", "none", "10"]
    assert rows["MLPerf Server, llama2-70b"][2] == "10"
    assert rows["MLPerf Interactive, llama2-70b"][2] == "5"


@pytest.mark.parametrize(
    ("nodes", "curves"), [(3, ["node-0", "node-1", "node-2"]), (6, ["median node", "slowest: node-0"])]
)
def test_every_node_is_seen_over_time_and_power_and_clocks_where_known(make_rack, nodes, curves):
    root = page_of(make_rack(nodes))
    assert {"Power W, all replicas", "Clock MHz", "Temperature °C", "Rate of each node output tokens/s"} <= set(
        figures(root)
    )
    heads = [
        words(head) for head in _table(root, "Output tokens of each node").iter("th") if head.get("scope") == "col"
    ]
    assert heads[: 1 + len(curves)] == ["Until s", *(f"{curve} tokens/s" for curve in curves)]
    power = table_rows(root, "Power: means over 20 spans of equal length")
    assert [float(cells[0].replace(",", "")) for cells in list(power.values())[2:]] == pytest.approx(
        [700.0 * 2 * nodes] * 19
    )
    clocks = table_rows(root, "Clock: means over 20 spans of equal length")
    assert list(clocks.values())[-1] == ["1,700", "1,900"]
    assert len(table_rows(root, "Nodes")) == nodes + 1


def test_node_nine_stands_before_node_ten(make_rack):
    assert list(table_rows(page_of(make_rack(11)), "Nodes"))[-2:] == ["node-9", "node-10"]


def _table(root, caption):
    return next(t for t in root.iter("table") if words(t.find("caption")).startswith(caption))


@pytest.mark.parametrize("samples", [0, 1, 2, 4, 8])
def test_few_samples_make_a_page_too(make_run, samples):
    root = page_of(make_run("INTERRUPTED", samples=samples, reasons=[{"code": "INTERRUPTED", "message": "stopped"}]))
    assert "INTERRUPTED stopped" in words(root)


def test_a_page_depends_on_the_folder_alone(make_run):
    path = make_run()
    first = write_report(path).read_bytes()
    assert write_report(path).read_bytes() == first
    assert page(run_view(read_run(path))).encode() == first


def test_a_page_can_go_elsewhere(make_run, tmp_path):
    path = make_run()
    assert write_report(path, tmp_path / "page.html") == tmp_path / "page.html"
    assert not (path / "report.html").exists()


def test_a_damaged_folder_gets_no_page(make_run):
    path = make_run()
    (path / "series.parquet").unlink()
    with pytest.raises(UsageError, match=r"series\.parquet is missing"):
        write_report(path)
    assert not (path / "report.html").exists()


def test_a_rate_search_answers_first(make_run):
    tries = [
        *((26.0, True, True, "kept its limits"), (26.35, True, False, "p99 TPOT"), (20.0, False, False, "9 of 400")),
        *((20.0, False, True, "0 of 400"), (26.35, True, False, "p99 TTFT")),
    ]
    search = {
        "samples_per_second": 26.0,
        "probes": [
            {
                "run_folder": "x",
                "samples_per_second": rate,
                "full_length": full,
                "repeat": number > 2,
                "valid": valid,
                "reason": why,
                "ttft_p99_seconds": rate / 10,
                "tpot_p99_seconds": rate / 500,
            }
            for number, (rate, full, valid, why) in enumerate(tries)
        ],
    }
    run = make_run(scenario="server", rate_search=search, ttft_limit_seconds=2.0)
    root = page_of(run)
    answer = "highest valid rate 26 samples/s; 26.35 samples/s failed twice: p99 TPOT, then p99 TTFT; "
    answer += "20 samples/s failed at first and was valid when repeated"
    assert f"Rate search: {answer}" in words(root.find(".//header"))
    assert figures(root)[:2] == ["TTFT p99 of completed samples s", "TPOT p99 of completed samples ms"]
    chart = next(root.iter("figure"))
    assert [words(item) for item in chart.find("ul").findall("li")] == ["valid", "too high", "This run's limits, 2 s"]
    curves = {line.get("data-name"): len(line.get("points").split()) for line in chart.iter("polyline")}
    assert curves == {"valid": 2, "too high": 3}
    (tried,) = (table for table in root.iter("table") if words(table.find("caption")) == "Rates tried")
    assert [[words(cell) for cell in row][:3] for row in tried.iter("tr")][1:] == [
        *(["20", "probe", "too high"], ["20", "probe, repeated", "valid"], ["26", "full", "valid"]),
        *(["26.35", "full", "too high"], ["26.35", "full, repeated", "too high"]),
    ]
    assert f"Rate search: {answer}" in [line.plain for line in lines(read_run(run), [])]
    assert "Rate search" not in words(page_of(make_run()))


def test_a_failure_that_did_not_stand_is_not_the_upper_end():
    tries = [(29.5, False, True), (29.7, False, False), (29.9, False, False), (29.7, True, True)]
    probes = [
        {"samples_per_second": rate, "full_length": False, "repeat": repeat, "valid": valid, "reason": "p99 TPOT"}
        for rate, repeat, valid in tries
    ]
    answer = search_answer({"rate_search": {"samples_per_second": 29.5, "probes": probes}})
    assert answer == (
        "highest valid rate 29.5 samples/s; 29.9 samples/s failed: p99 TPOT; "
        "29.7 samples/s failed at first and was valid when repeated"
    )


def test_a_rate_at_which_the_client_gave_up_is_no_limit_of_the_server():
    tries = [
        *((230.5, False, True, "kept its limits"), (232.8, False, False, "CLIENT_SATURATED")),
        (232.8, True, False, "LOADGEN_DISAGREES"),
    ]
    probes = [
        {"samples_per_second": rate, "full_length": True, "repeat": repeat, "valid": valid, "reason": why}
        for rate, repeat, valid, why in tries
    ]
    search = {"samples_per_second": 230.5, "limited_by_client": True, "probes": probes}
    assert search_answer({"rate_search": search}) == (
        "highest valid rate at least 230.5 samples/s: the client, not the server, was the limit; "
        "232.8 samples/s failed twice: CLIENT_SATURATED, then LOADGEN_DISAGREES"
    )


def test_the_limits_of_a_run_are_drawn_where_they_are_on_the_axis_of_the_latency(make_run):
    figures = _sample_figures_of(make_run(scenario="server", ttft_limit_seconds=8.0, tpot_limit_seconds=0.02))
    first, last, per_token, _ = figures
    assert first.legend[-1] == ("keymark keymark0", "This run's limits, 8 s")
    assert per_token.legend[-1] == ("keymark keymark0", "This run's limits, 20 ms")
    assert (first.title, last.title, last.legend) == ("First token", "Last token", ())
    (place,) = re.findall(r'class="mark mark0" data-name="[^"]*" x1="([\d.]+)"', first.drawing)
    ticks = dict(re.findall(r'class="tick middle" x="([\d.]+)" y="[\d.]+">([\d.]+)<', first.drawing))
    places, seconds = zip(*((float(x), float(value)) for x, value in ticks.items()), strict=True)
    assert np.interp(float(place), places, seconds) == pytest.approx(8.0, abs=0.05)


def test_the_users_own_limits_are_drawn_too(make_run):
    path = make_run(scenario="server", ttft_limit_seconds=8.0)
    config = yaml.safe_load((path / "config.yaml").read_text())
    (path / "config.yaml").write_text(yaml.safe_dump(config | {"limits": {"ttft_seconds": {"p99": 5.0}}}))
    first, *_ = _sample_figures_of(path)
    assert [name for _, name in first.legend] == ["1: This run's limits, 8 s", "2: Your limits, 5 s"]


def test_a_limit_on_the_first_token_is_not_drawn_in_offline(make_run):
    first, *_ = _sample_figures_of(make_run(ttft_limit_seconds=2.0))
    assert first.legend == () and "limit" not in first.drawing


def test_a_run_without_a_steady_rate_says_why_and_which_flag_helps(make_run):
    run = make_run(samples=8)
    assert read_run(run).result["steady_output_tokens_per_second"] is None
    why = "No steady rate: the target was full for"
    assert why in words(page_of(run).find(".//header"))
    (line,) = [line.plain for line in lines(read_run(run), []) if line.plain.startswith(why)]
    assert re.search(r"and 2\.00 s are needed; --min-duration \d+ is likely to show one$", line)
    assert why not in words(page_of(make_run()))  # 80 samples, which have one


def test_samples_that_waited_less_than_a_second_are_not_said_not_to_have_waited(make_run):
    run = make_run(samples=3)  # it ends before its first second
    assert read_run(run).result["stages"]["queue"] is None or read_run(run).result["stages"]["queue"]["share"] > 0
    shown = words(page_of(run).find(".//header"))
    assert "no sample was waiting at any full second of the run; more --samples keep the target full" in shown


def test_latencies_stand_below_the_throughput_each_on_its_own_axis(make_run):
    def titles(chart):
        return [words(text) for text in chart.iter("text") if "strong" in text.get("class")]

    chart = next(page_of(make_run(scenario="server", ttft_limit_seconds=15.0, tpot_limit_seconds=0.2)).iter("figure"))
    assert titles(chart) == ["Output, tokens/s", "Time to first token, s", "Time per output token, ms"]
    legend = [words(item) for item in chart.find("ul").findall("li")]
    assert "This run's limits, 15 s" in legend and "This run's limits, 200 ms, beyond the axis" in legend
    heads = [words(head) for head in chart.iter("th") if head.get("scope") == "col"]
    assert heads[2:4] == ["Time to first token, median of a group s", "Time to first token, highest of a group s"]
    assert titles(next(page_of(make_run()).iter("figure"))) == ["Output, tokens/s", "Time per output token, ms"]


def _sample_figures_of(folder):
    (section,) = (part for part in run_view(read_run(folder)).sections if part.title == "Over samples")
    return section.blocks


def test_each_row_on_lateness_has_a_name_and_an_explanation(make_run):
    lag = {"p50": 0.001, "p90": 0.002, "p95": 0.003, "p99": 0.004}
    page_text = words(page_of(make_run(scenario="server", request_lag_seconds=lag)))
    assert "Issued late by: from a sample's scheduled time" in page_text
    assert "First byte sent late by: from the scheduled time" in page_text
    without = words(page_of(make_run()))
    assert "late by" not in without
