"""The engine against transformers: greedy tokens, logits, and where an answer ends.

Every answer is held against transformers' logits for exactly that answer, so a check goes on where two answers part. A
token may differ from the best one only where the two logits differ by less than ``NEAR_TIE`` of the largest logit;
``near_ties`` counts these places.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from checkpoints import generate, make_checkpoint, teacher_forced
from engines import answer_and_logits
from hypothesis import given, settings
from over_admission import expect_short_answers
from transformers import AutoModelForCausalLM, PreTrainedModel

from examples import ALL, every, examples
from megatoken.engine import Engine, EngineConfig, FinishReason, Request, runner
from megatoken.engine.config import Precision
from megatoken.engine.ops import native
from megatoken.engine.runner import ModelRunner

NEAR_TIE = 1e-5
ANSWER_TOKENS = 20 if ALL else 12
PROMPT_TOKENS = (1, 2, 9, 17, 33, 40)

YARN = {
    **{"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    **{"beta_fast": 8.0, "mscale": 1.2, "mscale_all_dim": 0.7},
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.5}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
TIED = {"tie_word_embeddings": True}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# Architecture, heads, kv heads, head dim, hidden size, vocabulary, shards, stored as, what else.
CHECKPOINTS = [
    ("Llama", 4, 4, 8, 32, 257, 1, FP32, {}),
    ("Llama", 4, 2, 16, 64, 301, 2, BF16, {"rope_parameters": LINEAR}),
    ("Llama", 6, 2, 24, 48, 1000, 3, FP16, {"rope_parameters": LLAMA3}),
    ("Llama", 8, 2, 32, 64, 301, 4, FP32, TIED),
    ("Llama", 8, 1, 64, 40, 257, 5, BF16, {"attention_bias": True}),
    ("Llama", 2, 2, 128, 64, 1000, 1, FP16, {"mlp_bias": True}),
    ("Llama", 3, 1, 20, 36, 33, 2, FP32, {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}),
    ("Llama", 1, 1, 48, 48, 301, 1, FP32, {"num_hidden_layers": 1, "intermediate_size": 7}),
    ("Llama", 5, 5, 10, 50, 257, 3, FP32, {"num_hidden_layers": 5, "rms_norm_eps": 1e-3}),
    ("Mistral", 4, 1, 8, 32, 301, 2, BF16, {}),
    ("Mistral", 6, 3, 40, 72, 257, 1, FP32, {"rope_parameters": LINEAR}),
    ("Mistral", 8, 1, 16, 128, 1000, 3, FP16, {"sliding_window": None}),
    ("Mistral", 2, 1, 80, 64, 301, 4, FP32, TIED),
    ("Qwen2", 4, 4, 16, 64, 257, 1, BF16, TIED),
    ("Qwen2", 6, 2, 8, 48, 301, 3, FP32, {"rope_parameters": LLAMA3}),
    ("Qwen2", 8, 2, 12, 96, 1000, 2, FP16, {}),
    ("Qwen2", 8, 1, 32, 256, 257, 4, FP32, {"rope_parameters": YARN}),
    ("Qwen3", 4, 2, 128, 64, 301, 5, BF16, {}),
    ("Qwen3", 6, 2, 16, 64, 257, 2, FP32, TIED),
    ("Qwen3", 8, 8, 24, 48, 1000, 3, FP16, {"attention_bias": True}),
    ("Qwen3", 4, 1, 64, 32, 301, 1, FP32, {"rope_parameters": LLAMA3}),
]
ENGINES = [
    EngineConfig(precision="fp32", max_batched_tokens=1, page_size=1, overlap=True),
    EngineConfig(precision="fp32", max_batched_tokens=7, page_size=4, cache_tokens=64, overlap=False),
    EngineConfig(precision="fp32", max_batched_tokens=16, page_size=16, max_sequences=3, overlap=True),
    EngineConfig(precision="fp32", max_batched_tokens=64, page_size=1, cache_tokens=70, overlap=True),
    EngineConfig(precision="fp32", max_batched_tokens=33, page_size=32, cache_tokens=96, overlap=False),
    EngineConfig(precision="fp32", max_batched_tokens=50, page_size=4, max_sequences=5, overlap=False),
]


@pytest.fixture(scope="module")
def near_ties() -> Iterator[list[int]]:
    """Differing tokens of each comparison; almost every answer must be the very same."""
    counts: list[int] = []
    yield counts
    print(f"\n{sum(counts)} tokens differ from transformers' at near ties")
    assert sum(counts) <= 3


@pytest.fixture(scope="module", params=["compiled", "torch"])
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """With the kernels that are compiled where there is a compiler, and without."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(native, "library", lambda: None)
        yield


