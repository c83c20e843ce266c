"""Results of MLPerf Endpoints: summaries computed here from raw samples, whole and then spoiled in one way each."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import yaml

from megatoken.audit import Severity, audit
from megatoken.errors import UsageError
from megatoken.mlperf.rounds import round_seeds, rules

_, SAMPLE_SEED, SCHEDULE_SEED = round_seeds()["v6.1"]
PERCENTS = (99.9, 99.0, 97.0, 95.0, 90.0, 80.0, 75.0, 50.0, 25.0, 10.0, 5.0, 1.0)
SAMPLES = 20_000


def distribution(values: np.ndarray, early_stopping: bool) -> dict:
    """As the harness of MLPerf Endpoints sums up one measure."""
    counts, edges = np.histogram(values, bins=30)
    part = {
        "total": values.sum().item(),
        "min": values.min().item(),
        "max": values.max().item(),
        "median": float(np.median(values)),
        "avg": values.mean().item(),
        "std_dev": values.std().item(),
        "percentiles": {str(percent): float(np.percentile(values, percent)) for percent in PERCENTS},
        "histogram": {"buckets": list(map(list, pairwise(edges.tolist()))), "counts": counts.tolist()},
    }
    if early_stopping:
        part["early_stopping_percentiles"] = {
            name: value * 1.002 for name, value in part["percentiles"].items() if float(name) >= 50
        }
    return part


def summary(scenario: str) -> dict:
    draw = np.random.default_rng(7)
    lengths = np.minimum(draw.lognormal(7.9, 0.9, SAMPLES).astype(int) + 100, 20_000)
    ttft = draw.uniform(1e8, 9e8, SAMPLES)
    tpot = draw.uniform(2e7, 6e7, SAMPLES)
    latency = ttft + tpot * (lengths - 1)
    seconds, window = 900.0, None if scenario == "Offline" else 870.5
    tokens = lengths.sum().item()
    pattern = {"type": "max_throughput" if scenario == "Offline" else "poisson", "target_qps": None}
    if scenario != "Offline":
        pattern["target_qps"] = 22.5
    return {
        "version": "0.1.0",
        "n_samples_issued": SAMPLES,
        "n_samples_completed": SAMPLES,
        "n_samples_failed": 0,
        "duration_ns": int(seconds * 1e9),
        "state": "complete",
        "complete": True,
        "ttft": {} if scenario == "Offline" else distribution(ttft, True),
        "tpot": {} if scenario == "Offline" else distribution(tpot, True),
        "latency": distribution(latency, True),
        "output_sequence_lengths": distribution(lengths, False),
        "legacy_loadgen_window_duration_ns": window and int(window * 1e9),
        "qps": (SAMPLES - 1) / window if window else SAMPLES / seconds,
        "tps": tokens / (window or seconds),
        "run_config": {
            "load_pattern": pattern,
            "scheduler_random_seed": SCHEDULE_SEED,
            "dataloader_random_seed": SAMPLE_SEED,
        },
    }


def configuration(made: dict) -> dict:
    runtime = {
        "min_duration_ms": 600_000,
        "n_samples_to_issue": SAMPLES,
        "scheduler_random_seed": SCHEDULE_SEED,
        "dataloader_random_seed": SAMPLE_SEED,
    }
    pattern = {key: value for key, value in made["run_config"]["load_pattern"].items() if value is not None}
    return {"name": "x", "settings": {"runtime": runtime, "load_pattern": pattern}}


def accuracy(made: dict) -> dict:
    lengths = made["output_sequence_lengths"]
    score = {
        "dataset_name": "deepseek_r1",
        "score": 81.4,
        "total_samples": 4388,
        "dataset_type": "accuracy",
        "response_counts": {"issued": 4388, "scored": 4388, "empty": 0, "missing": 0},
        "output_sequence_lengths": {"avg": lengths["avg"] * 1.01},
    }
    return {"average_accuracy": 81.4, "accuracy_scores": [score]}


SYSTEM = dict.fromkeys(rules()["system_keys"], "x") | {
    "division": "closed",
    "submitter": "Vendor",
    "status": "available",
    "system_type": "datacenter",
    "number_of_nodes": 18,
    "accelerators_per_node": 4,
    "accelerator_model_name": "NVIDIA GB300",
    "accelerator_memory_capacity": "288 GB",
}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def tree(tmp_path) -> Path:
    """A submission of v6.1 with three results and no log of LoadGen's."""
    vendor = tmp_path / "closed/Vendor"
    for scenario in ("Offline", "Server", "Interactive"):
        folder = vendor / "results/sys/deepseek-r1" / scenario
        made = summary(scenario)
        if scenario == "Interactive":
            for key, share in (("ttft", 0.5), ("tpot", 0.2)):
                made[key] = distribution(np.random.default_rng(8).uniform(1e7 * share, 6e7 * share, SAMPLES), True)
        write(folder / "performance/result_summary.json", json.dumps(made, indent=1))
        write(folder / "config.yaml", yaml.safe_dump(configuration(made)))
        write(folder / "accuracy/accuracy_results.json", json.dumps(accuracy(made)))
        write(folder / "measurements.json", json.dumps(dict.fromkeys(rules()["measurement_keys"], "x")))
    write(vendor / "systems/sys.json", json.dumps(SYSTEM, indent=1))
    write(vendor / "src/run.py", "\n")
    return tmp_path


