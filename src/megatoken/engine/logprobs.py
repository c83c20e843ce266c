"""Logarithms of the probabilities of chosen and best tokens, computed on the device from the raw logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatoken.engine.memory import BLOCK_SAMPLES
from megatoken.engine.request import TokenLogprobs
from megatoken.engine.sampling import to_device

_LOW_BITS = 2**32 - 1


def best_logprobs(logits_SV: Tensor, chosen_S: Tensor, rows: Sequence[int], most: int) -> Tensor:
    """Log-softmax in float32 of the chosen token and of the best ones; among equal logits the lowest id is the best.

    Args:
        logits_SV: any float dtype.
        chosen_S: int64 [S], the chosen ids; what stands for a negative one means nothing.
        rows: which are wanted.
        most: M, how many of the best tokens.

    Returns:
        float64 [rows, 1 + 2 M], see ``read_logprobs``. Nothing here waits for the device.
    """
    row_L = to_device({"row": np.array(rows, dtype=np.int64)}, logits_SV.device)["row"]
    blocks = []
    for row_R in row_L.split(BLOCK_SAMPLES):  # type: ignore[no-untyped-call]
        logits_RV = logits_SV.index_select(0, row_R).float()
        chosen_R1 = chosen_S.index_select(0, row_R).clamp(min=0)[:, None]
        best_RM = _best(logits_RV, min(most, logits_RV.shape[1]))
        logprob_RV = logits_RV.log_softmax(-1)
        tokens_RN = torch.cat((chosen_R1, best_RM), dim=1)
        blocks.append(torch.cat((logprob_RV.gather(1, tokens_RN).double(), best_RM.double()), dim=1))
    return torch.cat(blocks)


def _best(logits_RV: Tensor, most: int) -> Tensor:
    """Ids of the highest logits, best first -> int64 [R, most]. Integer keys order equal logits by their ids."""
    bits_RV = (logits_RV + 0.0).view(torch.int32)  # minus zero becomes zero
    ordered_RV = bits_RV ^ ((bits_RV >> 31) & 0x7FFFFFFF)
    reversed_V = _LOW_BITS - torch.arange(logits_RV.shape[1], device=logits_RV.device)
    return _LOW_BITS - (((ordered_RV.long() << 32) | reversed_V).topk(most).values & _LOW_BITS)


def read_logprobs(token_id: int, values: Sequence[float], wanted: int) -> TokenLogprobs:
    """One row of ``best_logprobs`` as a record; ``wanted``: how many of its best tokens."""
    most = (len(values) - 1) // 2
    best = zip(map(int, values[1 + most : 1 + most + wanted]), values[1 : 1 + wanted], strict=True)
    return TokenLogprobs(token_id, values[0], tuple(best))
