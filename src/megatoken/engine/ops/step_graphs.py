"""Small steps as CUDA graphs: one launch instead of about eleven for every layer.

The GPU computes such a step in less time than the host needs for its launches; longer steps are launched as usual.
A graph has fixed shapes (``StepShape``), so a step is padded to a number of tokens, decodes or not, and attention is
split for sequences of a fixed length. Recording takes as long as some steps, so a shape is recorded when it has come a
few times, or at the start if the engine has a target for the time of a step. All graphs share one memory pool, since
they never run at the same time.
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
"""Shortest length of a sequence that graphs are recorded for, and the ratio of each length to the one before."""
AHEAD_TOKENS = 2048
"""Length of the longest sequence in the steps that are recorded at the start."""
UNRECORDED_RUNS = 3
"""Runs of a shape before it is recorded, which costs as much as five to ten replays save; some shapes are rare."""
SAMPLES = (64, 256, 512)
"""Tokens that sample in steps longer than the last of these, next to one of each prompt: the head of a large vocabulary
takes a tenth of such a step. Shorter steps have room for any number, since each further size is another shape."""
MOST_GRAPHS = 128
"""Kept at a time; the least recently used is dropped."""

Forward = Callable[[cuda.Batch], Tensor]
"""Logits [S, V] of a step."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    indices: Tensor  # read by the graph: a step packed by ``cuda.pack``
    sample_slots: Tensor  # a view of it


class StepGraphs:
    """The graphs of one model on one device, recorded when steps need them."""

    def __init__(
        self, last_tokens: Tensor, cache: LayerCache, config: ModelConfig, scheme: LinearScheme, max_batched_tokens: int
    ) -> None:
        """``last_tokens``: int64 [slots]. ``cache``: any layer's. ``config``: of the rank's part."""
        device = last_tokens.device
        self._last_tokens = last_tokens
        self._page_size = cache.page_size
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._sizes = graph_tokens(config, scheme, max_batched_tokens)
        samples = self._sizes[-1] + GRAPH_CHUNKS
        self._logits = torch.empty(samples, config.vocabulary_size, dtype=torch.bfloat16, device=device)
        self._ids = torch.empty(samples, dtype=torch.int64, device=device)
        self._met: Counter[StepShape] = Counter()
        self.recorded: dict[StepShape, _Recorded] = {}
        """Least recently used first."""
        self._most_tokens = min(self._sizes[-1], most_recorded_tokens(config, scheme))

    def takes(self, arrays: StepArrays) -> bool:
        """Whether a step runs as a graph."""
        chunks = len(arrays.lengths) - arrays.decodes
        return records_step(chunks, len(arrays.token_ids), self._most_tokens)

    def run(self, arrays: StepArrays, forward: Forward, catch_up: Callable[[], None]) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [S, V], greedy ids [S] and slots [S], valid until the next step runs.

        The functions are the same each time but not stored: an engine must be freed as soon as its last reference is
        gone, and after ``gc.freeze`` one in a reference cycle never is.

        ``forward`` computes the step. ``catch_up`` waits for the device, or raises if a rank has ended.
        """
        samples = arrays.samples
        shape = self._shape(
            len(arrays.token_ids),
            decodes=arrays.decodes,
            prompts=len(arrays.lengths) > arrays.decodes,
            samples=samples,
            length=int(arrays.lengths.max()),
        )
        indices = cuda.pack(cuda.index_parts(pad_step(arrays, shape)))
        self._met[shape] += 1
        if self._met[shape] <= UNRECORDED_RUNS:
            # The same launches as in the recording, so that all its kernels are compiled and loaded by then.
            sample_slots = self._step(forward, largest_step(shape), indices.to(self._ids.device, non_blocking=True))
        else:
            recorded = self.recorded.pop(shape, None) or self._record(forward, largest_step(shape), indices, catch_up)
            self.recorded[shape] = recorded
            recorded.indices.copy_(indices, non_blocking=True)
            recorded.graph.replay()
            sample_slots = recorded.sample_slots
        return self._logits[:samples], self._ids[:samples], sample_slots[:samples]

    def record_ahead(self, forward: Forward, max_length: int, catch_up: Callable[[], None]) -> None:
        """Record steps of every size, for sequences of ``AHEAD_TOKENS``, so that the first requests need not wait.

        ``forward`` and ``catch_up``: as in ``run``. ``max_length``: of a sequence.
        """
        for prompts in (False, True):
            for size in self._sizes:
                shape = self._shape(
                    size, decodes=size, prompts=prompts, samples=size, length=min(AHEAD_TOKENS, max_length)
                )
                step = largest_step(shape)
                indices = cuda.pack(cuda.index_parts(step))
                self._step(forward, step, indices.to(self._ids.device))
                self.recorded[shape] = self._record(forward, step, indices, catch_up)
                self._met[shape] = UNRECORDED_RUNS

    def _shape(self, tokens: int, *, decodes: int, prompts: bool, samples: int, length: int) -> StepShape:
        """``tokens``, ``decodes``, ``samples``: of the step. ``length``: of the longest sequence."""
        longest = SHORTEST_TOKENS
        while longest < length:
            longest *= LENGTH_RATIO
        size = self._sizes[bisect_left(self._sizes, tokens)]
        chunks = GRAPH_CHUNKS if prompts else 0
        rooms: tuple[int, ...] = ()
        if not decodes:
            rooms = (0,)
        elif size > SAMPLES[-1]:
            rooms = SAMPLES
        return StepShape(
            tokens=size,
            chunks=chunks,
            samples=next((room + chunks for room in rooms if room + chunks >= samples), size + chunks),
            longest=longest,
            pages=-(-longest // self._page_size),
        )

    def _record(self, forward: Forward, arrays: StepArrays, indices: Tensor, catch_up: Callable[[], None]) -> _Recorded:
        """Record a step of ``indices``, packed by ``cuda.pack``, with launches for the largest step ``arrays``."""
        if len(self.recorded) == MOST_GRAPHS:
            del self.recorded[next(iter(self.recorded))]
        catch_up()  # the recording waits for the device without checking the other ranks
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
        # Copied, so that the pool need not keep each graph's logits.
        self._logits[: batch.samples].copy_(logits_SV)
        self._ids[: batch.samples].copy_(cuda.greedy(logits_SV))
        return batch.sample_slots
