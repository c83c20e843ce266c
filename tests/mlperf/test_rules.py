from dataclasses import replace
from typing import Any

import pytest

from detail_logs import detail_log_of
from megatoken.analysis.statistics import Samples
from megatoken.mlperf.benchmarks import BENCHMARKS, LatencyLimits, benchmark
from megatoken.mlperf.latencies import Latencies, latencies
from megatoken.mlperf.rules import (
    ClientCapacity,
    Observed,
    Round,
    Shortfall,
    doubts,
    judge,
    round_of,
    send_lag_limit_seconds,
    unmet_rules,
)
from megatoken.runs.run import Verdict
from megatoken.runs.tables import SampleRow, to_table

V51 = round_of("v5.1", benchmark("llama2-70b"))
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
) -> list[Shortfall]:
    return unmet_rules(V51, detail_log_of({**GOOD, **changes}, errors), Observed("offline", mode, data_set_rows))


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
            "LoadGen result: INVALID (Increase expected QPS.)",
        ),
        (
            {"result_validity": "INVALID"},
            "LOADGEN_INVALID",
            "INVALID",
            "VALID",
            "INVALID (no reason given)",
        ),
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
    assert unmet_rules(V51, detail_log_of(values), Observed("offline", "accuracy", 24_576)) == []
    (rule,) = unmet_rules(V51, detail_log_of({"qsl_reported_total_count": 8}), Observed("offline", "accuracy", 24_576))
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


SERVED = {
    **GOOD,
    "generated_samples_per_query": 1,
    "generated_query_count": 24_576,
    "result_query_count": 24_576,
    "result_min_duration_met": True,
    "early_stopping_met": True,
    "result_perf_constraints_met": True,
    "result_first_token_99.00_percentile_latency_ns": 1_500_000_000,
    "result_time_per_output_token_99.00_percentile_ns": 150_000_000,
    "requested_server_ttft_latency": 2_000_000_000,
    "requested_server_tpot_latency": 200_000_000,
}
OWN = Latencies(24_576, 1.5, 0.15, 40, 50, 209, 459, 290.0)
STREAM = {"scenario": "singlestream", "limits": None, "latencies": None, "client": None}
WELL = {
    "scenario": "server",
    "mode": "performance",
    "data_set_rows": 24_576,
    "last_due_seconds": 601.0,
    "limits": LatencyLimits(2.0, 0.2),
    "latencies": OWN,
    "send_lag_p99_seconds": 0.001,
    "client": ClientCapacity(1000.0, 300_000.0),
    "samples_per_second": 40.0,
}


def unmet_served(observed: dict[str, Any] | None = None, *, round_: Round = V51, **changes: Any) -> list[Shortfall]:
    return unmet_rules(round_, detail_log_of({**SERVED, **changes}), Observed(**{**WELL, **(observed or {})}))


def test_a_server_log_that_meets_everything() -> None:
    assert unmet_served() == []
    just = {"result_first_token_99.00_percentile_latency_ns": 1_999_999_999}
    assert unmet_served({"latencies": replace(OWN, ttft_p99_seconds=2.0)}, **just) == []


