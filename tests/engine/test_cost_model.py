"""Priced steps against steps and whole runs that were measured on one H200, and against reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet

from examples import every
from megatoken.engine import EngineConfig
from megatoken.engine.config import SHAPES
from megatoken.engine.cost_model import (
    CHUNK_SHARE,
    ELEMENTWISE_SHARE,
    FUSED_TOKENS,
    GATHER_LINK_SHARE,
    GATHER_SECONDS,
    HIGHEST_CLOCK_MHZ,
    MANY_PROGRAMS,
    SUM_SECONDS,
    SUM_SECONDS_OF_RANK,
    CostModel,
)
from megatoken.engine.gpus import find_gpu, gpus
from megatoken.engine.memory import GPU_LIBRARY_BYTES
from megatoken.engine.schemes import find_scheme
from megatoken.engine.simulated import plan_simulation
from megatoken.errors import CapacityError, ConfigError

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
LENGTHS = Path(__file__).parents[2] / "src" / "megatoken" / "data" / "llama2_70b_offline_lengths.csv"
FP8 = find_scheme("fp8")
LLAMA_70B, LLAMA_8B = SHAPES["llama2-70b"], SHAPES["llama3.1-8b"]
RUNS = ("h200-llama2-70b-fp8-offline-screened-head", "h200-llama3.1-8b-fp8-offline-defaults")
"""Nothing of them was used to fit anything."""
EARLIER_RUNS = (  # before attention of one warp, the fused gate and the screened head
    "h200-llama2-70b-fp8-offline",
    "h200-llama2-70b-fp8-offline-first",
    "h200-llama2-70b-fp8-offline-128-128",
    "h200-llama2-70b-fp8-offline-500-2000",
    "h200-llama2-70b-fp8-offline-1000-1000",
    "h200-llama3.1-8b-fp8-offline-128-128",
    "h200-llama3.1-8b-fp8-offline-1000-1000",
)


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def simulate(run: dict[str, Any]) -> Any:
    """With the run's own sizes; the memory of graphs is planned since there are any."""
    plan = run["memory_plan"]
    graphs = plan["process_bytes"] > GPU_LIBRARY_BYTES
    config = EngineConfig(
        precision="fp8",
        cuda_graphs=graphs,
        max_batched_tokens=plan.get("max_rows", plan.get("max_batched_tokens")),  # the former was its name
        max_sequences=plan["max_sequences"],
    )
    return plan_simulation(run["shape"], config, "H200")


def lengths_of(run: dict[str, Any]) -> np.ndarray:
    if run["lengths"] != "csv":
        return np.tile([int(part) for part in run["lengths"].split("/")], (run["samples"], 1))
    rows = np.loadtxt(LENGTHS, delimiter=",", skiprows=2, dtype=int)
    return rows[np.random.default_rng(1).permutation(run["samples"])]


BY_DEFAULT = (*RUNS, EARLIER_RUNS[2])


@pytest.mark.parametrize("name", [*BY_DEFAULT, *every(*(run for run in EARLIER_RUNS if run not in BY_DEFAULT))])
def test_whole_runs_of_an_h200(name: str) -> None:
    """Of this engine; and not below those of an earlier one."""
    run = read(name)
    simulation = simulate(run)
    scheduler, costs = simulation.memory.scheduler(), simulation.costs
    lengths = lengths_of(run)
    for request_id, (prompt, answer) in enumerate(lengths.tolist()):
        scheduler.add(request_id, prompt, answer)
    seconds = clock = residents = 0.0
    while (plan := scheduler.plan()) is not None:
        cost = costs.step(plan)
        seconds += cost.seconds
        clock += cost.seconds * cost.clock_mhz
        residents = max(residents, len(plan.slot))
    rate = lengths[:, 1].sum() / seconds
    if name in EARLIER_RUNS:
        assert 0.98 < rate / run["output_tokens_per_second"] < 1.13
        return
    assert rate == pytest.approx(run["output_tokens_per_second"], rel=0.02)
    if "70b" in name and "clock_mhz" in run:  # of the steady window, where a run was long enough to have one
        assert clock / seconds == pytest.approx(run["clock_mhz"], rel=0.03)
    if run.get("recomputed_tokens") == 0 and "resident_sequences_highest" in run:
        # The same scheduler, in a cache that is smaller by a copy of the head since then; the run looked once a second.
        assert 0.98 * residents <= run["resident_sequences_highest"] <= 1.01 * residents