def count_near_ties(model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int]) -> int:
    """Tokens of ``answer`` that are not transformers' choice; all of them must be as good as its choice."""
    logits = teacher_forced(model, prompt, answer)
    highest = logits.max(-1).values
    behind = highest - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    differs = logits.argmax(-1) != torch.tensor(answer)
    assert (behind <= NEAR_TIE * logits.abs().amax(-1)).all(), (prompt, answer, behind)
    return int(differs.sum())


def some_prompts(vocabulary: int, seed: int, lengths: Sequence[int] = PROMPT_TOKENS) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(vocabulary) for _ in range(length)] for length in lengths]


def check(engine: Engine, model: PreTrainedModel, prompts: list[list[int]], lengths: Sequence[int]) -> int:
    requests = [Request(prompt, length, ignore_end_token=True) for prompt, length in zip(prompts, lengths, strict=True)]
    near_ties = 0
    for prompt, length, completion in zip(prompts, lengths, engine.generate(requests), strict=True):
        assert (len(completion.token_ids), completion.finish_reason) == (length, FinishReason.LENGTH)
        assert completion.prompt_tokens == len(prompt)
        near_ties += count_near_ties(model, prompt, completion.token_ids)
    return near_ties


# Tokens


# By default every architecture, rotation, bias, engine and stored type, and the narrowest and widest heads.
BY_DEFAULT = (1, 5, 6, 7, 8, 9, 11, 12, 13, 16, 17, 19)


@pytest.mark.parametrize(
    "number",
    [*BY_DEFAULT, *every(*sorted(set(range(len(CHECKPOINTS))) - set(BY_DEFAULT)))],
    ids=lambda number: "-".join(map(str, CHECKPOINTS[number][:4])),
)
def test_greedy_tokens_are_those_of_transformers(number: int, near_ties: list[int], tmp_path: Path) -> None:
    architecture, heads, kv_heads, head_dim, hidden, vocabulary, shards, stored, others = CHECKPOINTS[number]
    model = make_checkpoint(
        tmp_path,
        architecture,
        seed=number,
        stored=stored,
        shards=shards,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=hidden,
        vocab_size=vocabulary,
        **others,
    )
    assert len(list(tmp_path.glob("*.safetensors"))) == shards
    prompts = some_prompts(vocabulary, number)

    requests = [Request(prompt, ANSWER_TOKENS, ignore_end_token=True) for prompt in prompts]
    completions = Engine(tmp_path, EngineConfig(precision="fp32")).generate(requests)
    for prompt, completion in list(zip(prompts, completions, strict=True))[None if ALL else -1 :: 2]:
        expected = generate(model, prompt, ANSWER_TOKENS)
        near_ties.append(count_near_ties(model, prompt, completion.token_ids))
        assert completion.token_ids == expected or near_ties[-1]

    lengths = [random.Random(number).randint(1, ANSWER_TOKENS) for _ in prompts]
    for config in ENGINES[number % 2 :: 2] if ALL else ENGINES[number % 6 :][:1]:
        near_ties.append(check(Engine(tmp_path, config), model, prompts, lengths))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    directory = tmp_path_factory.mktemp("shared")
    return directory, make_checkpoint(
        directory, num_hidden_layers=3, hidden_size=48, num_attention_heads=6, num_key_value_heads=2, head_dim=32
    )


