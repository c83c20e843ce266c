"""From rows to tokens: tokenizer, held-out set, and the shards that worker processes draw for training.

Imports no PyTorch, so that a worker starts at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from reference_model.tasks import Row, draw

PAD, BEGIN, END = "<pad>", "<s>", "</s>"
PAD_ID, BEGIN_ID, END_ID = 0, 1, 2

LONGEST_PROMPT_TOKENS = 600
LONGEST_ANSWER_TOKENS = 300

# A digit is a token of its own, so that numbers have places; a word takes the space before it; punctuation takes the
# space after it where a digit follows, so that lists of numbers are short.
_PIECES = Regex(r"[0-9]| ?[A-Za-z]+| ?[^\sA-Za-z0-9]+(?: (?=[0-9]))?|\s+")


Layout = tuple[tuple[int, int], ...]
"""How a training step's tokens are cut: rows and length of each group of equally long rows, by rising length.

A row shorter than its group's length is padded at the end.
"""


def layout_tokens(layout: Layout) -> int:
    """Tokens of one step, padding included."""
    return sum(rows * length for rows, length in layout)


@dataclass(frozen=True, slots=True)
class Group:
    """Equally long rows of tokens.

    Attributes:
        token_ids_RS: uint16, padded at the end.
        answer_starts_R: int32, position of the first token of the answer.
        lengths_R: int32, tokens without padding, the end token included.
    """

    token_ids_RS: NDArray[np.uint16]
    answer_starts_R: NDArray[np.int32]
    lengths_R: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """Token ids with begin and end token; the answer starts at ``answer_start``."""

    token_ids: list[int]
    answer_start: int


def rows_of(seed: str) -> Iterator[Row]:
    """Endless rows; equal seeds give equal rows."""
    rng = Random(seed)
    while True:
        yield draw(rng)


def train_tokenizer(seed: int, vocabulary_size: int, rows: int) -> Tokenizer:
    """A byte-level BPE over the text of ``rows`` generated rows; it puts the begin token before a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_PIECES, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[PAD, BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (row.prompt + row.answer for row in islice(rows_of(f"tokenizer {seed}"), rows))
    tokenizer.train_from_iterator(texts, trainer, length=rows)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, BEGIN_ID)])
    return tokenizer


def encode_rows(tokenizer: Tokenizer, rows: list[Row]) -> list[EncodedRow | None]:
    """Prompt and answer are encoded apart, as at inference; None for rows that are longer than the limits."""
    texts = [text for row in rows for text in (row.prompt, row.answer)]
    ids = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]
    encoded: list[EncodedRow | None] = []
    for prompt, answer in zip(ids[::2], ids[1::2], strict=True):
        answer = [*answer[1:], END_ID]
        fits = len(prompt) <= LONGEST_PROMPT_TOKENS and len(answer) <= LONGEST_ANSWER_TOKENS
        encoded.append(EncodedRow(prompt + answer, len(prompt)) if fits else None)
    return encoded


def held_out_rows(tokenizer: Tokenizer, seed: int, count: int) -> list[Row]:
    """``count`` rows within the limits, no two with the same problem."""
    chosen: dict[bytes, Row] = {}
    source = rows_of(f"held out {seed}")
    while len(chosen) < count:
        batch = list(islice(source, 256))
        for row, encoded in zip(batch, encode_rows(tokenizer, batch), strict=True):
            if encoded is not None and len(chosen) < count:
                chosen.setdefault(row.key, row)
    return list(chosen.values())


def plan_layout(tokenizer: Tokenizer, seed: int, lengths: tuple[int, ...], tokens: int, rows: int) -> Layout:
    """Groups of the given lengths in the proportions that the tasks have by nature, of about ``tokens`` in all.

    ``rows``: drawn to find the proportions.
    """
    drawn = encode_rows(tokenizer, list(islice(rows_of(f"layout {seed}"), rows)))
    sizes = np.array([len(row.token_ids) for row in drawn if row is not None])
    counts = np.bincount(np.searchsorted(lengths, sizes), minlength=len(lengths))
    scale = tokens / (counts @ np.array(lengths))
    return tuple((max(1, round(count * scale)), length) for count, length in zip(counts, lengths, strict=True))


def group_rows(rows: list[EncodedRow], length: int) -> Group:
    """Rows as arrays, padded to ``length``."""
    token_ids = np.full((len(rows), length), PAD_ID, np.uint16)
    for index, row in enumerate(rows):
        token_ids[index, : len(row.token_ids)] = row.token_ids
    return Group(
        token_ids,
        np.array([row.answer_start for row in rows], np.int32),
        np.array([len(row.token_ids) for row in rows], np.int32),
    )


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """All that a worker needs to draw a shard: ``steps`` steps of ``layout``, none of whose problems is held out."""

    tokenizer_json: str
    layout: Layout
    steps: int
    seed: int
    held_out_keys: frozenset[bytes]


class ShardMaker:
    """Draws shards; shard ``index`` is the same in every process and at every time."""

    def __init__(self, plan: ShardPlan) -> None:
        self._plan = plan
        self._tokenizer: Tokenizer = Tokenizer.from_str(plan.tokenizer_json)

    def make(self, index: int) -> list[Group]:
        """A group for each of the layout's, with the rows of all steps."""
        plan = self._plan
        lengths = [length for _, length in plan.layout]
        wanted = [rows * plan.steps for rows, _ in plan.layout]
        filled: list[list[EncodedRow]] = [[] for _ in lengths]
        source = rows_of(f"training {plan.seed} {index}")
        while any(len(rows) < count for rows, count in zip(filled, wanted, strict=True)):
            batch = [row for row in islice(source, 256) if row.key not in plan.held_out_keys]
            for encoded in encode_rows(self._tokenizer, batch):
                if encoded is None:
                    continue
                group = int(np.searchsorted(lengths, len(encoded.token_ids)))
                if len(filled[group]) < wanted[group]:
                    filled[group].append(encoded)
        return [group_rows(rows, length) for rows, length in zip(filled, lengths, strict=True)]


_maker: ShardMaker | None = None


def start_worker(plan: ShardPlan) -> None:
    """Initialise a worker process; it yields the processor to the trainer."""
    global _maker
    os.nice(5)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _maker = ShardMaker(plan)


def make_shard(index: int) -> list[Group]:
    """A shard, in a worker process."""
    assert _maker is not None
    return _maker.make(index)
