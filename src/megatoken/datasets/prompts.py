"""Prompts as JSON lines -> requests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from megatoken.datasets.prompt_lines import read_prompt_lines
from megatoken.datasets.requests import GREEDY, Dataset, RequestRows
from megatoken.engine.request import Sampling
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
            raise DatasetError(f"{place}: messages are for a target that takes text; give prompt or prompt_token_ids")
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
