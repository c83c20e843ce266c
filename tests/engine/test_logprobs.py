"""Logprobs of chosen and best tokens: against transformers and float64, in mixed batches, in events and completions."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint, teacher_forced
from engines import answer_alone, drain, make_engine, request
from over_admission import expect_short_answers
from transformers import AutoModelForCausalLM

from megatoken.engine import Engine, Request, Sampling, TokenLogprobs
from megatoken.engine.logprobs import best_logprobs, read_logprobs
from megatoken.engine.memory import BLOCK_SAMPLES
from megatoken.errors import RequestError


def defined_logprobs(logits: list[float], chosen: int, most: int) -> TokenLogprobs:
    highest = max(logits)
    total = highest + math.log(math.fsum(math.exp(one - highest) for one in logits))
    best = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[:most]
    return TokenLogprobs(chosen, logits[chosen] - total, tuple((token, logits[token] - total) for token in best))


def assert_close(found: TokenLogprobs, expected: TokenLogprobs, tolerance: float = 1e-5) -> None:
    assert found.token_id == expected.token_id
    assert [token for token, _ in found.top] == [token for token, _ in expected.top]
    numbers = [(found.logprob, expected.logprob)] + [
        (one, other) for (_, one), (_, other) in zip(found.top, expected.top, strict=True)
    ]
    assert all(math.isclose(one, other, rel_tol=1e-5, abs_tol=tolerance) for one, other in numbers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_follow_the_definition(dtype: torch.dtype) -> None:
    """Ties are common in bf16, zeros have two signs, and some logits are minus infinity."""
    logits = (torch.randn(40, 200, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    logits[:, 7], logits[:, 3], logits[:, 11] = 0.0, -0.0, -math.inf
    chosen = torch.arange(40)
    rows = list(range(1, 40, 2))
    values = best_logprobs(logits, chosen, rows, 20).tolist()
    for row, one in zip(rows, values, strict=True):
        for wanted in (0, 1, 5, 20):
            expected = defined_logprobs(logits[row].tolist(), row, wanted)
            assert_close(read_logprobs(row, one, wanted), expected)


@pytest.mark.parametrize("overlap", [False, True])
def test_answers_carry_the_logprobs_of_transformers(directory: Path, overlap: bool) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    asked = [request(seed, tokens=8, logprobs=seed * 3, sampling=Sampling(seed % 2, seed=seed)) for seed in range(5)]
    engine = make_engine(directory, overlap=overlap, cache_tokens=400)
    for one, completion in zip(asked, engine.generate(asked), strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([[*one.prompt, *completion.token_ids]])).logits[0, len(one.prompt) - 1 : -1]
        assert len(completion.logprobs) == 8
        for row, token, found in zip(logits.tolist(), completion.token_ids, completion.logprobs, strict=True):
            assert_close(found, defined_logprobs(row, token, one.logprobs or 0), tolerance=1e-4)
        if one.sampling.temperature == 0 and one.logprobs:
            assert all(found.top[0] == (found.token_id, found.logprob) for found in completion.logprobs)


def test_logprobs_are_of_the_raw_logits(directory: Path) -> None:
    """Options change which token is chosen, not what is reported of the model."""
    [plain] = make_engine(directory).generate([request(1, tokens=1, logprobs=3)])
    biased = Sampling(logit_bias={9: 100.0}, repetition_penalty=1.5, frequency_penalty=1.0)
    [found] = make_engine(directory).generate([request(1, tokens=1, logprobs=3, sampling=biased)])
    assert found.token_ids == [9] and plain.token_ids != [9]
    assert found.logprobs[0].top == plain.logprobs[0].top


@pytest.mark.parametrize(
    "sizes", [{"overlap": False}, {"overlap": True, "cache_tokens": 60, "max_batched_tokens": 9}], ids=str
)
def test_neighbours_and_preemptions_change_nothing(directory: Path, sizes: dict[str, int]) -> None:
    asked = [request(seed, tokens=15, logprobs=seed % 3 if seed % 2 else None) for seed in range(12)]
    engine = make_engine(directory, **sizes)
    expect_short_answers(engine._scheduler)
    for one, completion in zip(asked, engine.generate(asked), strict=True):
        expected = answer_alone(directory, one)
        assert (
            completion.token_ids == expected.token_ids == answer_alone(directory, replace(one, logprobs=None)).token_ids
        )
        for found, alone in zip(completion.logprobs, expected.logprobs, strict=True):
            assert_close(found, alone, tolerance=1e-4)
        assert bool(completion.logprobs) == (one.logprobs is not None)


def test_events_carry_them_for_the_requests_that_asked(directory: Path) -> None:
    engine = make_engine(directory)
    with_them, without = engine.submit(request(1, logprobs=2)), engine.submit(request(2))
    events = drain(engine)
    assert all(len(event.logprobs) == len(event.token_ids) for event in events if event.request_id == with_them)
    assert all(not event.logprobs for event in events if event.request_id == without)
    assert [event.logprobs[0].token_id for event in events if event.request_id == with_them] == [
        event.token_ids[0] for event in events if event.request_id == with_them
    ]


def test_simulated_engines_refuse_them() -> None:
    with pytest.raises(RequestError, match="logprobs is not supported by this engine"):
        Engine.simulated("llama3.1-8b").submit(Request([1], logprobs=1))


PROMPT_SIZES = [
    {"overlap": False},
    {"overlap": True, "max_batched_tokens": 9},
    {"overlap": True, "cache_tokens": 60, "max_batched_tokens": 9},
    {"overlap": True, "prefix_cache": True},
]


@pytest.mark.parametrize("sizes", PROMPT_SIZES, ids=str)
def test_prompts_carry_the_logprobs_of_transformers(directory: Path, sizes: dict[str, int]) -> None:
    """In chunks, after preemptions, where an earlier prompt left its pages, and next to requests that ask for none."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    wanted = [None if seed % 3 == 2 else seed for seed in range(9)]
    lengths = [20, 1, 20, 37, 5, 20, 2, 23, 4]
    asked = [
        request(seed % 2, tokens=12, prompt_tokens=length, prompt_logprobs=most, logprobs=seed % 2 or None)
        for seed, (most, length) in enumerate(zip(wanted, lengths, strict=True))
    ]
    engine = make_engine(directory, **sizes)
    expect_short_answers(engine._scheduler)
    for one, completion in zip(asked, engine.generate(asked), strict=True):
        plain = replace(one, logprobs=None, prompt_logprobs=None)
        assert completion.token_ids == answer_alone(directory, plain).token_ids
        if one.prompt_logprobs is None:
            assert completion.prompt_logprobs == ()
            continue
        with torch.inference_mode():
            logits = model(torch.tensor([one.prompt])).logits[0, :-1]
        assert len(completion.prompt_logprobs) == len(one.prompt) - 1
        for row, token, found in zip(logits.tolist(), one.prompt[1:], completion.prompt_logprobs, strict=True):
            assert_close(found, defined_logprobs(row, token, one.prompt_logprobs), tolerance=1e-4)
            assert found.rank == 1 + sum(other > row[token] for other in row)
    assert engine.state().preemptions or "cache_tokens" not in sizes


