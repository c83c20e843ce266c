"""Mixtures of experts: against transformers in fp32, against their definition, and what plans say of them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import MIXTURES, generate, is_greedy, make_checkpoint, teacher_forced
from engines import answer_and_logits, make_engine, request
from over_admission import expect_short_answers
from transformers import PreTrainedModel

from examples import every
from megatoken.engine import Engine, EngineConfig, Request
from megatoken.engine.checkpoint import RandomWeights, read_config
from megatoken.engine.config import SHAPES, ClampedSwiglu, ExpertsConfig, sharded
from megatoken.engine.cost_model import CostModel
from megatoken.engine.gpus import find_gpu
from megatoken.engine.memory import plan_memory_of, weight_bytes
from megatoken.engine.ops import cpu, reference
from megatoken.engine.schemes import BF16, find_scheme
from megatoken.errors import CapacityError, CheckpointError

CPU = torch.device("cpu")
ANSWER_TOKENS = 6
ENGINES = {
    "one token": {"max_batched_tokens": 1, "page_size": 1},
    "chunks": {"max_batched_tokens": 7, "cache_tokens": 64, "overlap": False},
    "prefix pages": {"max_batched_tokens": 16, "page_size": 4, "cache_tokens": 400, "prefix_cache": True},
}


@pytest.fixture(scope="module", params=[*MIXTURES, "Qwen3Moe unnormalized"])
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    directory = tmp_path_factory.mktemp("mixture")
    architecture, *others = request.param.split()
    changes = {"norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": []} if others else {}
    return directory, make_checkpoint(directory, architecture, **MIXTURES[architecture] | changes)


def prompts() -> list[list[int]]:
    draw = random.Random(7)
    start = [draw.randrange(301) for _ in range(12)]
    return [start[:length] + [draw.randrange(301) for _ in range(length)] for length in (1, 3, 12, 20)]


def answers(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    requests = [Request(prompt, ANSWER_TOKENS, ignore_end_token=True) for prompt in prompts]
    return [completion.token_ids for completion in engine.generate(requests)]


# Against transformers


@pytest.mark.parametrize("changes", ENGINES.values(), ids=ENGINES)
def test_tokens_are_those_of_transformers(mixture: tuple[Path, PreTrainedModel], changes: dict[str, object]) -> None:
    directory, model = mixture
    engine = make_engine(directory, **changes)
    found = answers(engine, prompts())
    assert all(len(answer) == ANSWER_TOKENS for answer in found)
    assert all(is_greedy(model, prompt, answer) for prompt, answer in zip(prompts(), found, strict=True))
    if changes.get("prefix_cache"):
        assert answers(engine, prompts()) == found
        assert engine.state().prefix_cache_hits > 0


def test_preempted_requests_answer_as_alone(mixture: tuple[Path, PreTrainedModel]) -> None:
    directory, model = mixture
    engine = make_engine(directory)
    expect_short_answers(engine._scheduler)
    requests = [request(seed, 12, 3 + seed * 7 % 20) for seed in range(8)]
    for one, completion in zip(requests, engine.generate(requests), strict=True):
        assert len(completion.token_ids) == 12
        assert is_greedy(model, one.prompt, completion.token_ids)
    assert engine.state().preemptions > 0


def test_logits_are_those_of_transformers(
    mixture: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_logits(*mixture, 1, monkeypatch)


@pytest.mark.parametrize("architecture", ["Qwen3Moe", *every("GptOss", "Mixtral")])
def test_two_ranks_compute_what_one_does(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes seconds: the second rank is a process. Ranks of GptOss also answer in ``test_window_pages``."""
    check_logits(tmp_path, make_checkpoint(tmp_path, architecture, **MIXTURES[architecture]), 2, monkeypatch)