@pytest.mark.parametrize(
    ("shape", "name"),
    [("half", "h200x2-llama3.1-405b-half-fp8-offline"), ("llama3.1-405b", "h200x4-llama3.1-405b-fp8-offline")],
)
def test_long_prompts_on_several_ranks(monkeypatch: pytest.MonkeyPatch, shape: str, name: str) -> None:
    """405B on four ranks, and what two of four ranks have of it. Only sums alone were used to fit anything."""
    half = {"heads": 64, "kv_heads": 4, "intermediate_size": 26_624, "vocabulary_size": 64_128}
    monkeypatch.setitem(SHAPES, "half", replace(SHAPES["llama3.1-405b"], name="half", **half))
    run = read(name)
    memory = run["memory_plan"]
    config = EngineConfig(
        precision="fp8",
        tensor_parallel=run["target"]["tensor_parallel"],
        max_length=10_240,
        max_batched_tokens=memory.get("max_rows", 2048),  # its name when half of the model was measured
        cache_tokens=memory["pages"] * memory["page_size"],  # recorded steps of a large model take less memory since
    )
    simulation = plan_simulation(shape, config, "H200")
    scheduler, seconds, rows = simulation.memory.scheduler(), [0.0], [0]
    for request_id in range(run["samples_completed"]):
        scheduler.add(request_id, 9428, 684)
    while (plan := scheduler.plan()) is not None:
        seconds.append(seconds[-1] + simulation.costs.step(plan).seconds)
        rows.append(rows[-1] + int(plan.count.sum()))
    assert run["output_tokens"] / seconds[-1] == pytest.approx(run["output_tokens_per_second"], rel=0.03)
    series = parquet.read_table(RESULTS / name / "series.parquet").to_pydict()
    reading = [20.0, 100.0]  # seconds
    measured = np.diff(np.interp(reading, series["elapsed_seconds"], series["processed_tokens"]))
    assert np.diff(np.interp(reading, seconds, rows)) == pytest.approx(measured, rel=0.025)


@pytest.mark.parametrize("name", EARLIER_RUNS)
def test_the_memory_plan_is_that_of_the_real_gpu(name: str) -> None:
    run = read(name)
    measured, memory = run["memory_plan"], simulate(run).memory
    measured["max_batched_tokens"] = measured.pop("max_rows")  # its name when this was measured
    # Graphs go up to the tokens that take as long as their launches since then, not to 512: fewer of 70B, more of 8B.
    of_graphs = memory.process_bytes - measured.pop("process_bytes")
    assert abs(of_graphs) < 0.02 * memory.available_bytes
    of_cache = memory.cache_bytes - measured.pop("cache_bytes")
    assert of_cache == pytest.approx(-of_graphs, abs=2 * memory.cache_bytes / memory.pages)
    assert measured.pop("pages") == pytest.approx(memory.pages, rel=0.04)
    assert {key: getattr(memory, key) for key in measured} == measured


