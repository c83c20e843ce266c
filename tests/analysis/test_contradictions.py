"""Rates that were written over by hand: what every command that passes them on says, and what it lets pass."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megatoken.analysis.contradictions import check_arithmetic, check_rates
from megatoken.analysis.lookup import read_consistent_run
from megatoken.analysis.summary import summarise_run
from megatoken.errors import UsageError
from megatoken.runs.reasons import reason
from megatoken.runs.run import Run
from megatoken.runs.tables import SampleRow, SeriesRow
from megatoken.runs.writer import RunFolder
from run_folders import run_folder

SUMMARY = "SUT name : PyFastSUT\nScenario : Offline\nSamples per second: 1\nTokens per second: {}\nResult is : VALID\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """110 tokens in 10 s, of which LoadGen says the same."""
    run = run_folder(tmp_path, "run", "here", "2026-11-21T09:12:33Z", loadgen_output_tokens_per_second=10.998)
    (run.path / "mlperf" / "mlperf_log_summary.txt").write_text(SUMMARY.format("10.998"))
    return run.path


def say(path: Path, **values: object) -> Path:
    result = json.loads((path / "result.json").read_text())
    (path / "result.json").write_text(json.dumps({**result, **values}))
    return path


def test_what_a_run_wrote_is_let_pass(path: Path) -> None:
    assert read_consistent_run(path).result["output_tokens_per_second"] == 11.0


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"output_tokens_per_second": 22.0},
            "output_tokens_per_second is 22, but output_tokens / rated_seconds gives 11;",
        ),
        ({"output_tokens_per_second": 11.1}, "output_tokens_per_second is 11.1, but"),
        ({"output_tokens": 220}, "output_tokens_per_second is 11, but output_tokens / rated_seconds gives 22;"),
        ({"processed_tokens_per_second": 99.0}, "processed_tokens_per_second is 99, but"),
        ({"whole_run_output_tokens_per_second": 99.0}, "output_tokens / duration_seconds gives 11;"),
        ({"rated_seconds": 0.0}, "output_tokens_per_second is 11, but"),
    ],
)
def test_a_rate_that_is_not_its_tokens_over_its_seconds(path: Path, values: dict[str, float], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_consistent_run(say(path, **values))
    assert words in str(caught.value)
    assert f"megatoken audit {path} lists" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_rate_of_a_node(path: Path) -> None:
    (node,) = read_consistent_run(path).result["nodes"]
    say(path, nodes=[{**node, "output_tokens_per_second": 12.0}])
    with pytest.raises(UsageError, match="of node here is 12, but its output_tokens / duration_seconds gives 11;"):
        read_consistent_run(path)


def test_figures_that_agree_with_each_other_and_not_with_loadgen(path: Path) -> None:
    thrice = {"output_tokens_per_second": 33.0, "processed_tokens_per_second": 48.0, "rated_seconds": 10 / 3}
    with pytest.raises(UsageError, match=r"is 33, but mlperf/mlperf_log_summary.txt gives 11"):
        read_consistent_run(say(path, **thrice))
    say(path, wall_clock_step_seconds=-60.0)  # LoadGen times by a clock that was set meanwhile
    assert read_consistent_run(path).result["output_tokens_per_second"] == 33.0


def test_loadgens_rate_as_result_json_repeats_it(path: Path) -> None:
    with pytest.raises(UsageError, match=r"loadgen_output_tokens_per_second is 12, but mlperf/mlperf_log_summary.txt"):
        read_consistent_run(say(path, loadgen_output_tokens_per_second=12.0))


def test_the_summary_of_server_has_two_decimals(path: Path) -> None:
    (path / "mlperf" / "mlperf_log_summary.txt").write_text("Completed tokens per second                 : 11.00\n")
    read_consistent_run(say(path, loadgen_output_tokens_per_second=10.9951))
    with pytest.raises(UsageError, match=r"is 10.99, but mlperf/mlperf_log_summary.txt gives 11"):
        read_consistent_run(say(path, loadgen_output_tokens_per_second=10.99))


def test_answers_of_one_token_are_none_to_loadgen(path: Path) -> None:
    (path / "mlperf" / "mlperf_log_summary.txt").write_text(SUMMARY.format("2.0"))
    say(path, loadgen_output_tokens_per_second=2.0, samples_without_tpot=90)
    assert read_consistent_run(path).result["output_tokens_per_second"] == 11.0
    with pytest.raises(UsageError, match=r"is 11, but mlperf/mlperf_log_summary.txt gives 2"):
        read_consistent_run(say(path, samples_without_tpot=20))


@pytest.mark.parametrize("text", ["", "Tokens per second: \n", "Tokens per second: e.e\n", "Tokens per second: 0\n"])
def test_a_summary_that_says_nothing_is_no_contradiction(path: Path, text: str) -> None:
    (path / "mlperf" / "mlperf_log_summary.txt").write_text(text)
    assert read_consistent_run(path).result["output_tokens_per_second"] == 11.0


def soak(out: Path) -> Run:
    """100 s under load at 10 tokens/s by the series, and an answer of 200 tokens that ends after it."""
    facts = {"soak": {"duration_seconds": 100.0, "segments": [{"begins_seconds": 0.0, "started_at": "now"}]}}
    facts["soak"]["interruptions"] = []
    folder = RunFolder.create(
        out, "soak", {}, {"hostname": "here"}, scenario="soak", summarise=summarise_run, facts=facts
    )
    levels = dict.fromkeys(SeriesRow._fields[3:12], 0)
    for second in range(1, 111):
        folder.add_series(SeriesRow(float(second), "here", 0, **{**levels, "output_tokens": 10 * second}))
    folder.add_samples([SampleRow(0, 0, 0.0, 0.0, 1.0, 90.0, 5, 900, "length", "here")])
    folder.add_samples([SampleRow(1, 1, 0.0, 0.0, 90.0, 110.0, 5, 200, "length", "here")])
    folder.finish({"verdict": "MEASURED", "reasons": []})
    return read_consistent_run(folder.path)


def test_a_soak_is_held_against_its_series(tmp_path: Path) -> None:
    run = soak(tmp_path)
    assert run.result["output_tokens_per_second"] == pytest.approx(10.0)
    say(run.path, output_tokens_per_second=12.0)
    with pytest.raises(UsageError, match=r"is 12, but series.parquet until rated_seconds gives 10;"):
        read_consistent_run(run.path)


@pytest.mark.parametrize("check", [check_arithmetic, check_rates])
def test_a_run_without_a_rate_is_none_of_their_business(tmp_path: Path, check: Callable[[Run], None]) -> None:
    folder = RunFolder.create(
        tmp_path, "empty", {}, {"hostname": "here"}, scenario="offline", summarise=summarise_run, facts={}
    )
    folder.interrupt(reason("INTERRUPTED", cause="test over"))
    check(read_consistent_run(folder.path))
