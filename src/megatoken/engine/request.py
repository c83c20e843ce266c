"""What a user asks of an engine and what comes back, and what every engine refuses."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Integral
from operator import index

from megatoken.errors import RequestError


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen from the logits.

    ``temperature`` 0 is greedy (argmax) and ignores the rest; ``top_k`` 0 and ``top_p`` 1 keep every token. A draw
    depends on ``seed``, the token's position and the logits, never on what else is in the batch. Without a seed the
    engine takes the request's ticket, so that equal prompts differ and a repeated run does not.
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


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """New tokens of one request after one step; ``finish_reason`` is set on the last event and only there."""

    ticket: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None


def token_ids(prompt: Sequence[int]) -> list[int]:
    """The ids as plain integers, whatever sequence of whatever integer type holds them.

    Raises:
        RequestError: it holds something else.
    """
    try:
        return list(map(index, prompt))
    except TypeError as error:
        raise RequestError(f"the prompt must be text or token ids, not {reprlib.repr(prompt)}") from error


def check_request(prompt: Sequence[int], request: Request, vocabulary_size: int) -> None:
    """Refuse what can never be served.

    Raises:
        RequestError: says which field and why.
    """
    if not prompt:
        raise RequestError("the prompt is empty; give at least one token")
    lowest, highest = min(prompt), max(prompt)
    if lowest < 0 or highest >= vocabulary_size:
        wrong = lowest if lowest < 0 else highest
        raise RequestError(
            f"prompt token id {wrong} is outside the vocabulary of {vocabulary_size:,}; use the model's own tokenizer"
        )
    _check_types(request)
    if request.max_tokens < 1:
        raise RequestError(f"max_tokens is {request.max_tokens}; it must be at least 1")
    sampling = request.sampling
    if not 0 <= sampling.temperature < float("inf"):
        raise RequestError(f"temperature is {sampling.temperature}; it must be finite and not negative")
    if sampling.top_k < 0:
        raise RequestError(f"top_k is {sampling.top_k}; it must be 0 (all) or more")
    if not 0 < sampling.top_p <= 1:
        raise RequestError(f"top_p is {sampling.top_p}; it must be above 0 and at most 1")


def _check_types(request: Request) -> None:
    """Refuse now what would fail in the middle of a step, and take the other requests of that step with it."""
    sampling, stop_ids = request.sampling, request.stop_token_ids
    if not isinstance(sampling, Sampling):
        raise RequestError(f"sampling is {reprlib.repr(sampling)}; write Sampling(temperature=0.8)")
    if not isinstance(stop_ids, Collection) or not all(isinstance(one, Integral) for one in stop_ids):
        raise RequestError(f"stop_token_ids is {reprlib.repr(stop_ids)}; it must be a tuple of token ids")
    for name, value, kinds in (
        ("max_tokens", request.max_tokens, (int,)),
        ("temperature", sampling.temperature, (int, float)),
        ("top_k", sampling.top_k, (int,)),
        ("top_p", sampling.top_p, (int, float)),
        ("seed", sampling.seed, (int, type(None))),
    ):
        if not isinstance(value, kinds):
            wanted = "a number" if float in kinds else "a whole number"
            raise RequestError(f"{name} is {reprlib.repr(value)}; it must be {wanted}")
