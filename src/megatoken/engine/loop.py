"""The engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

import reprlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from megatoken.engine.active_request import ActiveRequest, activate
from megatoken.engine.adjustments import bad_words_of
from megatoken.engine.config import EngineConfig, ModelConfig
from megatoken.engine.grammar import Grammars
from megatoken.engine.one_thread import OneThread
from megatoken.engine.prefix_cache import extend_keys
from megatoken.engine.prompt_limit import PromptLimit
from megatoken.engine.request import (
    Completion,
    FinishReason,
    Request,
    TokenEvent,
    TokenLogprobs,
    check_request,
    token_ids,
    used_options,
)
from megatoken.engine.runner_protocol import LaunchedStep, Runner
from megatoken.engine.schemes import scheme_of
from megatoken.engine.state import ReplicaState
from megatoken.engine.step_plan import StepPlan
from megatoken.engine.step_time import StepTime, plan_within
from megatoken.errors import RequestError

if TYPE_CHECKING:
    from megatoken.engine.simulated import Clock
    from megatoken.engine.text_stream import TextStream
    from megatoken.engine.tokenizer import Tokenizer


class _InFlight(NamedTuple):
    plan: StepPlan
    cached_tokens: int  # keys that its sequences see; 0 without a target for the time of steps
    step: LaunchedStep


class Engine:
    """A model that continues prompts, many at a time.

    One thread at a time may call it: a second one gets a ``ThreadError``. ``EngineThread`` shares an engine; a thread
    that holds ``exclusive`` (a context manager) keeps all others out.

    Args:
        model: a Hugging Face checkpoint directory; ``reference``, the trained model that ships with the package; or a
            named shape (``megatoken.engine.config.SHAPES``), which gets random weights.
        config: precision and sizes; what is left out is derived, see ``memory_plan``.
        random_weights: take only the directory's configuration.
        seed: of random weights.
        tokenizer: the model's, if it has been read already.

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
        from megatoken.engine.runner import open_runner  # loads PyTorch, which simulation does without

        config = config or EngineConfig()
        self._start(open_runner(model, config, random_weights=random_weights, seed=seed, tokenizer=tokenizer), config)

    @classmethod
    def simulated(
        cls,
        model: ModelConfig | str,
        config: EngineConfig | None = None,
        gpu: str = "H200",
        clock: Clock | None = None,
        *,
        stream: bool = True,
        seconds_per_sequence: float = 0.0,
    ) -> Self:
        """An engine on a GPU that is not here: real plans, steps as long as a cost model says, made-up tokens.

        Args: as for ``SimulatedRunner``. ``config.device`` and ``config.threads`` have no effect; precision may be fp4.

        Raises:
            As ``plan_simulation``.
        """
        from megatoken.engine.simulated import SimulatedRunner

        config = config or EngineConfig(precision="fp8")
        engine = cls.__new__(cls)
        runner = SimulatedRunner(model, config, gpu, clock, stream=stream, seconds_per_sequence=seconds_per_sequence)
        engine._start(runner, config)
        return engine

    def _start(self, runner: Runner, config: EngineConfig) -> None:
        self.config = replace(config, packed_weights=runner.memory_plan.packed_weights)
        self.model_config, self.memory_plan, self.recorded = runner.model_config, runner.memory_plan, runner.recorded
        self.content_hash, self.tokenizer, self.gpu_uuids = runner.content_hash, runner.tokenizer, runner.gpu_uuids
        self._runner = runner
        self._scheduler = self.memory_plan.scheduler(prefix_cache=config.prefix_cache)
        self._prefixes = self._scheduler.prefixes
        target, budget = config.target_step_seconds, self.memory_plan.max_batched_tokens
        self._step_time = None if target is None else StepTime(target, budget)
        self._prompt_limit = PromptLimit(config.fair_slowdown, budget)
        self._lookahead = int(runner.overlaps if config.overlap is None else config.overlap)
        self._active: dict[int, ActiveRequest] = {}
        self._texts: dict[int, TextStream] = {}  # of active requests whose events carry text
        self._prompt_logprobs: dict[int, list[TokenLogprobs]] = {}  # of active requests that have no token yet
        self._grammars = Grammars(self.tokenizer, self.model_config)
        self._not_plain = 0  # active requests that need more than the highest logit
        self._in_flight: deque[_InFlight] = deque()
        self._held: list[TokenEvent] = []  # for the next step to report
        self._was_idle = True  # since the last step was launched
        self._next_id = 0
        self.exclusive = OneThread()
        self._steps = self._batched_tokens = self._processed_tokens = 0
        self._output_tokens = self._decoded_tokens = self._context_tokens = 0
        self._computed_seconds = 0.0

    def __repr__(self) -> str:
        model, device = self.model_config.name, self._runner.describe()["device"]
        return f"<Engine {model} {self.config.precision} on {device}, {len(self._active)} in flight>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel every request, and end the processes of other ranks; the engine cannot be used afterwards."""
        with self.exclusive:
            self._abandon(list(self._active))
            self._in_flight.clear()
            self._grammars.close()
            self._runner.close()

    @property
    def next_id(self) -> int:
        """Id of the next request."""
        return self._next_id

    def submit(self, request: Request) -> int:
        """Queue a request; its id stands in every ``TokenEvent`` of it. Ids ascend.

        Raises:
            RequestError: empty or unreadable prompt, id outside the vocabulary, bad limit or sampling.
            CapacityError: it can never fit context or cache.
        """
        checked = self.check(request)
        with self.exclusive:
            return self.enqueue(checked)

    def check(self, request: Request, *, text: bool = False) -> ActiveRequest:
        """``request`` ready for ``enqueue``. Any thread may call it at any time. Raises as ``submit``.

        With ``text``, or if the request has stop strings, its events carry their text.
        """
        if not isinstance(request, Request):
            raise RequestError(f"expected a Request, got {reprlib.repr(request)}; write Request(prompt, max_tokens)")
        prompt = self.encode(request.prompt) if isinstance(request.prompt, str) else token_ids(request.prompt)
        check_request(prompt, request, self.model_config.vocabulary_size)
        for name in sorted(used_options(request) & self._runner.unsupported):
            raise RequestError(f"{name} is not supported by this engine; leave it out", name)
        self._scheduler.check(len(prompt), request.max_tokens)
        stream = None
        if request.stop or (text and self.tokenizer is not None):
            stream = self._text_stream(request)
        guide = None if request.grammar is None else self._grammars.guide(request, request.grammar)
        bad_words = bad_words_of(request, self.tokenizer, self.model_config.vocabulary_size)
        checked = activate(request, prompt, self.model_config, text=stream, guide=guide, bad_words=bad_words)
        self._extend_page_keys(checked)
        return checked

    def enqueue(self, checked: ActiveRequest) -> int:
        """Queue what ``check`` returned, once; the request's id."""
        request_id = self._next_id
        self._next_id += 1
        request = checked.request
        self._scheduler.add(request_id, len(checked.prompt), request.max_tokens, checked.page_keys, request.share)
        self._was_idle |= not self._active
        self._not_plain += not checked.plain
        if checked.sampling.temperature > 0 and checked.sampling.seed is None:
            checked = replace(checked, sampling=replace(checked.sampling, seed=request_id))
        if checked.text is not None:
            self._texts[request_id] = checked.text
        if request.prompt_logprobs is not None:
            self._prompt_logprobs[request_id] = []
        self._active[request_id] = checked
        return request_id

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``.

        Raises:
            RequestError: the model has no tokenizer, or ``text`` is not Unicode text.
        """
        if self.tokenizer is None:
            raise RequestError(
                f"{self.model_config.name} has no tokenizer.json, so prompts must be token ids", "prompt"
            )
        return self.tokenizer.encode(text)

    def _text_stream(self, request: Request) -> TextStream:
        from megatoken.engine.text_stream import TextStream

        if self.tokenizer is None:
            raise RequestError(f"{self.model_config.name} has no tokenizer.json, so stop must be empty", "stop")
        return TextStream(self.tokenizer, request.stop)

    @property
    def busy(self) -> bool:
        """Whether ``step`` still has something to do or to report."""
        return bool(self._active or self._in_flight or self._held)

    def step(self) -> list[TokenEvent]:
        """Plan and launch one step, collect the oldest that is due, and return its events.

        Raises:
            CapacityError: the GPU ran out of memory.
            MegatokenError: a rank ended, or the device failed. The engine cannot go on.
        """
        with self.exclusive:
            began = self._runner.now()
            events, self._held = self._held, []
            on_the_way = ((one.plan.batched_tokens, one.cached_tokens) for one in self._in_flight if one.plan.decodes)
            plan = plan_within(self._step_time, self._prompt_limit, self._scheduler, on_the_way)
            if plan is not None:
                self._launch(plan)
            if self._in_flight and (plan is None or len(self._in_flight) > self._lookahead):
                self._collect(self._in_flight.popleft(), events)
            if self._in_flight:
                self._in_flight[-1].step.choose()
            if self._prefixes is not None and self._prefixes.cached_tokens:
                events = [self._with_cached_tokens(event, self._prefixes.cached_tokens) for event in events]
            self._computed_seconds += self._runner.now() - began
            return events

    def cancel(self, request_id: int) -> None:
        """End a request now; its pages are free at once and ``step`` reports it as cancelled. Unknown ids pass."""
        with self.exclusive:
            if request_id in self._active:
                self._drop(request_id)
                self._held.append(TokenEvent(request_id, (), FinishReason.CANCELLED))

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Run ``requests`` to their ends; completions in the order of the requests.

        Events of other requests wait for the next ``step``. After an error none of ``requests`` is left.

        Raises:
            RequestError, CapacityError: as ``submit``.
            NumericsError: the logits of one of ``requests`` are not finite.
        """
        if isinstance(requests, Request):
            raise RequestError("generate takes a list of requests; write generate([request])")
        with self.exclusive:
            running: dict[int, ActiveRequest] = {}
            reasons: dict[int, FinishReason] = {}
            logprobs: dict[int, list[TokenLogprobs]] = {}
            cached_tokens: dict[int, int] = {}
            prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
            try:
                for request in requests:
                    request_id = self.submit(request)
                    running[request_id] = self._active[request_id]
                    logprobs[request_id] = []
                while len(reasons) < len(running):
                    for event in self._step_for(running):
                        logprobs[event.request_id] += event.logprobs
                        if event.prompt_logprobs:
                            prompt_logprobs[event.request_id] = event.prompt_logprobs
                        if event.cached_tokens:
                            cached_tokens[event.request_id] = event.cached_tokens
                        if event.finish_reason is not None:
                            reasons[event.request_id] = event.finish_reason
            finally:
                self._abandon(running)
            return [
                Completion(
                    token_ids=one.generated,
                    finish_reason=reasons[key],
                    prompt_tokens=len(one.prompt),
                    text=self._text(one),
                    logprobs=tuple(logprobs[key]),
                    cached_tokens=cached_tokens.get(key, 0),
                    prompt_logprobs=prompt_logprobs.get(key, ()),
                )
                for key, one in running.items()
            ]

    def stream(self, request: Request) -> Iterator[TokenEvent]:
        """Run one request, event by event; leaving the loop early cancels it.

        Events of other requests wait for the next ``step``.

        Raises:
            RequestError, CapacityError: as ``submit``, when the iteration begins.
            NumericsError: its logits are not finite.
        """
        checked = self.check(request, text=True)
        with self.exclusive:
            request_id = self.enqueue(checked)
        try:
            while request_id in self._active or any(event.request_id == request_id for event in self._held):
                yield from self._step_for([request_id])
        finally:
            self._abandon([request_id])

    def describe(self) -> dict[str, Any]:
        """What this engine runs on and with, ready for JSON."""
        return {
            **self._runner.describe(),
            "tensor_parallel": self.config.tensor_parallel,
            "steps_in_flight": 1 + self._lookahead,
            "target_step_seconds": self.config.target_step_seconds,
            "fp8_scales": scheme_of(self.config).fp8_scales,
            "formats": scheme_of(self.config).formats(),
        }

    def state(self) -> ReplicaState:
        """What the engine holds and has done. Any thread may call it; during a step it may mix two moments."""
        scheduler, memory = self._scheduler, self.memory_plan
        return ReplicaState(
            in_flight=len(self._active),
            waiting=scheduler.waiting,
            running=scheduler.running,
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
            prefix_cache_queries=0 if self._prefixes is None else self._prefixes.queried_tokens,
            prefix_cache_hits=0 if self._prefixes is None else self._prefixes.found_tokens,
        )

    def _step_for(self, request_ids: Iterable[int]) -> list[TokenEvent]:
        """One step; returns the events of these requests and holds back the others. Raises the error of one."""
        with self.exclusive:
            events = self.step()
            self._held += [event for event in events if event.request_id not in request_ids]
            own = [event for event in events if event.request_id in request_ids]
        for event in own:
            if event.error is not None:
                raise event.error
        return own

    def _abandon(self, request_ids: Iterable[int]) -> None:
        """Cancel what is left of these requests, and report nothing more of them."""
        with self.exclusive:
            gone = set(request_ids)
            for request_id in gone & self._active.keys():
                self._drop(request_id)
            self._held = [event for event in self._held if event.request_id not in gone]
            if self._prefixes is not None:
                for request_id in gone:
                    self._prefixes.cached_tokens.pop(request_id, None)

    def _drop(self, request_id: int) -> None:
        """End a request of which nothing more is reported."""
        self._end(request_id)
        self._texts.pop(request_id, None)
        self._prompt_logprobs.pop(request_id, None)

    def _launch(self, plan: StepPlan) -> None:
        decodes, tokens = plan.decodes, plan.batched_tokens
        self._steps += 1
        self._batched_tokens = tokens
        self._processed_tokens += tokens
        self._decoded_tokens += decodes
        self._context_tokens += int(np.add.reduce(plan.start[:decodes]))
        if self._prefixes is not None:
            for request_id in plan.preempted:
                self._extend_page_keys(self._active[request_id])
                self._prefixes.keep(request_id)
        cached_tokens = int((plan.start + plan.count).sum()) if self._step_time is not None else 0
        step = self._runner.launch(
            plan, self._scheduler.page_table, self._active, plain=not self._not_plain, after_idle=self._was_idle
        )
        self._was_idle = False
        self._in_flight.append(_InFlight(plan, cached_tokens, step))

    def _collect(self, launched: _InFlight, events: list[TokenEvent]) -> None:
        """Wait for a step, and add what it brought to ``events``."""
        outputs = launched.step.wait()
        first = len(events)
        self._prompt_limit.note(launched.plan, launched.step.seconds)
        if self._step_time is not None:
            plan, seconds = launched.plan, launched.step.seconds
            self._step_time.note(plan.batched_tokens, launched.cached_tokens, seconds, decodes=plan.decodes > 0)
        for request_id, error in launched.step.errors.items():
            if request_id in self._active:
                self._end(request_id, failed=True)
                events.append(TokenEvent(request_id, (), FinishReason.ERROR, error))
        active, output_tokens = self._active, 0
        new_event = tuple.__new__  # a named tuple's own constructor is a Python function, which takes twice as long
        for request_id, tokens in outputs:
            request = active.get(request_id)
            if request is None:  # it stopped, failed or was cancelled while this step was on its way
                continue
            request.generated.extend(tokens)
            output_tokens += len(tokens)
            reason = None
            if tokens[-1] in request.stop_ids:
                reason = FinishReason.STOP
                self._end(request_id, answered=True)
            elif len(request.generated) == request.request.max_tokens:
                reason = FinishReason.LENGTH
                self._remove(request_id)
            events.append(new_event(TokenEvent, (request_id, tokens, reason, None, (), 0, "", ())))
        self._output_tokens += output_tokens
        if logprobs := launched.step.logprobs:
            events[first:] = [
                event._replace(logprobs=(logprobs[event.request_id],)) if event.request_id in logprobs else event
                for event in events[first:]
            ]
        if self._prompt_logprobs:
            for request_id, part in launched.step.prompt_logprobs.items():
                if request_id in self._prompt_logprobs:
                    self._prompt_logprobs[request_id][part.first - 1 :] = part.logprobs
            events[first:] = [
                event._replace(prompt_logprobs=tuple(self._prompt_logprobs.pop(event.request_id, ())))
                for event in events[first:]
            ]
        if self._texts:
            events[first:] = map(self._with_text, events[first:])

    def _with_text(self, event: TokenEvent) -> TokenEvent:
        """The event with its text, if it carries any; the last one of its request if that holds a stop string."""
        request_id, tokens, reason = event[:3]
        stream = self._texts.get(request_id)
        if stream is None:
            return event
        text = stream.add(tokens)
        if stream.stopped is not None:
            if reason is None:
                self._end(request_id, answered=True)
            reason = FinishReason.STOP
        elif reason is not None:
            text += stream.flush()
        if reason is not None:
            del self._texts[request_id]
        return event._replace(text=text, finish_reason=reason)

    def _text(self, request: ActiveRequest) -> str:
        """Of a whole answer, up to a stop string."""
        if self.tokenizer is None:
            return ""
        stream = self._text_stream(request.request)
        return stream.add(request.generated) + stream.flush()

    def _end(self, request_id: int, *, answered: bool = False, failed: bool = False) -> None:
        """Take a request out before its limit; a no-op for the scheduler if its last token has been planned."""
        self._scheduler.end(request_id, answered=answered)
        self._remove(request_id, failed=failed)

    def _remove(self, request_id: int, *, failed: bool = False) -> None:
        request = self._active.pop(request_id)
        self._not_plain -= not request.plain
        if self._prefixes is not None:
            if failed:
                self._prefixes.discard(request_id)
            else:
                self._extend_page_keys(request)
                self._prefixes.keep(request_id)

    def _extend_page_keys(self, request: ActiveRequest) -> None:
        """Name the full pages of its tokens. With ``prompt_logprobs`` it has to compute its whole prompt."""
        if self._prefixes is not None and request.request.prompt_logprobs is None:
            page_size = self.memory_plan.page_size
            start = len(request.page_keys) * page_size
            tokens = request.tokens(start, len(request.prompt) + len(request.generated) - start)
            extend_keys(request.page_keys, tokens, page_size, request.request.cache_salt)

    @staticmethod
    def _with_cached_tokens(event: TokenEvent, cached_tokens: dict[int, int]) -> TokenEvent:
        """Every event passes here while ``cached_tokens`` holds requests that have had none yet."""
        found = cached_tokens.pop(event.request_id, 0)
        return event._replace(cached_tokens=found) if found else event
