"""Equal runs together: rates have a mean and an interval, percentiles do not."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatoken.analysis.repeats import are_repeats, check_repeats, interval, summarise_repeats
from megatoken.errors import UsageError
from megatoken.runs.reasons import reason
from megatoken.runs.run import Verdict
from run_folders import run_folder

MINUTE = "2026-11-20T09:{:02}:00+00:00"


def test_no_end_of_an_interval_is_below_zero():
    found = interval([100.0, 900.0])
    assert found["geometric_mean"] == pytest.approx(300.0)
    spread = math.log(9.0) / math.sqrt(2)  # standard deviation of the two logarithms
    factor = math.exp(12.706204736174694 * spread / math.sqrt(2))  # t(0.975; 1), from tables
    assert (found["low"], found["high"]) == pytest.approx((300.0 / factor, 300.0 * factor), rel=1e-6)
    assert found["low"] > 0
    assert found["mean"] == 500.0
    assert interval([0.0, 2.0])["low"] is None
    assert interval([5.0]) == {
        "values": [5.0],
        "mean": 5.0,
        "geometric_mean": pytest.approx(5.0),
        "low": None,
        "high": None,
    }


@given(st.lists(st.floats(1e-6, 1e9), min_size=2, max_size=6))
def test_the_interval_holds_the_geometric_mean(values):
    found = interval(values)
    assert 0 < found["low"] <= found["geometric_mean"] * (1 + 1e-9)
    assert found["geometric_mean"] <= found["high"] * (1 + 1e-9)


@pytest.fixture
def runs(tmp_path):
    p99s = (0.5, 1.5, 4.0)
    return [
        run_folder(
            tmp_path / "x-repeats", f"00{number}", "host", MINUTE.format(number),
            seconds=10.0 + number, loadgen_ttft_p99_seconds=p99, notes=[reason("RANDOM_WEIGHTS")],
        )
        for number, p99 in enumerate(p99s, 1)
    ]  # fmt: skip


def test_percentiles_of_runs_are_listed_not_averaged(runs):
    document = summarise_repeats(runs, 3)
    rates = [110 / 11, 110 / 12, 110 / 13]
    assert document["metrics"]["output_tokens_per_second"]["values"] == pytest.approx(rates)
    assert not [name for name in document["metrics"] if "_p9" in name]
    assert document["percentiles"] == {"loadgen_ttft_p99_seconds": {"values": [0.5, 1.5, 4.0]}}
    lacking = [*runs[:2], replace(runs[2], result={**runs[2].result, "loadgen_ttft_p99_seconds": None})]
    assert summarise_repeats(lacking, 3)["percentiles"] == {}
    assert document["notes"] == [reason("RANDOM_WEIGHTS")["message"]]
    assert document["title"] == "Repeats of offline tiny bf16"


def test_percentiles_that_loadgen_does_not_state_are_ours(runs):
    mute = [replace(run, result={**run.result, "loadgen_ttft_p99_seconds": None}) for run in runs]
    found = summarise_repeats(mute, 3)["percentiles"]
    assert set(found) == {"ttft_p99_seconds", "tpot_p99_seconds", "latency_p99_seconds"}
    assert found["ttft_p99_seconds"]["values"] == [run.result["ttft_seconds"]["p99"] for run in runs]


def test_a_note_of_every_run_is_given_once_and_one_of_a_run_with_its_name(runs):
    """The share of CPU contention is another in each run: the highest stands for all."""
    random, cut = reason("RANDOM_WEIGHTS"), reason("NOTE", text="cut 3 of 4,096 rows")
    busy = [reason("CORE_WAIT", share=share) for share in (0.05, 0.89, 0.12)]
    notes = ([random, busy[0]], [random, busy[1]], [random, busy[2], cut])
    noted = [replace(run, result={**run.result, "notes": one}) for run, one in zip(runs, notes, strict=True)]
    highest = f"{busy[1]['message']} (the highest of 3 runs)"
    assert summarise_repeats(noted, 3)["notes"] == [random["message"], highest, "003: cut 3 of 4,096 rows"]
    two = [*noted[:2], replace(runs[2], result={**runs[2].result, "notes": [cut]})]
    assert summarise_repeats(two, 3)["notes"] == [
        f"001, 002: {random['message']}",
        f"001, 002: {busy[1]['message']} (the highest of 2 runs)",
        "003: cut 3 of 4,096 rows",
    ]


def test_a_run_that_was_cut_off_is_listed_and_not_in_the_mean(runs):
    runs[2] = replace(runs[2], verdict=Verdict.INTERRUPTED)
    document = summarise_repeats(runs, 4)
    assert (document["verdict"], document["runs"]) == ("INTERRUPTED", ["001", "002", "003"])
    assert document["runs_in_the_mean"] == ["001", "002"]
    assert len(document["metrics"]["output_tokens_per_second"]["values"]) == 2
    assert document["notes"][-1] == "not in the mean, because they did not finish: 003"


def test_runs_that_were_in_each_others_way_are_said_to_be(runs, tmp_path):
    disturbed = [*runs, run_folder(tmp_path / "x-repeats", "004", "host", "2026-11-20T09:03:02+00:00")]
    (note,) = [note for note in summarise_repeats(disturbed, 4)["notes"] if "at the same time" in note]
    assert note.startswith("x-repeats/003 and x-repeats/004 ran at the same time on host for 10 s")


@pytest.mark.parametrize("key", ["samples", "min_duration_seconds"])
def test_runs_of_other_lengths_are_not_repeats(runs, key):
    """A run of 13 s and 215 samples and one of 132 s and 1,100 share a model and a machine, not a test."""
    assert are_repeats(runs)
    longer = replace(runs[1], config={**runs[1].config, key: 120})
    assert not are_repeats([runs[0], longer])
    source = {"source": {"revision": "abc", "modified": False}}
    assert not are_repeats([runs[0], replace(runs[1], environment={**runs[1].environment, **source})])


def test_loads_of_a_sweep_are_no_repeats_of_each_other(runs):
    """Nothing else in their folders differs."""

    def loaded(run, value, neighbour=None):
        load = {"kind": "concurrency", "value": value, "neighbour": neighbour}
        return replace(run, result={**run.result, "load": load})

    one, other = loaded(runs[0], 1.0), loaded(runs[1], 1.0)
    assert are_repeats([one, other])
    assert not are_repeats([one, loaded(runs[1], 1.0, {"flags": "--rates 4"})])
    with pytest.raises(UsageError, match="003 is not a repeat of 001: load is concurrency 4, not concurrency 1"):
        check_repeats([one, other, loaded(runs[2], 4.0)], "sweep")
