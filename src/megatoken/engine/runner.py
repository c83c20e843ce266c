"""The runner that computes: owns weights, cache and the token table, and runs one step at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatoken.engine.active_request import ActiveRequest
from megatoken.engine.batch import StepArrays, step_arrays
from megatoken.engine.cache import allocate_cache
from megatoken.engine.checkpoint import open_model
from megatoken.engine.config import EngineConfig, model_folder
from megatoken.engine.device import choose_device, operations, settle, why_no_fused_gate
from megatoken.engine.logprobs import PromptTokens, best_logprobs, read_logprobs
from megatoken.engine.memory import BLOCK_SAMPLES, MemoryPlan, most_tokens, screens_head
from megatoken.engine.model import WeightSource, forward, hidden_states, load_weights, logits
from megatoken.engine.ops import NOTHING_LEFT, Draw, Ops
from megatoken.engine.parallel import NO_PLACES, Order, RankGroup, RankWeights, TPWorkers, worker_specification
from megatoken.engine.process_memory import HUGE_PAGES_FROM_BYTES, return_idle_code, use_huge_pages
from megatoken.engine.request import Request, Sampling, TokenLogprobs
from megatoken.engine.runner_protocol import PromptPart, RecordedSteps
from megatoken.engine.sampled_ids import SampledIds
from megatoken.engine.sampling import sample, to_device
from megatoken.engine.schemes import scheme_of
from megatoken.engine.step_plan import StepPlan
from megatoken.engine.tokenizer import Tokenizer
from megatoken.errors import CapacityError, MegatokenError, NumericsError, RequestError

if TYPE_CHECKING:
    from megatoken.engine.ops.screened_head import ScreenedHead
    from megatoken.engine.ops.step_graphs import StepGraphs

WARM_UP_PROMPTS, WARM_UP_PROMPT_TOKENS = 16, 256


def open_runner(
    model: str | Path, config: EngineConfig, *, random_weights: bool, seed: int, tokenizer: Tokenizer | None
) -> ModelRunner:
    """A runner of ``model`` on this machine; arguments and errors as of ``Engine``."""
    source = open_model(model, random_weights=random_weights, seed=seed)
    config, memory = settle(source, config)
    tokenizer_file = model_folder(model) / "tokenizer.json"
    if tokenizer is None and tokenizer_file.is_file():
        tokenizer = Tokenizer(tokenizer_file)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device, why_no_gpu = choose_device(config)
    workers, weights = None, cast(WeightSource, source)
    try:
        if (ranks := config.tensor_parallel) > 1:
            threads = max(1, torch.get_num_threads() // ranks)
            workers = TPWorkers(ranks, worker_specification(model, random_weights, seed, config, memory, threads))
            weights = RankWeights(source, 0, ranks)
            if device.type == "cpu":
                torch.set_num_threads(threads)
        runner = ModelRunner(weights, config, memory, operations(device), device, workers)
    except torch.OutOfMemoryError as error:
        raise CapacityError(f"the GPU ran out of memory while loading: {str(error).splitlines()[0]}") from error
    runner.model_config, runner.content_hash = source.config, source.content_hash
    runner.tokenizer, runner.why_no_gpu = tokenizer, why_no_gpu
    return runner


class _Choice:
    """What a step with requests that are not plain wants of its logits."""

    def __init__(
        self, plan: StepPlan, requests: Mapping[int, ActiveRequest], last_tokens: Tensor, draw: Draw | None
    ) -> None:
        self.failed: dict[int, Exception] = {}
        self._requests = [requests[request_id] for request_id in plan.request_id[plan.sample].tolist()]
        self._positions = (plan.start + plan.count)[plan.sample].astype(np.int64)
        self._slots = plan.slot[plan.sample]
        self._last_tokens, self._draw = last_tokens, draw
        wanted = ((row, one.request.logprobs) for row, one in enumerate(self._requests))
        self._logprobs = {row: most for row, most in wanted if most is not None}
        self.prompts = PromptTokens(plan, requests)

    @property
    def must_wait(self) -> bool:
        """Whether a grammar, or a bad word of several tokens, needs a token that is not on the host yet."""
        return any(
            one.adjustments is not None
            and one.adjustments.need_tokens
            and position > len(one.prompt) + len(one.generated)
            for one, position in zip(self._requests, self._positions.tolist(), strict=True)
        )

    def choose(self, logits_SV: Tensor, chosen_S: Tensor) -> Tensor | None:
        """Replace greedy ids; the logprobs that are wanted."""
        where = self._positions, self._slots, self._last_tokens
        sample(logits_SV, self._requests, *where, chosen_S, self.failed, self._draw)
        if not self._logprobs:
            return None
        return best_logprobs(logits_SV, chosen_S, list(self._logprobs), max(self._logprobs.values()))

    def read(
        self, ids: Sequence[int], request_ids: Sequence[int], values: list[list[float]]
    ) -> dict[int, TokenLogprobs]:
        """The logprobs by id of the request, from what came back from the device."""
        return {
            request_ids[row]: read_logprobs(ids[row], one, most)
            for (row, most), one in zip(self._logprobs.items(), values, strict=True)
        }


class _Computed(NamedTuple):
    """What a step has computed on the device before its tokens are chosen."""

    logits_SV: Tensor | None  # None where only the highest was asked for
    greedy_S: Tensor
    slots_S: Tensor
    prompt_logprobs: Tensor | None = None


class _Step:
    """A launched step, as ``LaunchedStep``."""

    def __init__(
        self, runner: ModelRunner, plan: StepPlan, began: float, computed: _Computed, choice: _Choice | None
    ) -> None:
        self.errors: dict[int, MegatokenError] = {}
        self.logprobs: dict[int, TokenLogprobs] = {}
        self.prompt_logprobs: dict[int, PromptPart] = {}
        self.seconds = 0.0
        self._runner, self._plan, self._computed, self._choice = runner, plan, computed, choice
        self._ids: SampledIds | None = None
        self._began = began
        if choice is None or not choice.must_wait:
            self._ids = runner.finish(computed, choice)

    def choose(self) -> None:
        if self._ids is None:
            with self._runner.explaining(self._plan):
                self._ids = self._runner.finish(self._computed, self._choice)

    def wait(self) -> zip[tuple[int, tuple[int]]]:
        self.choose()
        assert self._ids is not None
        ids = self._ids.wait()
        runner, plan, choice = self._runner, self._plan, self._choice
        now = time.monotonic()
        self.seconds = now - max(self._began, runner.last_step_end)
        runner.last_step_end = now
        request_ids = plan.request_id[plan.sample].tolist()
        if choice is not None:
            self.logprobs = choice.read(ids, request_ids, self._ids.logprobs())
            self.prompt_logprobs = choice.prompts.read(self._ids.prompt_logprobs())
        if ids and min(ids) < 0:
            failed = {} if choice is None else choice.failed
            tokens = (plan.start + plan.count)[plan.sample].tolist()
            for row, (request_id, token) in enumerate(zip(request_ids, ids, strict=True)):
                if token < 0:
                    self.errors[request_id] = runner.no_token(token, tokens[row], failed.get(row))
        return zip(request_ids, zip(ids, strict=True), strict=True)


class ModelRunner:
    """One model on one device, a rank of it where several share it.

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
        workers: TPWorkers | None = None,
    ) -> None:
        """Loads. A rank other than 0 of a model that several ranks share must ``follow`` before it can do more."""
        self.memory_plan = memory
        self.model_config = source.config  # ``open_runner`` puts that of the whole model here
        self.content_hash = ""
        self.tokenizer: Tokenizer | None = None
        self.why_no_gpu: str | None = None
        self.overlaps = device.type == "cuda"
        self.unsupported: frozenset[str] = frozenset()
        self.recorded: RecordedSteps | None = None
        self.gpu_uuids: list[str] = []
        if device.type == "cuda":  # rank N is on device N
            ranks = range(config.tensor_parallel)
            self.gpu_uuids = [f"GPU-{torch.cuda.get_device_properties(rank).uuid}" for rank in ranks]
        self.last_step_end = 0.0
        self.measured_input_scales = 0
        """Linears whose fp8 input scale was measured at start, because the checkpoint has none."""
        self.expanded_linears: dict[str, int] | None = None
        """4-bit linears that were expanded to e4m3 when they were loaded, and how many of them exactly."""
        self._device, self._config, self._ops = device, source.config, ops
        scheme = self._scheme = scheme_of(config)
        compiling: list[Future[None]] = []
        if device.type == "cuda":
            from megatoken.engine.ops.compilation import start_compiling

            compiling = start_compiling(source.config, config, memory.page_size, device)
        self._padded_tokens = partial(ops.padded_tokens, weights_bytes=memory.weights_bytes)
        self._weights = load_weights(source, ops, scheme, memory.max_length, device)
        self._screened: ScreenedHead | None = None
        if screens_head(source.config, scheme, device.type, config.tensor_parallel):
            from megatoken.engine.ops.screened_head import ScreenedHead

            self._screened = ScreenedHead.pack(self._weights.head.weight)
        if source.quantized is not None and (expanded := source.quantized.expanded):
            self.expanded_linears = {"count": len(expanded), "exact": sum(expanded.values())}
        if device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            ops.kernels()  # builds them now if need be, not within the first step of a request
            return_idle_code()
            if memory.weights_bytes >= HUGE_PAGES_FROM_BYTES:
                use_huge_pages()
        scales = [layer.cache_scales for layer in self._weights.layers]
        pages = memory.pages, memory.window_pages, memory.page_size
        self._cache = allocate_cache(source.config, scheme, *pages, device, scales)
        self._last_tokens = torch.zeros(memory.max_sequences, dtype=torch.int64, device=device)
        self._workers = workers
        for kernel in compiling:
            kernel.result()
        self._shares_rows = device.type == "cuda" and scheme.fused_all_reduce
        self._group: RankGroup | None = None
        self._cuda_graphs = config.cuda_graphs and device.type == "cuda"
        self._graphs: StepGraphs | None = None
        with nullcontext() if workers is None else workers.blamed():
            if workers is not None:
                self._join(workers.init_group(device), workers.check)
            if device.type == "cuda" and (workers is not None or config.tensor_parallel == 1):
                self._warm_up(config.recording_seconds)

    def now(self) -> float:
        """``time.monotonic()``."""
        return time.monotonic()

    def describe(self) -> dict[str, Any]:
        """What the model runs on and with, ready for JSON."""
        on_gpu = self._device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name(self._device) if on_gpu else "cpu",
            "simulated_gpu": None,
            **self._ops.kernels(),
            "threads": torch.get_num_threads(),
            "measured_input_scales": self.measured_input_scales,
            "expanded_linears": self.expanded_linears,
            "why_no_fused_gate": why_no_fused_gate(self._config, self._scheme, self._device),
            "screened_head": self._screened is not None,
            "why_no_gpu": self.why_no_gpu,
        }

    def close(self) -> None:
        """Ends the processes of the other ranks."""
        if self._workers is not None:
            self._workers.end()

    def no_token(self, mark: int, tokens: int, cause: Exception | None) -> MegatokenError:
        """Why a request has no next token after so many, but a mark: ``NO_TOKEN`` or ``NOTHING_LEFT``."""
        after = f"{tokens:,} token{'s' * (tokens != 1)} of a request"
        if isinstance(cause, MegatokenError):
            return cause
        if cause is not None:
            return MegatokenError(f"no token could be drawn after {after}: {type(cause).__name__}: {cause}")
        if mark == NOTHING_LEFT:
            return RequestError(
                f"no token is left to choose after {after}: its min_tokens, logit_bias, bad_words, grammar, "
                "allowed_token_ids and penalties exclude all; relax them"
            )
        return NumericsError(
            f"logits after {after} are not finite: the weights of {self.model_config.name} or their scales overflow "
            f"in {self._scheme.precision}; check the checkpoint or use another precision"
        )

    def follow(self, group: RankGroup) -> NoReturn:
        """Runs rank 0's commands; raises when rank 0 exits."""
        self._join(group, lambda: None)
        while True:
            order, arrays, places = group.receive()
            if arrays is not None:
                self.finish(self._compute(arrays, places), None)
            elif order is Order.FIX_INPUT_SCALES:
                self._fix_input_scales()
            elif order is Order.RECORD_NEXT and self._graphs is not None:
                with torch.inference_mode():
                    self._graphs.record_next(self._forward, self._catch_up)

    def _join(self, group: RankGroup, check: Callable[[], None]) -> None:
        self._group = group
        if self._shares_rows:
            rows = most_tokens(self._config, self._scheme, self.memory_plan.max_batched_tokens)
            group.share_rows(rows, self._config.hidden_size, check)

    @torch.inference_mode()
    def launch(
        self,
        plan: StepPlan,
        page_table: NDArray[np.int32],
        requests: Mapping[int, ActiveRequest],
        *,
        plain: bool,
        after_idle: bool,
    ) -> _Step:
        """Start one step, see ``Runner``. Raises CapacityError if the GPU has too little memory for it."""
        began = time.monotonic()
        arrays = step_arrays(
            plan,
            page_table,
            self._cache[0].page_size,
            lambda request_id, start, count: requests[request_id].tokens(start, count),
            self._padded_tokens,
        )
        choice = None if plain else _Choice(plan, requests, self._last_tokens, self._ops.draw)
        prompts = None if choice is None else choice.prompts
        places = NO_PLACES if prompts is None else prompts.places
        with self.explaining(plan):
            if self._workers is not None and self._group is not None:
                self._workers.check()
                self._group.send(Order.STEP, arrays, places)
            computed = self._compute(arrays, places, prompts, only_highest=plain)
            return _Step(self, plan, began, computed, choice)

    @contextmanager
    def explaining(self, plan: StepPlan) -> Iterator[None]:
        """Reports what goes wrong in a step: an ended rank, or too little memory as a CapacityError."""
        try:
            with nullcontext() if self._workers is None else self._workers.blamed():
                yield
        except torch.OutOfMemoryError as error:
            tokens = plan.batched_tokens
            raise CapacityError(
                f"the GPU ran out of memory in a step of {tokens:,} token{'s' * (tokens != 1)}: "
                f"{str(error).splitlines()[0]}; another process uses it too, or lower memory_bytes or "
                "max_batched_tokens"
            ) from error

    @torch.inference_mode()
    def _compute(
        self,
        arrays: StepArrays,
        places: NDArray[np.int64],
        prompts: PromptTokens | None = None,
        *,
        only_highest: bool = False,
    ) -> _Computed:
        """The logits of one step on the device, and on rank 0 the logprobs that are wanted of ``prompts``.

        With ``only_highest`` there may be no logits, only the greedy ids.
        """
        if len(places):
            return self._compute_prompts(arrays, places, prompts)
        if self._graphs is not None and self._graphs.takes(arrays):
            return _Computed(*self._graphs.run(arrays, self._forward, self._catch_up))
        batch = self._ops.prepare(arrays, self._last_tokens)
        if only_highest and self._screened is not None and arrays.samples:
            hidden_SD = hidden_states(self._weights, self._config, self._ops, self._cache, batch)
            return _Computed(None, self._screened.greedy(hidden_SD[: arrays.samples]), batch.sample_slots)
        logits_SV = self._forward(batch)
        return _Computed(logits_SV, self._ops.greedy(logits_SV), batch.sample_slots)

    def _compute_prompts(
        self, arrays: StepArrays, places: NDArray[np.int64], prompts: PromptTokens | None
    ) -> _Computed:
        """The same where the last layer computes all tokens, not only those that sample.

        The logits of prompts are made a few at a time: those of a whole one would take gigabytes.
        """
        batch = self._ops.prepare(arrays, self._last_tokens)
        model, ranks = (self._weights, self._config, self._ops), self._group
        hidden_TD = hidden_states(*model, self._cache, batch, ranks, every_token=True)
        logits_SV = logits(*model, hidden_TD.index_select(0, batch.sample_indices), batch.samples, ranks)
        place_T = to_device({"place": places}, hidden_TD.device)["place"]
        blocks = (
            logits(*model, hidden_TD.index_select(0, place_R), BLOCK_SAMPLES, ranks)
            for place_R in place_T.split(BLOCK_SAMPLES)  # type: ignore[no-untyped-call]
        )
        logprobs = None if prompts is None else prompts.logprobs(blocks)
        deque(blocks, maxlen=0)  # other ranks than 0 have no prompts, but a part in their logits
        return _Computed(logits_SV, self._ops.greedy(logits_SV), batch.sample_slots, logprobs)

    @torch.inference_mode()
    def teacher_forced(self, token_ids: list[int]) -> Tensor:
        """Logits [T, V] after each token of a text, on the device. Nothing else may be running."""
        scheduler = self.memory_plan.scheduler()
        scheduler.add(0, len(token_ids), 1)
        parts = []
        while (plan := scheduler.plan()) is not None:
            arrays = step_arrays(
                plan,
                scheduler.page_table,
                self._cache[0].page_size,
                lambda _, start, count: token_ids[start : start + count],
                self._padded_tokens,
            )
            batch = self._ops.prepare(arrays, self._last_tokens)
            hidden_TD = hidden_states(self._weights, self._config, self._ops, self._cache, batch, every_token=True)
            parts.append(self._ops.linear(hidden_TD[: plan.batched_tokens], self._weights.head))
        return torch.cat(parts)

    @torch.inference_mode()
    def finish(self, computed: _Computed, choice: _Choice | None) -> SampledIds:
        """The end of a step on the device; ``choice`` replaces the greedy ids of the requests that want others."""
        logits_SV, ids_S, slots_S, prompt_logprobs = computed
        logprobs = None
        if choice is not None:
            assert logits_SV is not None  # only steps without one ask for the highest alone
            logprobs = choice.choose(logits_SV, ids_S)
        if self._group is not None:
            self._group.share(ids_S)
        # A step that is already on its way reads every value here as the id of a token.
        self._last_tokens.index_copy_(0, slots_S.long(), ids_S.clamp(min=0))
        return SampledIds(ids_S, logprobs, prompt_logprobs, self._workers)

    def _forward(self, batch: Any) -> Tensor:
        return forward(self._weights, self._config, self._ops, self._cache, batch, self._group)

    def _warm_up(self, recording_seconds: float) -> None:
        """Fix the scales of fp8 inputs, compile kernels, take the memory of the largest steps: all before a request.

        Prompts are random ids, the same for engines of any size; what they leave in the cache is never read.
        ``recording_seconds``: for recording steps that will probably come.
        """
        prompt_tokens = min(WARM_UP_PROMPT_TOKENS, self.memory_plan.max_length - 2)
        self._run(WARM_UP_PROMPTS, prompt_tokens)
        self._order(Order.FIX_INPUT_SCALES)
        self._fix_input_scales()
        self._run(-(-self.memory_plan.max_batched_tokens // max(prompt_tokens, 1)) + 1, prompt_tokens)
        self._run(self.memory_plan.max_sequences, 1)
        if self._graphs is not None and recording_seconds:
            order = partial(self._order, Order.RECORD_NEXT)
            with torch.inference_mode():
                self.recorded = self._graphs.record_first(self._forward, self._catch_up, order, recording_seconds)
        self._catch_up()

    def _catch_up(self) -> None:
        """Wait until the device is idle. Raises MegatokenError if a rank has ended."""
        SampledIds(self._last_tokens[:1], workers=self._workers).wait()

    def _order(self, order: Order) -> None:
        if self._group is not None:
            self._group.send(order)

    def _fix_input_scales(self) -> None:
        from megatoken.engine.ops import cuda

        self.measured_input_scales = cuda.fix_input_scales(
            linear
            for layer in self._weights.layers
            for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)
            if linear is not None
        )
        if self._cuda_graphs:
            from megatoken.engine.ops.step_graphs import StepGraphs

            self._graphs = StepGraphs(self._last_tokens, self._cache[0], self._config, self._scheme, self.memory_plan)
            if self._group is not None:
                self._group.recordings = self._graphs.recorded

    def _run(self, prompts: int, prompt_tokens: int) -> None:
        """Serve random prompts, two tokens each."""
        prompt_tokens = max(prompt_tokens, 1)
        new = min(2, self.memory_plan.max_length - prompt_tokens)
        ids = np.random.default_rng(0).integers(0, self._config.vocabulary_size, (prompts, prompt_tokens + 2)).tolist()
        requests = {
            number: ActiveRequest(Request(prompt, new), prompt, frozenset(), Sampling(), [])
            for number, prompt in enumerate(ids)
        }
        scheduler = self.memory_plan.scheduler()
        for number in requests:
            scheduler.add(number, prompt_tokens, new)
        while (plan := scheduler.plan()) is not None:
            self.launch(plan, scheduler.page_table, requests, plain=True, after_idle=False).wait()
