"""The index page of many runs: groups, the regression check, links, CSV."""

import csv
import io
import math
import statistics
from urllib.parse import unquote

import pytest
from pages import parsed, table_rows, words

from megatoken.analysis.history import history, next_run_interval
from megatoken.errors import UsageError
from megatoken.report import check_lines, write_report
from run_folders import run_folder

NOVEMBER = "2026-11-{:02}T09:00:00Z"


@pytest.fixture
def make_history(tmp_path):
    """Runs of ten samples, one after the other, that took so many seconds each; ``facts`` of all."""

    def make(*seconds: float, **facts):
        return [
            run_folder(tmp_path / "runs", f"{day:02}-run", "host", NOVEMBER.format(day), seconds=float(lasted),
                       **facts)
            for day, lasted in enumerate(seconds, 1)
        ]  # fmt: skip

    return make


def checks(runs) -> list[tuple[str, str]]:
    (group,) = history(runs, "runs").groups
    return [(check.name, check.outcome) for check in group.checks]


@pytest.mark.parametrize(
    ("seconds", "outcome"),
    [
        ((10.0, 10.2, 9.9, 10.1, 10.3), "within the spread"),
        ((10.0, 10.2, 9.9, 10.1, 14.0), "regression"),
        ((10.0, 10.2, 9.9, 10.1, 7.0), "better"),
        ((10.0, 14.0, 8.0, 12.0, 14.0), "within the spread"),  # as slow as above, but earlier runs varied as much
    ],
)
def test_only_more_than_the_spread_is_a_change(make_history, seconds, outcome):
    assert checks(make_history(*seconds)) == [("output_tokens_per_second", outcome)]


def test_the_interval_of_the_next_run():
    values = (90.0, 100.0, 110.0)
    low, high = next_run_interval(values)
    logarithms = [math.log(value) for value in values]
    margin = 4.302653 * statistics.stdev(logarithms) * math.sqrt(4 / 3)  # t(0.975; 2), from a table
    assert math.log(high) == pytest.approx(statistics.fmean(logarithms) + margin, rel=1e-4)
    assert math.log(low) == pytest.approx(statistics.fmean(logarithms) - margin, rel=1e-4)
    low, high = next_run_interval((5.0, 5.0))
    assert low <= 5.0 <= high


def test_two_runs_and_other_settings_are_not_checked(make_history):
    runs = make_history(10.0, 10.1, 10.2)
    runs[0].result["data_set_sha256"] = "another"
    (group,) = history(runs, "runs").groups
    assert group.checks == ()
    assert group.why == "needs 2 earlier runs of equal settings, has 1"


def test_a_chosen_baseline_alone_has_the_spread_of_earlier_runs(make_history):
    runs = make_history(10.0, 10.2, 9.9, 10.1, 10.5)
    rates = [run.result["output_tokens_per_second"] for run in runs]
    (group,) = history(runs, "runs", [runs[0]]).groups
    (check,) = group.checks
    deviation = statistics.stdev([math.log(rate) for rate in rates[:4]])
    margin = 3.182446 * deviation * math.sqrt(2)  # t(0.975; 3), from a table
    assert check.earlier == (rates[0],)
    assert math.log(check.low) == pytest.approx(math.log(rates[0]) - margin, abs=1e-6)
    assert check.outcome == ("regression" if math.log(rates[4] / rates[0]) < -margin else "within the spread")
    assert "within the spread" in next(check_lines(history(runs, "runs", [runs[0]])))


def test_a_baseline_of_repeats_has_its_own_spread_and_code_may_differ(make_history, tmp_path):
    baseline = [run_folder(tmp_path / "base", f"{n:03}", "host", NOVEMBER.format(n), seconds=10.0 + n / 100)
                for n in (1, 2, 3)]  # fmt: skip
    runs = make_history(9.0, 8.9, 12.0)
    runs[-1].environment["source"] = {"revision": "later"}
    found = history(runs, "runs", baseline)
    assert [check.outcome for check in found.groups[0].checks] == ["regression"]
    assert found.baseline == "001, 002, 003"
    assert len(found.groups[0].checks[0].earlier) == 3


def test_a_baseline_of_other_settings_is_refused_and_one_run_shows_no_spread(make_history):
    old, new = make_history(10.0, 11.0)
    (group,) = history([old, new], "runs", [old]).groups
    assert group.checks == () and group.why.startswith("0.909 of the baseline's rate; a second earlier run")
    assert history([old], "runs", [old]).groups[0].why == "all runs are the baseline"
    old.config["samples"] = 5
    with pytest.raises(UsageError, match="the nearest differs in samples; choose another --baseline"):
        history([new], "runs", [old])


def test_another_machine_is_another_group(make_history):
    runs = make_history(10.0, 10.1, 10.2)
    runs[1].environment["hostname"] = "other"
    assert [len(group.entries) for group in history(runs, "runs").groups] == [2, 1]


def test_later_requests_that_wait_longer_are_a_regression(make_history):
    runs = make_history(10.0, 10.0, 10.0, scenario="server")
    for run, p99 in zip(runs, (0.5, 0.52, 0.9), strict=True):
        run.result["ttft_seconds"] = {"p99": p99}
    assert ("ttft_p99_seconds", "regression") in checks(runs)


def test_the_page_has_every_run_with_link_figures_and_csv(make_history, tmp_path):
    runs = make_history(10.0, 10.2, 9.9, 10.1, 14.0, model="a<b>&")
    place = write_report(tmp_path / "runs")
    assert place == tmp_path / "runs" / "index.html"
    root = parsed(place.read_text())
    assert "1 regression in the 1 of 1 group that can be checked" in words(root)
    rows = table_rows(root, "Runs")
    written = runs[-1].result["created_at"].replace("T", " ")[: -len(":00Z")]
    assert list(rows)[1:] == [run.path.name for run in reversed(runs)]
    assert rows["05-run"][0] == "MEASURED"
    assert rows["05-run"][-5:] == ["a<b>&", "bf16", "offline", "host", written]
    assert "Power W" not in rows["Run"]  # no run has it
    (group,) = list(table_rows(root, "Groups").values())[1:]
    assert "4 earlier runs put the next one between" in group[-1]
    links = {link.text: link for link in root.iter("a")}
    assert (place.parent / unquote(links["05-run"].get("href"))).is_file()
    header, _, content = links["Download runs.csv"].get("href").partition(",")
    assert header == "data:text/csv;charset=utf-8"
    stated = {
        row["run"]: float(row["output_tokens_per_second"]) for row in csv.DictReader(io.StringIO(unquote(content)))
    }
    assert stated == {str(run.path): run.result["output_tokens_per_second"] for run in runs}


def test_links_lead_to_the_runs_from_another_folder(make_history, tmp_path):
    (run, _) = make_history(10.0, 10.1)
    write_report(run.path)
    place = write_report(tmp_path / "runs", tmp_path / "page.html")
    links = {link.text: link.get("href") for link in parsed(place.read_text()).iter("a")}
    assert links["01-run"] == "runs/01-run/report.html"
