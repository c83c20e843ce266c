"""``routing.choose_experts`` in Triton, and choices sorted by expert: two launches instead of a dozen.

Choices of one expert stand in any order, which changes no result: no row of a product depends on others.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatoken.engine.config import ExpertsConfig
from megatoken.engine.ops.fused import require_contiguous


class Routes(NamedTuple):
    """Which tokens each expert computes. A choice is token * C + its number."""

    weights_TC: Tensor  # fp32
    chosen_TC: Tensor  # int32
    order_R: Tensor  # int32, the choices sorted by expert
    starts: Tensor  # int32 [X + 1], the first of each expert in ``order_R``, and R


@triton.jit(do_not_specialize=["tokens"])
def _choose_kernel(
    logits, bias, weights, chosen, places, counts, tokens, X: tl.constexpr, C: tl.constexpr, NORMALIZED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    x, c = tl.arange(0, BLOCK_X)[None, :], tl.arange(0, BLOCK_C)[None, :]
    live = token < tokens
    score = tl.load(logits + token * X + x, mask=live & (x < X), other=float("-inf"))
    score = tl.where(live, score, 0.0)
    if bias is not None:
        score += tl.load(bias + x, mask=x < X, other=0.0).to(tl.float32)
    share = tl.exp(score - tl.max(score, axis=1)[:, None])
    share /= tl.sum(share, axis=1)[:, None]
    weight = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    expert = tl.zeros([BLOCK_T, BLOCK_C], tl.int32)
    total = tl.zeros([BLOCK_T], tl.float32)
    for number in tl.static_range(C):
        best = tl.max(share, axis=1)
        which = tl.minimum(tl.argmax(share, axis=1), X - 1)  # scores that are NaN must not lead out of bounds
        weight = tl.where(c == number, best[:, None], weight)
        expert = tl.where(c == number, which[:, None], expert)
        share = tl.where(x == which[:, None], -1.0, share)
        total += best
    if NORMALIZED:
        weight /= total[:, None]
    mask = live & (c < C)
    at = token * C + c
    tl.store(weights + at, weight, mask=mask)
    tl.store(chosen + at, expert, mask=mask)
    tl.store(places + at, tl.atomic_add(counts + expert, 1, mask=mask, sem="relaxed"), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _sort_kernel(
    chosen, places, counts, starts, order, rows, X: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_X: tl.constexpr
):
    x = tl.arange(0, BLOCK_X)
    count = tl.load(counts + x, mask=x < X, other=0)
    if tl.program_id(0) == 0:
        tl.store(starts + x, tl.cumsum(count) - count, mask=x < X)
        tl.store(starts + X, rows)
    choice = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    live = choice < rows
    expert = tl.load(chosen + choice, mask=live, other=0)
    before = tl.sum(tl.where(x[None, :] < expert[:, None], count[None, :], 0), axis=1)
    tl.store(order + before + tl.load(places + choice, mask=live, other=0), choice, mask=live)


def route(logits_TX: Tensor, config: ExpertsConfig, bias_X: Tensor | None = None) -> Routes:
    """The experts of each token and the tokens of each expert; nothing waits for the host.

    Args:
        logits_TX: scores of the experts, fp32. Among equals the first is chosen.
        config: number of choices, and whether their weights are divided by their sum.
        bias_X: added to the scores.
    """
    require_contiguous(logits_TX, bias_X)
    tokens, experts = logits_TX.shape
    choices, device = config.active, logits_TX.device
    weights_TC = torch.empty(tokens, choices, dtype=torch.float32, device=device)
    chosen_TC, places_TC = (torch.empty(tokens, choices, dtype=torch.int32, device=device) for _ in range(2))
    order_R = torch.empty(tokens * choices, dtype=torch.int32, device=device)
    starts = torch.empty(experts + 1, dtype=torch.int32, device=device)
    counts = torch.zeros(experts, dtype=torch.int32, device=device)
    block_x = triton.next_power_of_2(experts)
    _choose_kernel[(triton.cdiv(tokens, 16),)](
        logits_TX, bias_X, weights_TC, chosen_TC, places_TC, counts, tokens, experts, choices, config.normalized, 16,
        block_x, triton.next_power_of_2(choices),
    )  # fmt: skip
    _sort_kernel[(triton.cdiv(len(order_R), 128),)](
        chosen_TC, places_TC, counts, starts, order_R, len(order_R), experts, 128, block_x
    )
    return Routes(weights_TC, chosen_TC, order_R, starts)
