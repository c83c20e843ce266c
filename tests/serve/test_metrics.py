"""The metrics' text: names of vLLM, sums that add up, and a dashboard that asks for nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

from megatoken.engine.state import ReplicaState
from megatoken.serve.messages import EngineSizes
from megatoken.serve.metrics import EngineReport, Metrics

# What load tools and dashboards for vLLM read, as of vLLM 0.27.
VLLM_NAMES = {
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_waiting_by_reason",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "iteration_tokens_total",
    "cache_config_info",
    "request_success_total",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_max_tokens",
    "request_params_n",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_inference_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
}
SAMPLE = re.compile(r'^([a-z]+:[a-z0-9_]+)\{([a-z_]+="(?:[^"\\\n]|\\.)*"(?:,[a-z_]+="(?:[^"\\\n]|\\.)*")*)\} (\S+)$')


def text_of(metrics: Metrics) -> str:
    state = ReplicaState(running=2, waiting=3, pages=10, pages_free=4)
    report = EngineReport(state, EngineSizes(8, 64, 160, 16))
    return metrics.text({"0": report}, {"default": (5, 2)}, healthy=True, share=1.0)


def samples(text: str) -> dict[tuple[str, str], float]:
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            match = SAMPLE.match(line)
            assert match, line
            found[match[1], match[2]] = float(match[3])
    return found


def test_every_name_of_vllm_is_there_once_with_its_type() -> None:
    text = text_of(Metrics("m"))
    types = re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE)
    assert len(types) == len(dict(types))
    assert {f"vllm:{name}" for name in VLLM_NAMES} <= dict(types).keys()


def test_histograms_are_cumulative_and_end_with_their_count() -> None:
    metrics = Metrics("m")
    for value in (0.0005, 0.001, 0.3, 1e6):
        metrics.engine("0").histograms["time_to_first_token_seconds"].observe(value)
    found = samples(text_of(metrics))
    counts = [value for (name, _), value in found.items() if name == "vllm:time_to_first_token_seconds_bucket"]
    assert counts == sorted(counts) and counts[0] == 2 and counts[-1] == 4
    assert found["vllm:time_to_first_token_seconds_count", 'model_name="m",engine="0"'] == 4
    assert found["vllm:time_to_first_token_seconds_sum", 'model_name="m",engine="0"'] == 1e6 + 0.3015


def test_waiting_counts_both_queues_and_labels_are_escaped() -> None:
    metrics = Metrics('a "b"\\\n')
    metrics.tenant("default").generation_tokens += 7
    found = samples(text_of(metrics))
    label = r'model_name="a \"b\"\\\n",engine="0"'
    assert found["vllm:num_requests_waiting", label] == 8
    assert found["vllm:kv_cache_usage_perc", label] == 0.6
    assert found["megatoken:key_generation_tokens_total", f'{label},key="default"'] == 7
    assert found["megatoken:key_requests_waiting", f'{label},key="default"'] == 5


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    metrics = Metrics("m")
    metrics.tenant("default")
    known = {name for name, _ in samples(text_of(metrics))}
    dashboard = json.loads((Path(__file__).parents[2] / "launch/grafana.json").read_text())
    asked = [name for panel in dashboard["panels"] for one in panel["targets"] for name in names_in(one["expr"])]
    assert len(dashboard["panels"]) >= 12 and set(asked) <= known


def names_in(expression: str) -> list[str]:
    found = re.findall(r"(?:vllm|megatoken):\w+", expression)
    assert found, expression
    return found
