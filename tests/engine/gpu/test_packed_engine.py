"""Engines whose four-bit weights stay packed on a GPU, against the same weights expanded when they are loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from engines import answer_and_logits
from gpu_engines import MARKS, bf16_checkpoint, linears, mixed_requests, some_prompts

from megatoken.engine import Engine, EngineConfig
from megatoken.engine.ops.cuda_fp8 import GatedLinear
from megatoken.engine.ops.packed_product import obstacle
from megatoken.engine.schemes import FP8, FP8_PACKED
from megatoken.engine.schemes.packed4 import draw, expand
from megatoken.quantization import write

pytestmark = [
    *MARKS,
    pytest.mark.skipif(
        torch.cuda.is_available() and obstacle(torch.device("cuda")) is not None, reason="needs cuda-bindings"
    ),
]
DEVICE = torch.device("cuda")
SIZES = {"max_batched_tokens": 256, "max_sequences": 96, "cache_tokens": 16_384}
EXPANSION_ERROR = 0.12
"""Of logits of weights that are e4m3 in one engine and exact in the other, as a share of the logits' deviation."""


@pytest.fixture(scope="module", params=["nvfp4", "mxfp4"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    bf16_checkpoint(folder / "plain")
    write.quantize(folder / "plain", request.param, folder / "packed")
    return folder / "packed"


def open_engine(checkpoint: Path, packed: bool | None, **changes: object) -> Engine:
    return Engine(checkpoint, EngineConfig("fp8", packed_weights=packed, **{**SIZES, **changes}))


@pytest.mark.parametrize("tokens", [1, 8, 64, 65, 300, 600])
def test_a_packed_linear_is_the_expanded_one(tokens: int) -> None:
    weight = draw(torch.randn(1024, 512, device=DEVICE) / 20)
    packed, whole = FP8_PACKED.cuda_linear(weight, None), FP8.cuda_linear(expand(weight)[0], None)
    x = torch.randn(tokens, 512, device=DEVICE).bfloat16()
    each = [linear.product(x).float() for linear in (packed, whole)]
    if tokens > 64:
        assert torch.equal(*each)
    else:  # the codes themselves are multiplied, not what e4m3 makes of them
        assert (each[0] - each[1]).square().mean().sqrt() < 0.05 * each[1].square().mean().sqrt()
    gated = [linear.as_gated() for linear in (packed, whole)]
    down = FP8.cuda_linear(FP8.quantise(torch.randn(64, 512, device=DEVICE)), None)
    for linear in (*gated, down):
        linear.largest_input = torch.tensor(4.0, device=DEVICE)
        linear.fix_input_scale()
    values = (x.float() / gated[0].input_scale.value).to(torch.float8_e4m3fn)
    each = [linear.gated(values, down).float() for linear in gated]
    if tokens > 64:
        assert torch.equal(*each)
    else:
        assert (each[0] - each[1]).square().mean().sqrt() < 0.1 * each[1].square().mean().sqrt()


def test_logits(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expanded, packed = (open_engine(checkpoint, stays) for stays in (False, True))
    assert packed.memory_plan.packed_weights
    assert not expanded.memory_plan.packed_weights
    for _, linear in linears(packed):
        assert linear.packed is not None
        assert linear.weight.is_meta
    assert isinstance(packed._runner._weights.layers[0].gate_up, GatedLinear)
    for prompt in some_prompts([1, 33, 200]):
        _, logits = answer_and_logits(expanded, prompt, 1, monkeypatch)
        _, others = answer_and_logits(packed, prompt, 1, monkeypatch)
        first = (logits[0] - others[0]) / logits[0].std()
        assert first.square().mean().sqrt() < EXPANSION_ERROR


def test_answers_are_the_same_every_time_with_graphs_and_without(checkpoint: Path) -> None:
    answers = []
    for graphs in (True, True, False):
        engine = open_engine(checkpoint, True, cuda_graphs=graphs)
        answers.append([answer.token_ids for answer in engine.generate(mixed_requests()[:1])])
    assert answers[0] == answers[1] == answers[2]


def test_undecided_weights_stay_packed_only_where_they_do_not_fit(checkpoint: Path) -> None:
    assert not open_engine(checkpoint, None).memory_plan.packed_weights
    taken = [open_engine(checkpoint, stays).memory_plan.total_bytes for stays in (False, True)]
    assert taken[1] < taken[0]
    engine = open_engine(checkpoint, None, memory_bytes=sum(taken) // 2)
    assert engine.memory_plan.packed_weights
    assert engine.config.packed_weights


def test_random_weights_stay_packed() -> None:
    engine = Engine("tiny", EngineConfig("fp8", packed_weights=True, **SIZES), random_weights=True)
    assert all(linear.packed is not None for _, linear in linears(engine))
    assert len(engine.generate(mixed_requests()[:2])) == 2
