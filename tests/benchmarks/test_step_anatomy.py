"""Kernels of a trace -> parts of a step -> rates: names, neighbours, work and gaps, without a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_trace import Kernel, busy_microseconds, kernels_of
from megatoken.engine.config import SHAPES, ModelConfig
from megatoken.engine.scheduler import Scheduler
from megatoken.engine.step_plan import StepPlan
from step_anatomy import (
    ACTIVATION,
    ARGMAX,
    CHUNK,
    DECODE,
    DOWN,
    GAPS,
    GATE_UP,
    HEAD,
    LAYER_PRODUCTS,
    NORMS,
    OTHER_PRODUCTS,
    OUTPUT,
    QKV,
    REST,
    ROTATION,
    Ceilings,
    anatomy,
    costliest,
    parts_of,
    split_steps,
    step_work,
)

CUBLAS = "nvjet_sm90_qqtst_128x256_128x4_1x2_h_bz_coopA_TNT"
GATHER = "void at::native::(anonymous namespace)::vectorized_gather_kernel<16, long>(char*, char*, long*, int)"
COPY = "Memcpy DtoH (Device -> Pinned)"
NORM = ("_add_rms_norm_kernel", NORMS)
LAYER = [
    (CUBLAS, QKV),
    ("_rotate_and_write_kernel", ROTATION),
    ("_decode_kernel", DECODE),
    ("_merge_kernel", DECODE),
    ("_chunk_kernel", CHUNK),
    (CUBLAS, OUTPUT),
    NORM,
    (CUBLAS, GATE_UP),
    ("_silu_mul_kernel", ACTIVATION),
    ("void cublasLt::splitKreduce_kernel<32, 16, int>(...)", DOWN),
    (CUBLAS, DOWN),
    NORM,
]
LAST_LAYER = [
    (CUBLAS, QKV),
    ("_rotate_and_write_kernel", ROTATION),
    (GATHER, REST),
    (GATHER, REST),
    ("kernel_mha", DECODE),
    *LAYER[5:],
]
STEP = [
    ("_gather_tokens_kernel", REST),
    (GATHER, REST),
    NORM,
    *LAYER,
    *LAST_LAYER,
    (CUBLAS, HEAD),
    ("_argmax_kernel", ARGMAX),
    ("_argmax_merge_kernel", ARGMAX),
    ("void at::native::index_copy_kernel<long>(...)", REST),
    (COPY, REST),
    ("Memcpy HtoD (Pinned -> Device)", REST),
]


def timeline(names: list[str], microseconds: float = 2.0, gap: float = 1.0) -> list[Kernel]:
    starts = [number * (microseconds + gap) for number in range(len(names))]
    return [Kernel(name, start, start + microseconds) for name, start in zip(names, starts, strict=True)]


def model(layers: int = 2) -> ModelConfig:
    return ModelConfig("m", 64, 160, layers, heads=4, kv_heads=2, head_dim=16, vocabulary_size=96, max_positions=512)


def mixed_plan() -> StepPlan:
    """Two decodes, then a whole prompt, then a prompt cut by the budget."""
    scheduler = Scheduler(max_batched_tokens=32, max_sequences=8, page_size=16, num_pages=64, max_length=256)
    for request_id, prompt in enumerate((7, 9)):
        scheduler.add(request_id, prompt, 50)
    scheduler.plan()
    for request_id, prompt in enumerate((10, 100), start=2):
        scheduler.add(request_id, prompt, 50)
    plan = scheduler.plan()
    assert plan is not None
    assert (plan.count.tolist(), plan.decodes, plan.sample.tolist()) == ([1, 1, 10, 20], 2, [True] * 3 + [False])
    return plan


def test_every_kernel_of_a_step_finds_its_part() -> None:
    names, expected = zip(*STEP, strict=True)
    assert parts_of(timeline(list(names))) == list(expected)


def test_gate_up_and_activation_may_be_one_kernel() -> None:
    kernels = [Kernel(name, 0, 1) for name in (CUBLAS, "_add_rms_norm_kernel", "gated_product", CUBLAS)]
    assert parts_of(kernels) == [OTHER_PRODUCTS, NORMS, GATE_UP, DOWN]


def test_a_product_among_strangers_is_counted_but_not_named() -> None:
    assert parts_of(timeline(["mystery", CUBLAS, "mystery"])) == [REST, OTHER_PRODUCTS, REST]


def test_steps_begin_with_their_ids_and_the_last_is_left_out() -> None:
    names = [name for name, _ in STEP]
    steps = split_steps(timeline(names[5:] + names * 3))
    assert [len(step.kernels) for step in steps] == [len(names)] * 2
    assert steps[0].end == steps[1].begin
    assert steps[0].kernels[0].name == "_gather_tokens_kernel"


def test_work_of_a_mixed_step() -> None:
    plan, shape = mixed_plan(), model(layers=3)
    work = step_work(plan, shape, fp8=True)
    T, S, D, F, queries, keys = 32, 3, 64, 160, 64, 32
    rows = 2 * T + S
    assert work[QKV] == 2 * 3 * T * D * (queries + 2 * keys)
    assert work[OUTPUT] == 2 * rows * D * queries
    assert work[GATE_UP] == 2 * work[DOWN] == 4 * rows * D * F
    assert work[HEAD] == 2 * S * D * 96
    # The last layer's prompt row attends as a decode; the cut prompt's rows see 1 to 20 keys, the whole one's 1 to 10.
    assert work[CHUNK] == 4 * 2 * queries * (10 * 11 // 2 + 20 * 21 // 2)
    lengths = 8 + 10
    assert work[DECODE] == 2 * keys * (2 * lengths + lengths + 10) + queries * 3 * (2 * 2 + 3)
    assert work[NORMS] == T * D * 3 + 2 * 2 * T * D * 7 + S * D * 7 + S * D * 8
    assert work[ACTIVATION] == rows * F * 5
    assert work[ROTATION] == 3 * T * (2 * (queries + 2 * keys) + 2 * queries + 2 * keys)
    assert step_work(plan, shape, fp8=False)[ACTIVATION] == rows * F * 6


def test_products_of_a_full_step_are_the_model_s_linears() -> None:
    """Were every row to sample, the layers' products would be two operations for each of their weights."""
    plan = mixed_plan()
    shape = SHAPES["llama2-70b"]
    work = step_work(plan, shape, fp8=True)
    whole = 2 * shape.linear_parameters * 32
    assert 1 - 1 / shape.layers < sum(work[part] for part in LAYER_PRODUCTS) / whole < 1


