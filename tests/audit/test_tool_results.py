"""Results of load tools as evidence: files as guidellm and AIPerf wrote them, and one computed as vLLM computes it.

``load_tools/`` has results of guidellm 0.8.1 and AIPerf 0.13.0 of 24 requests against the mock engine of
``megatoken serve``, without the fields that are not read.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatoken.audit import Severity, audit
from megatoken.claims.facts import gather

GOLDEN = Path(__file__).parent / "load_tools"
GUIDELLM, AIPERF = "guidellm.json", "profile_export_aiperf.json"
VLLM = "openai-infqps-concurrency8-model-20261125-033000.json"
REQUESTS = 400


def vllm(detailed: bool = True) -> dict[str, Any]:
    """A result by the formulas of vLLM's benchmarks/serve.py, 8 requests at once."""
    draw = np.random.default_rng(3)
    lengths = draw.integers(20, 200, REQUESTS)
    ttft = draw.uniform(0.05, 0.2, REQUESTS)
    gaps = [draw.uniform(0.01, 0.03, length - 1) for length in lengths]
    latency = ttft + np.array([one.sum() for one in gaps])
    tpot = (latency - ttft) / (lengths - 1)
    duration = float(latency.sum() / 7.9)
    result: dict[str, Any] = {
        "date": "20261125-033000",
        "backend": "openai",
        "model_id": "model",
        "num_prompts": REQUESTS,
        "request_rate": "inf",
        "max_concurrency": 8,
        "duration": duration,
        "completed": REQUESTS,
        "failed": 0,
        "total_input_tokens": 100 * REQUESTS,
        "total_output_tokens": int(lengths.sum()),
        "request_throughput": REQUESTS / duration,
        "output_throughput": float(lengths.sum()) / duration,
        "total_token_throughput": (100 * REQUESTS + float(lengths.sum())) / duration,
    }
    flat = np.concatenate(gaps)
    for name, values in (("ttft", ttft), ("tpot", tpot), ("itl", flat), ("e2el", latency)):
        result |= {f"mean_{name}_ms": 1e3 * values.mean(), f"median_{name}_ms": 1e3 * float(np.median(values))}
        result |= {f"p{share}_{name}_ms": 1e3 * float(np.percentile(values, share)) for share in (90, 95, 99)}
    if detailed:
        result |= {
            "input_lens": [100] * REQUESTS,
            "output_lens": lengths.tolist(),
            "ttfts": ttft.tolist(),
            "itls": [one.tolist() for one in gaps],
            "latencies": latency.tolist(),
        }
    return result


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """A folder with one file, changed in one way."""

    def make(name: str, change: Callable[[dict[str, Any]], object] = lambda values: None) -> Path:
        values = vllm() if name == VLLM else json.loads((GOLDEN / name).read_text())
        change(values)
        (tmp_path / name).write_text(json.dumps(values))
        return tmp_path

    return make


def worst(path: Path) -> dict[str, str]:
    """Findings that are neither passes nor notes: severity by check."""
    mild = (Severity.PASS, Severity.NOTE)
    return {one.id: str(one.severity) for one in audit(path).findings if one.severity not in mild}


@pytest.mark.parametrize("name", [GUIDELLM, AIPERF, VLLM])
def test_honest_results_add_up(name: str, folder: Callable[..., Path]) -> None:
    found = audit(folder(name))
    assert not [one for one in found.findings if one.severity in (Severity.FAIL, Severity.WARN, Severity.UNKNOWN)]
    passed = {one.id for one in found.findings if one.severity is Severity.PASS}
    assert {"tool.complete", "tool.rates", "tool.percentiles", "tool.latencies", "tool.in_flight"} <= passed
    assert any("1 result of load tools" in note for note in found.notes)


def test_results_are_facts_for_claims(folder: Callable[..., Path]) -> None:
    stated = vllm()
    facts = gather(audit(folder(VLLM)).evidence)
    assert facts.find("tokens_per_second").value == (stated["output_throughput"],)
    assert facts.find("ttft_p99_seconds").value == pytest.approx((stated["p99_ttft_ms"] / 1e3,))
    assert facts.find("samples_issued").value == (float(REQUESTS),)


