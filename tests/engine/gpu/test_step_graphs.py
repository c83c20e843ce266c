"""Steps replayed as CUDA graphs against the same steps launched kernel by kernel."""

import gc
import random
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from checkpoints import make_checkpoint
from engines import drain

from megatoken.engine import Engine, EngineConfig, Request, Sampling
from megatoken.engine.batch import StepShape, largest_step
from megatoken.engine.cache import allocate_cache
from megatoken.engine.config import find_shape, sharded
from megatoken.engine.memory import GRAPH_CHUNKS, GRAPH_LAYER_BYTES, GRAPH_TOKENS, plan_memory_of
from megatoken.engine.ops.step_graphs import UNRECORDED_RUNS, StepGraphs
from megatoken.engine.schemes import find_scheme
from megatoken.engine.step_shapes import MOST_GRAPHS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1008,
    "max_position_embeddings": 2048,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    make_checkpoint(directory, stored=torch.bfloat16, gain=1.0, **SHAPE)
    return directory


def some_requests(number: int, longest: int = 90, **others: object) -> list[Request]:
    draw = random.Random(number)
    return [
        Request(
            [draw.randrange(1008) for _ in range(draw.randrange(1, longest))],
            draw.randrange(1, 40),
            ignore_end_token=True,
            **others,
        )
        for _ in range(number)
    ]


def same_share(llama: Path, config: EngineConfig, requests: list[Request]) -> float:
    """Of answers that are equal with and without graphs; a piece of attention cut elsewhere rounds otherwise."""
    eager, graph = (Engine(llama, replace(config, cuda_graphs=graphs)).generate(requests) for graphs in (False, True))
    assert [len(one.token_ids) for one in eager] == [len(one.token_ids) for one in graph]
    return sum(one == other for one, other in zip(eager, graph, strict=True)) / len(requests)


@pytest.mark.parametrize(("precision", "fp8_scales"), [("bf16", "tensor"), ("fp8", "tensor"), ("fp8", "row")])
@pytest.mark.parametrize("overlap", [False, True])
def test_short_answers_are_the_same(llama: Path, precision: str, fp8_scales: str, overlap: bool) -> None:
    """Sequences below 128 tokens are never cut, so not a bit differs."""
    config = EngineConfig(
        precision=precision,
        fp8_scales=fp8_scales,
        overlap=overlap,
        max_batched_tokens=96,
        max_sequences=48,
        max_length=128,
    )
    assert same_share(llama, config, some_requests(120)) == 1.0


@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 9, 16, 17, 33, 65, 129, 241, 256, 257, 511, 512, 513, 577, 900])
def test_any_number_of_tokens(llama: Path, tokens: int) -> None:
    config = EngineConfig(max_batched_tokens=1024, max_sequences=1024, max_length=128)
    requests = [Request([number % 1008, 5], 12, ignore_end_token=True) for number in range(tokens)]
    assert same_share(llama, config, requests) == 1.0


@pytest.mark.parametrize(("prompt", "running"), [(60, 0), (700, 0), (700, 5), (700, 80), (400, 300), (300, 600)])
def test_prompts_alone_and_in_large_steps(llama: Path, prompt: int, running: int) -> None:
    """Steps of prompts alone, and steps of more than 512 tokens, of which few or many sample."""
    config = EngineConfig(max_batched_tokens=1024, max_sequences=620, max_length=1024)
    several = [Request([number % 1008, 7], 20, ignore_end_token=True) for number in range(running)]
    for _ in range(6):  # so that the shapes are recorded
        several.append(Request([number % 1000 for number in range(prompt)], 3, ignore_end_token=True))
    assert same_share(llama, config, several) >= 0.97


def test_long_sequences_are_nearly_the_same(llama: Path) -> None:
    """One answer in five has two logits within the rounding of attention cut elsewhere; a lost piece changes all."""
    config = EngineConfig(max_batched_tokens=512, max_sequences=32, max_length=2048)
    assert same_share(llama, config, some_requests(60, longest=1900)) >= 0.6


def test_steps_that_must_be_in_time_are_recorded_at_the_start(llama: Path) -> None:
    """Up to the tokens that a step may have, with and without prompts."""
    config = EngineConfig(
        precision="fp8", max_batched_tokens=100, max_sequences=48, max_length=128, target_step_seconds=0.04
    )
    engine = Engine(llama, config)
    ladder = [tokens for tokens in GRAPH_TOKENS if tokens <= 112]
    recorded = {(one.tokens, one.chunks, one.samples) for one in engine._runner._graphs.recorded}
    assert recorded >= {(tokens, GRAPH_CHUNKS, tokens + GRAPH_CHUNKS) for tokens in ladder}
    assert recorded >= {(tokens, GRAPH_CHUNKS, GRAPH_CHUNKS) for tokens in ladder}
    assert recorded >= {(tokens, 0, tokens) for tokens in ladder if tokens <= 48}
    assert engine.recorded is not None and engine.recorded.steps == len(engine._runner._graphs.recorded)
    assert same_share(llama, config, some_requests(60)) >= 0.8  # what a step holds depends on the time that others took


