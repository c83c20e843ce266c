"""A checkpoint against the one that it was made from: weights, next tokens, scores of tasks, lengths of answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatoken.accuracy.decoding import AnswerDecoder
from megatoken.accuracy.scores import Pair, check_installed, score
from megatoken.accuracy.targets import LENGTH_TOLERANCE
from megatoken.datasets.prompts import load_prompts
from megatoken.datasets.references import HELD_OUT, References, load_references
from megatoken.datasets.requests import Dataset
from megatoken.engine import Completion, Engine, EngineConfig, FinishReason
from megatoken.engine.checkpoint import Checkpoint
from megatoken.engine.config import REFERENCE, Precision, model_folder
from megatoken.engine.runner import open_runner
from megatoken.engine.schemes.packed4 import Kind, Packed4, pack
from megatoken.errors import UsageError
from megatoken.files import new_document
from megatoken.runs.run import Verdict

KIND = "accuracy_against"
ANSWERED_TOGETHER = 64
MOST_POSITIONS, MOST_LOGPROBS = 20_000, 2**27  # whose distributions are compared, and values of them in memory
Progress = Callable[[int, int], None]
Z = 1.959963984540054  # of 95 %, two-sided
RESAMPLES = 2000
_BLOCK_DRAWS = 2**22  # indices drawn at a time
Floats = NDArray[np.float64]
_LARGEST_E8M0 = 252  # six times as much is finite in fp32


@dataclass(frozen=True, slots=True)
class _Answers:
    """What one model did: its answers, and what it expects after each token of the texts."""

    completions: Sequence[Completion]
    logprobs: Sequence[Tensor]  # fp32 [tokens, vocabulary] of the first rows
    answers_from: Sequence[int]  # the position in each that chooses the first token of its answer


def compare(
    model: str,  # directory, or ``reference``
    against: str,  # directory, or ``reference``
    *,
    # JSON lines of prompts with expected answers; by default the held-out tasks of the reference model, if both
    # checkpoints have its tokenizer
    references: Path | None = None,
    samples: int | None = None,  # how many of the prompts, from the first; None for all
    precision: Precision = "bf16",  # of weights and activations
    share: float = 0.99,  # of each score
    # called with the number of steps done, and of all: both models, answers and texts
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The document on the checkpoint ``model`` against ``against``, both run in ``precision``.

    Each model answers the same prompts, greedily. The text whose next tokens are compared is each prompt with the
    answer of ``against``. VALID if the lower end of each score's interval, relative to that of ``against``, reaches
    ``share``, and the mean length of the answers is within 10 %; MEASURED if too few prompts can show that.

    Raises:
        CheckpointError, CapacityError, DatasetError, UsageError: what cannot be used, or nothing could fail.
    """
    check_installed()
    if share <= 0:
        raise UsageError(f"--share {share:g}: nothing could fail; give a share above 0")
    folders = [model_folder(model), model_folder(against)]
    checkpoints = [Checkpoint.open(folder) for folder in folders]
    shapes = [one.config.tensor_shapes() for one in checkpoints]
    if shapes[0] != shapes[1]:
        raise UsageError(f"{folders[0]}: has other shapes than {folders[1]}; give the checkpoint that it was made from")
    expected = load_references(references or _held_out(folders))
    count = min(samples or len(expected.texts), len(expected.texts))
    steps = _Steps(progress, 4)
    meant = _answers(folders[1], expected.path, count, precision, None, steps)
    found = _answers(folders[0], expected.path, count, precision, meant.completions, steps)
    decoders = [AnswerDecoder(folder) for folder in folders]
    scores = [
        _scores(expected, decoder, one.completions) for decoder, one in zip(decoders, (found, meant), strict=True)
    ]
    can_fail = int(np.any([values > 0 for values in scores[1].values()], axis=0).sum())
    if not can_fail:
        raise UsageError(
            f"{folders[1]}: scores 0 in every prompt, so nothing could fail; give prompts that it can answer"
        )
    needed = prompts_needed(share)
    tasks = {name: _task(scores[0][name], scores[1][name]) for name in scores[0]}
    lengths = _lengths(found.completions, meant.completions)
    failed = [name for name, one in tasks.items() if one["ratio"]["low"] < share]
    if abs(lengths["ratio"]["value"] - 1) > LENGTH_TOLERANCE:
        failed.append("tokens_per_sample")
    checked = check_decoders()
    if any(one.wrong for one in checked):
        failed.append("decoders")
    enough = needed is not None and can_fail >= needed
    return new_document(
        KIND,
        title="Accuracy against another checkpoint",
        verdict=Verdict.INVALID if failed else Verdict.VALID if enough else Verdict.MEASURED,
        failed=failed,
        share=share,
        model=model,
        model_hash=checkpoints[0].content_hash,
        against=against,
        against_hash=checkpoints[1].content_hash,
        precision=precision,
        prompts=str(expected.path),
        prompts_sha256=expected.content_hash,
        samples=count,
        samples_that_can_fail=can_fail,  # of which ``against`` scores more than 0
        samples_needed=needed,
        decoders=[asdict(one) for one in checked],
        weights=_weights(*checkpoints),
        next_tokens=_next_tokens(found.logprobs, meant.logprobs),
        next_tokens_of_answers=_next_tokens(
            *(
                [rows[start:] for rows, start in zip(one.logprobs, one.answers_from, strict=True)]
                for one in (found, meant)
            )
        ),
        tasks=tasks,
        lengths=lengths,
        identical_answers=sum(
            one.token_ids == other.token_ids for one, other in zip(found.completions, meant.completions, strict=True)
        ),
    )