def grave(root: Path, round_: str | None = None) -> set[str]:
    return {item.id for item in audit(root, round=round_).findings if item.severity in (Severity.FAIL, Severity.WARN)}


def test_a_whole_submission_raises_nothing(tree):
    result = audit(tree)
    assert grave(tree) == grave(tree, "v6.1") == set()
    assert (result.evidence.kind, result.evidence.round) == ("submission", "v6.1")
    assert "3 results of MLPerf Endpoints" in result.notes[0]
    offline, server = (
        next(run for run in result.evidence.runs if run.folder_scenario == name) for name in ("Offline", "Server")
    )
    assert offline.figures.scenario == "Offline" and server.figures.scenario == "Server"
    made = summary("Server")
    assert server.figures.output_tokens_per_second == made["tps"]
    assert server.figures.latency_seconds["p99"] == made["latency"]["percentiles"]["99.0"] / 1e9
    assert server.figures.duration_seconds == 900
    assert result.evidence.system_of(server).accelerators_per_node == 4
    passed = {item.id: item.count for item in result.findings if item.severity is Severity.PASS}
    assert passed["endpoint.figures"] == passed["endpoint.settings"] == passed["rules.seeds"] == 3
    assert passed["accuracy.scores"] == passed["accuracy.tokens_agree"] == passed["accuracy.records"] == 3
    assert passed["rules.latency_limits"] == 2 and passed["rules.offline_samples"] == 1


def test_one_result_alone_claims_nothing(tree):
    folder = tree / "closed/Vendor/results/sys/deepseek-r1/Server"
    assert grave(folder) == set()
    with pytest.raises(UsageError):  # only a scenario's folder says what it is
        audit(folder / "performance")


def at(*keys):
    def change(values, value):
        for key in keys[:-1]:
            values = values[key]
        values[keys[-1]] = value(values[keys[-1]]) if callable(value) else value

    return change


@pytest.mark.parametrize(
    ("keys", "value", "expected"),
    [
        (("qps",), lambda rate: rate * 1.01, "endpoint.figures"),
        (("tps",), lambda rate: rate * 1.001, "endpoint.figures"),
        (("legacy_loadgen_window_duration_ns",), lambda time: time - 10**9, "endpoint.figures"),
        (("n_samples_completed",), SAMPLES - 1, "endpoint.figures"),
        (("output_sequence_lengths", "total"), lambda total: total + 5000, "endpoint.figures"),
        (("output_sequence_lengths", "avg"), lambda mean: mean * 1.02, "endpoint.figures"),
        (("ttft", "percentiles", "99.0"), 2e8, "endpoint.figures"),
        (("tpot", "early_stopping_percentiles", "99.0"), 3e7, "endpoint.figures"),
        (("latency", "histogram", "counts"), lambda counts: [*counts[:-1], counts[-1] + 7], "endpoint.figures"),
        (("latency", "avg"), lambda mean: mean * 40, "endpoint.figures"),
        (("n_samples_failed",), 3, "endpoint.complete"),
        (("state",), "aborted", "endpoint.complete"),
        (("complete",), False, "endpoint.complete"),
        (("n_samples_issued",), SAMPLES + 5, "endpoint.settings"),
        (("run_config", "load_pattern", "target_qps"), 30, "endpoint.settings"),
        (("run_config", "scheduler_random_seed"), 42, "rules.seeds"),
        (("run_config", "load_pattern", "type"), "max_throughput", "rules.scenario"),
        (("duration_ns",), 300 * 10**9, "rules.ran_long_enough"),
        (("ttft", "early_stopping_percentiles", "99.0"), 2.1e9, "rules.latency_limits"),
        (("output_sequence_lengths", "avg"), 100.0, "rules.tokens_per_sample"),
    ],
)  # fmt: skip
def test_a_spoiled_summary(tree, keys, value, expected):
    path = tree / "closed/Vendor/results/sys/deepseek-r1/Server/performance/result_summary.json"
    made = json.loads(path.read_text())
    at(*keys)(made, value)
    path.write_text(json.dumps(made, indent=1))
    found = {item.id: item for item in audit(tree).findings if item.severity in (Severity.FAIL, Severity.WARN)}
    assert expected in found
    assert found[expected].where[0].file.endswith(("result_summary.json", "config.yaml"))


