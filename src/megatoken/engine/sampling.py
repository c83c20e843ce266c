"""Logits to tokens: argmax when all rows are greedy, otherwise temperature, top-k and top-p.

A draw needs one uniform number, a hash of the request's seed and the token's position, so it is the same whatever else
is in the batch and however often the request was preempted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatoken.engine.request import Sampling


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


def sample(logits_SV: Tensor, samplings: Sequence[Sampling], positions: NDArray[np.int64]) -> Tensor:
    """Choose one token a row.

    Args:
        logits_SV: any float dtype.
        samplings: how each row is sampled.
        positions: position each new token will take, part of the seed.

    Returns:
        int64 [S].
    """
    chosen_S = logits_SV.argmax(-1)
    drawn = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
    if not drawn:
        return chosen_S
    rows = torch.tensor(drawn)
    seeds = np.array([samplings[row].seed & (2**64 - 1) for row in drawn], dtype=np.uint64)
    uniform_R1 = torch.from_numpy(uniform(seeds, positions[drawn].astype(np.uint64)))[:, None]
    temperature_R1 = torch.tensor([[samplings[row].temperature] for row in drawn], dtype=torch.float64)
    top_k_R1 = torch.tensor([[samplings[row].top_k or logits_SV.shape[1]] for row in drawn])
    top_p_R1 = torch.tensor([[samplings[row].top_p] for row in drawn], dtype=torch.float64)

    # Stable: equal logits keep the order of their ids, so that ties do not depend on the sort.
    sorted_RV, order_RV = logits_SV[rows].double().div_(temperature_R1).sort(-1, descending=True, stable=True)
    sorted_RV.masked_fill_(torch.arange(logits_SV.shape[1]) >= top_k_R1, float("-inf"))
    weight_RV = sorted_RV.softmax(-1)
    before_RV = weight_RV.cumsum(-1) - weight_RV
    weight_RV.masked_fill_(before_RV >= top_p_R1, 0.0)  # the first token has nothing before it and always stays
    weight_RV[:, 0].clamp_min_(torch.finfo(torch.float64).tiny)
    total_RV = weight_RV.cumsum(-1)
    # The last kept token bounds the index: cumulative sums may fall short of the total by rounding.
    kept_R1 = (weight_RV > 0).sum(-1, keepdim=True)
    index_R1 = torch.searchsorted(total_RV, uniform_R1 * total_RV[:, -1:], right=True).minimum(kept_R1 - 1)
    chosen_S[rows] = order_RV.gather(1, index_R1)[:, 0]
    return chosen_S
