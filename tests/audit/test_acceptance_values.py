"""Each row of the published comparison between the 1,100,948 tokens/s record and its logs: one test a row.

The comments give what the record's publishers printed. Verified rows that put it in context are in
tests/results/test_comparison.py and tests/planning/test_published_values.py.
"""

import statistics

import pytest

from claims_support import EXAMPLES
from megatoken.audit import Severity, audit
from megatoken.claims.judge import judge
from megatoken.claims.schema import load_claims
from megatoken.mlperf.benchmarks import benchmarks

SLOW = (4, 8, 13, 14, 16)
ISSUED = {42: 1_032_192, 43: 1_056_768}  # passes over 24,576 rows: samples


@pytest.fixture(scope="module")
def result(shared):
    return audit(shared / "data" / "azure_gb300_1m")


@pytest.fixture(scope="module")
def document(result):
    return result.to_document()


@pytest.fixture(scope="module")
def findings(result):
    return {(item.id, item.severity): item for item in result.findings}


@pytest.fixture(scope="module")
def rates(result):
    """Tokens/s by number of the node."""
    return {number: run.figures.output_tokens_per_second for number, run in enumerate(result.evidence.runs, 1)}


@pytest.fixture(scope="module")
def answers(result):
    return {
        (file.stem, answer.claim.id): answer
        for file in sorted(EXAMPLES.glob("*.yaml"))
        for answer in judge(load_claims(file), result.evidence)
    }


def test_sum_max_min_mean(document, answers):
    together = document["aggregate"]
    assert round(together["sum_of_rates_tokens_per_second"], 1) == 1_100_948.3  # as printed
    assert (together["max"]["node"], together["max"]["output_tokens_per_second"]) == ("ND_GB300_v6_18", 62_803.9)
    assert (together["min"]["node"], together["min"]["output_tokens_per_second"]) == ("ND_GB300_v6_16", 57_599.1)
    assert round(together["mean_tokens_per_second"], 1) == 61_163.8
    for name in ("total", "maximum", "minimum", "mean"):
        assert answers["vendor-blog", name].answer == "holds"


def test_median(document, answers):
    assert round(document["aggregate"]["median_tokens_per_second"], 1) == 62_111.7
    answer = answers["vendor-blog", "median"]  # printed: 61,759.1
    assert (answer.answer, round(answer.recomputed.value, 1)) == ("does not hold", 62_111.7)


def test_spread(document, answers):
    shares = {item["formula"]: round(100 * item["value"], 2) for item in document["aggregate"]["spread"]}
    assert shares["(max - min) / min"] == 9.04
    assert shares["(max - min) / max"] == 8.29
    assert shares["(max - min) / mean"] == 8.51
    assert 8.9 not in {round(share, 1) for share in shares.values()}  # printed: 8.9 %
    assert round(100 * document["aggregate"]["coefficient_of_variation"], 2) == 3.05
    assert answers["analyst-gb300", "spread"].answer == "does not hold"


def test_slow_group(document, rates):
    slow = [row["node"].rpartition("_")[2] for row in document["nodes"] if row["group"] == "slow"]
    assert slow == [str(number) for number in SLOW]
    inside, outside = (
        [rate for number, rate in rates.items() if (number in SLOW) is wanted] for wanted in (True, False)
    )
    assert (round(min(inside) / 1e3, 1), round(max(inside) / 1e3, 1)) == (57.6, 59.4)
    assert (round(min(outside) / 1e3, 1), round(max(outside) / 1e3, 1), len(outside)) == (61.3, 62.8, 13)
    assert document["aggregate"]["stragglers"]["separate"]


def test_samples_per_query(result, answers):
    requested = [run.figures.samples_requested for run in result.evidence.runs]
    assert requested == [1_029_600] * 5 + [1_042_800] * 13
    issued = [run.figures.samples_issued for run in result.evidence.runs]
    assert issued == [ISSUED[42]] * 5 + [ISSUED[43]] * 13
    assert all(samples == passes * 24_576 for passes, samples in ISSUED.items())
    assert answers["analyst-gb300", "samples"].answer == "does not hold"  # printed: 1,056,000


def test_target_qps(result, findings):
    rates_asked = [run.figures.target_qps for run in result.evidence.runs]
    assert rates_asked == [390] * 5 + [395] * 13
    assert findings["summary.fields", Severity.FAIL].found == "target_qps: 400 (18 times)"
    for run in result.evidence.runs:
        assert run.figures.samples_requested == round(1.1 * run.figures.target_qps * 2400)
    assert findings["settings.samples", Severity.PASS].count == 18


