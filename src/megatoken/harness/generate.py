"""Prompts from a file to answers in a file, or one prompt to an answer piece by piece."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from megatoken.config import RunConfig
from megatoken.engine import Completion, Engine, Request, Sampling
from megatoken.engine.loop import open_model
from megatoken.engine.memory import plan_memory
from megatoken.errors import RequestError, StorageError
from megatoken.harness.datasets import load_prompts
from megatoken.harness.prepare import check_writable, encoder
from megatoken.results.files import write_text


def generate_file(config: RunConfig, prompts: Path, out: Path, sampling: Sampling) -> None:
    """Answers every line of ``prompts``; ``out`` gets one JSON object a line, in the same order, all at the end.

    Args:
        config: model, precision, engine and ``max_tokens`` for lines that state none.
        prompts: JSON lines, see ``load_prompts``.
        out: file to write: ``index``, ``token_ids``, ``text`` (null without a tokenizer), ``finish_reason``.
        sampling: for lines that state none.

    Raises:
        CheckpointError, CapacityError, DatasetError: the first thing that cannot be used; nothing is written.
        StorageError: ``out`` cannot be written; a file that was there is unchanged.
    """
    if (out.exists() and not out.is_file()) or not out.absolute().parent.is_dir():
        raise StorageError(f"{out}: not a regular file in an existing folder; choose another with --out")
    out = out.resolve()  # a link stays one
    if out == prompts.resolve():
        raise StorageError(f"{out}: these are the prompts, which the answers would replace; choose another with --out")
    check_writable(out.absolute().parent)
    source = open_model(config.model, random_weights=config.random_weights, seed=config.seed)
    data_set = load_prompts(
        prompts,
        encode=encoder(config.model),
        vocabulary_size=source.config.vocabulary_size,
        max_length=plan_memory(source.config, config.engine_config()).max_length,
        default_max_tokens=config.max_tokens,
        sampling=sampling,
    )
    engine = _engine(config)
    completions = engine.generate(list(data_set.requests))
    write_text(out, "".join(f"{line}\n" for line in _lines(engine, completions)))


def stream_prompt(config: RunConfig, prompt: str, sampling: Sampling) -> Iterator[str]:
    """Yields the answer to ``prompt`` as it is made.

    Raises:
        CheckpointError, CapacityError, RequestError: what cannot be used.
    """
    if not prompt:
        raise RequestError("--prompt is empty; give some text")
    source = open_model(config.model, random_weights=config.random_weights, seed=config.seed)
    if encoder(config.model) is None:
        raise RequestError(f"{source.config.name} has no tokenizer.json; give token ids in a file with --prompts")
    engine = _engine(config)
    assert engine.tokenizer is not None
    decoder = engine.tokenizer.incremental()
    for event in engine.stream(Request(prompt, config.max_tokens, sampling)):
        for token_id in event.token_ids:
            yield decoder.add(token_id)
    yield decoder.flush()


def _engine(config: RunConfig) -> Engine:
    return Engine(config.model, config.engine_config(), random_weights=config.random_weights, seed=config.seed)


def _lines(engine: Engine, completions: list[Completion]) -> Iterator[str]:
    for index, completion in enumerate(completions):
        text = engine.tokenizer.decode(completion.token_ids) if engine.tokenizer else None
        yield json.dumps(
            {
                "index": index,
                "token_ids": completion.token_ids,
                "text": text,
                "finish_reason": completion.finish_reason,
            },
            ensure_ascii=False,
        )
