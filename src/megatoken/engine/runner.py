"""Owns weights, cache and the token table; runs one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from megatoken.engine.batch import step_arrays
from megatoken.engine.cache import allocate_cache
from megatoken.engine.config import EngineConfig
from megatoken.engine.memory import HUGE_PAGES_FROM_BYTES, MemoryPlan, use_huge_pages
from megatoken.engine.model import WeightSource, forward, load_weights
from megatoken.engine.ops import Ops
from megatoken.engine.request import Sampling
from megatoken.engine.sampling import sample
from megatoken.engine.scheduler import Scheduler, StepPlan


class Runner:
    """One model on one device.

    ``last_tokens`` (int64 [slots]) stays on the device: a decode takes its input id from there, so a step can be
    launched before the host has seen what the step before it sampled.
    """

    def __init__(self, source: WeightSource, config: EngineConfig, memory: MemoryPlan, ops: Ops) -> None:
        self.config = source.config
        self._ops = ops
        self._weights = load_weights(source, ops, config.precision, memory.max_length)
        if memory.weights_bytes >= HUGE_PAGES_FROM_BYTES:
            use_huge_pages()
        self._cache = allocate_cache(source.config, config.precision, memory.pages, memory.page_size)
        self._last_tokens = torch.zeros(memory.max_sequences, dtype=torch.int64)

    @torch.inference_mode()
    def launch(
        self,
        plan: StepPlan,
        scheduler: Scheduler,
        host_tokens: Callable[[int, int, int], list[int]],
        samplings: Sequence[Sampling] | None,
    ) -> Tensor:
        """Run one step.

        Args:
            plan: what to run.
            scheduler: for its page table.
            host_tokens: ids of prompt rows, see ``step_arrays``.
            samplings: one for each sampled row; None when all are greedy.

        Returns:
            int64 [S], the sampled ids, in the order of the plan's sampled rows.
        """
        page_size = self._cache[0].page_size
        arrays = step_arrays(plan, scheduler.page_table, page_size, host_tokens, self._ops.padded_rows)
        batch = self._ops.prepare(arrays, self._last_tokens, self._cache[0], self.config)
        logits_SV = forward(self._weights, self.config, self._ops, self._cache, batch)
        ids_S = self._ops.greedy(logits_SV)
        if samplings is not None:
            sample(logits_SV, samplings, (plan.start + plan.count)[plan.sample].astype(np.int64), ids_S)
        self._last_tokens.index_copy_(0, torch.from_numpy(arrays.sample_slots.astype(np.int64)), ids_S)
        return ids_S