def test_duration(result, answers):
    minutes = [run.figures.duration_seconds / 60 for run in result.evidence.runs]
    assert (round(min(minutes), 1), round(max(minutes), 1)) == (74.8, 83.4)  # printed: about 80
    assert (round(60 * min(minutes)), round(60 * max(minutes))) == (4_490, 5_004)
    assert "longest: 83.4 minutes; shortest: 74.84 minutes" in answers["analyst-gb300", "duration"].why


def test_median_latency(result, answers):
    medians = [run.figures.latency_seconds["p50"] for run in result.evidence.runs]
    assert round(statistics.fmean(medians), 1) == 2_301.8
    assert round(statistics.median(medians), 1) == 2_288.4
    shares = [run.figures.latency_seconds["p50"] / run.figures.duration_seconds for run in result.evidence.runs]
    assert (round(100 * min(shares)), round(100 * max(shares))) == (47, 50)
    answer = answers["analyst-gb300", "median-latency"]  # printed: 2,328 s, the time of the whole query
    assert answer.answer == "does not hold"
    assert "their mean or median is not a percentile of all samples" in answer.why


def test_all_18_at_once(result, findings, answers):
    assert all(run.figures.began_at is None for run in result.evidence.runs)
    assert "no wall-clock start of 18 of 18 nodes" in findings["nodes.simultaneous", Severity.UNKNOWN].found
    ids = {number: run.figures.process_id for number, run in enumerate(result.evidence.runs, 1)}
    assert [ids[number] for number in (1, 2, 3, 4, 5)] == [30_040, 32_474, 34_908, 42_965, 45_939]
    assert [ids[number] for number in (9, 10, 11, 12, 17, 18)] == [11_012, 13_446, 15_880, 18_314, 17_797, 20_231]
    answer = answers["analyst-gb300", "parallel"]
    assert answer.answer == "cannot be determined" and answer.evidence_that_would_settle


def test_rate_if_all_had_started_together(document, answers):
    makespan = document["aggregate"]["makespan"]
    assert makespan["output_tokens"] == pytest.approx(5.154e9, rel=1e-4)
    assert round(makespan["seconds"], 1) == 5_003.8
    assert int(makespan["output_tokens_per_second"]) == 1_030_087
    share = makespan["output_tokens_per_second"] / document["aggregate"]["sum_of_rates_tokens_per_second"]
    assert round(100 * share, 1) == 93.6
    assert makespan["conditional"] is True
    assert answers["analyst-gb300", "rack-at-once"].answer == "does not hold"


def test_accuracy(result, findings, answers):
    assert {run.figures.mode for run in result.evidence.runs} == {"PerformanceOnly"}
    assert {run.accuracy_records for run in result.evidence.runs} == {0}
    assert "18 empty accuracy logs" in findings["accuracy.evidence", Severity.UNKNOWN].found
    answer = answers["vendor-blog", "accurate"]
    assert answer.answer == "cannot be determined" and "accuracy.txt" in answer.evidence_that_would_settle[0]


def test_parallelism(result, findings, answers):
    [configuration] = result.evidence.configurations
    assert configuration.values["precision"] == "fp4"
    assert configuration.values["kv_cache_dtype"] == "fp8"
    assert configuration.values["gpu_batch_size"] == 2_048
    found = findings["configuration.parallelism", Severity.NOTE].found
    assert "tensor parallelism 1, pipeline parallelism 1: one GPU per copy of the model" in found
    answer = answers["forum-analysis", "copies"]  # printed: one pooled system
    assert (answer.answer, answer.recomputed.value) == ("does not hold", 72)


def test_system_facts(result, findings, answers):
    values = result.evidence.systems[0].values
    assert values["host_storage_capacity"] == "for each 4-GPU node: 2 TB SSD, 5 TB CIFS"  # printed: 14 TB NVMe RAID
    assert answers["vendor-blog", "storage"].recomputed.value == 2
    assert values["accelerator_memory_capacity"] == "288 GB"  # printed: 189,471 MiB, which is a GB200's
    assert answers["vendor-blog", "memory"].recomputed.value == 284_208
    assert values["framework"] == "TensorRT 1.2.0rc1, CUDA 13.0"  # printed: TensorRT-LLM 0.18.0.dev
    assert answers["analyst-gb300", "software"].answer == "does not hold"
    assert "Driver 580.82" in values["other_software_stack"]
    assert "driver 580.82" in findings["system.software", Severity.PASS].found
    assert answers["analyst-gb300", "submitted"].recomputed.value == "Unofficial Submission"


def test_tokens_per_sample(result, findings):
    per_sample = {round(run.figures.tokens_per_sample, 2) for run in result.evidence.runs}
    assert per_sample == {272.73}
    low, high = benchmarks()["llama2-70b-99"].tokens_per_sample
    reference = (low + high) / 2
    assert round(reference, 2) == 294.45
    assert round(100 * 272.73 / reference, 1) == 92.6
    assert findings["rules.tokens_per_sample", Severity.PASS].count == 18
