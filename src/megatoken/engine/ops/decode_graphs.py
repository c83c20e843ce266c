"""Steps of decodes alone as CUDA graphs: one launch, where else there are some ten for every layer.

A model of few weights computes such a step in less time than the host takes to launch it. A graph has fixed shapes:
rows are padded to the next of ``ROWS``, and attention is cut into pieces for sequences of the next power of two tokens.
Each pair is recorded when it is first needed; all graphs share one pool of memory, as they never run side by side.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatoken.engine.batch import Ints, StepArrays, pad_decodes
from megatoken.engine.cache import LayerCache
from megatoken.engine.config import ModelConfig
from megatoken.engine.memory import GRAPH_ROWS as ROWS
from megatoken.engine.ops import cuda

SHORTEST_TOKENS = 256
"""The first of the lengths that there are graphs for."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    indices: Tensor  # what the graph reads: a step as ``cuda.pack`` makes it
    sample_slots: Tensor  # a part of it


class DecodeGraphs:
    """The graphs of one model on one device, made as steps need them."""

    def __init__(
        self, forward: Callable[[cuda.Batch], Tensor], last_tokens: Tensor, cache: LayerCache, config: ModelConfig
    ) -> None:
        """``forward``: logits of a step. ``last_tokens``: int64 [slots]. ``cache``: any layer's."""
        device = last_tokens.device
        self._forward = forward
        self._last_tokens = last_tokens
        self._page_size = cache.page_size
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._logits = torch.empty(ROWS[-1], config.vocabulary_size, dtype=torch.bfloat16, device=device)
        self._ids = torch.empty(ROWS[-1], dtype=torch.int64, device=device)
        self._recorded: dict[tuple[int, int], _Recorded] = {}

    def takes(self, arrays: StepArrays) -> bool:
        """Whether a step has decodes alone, and few enough."""
        return 0 < arrays.decodes == len(arrays.lengths) == arrays.samples <= ROWS[-1]

    def run(self, arrays: StepArrays) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [S, V], greedy ids [S] and slots [S], valid until the next step runs."""
        samples = arrays.samples
        rows = ROWS[bisect_left(ROWS, samples)]
        tokens = max(SHORTEST_TOKENS, 1 << (int(arrays.lengths.max()) - 1).bit_length())
        width = -(-tokens // self._page_size)
        recorded = self._recorded.get((rows, tokens))
        if recorded is None:
            recorded = self._recorded[rows, tokens] = self._record(longest_decodes(rows, tokens, width))
        recorded.indices.copy_(cuda.pack(cuda.index_parts(pad_decodes(arrays, rows, width))), non_blocking=True)
        recorded.graph.replay()
        return self._logits[:samples], self._ids[:samples], recorded.sample_slots[:samples]

    def _record(self, arrays: StepArrays) -> _Recorded:
        """What of ``arrays`` only the host knows is what the launches are made for: the longest sequence."""
        current, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        indices = cuda.pack(cuda.index_parts(arrays)).to(self._ids.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._step(arrays, indices)  # what libraries allocate at first is not the graph's
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                sample_slots = self._step(arrays, indices)
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return _Recorded(graph, indices, sample_slots)

    def _step(self, arrays: StepArrays, indices: Tensor) -> Tensor:
        batch = cuda.unpack(arrays, cuda.index_parts(arrays), indices, self._last_tokens)
        logits_SV = self._forward(batch)
        # Copied, or the pool would keep each graph's own.
        self._logits[: batch.samples].copy_(logits_SV)
        self._ids[: batch.samples].copy_(cuda.greedy(logits_SV))
        return batch.sample_slots


def longest_decodes(rows: int, tokens: int, width: int) -> StepArrays:
    """A step of sequences that all have ``tokens`` keys, in the dump page, where nothing is lost."""

    def zeros(*shape: int) -> Ints:
        return np.zeros(shape, dtype=np.int32)

    return StepArrays(
        token_ids=zeros(rows),
        table_slots=zeros(rows) - np.int32(1),
        positions=zeros(rows),
        cache_slots=zeros(rows),
        pages=zeros(rows, width),
        lengths=zeros(rows) + np.int32(tokens),
        decodes=rows,
        chunk_rows=zeros(1) + np.int32(rows),
        sampled=np.arange(rows),
        sample_rows=np.arange(rows, dtype=np.int32),
        sample_slots=zeros(rows),
    )
