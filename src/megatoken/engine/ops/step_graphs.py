"""Steps of few rows as CUDA graphs: one launch, where else there are some eleven for every layer.

Such a step takes the GPU less time than its launches take the host; a longer one is launched as it is. A graph has
fixed shapes (``StepShape``), so a step is padded to a number of rows, whichever of them are decodes, and attention is
cut into pieces for sequences of a number of tokens. Recording takes as long as some steps, so a shape is recorded when
it has come a few times, or at the start where steps have a time to keep to. All graphs share one pool of memory, as
they never run side by side.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatoken.engine.batch import StepArrays, StepShape, largest_step, pad_step
from megatoken.engine.cache import LayerCache
from megatoken.engine.config import ModelConfig
from megatoken.engine.memory import GRAPH_CHUNKS, graph_tokens, most_recorded_tokens, records_step
from megatoken.engine.ops import cuda
from megatoken.engine.schemes import LinearScheme

SHORTEST_TOKENS, LENGTH_RATIO = 512, 4
"""The first of the lengths that there are graphs for, no less than their rows, and each to the one before."""
AHEAD_TOKENS = 2048
"""Of the longest sequence in the steps that are recorded at the start; those of other lengths are as they come."""
UNRECORDED_RUNS = 3
"""Of a shape before it is recorded: that costs as much as five to ten replays save, and some shapes come but once."""
MOST_GRAPHS = 128
"""Kept at a time; the one that was not used for longest makes room."""

Forward = Callable[[cuda.Batch], Tensor]
"""Logits [S, V] of a step."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    indices: Tensor  # what the graph reads: a step as ``cuda.pack`` makes it
    sample_slots: Tensor  # a part of it


class StepGraphs:
    """The graphs of one model on one device, made as steps need them."""

    def __init__(
        self, last_tokens: Tensor, cache: LayerCache, config: ModelConfig, scheme: LinearScheme, max_rows: int
    ) -> None:
        """``last_tokens``: int64 [slots]. ``cache``: any layer's. ``config``: of the rank's part."""
        device = last_tokens.device
        self._last_tokens = last_tokens
        self._page_size = cache.page_size
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._rows = graph_tokens(max_rows)
        samples = self._rows[-1] + GRAPH_CHUNKS
        self._logits = torch.empty(samples, config.vocabulary_size, dtype=torch.bfloat16, device=device)
        self._ids = torch.empty(samples, dtype=torch.int64, device=device)
        self._met: Counter[StepShape] = Counter()
        self.recorded: dict[StepShape, _Recorded] = {}
        """Least recently used first."""
        self._most_tokens = min(self._rows[-1], most_recorded_tokens(config, scheme))

    def takes(self, arrays: StepArrays) -> bool:
        """Whether a step is one to record."""
        chunks = len(arrays.lengths) - arrays.decodes
        return records_step(arrays.decodes, chunks, len(arrays.token_ids), self._most_tokens)

    def run(self, arrays: StepArrays, forward: Forward, catch_up: Callable[[], None]) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [S, V], greedy ids [S] and slots [S], valid until the next step runs.

        The functions are the same each time, and not kept: an engine that is forgotten must be freed at once, and one
        in a cycle of references never is after ``gc.freeze``.

        Args:
            arrays: the step.
            forward: computes it.
            catch_up: waits for the device, or raises where it would never be done.
        """
        chunks, samples = len(arrays.lengths) - arrays.decodes, arrays.samples
        shape = self._shape(len(arrays.token_ids), chunks, int(arrays.lengths.max()))
        indices = cuda.pack(cuda.index_parts(pad_step(arrays, shape)))
        self._met[shape] += 1
        if self._met[shape] <= UNRECORDED_RUNS:
            # As it will be recorded, so that every kernel of it has been compiled and loaded by then.
            sample_slots = self._step(forward, largest_step(shape), indices.to(self._ids.device, non_blocking=True))
        else:
            recorded = self.recorded.pop(shape, None) or self._record(forward, largest_step(shape), indices, catch_up)
            self.recorded[shape] = recorded
            recorded.indices.copy_(indices, non_blocking=True)
            recorded.graph.replay()
            sample_slots = recorded.sample_slots
        return self._logits[:samples], self._ids[:samples], sample_slots[:samples]

    def record_ahead(self, forward: Forward, max_length: int, catch_up: Callable[[], None]) -> None:
        """Records steps of every number of rows, of sequences as most conversations are long.

        Those who come first would otherwise wait for recordings, each as long as some steps. ``forward`` and
        ``catch_up`` are as in ``run``, ``max_length`` is a sequence's.
        """
        for chunks in (0, 1):
            for rows, fewer_rows in zip(self._rows, (0, *self._rows), strict=False):
                if fewer_rows >= self._most_tokens:
                    break
                shape = self._shape(rows, chunks, min(AHEAD_TOKENS, max_length))
                step = largest_step(shape)
                indices = cuda.pack(cuda.index_parts(step))
                self._step(forward, step, indices.to(self._ids.device))
                self.recorded[shape] = self._record(forward, step, indices, catch_up)
                self._met[shape] = UNRECORDED_RUNS

    def _shape(self, rows: int, chunks: int, tokens: int) -> StepShape:
        """``tokens``: of the longest sequence."""
        longest = SHORTEST_TOKENS
        while longest < tokens:
            longest *= LENGTH_RATIO
        return StepShape(
            rows=self._rows[bisect_left(self._rows, rows)],
            chunks=GRAPH_CHUNKS if chunks else 0,
            tokens=longest,
            pages=-(-longest // self._page_size),
        )

    def _record(self, forward: Forward, arrays: StepArrays, indices: Tensor, catch_up: Callable[[], None]) -> _Recorded:
        """Launches are made for what only the host knows of ``arrays``, such as the longest sequence.

        ``indices``: of a step of that shape, as ``cuda.pack`` makes them.
        """
        if len(self.recorded) == MOST_GRAPHS:
            del self.recorded[next(iter(self.recorded))]
        catch_up()  # what follows waits for the device without a look at the other ranks
        current, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        indices = indices.to(self._ids.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                sample_slots = self._step(forward, arrays, indices)
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return _Recorded(graph, indices, sample_slots)

    def _step(self, forward: Forward, arrays: StepArrays, indices: Tensor) -> Tensor:
        batch = cuda.unpack(arrays, cuda.index_parts(arrays), indices, self._last_tokens)
        logits_SV = forward(batch)
        # Copied, or the pool would keep each graph's own.
        self._logits[: batch.samples].copy_(logits_SV)
        self._ids[: batch.samples].copy_(cuda.greedy(logits_SV))
        return batch.sample_slots
