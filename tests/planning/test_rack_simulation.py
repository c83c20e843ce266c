"""Racks in virtual time: what must add up, and published results that nothing but one other was fitted to."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from examples import examples
from megatoken.datasets.lengths import load_lengths
from megatoken.engine.config import SHAPES, EngineConfig
from megatoken.engine.cost_model import SECONDS_PER_SEQUENCE
from megatoken.errors import CapacityError, CheckpointError, UsageError
from megatoken.planning.rack_simulation import NodeRun, Rack, simulate_rack
from megatoken.planning.throughput_plan import plan_throughput, scaled_answers

LLAMA_70B = SHAPES["llama2-70b"]
SMALL = Rack(
    SHAPES["tiny"],
    EngineConfig(precision="bf16", max_batched_tokens=64, max_sequences=16, max_length=256),
    "H200",
    3,
    2,
)
PUBLISHED_RACK = 1_100_948.3  # 72 GB300, the sum of 18 nodes
GB200_5_1_0008, B200_5_1_0061, H200_5_1_0026 = 52_061.6 / 4, 102_909 / 8, 35_316.7 / 8


def some_lengths(count: int = 200) -> np.ndarray:
    draw = np.random.default_rng(5)
    return np.stack((draw.integers(1, 90, count), draw.integers(1, 90, count)), axis=1)


def mlperf_lengths(mean_output: float) -> np.ndarray:
    table = load_lengths(None, vocabulary_size=32_000, max_length=4096)
    return scaled_answers(np.stack((table.input_tokens, table.output_limits), axis=1), mean_output)


def published(gpu: str, precision: str, rows: int, *, sequences: int = 2048, **sizes: int) -> Rack:
    config = EngineConfig(precision=precision, max_batched_tokens=rows, max_sequences=sequences, **sizes)
    return Rack(LLAMA_70B, config, gpu).with_software("published")


def rate_of(rack: Rack, mean_output: float, seconds: int) -> float:
    [run] = simulate_rack(rack, mlperf_lengths(mean_output), seconds=examples(seconds))
    return run.output_tokens_per_second


@pytest.fixture(scope="module", autouse=True)
def no_collections() -> Iterator[None]:
    """As in a process that simulates: collections would visit all that other tests have left in this one."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def runs() -> list[NodeRun]:
    return simulate_rack(SMALL, some_lengths(), seconds=0.5, workers=1)


def test_tokens_samples_and_times_add_up(runs: list[NodeRun]) -> None:
    assert len(runs) == 3
    for run in runs:
        assert run.samples > 400
        assert len(run.completion_seconds) == run.samples
        assert run.output_tokens == run.progress[-1, 1]
        assert np.all(np.diff(run.progress, axis=0) >= 0)
        assert run.progress[-1, 0] == run.seconds == pytest.approx(run.completion_seconds[-1])
        assert run.seconds > 0.5
        assert run.completion_seconds[0] > 0
        # Every answer runs to its full length: whole passes make the table's sums.
        passes, rest = divmod(run.samples, 200)
        assert passes * some_lengths().sum(axis=0)[1] <= run.output_tokens
        assert run.output_tokens <= (passes + bool(rest)) * some_lengths().sum(axis=0)[1]


def test_nodes_are_alike_but_for_the_order_of_requests(runs: list[NodeRun]) -> None:
    rates = [run.output_tokens_per_second for run in runs]
    assert len(set(rates)) == 3
    assert max(rates) / min(rates) < 1.05
    two = replace(SMALL, nodes=2)
    again, second = simulate_rack(two, some_lengths(), seconds=0.5, workers=1)
    assert [again.seconds, second.seconds] == [run.seconds for run in runs[:2]]
    [*_, other] = simulate_rack(two, some_lengths(), seconds=0.5, workers=1, seed=2)
    assert other.seconds not in [run.seconds for run in runs]


def test_processes_change_nothing() -> None:
    reported = []
    alone = simulate_rack(SMALL, some_lengths(), seconds=0.2, workers=1)
    shared = simulate_rack(
        SMALL, some_lengths(), seconds=0.2, workers=2, progress=lambda done, total: reported.append((done, total))
    )
    assert [(run.seconds, run.output_tokens, run.steps) for run in alone] == [
        (run.seconds, run.output_tokens, run.steps) for run in shared
    ]
    assert reported == [(1, 3), (2, 3), (3, 3)]


def test_replicas_of_a_node_share_its_queue() -> None:
    """Two replicas serve twice as fast as one, from one list of requests."""
    one, two = (
        simulate_rack(replace(SMALL, nodes=1, replicas_per_node=n), some_lengths(), seconds=0.5)[0] for n in (1, 2)
    )
    assert two.output_tokens_per_second == pytest.approx(2 * one.output_tokens_per_second, rel=0.03)


def test_nothing_is_begun_after_its_time_and_what_was_begun_ends() -> None:
    [run] = simulate_rack(replace(SMALL, nodes=1, replicas_per_node=1), some_lengths(), seconds=1e-9)
    assert run.samples == 64  # what a replica keeps waiting
    assert len(run.completion_seconds) == 64


