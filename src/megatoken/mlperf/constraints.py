"""The constraints that LoadGen judges a run by, recomputed from the figures of its log."""

from __future__ import annotations

import math

from megatoken.mlperf.detail_log import DetailLog
from megatoken.mlperf.run_figures import in_seconds, run_figures, whole

FLAGS = ("result_perf_constraints_met", "result_min_duration_met", "result_min_queries_met", "early_stopping_met")
SIX_DIGITS = 6e-6  # relative error of a number that LoadGen prints
LIMIT_OF_P99 = {
    "result_first_token_99.00_percentile_latency_ns": "requested_server_ttft_latency",
    "result_time_per_output_token_99.00_percentile_ns": "requested_server_tpot_latency",
}


def ran_seconds(log: DetailLog) -> float | None:
    """How long a run took, as LoadGen compares it with the minimum duration; None if the log does not say."""
    scenario = log.text("effective_scenario")
    if scenario == "Offline":
        return in_seconds(log.number("result_max_latency_ns"), 1e9)
    server, queries = scenario == "Server", whole(log, "result_query_count")
    rate = log.number("result_scheduled_samples_per_sec" if server else "result_qps_with_loadgen_overhead")
    return (queries - 1) / rate if queries and rate else None


def constraints_met(log: DetailLog) -> dict[str, bool | None]:
    """The first three of ``FLAGS``; None where the figures leave it open."""
    figures = (_latencies_met(log), _min_duration_met(log), _min_queries_met(log))
    return dict(zip(FLAGS, figures, strict=False))


def _min_duration_met(log: DetailLog) -> bool | None:
    least, ran = in_seconds(log.number("effective_min_duration_ms"), 1e3), ran_seconds(log)
    return None if ran is None or least is None or math.isclose(ran, least, rel_tol=SIX_DIGITS) else ran >= least


def _min_queries_met(log: DetailLog) -> bool | None:
    queries, least = whole(log, "result_query_count"), whole(log, "effective_min_query_count")
    samples, least_samples = run_figures(log).samples_issued, whole(log, "effective_min_sample_count")
    if queries is None or least is None or samples is None or least_samples is None:
        return None
    return queries >= least and samples >= least_samples


def _latencies_met(log: DetailLog) -> bool | None:
    if log.text("effective_scenario") != "Server" or log.number("effective_target_latency_percentile") != 0.99:
        return None
    with_tokens = log.get("requested_use_token_latencies") is True
    limits = LIMIT_OF_P99 if with_tokens else {"result_99.00_percentile_latency_ns": "effective_target_latency_ns"}
    known = [(log.number(value), log.number(limit)) for value, limit in limits.items()]
    met = [None if value is None or limit is None else value <= limit for value, limit in known]
    return None if None in met else all(met)
