"""The engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

import reprlib
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from megatoken.engine.checkpoint import open_model
from megatoken.engine.config import EngineConfig, ModelConfig, model_folder
from megatoken.engine.device import choose_device, operations, plan_memory
from megatoken.engine.follower import specification
from megatoken.engine.memory import MemoryPlan
from megatoken.engine.ops import NO_TOKEN
from megatoken.engine.parallel import Followers, RankWeights
from megatoken.engine.request import (
    Completion,
    FinishReason,
    Request,
    Sampling,
    TokenEvent,
    check_request,
    token_ids,
)
from megatoken.engine.runner import Runner, SampledIds
from megatoken.engine.scheduler import StepPlan
from megatoken.engine.schemes import scheme_of
from megatoken.engine.state import ReplicaState
from megatoken.engine.step_time import StepTime, plan_within
from megatoken.engine.tokenizer import Tokenizer
from megatoken.errors import CapacityError, NumericsError, RequestError


@dataclass(slots=True)
class _Active:
    """A request between submission and its last token."""

    prompt: list[int]
    generated: list[int]
    max_tokens: int
    stop_ids: frozenset[int]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class _Launched:
    plan: StepPlan
    rows: int
    cached_tokens: int  # keys that its sequences see; 0 where no step has a time to keep to
    began: float  # time.monotonic()
    ids: SampledIds = field(repr=False)


class Engine:
    """A model that continues prompts, many at a time.

    Args:
        model: a Hugging Face checkpoint directory; ``reference``, the trained model that ships with the package; or a
            named shape (``megatoken.engine.config.SHAPES``), which gets random weights.
        config: precision and sizes; what is left out is derived, see ``memory_plan``.
        random_weights: take only the directory's configuration.
        seed: of random weights.
        tokenizer: the model's, where it has been read already.

    Raises:
        CheckpointError: the directory cannot be loaded.
        CapacityError: the model does not fit.
    """

    def __init__(
        self,
        model: str | Path,
        config: EngineConfig | None = None,
        *,
        random_weights: bool = False,
        seed: int = 0,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        config = config or EngineConfig()
        source = open_model(model, random_weights=random_weights, seed=seed)
        self.model_config: ModelConfig = source.config
        self.config = config
        self.content_hash = source.content_hash
        self.memory_plan: MemoryPlan = plan_memory(source.config, config)
        tokenizer_file = model_folder(model) / "tokenizer.json"
        if tokenizer is None and tokenizer_file.is_file():
            tokenizer = Tokenizer(tokenizer_file)
        self.tokenizer = tokenizer
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.device, self._why_no_gpu = choose_device(config)
        self._ops = operations(self.device)
        memory = self.memory_plan
        try:
            followers = None
            if config.tensor_parallel > 1:
                threads = max(1, torch.get_num_threads() // config.tensor_parallel)
                told = specification(model, random_weights, seed, config, memory, threads)
                followers = Followers(config.tensor_parallel, told)
                if self.device.type == "cpu":
                    torch.set_num_threads(threads)
            weights = source if followers is None else RankWeights(source, 0, config.tensor_parallel)
            self._runner = Runner(weights, config, memory, self._ops, self.device, followers)
        except torch.OutOfMemoryError as error:
            raise CapacityError(f"the GPU ran out of memory while loading: {str(error).splitlines()[0]}") from error
        self._scheduler = memory.scheduler()
        self._step_time = None
        if config.target_step_seconds is not None:
            self._step_time = StepTime(config.target_step_seconds, memory.max_batched_tokens)
        self._ended = 0.0  # when the last step was collected
        overlap = self.device.type == "cuda" if config.overlap is None else config.overlap
        self._lookahead = 1 if overlap else 0
        self._active: dict[int, _Active] = {}
        self._drawing = 0
        self._launched: deque[_Launched] = deque()
        self._held: list[TokenEvent] = []
        self._next_ticket = 0
        self._batched_tokens = self._steps = 0
        self._computed_seconds = 0.0
        self._processed_tokens = self._output_tokens = self._decoded_tokens = self._context_tokens = 0

    def submit(self, request: Request) -> int:
        """Queue a request; its ticket names it in every ``TokenEvent``.

        Raises:
            RequestError: empty or unreadable prompt, id outside the vocabulary, bad limit or sampling.
            CapacityError: it can never fit context or cache.
        """
        if not isinstance(request, Request):
            raise RequestError(f"expected a Request, got {reprlib.repr(request)}; write Request(prompt, max_tokens)")
        prompt = self.encode(request.prompt) if isinstance(request.prompt, str) else token_ids(request.prompt)
        check_request(prompt, request, self.model_config.vocabulary_size)
        stop_ids = frozenset(request.stop_token_ids)
        if not request.ignore_end_token:
            stop_ids |= frozenset(self.model_config.end_token_ids)
        ticket = self._next_ticket
        self._scheduler.add(ticket, len(prompt), request.max_tokens)
        self._next_ticket += 1
        sampling = request.sampling
        if sampling.seed is None:
            sampling = replace(sampling, seed=ticket)
        self._active[ticket] = _Active(prompt, [], request.max_tokens, stop_ids, sampling)
        self._drawing += request.sampling.temperature > 0
        return ticket

    @property
    def gpu_uuids(self) -> list[str]:
        """Of the GPUs of all ranks, as their driver names them."""
        if self.device.type != "cuda":
            return []
        ranks = range(self.config.tensor_parallel)  # rank N is on device N
        return [f"GPU-{torch.cuda.get_device_properties(rank).uuid}" for rank in ranks]

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``.

        Raises:
            RequestError: the model has no tokenizer, or ``text`` is no Unicode text.
        """
        if self.tokenizer is None:
            raise RequestError(f"{self.model_config.name} has no tokenizer.json, so prompts must be token ids")
        return self.tokenizer.encode(text)

    @property
    def busy(self) -> bool:
        """Whether ``step`` still has something to do or to tell."""
        return bool(self._active or self._launched or self._held)

    def step(self) -> list[TokenEvent]:
        """Plan and launch one step, collect the oldest that is due, tell what it brought."""
        began = time.monotonic()
        events, self._held = self._held, []
        on_the_way = [(step.rows, step.cached_tokens) for step in self._launched if step.plan.decodes]
        plan = plan_within(self._step_time, self._scheduler, on_the_way)
        if plan is not None:
            rows = int(plan.count.sum())
            cached_tokens = int((plan.start + plan.count).sum()) if self._step_time is not None else 0
            self._launched.append(_Launched(plan, rows, cached_tokens, time.monotonic(), self._launch(plan, rows)))
        if self._launched and (plan is None or len(self._launched) > self._lookahead):
            events += self._collect(self._launched.popleft())
        self._computed_seconds += time.monotonic() - began
        return events

    def cancel(self, ticket: int) -> None:
        """End a request now; its pages are free at once and ``step`` reports it as cancelled. Unknown tickets pass."""
        request = self._active.get(ticket)
        if request is None:
            return
        self._scheduler.end(ticket, answered=False)
        self._forget(ticket)
        self._held.append(TokenEvent(ticket, (), FinishReason.CANCELLED))

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Run ``requests`` to their ends; completions in the order of the requests.

        Events of other requests wait for the next ``step``. An error leaves none of ``requests`` behind.

        Raises:
            RequestError, CapacityError: as ``submit``.
        """
        if isinstance(requests, Request):
            raise RequestError("generate takes a list of requests; write generate([request])")
        running: dict[int, _Active] = {}
        reasons: dict[int, FinishReason] = {}
        try:
            for request in requests:
                ticket = self.submit(request)
                running[ticket] = self._active[ticket]
            for event in self._events(running):
                if event.finish_reason is not None:
                    reasons[event.ticket] = event.finish_reason
        finally:
            self._abandon(running)
        return [Completion(one.generated, reasons[ticket], len(one.prompt)) for ticket, one in running.items()]

    def stream(self, request: Request) -> Iterator[TokenEvent]:
        """Run one request, event by event; leaving the loop early cancels it.

        Events of other requests wait for the next ``step``.

        Raises:
            RequestError, CapacityError: as ``submit``, when the iteration begins.
        """
        ticket = self.submit(request)
        try:
            yield from self._events([ticket])
        finally:
            self._abandon([ticket])

    def describe(self) -> dict[str, Any]:
        """What this engine runs on and with, ready for JSON."""
        on_gpu = self.device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name(self.device) if on_gpu else "cpu",
            "simulated_gpu": None,
            **self._ops.kernels(),
            "threads": torch.get_num_threads(),
            "tensor_parallel": self.config.tensor_parallel,
            "steps_in_flight": 1 + self._lookahead,
            "target_step_seconds": self.config.target_step_seconds,
            "fp8_scales": scheme_of(self.config).fp8_scales,
            "measured_input_scales": self._runner.measured_input_scales,
            "why_no_gpu": self._why_no_gpu,
        }

    def state(self) -> ReplicaState:
        """What the engine holds and has done."""
        scheduler, memory = self._scheduler, self.memory_plan
        return ReplicaState(
            in_flight=len(self._active),
            waiting=scheduler.waiting,
            running=scheduler.resident,
            batched_tokens=self._batched_tokens,
            max_batched_tokens=memory.max_batched_tokens,
            pages_free=scheduler.free_pages,
            pages=memory.pages,
            steps=self._steps,
            processed_tokens=self._processed_tokens,
            output_tokens=self._output_tokens,
            decoded_tokens=self._decoded_tokens,
            context_tokens=self._context_tokens,
            preemptions=scheduler.preemptions,
            recomputed_tokens=scheduler.recomputed_tokens,
            computed_seconds=self._computed_seconds,
        )

    def _events(self, tickets: Iterable[int]) -> Iterator[TokenEvent]:
        open_tickets = set(tickets)
        while open_tickets:
            events = self.step()
            # Set aside before the first yield: whoever gets control there may step, or never come back.
            self._held += [event for event in events if event.ticket not in open_tickets]
            for event in events:
                if event.ticket in open_tickets:
                    if event.finish_reason is not None:
                        open_tickets.discard(event.ticket)
                    yield event

    def _abandon(self, tickets: Iterable[int]) -> None:
        """Cancel what is left of ``tickets``, and report nothing more of them."""
        gone = set(tickets)
        for ticket in gone:
            self.cancel(ticket)
        self._held = [event for event in self._held if event.ticket not in gone]

    def _launch(self, plan: StepPlan, rows: int) -> SampledIds:
        self._batched_tokens = rows
        self._processed_tokens += rows
        self._decoded_tokens += plan.decodes
        self._context_tokens += int(plan.start[: plan.decodes].sum())
        self._steps += 1
        samplings = None
        if self._drawing:
            samplings = [self._active[ticket].sampling for ticket in plan.ticket[plan.sample].tolist()]
        try:
            return self._runner.launch(plan, self._scheduler, self._host_tokens, samplings)
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"the GPU ran out of memory in a step of {rows:,} row{'s' * (rows != 1)}: "
                f"{str(error).splitlines()[0]}; something else uses it too, or lower memory_bytes or max_batched_tokens"
            ) from error

    def _host_tokens(self, ticket: int, start: int, count: int) -> list[int]:
        active = self._active[ticket]
        prompt = len(active.prompt)
        if start + count <= prompt:
            return active.prompt[start : start + count]
        return active.prompt[start:] + active.generated[max(start - prompt, 0) : start + count - prompt]

    def _collect(self, launched: _Launched) -> list[TokenEvent]:
        plan, ids = launched.plan, launched.ids.wait()
        if self._step_time is not None:
            now = time.monotonic()
            seconds = now - max(launched.began, self._ended)
            self._step_time.note(launched.rows, launched.cached_tokens, seconds, decodes=plan.decodes > 0)
            self._ended = now
        events = []
        for ticket, token in zip(plan.ticket[plan.sample].tolist(), ids, strict=True):
            active = self._active.get(ticket)
            if active is None:  # it stopped or was cancelled while this step was on its way
                continue
            if token == NO_TOKEN:
                known = len(active.prompt) + len(active.generated)
                raise NumericsError(
                    f"logits after {known:,} token{'s' * (known != 1)} of a request are no numbers: "
                    f"the weights of {self.model_config.name} or their scales overflow in {self.config.precision}; "
                    "check the checkpoint or take another precision"
                )
            active.generated.append(token)
            reason = None
            if len(active.generated) == active.max_tokens:
                reason = FinishReason.STOP if token in active.stop_ids else FinishReason.LENGTH
                self._forget(ticket)
            elif token in active.stop_ids:
                reason = FinishReason.STOP
                self._scheduler.end(
                    ticket, answered=True
                )  # unless the step that brings its last token has been planned
                self._forget(ticket)
            events.append(TokenEvent(ticket, (token,), reason))
        self._output_tokens += len(events)
        return events

    def _forget(self, ticket: int) -> None:
        self._drawing -= self._active.pop(ticket).sampling.temperature > 0
