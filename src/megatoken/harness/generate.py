"""Prompts from a file to answers in a file, or one prompt to an answer piece by piece."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from megatoken.config import AnswerConfig, RunConfig
from megatoken.datasets.prompts import load_prompts
from megatoken.datasets.requests import answer_room, check_ids
from megatoken.engine import Engine, Request
from megatoken.engine.tokenizer import Tokenizer
from megatoken.errors import MegatokenError, RequestError, StorageError
from megatoken.files import storage_error, write_text
from megatoken.harness.prepare import build_engine, check_writable, open_and_plan, tokenizer_of, tokenizer_warnings
from megatoken.harness.progress import Progress
from megatoken.text import count_of


def generate_file(config: RunConfig, answers: AnswerConfig, prompts: Path, out: Path) -> None:
    """Answers every line of ``prompts``; ``out`` gets one JSON object a line, in the same order, all at the end.

    Until then each answer stands in ``OUT.partial`` from the moment it is finished, in the order of finishing.

    Args:
        config: model, precision, engine and ``max_tokens`` for lines that state none.
        answers: sampling for lines that state none; its stop ids are added to those of every line.
        prompts: JSON lines, see ``load_prompts``.
        out: file to write: ``index``, ``token_ids``, ``text`` (null without a tokenizer), ``finish_reason``.

    Raises:
        CheckpointError, CapacityError, DatasetError, RequestError: the first thing that cannot be used; nothing is
            written.
        StorageError: ``out`` cannot be written and is as it was.
        NumericsError: the model computes no numbers any more.
        KeyboardInterrupt: somebody does not want to wait. These three say where the finished answers are.
    """
    out, partial = _check_files(prompts, out)
    lines: dict[int, str] = {}
    try:
        tokenizer = tokenizer_of(config.model)
        requests = _load_requests(config, answers, prompts, tokenizer)
        for index, line in _answer(build_engine(config, tokenizer), requests):
            lines[index] = line
            _write(partial, line, mode="a" if len(lines) > 1 else "w")
        write_text(out, "".join(lines[index] for index in range(len(requests))))
    except (KeyboardInterrupt, MegatokenError) as error:
        kept = "nothing was written"
        if lines and (whole := _whole_lines(partial)):
            kept = f"{whole:,} of {count_of(len(requests), 'answer')} are in {partial}"
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(f"interrupted; {kept}") from None
        if lines:
            error.args = (f"{error}; {kept}",)
        raise
    partial.unlink()


def stream_prompt(config: RunConfig, answers: AnswerConfig, prompt: str) -> Iterator[str]:
    """Yields the answer to ``prompt`` as it is made.

    Raises:
        CheckpointError, CapacityError, DatasetError, RequestError: what cannot be used.
        KeyboardInterrupt: as it came, but saying that the answer is cut off.
    """
    if not prompt:
        raise RequestError("--prompt is empty; give some text")
    try:
        prompt.encode()
    except UnicodeEncodeError:  # what Python makes of other bytes on a command line
        raise RequestError("--prompt: must be UTF-8 text, and some of its bytes are not") from None
    source, memory = open_and_plan(config)
    vocabulary_size = source.config.vocabulary_size
    stop_token_ids = _stop_token_ids(answers, vocabulary_size)
    tokenizer = tokenizer_of(config.model)
    if tokenizer is None:
        raise RequestError(f"{source.config.name} has no tokenizer.json; give token ids in a file with --prompts")
    _warn(tokenizer, vocabulary_size)
    ids = tokenizer.encode(prompt)
    check_ids("--prompt", "token id", ids, vocabulary_size)
    stated = config.max_tokens if "max_tokens" in config.model_fields_set else None
    room = answer_room("--prompt", len(ids), stated, memory.max_length)
    request = Request(ids, min(config.max_tokens, room), answers.sampling(), stop_token_ids)
    engine = build_engine(config, tokenizer)
    decoder = tokenizer.incremental()
    try:
        for event in engine.stream(request):
            for token_id in event.token_ids:
                yield decoder.add(token_id)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; the answer is cut off") from None
    yield decoder.flush()


def _check_files(prompts: Path, out: Path) -> tuple[Path, Path]:
    """The real path of ``out`` (a link stays one) and that of its partial file; refuses what must not be replaced."""
    try:
        if out.exists() and not out.is_file():
            raise StorageError(f"{out}: not a regular file; choose another with --out")
        out = out.resolve()
    except OSError as error:
        raise StorageError(f"{out}: {error.strerror}; choose another file with --out") from error
    if not out.parent.is_dir():
        raise StorageError(f"{out}: there is no folder {out.parent}; make it or choose another file with --out")
    partial = out.with_name(f"{out.name}.partial")
    if prompts.resolve() in (out, partial):
        raise StorageError(
            f"{prompts}: these are the prompts, which the answers would replace; choose another file with --out"
        )
    check_writable(out.parent)
    return out, partial


def _load_requests(
    config: RunConfig, answers: AnswerConfig, prompts: Path, tokenizer: Tokenizer | None
) -> list[Request]:
    source, memory = open_and_plan(config)
    stop_token_ids = _stop_token_ids(answers, source.config.vocabulary_size)
    _warn(tokenizer, source.config.vocabulary_size)
    data_set = load_prompts(
        prompts,
        encode=tokenizer.encode if tokenizer else None,
        vocabulary_size=source.config.vocabulary_size,
        max_length=memory.max_length,
        default_max_tokens=config.max_tokens,
        sampling=answers.sampling(),
    )
    return [replace(request, stop_token_ids=request.stop_token_ids + stop_token_ids) for request in data_set.requests]


def _warn(tokenizer: Tokenizer | None, vocabulary_size: int) -> None:
    for warning in tokenizer_warnings(tokenizer, vocabulary_size):
        Progress().note(f"warning: {warning}")


def _stop_token_ids(answers: AnswerConfig, vocabulary_size: int) -> tuple[int, ...]:
    for token_id in answers.stop_token_ids:
        if not 0 <= token_id < vocabulary_size:
            raise RequestError(
                f"--stop-token-ids: {token_id} is outside the vocabulary of {vocabulary_size:,}; give ids below it"
            )
    return answers.stop_token_ids


def _write(path: Path, line: str, mode: Literal["a", "w"]) -> None:
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(line)
    except OSError as error:
        raise storage_error(path, error) from error


def _whole_lines(path: Path) -> int:
    """Counted in the file: an interruption may come before or after the last was written."""
    try:
        return path.read_bytes().count(b"\n")
    except OSError:
        return 0


def _answer(engine: Engine, requests: Sequence[Request]) -> Iterator[tuple[int, str]]:
    """Yields the index of each request and the line that answers it, in the order in which they end."""
    index = {engine.submit(request): position for position, request in enumerate(requests)}
    tokens: dict[int, list[int]] = {ticket: [] for ticket in index}
    while engine.busy:
        for event in engine.step():
            tokens[event.ticket] += event.token_ids
            if event.finish_reason is None:
                continue
            token_ids = tokens.pop(event.ticket)
            answer = {
                "index": index[event.ticket],
                "token_ids": token_ids,
                "text": engine.tokenizer.decode(token_ids) if engine.tokenizer else None,
                "finish_reason": event.finish_reason,
            }
            yield index[event.ticket], json.dumps(answer, ensure_ascii=False) + "\n"
