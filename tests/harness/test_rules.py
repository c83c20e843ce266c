from typing import Any

import pytest

from megatoken.harness.loadgen_log import LoadGenLog
from megatoken.harness.rules import ROUNDS, Observed, UnmetRule, judge, unmet_rules
from megatoken.results import Verdict

V51 = ROUNDS["v5.1"]
GOOD = {
    "effective_min_duration_ms": 600_000,
    "effective_qsl_rng_seed": 1780908523862526354,
    "effective_sample_index_rng_seed": 14771362308971278857,
    "effective_schedule_rng_seed": 18209322760996052031,
    "effective_sample_concatenate_permutation": True,
    "effective_samples_per_query": 24_576,
    "generated_samples_per_query": 49_152,
    "qsl_reported_total_count": 24_576,
    "qsl_reported_performance_count": 24_576,
    "result_max_latency_ns": 601_000_000_000,
    "result_validity": "VALID",
}


def unmet(
    errors: tuple[str, ...] = (), mode: str = "performance", data_set_rows: int = 24_576, **changes: Any
) -> list[UnmetRule]:
    return unmet_rules(V51, LoadGenLog({**GOOD, **changes}, list(errors)), Observed("offline", mode, data_set_rows))


def test_a_log_that_meets_everything() -> None:
    assert unmet() == []


@pytest.mark.parametrize(
    ("changes", "code", "found", "required", "message"),
    [
        ({"result_max_latency_ns": 20_000_000_000}, "MIN_DURATION", 20.0, 600.0, "ran 20 s of 600 s"),
        (
            {"effective_min_duration_ms": 20_000},
            "MIN_DURATION",
            20.0,
            600.0,
            "LoadGen was asked to run for 20 s of 600 s",
        ),
        ({"effective_samples_per_query": 64}, "MIN_SAMPLES", 64, 24_576, "issued 64 of 24,576 samples"),
        ({"effective_qsl_rng_seed": 1}, "SEEDS", None, None, "not those of round v5.1"),
        ({"effective_sample_index_rng_seed": 1}, "SEEDS", None, None, "not those of round v5.1"),
        ({"effective_schedule_rng_seed": 1}, "SEEDS", None, None, "not those of round v5.1"),
        ({"effective_sample_concatenate_permutation": False}, "EQUAL_ISSUE", 49_152, 49_152, "not every row"),
        ({"generated_samples_per_query": 49_151}, "EQUAL_ISSUE", 49_151, 49_152, "not every row equally often"),
        ({"qsl_reported_total_count": 100}, "DATA_SET_SIZE", 100, 24_576, "drew from 100 rows"),
        (
            {"qsl_reported_total_count": 30_000, "data_set_rows": 30_000},
            "DATA_SET_SIZE",
            30_000,
            24_576,
            "drew from 30,000 rows; MLPerf's data set has 24,576",
        ),
        ({"data_set_rows": 3}, "DATA_SET_SIZE", 3, 24_576, "drew from 3 rows"),
        ({"errors": ("a",)}, "LOADGEN_ERRORS", 1, 0, "1 error, the first: a"),
        (
            {"result_validity": "INVALID", "result_invalid_reason": "Increase expected QPS. \n"},
            "LOADGEN_INVALID",
            "INVALID",
            "VALID",
            "LoadGen says Increase expected QPS.",
        ),
        ({"result_validity": "INVALID"}, "LOADGEN_INVALID", "INVALID", "VALID", "no reason given"),
        ({"errors": ("Number of tokens", "b")}, "LOADGEN_ERRORS", 2, 0, "2 errors, the first: Number of tokens"),
    ],
)
def test_each_rule_has_its_code_and_its_numbers(
    changes: dict[str, Any], code: str, found: float | None, required: float | None, message: str
) -> None:
    (rule,) = unmet(**changes)
    assert rule["code"] == code
    assert message in rule["message"]
    if found is not None:
        assert (rule["found"], rule["required"]) == (found, required)


def test_the_edges_of_duration_and_count_are_allowed() -> None:
    assert unmet(result_max_latency_ns=600_000_000_000, effective_samples_per_query=24_576) == []
    assert [rule["code"] for rule in unmet(result_max_latency_ns=599_999_999_999)] == ["MIN_DURATION"]


def test_accuracy_logs_have_no_speed_to_judge() -> None:
    values = {"qsl_reported_total_count": 24_576}
    assert unmet_rules(V51, LoadGenLog(values, []), Observed("offline", "accuracy", 24_576)) == []
    (rule,) = unmet_rules(V51, LoadGenLog({"qsl_reported_total_count": 8}, []), Observed("offline", "accuracy", 24_576))
    assert rule["code"] == "DATA_SET_SIZE"


def test_rows_that_repeat_a_data_set_are_not_issued_equally_often_by_that() -> None:
    codes = [rule["code"] for rule in unmet(data_set_rows=5)]  # 49,152 samples of a library of 24,576 rows
    assert codes == ["EQUAL_ISSUE", "DATA_SET_SIZE"]


def test_verdicts() -> None:
    rules = unmet(result_max_latency_ns=1)
    assert judge(claimed=True, unmet=[], failed_samples=0, samples=9) == (Verdict.VALID, [])
    assert judge(claimed=True, unmet=rules, failed_samples=0, samples=9) == (Verdict.INVALID, rules)
    assert judge(claimed=False, unmet=rules, failed_samples=0, samples=9) == (Verdict.MEASURED, [])
    verdict, reasons = judge(claimed=False, unmet=rules, failed_samples=2, samples=9)
    assert verdict is Verdict.INVALID
    assert [reason["message"] for reason in reasons] == ["2 of 9 samples failed"]
    verdict, reasons = judge(claimed=True, unmet=rules, failed_samples=2, samples=9)
    assert [reason["code"] for reason in reasons] == ["FAILED_SAMPLES", "MIN_DURATION"]
