"""Owns weights, cache and the token table; runs one batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from megatoken.engine.batch import StepArrays, step_arrays
from megatoken.engine.cache import allocate_cache
from megatoken.engine.config import EngineConfig
from megatoken.engine.memory import MemoryPlan, most_tokens
from megatoken.engine.model import WeightSource, forward, load_weights
from megatoken.engine.ops import Ops
from megatoken.engine.parallel import Followers, Order, RankGroup
from megatoken.engine.process_memory import HUGE_PAGES_FROM_BYTES, return_idle_code, use_huge_pages
from megatoken.engine.request import Sampling
from megatoken.engine.sampling import sample
from megatoken.engine.scheduler import Scheduler, StepPlan
from megatoken.engine.schemes import scheme_of

if TYPE_CHECKING:
    from megatoken.engine.ops.step_graphs import StepGraphs

FOLLOWERS_CHECK_SECONDS = 0.0002
WARM_UP_PROMPTS, WARM_UP_PROMPT_TOKENS = 16, 256


class SampledIds:
    """Ids of one step on their way to the host; made right after the step was launched."""

    def __init__(self, ids_S: Tensor, followers: Followers | None = None) -> None:
        self._ids = ids_S
        self._followers = followers
        self._arrived: torch.cuda.Event | None = None
        if ids_S.is_cuda:
            self._ids = torch.empty(ids_S.shape, dtype=ids_S.dtype, pin_memory=True)
            self._ids.copy_(ids_S, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def wait(self) -> list[int]:
        """The ids, once they are there. Raises MegatokenError where a rank that they depend on has ended."""
        if self._arrived is not None:
            while self._followers is not None and not self._arrived.query():  # type: ignore[no-untyped-call]
                self._followers.check()
                time.sleep(FOLLOWERS_CHECK_SECONDS)
            self._arrived.synchronize()
        return self._ids.tolist()


class Runner:
    """One model on one device.

    ``last_tokens`` (int64 [slots]) stays on the device: a decode takes its input id from there, so a step can be
    launched before the host has seen what the step before it sampled.
    """

    def __init__(
        self,
        source: WeightSource,
        config: EngineConfig,
        memory: MemoryPlan,
        ops: Ops,
        device: torch.device,
        followers: Followers | None = None,
    ) -> None:
        """Loads. A rank that has no ``followers`` although the model is cut must ``follow`` before it can do more."""
        self._config = source.config
        self._ops = ops
        scheme = self._scheme = scheme_of(config)
        compiling: list[Future[None]] = []
        if device.type == "cuda":
            from megatoken.engine.ops.compilation import start_compiling

            compiling = start_compiling(source.config, config, memory.page_size, device)
        self._padded_tokens = partial(ops.padded_tokens, weights_bytes=memory.weights_bytes)
        self._weights = load_weights(source, ops, scheme, memory.max_length, device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            ops.kernels()  # builds them now if need be, not within somebody's first step
            return_idle_code()
            if memory.weights_bytes >= HUGE_PAGES_FROM_BYTES:
                use_huge_pages()
        scales = [layer.cache_scales for layer in self._weights.layers]
        self._cache = allocate_cache(source.config, scheme, memory.pages, memory.page_size, device, scales)
        self.measured_input_scales = 0
        """Linears whose fp8 input scale was measured at start, because the checkpoint has none."""
        self._last_tokens = torch.zeros(memory.max_sequences, dtype=torch.int64, device=device)
        self._followers = followers
        for kernel in compiling:
            kernel.result()
        self._memory = memory
        self._shares_rows = device.type == "cuda" and scheme.fused_all_reduce
        self._group: RankGroup | None = None
        self._cuda_graphs = config.cuda_graphs and device.type == "cuda"
        self._graphs: StepGraphs | None = None
        with nullcontext() if followers is None else followers.blamed():
            if followers is not None:
                self._meet(followers.meet(device), followers.check)
            if device.type == "cuda" and (followers is not None or config.tensor_parallel == 1):
                self._warm_up(record_ahead=config.target_step_seconds is not None)

    def follow(self, group: RankGroup) -> NoReturn:
        """Does what rank 0 says until that is gone, which is an error."""
        self._meet(group, lambda: None)  # which ends with rank 0
        while True:
            order, arrays = group.receive()
            if arrays is not None:
                self._step(arrays, None)
            elif order is Order.FIX_INPUT_SCALES:
                self._fix_input_scales()
            elif order is Order.RECORD_STEPS:
                self._record_steps()

    def _meet(self, group: RankGroup, check: Callable[[], None]) -> None:
        self._group = group
        if self._shares_rows:
            group.share_rows(most_tokens(self._memory.max_batched_tokens), self._config.hidden_size, check)

    @torch.inference_mode()
    def launch(
        self,
        plan: StepPlan,
        scheduler: Scheduler,
        host_tokens: Callable[[int, int, int], list[int]],
        samplings: Sequence[Sampling] | None,
    ) -> SampledIds:
        """Run one step.

        Args:
            plan: what to run.
            scheduler: for its page table.
            host_tokens: ids of prompt rows, see ``step_arrays``.
            samplings: one for each sampled row; None when all are greedy.

        Returns:
            The sampled ids, in the order of the plan's sampled rows; ``NO_TOKEN`` where logits are no numbers.
        """
        page_size = self._cache[0].page_size
        arrays = step_arrays(plan, scheduler.page_table, page_size, host_tokens, self._padded_tokens)
        positions = (plan.start + plan.count)[plan.sample].astype(np.int64)
        draw = None if samplings is None else partial(sample, samplings=samplings, positions=positions)
        if self._followers is None or self._group is None:
            return SampledIds(self._step(arrays, draw))
        with self._followers.blamed():
            self._followers.check()
            self._group.send(Order.STEP, arrays)
            return SampledIds(self._step(arrays, draw), self._followers)

    @torch.inference_mode()
    def _step(self, arrays: StepArrays, draw: Callable[..., None] | None) -> Tensor:
        """One step on the device; ``draw`` replaces the greedy ids of rows that are sampled otherwise."""
        if self._graphs is not None and self._graphs.takes(arrays):
            logits_SV, ids_S, slots_S = self._graphs.run(arrays, self._forward, self._catch_up)
        else:
            batch = self._ops.prepare(arrays, self._last_tokens, self._cache[0], self._config)
            logits_SV, slots_S = self._forward(batch), batch.sample_slots
            ids_S = self._ops.greedy(logits_SV)
        if draw is not None:
            draw(logits_SV, chosen_S=ids_S)
        if self._group is not None:
            self._group.share(ids_S)
        # A step that is already on its way reads whatever stands here as the id of a token.
        self._last_tokens.index_copy_(0, slots_S.long(), ids_S.clamp(min=0))
        return ids_S

    def _forward(self, batch: Any) -> Tensor:
        return forward(self._weights, self._config, self._ops, self._cache, batch, self._group)

    def _warm_up(self, *, record_ahead: bool) -> None:
        """Fix the scales of fp8 inputs, compile kernels, take the memory of the largest steps: all before a request.

        Prompts are random ids, the same whatever the engine's sizes; what they leave in the cache is never read.
        """
        prompt_tokens = min(WARM_UP_PROMPT_TOKENS, self._memory.max_length - 2)
        self._run(WARM_UP_PROMPTS, prompt_tokens)
        self._order(Order.FIX_INPUT_SCALES)
        self._fix_input_scales()
        self._run(-(-self._memory.max_batched_tokens // max(prompt_tokens, 1)) + 1, prompt_tokens)
        self._run(self._memory.max_sequences, 1)
        if record_ahead:
            self._order(Order.RECORD_STEPS)
            self._record_steps()
        self._catch_up()

    def _catch_up(self) -> None:
        """Waits until the device has done what it was told. Raises MegatokenError where a rank has ended."""
        SampledIds(self._last_tokens[:1], self._followers).wait()

    def _order(self, order: Order) -> None:
        if self._group is not None:
            self._group.send(order)

    def _fix_input_scales(self) -> None:
        from megatoken.engine.ops import cuda

        self.measured_input_scales = cuda.fix_input_scales(
            linear for layer in self._weights.layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)
        )
        if self._cuda_graphs:
            from megatoken.engine.ops.step_graphs import StepGraphs

            self._graphs = StepGraphs(
                self._last_tokens, self._cache[0], self._config, self._scheme, self._memory.max_batched_tokens
            )
            if self._group is not None:
                self._group.recordings = self._graphs.recorded

    @torch.inference_mode()
    def _record_steps(self) -> None:
        if self._graphs is not None:
            self._graphs.record_ahead(self._forward, self._memory.max_length, self._catch_up)

    def _run(self, prompts: int, prompt_tokens: int) -> None:
        """Serve random prompts, two tokens each."""
        prompt_tokens = max(prompt_tokens, 1)
        ids = np.random.default_rng(0).integers(0, self._config.vocabulary_size, (prompts, prompt_tokens + 2)).tolist()
        scheduler = self._memory.scheduler()
        for ticket in range(prompts):
            scheduler.add(ticket, prompt_tokens, min(2, self._memory.max_length - prompt_tokens))
        while (plan := scheduler.plan()) is not None:
            self.launch(plan, scheduler, lambda ticket, start, count: ids[ticket][start : start + count], None).wait()
