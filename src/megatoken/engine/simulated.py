"""The runner without a GPU: steps take as long as a cost model says, tokens are made up. Needs no PyTorch.

Plans, pages and events are the engine's own, so a simulated engine plans the same steps for the same requests.
"""

from __future__ import annotations

import hashlib
import random
import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatoken.engine.active_request import ActiveRequest
from megatoken.engine.config import EngineConfig, ModelConfig, find_shape
from megatoken.engine.cost_model import CostModel, Costs
from megatoken.engine.gpus import Gpu, find_gpu
from megatoken.engine.memory import MemoryPlan, plan_memory_of
from megatoken.engine.request import TokenLogprobs
from megatoken.engine.runner_protocol import PromptPart, RecordedSteps
from megatoken.engine.schemes import scheme_of
from megatoken.engine.step_plan import StepPlan
from megatoken.errors import MegatokenError

if TYPE_CHECKING:
    from megatoken.engine.tokenizer import Tokenizer

CONTEXT_BYTES = 150_754_820_096 - 149_557_477_376
"""What opening a GPU takes of its memory: an H200's size, less what the engine found there."""
ANSWER_SHAPE, ANSWER_SCALE = 2.565, 114.99 / 1024
"""Natural ends come after a length drawn from this gamma distribution, times the request's limit: what was fitted to
the answers of MLPerf's llama2-70b reference, whose limit is 1,024 tokens."""


MOST_CATCHING_UP_SECONDS = 1.0
"""A machine that simulates many engines is late at times. The engines are not: a step that is launched late counts from
the end of the step before it, unless that is longer ago."""


class Clock(Protocol):
    """The time that steps take."""

    def now(self) -> float:
        """Seconds since a fixed moment."""

    def wait_until(self, seconds: float) -> None:
        """Returns at that moment, or at once if it has passed."""


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
    """Time that passes only in ``wait_until``."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    def now(self) -> float:
        """Seconds passed."""
        return self._seconds

    def wait_until(self, seconds: float) -> None:
        """Advances to that moment, unless it has passed."""
        self._seconds = max(self._seconds, seconds)


class Simulation(NamedTuple):
    """What a simulated engine is made of."""

    model: ModelConfig
    memory: MemoryPlan
    costs: Costs
    gpu: Gpu | None  # None: a processor


def plan_simulation(
    model: ModelConfig | str, config: EngineConfig, gpu: str, *, seconds_per_sequence: float = 0.0
) -> Simulation:
    """Sizes and prices of a model on a GPU, by the same memory plan as on a real one.

    ``model``: its shape, or the name of one (``megatoken.engine.config.SHAPES``). ``gpu``: a name in ``gpu_specs.csv``;
    ``tensor_parallel`` of them serve as one. ``seconds_per_sequence``: see ``CostModel``.

    Raises:
        CheckpointError: no such shape.
        ConfigError: no such GPU, or it does not support the precision.
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


class _Answer:
    """The made-up answer of a request that holds a slot."""

    __slots__ = ("ids", "length", "prompt_tokens", "request")

    def __init__(self, request: ActiveRequest, vocabulary_size: int) -> None:
        self.request = request
        self.prompt_tokens = len(request.prompt)
        self.length = limit = request.request.max_tokens
        stop_ids = sorted(one for one in request.stop_ids if 0 <= one < vocabulary_size)
        stops, key = False, _key(request)
        if stop_ids and not request.request.ignore_end_token:
            drawn = random.Random(key).gammavariate(ANSWER_SHAPE, ANSWER_SCALE * limit)
            self.length = min(limit, max(1, round(drawn)))
            stops = self.length < limit
        self.ids = _made_up(key, self.length, vocabulary_size, stop_ids)
        if stops:
            self.ids = (*self.ids[:-1], stop_ids[0])


def _key(request: ActiveRequest) -> int:
    """64 bits of what an answer depends on: the prompt and, where tokens are drawn, the seed if one was given."""
    digest = hashlib.blake2b(array("q", request.prompt).tobytes(), digest_size=8)
    sampling = request.request.sampling
    if sampling.temperature > 0 and sampling.seed is not None:
        digest.update(str(sampling.seed).encode())
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
    for stop_id in stop_ids:  # ascending: each shifts the ids from its own on
        ids += ids >= stop_id
    return tuple(ids.tolist())


