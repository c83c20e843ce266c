"""Salts: a few random characters or tokens at the head of each prompt, so that no cache knows it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

from megatoken.datasets.requests import ChatRequest, Dataset, LazyRows
from megatoken.engine.request import Request
from megatoken.errors import UsageError

SALT_BITS = 64
SALT_BYTES = SALT_BITS // 8


def salted(data_set: Dataset, seed: int, *, vocabulary_size: int | None, max_length: int | None) -> Dataset:
    """The same requests, each with a salt of ``SALT_BITS`` bits; every access draws another one.

    The salt stands between the system prompt and the rest: before the first message of a user, before a text, and
    after the first token of ids, which may be the one that begins a text.

    Args:
        data_set: the requests.
        seed: of the salts, whose order is that of the accesses.
        vocabulary_size: of the model, where prompts are ids; the salt is then as many random ids as 64 bits take.
        max_length: of prompt and answer together; None: unknown.

    Raises:
        UsageError: a request is too long for a salt.
    """
    draws = random.Random(seed)
    ids = 0 if vocabulary_size is None else math.ceil(SALT_BITS / math.log2(vocabulary_size))
    longest = int((data_set.input_tokens + data_set.output_limits).max()) + ids
    if max_length is not None and longest > max_length:
        raise UsageError(
            f"{data_set.name}: with a salt of {ids} tokens the longest request has {longest:,}, and the context"
            f" {max_length:,}; leave room with --engine.max_length, or shorten the request"
        )

    def make(row: int) -> Request:
        request = data_set.requests[row]
        if isinstance(request, ChatRequest) and request.messages:
            return replace(request, messages=_salted_messages(request.messages, _words(draws)))
        if isinstance(request.prompt, str):
            return replace(request, prompt=f"{_words(draws)} {request.prompt}")
        salt = [draws.randrange(vocabulary_size or 1) for _ in range(ids)]
        prompt = list(request.prompt)
        return replace(request, prompt=[*prompt[:1], *salt, *prompt[1:]])

    return replace(
        data_set,
        requests=LazyRows(len(data_set.requests), make),
        input_tokens=data_set.input_tokens + ids,
        prompts_counted=data_set.prompts_counted and bool(ids),  # text: only the target knows the salt's tokens
    )


def _words(draws: random.Random) -> str:
    return f"[{draws.randbytes(SALT_BYTES).hex()}]"


def _salted_messages(messages: Sequence[tuple[str, str]], salt: str) -> tuple[tuple[str, str], ...]:
    first = next((at for at, (role, _) in enumerate(messages) if role == "user"), len(messages) - 1)
    return tuple((role, f"{salt} {content}" if at == first else content) for at, (role, content) in enumerate(messages))