@pytest.mark.parametrize(
    ("keys", "value", "expected"),
    [
        (("accuracy_scores", 0, "score"), 80.0, "accuracy.scores"),
        (("accuracy_scores", 0, "total_samples"), 4000, "accuracy.records"),
        (("accuracy_scores", 0, "response_counts", "empty"), 9, "accuracy.records"),
        (("accuracy_scores", 0, "output_sequence_lengths", "avg"), 9000, "accuracy.tokens_agree"),
    ],
)
def test_spoiled_accuracy(tree, keys, value, expected):
    path = tree / "closed/Vendor/results/sys/deepseek-r1/Server/accuracy/accuracy_results.json"
    made = json.loads(path.read_text())
    at(*keys)(made, value)
    path.write_text(json.dumps(made))
    assert expected in grave(tree)


def test_missing_parts(tree):
    folder = tree / "closed/Vendor/results/sys/deepseek-r1/Server"
    (folder / "accuracy/accuracy_results.json").unlink()
    assert {"accuracy.evidence", "submission.performance"} <= grave(tree)
    (folder / "config.yaml").unlink()
    found = {item.id: item.severity for item in audit(tree).findings if item.severity is Severity.UNKNOWN}
    assert found["endpoint.settings"] is Severity.UNKNOWN


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "{", "null", '{"a": 1, "a": 2}', "\0", '{"tps": NaN}', "{" * 10_000, '{"qps": "fast", "tps": [1]}',
        '{"ttft": 5, "latency": {"percentiles": [], "histogram": {"counts": ["x"]}}, "duration_ns": 0, "qps": 1}',
        '{"n_samples_issued": 1e400, "run_config": {"load_pattern": {"type": ["poisson"]}}}',
    ],
)  # fmt: skip
def test_hostile_summaries_and_configurations(tree, content):
    folder = tree / "closed/Vendor/results/sys/deepseek-r1/Server"
    for path in ("performance/result_summary.json", "accuracy/accuracy_results.json", "config.yaml"):
        (folder / path).write_text(content)
    result = audit(tree)
    assert "log.examined" not in {item.id for item in result.findings}
    json.dumps(result.to_document(), allow_nan=False)
    assert grave(tree)


def test_nothing_but_a_damaged_summary(tmp_path):
    write(tmp_path / "performance/result_summary.json", "{")
    assert grave(tmp_path) == {"endpoint.readable"}
    (tmp_path / "performance/result_summary.json").unlink()
    with pytest.raises(UsageError, match="no LoadGen logs"):
        audit(tmp_path)


def test_a_published_result_follows_from_its_counts(tree):
    """Closed v6.1, 72 accelerators of the generation after GB300, DeepSeek-R1, Server: figures as published."""
    path = tree / "closed/Vendor/results/sys/deepseek-r1/Server/performance/result_summary.json"
    published = {
        "n_samples_issued": 600_000,
        "n_samples_completed": 600_000,
        "duration_ns": 2_318_929_756_903,
        "legacy_loadgen_window_duration_ns": 1_934_954_861_194,
        "qps": 310.0842360889801,
        "tps": 1_175_890.2208168241,
        "output_sequence_lengths": {"total": 2_275_294_499, "avg": 3_792.1574983333335},
        "latency": {"total": 88_152_496_582_129_070, "avg": 146_920_827_636.88177},
        "ttft": {},
        "tpot": {},
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | published))
    passed = {item.id: item.count for item in audit(tree).findings if item.severity is Severity.PASS}
    assert passed["endpoint.figures"] == 3
