"""Small steps as CUDA graphs: one launch instead of about eleven for every layer.

The GPU computes such a step in less time than the host needs for its launches; longer steps are launched as usual.
A graph has fixed shapes (``StepShape``), so a step is padded to a number of tokens, decodes or not, and attention is
split for sequences of a fixed length. Recording takes as long as some steps, so a shape is recorded when it has come a
few times, or at the start if the engine is given time for that. Until its own shape is recorded, a step is replayed as
a larger one if there is one. All graphs share one memory pool, since they never run at the same time.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatoken.engine.batch import StepArrays, StepShape, largest_step, pad_step
from megatoken.engine.cache import LayerCache
from megatoken.engine.config import ModelConfig
from megatoken.engine.memory import GRAPH_CHUNKS, MemoryPlan, graph_tokens, most_recorded_tokens, records_step
from megatoken.engine.ops import cuda
from megatoken.engine.runner_protocol import RecordedSteps
from megatoken.engine.schemes import LinearScheme
from megatoken.engine.step_shapes import MOST_GRAPHS, ShapeLadder, substitute

UNRECORDED_RUNS = 3
"""Launches of a shape before it is recorded, which costs as much as five to ten replays save; some shapes are rare."""
SUBSTITUTED_RUNS = 200
"""Runs of a shape as a larger one before it is recorded, which saves at most a tenth of a step."""

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
        self, last_tokens: Tensor, cache: LayerCache, config: ModelConfig, scheme: LinearScheme, memory: MemoryPlan
    ) -> None:
        """``last_tokens``: int64 [slots]. ``cache``: any layer's. ``config``: of the rank's part."""
        device = last_tokens.device
        self._last_tokens = last_tokens
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        sizes = graph_tokens(config, scheme, memory.max_batched_tokens)
        samples = sizes[-1] + GRAPH_CHUNKS
        self._logits = torch.empty(samples, config.vocabulary_size, dtype=torch.bfloat16, device=device)
        self._ids = torch.empty(samples, dtype=torch.int64, device=device)
        self._ladder = ShapeLadder(sizes, cache.page_size, windowed=memory.window_pages > 0)
        self._to_record = deque(self._ladder.first(memory.max_sequences, memory.max_length))
        self._launched: Counter[StepShape] = Counter()
        self._substituted: Counter[StepShape] = Counter()
        self.recorded: dict[StepShape, _Recorded] = {}
        """Least recently used first."""
        self._most_tokens = min(sizes[-1], most_recorded_tokens(config, scheme))

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
        shape = self._ladder.shape(
            len(arrays.token_ids),
            decodes=arrays.decodes,
            prompts=len(arrays.lengths) > arrays.decodes,
            samples=samples,
            length=int(arrays.lengths.max()),
        )
        larger = shape if shape in self.recorded else substitute(shape, self.recorded)
        if larger is not None and larger != shape and self._substituted[shape] < SUBSTITUTED_RUNS:
            self._substituted[shape] += 1
            shape = larger
        indices = cuda.pack(cuda.index_parts(pad_step(arrays, shape)))
        if shape not in self.recorded and self._launched[shape] < (UNRECORDED_RUNS if larger is None else 1):
            # The same launches as in the recording, so that all its kernels are compiled and loaded by then.
            self._launched[shape] += 1
            sample_slots = self._step(forward, largest_step(shape), indices.to(self._ids.device, non_blocking=True))
        else:
            recorded = self.recorded.pop(shape, None) or self._record(forward, largest_step(shape), indices, catch_up)
            self.recorded[shape] = recorded
            recorded.indices.copy_(indices, non_blocking=True)
            recorded.graph.replay()
            sample_slots = recorded.sample_slots
        return self._logits[:samples], self._ids[:samples], sample_slots[:samples]

    def record_first(
        self, forward: Forward, catch_up: Callable[[], None], order: Callable[[], None], seconds: float
    ) -> RecordedSteps:
        """Record steps that will probably come, for about so many seconds, so that the first requests need not wait.

        ``forward`` and ``catch_up``: as in ``run``. ``order`` makes the other ranks call ``record_next``.
        """
        began, free = time.monotonic(), torch.cuda.mem_get_info(self._ids.device)[0]
        while self._to_record and time.monotonic() - began < seconds:
            order()
            self.record_next(forward, catch_up)
        catch_up()
        taken = free - torch.cuda.mem_get_info(self._ids.device)[0]
        return RecordedSteps(len(self.recorded), time.monotonic() - began, max(taken, 0))

    def record_next(self, forward: Forward, catch_up: Callable[[], None]) -> None:
        """Record the most useful of the steps that are left; if graphs must go, the least useful does."""
        shape = self._to_record.popleft()
        step = largest_step(shape)
        indices = cuda.pack(cuda.index_parts(step))
        self._step(forward, step, indices.to(self._ids.device))
        self._launched[shape] = UNRECORDED_RUNS
        self.recorded[shape] = self._record(forward, step, indices, catch_up)
        for more_useful in list(self.recorded)[:-1]:
            self.recorded[more_useful] = self.recorded.pop(more_useful)

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