def test_a_small_cache_preempts() -> None:
    config = replace(SMALL.config, page_size=16, cache_tokens=512, max_sequences=64)
    draw = np.random.default_rng(0)
    # Answers that end soon for long, then some that do not: more were taken in than the cache bears.
    lengths = np.stack((draw.integers(1, 8, 300), np.full(300, 2)), axis=1)
    lengths[-40:, 1] = 200
    [run] = simulate_rack(Rack(SMALL.model, config, "H200"), lengths, seconds=0.3)
    assert run.preemptions == 0  # limits are lengths here, so nothing is taken in that will not fit
    assert run.mean_sequences < 64


def test_what_cannot_be_a_rack() -> None:
    lengths = some_lengths()
    for rack in (replace(SMALL, nodes=0), replace(SMALL, replicas_per_node=0)):
        with pytest.raises(UsageError, match="above 0"):
            simulate_rack(rack, lengths, seconds=1)
    for seconds in (0, -1, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="above 0"):
            simulate_rack(SMALL, lengths, seconds=seconds)
    with pytest.raises(UsageError, match=r"longest request has 400 tokens.*allow 256"):
        simulate_rack(SMALL, np.array([[200, 200]]), seconds=1)
    with pytest.raises(UsageError, match="at least one"):
        simulate_rack(SMALL, np.array([[200, 0]]), seconds=1)
    with pytest.raises(
        UsageError, match=r"--gpus-per-node: expected a multiple of 4 .*, got 6; give --gpus-per-node 8"
    ):
        Rack.of("llama3.1-405b", EngineConfig(precision="fp8", tensor_parallel=4), "H200", nodes=1, gpus_per_node=6)
    with pytest.raises(CheckpointError, match="named shapes"):
        Rack.of("gpt", EngineConfig(), "H200", nodes=1, gpus_per_node=1)
    with pytest.raises(CapacityError, match=r"does not fit.*or raise engine\.tensor_parallel"):
        simulate_rack(Rack(SHAPES["llama3.1-405b"], EngineConfig(precision="fp8"), "H200"), lengths, seconds=1)


def test_the_overhead_of_published_software_is_that_of_one_verified_result() -> None:
    assert rate_of(published("GB200", "fp4", 3584), 273.32, 3000) == pytest.approx(GB200_5_1_0008, rel=0.015)
    bare = replace(published("GB200", "fp4", 3584), seconds_per_sequence=0.0)
    assert rate_of(bare, 273.32, 600) > 1.1 * GB200_5_1_0008
    assert SECONDS_PER_SEQUENCE["megatoken"] == 0


def test_verified_results_that_nothing_was_fitted_to() -> None:
    assert rate_of(published("B200", "fp4", 3584), 273.3, 1500) == pytest.approx(B200_5_1_0061, rel=0.1)
    hopper = published("H200", "fp8", 1536, cache_tokens=429_000)
    assert rate_of(hopper, 292.3, 2400) == pytest.approx(H200_5_1_0026, rel=0.05)


def test_the_published_rack() -> None:
    """One replica as configured there: 72 of them are the rack, whose copies never spoke to another.

    With all examples it serves for the 80 minutes of the result.
    """
    rack = published("GB300", "fp4", 4096)
    rate = 72 * rate_of(rack, 272.73, 4800)
    assert rate == pytest.approx(PUBLISHED_RACK, rel=0.1)
    assert rate / PUBLISHED_RACK > 1.05  # docs/simulation.md says by how much, and why


@pytest.mark.slow
@pytest.mark.timing
def test_a_step_of_a_rack_is_simulated_in_little_time() -> None:
    """80 minutes of 72 replicas are 2.9 million steps: 80 us each make two minutes on two cores."""
    rack = replace(published("GB300", "fp4", 4096), replicas_per_node=4)
    lengths = mlperf_lengths(272.73)
    for _ in range(3):  # a busy machine takes up to four times as long for the same instructions
        began = time.process_time()
        [run] = simulate_rack(rack, lengths, seconds=180)
        if (step_seconds := (time.process_time() - began) / run.steps) < 500e-6:
            return
    pytest.fail(f"{step_seconds} s")


def test_a_plan_of_it() -> None:
    rack = Rack.of("llama2-70b", EngineConfig(precision="fp8"), "H200", nodes=2, gpus_per_node=2)
    plan = plan_throughput(rack, mlperf_lengths(292.3), seconds=60)
    assert plan.kind == "plan_throughput"
    per_gpu, together = plan.result("Per accelerator").value, plan.result("All nodes").value
    assert together == pytest.approx(4 * per_gpu)
    assert 3500 < per_gpu < 4700
    assert plan.result("All nodes, makespan").value <= together
    assert 600 < plan.result("Power per accelerator").value < 700
    assert sum(row["share"] for row in plan.table("step").rows) == pytest.approx(1)
    assert [row["node"] for row in plan.table("nodes").rows] == [1, 2]
    slower = plan_throughput(rack, mlperf_lengths(292.3), seconds=60, software="published")
    assert slower.results[0].value < per_gpu
    with pytest.raises(UsageError, match="megatoken, published"):
        plan_throughput(rack, mlperf_lengths(292.3), seconds=60, software="other")
    with pytest.raises(UsageError, match="--output-tokens: expected"):
        scaled_answers(some_lengths(), 0)
    blackwell = plan_throughput(
        Rack.of("tiny", EngineConfig(), "B200", nodes=1, gpus_per_node=1), some_lengths(), seconds=0.1
    )
    assert "Power per accelerator" not in [result.name for result in blackwell.results]
    assert "nodes" not in [table.name for table in blackwell.tables]