UNSCALED = {name: value for name, value in LLAMA3.items() if name != "original_max_position_embeddings"}


@pytest.mark.parametrize(
    ("architecture", "shape", "keys", "absent"),
    [
        (
            "Llama",
            {"rope_parameters": LLAMA3},
            {"rope_parameters": UNSCALED, "original_max_position_embeddings": 64},
            (),
        ),
        (
            "Llama",
            {"rope_parameters": LLAMA3},
            {"rope_scaling": UNSCALED, "original_max_position_embeddings": 64},
            ("rope_parameters",),
        ),
        (
            "Qwen3",
            {"rope_parameters": LLAMA3},
            {
                "rope_parameters": {**LLAMA3, "original_max_position_embeddings": 32},
                "original_max_position_embeddings": 64,
            },
            (),
        ),
        ("Mistral", {"num_attention_heads": 16, "num_key_value_heads": 8}, {}, ("num_key_value_heads",)),
        ("Qwen2", {"num_attention_heads": 64, "num_key_value_heads": 32}, {}, ("num_key_value_heads",)),
        ("Qwen3", {"num_attention_heads": 64, "num_key_value_heads": 32}, {}, ("num_key_value_heads",)),
        ("Qwen3", {"head_dim": 128}, {}, ("head_dim",)),
        ("Llama", {"num_key_value_heads": 4}, {}, ("num_key_value_heads", "head_dim")),
    ],
)
def test_keys_left_out_or_moved_are_read_as_by_transformers(
    architecture: str,
    shape: dict[str, object],
    keys: dict[str, object],
    absent: Sequence[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_checkpoint(tmp_path, architecture, **shape)
    path = tmp_path / "config.json"
    values = {**json.loads(path.read_text()), **keys}
    path.write_text(json.dumps({name: value for name, value in values.items() if name not in absent}))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=FP32).eval()
    prompt = [place * 7 % 301 for place in range(100)]
    engine = Engine(tmp_path, EngineConfig(precision="fp32", cache_tokens=256))
    answer, logits = answer_and_logits(engine, prompt, 4, monkeypatch)
    torch.testing.assert_close(logits, teacher_forced(model, prompt, answer), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("page_size", "overlap"), [(1, True), (4, False), *every((1, False), (4, True), (16, False), (16, True))]
)
def test_preempted_requests_go_on_where_they_were(
    shared: tuple[Path, PreTrainedModel], kernels: None, page_size: int, overlap: bool, near_ties: list[int]
) -> None:
    directory, model = shared
    config = EngineConfig(
        precision="fp32", page_size=page_size, cache_tokens=64, max_batched_tokens=24, overlap=overlap
    )
    engine = Engine(directory, config)
    expect_short_answers(engine._scheduler)
    near_ties.append(check(engine, model, some_prompts(301, 1, [5] * 8), [40, 20, *range(28, 40, 2)]))
    state = engine.state()
    assert state.preemptions > 5
    assert state.recomputed_tokens > 100
    assert state.pages_free == state.pages


@settings(max_examples=examples(30))
@given(data=st.data())
def test_nothing_about_the_batch_changes_a_token(
    shared: tuple[Path, PreTrainedModel], kernels: None, near_ties: list[int], data: st.DataObject
) -> None:
    directory, model = shared
    sizes = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 16)), min_size=1, max_size=8)
    prompt_tokens, lengths = zip(*data.draw(sizes, label="prompt and answer tokens"), strict=True)
    longest = max(map(sum, zip(prompt_tokens, lengths, strict=True)))
    page_size = data.draw(st.sampled_from([1, 3, 4, 16, 32, 64]), label="page_size")
    pages = -(-longest // page_size) + data.draw(st.integers(0, 20), label="more pages")
    config = EngineConfig(
        precision="fp32",
        max_batched_tokens=data.draw(st.integers(1, 70), label="max_batched_tokens"),
        max_sequences=data.draw(st.integers(1, 8), label="max_sequences"),
        page_size=page_size,
        cache_tokens=pages * page_size,
        overlap=data.draw(st.booleans(), label="overlap"),
    )
    prompts = some_prompts(301, data.draw(st.integers(0, 2**32), label="seed"), prompt_tokens)
    near_ties.append(check(Engine(directory, config), model, prompts, lengths))


# Logits


def recorded_logits(
    engine: Engine, requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Answers of ``requests`` and the logits [tokens, vocabulary] that each was chosen from."""
    rows: dict[int, list[torch.Tensor]] = defaultdict(list)
    request_ids: list[int] = []
    launch, forward = ModelRunner.launch, runner.forward

    def recording_launch(self, plan, *arguments, **options):
        request_ids[:] = plan.request_id[plan.sample].tolist()
        return launch(self, plan, *arguments, **options)

    def recording_forward(*arguments):
        logits = forward(*arguments)
        for request_id, row in zip(request_ids, logits, strict=True):
            rows[request_id].append(row.float())
        return logits

    monkeypatch.setattr(ModelRunner, "launch", recording_launch)
    monkeypatch.setattr(runner, "forward", recording_forward)
    answers = [completion.token_ids for completion in engine.generate(requests)]
    return answers, [torch.stack(rows[request_id]) for request_id in sorted(rows)]


ERRORS: dict[Precision, tuple[float, float]] = {"fp32": (5e-6, 1e-6), "bf16": (0.08, 0.01), "fp8": (0.8, 0.1)}


@pytest.mark.parametrize(
    ("architecture", "precision"),
    [
        *(("Llama", "fp32"), ("Qwen3", "bf16"), ("Qwen3", "fp8"), ("Llama", "fp8")),
        *every(("Llama", "bf16"), ("Qwen3", "fp32")),
    ],
)
def test_logit_error(
    architecture: str,
    precision: Precision,
    kernels: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Errors against fp32 as a share of the standard deviation of the logits; typical is the root mean square.

    Weights are exact in bf16, so that is an error of computing, while fp8 rounds weights, keys and values too. Prompts
    longer than the row budget, and a small cache: chunks with a prefix, decodes and a preempted request are all in it.
    """
    model = make_checkpoint(
        tmp_path, architecture, stored=torch.bfloat16, gain=1.0, hidden_size=64, head_dim=32, vocab_size=1000
    )
    prompts = some_prompts(1000, 0)
    requests = [Request(prompt, ANSWER_TOKENS, ignore_end_token=True) for prompt in prompts]
    engine = Engine(tmp_path, EngineConfig(precision=precision, max_batched_tokens=24, page_size=16, cache_tokens=176))
    expect_short_answers(engine._scheduler)
    answers, logits = recorded_logits(engine, requests, monkeypatch)
    assert engine.state().preemptions

    def error(actual: torch.Tensor) -> torch.Tensor:
        return (actual - expected) / expected.std()

    expected = torch.cat([teacher_forced(model, *pair) for pair in zip(prompts, answers, strict=True)])
    largest, typical = error(torch.cat(logits)).abs().max(), error(torch.cat(logits)).square().mean().sqrt()
    print(f"\n{architecture} {precision}: largest error {largest:.1e}, typical {typical:.1e}")
    assert largest < ERRORS[precision][0]
    assert typical < ERRORS[precision][1]
    if precision == "bf16":
        model.to(torch.bfloat16)
        peer = torch.cat([teacher_forced(model, *pair) for pair in zip(prompts, answers, strict=True)]).float()
        assert typical < 1.1 * error(peer).square().mean().sqrt()


# Ends


@pytest.fixture
def ending(tmp_path: Path) -> tuple[Path, list[int], list[int], int]:
    """A checkpoint whose end token greedy decoding meets: directory, prompt, answer without end, tokens to the end."""
    model = make_checkpoint(tmp_path)
    (prompt,) = some_prompts(301, 0, [7])
    answer = generate(model, prompt, 12)
    tokens = next(place for place in range(4, 12) if answer[place] not in answer[:place]) + 1
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [300, answer[tokens - 1]]}))
    return tmp_path, prompt, answer, tokens


