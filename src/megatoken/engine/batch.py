"""A ``StepPlan`` as plain arrays: which ids at which positions, where their keys go, what each query sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatoken.engine.cache import DUMP_PAGE
from megatoken.engine.step_plan import StepPlan

Ints = NDArray[np.int32]
USUAL_TOKENS = 512
"""Assumed length of every sequence but the longest, where attention is cut into pieces before lengths are known."""


@dataclass(frozen=True, slots=True)
class StepArrays:
    """One step for a back end to turn into tensors. T tokens: decodes first, then prompt chunks, then padding.

    Page ids count from 1: page 0 is the dump page. Padding is token 0 at position 0, writes to the dump page and is
    never read; ``sample_indices`` is padded with 0.
    """

    token_ids: Ints  # [T] of prompt tokens; 0 where table_slots is set
    table_slots: Ints  # [T] slot whose newest token is the token's id, -1 for prompt tokens
    positions: Ints  # [T]
    cache_slots: Ints  # [T] page * page_size + offset of the token's key
    pages: Ints  # [R, W] of each sequence, in order
    # The same two of layers with windows, if these have pages of their own; else empty.
    window_slots: Ints  # [T]
    window_pages: Ints  # [R, W], of which only the places of keys that a query sees are up to date
    lengths: Ints  # [R] keys that the last token of each sequence sees
    decodes: int  # the first sequences, one token each
    chunk_starts: Ints  # [R - decodes + 1] first token of each chunk, and the token after the last
    sampled: NDArray[np.int64]  # [S] which sequences sample
    sample_indices: Ints  # [S, padded] their last tokens
    sample_slots: Ints  # [S] their slots

    @property
    def samples(self) -> int:
        """S, tokens that sample."""
        return len(self.sampled)

    @property
    def windowed(self) -> bool:
        """Whether layers with windows have pages of their own."""
        return len(self.window_slots) > 0


def step_arrays(
    plan: StepPlan,  # what to run
    page_table: Ints,  # the scheduler's [slots, pages], the plan's new pages included
    page_size: int,  # tokens per page
    host_tokens: Callable[[int, int, int], list[int]],  # ``(request_id, start, count) -> ids`` of prompt tokens
    padded_tokens: Callable[[int], int],  # number of tokens -> number to run
) -> StepArrays:
    """Turn a plan into arrays."""
    count, decodes = plan.count, plan.decodes
    ends = np.cumsum(count, dtype=np.int32)
    tokens = int(ends[-1])
    padding = padded_tokens(tokens) - tokens
    starts = ends - count
    positions = np.arange(tokens, dtype=np.int32) - np.repeat(starts - plan.start, count)
    lengths = plan.start + count
    width = -(-int(lengths.max()) // page_size)

    def paged(table: Ints) -> tuple[Ints, Ints]:
        page = table[np.repeat(plan.slot, count), positions // page_size] + np.int32(1)
        slots = page * np.int32(page_size) + positions % page_size
        return np.pad(slots, (0, padding), constant_values=DUMP_PAGE), table[plan.slot, :width] + np.int32(1)

    cache_slots, pages = paged(page_table)
    window_slots, window_pages = cache_slots[:0], pages[:0]
    if plan.window_table is not None:
        window_slots, window_pages = paged(plan.window_table)

    token_ids, table_slots = np.zeros((2, tokens + padding), dtype=np.int32)
    table_slots[decodes:] = -1
    table_slots[:decodes] = plan.slot[:decodes]
    prompts: list[int] = []
    for chunk in range(decodes, len(count)):
        prompts += host_tokens(int(plan.request_id[chunk]), int(plan.start[chunk]), int(count[chunk]))
    token_ids[decodes:tokens] = prompts

    sampled = np.flatnonzero(plan.sample)
    sample_padding = padded_tokens(len(sampled)) - len(sampled) if len(sampled) else 0
    return StepArrays(
        token_ids=token_ids,
        table_slots=table_slots,
        positions=np.pad(positions, (0, padding)),
        cache_slots=cache_slots,
        pages=pages,
        window_slots=window_slots,
        window_pages=window_pages,
        lengths=lengths,
        decodes=decodes,
        chunk_starts=np.append(starts[decodes:], np.int32(tokens)),
        sampled=sampled,
        sample_indices=np.pad(ends[sampled] - np.int32(1), (0, sample_padding)),
        sample_slots=plan.slot[sampled],
    )


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes that a step is padded to, where each new size would cost a recording."""

    tokens: int
    chunks: int
    samples: int
    longest: int  # tokens of the longest sequence
    pages: int  # of one sequence
    windowed: bool = False  # whether layers with windows have pages of their own


