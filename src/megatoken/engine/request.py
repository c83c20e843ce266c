"""What a user asks of an engine, what comes back, and which requests every engine refuses."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Integral
from operator import index
from typing import NamedTuple

from megatoken.errors import MegatokenError, RequestError

_LARGEST_SEED = 2**63 - 1
_LARGEST_TOP_K = 2**31 - 1
_LARGEST_MAX_TOKENS = 10**30  # far beyond any engine, which refuses what is too long with its own numbers


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen from the logits.

    ``temperature`` 0 is greedy (argmax) and ignores the rest; ``top_k`` 0 and ``top_p`` 1 keep every token. A draw
    depends on ``seed``, the token's position and the logits, never on what else is in the batch. Without a seed the
    engine takes the request's id, so that equal prompts differ and a repeated run does not.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how far to continue it.

    ``prompt`` is text (the checkpoint's tokenizer encodes it) or token ids. The request ends at the model's end
    token (unless ``ignore_end_token``), at any of ``stop_token_ids``, or after ``max_tokens`` tokens.
    """

    prompt: str | Sequence[int]
    max_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)
    stop_token_ids: tuple[int, ...] = ()
    ignore_end_token: bool = False


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request: generated ids (the end token included when it was produced) and why it ended."""

    token_ids: list[int]
    finish_reason: FinishReason
    prompt_tokens: int


class TokenEvent(NamedTuple):
    """New tokens of one request after one step.

    ``finish_reason`` is set on the last event of a request and only there; with ``FinishReason.ERROR`` ``error`` says
    why this request, and no other, could not go on.
    """

    request_id: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    error: MegatokenError | None = None


@dataclass(frozen=True, slots=True)
class ActiveRequest:
    """A checked request and the tokens generated so far."""

    request: Request
    prompt: list[int]
    stop_ids: frozenset[int]
    sampling: Sampling  # with a seed wherever tokens are drawn
    generated: list[int]

    def tokens(self, start: int, count: int) -> list[int]:
        """``count`` of its ids from position ``start`` on, prompt and generated."""
        prompt = len(self.prompt)
        if start + count <= prompt:
            return self.prompt[start : start + count]
        return self.prompt[start:] + self.generated[max(start - prompt, 0) : start + count - prompt]


def token_ids(prompt: Sequence[int]) -> list[int]:
    """The ids as plain integers, from a sequence of any integer type.

    Raises:
        RequestError: it holds something else.
    """
    try:
        return list(map(index, prompt))
    except TypeError as error:
        raise RequestError(f"the prompt must be text or token ids, not {_shown(prompt)}") from error


def check_request(prompt: Sequence[int], request: Request, vocabulary_size: int) -> None:
    """Refuse what can never be served, or would fail in a step, which requests share.

    Raises:
        RequestError: says which field and why.
    """
    if not prompt:
        raise RequestError("the prompt is empty; give at least one token")
    lowest, highest = min(prompt), max(prompt)
    if lowest < 0 or highest >= vocabulary_size:
        wrong = lowest if lowest < 0 else highest
        raise RequestError(
            f"prompt token id {_shown(wrong)} is outside the vocabulary of {vocabulary_size:,}; "
            "use the model's own tokenizer"
        )
    check_options(request)


def check_options(request: Request) -> None:
    """Refuse every field but the prompt that has the wrong type or a value out of range.

    Raises:
        RequestError: says which field and why.
    """
    sampling, stop_ids = request.sampling, request.stop_token_ids
    if not isinstance(sampling, Sampling):
        raise RequestError(f"sampling is {_shown(sampling)}; write Sampling(temperature=0.8)")
    if not isinstance(stop_ids, Collection) or not all(isinstance(one, Integral) for one in stop_ids):
        raise RequestError(f"stop_token_ids is {_shown(stop_ids)}; it must be a tuple of token ids")
    _check_count("max_tokens", request.max_tokens, 1, _LARGEST_MAX_TOKENS, "at least 1")
    _check_count("top_k", sampling.top_k, 0, _LARGEST_TOP_K, "0 (all) or more")
    if sampling.seed is not None:
        _check_count("seed", sampling.seed, -_LARGEST_SEED - 1, _LARGEST_SEED, f"at least {-_LARGEST_SEED - 1:,}")
    if not 0 <= _number("temperature", sampling.temperature) < math.inf:
        raise RequestError(f"temperature is {_shown(sampling.temperature)}; it must be finite and not negative")
    if not 0 < _number("top_p", sampling.top_p) <= 1:
        raise RequestError(f"top_p is {_shown(sampling.top_p)}; it must be above 0 and at most 1")


def _check_count(name: str, value: object, lowest: int, highest: int, wanted: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError(f"{name} is {_shown(value)}; it must be a whole number")
    if not lowest <= value <= highest:
        wanted = wanted if value < lowest else f"at most {highest:,}"
        raise RequestError(f"{name} is {_shown(value)}; it must be {wanted}")


def _number(name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise RequestError(f"{name} is {_shown(value)}; it must be a number")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _shown(value: object) -> str:
    try:
        return reprlib.repr(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return "an integer of thousands of digits"
