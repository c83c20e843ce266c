"""The engine on a GPU: its answers against transformers, fp8 against bf16, its memory against its plan."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from checkpoints import make_checkpoint, teacher_forced
from over_admission import expect_short_answers
from transformers import PreTrainedModel

from megatoken.engine import Engine, EngineConfig, FinishReason, Request, Sampling, runner
from megatoken.engine.config import SHAPES
from megatoken.engine.device import choose_device
from megatoken.engine.memory import GPU_LIBRARY_BYTES
from megatoken.errors import CapacityError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BF16_LOGIT_ERROR = 0.03
"""Largest difference from transformers in fp32, as a share of the largest logit."""
FP8_LOGIT_ERROR = 0.15
"""Root mean square of the difference between fp8 and bf16, as a share of the root mean square of the logits."""
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1003,
    "max_position_embeddings": 1024,
}
KINDS = {
    "llama": ("Llama", {}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
}


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PreTrainedModel]:
    architecture, changes = KINDS[request.param]
    directory = tmp_path_factory.mktemp(request.param)
    model = make_checkpoint(directory, architecture, stored=torch.bfloat16, gain=1.0, **{**SHAPE, **changes})
    return directory, model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    make_checkpoint(directory, stored=torch.bfloat16, gain=1.0, **SHAPE)
    return directory


def some_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(SHAPE["vocab_size"]) for _ in range(length)] for length in lengths]


def answer_and_logits(
    engine: Engine, prompt: list[int], tokens: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[int], torch.Tensor]:
    """One request alone: its answer, and the logits [tokens, vocabulary] it was chosen from."""
    rows: list[torch.Tensor] = []
    forward = runner.forward

    def recording(*arguments: object) -> torch.Tensor:
        logits = forward(*arguments)
        rows.extend(logits.float().cpu())
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(runner, "forward", recording)
        [completion] = engine.generate([Request(prompt, tokens, ignore_end_token=True)])
    return completion.token_ids, torch.stack(rows)[:tokens]


def test_bf16_agrees_with_transformers(
    checkpoint: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, model = checkpoint
    engine = Engine(directory, EngineConfig(max_rows=64, max_sequences=16, cache_tokens=4096))
    assert engine.device.type == "cuda"
    agreeing = total = 0
    largest = 0.0
    for prompt in some_prompts([1, 31, 32, 33, 200]):
        answer, logits = answer_and_logits(engine, prompt, 24, monkeypatch)
        expected = teacher_forced(model, prompt, answer)
        largest = max(largest, float((logits - expected).abs().max() / expected.abs().max()))
        agreeing += int((expected.argmax(-1) == torch.tensor(answer)).sum())
        total += len(answer)
    print(f"\nbf16 against fp32: largest logit error {largest:.4f}, {agreeing} of {total} greedy tokens agree")
    assert largest <= BF16_LOGIT_ERROR
    assert agreeing >= 0.95 * total


def test_fp8_agrees_with_bf16(checkpoint: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    directory, _ = checkpoint
    sizes = {"max_rows": 64, "max_sequences": 16, "cache_tokens": 4096}
    wide, narrow = (Engine(directory, EngineConfig(precision=precision, **sizes)) for precision in ("bf16", "fp8"))
    errors = []
    for prompt in some_prompts([1, 31, 100, 300]):
        _, expected = answer_and_logits(wide, prompt, 1, monkeypatch)
        _, logits = answer_and_logits(narrow, prompt, 1, monkeypatch)
        errors.append(float((logits - expected).square().mean().sqrt() / expected.square().mean().sqrt()))
    print(f"\nfp8 against bf16: logit errors {[round(error, 4) for error in errors]}")
    assert max(errors) <= FP8_LOGIT_ERROR


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_step_on_its_way_changes_no_bit(llama: Path, precision: str) -> None:
    requests = [
        Request(prompt, tokens, ignore_end_token=True)
        for prompt, tokens in zip(some_prompts(range(1, 100, 3)), range(40, 7, -1), strict=True)
    ]
    answers = [
        Engine(llama, EngineConfig(precision=precision, max_rows=96, overlap=overlap)).generate(requests)
        for overlap in (False, True, True)
    ]
    assert answers[0] == answers[1] == answers[2]


def test_preempted_requests_end_once(llama: Path) -> None:
    engine = Engine(llama, EngineConfig(precision="fp8", max_rows=64, cache_tokens=512))
    expect_short_answers(engine._scheduler)
    requests = [Request(prompt, 100, ignore_end_token=True) for prompt in some_prompts([20] * 24)]
    completions = engine.generate(requests)
    counters = engine.counters()
    assert counters.preemptions > 5
    assert counters.pages_free == counters.pages
    assert [len(completion.token_ids) for completion in completions] == [100] * 24
    assert {completion.finish_reason for completion in completions} == {FinishReason.LENGTH}


def test_draws_depend_on_the_seed_alone(llama: Path) -> None:
    engine = Engine(llama, EngineConfig(max_rows=64))
    [prompt] = some_prompts([30])

    def draw(seed: int, **sampling: float) -> list[int]:
        return engine.generate([Request(prompt, 20, Sampling(1.0, seed=seed, **sampling), ignore_end_token=True)])[
            0
        ].token_ids

    assert draw(1) == draw(1) != draw(2)
    greedy = engine.generate([Request(prompt, 20, ignore_end_token=True)])[0].token_ids
    assert draw(3, top_k=1) == draw(4, top_p=1e-9) == greedy


def test_cancellation_frees_pages_and_stop_tokens_stop(llama: Path) -> None:
    engine = Engine(llama, EngineConfig(max_rows=64))
    [prompt] = some_prompts([30])
    ticket = engine.submit(Request(prompt, 500, ignore_end_token=True))
    for _ in range(5):
        engine.step()
    engine.cancel(ticket)
    assert engine.counters().pages_free == engine.counters().pages
    while engine.busy:
        engine.step()
    [free] = engine.generate([Request(prompt, 20, ignore_end_token=True)])
    stop = free.token_ids[7]
    [stopped] = engine.generate([Request(prompt, 20, stop_token_ids=(stop,), ignore_end_token=True)])
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert stopped.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_memory_stays_within_the_plan(precision: str) -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    engine = Engine("1.1b", EngineConfig(precision=precision, cache_tokens=200_000))
    plan = engine.memory_plan
    after_start = torch.cuda.max_memory_reserved()
    assert after_start - before <= plan.total_bytes
    assert torch.cuda.memory_allocated() >= plan.weights_bytes + plan.cache_bytes
    lengths = [1, 2000, 700, 30] * 200
    draw = Sampling(1.0, seed=1)
    requests = [Request([1] * length, 1 + number % 40, draw) for number, length in enumerate(lengths)]
    engine.generate(requests)
    assert torch.cuda.max_memory_reserved() - before <= plan.total_bytes - GPU_LIBRARY_BYTES
    assert torch.cuda.max_memory_reserved() <= 1.05 * after_start


def test_what_cannot_run_is_refused() -> None:
    with pytest.raises(CapacityError, match="the GPU back end has no fp32; take bf16 or fp8"):
        choose_device(EngineConfig(precision="fp32", device="cuda"))
    device, reason = choose_device(EngineConfig(precision="fp32"))
    assert device.type == "cpu"
    assert reason is not None and "fp32" in reason
    with pytest.raises(CapacityError, match=r"llama3.1-405b in fp8 does not fit: weights 4\d\d"):
        Engine("llama3.1-405b", EngineConfig(precision="fp8"))


def test_sides_that_no_fp8_product_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "odd", replace(SHAPES["tiny"], name="odd", intermediate_size=900))
    with pytest.raises(CapacityError, match="multiples of 16; take bf16"):
        Engine("odd", EngineConfig(precision="fp8"))