def test_prompt_logprobs_come_with_the_first_event_alone(directory: Path) -> None:
    engine = make_engine(directory)
    with_them, cancelled = (engine.submit(request(seed, prompt_tokens=30, prompt_logprobs=1)) for seed in (1, 2))
    without = engine.submit(request(3))
    engine.step()
    engine.cancel(cancelled)
    events = drain(engine)
    counts = [len(event.prompt_logprobs) for event in events if event.request_id == with_them]
    assert counts[0] == 29 and not any(counts[1:])
    assert not any(event.prompt_logprobs for event in events if event.request_id in (without, cancelled))
    assert not engine._prompt_logprobs


def test_logits_of_a_prompt_are_made_a_few_at_a_time(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory does not grow with the prompt times the vocabulary."""
    engine = make_engine(directory, max_batched_tokens=200, cache_tokens=400)
    rows = []
    linear = engine._runner._ops.linear

    def recording(x_TD: torch.Tensor, linear: object, *others: object, inner: object = linear) -> torch.Tensor:
        if linear is engine._runner._weights.head:
            rows.append(len(x_TD))
        return inner(x_TD, linear, *others)

    monkeypatch.setattr(engine._runner._ops, "linear", recording)
    [found] = engine.generate([request(prompt_tokens=150, tokens=1, prompt_logprobs=0)])
    assert len(found.prompt_logprobs) == 149
    assert max(rows) == BLOCK_SAMPLES and sum(rows) >= 149


def test_logits_of_a_text_are_those_of_transformers(tmp_path: Path) -> None:
    """In steps of several chunks, each with its padding."""
    model = make_checkpoint(tmp_path)
    text = [(17 * place) % 301 for place in range(45)]
    with make_engine(tmp_path) as engine:
        logits = engine._runner.teacher_forced(text)
        again = engine._runner.teacher_forced(text)
    expected = teacher_forced(model, text[:1], [*text[1:], 0])
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    assert torch.equal(logits, again)
