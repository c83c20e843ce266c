"""The memory plan against what processes really take, and what is refused with numbers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import hypothesis.strategies as st
import psutil
import pytest
import torch
from checkpoints import ARCHITECTURES, MIXTURES, make_checkpoint
from hypothesis import given, settings

from examples import every, examples
from megatoken.engine import Engine, EngineConfig, Request
from megatoken.engine.batch import StepShape, largest_step
from megatoken.engine.checkpoint import open_model
from megatoken.engine.config import SHAPES, ModelConfig
from megatoken.engine.device import plan_memory
from megatoken.engine.memory import (
    PAGED_CONTEXT,
    PROCESS_BYTES,
    MemoryPlan,
    gathers_contexts,
    graph_tokens,
    plan_memory_of,
    weight_bytes,
)
from megatoken.engine.model import load_weights
from megatoken.engine.ops import cpu
from megatoken.engine.parallel import RankWeights
from megatoken.engine.schemes import find_scheme
from megatoken.errors import CapacityError, ConfigError, MegatokenError

CHILD = """
import json, random, sys
from megatoken.engine import Engine, EngineConfig, Request, Sampling
import megatoken.engine.runner  # PyTorch, which an engine loads when it is made

def status(key):
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(lines[key].split()[0]) * 1024

model, config, requests, prompt_tokens, tokens, temperature = json.loads(sys.argv[1])
before = status("RssAnon")
engine = Engine(model, EngineConfig(**config))
loaded = status("RssAnon") - before
draw = random.Random(0)
engine.generate([
    Request([draw.randrange(engine.model_config.vocabulary_size) for _ in range(draw.randint(*prompt_tokens))],
            draw.randint(*tokens), Sampling(temperature, top_p=0.9), ignore_end_token=True)
    for _ in range(requests)
])
assert engine.state().processed_tokens >= requests
plan = engine.memory_plan
print(json.dumps({
    "planned": plan.total_bytes,
    "weights": plan.weights_bytes,
    "loaded": loaded,
    "resident peak": status("VmHWM"),
    "private peak": status("VmHWM") - status("RssFile"),
}))
"""


def run_child(
    model: str,
    config: dict[str, object],
    requests: int,
    prompt_tokens: tuple[int, int],
    tokens: tuple[int, int],
    temperature: float,
) -> dict[str, int]:
    """Bytes of a process that runs an engine. Private is all but the pages of files, which processes share."""
    asked = json.dumps([model, config, requests, prompt_tokens, tokens, temperature])
    done = subprocess.run([sys.executable, "-c", CHILD, asked], capture_output=True, text=True, check=True, timeout=120)
    usage: dict[str, int] = json.loads(done.stdout)
    print(f"\n{model} in MB:", {name: round(size / 1e6) for name, size in usage.items()})
    return usage


# Against reality


RUNS = [
    ("tiny", {"precision": "bf16", "cache_tokens": 4096}, 64, (30, 60), (4, 8), 0.0),
    ("tiny", {"precision": "fp8", "cache_tokens": 2048, "max_batched_tokens": 512}, 1, (1900, 2000), (2, 3), 0.0),
    *every(
        (
            "tiny",
            {"precision": "fp32", "cache_tokens": 2048, "page_size": 1, "max_batched_tokens": 64},
            32,
            (30, 60),
            (4, 8),
            1.0,
        ),
        ("tiny", {"precision": "fp32", "cache_tokens": 2048, "max_batched_tokens": 32}, 2, (1000, 2000), (2, 3), 0.7),
        ("125m", {"precision": "fp32", "max_length": 256}, 64, (2, 6), (2, 3), 0.0),
    ),
    ("125m", {"precision": "fp8", "cache_tokens": 1024, "max_length": 64}, 16, (4, 8), (2, 3), 1.0),
]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_a_run_stays_below_its_plan(
    run: tuple[str, dict[str, object], int, tuple[int, int], tuple[int, int], float],
) -> None:
    """Full caches, long prompts in chunks, many sequences, draws, loading: resident size, shared libraries and all."""
    usage = run_child(*run)
    assert usage["resident peak"] < usage["planned"]
    assert usage["private peak"] <= 1.5 * usage["weights"] + 300_000_000
    assert usage["loaded"] <= 1.05 * usage["weights"] + 25_000_000  # loading leaves no holes behind


def test_weight_bytes_are_those_of_the_packed_weights(tmp_path: Path) -> None:
    """Every architecture, tied and untied, with and without biases, whole and of one of two ranks."""
    kinds = [(architecture, tied) for architecture in (*ARCHITECTURES, *MIXTURES) for tied in (False, True)]
    for number, (architecture, tied) in enumerate(kinds):
        biases = {"attention_bias": True, "mlp_bias": True} if architecture == "Llama" and tied else {}
        directory = tmp_path / str(number)
        changes = biases | MIXTURES.get(architecture, {})
        make_checkpoint(directory, architecture, tie_word_embeddings=tied, vocab_size=302, **changes)
        source = open_model(directory)
        of_a_rank = RankWeights(source, 1, 2)
        for held, precision in product((source, of_a_rank), ("fp32", "bf16", "fp8")):
            weights = load_weights(held, cpu, find_scheme(precision), 16, torch.device("cpu"))
            tensors = [weights.embedding_VD, weights.norm_D, weights.head.packed]
            for layer in weights.layers:
                linears = [layer.qkv, layer.output]
                if layer.experts is None:
                    linears += [*layer.gate_up, layer.down]
                else:
                    linears += [linear for gate_up, down in layer.experts.each for linear in (*gate_up, down)]
                    tensors += [part for part in layer.experts.router if part is not None]
                tensors += [linear.packed for linear in linears]
                tensors += [linear.bias for linear in linears if linear.bias is not None]
                tensors += [layer.input_norm_D, layer.post_norm_D]
                tensors += layer.qk_norms_E or ()
                if layer.sinks_H is not None:
                    tensors.append(layer.sinks_H)
            stored = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            assert weight_bytes(held.config, find_scheme(precision), "cpu") == stored


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_cache_bytes_are_those_of_the_cache(precision: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    engine = Engine(tmp_path, EngineConfig(precision=precision, cache_tokens=100, page_size=8))
    stored = sum(side.numel() * side.element_size() for layer in engine._runner._cache for side in (layer.k, layer.v))
    assert engine.memory_plan.cache_bytes == stored
    assert engine.memory_plan.cache_tokens == 96


# Obeyed


def test_sizes_are_obeyed(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    config = EngineConfig(
        precision="fp32",
        max_batched_tokens=9,
        max_sequences=2,
        max_length=40,
        page_size=4,
        cache_tokens=60,
        memory_bytes=10**9,
    )
    engine = Engine(tmp_path, config)
    plan = engine.memory_plan
    assert (plan.max_batched_tokens, plan.max_sequences, plan.max_length, plan.page_size, plan.pages) == (
        9,
        2,
        40,
        4,
        15,
    )
    assert plan.available_bytes == 10**9
    for number in range(5):
        engine.submit(Request([number] * 11, 20, ignore_end_token=True))
    while engine.busy:
        engine.step()
        state = engine.state()
        assert state.running <= 2
        assert state.batched_tokens <= 9
        assert state.pages == 15
    engine.submit(Request([1] * 20, 20))
    with pytest.raises(CapacityError, match="20 tokens and 21 new ones exceed the longest sequence of 40 tokens"):
        engine.submit(Request([1] * 20, 21))


def test_threads_are_obeyed(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    try:
        Engine(tmp_path, EngineConfig(threads=2))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_defaults_follow_model_and_machine() -> None:
    plan = plan_memory(SHAPES["tiny"], EngineConfig())
    assert plan.max_length == SHAPES["tiny"].max_positions
    assert plan.cache_tokens >= plan.max_length
    assert plan.process_bytes == PROCESS_BYTES
    assert plan.total_bytes <= plan.available_bytes
    assert plan_memory(SHAPES["tiny"], EngineConfig(precision="fp32")).weights_bytes == 2 * plan.weights_bytes
    tight = plan_memory(SHAPES["tiny"], EngineConfig(memory_bytes=plan.total_bytes - plan.cache_bytes // 2))
    assert tight.pages < plan.pages


@pytest.mark.parametrize(("shape", "tokens"), [("llama3.1-8b", 4096), ("llama2-70b", 1536), ("gpt-oss-20b", 2048)])
def test_steps_are_longer_where_no_answer_is_waited_for(shape: str, tokens: int) -> None:
    config = EngineConfig(precision="fp8", throughput_only=True)
    plan = plan_memory_of(SHAPES[shape], config, "cuda", 140 * 10**9)
    assert (plan.max_batched_tokens, plan.max_sequences) == (tokens, tokens * 3 // 4)
    waited_for = plan_memory_of(SHAPES[shape], replace(config, throughput_only=False), "cuda", 140 * 10**9)
    assert waited_for.max_batched_tokens == min(tokens, 2048)


def test_no_plan_takes_more_than_the_machine_has() -> None:
    plan = plan_memory(SHAPES["tiny"], EngineConfig(memory_bytes=10**15))
    assert plan.total_bytes <= plan.available_bytes <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("max_batched_tokens", "most"), [(1, 1), (3, 4), (64, 64), (100, 112), (520, 576), (1536, 1152)]
)
def test_graphs_are_planned_for_steps_that_can_come(max_batched_tokens: int, most: int) -> None:
    """8B computes 1,100 tokens in the time of its launches, 70B 280."""
    assert graph_tokens(SHAPES["llama3.1-8b"], find_scheme("fp8"), max_batched_tokens)[-1] == most
    assert graph_tokens(SHAPES["llama2-70b"], find_scheme("fp8"), max_batched_tokens)[-1] == min(most, 288)
    plans = [
        plan_memory_of(
            SHAPES["llama3.1-8b"], EngineConfig(precision="fp8", max_batched_tokens=rows), "cuda", 24 * 10**9
        )
        for rows in (max_batched_tokens, 1536)
    ]
    assert (plans[0].process_bytes < plans[1].process_bytes) == (most < 1152)


def test_half_of_what_is_left_of_a_cpu_s_memory_stays_for_others() -> None:
    plan = plan_memory_of(SHAPES["125m"], EngineConfig(), "cpu", 2 * 10**9)
    left = plan.available_bytes - plan.weights_bytes - plan.process_bytes
    assert 0.3 * left < plan.cache_bytes < 0.5 * left


def test_more_memory_is_never_refused_where_less_is_enough() -> None:
    """Down to a cache of one page; a context that was not asked for shrinks to what the cache holds."""
    fits: list[MemoryPlan] = []
    for available in range(330 * 10**6, 420 * 10**6, 50_000):
        try:
            fits.append(
                plan_memory_of(SHAPES["tiny"], EngineConfig(max_sequences=1, max_batched_tokens=8), "cpu", available)
            )
        except CapacityError:
            assert not fits
    pages = [plan.pages for plan in fits]
    assert pages == sorted(pages)
    assert (pages[0], fits[0].max_length) == (1, 32)
    assert (pages[-1], fits[-1].max_length) == (64, 2048)


def test_the_plan_for_a_person() -> None:
    plan = plan_memory(
        SHAPES["tiny"], EngineConfig(cache_tokens=6400, page_size=32, max_batched_tokens=100, memory_bytes=10**9)
    )
    text = "\n".join(plan.lines())
    assert "6,400 tokens in 200 pages of 32" in text
    assert "steps of 100 tokens" in text
    assert "of 1.000 GB available" in text
    assert "2,048 tokens each" in text
    sizes = [float(size) for size in re.findall(r"^(?:weights|KV cache|workspace|process) +([\d.]+) GB", text, re.M)]
    total = float(re.search(r"^total +([\d.]+) GB", text, re.M)[1])
    assert sum(sizes) == pytest.approx(total, abs=0.003)


SIZES = ("max_batched_tokens", "max_sequences", "max_length", "page_size", "cache_tokens")


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(
    name=st.sampled_from(["tiny", "125m", "1.1b"]),
    tied=st.booleans(),
    precision=st.sampled_from(["fp32", "bf16", "fp8"]),
    sizes=st.fixed_dictionaries(dict.fromkeys(SIZES, st.one_of(st.none(), st.integers(1, 5000)))),
    memory_bytes=st.integers(1, 12_000_000_000),
)
def test_a_plan_fits_or_is_refused(
    name: str, tied: bool, precision: str, sizes: dict[str, int | None], memory_bytes: int
) -> None:
    model = replace(SHAPES[name], tied_embeddings=tied)
    config = EngineConfig(precision=precision, memory_bytes=memory_bytes, **sizes)
    try:
        plan = plan_memory(model, config)
    except CapacityError as error:
        message = str(error)
    else:
        check_plan(plan, model, config)
        return
    assert "\n" not in message
    assert re.search(r"\d", message)


def check_plan(plan: MemoryPlan, model: ModelConfig, config: EngineConfig) -> None:
    assert config.memory_bytes is not None
    assert plan.total_bytes <= plan.available_bytes <= config.memory_bytes
    assert plan.pages >= 1
    assert plan.max_length <= min(model.max_positions, plan.cache_tokens)
    for name in ("max_batched_tokens", "max_sequences", "max_length", "page_size"):
        assert getattr(config, name) in (None, getattr(plan, name))
    if config.cache_tokens is not None:
        assert config.cache_tokens - plan.page_size < plan.cache_tokens <= config.cache_tokens


# Refused


@pytest.mark.parametrize(
    ("model", "config", "error", "words"),
    [
        ("llama3.1-405b", {"memory_bytes": 10**9}, CapacityError, r"weights 811\.707 GB \+ cache"),
        ("llama3.1-405b", {"memory_bytes": 10**9}, CapacityError, "available 1.000 GB; take a smaller model"),
        ("tiny", {"memory_bytes": 300_000_000}, CapacityError, "does not fit: weights 0.019 GB"),
        ("tiny", {"cache_tokens": 10**9}, CapacityError, r"cache 3072\.\d+ GB \+ workspace"),
        ("tiny", {"max_length": 4096}, CapacityError, "max_length 4,096 is more than the 2,048 positions of tiny"),
        ("tiny", {"max_length": 2000, "cache_tokens": 1000}, CapacityError, "max_length 2,000 does not fit"),
        ("tiny", {"cache_tokens": 5, "page_size": 8}, CapacityError, "cache_tokens 5 is less than a page of 8 tokens"),
        ("tiny", {"max_batched_tokens": 0}, ConfigError, "max_batched_tokens is 0; it must be at least 1"),
        ("tiny", {"max_sequences": -1}, ConfigError, "max_sequences is -1"),
        ("tiny", {"max_length": 0}, ConfigError, "max_length is 0"),
        ("tiny", {"page_size": 0}, ConfigError, "page_size is 0"),
        ("tiny", {"cache_tokens": -7}, ConfigError, "cache_tokens is -7"),
        ("tiny", {"memory_bytes": 0}, ConfigError, "memory_bytes is 0"),
        ("tiny", {"threads": 0}, ConfigError, "threads is 0"),
        ("tiny", {"precision": "int3"}, ConfigError, "precision: must be 'fp32', 'bf16' or 'fp8', got 'int3'"),
    ],
)  # fmt: skip
def test_refusals_come_before_anything_is_loaded(
    model: str, config: dict[str, object], error: type[MegatokenError], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        Engine(model, EngineConfig(**config))
    assert "\n" not in str(caught.value)


def test_contexts_are_gathered_where_it_pays_and_fits() -> None:
    def gathers(rows: int, context: int, chunks: int = 1) -> bool:
        return gathers_contexts(8, chunks, rows, context)

    assert gathers(64, 513)
    assert not gathers(64, 512)
    assert not gathers(63, 4000)
    assert gathers(200, 8100, chunks=8)
    assert not gathers(200, 8100, chunks=9)  # more than decode attention's partial results


def test_steps_that_are_recorded_gather_nothing() -> None:
    """They are replayed for longer contexts, for which there would be no room."""
    step = largest_step(StepShape(tokens=512, chunks=8, samples=520, longest=8192, pages=256))
    assert 0 < step.lengths[step.decodes :].max() <= PAGED_CONTEXT
