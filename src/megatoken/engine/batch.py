"""A ``StepPlan`` as tensors: which ids at which positions, where their keys go, what each query sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatoken.engine.cache import DUMP_PAGE, LayerCache
from megatoken.engine.ops import Ops
from megatoken.engine.scheduler import StepPlan


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive prompt rows of one sequence. ``pages`` is None when the chunk starts the sequence."""

    first_row: int
    rows: int
    context: int
    pages: Tensor | None


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's inputs; T rows, decode rows first, then chunks, then padding; S of them sampled.

    Padding repeats token 0 at position 0, writes to the dump page and is read by nobody. ``sample_rows`` is padded too.
    """

    token_ids: Tensor
    positions: Tensor
    cache_rows_TK: Tensor
    decodes: int
    decode_index: Any
    chunks: list[Chunk]
    samples: int
    sample_rows: Tensor
    sample_index: Any


def build_batch(
    plan: StepPlan,
    page_table: NDArray[np.int32],
    last_tokens: Tensor,
    host_tokens: Callable[[int, int, int], list[int]],
    cache: LayerCache,
    ops: Ops,
    heads: int,
) -> Batch:
    """Turn a plan into tensors.

    Args:
        plan: what to run.
        page_table: the scheduler's int32 [slots, pages] table, the plan's new pages included.
        last_tokens: int64 [slots], the newest token of each slot, where the sampler leaves it.
        host_tokens: ``(ticket, start, count) -> ids`` for prompt rows.
        cache: any layer's cache, for its shape.
        ops: the back end, which prepares its own attention index.
        heads: query heads.
    """
    page_size, kv_heads = cache.page_size, cache.k.shape[1]
    count = plan.count
    last_row = np.cumsum(count) - 1
    positions = np.arange(last_row[-1] + 1) - np.repeat(last_row + 1 - count - plan.start, count)
    page = page_table[np.repeat(plan.slot, count), positions // page_size].astype(np.int64) + 1
    padding = ops.padded_rows(len(positions)) - len(positions)
    positions, page = np.pad(positions, (0, padding)), np.pad(page, (0, padding), constant_values=DUMP_PAGE)
    cache_rows = (page[:, None] * kv_heads + np.arange(kv_heads)) * page_size + (positions % page_size)[:, None]

    prompt_ids: list[int] = []
    chunks: list[Chunk] = []
    for row in range(plan.decodes, len(count)):
        start, rows = int(plan.start[row]), int(count[row])
        prompt_ids += host_tokens(int(plan.ticket[row]), start, rows)
        context = start + rows
        pages = torch.from_numpy(page_table[plan.slot[row], : -(-context // page_size)] + 1) if start else None
        chunks.append(Chunk(int(last_row[row]) + 1 - rows, rows, context, pages))
    decode_ids = last_tokens.index_select(0, torch.from_numpy(plan.slot[: plan.decodes].astype(np.int64)))
    token_ids = torch.cat((decode_ids, torch.tensor(prompt_ids + [0] * padding, dtype=torch.int64)))

    visible = plan.start + count

    def index(rows: NDArray[Any]) -> Any:
        lengths = visible[rows]
        if not len(lengths):
            return None
        width = -(-int(lengths.max()) // page_size)
        return ops.attention_index(page_table[plan.slot[rows], :width] + 1, lengths, cache, heads)

    decode_index = index(np.arange(plan.decodes))
    sampled = np.flatnonzero(plan.sample)
    sample_rows = np.pad(last_row[sampled], (0, ops.padded_rows(len(sampled)) - len(sampled) if len(sampled) else 0))
    return Batch(
        token_ids=token_ids,
        positions=torch.from_numpy(positions),
        cache_rows_TK=torch.from_numpy(cache_rows),
        decodes=plan.decodes,
        decode_index=decode_index,
        chunks=chunks,
        samples=len(sampled),
        sample_rows=torch.from_numpy(sample_rows),
        sample_index=decode_index if not chunks else index(sampled),
    )
