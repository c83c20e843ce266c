"""Equal runs together: rates have a mean and an interval, percentiles do not."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatoken.results import RunFolder, SampleRow, read_run
from megatoken.results.repeats import describe_repeats, interval, summarise_repeats


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


def test_percentiles_of_runs_are_listed_not_averaged(tmp_path):
    runs = []
    for number, p99 in enumerate((0.5, 1.5, 4.0)):
        folder = RunFolder.create(tmp_path, str(number), {}, {}, scenario="server", facts={"model": "tiny"})
        folder.add_samples([SampleRow(0, 0, 0.0, 0.0, 0.5, 1.0 + number, 9, 5, "length", "host")])
        folder.finish({"verdict": "MEASURED", "reasons": [], "loadgen_ttft_p99_seconds": p99})
        runs.append(read_run(folder.path))
    document = summarise_repeats(runs, 3)
    assert document["metrics"]["output_tokens_per_second"]["values"] == [5.0, 2.5, 5 / 3]
    assert not [name for name in document["metrics"] if "_p9" in name]
    assert document["percentiles"] == {"loadgen_ttft_p99_seconds": {"values": [0.5, 1.5, 4.0]}}
    assert "loadgen_ttft_p99_seconds of each run: 0.5, 1.5, 4" in list(describe_repeats(document))
    lacking = [*runs[:2], replace(runs[2], result={**runs[2].result, "loadgen_ttft_p99_seconds": None})]
    assert summarise_repeats(lacking, 3)["percentiles"] == {}
