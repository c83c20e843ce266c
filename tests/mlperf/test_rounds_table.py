"""The rules that are applied, against ``data/mlperf_rounds.csv``, which says where each number was read."""

from collections.abc import Mapping

import pytest

from megatoken.mlperf.benchmarks import LatencyLimits, benchmarks
from megatoken.mlperf.rounds import Seeds, load_csv, round_seeds

ROWS = [row for row in load_csv("mlperf_rounds.csv") if row["benchmark"] in benchmarks()]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['round']}-{row['benchmark']}")
def test_rules_are_those_of_the_table(row: Mapping[str, str]) -> None:
    benchmark = benchmarks()[row["benchmark"]]
    assert (row["in_round"] == "yes") == (row["round"] in benchmark.rounds)
    if row["in_round"] != "yes":
        return
    then = benchmark.in_round(row["round"])
    assert then.rows == int(row["performance_sample_count"]) == int(row["offline_min_samples"])
    assert then.accuracy_rows == int(row["accuracy_sample_count"] or row["performance_sample_count"])
    assert then.compliance == tuple(row["compliance_tests"].split("; "))
    for scenario in ("Server", "Interactive"):
        milliseconds = [row[f"{scenario.lower()}_{name}_ms"] for name in ("ttft", "tpot")]
        limits = then.limits_of(scenario)
        if all(milliseconds):
            assert limits == LatencyLimits(*(float(one) / 1000 for one in milliseconds))
        else:
            assert limits is None or row["round"] == "v5.0", "models of their own in v5.0"
    targets = {name.lower(): float(value) for name, value in map(str.split, row["accuracy_targets"].split("; "))}
    least_characters = targets.pop("gen_len", None)
    renamed = {"gsm8k_accuracy": "gsm8k", "mbxp_accuracy": "mbxp"}
    assert {renamed.get(name, name): value for name, value in targets.items()} == then.accuracy
    most = dict(map(str.split, filter(None, row["accuracy_upper_limits"].split("; "))))
    if least_characters is not None:
        assert then.gen_len == (least_characters, float(most["GEN_LEN"]))
    if "TOKENS_PER_SAMPLE" in most:
        assert then.tokens_per_sample == (0, float(most["TOKENS_PER_SAMPLE"]))
    elif row["tokens_per_sample_min"]:
        assert then.tokens_per_sample == (float(row["tokens_per_sample_min"]), float(row["tokens_per_sample_max"]))


@pytest.mark.parametrize("name", ["v5.0", "v5.1", "v6.0", "v6.1"])
def test_seeds_are_those_of_the_table(name: str) -> None:
    drawn = {
        Seeds(*(int(row[f"{kind}_rng_seed"]) for kind in ("qsl", "sample_index", "schedule")))
        for row in ROWS
        if row["round"] == name and row["in_round"] == "yes"
    }
    assert drawn == {round_seeds()[name]}