def test_the_first_requests_of_a_server_launch_nothing_kernel_by_kernel(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and together; and their answers are those of an engine without graphs."""
    sizes = {"max_batched_tokens": 1024, "max_sequences": 64, "max_length": 1024}
    engine = Engine(llama, EngineConfig(record_seconds=60.0, **sizes))
    requests = [Request([number % 1008 for number in range(length)], 20) for length in (1, 30, 120, 511, 513, 900)]
    launched = []
    launch = StepGraphs._step
    monkeypatch.setattr(StepGraphs, "_step", lambda *given: launched.append(given) or launch(*given))
    alone = [engine.generate([one])[0] for one in requests]
    together = engine.generate(some_requests(40))
    assert not launched
    monkeypatch.undo()
    eager = Engine(llama, EngineConfig(cuda_graphs=False, **sizes))
    expected = [eager.generate([one])[0] for one in requests] + eager.generate(some_requests(40))
    equal = [one == other for one, other in zip([*alone, *together], expected, strict=True)]
    assert sum(equal) >= 0.9 * len(equal)


def test_recording_stops_when_its_time_is_over(llama: Path) -> None:
    config = EngineConfig(max_batched_tokens=1024, max_sequences=64, max_length=1024, record_seconds=1e-6)
    engine = Engine(llama, config)
    assert engine.recorded is not None and engine.recorded.steps < 10
    assert Engine(llama, replace(config, record_seconds=0.0)).recorded is None


def test_drawn_tokens_are_the_same(llama: Path) -> None:
    config = EngineConfig(max_batched_tokens=96, max_sequences=48, max_length=128)
    requests = some_requests(60, sampling=Sampling(temperature=0.9, top_k=40, top_p=0.9, seed=3))
    assert same_share(llama, config, requests) == 1.0


def test_preempted_and_cancelled_requests_end_once(llama: Path) -> None:
    engine = Engine(llama, EngineConfig(precision="fp8", max_batched_tokens=64, cache_tokens=1024, max_length=512))
    request_ids = [engine.submit(request) for request in some_requests(80)]
    ended = []
    while engine.busy:
        ended += [event.request_id for event in engine.step() if event.finish_reason is not None]
        if len(ended) == 20 and request_ids[-1] not in ended:
            engine.cancel(request_ids[-1])
    assert sorted(ended) == request_ids
    assert engine.state().pages_free == engine.state().pages


def test_memory_stays_within_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More shapes than are kept: numbers of tokens, prompts or none, lengths. A graph grows with the layers."""
    monkeypatch.setattr("megatoken.engine.ops.step_graphs.SUBSTITUTED_RUNS", UNRECORDED_RUNS)
    layers = 40
    make_checkpoint(tmp_path, stored=torch.bfloat16, gain=1.0, **{**SHAPE, "num_hidden_layers": layers})
    engine = Engine(
        tmp_path, EngineConfig(precision="fp8", max_batched_tokens=1024, max_sequences=520, max_length=2048)
    )
    before = torch.cuda.mem_get_info()[0]
    times = UNRECORDED_RUNS + 1
    for tokens in [one for one in GRAPH_TOKENS[3:] if one <= 512]:
        for longest in (1, 600):
            engine.submit(Request([3] * longest, times + 3, ignore_end_token=True))
            engine.step()
            for _ in range(times):
                engine.submit(Request([1] * (tokens - 1), 1, ignore_end_token=True))
                engine.step()
            drain(engine)
            for prompt in (longest, *[1] * (tokens - 1)):
                engine.submit(Request([3] * prompt, times + 4, ignore_end_token=True))
            drain(engine)
    taken = before - torch.cuda.mem_get_info()[0]
    recorded = len(engine._runner._graphs.recorded)
    print(f"\n{recorded} graphs of {layers} layers took {taken / 1e6:.0f} MB")
    assert recorded == MOST_GRAPHS
    assert taken <= layers * GRAPH_LAYER_BYTES


@pytest.mark.parametrize(("ranks", "prompt_tokens", "taken"), [(1, 0, True), (1, 64, False), (2, 64, True)])
def test_a_step_that_computes_longer_than_it_is_launched_is_not_recorded(
    ranks: int, prompt_tokens: int, taken: bool
) -> None:
    """70B on one H200: 256 tokens take 33 ms, their launches 32; half the model 17."""
    device = torch.device("cuda")
    cache = allocate_cache(find_shape("tiny"), find_scheme("fp8"), 1, 0, 32, device, [(1.0, 1.0)] * 6)[0]
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    model = find_shape("llama2-70b")
    config = EngineConfig(precision="fp8", max_batched_tokens=512, tensor_parallel=ranks)
    memory = plan_memory_of(model, config, "cuda", 140 * 10**9)
    graphs = StepGraphs(slots, cache, sharded(model, ranks), find_scheme("fp8"), memory)
    step = largest_step(StepShape(tokens=256 + prompt_tokens, chunks=1, samples=9, longest=512, pages=16))
    assert graphs.takes(step) is taken


def test_a_forgotten_engine_is_freed_at_once(llama: Path) -> None:
    """Its weights would stay until garbage is collected, and what was there at ``gc.freeze`` never is."""
    engine = Engine(llama, EngineConfig(max_batched_tokens=96, max_length=128))
    engine.generate([Request([1, 2, 3], 20, ignore_end_token=True)])
    assert engine._runner._graphs.recorded
    runner = weakref.ref(engine._runner)
    gc.disable()
    try:
        del engine
        assert runner() is None
    finally:
        gc.enable()


def test_the_same_bits_a_hundred_times(llama: Path) -> None:
    engine = Engine(llama, EngineConfig(precision="fp8", max_batched_tokens=96, max_length=128))
    requests = some_requests(24)
    first = engine.generate(requests)
    assert all(engine.generate(requests) == first for _ in range(100))
