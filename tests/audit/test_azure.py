"""The published logs of the 1,100,948 tokens/s record: every recomputed value of the audit that found them."""

import csv

import pytest

from megatoken.audit import Severity, audit
from megatoken.audit.checks.nodes import process_steps


@pytest.fixture(scope="module")
def result(shared):
    return audit(shared / "data" / "azure_gb300_1m")


@pytest.fixture(scope="module")
def findings(result):
    return {(item.id, item.severity): item for item in result.findings}


@pytest.fixture(scope="module")
def document(result):
    return result.to_document()


def test_aggregate(document):
    together = document["aggregate"]
    assert round(together["sum_of_rates_tokens_per_second"], 1) == 1_100_948.3
    assert together["max"]["output_tokens_per_second"] == 62_803.9
    assert together["min"]["output_tokens_per_second"] == 57_599.1
    assert round(together["mean_tokens_per_second"], 1) == 61_163.8
    assert round(together["median_tokens_per_second"], 1) == 62_111.7
    spread = {item["formula"].rpartition(" ")[2]: round(100 * item["value"], 2) for item in together["spread"]}
    assert spread == {"min": 9.04, "max": 8.29, "mean": 8.51, "median": 8.38}
    assert 8.9 not in [round(value, 1) for value in spread.values()]
    assert round(100 * together["coefficient_of_variation"], 2) == 3.05
    assert int(together["makespan"]["output_tokens_per_second"]) == 1_030_087
    assert together["makespan"]["conditional"]
    assert together["output_tokens"] == pytest.approx(5.154e9, rel=1e-3)
    assert together["sum_label"] == "sum of 18 node rates, not shown to be simultaneous"


def test_slow_group(document, findings):
    slow = [row["node"] for row in document["nodes"] if row["group"] == "slow"]
    assert slow == [f"ND_GB300_v6_{number}" for number in (4, 8, 13, 14, 16)]
    assert "set apart" in findings["nodes.slow_group", Severity.NOTE].found


def test_every_figure_of_every_node(shared, result):
    text = (shared / "data" / "azure_gb300_1m" / "node_table.csv").read_text()
    rows = list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))
    runs = result.evidence.runs
    assert len(rows) == len(runs) == 18
    for row, run in zip(rows, runs, strict=True):
        figures = run.figures
        assert run.node == f"ND_GB300_v6_{row['node']}"
        assert figures.output_tokens_per_second == float(row["detail_tokens_per_s"])
        assert figures.samples_per_second == float(row["detail_samples_per_s"])
        assert round(figures.tokens_per_sample, 2) == 272.73
        assert figures.tokens_per_sample == pytest.approx(float(row["tokens_per_sample"]), rel=1e-5)
        assert figures.duration_seconds == pytest.approx(float(row["duration_s"]), abs=1e-9)
        assert figures.samples_issued == int(row["generated_samples"])
        assert figures.samples_requested == int(row["detail_samples_per_query"])
        assert figures.target_qps == float(row["detail_target_qps"])
        assert figures.validity == row["validity"]
        assert figures.process_id == int(row["process_id"])
        assert figures.errors == int(row["num_errors"])
        assert figures.round == "v5.1"
        for name, column in (
            ("min", "min"),
            ("mean", "mean"),
            ("p50", "p50"),
            ("p90", "p90"),
            ("p99", "p99"),
            ("p99.9", "p999"),
        ):
            assert figures.latency_seconds[name] == pytest.approx(
                float(row[f"{column}_latency_s" if column in ("min", "mean") else f"{column}_s"]), abs=1e-9
            )


def test_samples_are_whole_passes(result, findings):
    assert sorted({run.figures.samples_issued for run in result.evidence.runs}) == [1_032_192, 1_056_768]
    assert "43 passes (13 times)" in findings["rules.whole_passes", Severity.PASS].found
    assert "42 passes (5 times)" in findings["rules.whole_passes", Severity.PASS].found
    assert findings["settings.samples", Severity.PASS].count == 18
    assert findings["rules.tokens_per_sample", Severity.PASS].count == 18


