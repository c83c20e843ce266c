"""The highest logit by a product in e4m3 and a decision in bf16, against the bf16 product and its highest."""

from __future__ import annotations

import pytest
import torch
from gpu_kernels import DEVICE, MARKS, ON_GPU, needs_gpu
from torch import Tensor

from megatoken.engine.ops import NO_TOKEN
from megatoken.engine.ops.screened_head import BLOCK, ScreenedHead, decide
from megatoken.engine.schemes.fp8_weight import quantise_rows

pytestmark = MARKS
TOKENS, WIDTH = 2 * BLOCK + 48, 256


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)


def rounded(x: Tensor) -> Tensor:
    values, scale = quantise_rows(x)
    return values.float() * scale


def screened(head: ScreenedHead, inputs_SD: Tensor) -> Tensor:
    """As ``ScreenedHead.greedy``, whose product only a GPU has."""
    if ON_GPU:
        return head.greedy(inputs_SD)
    logits_SV = (rounded(inputs_SD) @ rounded(head.head_VD).t()).bfloat16()
    return decide(logits_SV, inputs_SD, head.head_VD, head.margin_D)


def highest(head_VD: Tensor, inputs_SD: Tensor) -> Tensor:
    """Logits as the bf16 head rounds them; the first among equals."""
    logits = (inputs_SD.double() @ head_VD.double().t()).bfloat16()
    return (logits == logits.amax(1, keepdim=True)).int().argmax(1)


@pytest.mark.parametrize("outliers", [False, True])
def test_the_token_is_that_of_the_bf16_head(outliers: bool) -> None:
    head_VD, inputs_SD = normal(TOKENS, WIDTH, seed=1), normal(6, WIDTH, seed=2)
    if outliers:  # a few inputs a hundred times the others, and tokens of very different lengths
        inputs_SD[:, ::97] *= 100.0
        head_VD *= torch.linspace(0.2, 2.0, TOKENS, device=DEVICE).bfloat16()[:, None]
    head = ScreenedHead.pack(head_VD)
    expected = highest(head_VD, inputs_SD)
    assert screened(head, inputs_SD).tolist() == expected.tolist()
    e4m3_alone = (rounded(inputs_SD) @ rounded(head_VD).t()).argmax(1)
    assert outliers or (e4m3_alone != expected).any(), "the decision in bf16 matters"


def test_the_first_of_equals_in_every_block() -> None:
    head_VD, inputs_SD = normal(TOKENS, WIDTH, seed=1), normal(3, WIDTH, seed=2)
    best = highest(head_VD, inputs_SD)[0]
    head_VD[[7, BLOCK + 1, TOKENS - 1]] = head_VD[best].clone()
    assert screened(ScreenedHead.pack(head_VD), inputs_SD)[0] == min(7, int(best))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_have_no_token(bad: float) -> None:
    head_VD, inputs_SD = normal(TOKENS, WIDTH, seed=1), normal(3, WIDTH, seed=2)
    inputs_SD[1, 5] = bad
    tokens = screened(ScreenedHead.pack(head_VD), inputs_SD)
    assert (tokens == NO_TOKEN).tolist() == [False, True, False]


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "width"), [(128_256, 4096), (32_000, 8192), (201_088, 2880)])
def test_heads_of_real_sizes(tokens: int, width: int) -> None:
    head_VD, inputs_SD = normal(tokens, width, seed=1), normal(1024, width, seed=2)
    logits_SV = inputs_SD @ head_VD.t()
    found = ScreenedHead.pack(head_VD).greedy(inputs_SD)
    expected = logits_SV.argmax(1)
    differ = found != expected
    # Sums in another order round some logits to another bf16 number, so two that are equal or neighbours may change.
    top = logits_SV.gather(1, torch.stack((found, expected), 1)).float()
    assert differ.float().mean() < 0.02
    assert ((top[:, 0] - top[:, 1]).abs() <= 2.0**-7 * top[:, 1].abs()).all()