@pytest.mark.parametrize(
    ("name", "model", "prompt_rows", "chunks"),
    [
        ("h200-llama2-70b-fp8-steps-2048-tokens", LLAMA_70B, 1339, 7),
        ("h200-llama3.1-8b-fp8-steps-4096-tokens", LLAMA_8B, 1832, 9),
    ],
)
def test_a_measured_step(name: str, model: Any, prompt_rows: int, chunks: int) -> None:
    result = read(name)["result"]
    decodes = round(result["mean_decodes"])
    assert decodes + prompt_rows == pytest.approx(result["mean_rows"], abs=1)
    parts = {part["part"]: part for part in result["step"]}
    costs = CostModel(model, FP8, find_gpu("H200"))
    attention = parts["decode attention"]
    cached = attention["achieved"] * attention["milliseconds"] * 1e6 / costs._cached_token_bytes
    cost = costs.step_of(decodes, cached, [(0, prompt_rows // chunks)] * chunks, decodes + chunks)
    assert cost.seconds * 1e3 == pytest.approx(result["step_ms"], rel=0.025)
    assert cost.clock_mhz == pytest.approx(result["clock_mhz"], rel=0.025)
    assert cost.watts == pytest.approx(result["power_watts"], rel=0.015)
    elementwise = sum(parts[part]["milliseconds"] for part in ("norms", "rotation", "argmax"))
    assert cost.elementwise * 1e3 == pytest.approx(elementwise, rel=0.05)
    assert cost.head * 1e3 == pytest.approx(parts["head"]["milliseconds"], rel=0.15 if model is LLAMA_8B else 0.35)
    assert cost.chunk_attention * 1e3 == pytest.approx(parts["chunk attention"]["milliseconds"], rel=0.35)


@pytest.mark.parametrize(("name", "model"), [("llama2-70b", LLAMA_70B), ("llama3.1-8b", LLAMA_8B)])
def test_short_steps_replayed_as_graphs(name: str, model: Any) -> None:
    """None was looked at when the model was made: it is at most 14 % above them, for one row."""
    costs, run = CostModel(model, FP8, find_gpu("H200")), read(f"h200-{name}-fp8-decodes")
    for step in run["steps"]:
        rows, tokens = step["rows"], run["prompt_tokens"] + run["answer_tokens"] / 2
        predicted = costs.step_of(rows, rows * tokens, [], rows).seconds * 1e3
        assert predicted == pytest.approx(np.mean(step["graph_milliseconds"]), rel=0.15 if rows < 64 else 0.06)


def test_sizes_from_which_the_engine_takes_other_kernels_are_the_engine_s() -> None:
    """The cost model needs neither Triton nor CUDA, so it cannot import them."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from megatoken.engine.ops import gated_product, paged_attention

    assert MANY_PROGRAMS == paged_attention.MANY
    assert FUSED_TOKENS == gated_product.FEWEST_TOKENS


def test_the_parts_are_the_whole() -> None:
    for gpu, precision in (("H200", "fp8"), ("GB300", "fp4"), ("A100", "bf16")):
        cost = CostModel(LLAMA_8B, find_scheme(precision), find_gpu(gpu), seconds_per_sequence=1e-5).step_of(
            100, 5e4, [(0, 300)], 101
        )
        assert cost.seconds == pytest.approx(sum(cost[1:9]))
        assert cost.stack == pytest.approx(101e-5)


def test_few_rows_take_as_long_as_reading_the_weights() -> None:
    costs = CostModel(LLAMA_70B, FP8, find_gpu("H200"))
    one = costs.step_of(1, 100, [], 1)
    assert one.clock_mhz == 1980.0
    weights_seconds = costs._weights_bytes / costs._weights_rate
    assert one.products == pytest.approx(weights_seconds, rel=0.001)
    assert weights_seconds > 68.45e9 / 4.8e12
    assert costs.step_of(64, 6400, [], 64).seconds < 1.1 * one.seconds
    assert costs.step_of(1024, 102400, [], 1024).seconds > 4 * one.seconds


def test_the_clock_stays_within_the_power_limit() -> None:
    costs = CostModel(LLAMA_70B, FP8, find_gpu("H200"))
    for decodes, rows in ((1, 0), (64, 0), (200, 100), (800, 700), (1536, 0), (0, 1536)):
        chunks = [(0, rows)] if rows else []
        cost = costs.step_of(decodes, 500 * decodes, chunks, decodes + bool(rows))
        assert cost.watts <= 0.989 * 700 * 1.003
        assert cost.clock_mhz == 1980.0 or cost.watts == pytest.approx(0.989 * 700, rel=0.02)


def test_more_of_anything_takes_longer() -> None:
    costs = CostModel(LLAMA_8B, FP8, find_gpu("H200"))
    base = costs.step_of(500, 1e5, [(0, 200)], 501).seconds
    assert costs.step_of(501, 1e5, [(0, 200)], 502).seconds > base
    assert costs.step_of(500, 2e5, [(0, 200)], 501).seconds > base
    assert costs.step_of(500, 1e5, [(0, 400)], 501).seconds > base
    assert costs.step_of(500, 1e5, [(3000, 200)], 501).seconds > base


def test_steps_recorded_as_graphs_gather_no_contexts() -> None:
    """Of 1,100 tokens at most with this model, with at most 8 prompts."""
    h200, work = find_gpu("H200"), (4, 4e3, [(3000, 256)], 5)
    recorded = CostModel(LLAMA_8B, FP8, h200).step_of(*work)
    launched = CostModel(LLAMA_8B, FP8, h200, cuda_graphs=False).step_of(*work)
    operations = 256 * (3000 + 128 * 3 / 2) * 4 * 32 * 4096
    paged = operations / (CHUNK_SHARE * h200.operations_per_second["bf16"]) / (recorded.clock_mhz / HIGHEST_CLOCK_MHZ)
    assert recorded.chunk_attention == pytest.approx(paged)
    assert launched.chunk_attention < 0.8 * paged
    for decodes, chunks in ((4, [(3000, 1200)]), (4, [(600, 56)] * 9)):
        costs = [
            CostModel(LLAMA_8B, FP8, h200, cuda_graphs=graphs).step_of(decodes, 4e3, chunks, decodes)
            for graphs in (True, False)
        ]
        assert costs[0] == costs[1]


def test_ranks_share_a_step_and_sum_what_they_have() -> None:
    one = CostModel(LLAMA_70B, FP8, find_gpu("H200")).step_of(512, 2e5, [(0, 512)], 513)
    seconds = [one.seconds]
    for ranks in (2, 4, 8):
        cost = CostModel(LLAMA_70B, FP8, find_gpu("H200"), ranks=ranks).step_of(512, 2e5, [(0, 512)], 513)
        assert cost.transfers > 160 * (SUM_SECONDS + ranks * SUM_SECONDS_OF_RANK)
        assert cost.seconds > one.seconds / ranks
        seconds.append(cost.seconds)
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize("gpus", [2, 4])
@pytest.mark.parametrize("width", [8192, 16_384])
def test_a_sum_over_ranks_takes_what_was_measured(width: int, gpus: int) -> None:
    measured = read(f"h200x{gpus}-collectives-{width}")
    wide = replace(LLAMA_70B, layers=1, hidden_size=width, vocabulary_size=32_001)  # which is on every rank
    costs = CostModel(wide, FP8, find_gpu("H200"), ranks=measured["ranks"])
    for row in measured["sums"]:
        if row["rows"] >= 256:  # fewer take up to 3 us longer
            seconds = costs.step_of(0, 0, [(0, row["rows"])], row["rows"]).transfers / 2
            assert seconds == pytest.approx(row["shared_microseconds"] * 1e-6, rel=0.05)


def test_ranks_share_the_head_and_gather_what_it_gives() -> None:
    rows, samples = 1000, 500
    of_ranks, of_each = (
        CostModel(replace(LLAMA_70B, vocabulary_size=size), FP8, find_gpu("H200"), ranks=4).step_of(
            samples, 5e4, [(0, rows - samples)], samples
        )
        for size in (128_000, 128_001)
    )
    assert of_ranks.head * of_ranks.clock_mhz == pytest.approx(of_each.head * of_each.clock_mhz / 4, rel=1e-4)
    gathered_bytes = 2 * (rows * 8192 + samples * 128_000)
    arriving_seconds = gathered_bytes * 3 / 4 / (GATHER_LINK_SHARE * 450e9)
    gathers_seconds = 2 * GATHER_SECONDS + arriving_seconds
    assert of_ranks.transfers - of_each.transfers == pytest.approx(gathers_seconds)
    ordering_seconds = 2 * gathered_bytes / (ELEMENTWISE_SHARE * 4.8e12)
    assert of_ranks.elementwise - of_each.elementwise == pytest.approx(ordering_seconds)


def test_every_gpu_of_the_table_can_be_simulated() -> None:
    bases = set()
    for gpu in gpus().values():
        for precision in gpu.operations_per_second:
            costs = CostModel(LLAMA_8B, find_scheme(precision), gpu)
            assert 0 < costs.step_of(256, 1e5, [(0, 256)], 257).seconds < 1
            bases.add(costs.basis)
    assert len(bases) == 5
    assert find_gpu("gb300") is gpus()["GB300"]


def test_what_a_gpu_cannot_do() -> None:
    with pytest.raises(ConfigError, match="A100 is not known to multiply in fp8; take one of bf16"):
        CostModel(LLAMA_8B, FP8, find_gpu("A100"))
    with pytest.raises(ConfigError, match="did you mean H200"):
        find_gpu("H2000")
    with pytest.raises(ConfigError, match="known are"):
        find_gpu("abacus")
    with pytest.raises(ConfigError, match="link"):
        CostModel(LLAMA_8B, FP8, find_gpu("MI325X"), ranks=2)
    with pytest.raises(CapacityError, match="does not divide"):
        CostModel(LLAMA_8B, FP8, find_gpu("H200"), ranks=3)
