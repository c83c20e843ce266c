"""Greedy answers of the model that ships with the package: twice the same, and those that it gave on other machines.

This goes through all of the engine: tokens in, kernels, cache, scheduler, tokens out. The model is sure of almost every
answer, so rounding changes few: of 2,048, fp32 and bf16 on a processor differ in one. For the same reason a wrong bit
seldom changes a token. It does change log-probabilities, so these must have the same bits the second time.
"""

from __future__ import annotations

import json
import zlib

import numpy as np

from megatoken.engine import Completion, Engine, EngineConfig, Request
from megatoken.engine.config import REFERENCE, Precision, model_folder
from megatoken.engine.device import gpu_obstacle
from megatoken.engine.schemes import find_scheme
from megatoken.errors import CheckpointError
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
    # The bits of like processors depend on what compiled the kernels.
    found = _compared(engine_precision(setting), *CPU_SIZES)
    yield from (one for one in found if isinstance(one, NotRun) or one.better != "same")


def on_gpu(setting: Setting) -> Outcomes:
    """In bf16 and fp8."""
    formats: tuple[Precision, ...] = ("bf16", "fp8")
    for precision in formats:
        if obstacle := gpu_obstacle(find_scheme(precision)):
            title = f"Answers of the reference model in {precision}"
            yield NotRun(f"answers_{precision}", title, obstacle, f"take a GPU that has {precision}")
            continue
        yield from _compared(precision, *GPU_SIZES)


def first_requests(prompts: int) -> list[Request]:
    """Of the held-out prompts. Raises CheckpointError: the file is missing or damaged."""
    try:
        rows = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()[:prompts]]
        if len(rows) == prompts:
            return [Request(row["prompt"], row["max_tokens"], logprobs=0) for row in rows]
    except (LookupError, OSError, TypeError, ValueError):
        pass
    raise CheckpointError(f"{PROMPTS.name} is missing or damaged")


def two_passes(
    precision: Precision, requests: list[Request], sequences: int, step_tokens: int
) -> tuple[str, list[list[Completion]]]:
    """The SHA-256 of the weights, and the answers with log-probabilities: once, and once more."""
    config = EngineConfig(
        precision=precision,
        max_sequences=sequences,
        max_batched_tokens=step_tokens,
        cache_tokens=sequences * TOKENS_OF_A_SEQUENCE,
        cuda_graphs=False,  # the second pass would replay graphs of other lengths, which add in another order
    )
    with Engine(REFERENCE, config) as engine:
        return engine.content_hash, [engine.generate(requests) for _ in range(2)]


def checksum(answer: Completion) -> int:
    """Of the tokens, below 2**32."""
    return zlib.crc32(_tokens(answer))


def stored(precision: Precision) -> tuple[str, list[int]]:
    """The SHA-256 of the weights and the checksums of all answers. Raises CheckpointError: missing or damaged."""
    try:
        document = json.loads(STORED.read_text(encoding="utf-8"))
        digits = document["checksums"][precision]
        if len(digits) == 8 * GPU_SIZES[0]:
            sums = [int(digits[first : first + 8], 16) for first in range(0, len(digits), 8)]
            return str(document["weights_sha256"]), sums
    except (LookupError, OSError, TypeError, ValueError):
        pass
    raise CheckpointError(f"{STORED.name} is missing or damaged")


def _compared(precision: Precision, prompts: int, sequences: int, step_tokens: int) -> Outcomes:
    title = f"{prompts:,} answers of the reference model in {precision}"
    try:
        weights, checksums = stored(precision)
        found, (first, second) = two_passes(precision, first_requests(prompts), sequences, step_tokens)
        if found != weights:
            raise CheckpointError("the weights are others")
    except CheckpointError as error:
        reason = f"the model that ships with the package is damaged in {STORED.parent}: {error}"
        yield NotRun(f"answers_{precision}", title, reason, "install megatoken again")
        return
    changed = sum(_bits(one) != _bits(other) for one, other in zip(first, second, strict=True))
    yield Value(f"repeat_answers_{precision}", f"{title}, computed twice", "wrong", [changed], "zero")
    different = sum(checksum(one) != known for one, known in zip(first, checksums, strict=False))
    most = int(ROUNDED_SHARE * prompts)
    note = f"{count_of(different, 'answer')} of other tokens; rounding may change {most}" if different else ""
    wrong = different if different > most else 0
    yield Value(f"answers_{precision}", f"{title}, against the stored ones", "wrong", [wrong], "zero", note=note)
    digest = zlib.crc32(b"".join(map(_bits, first)))
    yield Value(f"digest_answers_{precision}", f"{title}, all bits", "digest", [digest], "same")


def _bits(answer: Completion) -> bytes:
    """Of its tokens and their log-probabilities."""
    return _tokens(answer) + np.array([one.logprob for one in answer.logprobs], "<f8").tobytes()


def _tokens(answer: Completion) -> bytes:
    return np.array(answer.token_ids, "<u4").tobytes()