def test_an_answer_ends_where_transformers_ends_it(ending: tuple[Path, list[int], list[int], int]) -> None:
    directory, prompt, answer, tokens = ending
    ids = torch.tensor([prompt])
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, pad_token_id=0)
    assert expected[0].tolist() == prompt + answer[:tokens]

    engine = Engine(directory, EngineConfig(precision="fp32"))
    (completion,) = engine.generate([Request(prompt, 12)])
    assert (completion.token_ids, completion.finish_reason) == (answer[:tokens], FinishReason.STOP)
    (completion,) = engine.generate([Request(prompt, 12, ignore_end_token=True)])
    assert (completion.token_ids, completion.finish_reason) == (answer, FinishReason.LENGTH)


@pytest.mark.parametrize("generation_config", ["names another", "names none", "is absent"])
def test_end_tokens_are_taken_from_where_transformers_takes_them(tmp_path: Path, generation_config: str) -> None:
    model = make_checkpoint(tmp_path)
    (prompt,) = some_prompts(301, 0, [7])
    answer = generate(model, prompt, 12)
    early, late = [place for place in range(2, 12) if answer[place] not in answer[:place]][:2]
    config, generation = tmp_path / "config.json", tmp_path / "generation_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": answer[early]}))
    values = json.loads(generation.read_text())
    values.pop("eos_token_id", None)
    generation.write_text(json.dumps(values))
    if generation_config == "names another":
        generation.write_text(json.dumps(values | {"eos_token_id": answer[late]}))
    elif generation_config == "is absent":
        generation.unlink()

    ids = torch.tensor([prompt])
    peer = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected = peer.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, pad_token_id=0)
    (completion,) = Engine(tmp_path, EngineConfig(precision="fp32")).generate([Request(prompt, 12)])
    assert prompt + completion.token_ids == expected[0].tolist()
    ends = {"names another": late + 1, "names none": 12, "is absent": early + 1}
    assert len(completion.token_ids) == ends[generation_config]