def check_logits(directory: Path, model: PreTrainedModel, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 1e-5 of the largest; so is the answer that they give."""
    prompt = prompts()[-1]
    answer, logits = answer_and_logits(make_engine(directory, tensor_parallel=ranks), prompt, 6, monkeypatch)
    assert answer == generate(model, prompt, 6)
    expected = teacher_forced(model, prompt, answer)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


# Against the definition


@pytest.mark.parametrize(
    ("precision", "fp8_scales"), [("fp32", None), ("bf16", None), ("fp8", "tensor"), ("fp8", "row")]
)
@pytest.mark.parametrize("tokens", [1, 9, 70])
@pytest.mark.parametrize("clamped", [None, ClampedSwiglu(1.702, 0.5)])
def test_a_mixture_on_the_cpu_is_its_definition(
    tokens: int, precision: str, fp8_scales: str | None, clamped: ClampedSwiglu | None
) -> None:
    """Skewed: one expert is in every token, another in none; some have one token, some many."""
    config = ExpertsConfig(7, 3, 48, normalized=True, layers=(0,), biases=clamped is not None, activation=clamped)
    scheme = find_scheme(precision, fp8_scales)
    dtype, random_ = scheme.activation_dtype, torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=random_) * shape[-1] ** -0.5).to(dtype)

    def bias(rows: int) -> torch.Tensor | None:
        return normal(rows) if clamped else None

    each = [[(normal(*sides), bias(sides[0])) for sides in ((48, 32), (48, 32), (32, 48))] for _ in range(7)]
    x_TD, router = normal(tokens, 32), (30 * normal(7, 32), bias(7))
    x_TD[:, 0] = 1.0
    router[0][2, 0], router[0][5, 0] = 1000.0, -1000.0
    packed = cpu.pack_experts(router, iter(each), config, scheme)
    linears = [tuple(reference.pack_linear(*part, scheme) for part in parts) for parts in each]
    exact = reference.experts(x_TD, router, linears, config)
    # Rounded between the products in other places; fp8 may take the neighbour there.
    tolerance = {"fp32": 1e-5, "bf16": 0.02, "fp8": 0.05}[precision]
    torch.testing.assert_close(cpu.experts(x_TD, packed), exact, rtol=tolerance, atol=tolerance)


def test_an_expert_that_no_token_chooses_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ExpertsConfig(64, 2, 16, normalized=True, layers=(0,))
    weights = RandomWeights(replace(SHAPES["tiny"], layers=1, hidden_size=16, experts=config))
    each = (
        [(weights.read(f"{name}.weight", torch.float32), None) for name in config.names(0, one)] for one in range(64)
    )
    router = weights.read("model.layers.0.mlp.gate.weight", torch.float32), None
    packed = cpu.pack_experts(router, each, config, find_scheme("fp32"))
    products = []
    linear = cpu.linear
    monkeypatch.setattr(cpu, "linear", lambda *arguments: products.append(1) or linear(*arguments))
    cpu.experts(torch.ones(5, 16), packed)  # five tokens with the same two experts
    assert len(products) <= 3 * 2


# Checkpoints and shapes


def changed_config(directory: Path, **changes: object) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


def test_layers_are_dense_where_the_checkpoint_says_so(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Qwen3Moe", **MIXTURES["Qwen3Moe"])
    assert read_config(tmp_path).experts == ExpertsConfig(6, 3, 32, normalized=True, layers=(0, 2))
    changed_config(tmp_path, mlp_only_layers=[], decoder_sparse_step=2, norm_topk_prob=None, num_local_experts=None)
    changed_config(tmp_path, num_experts=5)  # older releases
    assert read_config(tmp_path).experts == ExpertsConfig(5, 3, 32, normalized=False, layers=(1,))
    assert read_config(changed_config(tmp_path, mlp_only_layers=[0, 1, 2])).experts is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok is 7; the model has 6 experts"),
        ({"mlp_only_layers": [3]}, r"mlp_only_layers is \[3\]; expected a list of layers, 0 to 2"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size is 0; expected an integer"),
        ({"num_local_experts": 7}, r"mlp.gate.weight' has shape \[6, 32\], config.json implies \[7, 32\]"),
    ],
)
def test_what_cannot_be_a_mixture_is_refused(changes: dict[str, object], words: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Qwen3Moe", **MIXTURES["Qwen3Moe"])
    with pytest.raises(CheckpointError, match=words):
        make_engine(changed_config(tmp_path, **changes))


@pytest.mark.parametrize(
    ("name", "parameters", "active"),
    [
        ("qwen3-30b-a3b", 30_532_122_624, 3_353_032_704),
        ("mixtral-8x7b", 46_702_792_704, 12_879_925_248),
        ("gpt-oss-20b", 20_914_757_184, 4_187_440_704),
        ("gpt-oss-120b", 116_829_156_672, 5_711_982_912),
    ],
)
def test_named_mixtures_have_the_published_number_of_parameters(name: str, parameters: int, active: int) -> None:
    assert (SHAPES[name].parameters, SHAPES[name].active_parameters) == (parameters, active)
    assert SHAPES["llama3.1-8b"].active_parameters == SHAPES["llama3.1-8b"].parameters


def test_random_mixtures_have_their_own_hash() -> None:
    shape = replace(SHAPES["tiny"], experts=ExpertsConfig(4, 2, 64, normalized=True, layers=(1, 3)))
    other = replace(shape, experts=replace(shape.experts, active=1))
    assert len({RandomWeights(one).content_hash for one in (SHAPES["tiny"], shape, other)}) == 3


def test_an_expert_is_cut_evenly_or_not_at_all() -> None:
    assert sharded(SHAPES["qwen3-30b-a3b"], 4).experts.intermediate_size == 192
    odd = replace(SHAPES["tiny"], experts=ExpertsConfig(4, 2, 63, normalized=True, layers=(1,)))
    with pytest.raises(CapacityError, match="tensor_parallel 2 does not divide the 63 intermediate_size of an expert"):
        sharded(odd, 2)


# Plans


def test_the_memory_plan_counts_every_expert() -> None:
    shape = SHAPES["qwen3-30b-a3b"]
    assert weight_bytes(shape, BF16, "cuda") == 2 * shape.parameters
    outputs = 48 * 128 * (2 * 768 + 2048)
    bytes_of = {scales: weight_bytes(shape, find_scheme("fp8", scales), "cuda") for scales in ("tensor", "row")}
    assert bytes_of["tensor"] == 2 * shape.parameters - shape.linear_parameters + 4 * outputs
    assert bytes_of["row"] == 2 * shape.parameters - shape.linear_parameters + 4 * shape.linear_outputs
    plan = plan_memory_of(shape, EngineConfig("fp8"), "cuda", 80 * 10**9)
    assert plan.max_batched_tokens == 2048
    assert plan.cache_bytes > 30e9


def test_few_tokens_read_the_experts_that_they_choose() -> None:
    """One token reads its own experts, many read all; the operations are those of the active ones."""
    shape = SHAPES["qwen3-30b-a3b"]
    costs = CostModel(shape, BF16, find_gpu("H200"))
    one, many = (costs.step_of(tokens, 100 * tokens, [], tokens) for tokens in (1, 256))
    rate = costs._weights_rate
    assert one.products == pytest.approx(2 * shape.active_linear_parameters / rate, rel=0.01)
    assert 2 * shape.linear_parameters / rate < many.products < 2.2 * shape.linear_parameters / rate
    dense = replace(shape, experts=None, intermediate_size=8 * 768)
    assert dense.linear_parameters == shape.active_linear_parameters
    prompt = [(0, 2048)] * 16
    mixture_seconds, dense_seconds = (
        CostModel(one, BF16, find_gpu("H200")).step_of(0, 0, prompt, 16).products for one in (shape, dense)
    )
    # Two products of depth 768 for each choice instead of one of 6,144, and more weights.
    assert dense_seconds < mixture_seconds < 1.8 * dense_seconds


def test_two_ranks_take_less_time_than_one() -> None:
    shape = SHAPES["mixtral-8x7b"]
    costs = CostModel(shape, find_scheme("fp8"), find_gpu("H200"), ranks=2)
    alone = CostModel(shape, find_scheme("fp8"), find_gpu("H200"))
    assert costs.step_of(64, 6400, [], 64).seconds < alone.step_of(64, 6400, [], 64).seconds