@pytest.mark.parametrize(
    ("observed", "changes", "code", "found", "required", "message"),
    [
        (
            {"latencies": replace(OWN, ttft_p99_seconds=2.0)},
            {"result_first_token_99.00_percentile_latency_ns": 2_000_000_000},
            "TTFT_LIMIT",
            2.0,
            2.0,
            "p99 TTFT is 2,000 ms, the limit 2,000 ms",
        ),
        (
            {"latencies": replace(OWN, ttft_p99_seconds=19.22)},
            {"result_first_token_99.00_percentile_latency_ns": 19_220_000_000},
            "TTFT_LIMIT",
            19.22,
            2.0,
            "p99 TTFT is 19,220 ms, the limit 2,000 ms",
        ),
        (
            {"latencies": replace(OWN, tpot_p99_seconds=0.31)},
            {"result_time_per_output_token_99.00_percentile_ns": 310_000_000},
            "TPOT_LIMIT",
            0.31,
            0.2,
            "p99 TPOT is 310 ms, the limit 200 ms",
        ),
        (
            {"latencies": replace(OWN, ttft_over=300)},
            {"early_stopping_met": False},
            "EARLY_STOPPING",
            300,
            209,
            "300 of 24,576 queries over a limit; early stopping allows 209",
        ),
        (
            {"latencies": replace(OWN, ttft_over=300, tpot_over=400)},
            {"early_stopping_met": False},
            "EARLY_STOPPING",
            400,
            209,
            "400 of 24,576 queries over a limit; early stopping allows 209",
        ),
        (
            {"latencies": replace(OWN, allowed_over=-1)},
            {"early_stopping_met": False, "result_query_count": 300},
            "EARLY_STOPPING",
            300,
            459,
            "300 queries; a p99 needs 459",
        ),
        ({}, {"requested_server_ttft_latency": 3_000_000_000}, "LATENCY_LIMITS", 3.0, 2.0, "a TTFT of 3,000 ms"),
        (
            {"last_due_seconds": 80.0},
            {"effective_min_duration_ms": 80_000},
            "MIN_DURATION",
            80.0,
            600.0,
            "ran 80 s of 600 s",
        ),
        ({}, {"generated_query_count": 24_577}, "EQUAL_ISSUE", 24_577, 49_152, "not every row equally often"),
    ],
)
def test_each_rule_of_latencies_has_its_code_and_its_numbers(
    observed: dict[str, Any],
    changes: dict[str, Any],
    code: str,
    found: float,
    required: float,
    message: str,
) -> None:
    (rule,) = unmet_served(observed, **changes)
    assert (rule["code"], rule["found"], rule["required"]) == (code, found, required)
    assert message in rule["message"]


@pytest.mark.parametrize(
    ("observed", "code", "found", "required", "message"),
    [
        ({"latencies": replace(OWN, ttft_p99_seconds=0.9)}, "LOADGEN_DISAGREES", 0.9, 1.5, "900 ms by our records"),
        ({"latencies": replace(OWN, tpot_p99_seconds=0.1)}, "LOADGEN_DISAGREES", 0.1, 0.15, "150 ms by LoadGen"),
        ({"send_lag_p99_seconds": 0.2}, "SEND_LAG", 0.2, 0.1, "p99 200 ms after they were due"),
        ({"samples_per_second": 501.0}, "CLIENT_LIMIT", 501.0, 500.0, "more than 50 % of the 1,000"),
        ({"wall_clock_step_seconds": -0.5}, "WALL_CLOCK", -0.5, 0.01, "was set by -0.5 s during the run"),
    ],
)
def test_a_doubt_is_no_rule_of_mlperf_and_yet_speaks_against_a_claim(
    observed: dict[str, Any], code: str, found: float, required: float, message: str
) -> None:
    log, seen = detail_log_of(SERVED), Observed(**{**WELL, **observed})
    assert unmet_rules(V51, log, seen) == []
    (doubt,) = doubts(log, seen)
    assert (doubt["code"], doubt["found"], doubt["required"]) == (code, found, required)
    assert message in doubt["message"]
    assert judge(claimed=True, unmet=[], failed_samples=0, samples=9, doubts=[doubt]) == (Verdict.INVALID, [doubt])
    assert judge(claimed=False, unmet=[], failed_samples=0, samples=9, doubts=[doubt]) == (Verdict.MEASURED, [])
    assert doubts(log, Observed(**WELL)) == doubts(log, replace(seen, mode="accuracy")) == []
    within = replace(OWN, ttft_p99_seconds=1.33)  # 5 % of the limit and 5 % of what LoadGen says
    assert doubts(log, Observed(**{**WELL, "latencies": within})) == []
    if code == "LOADGEN_DISAGREES":  # of samples without a first token LoadGen's percentiles mean nothing
        assert doubts(log, replace(seen, failed_samples=1)) == []