@pytest.mark.parametrize("overlap", [False, True])
def test_stop_ids_and_limits(ending: tuple[Path, list[int], list[int], int], overlap: bool) -> None:
    directory, prompt, answer, tokens = ending
    engine = Engine(directory, EngineConfig(precision="fp32", overlap=overlap))
    cases = [
        (Request(prompt, 12, stop_token_ids=(answer[2],)), answer.index(answer[2]) + 1, FinishReason.STOP),
        (Request(prompt, 12, stop_token_ids=(answer[0], 5)), 1, FinishReason.STOP),
        (Request(prompt, 1), 1, FinishReason.LENGTH),
        (Request(prompt, 1, stop_token_ids=(answer[0],)), 1, FinishReason.STOP),
        (Request(prompt, tokens), tokens, FinishReason.STOP),
        (Request(prompt, tokens + 1), tokens, FinishReason.STOP),  # overlap has launched the last step by then
        (Request(prompt, tokens - 1), tokens - 1, FinishReason.LENGTH),
        (Request(prompt, 12, stop_token_ids=(answer[tokens - 1],), ignore_end_token=True), tokens, FinishReason.STOP),
    ]
    completions = engine.generate([request for request, _, _ in cases])
    for (request, length, reason), completion in zip(cases, completions, strict=True):
        assert (completion.token_ids, completion.finish_reason) == (answer[:length], reason), request
    while engine.busy:
        assert engine.step() == []
    state = engine.state()
    assert (state.in_flight, state.running, state.pages_free) == (0, 0, state.pages)
