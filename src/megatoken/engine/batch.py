"""A ``StepPlan`` as plain arrays: which ids at which positions, where their keys go, what each query sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatoken.engine.cache import DUMP_PAGE
from megatoken.engine.scheduler import StepPlan

Ints = NDArray[np.int32]
USUAL_TOKENS = 512
"""Of a sequence beside the longest, by which attention is cut into pieces where no lengths are known."""


@dataclass(frozen=True, slots=True)
class StepArrays:
    """One step for a back end to turn into tensors. T rows, decode rows first, then prompt chunks, then padding.

    Page ids count from 1: page 0 is the dump page. Padding is token 0 at position 0, writes to the dump page and is
    read by nobody; ``sample_indices`` is padded with row 0.
    """

    token_ids: Ints  # [T] of prompt rows; 0 where table_slots is set
    table_slots: Ints  # [T] slot whose newest token is the row's id, -1 for prompt rows
    positions: Ints  # [T]
    cache_slots: Ints  # [T] page * page_size + offset of the row's key
    pages: Ints  # [R, W] of each sequence, in order
    lengths: Ints  # [R] keys that the last row of each sequence sees
    decodes: int  # the first sequences, one row each
    chunk_starts: Ints  # [R - decodes + 1] first row of each chunk, and the row after the last
    sampled: NDArray[np.int64]  # [S] which sequences sample
    sample_indices: Ints  # [S, padded] their last rows
    sample_slots: Ints  # [S] their slots

    @property
    def samples(self) -> int:
        """S, rows that sample."""
        return len(self.sampled)


def step_arrays(
    plan: StepPlan,
    page_table: Ints,
    page_size: int,
    host_tokens: Callable[[int, int, int], list[int]],
    padded_tokens: Callable[[int], int],
) -> StepArrays:
    """Turn a plan into arrays.

    Args:
        plan: what to run.
        page_table: the scheduler's [slots, pages], the plan's new pages included.
        page_size: tokens per page.
        host_tokens: ``(request_id, start, count) -> ids`` of prompt rows.
        padded_tokens: rows to run instead of so many.
    """
    count, decodes = plan.count, plan.decodes
    ends = np.cumsum(count, dtype=np.int32)
    rows = int(ends[-1])
    padding = padded_tokens(rows) - rows
    starts = ends - count
    positions = np.arange(rows, dtype=np.int32) - np.repeat(starts - plan.start, count)
    page = page_table[np.repeat(plan.slot, count), positions // page_size] + np.int32(1)

    token_ids, table_slots = np.zeros((2, rows + padding), dtype=np.int32)
    table_slots[decodes:] = -1
    table_slots[:decodes] = plan.slot[:decodes]
    prompts: list[int] = []
    for row in range(decodes, len(count)):
        prompts += host_tokens(int(plan.request_id[row]), int(plan.start[row]), int(count[row]))
    token_ids[decodes:rows] = prompts

    lengths = plan.start + count
    width = -(-int(lengths.max()) // page_size)
    sampled = np.flatnonzero(plan.sample)
    sample_padding = padded_tokens(len(sampled)) - len(sampled) if len(sampled) else 0
    return StepArrays(
        token_ids=token_ids,
        table_slots=table_slots,
        positions=np.pad(positions, (0, padding)),
        cache_slots=np.pad(page * np.int32(page_size) + positions % page_size, (0, padding), constant_values=DUMP_PAGE),
        pages=page_table[plan.slot, :width] + np.int32(1),
        lengths=lengths,
        decodes=decodes,
        chunk_starts=np.append(starts[decodes:], np.int32(rows)),
        sampled=sampled,
        sample_indices=np.pad(ends[sampled] - np.int32(1), (0, sample_padding)),
        sample_slots=plan.slot[sampled],
    )


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes that a step is padded to, where each new size would cost a recording."""

    rows: int
    chunks: int
    tokens: int  # of the longest sequence
    pages: int  # of a row of the page table


def pad_step(arrays: StepArrays, shape: StepShape) -> StepArrays:
    """The same step in the sizes of ``shape``, which are at least its own; its samples come first.

    Where the decodes end is no part of the shape: every row is a decode, one that sees no key where the row is a
    prompt's or was added, and the chunks come after. What they see is written over the zeros of the former. Added rows
    are token 0 at position 0 and write to the dump page; added chunks have no row; what is added to the samples is row
    0 seeing no key.
    """
    rows, decodes, chunks = len(arrays.token_ids), arrays.decodes, len(arrays.lengths) - arrays.decodes
    padded = _empty_step(shape)
    padded.token_ids[:rows] = arrays.token_ids
    padded.table_slots[:rows] = arrays.table_slots
    padded.positions[:rows] = arrays.positions
    padded.cache_slots[:rows] = arrays.cache_slots
    width = arrays.pages.shape[1]
    for first, sequences in ((0, slice(decodes)), (shape.rows, slice(decodes, decodes + chunks))):
        lengths = arrays.lengths[sequences]
        padded.lengths[first : first + len(lengths)] = lengths
        padded.pages[first : first + len(lengths), :width] = arrays.pages[sequences]
    padded.chunk_starts[: chunks + 1] = arrays.chunk_starts
    padded.chunk_starts[chunks + 1 :] = arrays.chunk_starts[chunks]
    samples = arrays.samples
    padded.sampled[:samples] = arrays.sampled + np.where(arrays.sampled < decodes, 0, shape.rows - decodes)
    padded.sampled[samples:] = decodes  # the first that sees no key: none is added where every row is a decode
    padded.sample_indices[:samples] = arrays.sample_indices[:samples]
    padded.sample_slots[:samples] = arrays.sample_slots
    return padded


def largest_step(shape: StepShape) -> StepArrays:
    """The most that ``shape`` has room for: a sequence of full length, one chunk of all rows.

    All in the dump page, where nothing is lost.
    """
    step = _empty_step(shape)
    step.lengths[:] = min(shape.tokens, USUAL_TOKENS)
    step.lengths[0] = shape.tokens
    step.sampled[:] = np.arange(len(step.lengths))
    step.chunk_starts[1:] = shape.rows
    return step


def _empty_step(shape: StepShape) -> StepArrays:
    sequences = shape.rows + shape.chunks
    token_ids, positions = np.zeros((2, shape.rows), dtype=np.int32)
    lengths, sample_indices, sample_slots = np.zeros((3, sequences), dtype=np.int32)
    return StepArrays(
        token_ids=token_ids,
        table_slots=np.full(shape.rows, -1, dtype=np.int32),
        positions=positions,
        cache_slots=np.full(shape.rows, DUMP_PAGE, dtype=np.int32),
        pages=np.full((sequences, shape.pages), DUMP_PAGE, dtype=np.int32),
        lengths=lengths,
        decodes=shape.rows,
        chunk_starts=np.zeros(shape.chunks + 1, dtype=np.int32),
        sampled=np.zeros(sequences, dtype=np.int64),
        sample_indices=sample_indices,
        sample_slots=sample_slots,
    )
