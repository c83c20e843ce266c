"""What the tests of engines on a GPU share: when they run, a model's shape, small sizes, prompts, logits."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint, teacher_forced
from engines import answer_and_logits
from torch import Tensor
from transformers import PreTrainedModel

from megatoken.engine import Engine, Request

MARKS = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
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
SIZES = {"max_batched_tokens": 64, "max_sequences": 16, "cache_tokens": 4096}


def bf16_checkpoint(directory: Path, architecture: str = "Llama", **changes: object) -> PreTrainedModel:
    return make_checkpoint(directory, architecture, stored=torch.bfloat16, gain=1.0, **{**SHAPE, **changes})


def some_prompts(lengths: Iterable[int]) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(SHAPE["vocab_size"]) for _ in range(length)] for length in lengths]


def mixed_requests() -> list[Request]:
    """Short prompts with long answers to long ones with short."""
    prompts = zip(some_prompts(range(1, 100, 3)), range(40, 7, -1), strict=True)
    return [Request(prompt, tokens, ignore_end_token=True) for prompt, tokens in prompts]


def error_from_transformers(engine: Engine, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> float:
    """Root mean square of the difference from ``model`` in fp32, as a share of the deviation of the logits."""
    errors = []
    for prompt in some_prompts([1, 33, 200]):
        answer, logits = answer_and_logits(engine, prompt, 24, monkeypatch)
        expected = teacher_forced(model, prompt, answer)
        errors.append((logits - expected) / expected.std())
    return float(torch.cat(errors).square().mean().sqrt())


def linears(engine: Engine) -> Iterator[tuple[list[str], object]]:
    """Those of all layers as the back end packed them, each with the names of its parts."""
    for number, layer in enumerate(engine._runner._weights.layers):
        attention, mlp = f"model.layers.{number}.self_attn", f"model.layers.{number}.mlp"
        yield [f"{attention}.{part}_proj" for part in "qkv"], layer.qkv
        yield [f"{attention}.o_proj"], layer.output
        yield [f"{mlp}.{part}_proj" for part in ("gate", "up")], layer.gate_up
        yield [f"{mlp}.down_proj"], layer.down


def norms_and_vocabulary(engine: Engine) -> list[Tensor]:
    """All weights that are in no layer's linears."""
    weights = engine._runner._weights
    norms = [norm for layer in weights.layers for norm in (layer.input_norm_D, layer.post_norm_D)]
    return [weights.embedding_VD, weights.norm_D, weights.head.weight, *norms]