def test_of_failed_samples_no_percentile_is_quoted() -> None:
    """LoadGen's then hold memory that it never set, so ours of the completed ones are held against the limits."""
    late = {"result_first_token_99.00_percentile_latency_ns": 2**62}
    assert [rule["code"] for rule in unmet_served(**late)] == ["TTFT_LIMIT"]
    assert unmet_served({"failed_samples": 1}, **late) == []
    slow = replace(OWN, ttft_p99_seconds=2.5)
    (rule,) = unmet_served({"failed_samples": 1, "latencies": slow}, **late)
    assert (rule["code"], rule["found"]) == ("TTFT_LIMIT", 2.5)


def test_loadgens_own_reason_is_quoted_where_only_early_stopping_failed() -> None:
    """As LoadGen 6.0.17 logged 64 queries of its Server scenario: its own reason is empty then."""
    text = (
        " * Run unsuccessful.  * Processed 64 queries.  * Would need to run at least 395 more queries,  with the run "
    )
    log = {
        "result_validity": "INVALID",
        "result_invalid_reason": "",
        "early_stopping_met": False,
        "early_stopping_ttft_result": " * Run successful.",
        "early_stopping_tpot_result": f"{text}being successful if every additional  query were under latency.",
    }
    (_, rule) = unmet_served({"latencies": replace(OWN, allowed_over=-1)}, **log)
    assert rule["code"] == "LOADGEN_INVALID"
    assert rule["message"] == (
        "LoadGen result: INVALID (Early stopping satisfied: NO; TPOT Early Stopping Result: Run unsuccessful. "
        "Processed 64 queries. Would need to run at least 395 more queries, "
        "with the run being successful if every additional query were under latency.)"
    )


def test_single_stream_needs_enough_queries_and_no_whole_passes() -> None:
    edge = round_of("v5.1", benchmark("llama3.1-8b-edge"))
    rows = {"qsl_reported_total_count": 5000, "qsl_reported_performance_count": 5000}
    assert unmet_served(STREAM, round_=edge, **rows, generated_query_count=5100) == []
    (rule,) = unmet_served(STREAM, round_=edge, **rows, early_stopping_met=False, result_query_count=50)
    assert (rule["code"], rule["found"], rule["required"]) == ("EARLY_STOPPING", 50, 64)


@pytest.mark.parametrize("mode", ["performance", "accuracy", "compliance"])
def test_a_scenario_that_the_benchmark_has_not(mode: str) -> None:
    (rule,) = unmet_served({**STREAM, "mode": mode})
    assert rule == {
        "code": "SCENARIO",
        "message": "llama2-70b has no scenario singlestream, only offline, server and interactive",
        "found": "singlestream",
        "required": "offline, server and interactive",
        "benchmark": "llama2-70b",
    }
    scenarios = {name: benchmark(name).scenarios for name in BENCHMARKS}
    assert scenarios.pop("llama3.1-8b-edge") == ("Offline", "SingleStream")
    assert scenarios.pop("mixtral-8x7b") == ("Offline", "Server")
    assert set(scenarios.values()) == {("Offline", "Server", "Interactive")}


def test_a_late_sender_is_judged_by_the_limit_on_the_first_token() -> None:
    assert send_lag_limit_seconds(LatencyLimits(2.0, 0.2)) == pytest.approx(0.1)
    assert send_lag_limit_seconds(LatencyLimits(0.1, 0.2)) == 0.01
    assert send_lag_limit_seconds(None) == 0.01


def test_own_percentiles_are_taken_as_loadgen_takes_them() -> None:
    rows = [
        SampleRow(
            n, 0, 1.0, 1.0, 1.0 + n / 100, 1.0 + n / 100 + (9 if n != 7 else 0), 5, 10 if n != 7 else 1, "stop", "a"
        )
        for n in range(1000)
    ]
    own = latencies(Samples.of(to_table(SampleRow, rows)), LatencyLimits(9.895, 0.9))
    assert own is not None
    assert own.ttft_p99_seconds == pytest.approx(9.90)  # position 990 of the sorted
    assert own.tpot_p99_seconds == pytest.approx(1.0)
    assert (own.queries, own.ttft_over, own.tpot_over, own.allowed_over) == (1000, 10, 999, 2)
    assert latencies(Samples.of(to_table(SampleRow, [])), LatencyLimits(1.0, 1.0)) is None
