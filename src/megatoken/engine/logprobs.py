"""Logarithms of the probabilities of chosen and best tokens, computed on the device from the raw logits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatoken.engine.active_request import ActiveRequest
from megatoken.engine.memory import BLOCK_SAMPLES
from megatoken.engine.request import TokenLogprobs
from megatoken.engine.runner_protocol import PromptPart
from megatoken.engine.sampling import to_device
from megatoken.engine.step_plan import StepPlan

_LOW_BITS = 2**32 - 1


def best_logprobs(logits_SV: Tensor, chosen_S: Tensor, rows: Sequence[int], most: int) -> Tensor:
    """Log-softmax in float32 of the chosen token and of the best ones; among equal logits the lowest id is the best.

    Args:
        logits_SV: any float dtype.
        chosen_S: int64 [S], the chosen ids; what stands for a negative one means nothing.
        rows: which are wanted.
        most: M, how many of the best tokens.

    Returns:
        float64 [rows, 2 + 2 M], see ``read_logprobs``. Nothing here waits for the device.
    """
    row_L = to_device({"row": np.array(rows, dtype=np.int64)}, logits_SV.device)["row"]
    blocks = []
    for row_R in row_L.split(BLOCK_SAMPLES):  # type: ignore[no-untyped-call]
        logits_RV = logits_SV.index_select(0, row_R).float()
        chosen_R1 = chosen_S.index_select(0, row_R).clamp(min=0)[:, None]
        best_RM = _best(logits_RV, min(most, logits_RV.shape[1]))
        logprob_RV = logits_RV.log_softmax(-1)
        tokens_RN = torch.cat((chosen_R1, best_RM), dim=1)
        rank_R1 = (logits_RV > logits_RV.gather(1, chosen_R1)).sum(-1, keepdim=True) + 1
        parts = (logprob_RV.gather(1, tokens_RN), best_RM, rank_R1)
        blocks.append(torch.cat([part.double() for part in parts], dim=1))
    return torch.cat(blocks)


def _best(logits_RV: Tensor, most: int) -> Tensor:
    """Ids of the highest logits, best first -> int64 [R, most]. Integer keys order equal logits by their ids."""
    bits_RV = (logits_RV + 0.0).view(torch.int32)  # minus zero becomes zero
    ordered_RV = bits_RV ^ ((bits_RV >> 31) & 0x7FFFFFFF)
    reversed_V = _LOW_BITS - torch.arange(logits_RV.shape[1], device=logits_RV.device)
    return _LOW_BITS - (((ordered_RV.long() << 32) | reversed_V).topk(most).values & _LOW_BITS)


def read_logprobs(token_id: int, values: Sequence[float], wanted: int) -> TokenLogprobs:
    """One row of ``best_logprobs`` as a record; ``wanted``: how many of its best tokens."""
    most = (len(values) - 2) // 2
    best = zip(map(int, values[1 + most : 1 + most + wanted]), values[1 : 1 + wanted], strict=True)
    return TokenLogprobs(token_id, values[0], tuple(best), int(values[-1]))


class _Wanted(NamedTuple):
    request_id: int
    first: int  # position of the first token whose logprobs are wanted
    token_ids: list[int]
    most: int  # how many of the best tokens to report


class PromptTokens:
    """The tokens of a step after which a prompt goes on, of requests that want the logprobs of their prompts."""

    def __init__(self, plan: StepPlan, requests: Mapping[int, ActiveRequest]) -> None:
        self._wanted: list[_Wanted] = []
        places: list[int] = []
        place = plan.decodes
        for chunk in range(plan.decodes, len(plan.count)):
            request_id, start, count = (int(one[chunk]) for one in (plan.request_id, plan.start, plan.count))
            request = requests[request_id]
            most = request.request.prompt_logprobs
            following = request.prompt[start + 1 : start + 1 + count]
            # One that was preempted after its first token has reported them.
            if most is not None and following and not request.generated:
                self._wanted.append(_Wanted(request_id, start + 1, following, most))
                places += range(place, place + len(following))
            place += count
        self._padding = (0, -len(places) % BLOCK_SAMPLES)  # back ends compile kernels for each new number of tokens
        self.places = np.pad(np.array(places, dtype=np.int64), self._padding)
        """int64 [a multiple of ``BLOCK_SAMPLES``], where the tokens stand in the step, padded with 0; empty if none."""

    def logprobs(self, logits: Iterable[Tensor]) -> Tensor:
        """``best_logprobs`` of the tokens. ``logits``: [``BLOCK_SAMPLES``, V] each, in the order of ``places``."""
        token_ids = np.array([token for one in self._wanted for token in one.token_ids], dtype=np.int64)
        most = max(one.most for one in self._wanted)
        values: list[Tensor] = []
        ids_R = None
        for number, logits_RV in enumerate(logits):
            if ids_R is None:
                ids_R = to_device({"token": np.pad(token_ids, self._padding)}, logits_RV.device)["token"]
            block = slice(number * BLOCK_SAMPLES, (number + 1) * BLOCK_SAMPLES)
            values.append(best_logprobs(logits_RV, ids_R[block], range(BLOCK_SAMPLES), most))
        return torch.cat(values)[: len(token_ids)]

    def read(self, values: Sequence[Sequence[float]]) -> dict[int, PromptPart]:
        """By id of the request, from what came back from the device."""
        rows = iter(values)
        return {
            one.request_id: PromptPart(
                one.first, tuple(read_logprobs(token, next(rows), one.most) for token in one.token_ids)
            )
            for one in self._wanted
        }