def pad_step(arrays: StepArrays, shape: StepShape) -> StepArrays:
    """The same step in the sizes of ``shape``, which are at least its own; its samples come first.

    The number of decodes is not part of the shape: every token counts as a decode, and prompt tokens and added tokens
    are decodes that see no key. The chunks come after them and overwrite the zeros of their tokens. Added tokens have
    id 0 at position 0 and write to the dump page; added chunks have no tokens; added samples are token 0 without a key.
    """
    tokens, decodes, chunks = len(arrays.token_ids), arrays.decodes, len(arrays.lengths) - arrays.decodes
    padded = _empty_step(shape)
    padded.token_ids[:tokens] = arrays.token_ids
    padded.table_slots[:tokens] = arrays.table_slots
    padded.positions[:tokens] = arrays.positions
    padded.cache_slots[:tokens] = arrays.cache_slots
    padded.window_slots[:tokens] = arrays.window_slots
    width = arrays.pages.shape[1]
    for first, sequences in ((0, slice(decodes)), (shape.tokens, slice(decodes, decodes + chunks))):
        lengths = arrays.lengths[sequences]
        padded.lengths[first : first + len(lengths)] = lengths
        padded.pages[first : first + len(lengths), :width] = arrays.pages[sequences]
        padded.window_pages[first : first + len(lengths), :width] = arrays.window_pages[sequences]
    padded.chunk_starts[: chunks + 1] = arrays.chunk_starts
    padded.chunk_starts[chunks + 1 :] = arrays.chunk_starts[chunks]
    samples = arrays.samples
    padded.sampled[:samples] = arrays.sampled + np.where(arrays.sampled < decodes, 0, shape.tokens - decodes)
    padded.sampled[samples:] = decodes  # the first that sees no key: none is added where every token is a decode
    padded.sample_indices[:samples] = arrays.sample_indices[:samples]
    padded.sample_slots[:samples] = arrays.sample_slots
    return padded


def largest_step(shape: StepShape) -> StepArrays:
    """The most that ``shape`` has room for: a sequence of full length, one chunk of all tokens.

    All in the dump page, where nothing is lost.
    """
    step = _empty_step(shape)
    step.lengths[:] = min(shape.longest, USUAL_TOKENS)
    step.lengths[0] = shape.longest
    step.sampled[:] = np.arange(shape.samples)
    step.chunk_starts[1:] = shape.tokens
    return step


def _empty_step(shape: StepShape) -> StepArrays:
    sequences, windowed = shape.tokens + shape.chunks, int(shape.windowed)
    token_ids, positions = np.zeros((2, shape.tokens), dtype=np.int32)
    lengths = np.zeros(sequences, dtype=np.int32)
    sample_indices, sample_slots = np.zeros((2, shape.samples), dtype=np.int32)
    return StepArrays(
        token_ids=token_ids,
        table_slots=np.full(shape.tokens, -1, dtype=np.int32),
        positions=positions,
        cache_slots=np.full(shape.tokens, DUMP_PAGE, dtype=np.int32),
        pages=np.full((sequences, shape.pages), DUMP_PAGE, dtype=np.int32),
        window_slots=np.full(windowed * shape.tokens, DUMP_PAGE, dtype=np.int32),
        window_pages=np.full((windowed * sequences, shape.pages), DUMP_PAGE, dtype=np.int32),
        lengths=lengths,
        decodes=shape.tokens,
        chunk_starts=np.zeros(shape.chunks + 1, dtype=np.int32),
        sampled=np.zeros(shape.samples, dtype=np.int64),
        sample_indices=sample_indices,
        sample_slots=sample_slots,
    )