def test_several_results_are_runs_and_not_nodes_of_one(folder: Callable[..., Path]) -> None:
    folder(GUIDELLM)
    found = audit(folder(VLLM))
    assert found.evidence.kind == "runs"
    assert found.aggregate is None


def scale(factor: float, *keys: str) -> Callable[[dict[str, Any]], object]:
    def change(values: dict[str, Any]) -> None:
        *path, last = keys
        for name in path:
            values = values[int(name) if name.isdigit() else name]  # type: ignore[index]
        values[last] *= factor

    return change


METRICS = ("benchmarks", "0", "metrics")
SPOILED: list[tuple[str, Callable[[dict[str, Any]], object], str]] = [
    (VLLM, scale(1.02, "output_throughput"), "tool.rates"),
    (VLLM, scale(0.9, "duration"), "tool.rates"),
    (VLLM, scale(0.2, "p99_ttft_ms"), "tool.percentiles"),
    (VLLM, scale(0.99, "median_tpot_ms"), "tool.percentiles"),
    (VLLM, scale(2, "total_output_tokens"), "tool.percentiles"),
    (VLLM, lambda values: values["ttfts"].__setitem__(0, 99.0), "tool.latencies"),
    (VLLM, lambda values: values.update(max_concurrency=4), "tool.in_flight"),
    (VLLM, lambda values: values.update(failed=3), "tool.complete"),
    (AIPERF, scale(1.1, "output_token_throughput", "avg"), "tool.rates"),
    (AIPERF, scale(3, "time_to_first_token", "p50"), "tool.percentiles"),
    (AIPERF, scale(9, "inter_token_latency", "avg"), "tool.percentiles"),
    (AIPERF, scale(0.1, "request_latency", "avg"), "tool.latencies"),
    (AIPERF, lambda values: values.update(was_cancelled=True), "tool.complete"),
    (GUIDELLM, scale(2, *METRICS, "output_tokens_per_second", "successful", "mean"), "tool.rates"),
    (GUIDELLM, scale(9, *METRICS, "inter_token_latency_ms", "successful", "total_sum"), "tool.latencies"),
    (GUIDELLM, scale(0, *METRICS, "request_latency", "successful", "max"), "tool.percentiles"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "check"), SPOILED)
def test_numbers_that_do_not_add_up_are_found(
    name: str, change: Callable[[dict[str, Any]], object], check: str, folder: Callable[..., Path]
) -> None:
    assert check in worst(folder(name, change))


def test_without_rows_means_are_compared(folder: Callable[..., Path]) -> None:
    path = folder(VLLM)
    (path / VLLM).write_text(json.dumps(vllm(detailed=False)))
    assert worst(path) == {}
    (path / VLLM).write_text(json.dumps(vllm(detailed=False) | {"mean_tpot_ms": 1.0}))
    assert worst(path) == {"tool.latencies": "fail"}


@pytest.mark.parametrize(("concurrency", "found"), [(8, {}), (5, "warn"), (2, "fail")])
def test_without_a_mean_latency_it_is_made_of_ttft_and_later_tokens(
    concurrency: int, found: object, folder: Callable[..., Path]
) -> None:
    path = folder(VLLM)
    stated = {key: value for key, value in vllm(detailed=False).items() if "e2el" not in key}
    (path / VLLM).write_text(json.dumps(stated | {"max_concurrency": concurrency}))
    assert {name: one for name, one in worst(path).items() if one != "unknown"} == (
        {"tool.in_flight": found} if found else {}
    )


def test_no_time_is_below_zero(folder: Callable[..., Path]) -> None:
    path = folder(VLLM)
    (path / VLLM).write_text(json.dumps(vllm(detailed=False) | {"mean_ttft_ms": -5.0}))
    assert worst(path)["tool.percentiles"] == "fail"


def test_a_damaged_file_is_a_finding(folder: Callable[..., Path]) -> None:
    path = folder(AIPERF)
    (path / AIPERF).write_text((path / AIPERF).read_text()[:-40])
    assert worst(path) == {"tool.readable": "fail"}
