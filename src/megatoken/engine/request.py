"""What a user asks of the engine and what comes back; the only objects that users and scheduler share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum


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
