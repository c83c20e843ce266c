"""An engine without a GPU: the real scheduler and pages, steps that take as long as a cost model says, made-up tokens.

It has the face of ``loop.Engine``, runs ahead by one step as that does, and plans the same steps for the same requests.
Only time and tokens are made up. Needs no PyTorch.
"""

from __future__ import annotations

import hashlib
import random
import time
from array import array
from collections import deque
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatoken.engine.config import EngineConfig, ModelConfig, find_shape
from megatoken.engine.cost_model import CostModel
from megatoken.engine.gpus import Gpu, find_gpu
from megatoken.engine.memory import MemoryPlan, plan_memory_of
from megatoken.engine.request import FinishReason, Request, TokenEvent, check_request, token_ids
from megatoken.engine.scheduler import StepPlan
from megatoken.engine.schemes import scheme_of
from megatoken.engine.state import ReplicaState
from megatoken.engine.step_time import StepTime, plan_within
from megatoken.errors import RequestError

CONTEXT_BYTES = 150_754_820_096 - 149_557_477_376
"""Of a GPU's memory, that is gone when a process has opened it: an H200's, and what the engine found there."""
ANSWER_SHAPE, ANSWER_SCALE = 2.565, 114.99 / 1024
"""Natural ends come after a length drawn from this gamma distribution, times the request's limit: what was fitted to
the answers of MLPerf's llama2-70b reference, whose limit is 1,024 tokens."""


MOST_CATCHING_UP_SECONDS = 1.0
"""A machine that simulates many engines is late at times. The engines are not: what is begun late began when the step
before it ended, unless that is longer ago."""


class Clock(Protocol):
    """The time that steps take."""

    def now(self) -> float:
        """Seconds since some moment."""

    def wait_until(self, seconds: float) -> None:
        """Returns when it is at least so late."""


class WallClock:
    """Real time. Waits for moments, not for durations, so that lateness does not add up."""

    def now(self) -> float:
        """``time.monotonic()``."""
        return time.monotonic()

    def wait_until(self, seconds: float) -> None:
        """Sleeps."""
        left = seconds - time.monotonic()
        if left > 0:
            time.sleep(left)


