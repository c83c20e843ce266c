"""Fields of ``result.json`` that a scenario adds: what LoadGen was asked for, and what it said."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from megatoken.config import RunConfig
from megatoken.harness.benchmarks import LatencyLimits
from megatoken.harness.latencies import Latencies
from megatoken.harness.loadgen import TestSettings
from megatoken.harness.loadgen_log import LoadGenLog
from megatoken.harness.loadgen_plan import run_benchmark, run_limits

_OUTPUT_RATES = {"offline": "result_tokens_per_second"}
_SAMPLE_RATES = {"offline": "result_samples_per_second", "singlestream": "result_qps_with_loadgen_overhead"}


def asked_facts(config: RunConfig, settings: TestSettings) -> dict[str, Any]:
    """What a test is held against and what LoadGen was asked for; known before it starts."""
    limits = run_limits(config)
    offers = config.scenario in ("server", "interactive")
    return {
        "benchmark": run_benchmark(config).name,
        "seeds": asdict(settings.seeds),
        "offered_samples_per_second": settings.offered_rate if offers else None,
        "ttft_limit_seconds": limits.ttft_seconds if limits else None,
        "tpot_limit_seconds": limits.tpot_seconds if limits else None,
        "text": config.text,
    }


def loadgen_facts(scenario: str, log: LoadGenLog) -> dict[str, Any]:
    """What LoadGen's log says; latencies in seconds, None where the scenario has none."""
    values = log.values

    def seconds(key: str) -> float | None:
        return values[key] / 1e9 if scenario != "offline" and key in values else None

    return {
        "loadgen_version": values["loadgen_version"],
        "loadgen_validity": values.get("result_validity"),
        "loadgen_output_tokens_per_second": values.get(
            _OUTPUT_RATES.get(scenario, "result_completed_tokens_per_second")
        ),
        "loadgen_samples_per_second": values.get(_SAMPLE_RATES.get(scenario, "result_completed_samples_per_sec")),
        "loadgen_scheduled_samples_per_second": values.get("result_scheduled_samples_per_sec"),
        "loadgen_ttft_p99_seconds": seconds("result_first_token_99.00_percentile_latency_ns"),
        "loadgen_tpot_p99_seconds": seconds("result_time_per_output_token_99.00_percentile_ns"),
        "loadgen_latency_p90_seconds": seconds("result_90.00_percentile_latency_ns"),
        "loadgen_latency_p99_seconds": seconds("result_99.00_percentile_latency_ns"),
        "loadgen_early_stopping_met": values.get("early_stopping_met") if scenario != "offline" else None,
    }


def latency_facts(own: Latencies, limits: LatencyLimits, log: LoadGenLog) -> dict[str, Any]:
    """Our own judgement of the latencies beside LoadGen's: both of the same limits, which may be the user's."""
    return {
        **asdict(own),
        "met": own.met(limits),
        "loadgen_met": bool(log.values.get("result_perf_constraints_met") and log.values.get("early_stopping_met")),
    }