def test_anatomy_adds_up_and_holds_rates_against_bounds() -> None:
    names = [name for name, _ in STEP]
    seen = split_steps(timeline(names * 4))
    plans = [mixed_plan()] * 3
    parts = {part.part: part for part in anatomy(seen, plans, model(), True, Ceilings(1e-3, 5e-4, 2.0))}
    products = parts.pop("layers' products")
    assert sum(part.share for part in parts.values()) == pytest.approx(1)
    assert sum(part.launches for part in parts.values()) == len(names)
    assert parts[GAPS].share == pytest.approx(1 / 3)
    assert products.milliseconds == pytest.approx(sum(parts[part].milliseconds for part in LAYER_PRODUCTS))
    work = step_work(plans[0], model(), True)
    assert parts[HEAD].achieved == pytest.approx(work[HEAD] / 2.0 / 1e6)
    assert (parts[HEAD].unit, parts[HEAD].bound) == ("TFLOP/s", 5e-4)
    assert parts[NORMS].achieved == pytest.approx(work[NORMS] / (5 * 2.0) / 1e3)
    assert parts[NORMS].bound_share == pytest.approx(parts[NORMS].achieved / 2.0)
    assert products.bound == 1e-3
    assert parts[REST].achieved is None and parts[OTHER_PRODUCTS].milliseconds == 0
    assert "TFLOP/s" in products.line() and "GB/s" in parts[DECODE].line() and "None" not in parts[GAPS].line()


def test_costliest_kernels_come_first_with_their_launches() -> None:
    kernels = [Kernel("_gather_tokens", 0, 1), Kernel(CUBLAS, 1, 9), Kernel("_silu_mul_kernel", 9, 10)]
    steps = split_steps([*kernels, Kernel("_gather_tokens", 12, 13)])
    first, *others = costliest(steps)
    assert first == {"kernel": CUBLAS, "part": GATE_UP, "milliseconds": 0.008, "launches": 1}
    assert len(others) == 2
    assert costliest(steps, most=1) == [first]


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 20)), max_size=30))
def test_busy_time_is_the_union(spans: list[tuple[int, int]]) -> None:
    kernels = [Kernel("k", begin, begin + length) for begin, length in sorted(spans)]
    occupied = np.zeros(121, dtype=bool)
    for begin, length in spans:
        occupied[begin : begin + length] = True
    assert busy_microseconds(kernels) == occupied.sum()


def test_trace_keeps_what_the_device_did() -> None:
    """As PyTorch writes it: host calls, flows and spans of annotations beside kernels and copies."""
    events = [
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1.0, "dur": 4.0},
        {"ph": "X", "cat": "kernel", "name": "b", "ts": 4627833218123.25, "dur": 2.5, "args": {"stream": 7}},
        {"ph": "X", "cat": "gpu_memcpy", "name": COPY, "ts": 4627833218120, "dur": 1},
        {"ph": "X", "cat": "gpu_memset", "name": "Memset (Device)", "ts": 4627833218121, "dur": 1},
        {"ph": "X", "cat": "gpu_user_annotation", "name": "step", "ts": 0.0, "dur": 9e12},
        {"ph": "f", "cat": "ac2g", "name": "ac2g", "ts": 2.0},
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    ]
    kernels = kernels_of({"traceEvents": events})
    assert [kernel.name for kernel in kernels] == [COPY, "Memset (Device)", "b"]
    assert kernels[2].end - kernels[2].begin == pytest.approx(2.5)
