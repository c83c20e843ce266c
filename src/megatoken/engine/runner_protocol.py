"""What an engine needs of the part that computes its steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatoken.engine.active_request import ActiveRequest
from megatoken.engine.config import ModelConfig
from megatoken.engine.memory import MemoryPlan
from megatoken.engine.request import TokenLogprobs
from megatoken.engine.step_plan import StepPlan
from megatoken.errors import MegatokenError

if TYPE_CHECKING:
    from megatoken.engine.tokenizer import Tokenizer


class PromptPart(NamedTuple):
    """Logprobs of consecutive tokens of a prompt, the first of them at position ``first``, 1 or later."""

    first: int
    logprobs: tuple[TokenLogprobs, ...]


class RecordedSteps(NamedTuple):
    """Steps that a runner recorded as CUDA graphs when it was opened."""

    steps: int
    seconds: float
    memory_bytes: int


class LaunchedStep(Protocol):
    """A step on its way."""

    @property
    def seconds(self) -> float:
        """How long it took on its own, once ``wait`` has returned."""

    @property
    def errors(self) -> Mapping[int, MegatokenError]:
        """By id of the request, why it got no token, once ``wait`` has returned."""

    @property
    def logprobs(self) -> Mapping[int, TokenLogprobs]:
        """By id of the request, those of its token, once ``wait`` has returned; of requests that asked for them."""

    @property
    def prompt_logprobs(self) -> Mapping[int, PromptPart]:
        """By id of the request, those of its prompt's tokens that the step computed, once ``wait`` has returned."""

    def choose(self) -> None:
        """Choose its tokens, if that had to wait for those of the step before; called once they are known."""

    def wait(self) -> Iterable[tuple[int, tuple[int, ...]]]:
        """Wait for the step to end: ids of requests, and the tokens to report of each."""


class Runner(Protocol):
    """What computes, or pretends to compute, the steps that an engine plans."""

    model_config: ModelConfig
    memory_plan: MemoryPlan
    content_hash: str  # of the weights
    tokenizer: Tokenizer | None
    gpu_uuids: list[str]  # of the GPUs of all ranks, as their driver names them
    overlaps: bool  # whether it runs a step while the host collects the one before
    unsupported: frozenset[str]  # options of requests, by the names of ``used_options``, that it does not have
    recorded: RecordedSteps | None  # what it recorded when it was opened; None if it had no time for that

    def launch(
        self,
        plan: StepPlan,  # what to run
        page_table: NDArray[np.int32],  # the scheduler's, with the plan's new pages
        requests: Mapping[int, ActiveRequest],  # by id; all of the plan's are among them
        *,
        plain: bool,  # whether all requests are, see ``ActiveRequest``
        after_idle: bool,  # whether there was no request at some moment since the step before
    ) -> LaunchedStep:
        """Start a step."""

    def now(self) -> float:
        """Seconds on the clock by which steps are timed."""

    def describe(self) -> dict[str, Any]:
        """What it runs on and with, ready for JSON."""

    def close(self) -> None:
        """Ends the processes of other ranks."""
