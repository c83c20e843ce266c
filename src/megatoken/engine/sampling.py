"""Logits to tokens for the requests that draw: temperature, top-k and top-p.

A draw needs one uniform number, a hash of the request's seed and the token's position, so it does not depend on what
else is in the batch or on how often the request was preempted.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatoken.engine.memory import BLOCK_SAMPLES
from megatoken.engine.ops import NO_TOKEN
from megatoken.engine.request import Sampling

VALUE_ERRORS = (ArithmeticError, TypeError, ValueError)  # of one row's values; any other is the device's


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """A number in [0, 1) for each (seed, position): two rounds of the SplitMix64 finaliser (Steele et al., 2014)."""
    with np.errstate(over="ignore"):
        state = _mix(seeds + np.uint64(0x9E3779B97F4A7C15))
        state = _mix(state ^ (positions * np.uint64(0xD1342543DE82EF95) + np.uint64(0x9E3779B97F4A7C15)))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def sample(
    logits_SV: Tensor,
    samplings: Sequence[Sampling],
    positions: NDArray[np.int64],
    chosen_S: Tensor,
    failed: MutableMapping[int, Exception] | None = None,
) -> None:
    """Replace the greedy choice of the rows that draw.

    Args:
        logits_SV: any float dtype.
        samplings: how each row is sampled; a seed is set wherever the temperature is above 0.
        positions: position each new token will take, part of the draw.
        chosen_S: int64 [S], the greedy ids; changed in place, except where they are ``NO_TOKEN``.
        failed: gets the error of each row whose own sampling cannot be computed, which is then ``NO_TOKEN``; without
            it such an error is raised.

    Nothing here waits for the device.
    """
    drawn = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]

    def draw(rows: list[int]) -> None:
        greedy_R = chosen_S[rows]
        drawn_R = _draw(logits_SV[rows].double(), [samplings[row] for row in rows], positions[rows])
        chosen_S[rows] = torch.where(greedy_R == NO_TOKEN, greedy_R, drawn_R)

    for first in range(0, len(drawn), BLOCK_SAMPLES):
        rows = drawn[first : first + BLOCK_SAMPLES]
        try:
            draw(rows)
        except VALUE_ERRORS:
            if failed is None:
                raise
            for row in rows:
                try:
                    draw([row])
                except VALUE_ERRORS as error:
                    failed[row] = error
                    chosen_S[row] = NO_TOKEN


def _draw(logits_RV: Tensor, samplings: Sequence[Sampling], positions: NDArray[np.int64]) -> Tensor:
    """Inverse of the cumulative distribution in the order of token ids.

    That order does not depend on the logits, so rounding noise moves a draw only when the uniform number falls within
    the noise of a boundary; in sorted order it would reshuffle all tokens of nearly equal weight.
    """
    seeds = np.array([(sampling.seed or 0) & (2**64 - 1) for sampling in samplings], dtype=np.uint64)
    uniform_R1 = torch.from_numpy(uniform(seeds, positions.astype(np.uint64)))[:, None].to(logits_RV.device)
    temperature_R1 = logits_RV.new_tensor([[sampling.temperature] for sampling in samplings])
    logits_RV = logits_RV - logits_RV.amax(-1, keepdim=True)  # then no temperature above 0 overflows
    weight_RV = (logits_RV / temperature_R1).exp()
    if any(sampling.top_k or sampling.top_p < 1 for sampling in samplings):
        weight_RV = weight_RV.masked_fill(~_kept(logits_RV, temperature_R1, samplings), 0.0)
    cumulative_RV = weight_RV.cumsum(-1)
    # The best token weighs 1, and 1 - 2^-53 times 1 or more stays below it in float64: the search ends at a token.
    index_R1 = torch.searchsorted(cumulative_RV, uniform_R1 * cumulative_RV[:, -1:], right=True)
    return index_R1[:, 0]


def _kept(logits_RV: Tensor, temperature_R1: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Which tokens are left: the ``top_k`` best, and of these the fewest best that hold ``top_p`` of the weight.

    Among equal logits the lowest id is the best, so a row that keeps one token keeps the greedy choice.
    """
    vocabulary = logits_RV.shape[1]
    top_k = [[min(sampling.top_k or vocabulary, vocabulary)] for sampling in samplings]
    top_k_R1 = torch.tensor(top_k, device=logits_RV.device)
    top_p_R1 = logits_RV.new_tensor([[sampling.top_p if sampling.top_p < 1 else math.inf] for sampling in samplings])
    sorted_RK = logits_RV.topk(max(top_k)[0]).values
    beyond_RK = torch.arange(sorted_RK.shape[1], device=logits_RV.device) >= top_k_R1
    weight_RK = (sorted_RK / temperature_R1).exp().masked_fill(beyond_RK, 0.0)
    total_RK = weight_RK.cumsum(-1)
    kept_R1 = (total_RK - weight_RK < top_p_R1 * total_RK[:, -1:]).sum(-1, keepdim=True).minimum(top_k_R1)
    kept_R1 = kept_R1.clamp(min=1)  # of logits that are not finite none would be kept
    lowest_R1 = sorted_RK.gather(1, kept_R1 - 1)
    above_RV, equal_RV = logits_RV > lowest_R1, logits_RV == lowest_R1
    return above_RV | (equal_RV & (equal_RV.cumsum(-1) <= kept_R1 - above_RV.sum(-1, keepdim=True)))
