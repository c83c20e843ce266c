"""How the options of a request change its logits before a token is chosen: on the host, in plain arrays."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatoken.engine.request import Request

if TYPE_CHECKING:
    from megatoken.engine.grammar import Guide

SMALLEST_CAPACITY = 64


class TokenCounts:
    """How often each token is in an answer; the tokens of the prompt are listed too.

    Each token is counted once, when the next step is launched, so a step costs what its new tokens cost.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        """``prompt``: its ids, or none if no penalty depends on it."""
        self._places = {token_id: place for place, token_id in enumerate(dict.fromkeys(prompt))}
        used = len(self._places)
        self._ids = np.zeros(max(used, SMALLEST_CAPACITY), dtype=np.int64)
        self._ids[:used] = list(self._places)
        self._counts = np.zeros(len(self._ids), dtype=np.float64)
        self._counted = 0

    def up_to_date(self, generated: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Distinct ids, and how often each is in ``generated``, which may only have grown since the last call.

        Both are views that the next call may change.
        """
        for token_id in generated[self._counted :]:
            place = self._places.setdefault(token_id, len(self._places))
            if place == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[place] = token_id
            self._counts[place] += 1
        self._counted = len(generated)
        used = len(self._places)
        return self._ids[:used], self._counts[:used]


@dataclass(frozen=True, slots=True, eq=False)
class Adjustments:
    """What changes the logits of one request."""

    counts: TokenCounts | None  # if it has penalties
    bias_ids: NDArray[np.int64]
    bias_values: NDArray[np.float64]
    end_ids: NDArray[np.int64]  # that it must not choose
    min_tokens: int  # before it has so many
    guide: Guide | None = None  # along its grammar

    def biases(self, num_generated: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Token ids and what is added to their logits, for the token after ``num_generated``."""
        if num_generated >= self.min_tokens:
            return self.bias_ids, self.bias_values
        masked = np.full(len(self.end_ids), -np.inf)
        return np.concatenate((self.bias_ids, self.end_ids)), np.concatenate((self.bias_values, masked))


def adjustments_of(
    request: Request,
    prompt: Sequence[int],
    stop_ids: Collection[int],
    vocabulary_size: int,
    guide: Guide | None = None,
) -> Adjustments | None:
    """The adjustments of a checked request, or None if its options do not change any logit.

    ``stop_ids`` end it; ``guide`` leads along its grammar.
    """
    sampling = request.sampling
    repeats = sampling.repetition_penalty != 1
    penalised = repeats or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
    if not (penalised or sampling.logit_bias or request.min_tokens or guide is not None):
        return None
    return Adjustments(
        counts=TokenCounts(prompt if repeats else ()) if penalised else None,
        bias_ids=np.array(list(sampling.logit_bias), dtype=np.int64),
        bias_values=np.array(list(sampling.logit_bias.values()), dtype=np.float64),
        end_ids=np.array([one for one in stop_ids if 0 <= one < vocabulary_size], dtype=np.int64),
        min_tokens=request.min_tokens,
        guide=guide,
    )
