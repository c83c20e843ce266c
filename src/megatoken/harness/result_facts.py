"""Fields of ``result.json``: what LoadGen was asked for, what it said, and what held the speed down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from megatoken.config import RunConfig
from megatoken.engine.kernel_words import NO_KERNELS, WIDENED
from megatoken.harness.loadgen import TestSettings
from megatoken.harness.loadgen_plan import run_benchmark, run_limits
from megatoken.mlperf.benchmarks import LatencyLimits
from megatoken.mlperf.latencies import Latencies
from megatoken.mlperf.loadgen_log import LoadGenLog

CORE_WAIT_SHARE = 0.05  # beyond it a reader of the speed is told
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


def run_notes(facts: Mapping[str, Any]) -> list[str]:
    """What a reader of the numbers must know: the notes among ``facts``, and what its ``target`` says of itself."""
    return [*facts.get("notes", ()), *engine_notes(facts.get("target", {}), facts.get("precision"))]


def engine_notes(engine: Mapping[str, Any], precision: str | None) -> list[str]:
    """What makes an engine, as it describes itself, slower than the machine could be, or may do so."""
    notes = []
    if str(engine.get("kernels", "")).startswith(NO_KERNELS):
        why = engine["kernels"].removeprefix(NO_KERNELS)
        notes.append(f"without compiled kernels, so slower than it could be: {why}; on Linux, GCC (g++) makes them")
    if precision in ("bf16", "fp8") and str(engine.get("kernels", "")).endswith(WIDENED):
        notes.append(
            "this processor has no AVX-512 BF16, so the compiled kernels widen each bf16 value before they multiply; "
            "whether --precision fp32 is faster here is not known, a run with it tells"
        )
    if engine.get("device") == "cpu" and engine.get("why_no_gpu"):
        notes.append(engine["why_no_gpu"])
    return notes


def core_wait_notes(share: float | None, facts: Mapping[str, Any]) -> list[str]:
    """What to say of a run with these facts whose process had no core for ``share`` of the time that it wanted one."""
    if share is None or share <= CORE_WAIT_SHARE:
        return []
    if "rack_nodes" in facts:  # whose replicas are processes of their own
        return [
            f"the driver's machine was busy, so replicas may have waited for samples: {100 * share:.0f} % of the time "
            "that the driver wanted a core, it had to wait for one; end other work there"
        ]
    return [
        f"a busy machine, so slower than it could be: {100 * share:.0f} % of the time that this process wanted a core, "
        "it had to wait for one; end other work, or lower engine.threads if they are more than the cores"
    ]
