"""Prompts as JSON lines -> requests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megatoken.datasets.prompt_lines import read_prompt_lines
from megatoken.datasets.requests import GREEDY, ChatRequest, Dataset, RequestRows
from megatoken.engine.request import Request, Sampling
from megatoken.errors import DatasetError, RequestError


def load_prompts(
    path: Path,
    *,
    encode: Callable[[str], list[int]] | None,
    vocabulary_size: int,
    max_length: int,
    default_max_tokens: int = 128,
    sampling: Sampling = GREEDY,
) -> Dataset:
    """Load JSON lines: ``{"prompt": text}`` or ``{"prompt_token_ids": [...]}`` and options; blank lines are skipped.

    ``encode`` turns text into token ids; None if the model has no tokenizer. A ``max_tokens`` that a line states is
    kept or refused; ``default_max_tokens`` is cut to what the context of ``max_length`` leaves. ``sampling`` holds for
    prompts that state none.

    Raises:
        DatasetError: The file cannot be read, or a line of it cannot be served.
    """
    rows = RequestRows(path, vocabulary_size, max_length, default_max_tokens)
    digest = hashlib.sha256()
    for place, fields in read_prompt_lines(path, sampling, digest.update):
        if fields.messages:
            raise DatasetError(
                f"{place}: messages are only sent to servers (--endpoint); give prompt or prompt_token_ids"
            )
        ids = fields.prompt
        if isinstance(ids, str):
            if encode is None:
                raise DatasetError(
                    f"{place}: the prompt is text but the model has no tokenizer.json; "
                    "add it to the model's folder or give prompt_token_ids"
                )
            try:
                ids = encode(ids)
            except RequestError as error:
                raise DatasetError(f"{place}: {error}") from error
        rows.add(place, ids, fields.max_tokens, fields.sampling, fields.stop_token_ids, fields.ignore_end_token)
    return rows.dataset(digest.hexdigest())


def load_texts(
    path: Path, *, encode: Callable[[str], list[int]] | None, default_max_tokens: int, sampling: Sampling = GREEDY
) -> Dataset:
    """Loads JSON lines: ``{"prompt": text}`` or ``{"messages": [...]}`` and options; blank lines are skipped.

    ``encode`` turns text into token ids, to count them; None leaves prompts uncounted. Chats are never counted: a
    template that only the target knows adds to them. The last two are for prompts that state none.

    Raises:
        DatasetError: The file cannot be read, or a line of it has no text.
    """
    requests: list[Request] = []
    default_used = False
    digest = hashlib.sha256()
    for place, fields in read_prompt_lines(path, sampling, digest.update):
        if not isinstance(fields.prompt, str):
            raise DatasetError(f"{place}: the target takes text, not token ids; give prompt or messages")
        default_used = default_used or fields.max_tokens is None
        options = (fields.max_tokens or default_max_tokens, fields.sampling, fields.stop_token_ids)
        if fields.messages:
            requests.append(ChatRequest(fields.prompt, *options, fields.ignore_end_token, messages=fields.messages))
        else:
            requests.append(Request(fields.prompt, *options, fields.ignore_end_token))
    if not requests:
        raise DatasetError(f"{path}: the file holds no prompts; give one with at least one row")
    counted = encode is not None and not any(isinstance(request, ChatRequest) for request in requests)
    return Dataset(
        name=path.name,
        source=str(path),
        requests=requests,
        content_hash=digest.hexdigest(),
        input_tokens=np.array(
            [len(encode(str(one.prompt))) if counted and encode else 0 for one in requests], np.int64
        ),
        output_limits=np.array([request.max_tokens for request in requests], np.int64),
        fills_limit=np.zeros(len(requests), np.bool_),
        notes=(),
        default_used=default_used,
        prompts_counted=counted,
    )