@dataclass(slots=True)
class _Step:
    """A simulated step on its way, as ``LaunchedStep``."""

    clock: Clock
    end: float
    seconds: float
    request_ids: list[int]
    num_tokens: list[int]
    answers: list[_Answer]
    errors: ClassVar[Mapping[int, MegatokenError]] = {}
    logprobs: ClassVar[Mapping[int, TokenLogprobs]] = {}
    prompt_logprobs: ClassVar[Mapping[int, PromptPart]] = {}

    def choose(self) -> None:
        pass

    def wait(self) -> list[tuple[int, tuple[int, ...]]]:
        self.clock.wait_until(self.end)
        # The logits of the last of ``tokens`` computed ones yield the token at that place; nothing if it has ended.
        return [
            (request_id, answer.ids[len(answer.request.generated) : tokens - answer.prompt_tokens + 1])
            for request_id, tokens, answer in zip(self.request_ids, self.num_tokens, self.answers, strict=True)
        ]


class SimulatedRunner:
    """A model on a GPU that is not here, see ``Engine.simulated``.

    The same request gets the same answer from every simulated engine of a model. It takes its limit or, where the
    model's end token counts, ends before at a length drawn from the prompt.

    Args:
        model: its shape, or the name of one.
        config: of the engine.
        gpu: a name in ``gpu_specs.csv``.
        clock: ``WallClock()``, the default: a step is collected when it would have ended, or as soon as this machine
            can. ``VirtualClock()``: at once.
        stream: report every token after its step. Otherwise report the first token of a request, and all others with
            the last: two events instead of one a token, for driving many engines at once.
        seconds_per_sequence: see ``CostModel``.

    Raises:
        As ``plan_simulation``.
    """

    def __init__(
        self,
        model: ModelConfig | str,
        config: EngineConfig,
        gpu: str,
        clock: Clock | None,
        *,
        stream: bool,
        seconds_per_sequence: float,
    ) -> None:
        simulation = plan_simulation(model, config, gpu, seconds_per_sequence=seconds_per_sequence)
        self.model_config, self.memory_plan, self.costs, _ = simulation
        self._gpu_name = find_gpu(gpu).name
        self.content_hash = hashlib.sha256(f"simulated {self.model_config}".encode()).hexdigest()
        self.tokenizer: Tokenizer | None = None
        self.gpu_uuids: list[str] = []
        self.overlaps = True
        self.unsupported = frozenset({"logprobs", "prompt_logprobs", "grammar", "bad_words", "allowed_token_ids"})
        self.recorded: RecordedSteps | None = None
        self.free_at = 0.0  # when the last launched step has ended
        self._clock: Clock = clock or WallClock()
        self._stream = stream
        self._answers: dict[int, _Answer] = {}  # by slot
        self._whole_at = np.zeros(self.memory_plan.max_sequences, dtype=np.int32)  # by slot: tokens before the last

    def now(self) -> float:
        """Seconds on its clock."""
        return self._clock.now()

    def describe(self) -> dict[str, Any]:
        """What the model pretends to run on and with, ready for JSON."""
        return {
            "device": f"simulated {self._gpu_name}",
            "simulated_gpu": self._gpu_name,
            "kernels": f"none: a cost model; products: {self.costs.basis}",
            "why_no_kernels": None,
            "bf16_widened": False,
            "threads": 0,
            "measured_input_scales": 0,
            "expanded_linears": None,
            "why_no_fused_gate": None,
            "screened_head": False,
            "why_no_gpu": None,
        }

    def close(self) -> None:
        """Holds nothing."""

    def launch(
        self,
        plan: StepPlan,
        page_table: NDArray[np.int32],
        requests: Mapping[int, ActiveRequest],
        *,
        plain: bool,
        after_idle: bool,
    ) -> _Step:
        """Start one step, see ``Runner``."""
        seconds = self.costs.step(plan).seconds
        earliest = self._clock.now() - (0.0 if after_idle else MOST_CATCHING_UP_SECONDS)
        self.free_at = max(self.free_at, earliest) + seconds
        prompts = slice(plan.decodes, None)
        for slot, request_id in zip(plan.slot[prompts].tolist(), plan.request_id[prompts].tolist(), strict=True):
            answer, request = self._answers.get(slot), requests[request_id]
            if answer is None or answer.request is not request:
                self._answers[slot] = answer = _Answer(request, self.model_config.vocabulary_size)
                self._whole_at[slot] = answer.prompt_tokens + answer.length - 1
        num_tokens, reports = plan.start + plan.count, plan.sample
        if not self._stream:
            reports = num_tokens == self._whole_at.take(plan.slot)
            reports[prompts] = plan.sample[prompts]
        reported = reports.nonzero()[0]
        answers = [self._answers[slot] for slot in plan.slot.take(reported).tolist()]
        return _Step(
            self._clock,
            self.free_at,
            seconds,
            plan.request_id.take(reported).tolist(),
            num_tokens.take(reported).tolist(),
            answers,
        )
