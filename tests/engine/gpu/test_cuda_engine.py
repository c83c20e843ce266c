"""The engine on a GPU: its answers against transformers, fp8 against bf16, its memory against its plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from checkpoints import teacher_forced
from engines import answer_and_logits
from gpu_engines import MARKS, SIZES, bf16_checkpoint, error_from_transformers, mixed_requests, some_prompts
from over_admission import expect_short_answers
from transformers import PreTrainedModel

from megatoken.engine import Engine, EngineConfig, FinishReason, Request, Sampling, memory
from megatoken.engine.config import SHAPES
from megatoken.engine.device import choose_device
from megatoken.engine.memory import GPU_LIBRARY_BYTES
from megatoken.errors import CapacityError

pytestmark = MARKS

BF16_LOGIT_ERROR = 0.03
"""Largest difference from transformers in fp32, as a share of the largest logit."""
FP8_LOGIT_ERROR = 0.15
"""Root mean square of the difference between fp8 and bf16, as a share of the root mean square of the logits."""
MIXTURE_ERROR = {"bf16": 0.1, "fp8": 0.3}
"""Root mean square of the difference from transformers in fp32, as a share of the deviation of the logits. A token for
which two experts score almost the same may get the other one."""
MIXTURES = {
    "Mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "Qwen3Moe": {
        **{"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "norm_topk_prob": True},
        **{"mlp_only_layers": [1]},
    },
    "GptOss": {"num_local_experts": 8, "num_experts_per_tok": 4, "sliding_window": 20},
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
    return directory, bf16_checkpoint(directory, architecture, **changes)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    bf16_checkpoint(directory)
    return directory


def test_bf16_agrees_with_transformers(
    checkpoint: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, model = checkpoint
    engine = Engine(directory, EngineConfig(**SIZES))
    assert engine.memory_plan.device == "cuda"
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
    wide, narrow = (Engine(directory, EngineConfig(precision=precision, **SIZES)) for precision in ("bf16", "fp8"))
    errors = []
    for prompt in some_prompts([1, 31, 100, 300]):
        _, expected = answer_and_logits(wide, prompt, 1, monkeypatch)
        _, logits = answer_and_logits(narrow, prompt, 1, monkeypatch)
        errors.append(float((logits - expected).square().mean().sqrt() / expected.square().mean().sqrt()))
    print(f"\nfp8 against bf16: logit errors {[round(error, 4) for error in errors]}")
    assert max(errors) <= FP8_LOGIT_ERROR


@pytest.mark.parametrize("architecture", MIXTURES)
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_mixture_agrees_with_transformers(
    architecture: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bf16_checkpoint(tmp_path, architecture, **MIXTURES[architecture])
    engine = Engine(tmp_path, EngineConfig(precision=precision, **SIZES))
    error = error_from_transformers(engine, model, monkeypatch)
    print(f"\n{architecture} in {precision} against fp32: logit error {error:.4f}")
    assert error <= MIXTURE_ERROR[precision]
    requests = mixed_requests()
    launched = engine.generate(requests)
    assert engine._runner._graphs.recorded
    assert engine.generate(requests) == launched  # with more steps as graphs


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("graphs", [False, True])
def test_pages_of_windows_change_no_bit(
    precision: str, graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against an engine whose layers all hold every key."""
    bf16_checkpoint(tmp_path, "GptOss", **MIXTURES["GptOss"])
    prompts = some_prompts([1, 33, 200, 700, 64, 500, 90, 31])
    requests = [Request(prompt, 260 - len(prompt) // 4, ignore_end_token=True) for prompt in prompts]
    config = EngineConfig(precision=precision, cuda_graphs=graphs, **SIZES)
    own = Engine(tmp_path, config)
    monkeypatch.setattr(memory, "_own_window", lambda model: 0)
    whole = Engine(tmp_path, config)
    assert whole.memory_plan.window_pages == 0 < own.memory_plan.window_pages
    assert own.generate(requests) == whole.generate(requests)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_step_on_its_way_changes_no_bit(llama: Path, precision: str) -> None:
    requests = mixed_requests()
    answers = [
        Engine(llama, EngineConfig(precision=precision, max_batched_tokens=96, overlap=overlap)).generate(requests)
        for overlap in (False, True, True)
    ]
    assert answers[0] == answers[1] == answers[2]


def test_preempted_requests_end_once(llama: Path) -> None:
    engine = Engine(llama, EngineConfig(precision="fp8", max_batched_tokens=64, cache_tokens=512))
    expect_short_answers(engine._scheduler)
    requests = [Request(prompt, 100, ignore_end_token=True) for prompt in some_prompts([20] * 24)]
    completions = engine.generate(requests)
    state = engine.state()
    assert state.preemptions > 5
    assert state.pages_free == state.pages
    assert [len(completion.token_ids) for completion in completions] == [100] * 24
    assert {completion.finish_reason for completion in completions} == {FinishReason.LENGTH}


def test_draws_depend_on_the_seed_alone(llama: Path) -> None:
    engine = Engine(llama, EngineConfig(max_batched_tokens=64))
    [prompt] = some_prompts([30])

    def draw(seed: int, **sampling: float) -> list[int]:
        return engine.generate([Request(prompt, 20, Sampling(1.0, seed=seed, **sampling), ignore_end_token=True)])[
            0
        ].token_ids

    assert draw(1) == draw(1) != draw(2)
    greedy = engine.generate([Request(prompt, 20, ignore_end_token=True)])[0].token_ids
    assert draw(3, top_k=1) == draw(4, top_p=1e-9) == greedy


def test_cancellation_frees_pages_and_stop_tokens_stop(llama: Path) -> None:
    engine = Engine(llama, EngineConfig(max_batched_tokens=64))
    [prompt] = some_prompts([30])
    request_id = engine.submit(Request(prompt, 500, ignore_end_token=True))
    for _ in range(5):
        engine.step()
    engine.cancel(request_id)
    assert engine.state().pages_free == engine.state().pages
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