class _Steps:
    """Progress over several loops of equal weight."""

    def __init__(self, progress: Progress | None, loops: int) -> None:
        self._progress, self._loops, self._loop = progress, loops, 0

    def each(self, items: Sequence[Any]) -> Iterator[Any]:
        for number, item in enumerate(items):
            yield item
            if self._progress is not None:
                self._progress(self._loop * len(items) + number + 1, self._loops * len(items))
        self._loop += 1


def _held_out(folders: Sequence[Path]) -> Path:
    known = (model_folder(REFERENCE) / "tokenizer.json").read_bytes()
    for folder in folders:
        tokenizer = folder / "tokenizer.json"
        if not tokenizer.is_file() or tokenizer.read_bytes() != known:
            raise UsageError(f"{folder}: name prompts with expected answers (JSON lines) with --references")
    return HELD_OUT


def _answers(
    folder: Path,
    prompts: Path,
    count: int,
    precision: Precision,
    texts: Sequence[Completion] | None,
    steps: _Steps,
) -> _Answers:
    """One model's answers, and its logprobs in the prompts followed by the answers ``texts``, or by its own."""
    config = EngineConfig(precision=precision)
    with Engine(folder, config) as engine:
        data_set = _prompts(engine, prompts)
        requests = [data_set.requests[row] for row in range(count)]
        blocks = [requests[first : first + ANSWERED_TOGETHER] for first in range(0, count, ANSWERED_TOGETHER)]
        completions = [one for block in steps.each(blocks) for one in engine.generate(block)]
    runner = open_runner(folder, config, random_weights=False, seed=0, tokenizer=None)
    most = min(MOST_POSITIONS, MOST_LOGPROBS // runner.model_config.vocabulary_size)
    whole: list[list[int]] = []
    starts: list[int] = []
    for request, answer in zip(requests, texts or completions, strict=True):
        ids = [*request.prompt, *answer.token_ids][: runner.memory_plan.max_length - 1]
        if sum(map(len, whole)) + len(ids) > most:
            break
        whole.append(ids[:-1])
        starts.append(len(request.prompt) - 1)
    logprobs = [runner.teacher_forced(ids).float().log_softmax(-1).cpu() for ids in steps.each(whole)]
    runner.close()
    return _Answers(completions, logprobs, starts)


def _prompts(engine: Engine, prompts: Path) -> Dataset:
    tokenizer = engine.tokenizer
    return load_prompts(
        prompts,
        encode=None if tokenizer is None else tokenizer.encode,
        vocabulary_size=engine.model_config.vocabulary_size,
        max_length=engine.memory_plan.max_length,
    )


def _scores(expected: References, decoder: AnswerDecoder, answers: Sequence[Completion]) -> dict[str, Floats]:
    """Scores of each answer, 0 to 100, by metric."""
    places = [f"answer {row}" for row in range(len(answers))]
    texts = decoder.decode([np.array(one.token_ids, dtype=np.int64) for one in answers], places)
    pairs = [Pair(expected.scorings[row], text, expected.texts[row]) for row, text in enumerate(texts)]
    scored = score(pairs, sentences=False)
    names = dict.fromkeys(name for one in scored for name in one.metrics)
    return {name: np.array([one.metrics.get(name, 0.0) for one in scored]) for name in names}


def _task(mine: Floats, theirs: Floats) -> dict[str, Any]:
    right, meant = mine == 100, theirs == 100
    only_model, only_against = int((right & ~meant).sum()), int((meant & ~right).sum())
    return {
        "model": float(mine.mean()),
        "against": float(theirs.mean()),
        "difference": bootstrap(lambda a, b: a - b, mine, theirs)._asdict(),
        "ratio": bootstrap(ratio, mine, theirs)._asdict(),
        "only_model_full": only_model,
        "only_against_full": only_against,
        "mcnemar_p": mcnemar(only_model, only_against),
    }


def _lengths(mine: Sequence[Completion], theirs: Sequence[Completion]) -> dict[str, Any]:
    tokens = [np.array([float(len(one.token_ids)) for one in answers]) for answers in (mine, theirs)]
    ended = [sum(one.finish_reason is not FinishReason.LENGTH for one in answers) for answers in (mine, theirs)]
    return {
        "model": float(tokens[0].mean()),
        "against": float(tokens[1].mean()),
        "ratio": bootstrap(ratio, *tokens)._asdict(),
        "model_ended": wilson(ended[0], len(mine))._asdict(),
        "against_ended": wilson(ended[1], len(theirs))._asdict(),
    }


def _next_tokens(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> dict[str, Any]:
    """Over all positions: divergence of the model's distribution from the other's, and how often their best agree."""
    divergence, positions, same = [], [], 0
    for q, p in zip(mine, theirs, strict=True):
        divergence.append(float((p.exp() * (p - q)).sum(-1).mean()))
        positions.append(float(len(p)))
        same += int((q.argmax(-1) == p.argmax(-1)).sum())
    weights = np.array(positions)
    mean = bootstrap(ratio, np.array(divergence) * weights, weights)
    total = int(weights.sum())
    return {
        "texts": len(divergence),
        "positions": total,
        "kl_nats": mean._asdict(),
        "kl_largest_text_nats": max(divergence),
        "same_best_token": wilson(same, total)._asdict(),
    }


def _weights(model: Checkpoint, against: Checkpoint) -> list[dict[str, Any]]:
    """By kind of linear: error relative to the root mean square of its values, of the whole and of the worst block."""
    found: dict[str, list[tuple[float, float, str]]] = {}
    for name in model.config.linear_shapes:
        mine, theirs = (one.read(name, torch.float32) for one in (model, against))
        error, size = (mine - theirs).square(), theirs.square().mean()
        width = math.gcd(16, error.shape[1])
        worst = error.view(-1, width).mean(-1).amax() / size
        stored = model.quantized.stored(name) if model.quantized is not None and name in model.quantized else None
        form = "plain" if stored is None else stored.kind if isinstance(stored, Packed4) else "e4m3"
        part = name.removesuffix(".weight").rpartition(".")[2]
        found.setdefault(part, []).append((math.sqrt(error.mean() / size), math.sqrt(worst), form))
    return [
        {
            "linears": part,
            "count": len(rows),
            "form": ", ".join(sorted({form for *_, form in rows})),
            "relative_rms_error": math.sqrt(sum(error**2 for error, *_ in rows) / len(rows)),
            "worst_block_error": max(worst for _, worst, _ in rows),
        }
        for part, rows in sorted(found.items())
    ]


class Interval(NamedTuple):
    """A value and its interval of 95 %."""

    value: float
    low: float
    high: float


def wilson(found: int, trials: int) -> Interval:
    """A share by Wilson's score interval (1927), which is right for shares near 1 too."""
    share, weight = found / trials, Z * Z / trials
    middle = (share + weight / 2) / (1 + weight)
    half = Z / (1 + weight) * math.sqrt(share * (1 - share) / trials + weight / (4 * trials))
    return Interval(share, max(0.0, middle - half), min(1.0, middle + half))


def bootstrap(statistic: Callable[..., Floats], *columns: Floats, seed: int = 0) -> Interval:
    """A statistic of rows with its percentile interval over ``RESAMPLES`` draws of as many rows.

    Args:
        statistic: of the means of the columns, for arrays of means.
        columns: one value for each row; a draw takes the same rows of all, so differences between columns are paired.
        seed: of the draws.
    """
    rows = len(columns[0])
    draw = np.random.default_rng(seed)
    size = max(1, min(RESAMPLES, _BLOCK_DRAWS // rows))
    parts = []
    for first in range(0, RESAMPLES, size):
        chosen = draw.integers(0, rows, (min(size, RESAMPLES - first), rows))
        parts.append(statistic(*(column[chosen].mean(axis=1) for column in columns)))
    low, high = np.percentile(np.concatenate(parts), [2.5, 97.5])
    value = statistic(*(np.array(column.mean()) for column in columns))
    return Interval(float(value), float(low), float(high))


def ratio(numerators: Floats, denominators: Floats) -> Floats:
    """Of means; 1 of nothing to nothing."""
    both_zero = (numerators == 0) & (denominators == 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient: Floats = np.where(both_zero, 1.0, numerators / denominators)
    return quotient


def prompts_needed(share: float) -> int | None:
    """How many prompts without a loss show with 95 % confidence that ``share`` is kept; None: no number does.

    With no failure in n prompts up to 1 - 0.05^(1/n) of all prompts may fail. A bootstrap does not know of failures
    that no prompt showed: its interval then has no width, even of one prompt.
    """
    return math.ceil(math.log(0.05) / math.log(share)) if share < 1 else None


def mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided exact probability of so uneven a split of the rows that one of two alone answered right."""
    trials, fewer = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(trials, count) for count in range(fewer + 1)) / 2**trials
    return min(1.0, float(2 * tail))


@dataclass(frozen=True, slots=True)
class DecoderCheck:
    """A format's decoder: ``values`` compared, ``wrong`` of them."""

    name: str
    values: int
    wrong: int


def check_decoders() -> list[DecoderCheck]:
    """All formats that are read."""
    every_e4m3 = [bits for bits in range(256) if bits & 127 != 127]
    return [
        _check("e2m1 with e4m3 scales (NVFP4)", "e2m1", every_e4m3, torch.float8_e4m3fn),
        _check("e2m1 with powers of two (MXFP4)", "e2m1", range(_LARGEST_E8M0 + 1), torch.float8_e8m0fnu),
        *(_check(f"int4 with zero {zero}", "int4", range(0, 0x7C00, 37), torch.float16, zero) for zero in (0, 8, 15)),
    ]


def e2m1(code: int) -> Fraction:
    """A sign, two bits of exponent with bias 1, one bit of mantissa."""
    exponent, mantissa = code >> 1 & 3, Fraction(code & 1, 2)
    magnitude = mantissa if exponent == 0 else (1 + mantissa) * 2 ** (exponent - 1)
    return -magnitude if code & 8 else magnitude


def _scale(bits: int, dtype: torch.dtype) -> Fraction:
    if dtype == torch.float8_e8m0fnu:
        return Fraction(2) ** (bits - 127)
    mantissa_bits, bias = (3, 7) if dtype == torch.float8_e4m3fn else (10, 15)
    sign_bit = 1 << (7 if dtype == torch.float8_e4m3fn else 15)
    exponent, mantissa = (bits & sign_bit - 1) >> mantissa_bits, bits & (1 << mantissa_bits) - 1
    share = Fraction(mantissa, 1 << mantissa_bits)
    magnitude = share * Fraction(2) ** (1 - bias) if exponent == 0 else (1 + share) * Fraction(2) ** (exponent - bias)
    return -magnitude if bits & sign_bit else magnitude


def _check(name: str, kind: Kind, scales: range | list[int], dtype: torch.dtype, zero: int = 0) -> DecoderCheck:
    """Each scale in a row of its own, with all sixteen codes. The products here are exact in fp32."""
    codes = torch.arange(16, dtype=torch.uint8).expand(len(scales), 16)
    bits = torch.tensor(list(scales), dtype=torch.int32)[:, None]
    stored = bits.to(torch.uint8 if dtype.itemsize == 1 else torch.int16).view(dtype)
    zeros = torch.full((len(scales), 1), zero, dtype=torch.uint8) if kind == "int4" else None
    found = Packed4(pack(codes), 16, kind, stored, zero_NG=zeros).decode(torch.float32)
    meant = [
        [(e2m1(code) if kind == "e2m1" else code - zero) * _scale(one, dtype) for code in range(16)] for one in scales
    ]
    wrong = sum(
        Fraction(value) != wanted
        for row, wanted_row in zip(found.tolist(), meant, strict=True)
        for value, wanted in zip(row, wanted_row, strict=True)
    )
    return DecoderCheck(name, found.numel(), wrong)