class VirtualClock:
    """Time that passes only when somebody waits for it."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    def now(self) -> float:
        """What has passed."""
        return self._seconds

    def wait_until(self, seconds: float) -> None:
        """Makes it that late, unless it is later."""
        self._seconds = max(self._seconds, seconds)


class Simulation(NamedTuple):
    """What a simulated engine is made of."""

    model: ModelConfig
    memory: MemoryPlan
    costs: CostModel
    gpu: Gpu


def plan_simulation(
    model: ModelConfig | str, config: EngineConfig, gpu: str, *, seconds_per_sequence: float = 0.0
) -> Simulation:
    """Sizes and prices of a model on a GPU, by the same plan as on a real one.

    Args:
        model: its shape, or the name of one (``megatoken.engine.config.SHAPES``).
        config: what is wanted of the engine; ``tensor_parallel`` GPUs serve as one.
        gpu: a name in ``gpu_specs.csv``.
        seconds_per_sequence: see ``CostModel``.

    Raises:
        CheckpointError: no such shape.
        ConfigError: no such GPU, or it does not know the precision.
        CapacityError: the model does not fit, with the numbers.
    """
    if isinstance(model, str):
        model = find_shape(model)
    kind = find_gpu(gpu)
    ranks = config.tensor_parallel
    costs = CostModel(
        model,
        scheme_of(config),
        kind,
        ranks=ranks,
        seconds_per_sequence=seconds_per_sequence,
        cuda_graphs=config.cuda_graphs,
    )
    memory = plan_memory_of(model, config, "cuda", kind.memory_bytes - CONTEXT_BYTES)
    return Simulation(model, memory, costs, kind)


class _Active:
    """A request between submission and its last token."""

    __slots__ = ("_answer", "_key", "answer_tokens", "prompt_tokens", "stop_ids", "stops", "told", "vocabulary_size")

    def __init__(self, prompt: list[int], request: Request, model: ModelConfig) -> None:
        stop_ids = set(request.stop_token_ids)
        if not request.ignore_end_token:
            stop_ids |= set(model.end_token_ids)
        self.stop_ids = sorted(one for one in stop_ids if 0 <= one < model.vocabulary_size)
        self.vocabulary_size = model.vocabulary_size
        self._key = _key(prompt, request)
        self.prompt_tokens = len(prompt)
        self.answer_tokens, self.stops = request.max_tokens, False
        if self.stop_ids and not request.ignore_end_token:
            drawn = random.Random(self._key).gammavariate(ANSWER_SHAPE, ANSWER_SCALE * request.max_tokens)
            length = max(1, round(drawn))
            if length < request.max_tokens:
                self.answer_tokens, self.stops = length, True
        self.told = 0
        self._answer: tuple[int, ...] | None = None

    @property
    def answer(self) -> tuple[int, ...]:
        """All its tokens."""
        if self._answer is None:
            answer = _made_up(self._key, self.answer_tokens, self.vocabulary_size, self.stop_ids)
            self._answer = (*answer[:-1], self.stop_ids[0]) if self.stops else answer
        return self._answer


def _key(prompt: list[int], request: Request) -> int:
    """64 bits of what an answer depends on: the prompt and, where tokens are drawn, a seed that was given."""
    digest = hashlib.blake2b(array("q", prompt).tobytes(), digest_size=8)
    if request.sampling.temperature > 0 and request.sampling.seed is not None:
        digest.update(str(request.sampling.seed).encode())
    return int.from_bytes(digest.digest(), "little")


def _made_up(key: int, count: int, vocabulary_size: int, stop_ids: list[int]) -> tuple[int, ...]:
    """``count`` ids, each a function of ``key`` and its position (splitmix64), none of them in ``stop_ids``."""
    ordinary = vocabulary_size - len(stop_ids)
    if ordinary < 1:
        return (stop_ids[0],) * count
    state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    ids = ((state ^ (state >> np.uint64(31))) % np.uint64(ordinary)).astype(np.int64)
    for stop_id in stop_ids:  # ascending: each makes room for itself
        ids += ids >= stop_id
    return tuple(ids.tolist())


class _Launched(NamedTuple):
    """A step on its way: what there will be to tell, when it ends, and what it costs."""

    tickets: NDArray[np.int64]
    known: NDArray[np.int32]  # tokens of each with the row that yields the next one
    decodes: int
    rows: int
    cached_tokens: int
    seconds: float
    end: float


class SimulatedEngine:
    """A model on a GPU that is not here.

    The same request gets the same answer from every simulated engine of that model. It takes its limit, or, where the
    model's end token counts, ends before at a length drawn from the prompt.

    Args:
        model: its shape, or the name of one.
        config: as of an engine on a GPU; ``device`` and ``threads`` say nothing here, and precision may be fp4.
        gpu: a name in ``gpu_specs.csv``.
        clock: ``WallClock()``, the default: a step returns when it would have ended, or as soon as this machine can.
            ``VirtualClock()``: at once.
        stream: tell every token after its step. Otherwise of a request its first token, and all others with the last:
            two events instead of one a token, for who drives many engines at once.
        seconds_per_sequence: see ``CostModel``.

    Raises:
        As ``plan_simulation``.
    """

    def __init__(
        self,
        model: ModelConfig | str,
        config: EngineConfig | None = None,
        gpu: str = "H200",
        clock: Clock | None = None,
        *,
        stream: bool = True,
        seconds_per_sequence: float = 0.0,
    ) -> None:
        self.config = config or EngineConfig(precision="fp8")
        simulation = plan_simulation(model, self.config, gpu, seconds_per_sequence=seconds_per_sequence)
        self.model_config, self.memory_plan, self._costs, self._gpu = simulation
        self.content_hash = hashlib.sha256(f"simulated {self.model_config}".encode()).hexdigest()
        self.tokenizer = None
        self.gpu_uuids: list[str] = []
        self._clock: Clock = clock or WallClock()
        self._stream = stream
        self._scheduler = self.memory_plan.scheduler()
        self._last_row = np.zeros(self.memory_plan.max_sequences, dtype=np.int32)  # by slot: yields the last token
        self._step_time = None
        if self.config.target_step_seconds is not None:
            self._step_time = StepTime(self.config.target_step_seconds, self.memory_plan.max_batched_tokens)
        self._lookahead = 0 if self.config.overlap is False else 1
        self._active: dict[int, _Active] = {}
        self._launched: deque[_Launched] = deque()
        self._held: list[TokenEvent] = []
        self._free_at = self._clock.now()  # when the last launched step has ended
        self._idle = True  # since then nobody wanted anything
        self._next_ticket = 0
        self._batched_tokens = self._steps = 0
        self._computed_seconds = 0.0
        self._processed_tokens = self._output_tokens = self._decoded_tokens = self._context_tokens = 0

    def submit(self, request: Request) -> int:
        """Queue a request of token ids; its ticket names it in every ``TokenEvent``.

        Raises:
            RequestError: as ``Engine.submit``; text too, since there is no tokenizer.
            CapacityError: it can never fit context or cache.
        """
        if not isinstance(request, Request):
            raise RequestError("expected a Request; write Request(prompt, max_tokens)")
        prompt = self.encode(request.prompt) if isinstance(request.prompt, str) else token_ids(request.prompt)
        check_request(prompt, request, self.model_config.vocabulary_size)
        ticket = self._next_ticket
        self._scheduler.add(ticket, len(prompt), request.max_tokens)
        self._idle |= not self._active
        self._next_ticket += 1
        self._active[ticket] = _Active(prompt, request, self.model_config)
        return ticket

    def encode(self, text: str) -> list[int]:
        """There is no tokenizer. Raises RequestError."""
        raise RequestError(f"{self.model_config.name} is simulated and has no tokenizer, so prompts must be token ids")

    @property
    def busy(self) -> bool:
        """Whether ``step`` still has something to do or to tell."""
        return bool(self._active or self._launched or self._held)

    def step(self) -> list[TokenEvent]:
        """Plan and launch one step, wait for the end of the oldest that is due, tell what it brought."""
        began = self._clock.now()
        events, self._held = self._held, []
        on_the_way = [(step.rows, step.cached_tokens) for step in self._launched if step.decodes]
        plan = plan_within(self._step_time, self._scheduler, on_the_way)
        if plan is not None:
            self._launch(plan)
        if self._launched and (plan is None or len(self._launched) > self._lookahead):
            events += self._collect(self._launched.popleft())
        self._computed_seconds += self._clock.now() - began
        return events

    def cancel(self, ticket: int) -> None:
        """End a request now; its pages are free at once and ``step`` reports it as cancelled. Unknown tickets pass."""
        if self._active.pop(ticket, None) is not None:
            self._scheduler.end(ticket, answered=False)
            self._held.append(TokenEvent(ticket, (), FinishReason.CANCELLED))

    def describe(self) -> dict[str, Any]:
        """What this engine pretends to run on and with, ready for JSON."""
        return {
            "device": f"simulated {self._gpu.name}",
            "simulated_gpu": self._gpu.name,
            "kernels": f"none: a cost model; products: {self._costs.basis}",
            "why_no_kernels": None,
            "bf16_widened": False,
            "threads": 0,
            "tensor_parallel": self.config.tensor_parallel,
            "steps_in_flight": 1 + self._lookahead,
            "target_step_seconds": self.config.target_step_seconds,
            "fp8_scales": scheme_of(self.config).fp8_scales,
            "measured_input_scales": 0,
            "why_no_gpu": None,
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

    def _launch(self, plan: StepPlan) -> None:
        seconds = self._costs.step(plan).seconds
        earliest = self._clock.now() - (0.0 if self._idle else MOST_CATCHING_UP_SECONDS)
        self._free_at, self._idle = max(self._free_at, earliest) + seconds, False
        known = plan.start + plan.count
        rows = plan.decodes + int(plan.count[plan.decodes :].sum())
        self._batched_tokens = rows
        self._processed_tokens += rows
        self._decoded_tokens += plan.decodes
        self._context_tokens += int(plan.start[: plan.decodes].sum())
        self._steps += 1
        for slot, ticket in zip(plan.slot[plan.decodes :].tolist(), plan.ticket[plan.decodes :].tolist(), strict=True):
            active = self._active[ticket]
            self._last_row[slot] = active.prompt_tokens + active.answer_tokens - 1
        tells = plan.sample
        if not self._stream:
            tells = known == self._last_row.take(plan.slot)
            tells[plan.decodes :] = plan.sample[plan.decodes :]
        cached_tokens = int(known.sum()) if self._step_time is not None else 0
        self._launched.append(
            _Launched(plan.ticket[tells], known[tells], plan.decodes, rows, cached_tokens, seconds, self._free_at)
        )

    def _collect(self, launched: _Launched) -> list[TokenEvent]:
        self._clock.wait_until(launched.end)
        if self._step_time is not None:
            decodes = launched.decodes > 0
            self._step_time.note(launched.rows, launched.cached_tokens, launched.seconds, decodes=decodes)
        events = []
        for ticket, known in zip(launched.tickets.tolist(), launched.known.tolist(), strict=True):
            active = self._active.get(ticket)
            if active is None:  # it stopped or was cancelled while this step was on its way
                continue
            told, active.told = active.told, known - active.prompt_tokens + 1
            reason = None
            if active.told == active.answer_tokens:
                reason = FinishReason.STOP if active.stops else FinishReason.LENGTH
                del self._active[ticket]
                if active.stops:
                    self._scheduler.end(ticket, answered=True)
            events.append(TokenEvent(ticket, active.answer[told : active.told], reason))
            self._output_tokens += active.told - told
        return events
