"""How the options of a request change its logits before a token is chosen: on the host, in plain arrays."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatoken.engine.request import Request
from megatoken.errors import RequestError

if TYPE_CHECKING:
    from megatoken.engine.grammar import Guide
    from megatoken.engine.tokenizer import Tokenizer

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


class BadWords:
    """Encodings of words, and which tokens would complete one."""

    def __init__(self, encodings: Collection[tuple[int, ...]]) -> None:
        """``encodings``: token ids of each, at least one."""
        self.single = np.array([one[0] for one in encodings if len(one) == 1], dtype=np.int64)
        self._longer: Mapping[int, list[tuple[int, ...]]] = {}  # by the last token but one
        for one in encodings:
            if len(one) > 1:
                self._longer.setdefault(one[-2], []).append(one)

    @property
    def need_tokens(self) -> bool:
        """Whether the tokens to mask depend on those before."""
        return bool(self._longer)

    def last_tokens(self, generated: Sequence[int]) -> list[int]:
        """Tokens that would complete an encoding of several tokens after ``generated``."""
        near = self._longer.get(generated[-1], ()) if generated else ()
        return [one[-1] for one in near if tuple(generated[1 - len(one) :]) == one[:-1]]


def bad_words_of(request: Request, tokenizer: Tokenizer | None, vocabulary_size: int) -> BadWords | None:
    """The encodings of the request's ``bad_words``, with and without a space in front; None if it has none.

    Raises:
        RequestError: the model has no tokenizer, or a word cannot be encoded.
    """
    if not request.bad_words:
        return None
    if tokenizer is None:
        raise RequestError("the model has no tokenizer.json, so bad_words must be empty", "bad_words")
    spellings = [space + word.lstrip(" ") for word in request.bad_words for space in ("", " ")]
    try:
        encodings = {tuple(tokenizer.encode(one, add_special=False, what="one of bad_words")) for one in spellings}
    except RequestError as error:
        raise RequestError(str(error), "bad_words") from None
    return BadWords([one for one in encodings if one and max(one) < vocabulary_size])


@dataclass(frozen=True, slots=True, eq=False)
class Adjustments:
    """What changes the logits of one request."""

    counts: TokenCounts | None  # if it has penalties
    bias_ids: NDArray[np.int64]
    bias_values: NDArray[np.float64]
    end_ids: NDArray[np.int64]  # that it must not choose
    min_tokens: int  # before it has so many
    guide: Guide | None = None  # along its grammar
    bad_words: BadWords | None = None
    allowed: NDArray[np.int32] | None = None  # a bit for each token that it may choose; None: all

    @property
    def need_tokens(self) -> bool:
        """Whether the next token cannot be chosen before the one before it is on the host."""
        return self.guide is not None or (self.bad_words is not None and self.bad_words.need_tokens)

    def biases(self, num_generated: int, generated: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Token ids and what is added to their logits, for the token after ``num_generated``.

        ``generated``: all of these, or those on the host if the adjustments do not ``need_tokens``.
        """
        masked: list[NDArray[np.int64]] = [] if num_generated >= self.min_tokens else [self.end_ids]
        if self.bad_words is not None:
            masked += [self.bad_words.single, np.array(self.bad_words.last_tokens(generated), dtype=np.int64)]
        if not masked:
            return self.bias_ids, self.bias_values
        ids = np.concatenate((self.bias_ids, *masked))
        return ids, np.concatenate((self.bias_values, np.full(len(ids) - len(self.bias_ids), -np.inf)))


def adjustments_of(
    request: Request,
    prompt: Sequence[int],
    stop_ids: Collection[int],
    vocabulary_size: int,
    guide: Guide | None = None,
    bad_words: BadWords | None = None,
) -> Adjustments | None:
    """The adjustments of a checked request, or None if its options do not change any logit.

    ``stop_ids`` end it; ``guide`` leads along its grammar; ``bad_words`` are its own.
    """
    sampling = request.sampling
    repeats = sampling.repetition_penalty != 1
    penalised = repeats or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
    used = penalised or sampling.logit_bias or request.min_tokens or request.allowed_token_ids
    if not used and guide is None and bad_words is None:
        return None
    allowed = None
    if request.allowed_token_ids:
        bits = np.zeros(-(-vocabulary_size // 32) * 32, dtype=np.uint8)
        bits[list(request.allowed_token_ids)] = 1
        allowed = np.packbits(bits, bitorder="little").view(np.int32)
    return Adjustments(
        counts=TokenCounts(prompt if repeats else ()) if penalised else None,
        bias_ids=np.array(list(sampling.logit_bias), dtype=np.int64),
        bias_values=np.array(list(sampling.logit_bias.values()), dtype=np.float64),
        end_ids=np.array([one for one in stop_ids if 0 <= one < vocabulary_size], dtype=np.int64),
        min_tokens=request.min_tokens,
        guide=guide,
        bad_words=bad_words,
        allowed=allowed,
    )
