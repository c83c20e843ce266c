"""Greedy answers of the model that ships with the package: twice the same, and those that it gave on other machines.

This goes through all of the engine: tokens in, kernels, cache, scheduler, tokens out. The model is sure of almost every
answer, so rounding changes few: of 2,048, fp32 and bf16 on a processor differ in one. For the same reason a wrong bit
seldom changes a token. It does change log-probabilities, so these must have the same bits the second time.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator

import numpy as np

from megatoken.engine import Completion, Engine, EngineConfig, Request
from megatoken.engine.config import REFERENCE, Precision, model_folder
from megatoken.engine.device import gpu_obstacle
from megatoken.engine.schemes import find_scheme
from megatoken.hardware.qualify.processor import engine_precision
from megatoken.hardware.qualify.values import NotRun, Outcomes, Setting, Value
from megatoken.text import count_of

PROMPTS, STORED = (model_folder(REFERENCE) / name for name in ("held_out.jsonl", "answers.json"))
"""The test set of the model, and the checksums of its answers, by precision."""
CPU_SIZES, GPU_SIZES = (128, 128, 2048), (2048, 512, 8192)
"""Prompts; running sequences and tokens of a step, so that every machine plans the same steps."""
TOKENS_OF_A_SEQUENCE = 1024
"""Pages for so many at once: no prompt with its answer is longer."""
ROUNDED_SHARE = 0.02
"""Of the answers, that may differ from the stored ones: other kernels round in another way."""


def on_cpu(setting: Setting) -> Outcomes:
    """In the engine's fastest format for this processor."""
    for outcome in _compared(engine_precision(setting), *CPU_SIZES):
        if outcome.better != "same":  # the bits of like processors depend on what compiled the kernels
            yield outcome


def on_gpu(setting: Setting) -> Outcomes:
    """In bf16 and fp8."""
    formats: tuple[Precision, ...] = ("bf16", "fp8")
    for precision in formats:
        if obstacle := gpu_obstacle(find_scheme(precision)):
            title = f"Answers of the reference model in {precision}"
            yield NotRun(f"answers_{precision}", title, obstacle, f"take a GPU that has {precision}")
            continue
        yield from _compared(precision, *GPU_SIZES)


def two_passes(precision: Precision, prompts: int, sequences: int, step_tokens: int) -> list[list[Completion]]:
    """The answers to the first held-out prompts, with log-probabilities, and those to the same prompts once more."""
    config = EngineConfig(
        precision=precision,
        max_sequences=sequences,
        max_batched_tokens=step_tokens,
        cache_tokens=sequences * TOKENS_OF_A_SEQUENCE,
        cuda_graphs=False,  # the second pass would replay graphs of other lengths, which add in another order
    )
    rows = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()[:prompts]]
    requests = [Request(row["prompt"], row["max_tokens"], logprobs=0) for row in rows]
    with Engine(REFERENCE, config) as engine:
        return [engine.generate(requests) for _ in range(2)]


def checksum(answer: Completion) -> int:
    """Of the tokens, below 2**32."""
    return zlib.crc32(np.array(answer.token_ids, "<u4").tobytes())


def stored(precision: Precision) -> list[int]:
    """The checksums in the package."""
    digits = json.loads(STORED.read_text(encoding="utf-8"))["checksums"][precision]
    return [int(digits[first : first + 8], 16) for first in range(0, len(digits), 8)]


def _compared(precision: Precision, prompts: int, sequences: int, step_tokens: int) -> Iterator[Value]:
    first, second = two_passes(precision, prompts, sequences, step_tokens)
    title = f"{prompts:,} answers of the reference model in {precision}"
    changed = sum(_bits(one) != _bits(other) for one, other in zip(first, second, strict=True))
    yield Value(f"repeat_answers_{precision}", f"{title}, computed twice", "wrong", [changed], "zero")
    different = sum(checksum(one) != known for one, known in zip(first, stored(precision), strict=False))
    note = f"{count_of(different, 'answer')} of other tokens, as rounding may cause" if different else ""
    beyond = different if different > ROUNDED_SHARE * prompts else 0
    yield Value(f"answers_{precision}", f"{title}, against the stored ones", "wrong", [beyond], "zero", note=note)
    digest = zlib.crc32(b"".join(map(_bits, first)))
    yield Value(f"digest_answers_{precision}", f"{title}, all bits", "digest", [digest], "same")


def _bits(answer: Completion) -> bytes:
    """Of its tokens and their log-probabilities."""
    logprobs = [one.logprob for one in answer.logprobs]
    return np.array(answer.token_ids, "<u4").tobytes() + np.array(logprobs, "<f8").tobytes()
