"""The figures that the other tests state are those of the published logs themselves, which ship with the tests."""

from dataclasses import replace

import pytest

from claims_support import azure_evidence
from megatoken.analysis.aggregation import aggregate
from megatoken.audit.evidence import node_rows
from megatoken.claims.facts import gather
from megatoken.mlperf.detail_log import read_detail_log
from megatoken.mlperf.run_figures import run_figures
from published import published_logs


@pytest.fixture(scope="module")
def published():
    logs = published_logs()
    evidence = azure_evidence()
    runs = [replace(run, figures=run_figures(read_detail_log(logs / run.detail))) for run in evidence.runs]
    return replace(evidence, root=str(logs), runs=tuple(runs))


def test_the_stated_figures_are_those_of_the_logs(published):
    stated, read = gather(azure_evidence()).values, gather(published).values
    for name in ("tokens_per_second", "samples_issued", "samples_requested", "target_qps", "min_duration_seconds"):
        assert read[name].value == stated[name].value
    for name in ("duration_seconds", "latency_p50_seconds", "latency_p99_seconds", "tokens_per_sample"):
        assert read[name].value == pytest.approx(stated[name].value, rel=1e-5)
    assert read["round"].value == "v5.1"
    assert "simultaneous" not in read


def test_the_aggregate_of_the_logs(published):
    result = aggregate(node_rows(published))
    assert round(result.sum_of_rates_tokens_per_second, 1) == 1_100_948.3
    assert int(result.makespan.output_tokens_per_second) == 1_030_087
    assert round(result.median_tokens_per_second, 1) == 62_111.7
    assert [name.rpartition("_")[2] for name in result.stragglers.nodes] == ["4", "8", "13", "14", "16"]
    assert 1_100_948 < result.common_window.output_tokens_per_second < 1_130_000
    assert not result.evidence_of_simultaneity.shown