def test_median_latency_is_no_definition_of_2328_seconds(result):
    p50 = sorted(run.figures.latency_seconds["p50"] for run in result.evidence.runs)
    assert round(sum(p50) / 18, 1) == 2301.8
    assert round((p50[8] + p50[9]) / 2, 1) == 2288.4
    shares = [run.figures.latency_seconds["p50"] / run.figures.duration_seconds for run in result.evidence.runs]
    assert (round(100 * min(shares)), round(100 * max(shares))) == (47, 50)


def test_summaries_say_another_target(findings):
    found = findings["summary.fields", Severity.FAIL]
    assert found.found == "target_qps: 400 (18 times)"
    assert "target_qps: 390" in found.expected
    assert "target_qps: 395" in found.expected
    assert found.count == 18
    assert {place.line for place in found.where} == {32}
    assert findings["configuration.rate", Severity.WARN].found == "runs with 390, 395 samples/s"
    assert "target rate 390 samples/s" in findings["nodes.settings", Severity.NOTE].found


def test_seven_kinds_of_line_are_missing(findings):
    found = findings["log.lines", Severity.FAIL]
    assert found.count == 18
    kinds = found.found.partition(": ")[2].removesuffix(" (18 times)").split(", ")
    assert kinds == [
        "loadgen_build_date_local",
        "loadgen_build_date_utc",
        "loadgen_git_commit_date",
        "loadgen_git_log_message",
        "test_datetime",
        "power_begin",
        "power_end",
    ]


def test_passes(findings):
    for name in (
        "rules.seeds",
        "settings.library_order",
        "build.sources",
        "rules.valid",
        "rules.no_errors",
        "result.rate",
    ):
        assert findings[name, Severity.PASS].count == 18, name
    assert "47b91b979c" in findings["build.sources", Severity.PASS].expected


def test_what_cannot_be_known(result, findings):
    accuracy = findings["accuracy.evidence", Severity.UNKNOWN]
    assert "18 empty accuracy logs" in accuracy.found
    assert all(run.accuracy_records == 0 for run in result.evidence.runs)
    simultaneous = findings["nodes.simultaneous", Severity.UNKNOWN]
    assert "no wall-clock start of 18 of 18 nodes" in simultaneous.found
    steps = process_steps(result.evidence.performance_runs)
    assert steps[0].startswith("process ids rise by 2,434 (within 1) from ND_GB300_v6_1 to ND_GB300_v6_2, ")
    assert steps[1].startswith("process ids rise by 2,974 (within 1) from ND_GB300_v6_4 to ND_GB300_v6_5, ")


def test_system_and_configuration(result, findings):
    system = result.evidence.system_of(result.evidence.runs[0])
    assert (system.name, system.nodes, system.accelerators_per_node) == ("ND_GB300_v6", 18, 4)
    assert "one GPU per copy" in findings["configuration.parallelism", Severity.NOTE].found
    assert findings["system.host_memory", Severity.WARN].where[0].line == 18
    assert findings["system.part_memory", Severity.PASS].expected == "GB300: 288 GB"
    assert findings["system.part_power", Severity.PASS].found == "1400 W"
    assert "' 18xND_GB300_v6'" in findings["system.name", Severity.NOTE].found
    assert ("nodes.one_log", Severity.WARN) in findings


def test_rules_of_the_round_are_met_where_claimed(shared):
    result = audit(shared / "data" / "azure_gb300_1m", round="5.1")
    failed = {item.id for item in result.findings if item.severity is Severity.FAIL}
    assert failed == {"log.lines", "summary.fields", "accuracy.evidence"}
    layout = next(item for item in result.findings if item.id == "submission.layout")
    assert layout.severity is Severity.WARN
    assert layout.found == "llama2-70b-99: no Server or Interactive, no TEST06, no user.conf"
    assert result.exit_code == 3
    other = audit(shared / "data" / "azure_gb300_1m", round="v6.0")
    assert "rules.seeds" in {item.id for item in other.findings if item.severity is Severity.FAIL}


def test_document_is_plain_json(document):
    import json

    again = json.loads(json.dumps(document, allow_nan=False))
    assert again == document
    assert document["kind"] == "audit"
    assert document["schema_version"] == 1
    assert sum(document["counts"].values()) == len(document["findings"])
