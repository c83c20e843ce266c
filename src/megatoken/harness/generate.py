"""Prompts from a file to answers in a file, or one prompt to an answer piece by piece."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from megatoken.config import AnswerConfig, RunConfig
from megatoken.datasets.prompts import load_prompts, load_texts
from megatoken.datasets.requests import answer_room, check_ids
from megatoken.engine.config import ModelConfig
from megatoken.engine.request import Request
from megatoken.engine.text_stream import TextStream
from megatoken.engine.tokenizer import Tokenizer
from megatoken.errors import MegatokenError, RequestError, StorageError
from megatoken.files import check_writable, storage_error, write_text
from megatoken.harness.prepare import tokenizer_warnings
from megatoken.harness.progress import Progress
from megatoken.runs.seal import refuse_sealed
from megatoken.targets import SampleEvent, Target
from megatoken.targets.backend import Backend, ServedModel
from megatoken.targets.factory import open_backend
from megatoken.text import count_of

POLL_SECONDS = 0.1


def generate_file(config: RunConfig, answers: AnswerConfig, prompts: Path, out: Path) -> None:
    """Answers every line of ``prompts``; ``out`` gets one JSON object a line, in the same order, all at the end.

    Until then each finished answer is in ``OUT.partial``, in the order of finishing.

    ``config`` and ``answers`` give what a line does not state; the stop ids of ``answers`` are added to those of every
    line. ``prompts``: JSON lines, see ``load_prompts``. An answer has ``index``, ``token_ids`` (null from a target that
    answers in text), ``text`` (null without a tokenizer) and ``finish_reason``.

    Raises:
        CheckpointError, CapacityError, DatasetError, RequestError: the first thing that cannot be used; nothing is
            written.
        StorageError: ``out`` cannot be written and is unchanged.
        NumericsError: the model's logits are not finite.
        KeyboardInterrupt: the user interrupted. These three errors say where the finished answers are.
    """
    out, partial = _check_files(prompts, out)
    lines: dict[int, str] = {}
    progress = Progress(quiet=True)
    try:
        with open_backend(_with_ids(config), progress) as backend:
            tokenizer = backend.tokenizer()
            requests = _load_requests(config, answers, prompts, backend.served(), tokenizer)
            with backend.load() as target:
                progress.clear()
                for index, line in answer(target, tokenizer, requests):
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
    finally:
        progress.clear()
    partial.unlink()


def stream_prompt(
    config: RunConfig, answers: AnswerConfig, prompt: str, render: Callable[[str], str] | None = None
) -> Iterator[str]:
    """Yields the answer to ``prompt``, or to what ``render`` makes of it, special tokens included, as it is made.

    Raises:
        CheckpointError, CapacityError, DatasetError, RequestError: what cannot be used.
        KeyboardInterrupt: the user interrupted; says that the answer is cut off.
    """
    if not prompt:
        raise RequestError("--prompt is empty; give some text")
    try:
        prompt.encode()
    except UnicodeEncodeError:  # Python's stand-in for bytes of a command line that are not UTF-8
        raise RequestError("--prompt: must be UTF-8 text, and some of its bytes are not") from None
    progress = Progress(quiet=True)
    with open_backend(_with_ids(config), progress) as backend:
        text_in = prompt if render is None else render(prompt)
        request = _prompt_request(config, answers, text_in, backend, add_special=render is None)
        tokenizer = backend.tokenizer()
        text = TextStream(tokenizer) if tokenizer is not None else None
        with backend.load() as target:
            progress.clear()
            target.submit(0, request)
            ended, shown = False, 0
            try:
                while not ended:
                    for event in target.poll(POLL_SECONDS):
                        _raise_failure(event)
                        ended = event.finish_reason is not None
                        new = event.token_ids if event.output_tokens is None else event.token_ids[shown:]
                        shown += len(new)
                        yield text.add(new) if text is not None and not event.text else event.text
            except KeyboardInterrupt:
                raise KeyboardInterrupt("interrupted; the answer is cut off") from None
    if text is not None:
        yield text.flush()


def _with_ids(config: RunConfig) -> RunConfig:
    """``config`` such that the replicas of a rack report the ids of answers, not only how many there are."""
    return config.model_copy(update={"text": True})


def _prompt_request(
    config: RunConfig, answers: AnswerConfig, prompt: str, backend: Backend, *, add_special: bool
) -> Request:
    model = backend.served()
    if model.shape is None or model.memory is None:
        return Request(prompt, config.max_tokens, answers.sampling(), answers.stop_token_ids)
    stop_token_ids = _stop_token_ids(answers, model.shape)
    tokenizer = backend.tokenizer()
    if tokenizer is None:
        raise RequestError(f"{model.name} has no tokenizer.json; give token ids in a file with --prompts")
    _warn(tokenizer, model.shape)
    ids = tokenizer.encode(prompt, add_special=add_special)
    check_ids("--prompt", "token id", ids, model.shape.vocabulary_size)
    stated = config.max_tokens if "max_tokens" in config.model_fields_set else None
    room = answer_room("--prompt", len(ids), stated, model.memory.max_length)
    return Request(ids, min(config.max_tokens, room), answers.sampling(), stop_token_ids)


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
    refuse_sealed(out.parent)
    check_writable(out.parent)
    return out, partial


def _load_requests(
    config: RunConfig, answers: AnswerConfig, prompts: Path, model: ServedModel, tokenizer: Tokenizer | None
) -> list[Request]:
    encode = tokenizer.encode if tokenizer else None
    if model.shape is None or model.memory is None:
        data_set = load_texts(prompts, encode=encode, default_max_tokens=config.max_tokens, sampling=answers.sampling())
        stop_token_ids = answers.stop_token_ids
    else:
        stop_token_ids = _stop_token_ids(answers, model.shape)
        _warn(tokenizer, model.shape)
        data_set = load_prompts(
            prompts,
            encode=encode,
            vocabulary_size=model.shape.vocabulary_size,
            max_length=model.memory.max_length,
            default_max_tokens=config.max_tokens,
            sampling=answers.sampling(),
        )
    return [replace(request, stop_token_ids=request.stop_token_ids + stop_token_ids) for request in data_set.requests]


def _warn(tokenizer: Tokenizer | None, shape: ModelConfig) -> None:
    for warning in tokenizer_warnings(tokenizer, shape):
        Progress().note(f"warning: {warning}")


def _stop_token_ids(answers: AnswerConfig, shape: ModelConfig) -> tuple[int, ...]:
    for token_id in answers.stop_token_ids:
        if not 0 <= token_id < shape.vocabulary_size:
            raise RequestError(
                f"--stop-token-ids: {token_id} is outside the vocabulary of {shape.vocabulary_size:,}; "
                "give ids below it"
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


def answer(target: Target, tokenizer: Tokenizer | None, requests: Sequence[Request]) -> Iterator[tuple[int, str]]:
    """Yields the index of each request and the line that answers it, in the order in which they end."""
    for index, request in enumerate(requests):
        target.submit(index, request)
    token_ids: dict[int, list[int]] = {index: [] for index in range(len(requests))}
    texts: dict[int, str] = dict.fromkeys(token_ids, "")
    while token_ids:
        for event in target.poll(POLL_SECONDS):
            _raise_failure(event)
            index = event.sample_id
            if event.output_tokens is not None:  # the last event has them all
                token_ids[index].clear()
            token_ids[index] += event.token_ids
            texts[index] += event.text
            if event.finish_reason is None:
                continue
            ids, text = token_ids.pop(index), texts.pop(index)
            answer = {
                "index": index,
                "token_ids": None if text else ids,
                "text": tokenizer.decode(ids) if tokenizer and not text else text or None,
                "finish_reason": event.finish_reason,
            }
            yield index, json.dumps(answer, ensure_ascii=False) + "\n"


def _raise_failure(event: SampleEvent) -> None:
    if event.error is not None:
        raise MegatokenError(event.error)
