"""How much a step may hold so that it takes no longer than a target: learned from the steps that were measured.

A step reads the weights once, computes tokens, and reads the cached keys and values of every sequence in it. So it
takes close to a + b x tokens + c x cached tokens, at prices that differ by machine, model and precision. They are
fitted to the measured steps, recent ones counting more. What the decodes of the next step leave of the target goes to
prompts, and no more sequences are admitted than can decode together within the target.

A user's time per token is a mean over an answer, so time that steps stay below the target is saved for later ones: a
prompt is read at once instead of in small chunks while others arrive behind it. Any n tokens come within
n + ``MOST_SAVED`` targets, as far as steps take what they are expected to and prompts more than the least share.

Pure arithmetic: no torch, no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from megatoken.engine.prompt_limit import PromptLimit
from megatoken.engine.scheduler import Scheduler
from megatoken.engine.step_plan import StepPlan

MEMORY_STEPS = 256.0  # a step counts 1/e of a new one after as many others
FEWEST_STEPS = 8
LONGEST_SECONDS = 3600.0  # no step takes this long
OUTLIER = 3.0  # times the expected: the most that a step counts which waited for a compiler or another process
PRIOR_WEIGHT = 1e-3  # of the assumption that a price is zero, in typical steps: keeps unvaried prices finite
MOST_SAVED = 10  # targets: an answer of 100 tokens has a tenth more time for each than the target
LEAST_PROMPT_SHARE = 1 / 16  # of the token budget: the oldest prompt moves on however full the step is


class StepTime:
    """Learns what steps cost and says what the next one may hold."""

    def __init__(self, target_seconds: float, max_batched_tokens: int) -> None:
        """Starts without measurements: the first steps get the least share of tokens for prompts, and any sequences.

        Raises:
            ValueError: a size that is not positive.
        """
        if not target_seconds > 0 or max_batched_tokens < 1:
            raise ValueError(
                f"target_seconds {target_seconds} and max_batched_tokens {max_batched_tokens} must be positive"
            )
        self.target_seconds = target_seconds  # that steps should take at most, on average over dozens of them
        self.max_batched_tokens = max_batched_tokens  # token budget of a step, whatever the tokens cost
        self._least_prompt_tokens = max(1, round(LEAST_PROMPT_SHARE * max_batched_tokens))
        self._moments = np.zeros((3, 3))  # of (1, tokens, cached tokens), recent steps counting more
        self._products = np.zeros(3)  # of the same with seconds
        self._steps = 0.0
        self._prices: NDArray[np.float64] | None = None
        # what the measured steps with decodes saved of their targets; below zero what later steps have to make up for
        self.saved_seconds = 0.0

    def note(self, tokens: int, cached_tokens: int, seconds: float, *, decodes: bool) -> None:
        """Add the time of a step that ran; one without tokens or of an implausible time is ignored.

        Args:
            tokens: tokens computed.
            cached_tokens: keys that its sequences saw, summed.
            seconds: how long it took, from the end of the step before it.
            decodes: whether it had any; one of prompts alone saves and owes nothing.
        """
        if tokens < 1 or not 0 < seconds < LONGEST_SECONDS:
            return
        if decodes:
            most = MOST_SAVED * self.target_seconds
            self.saved_seconds = min(max(self.saved_seconds + self.target_seconds - seconds, -most), most)
        expected = self.expected_seconds(tokens, cached_tokens)
        if expected is not None and expected > 0:
            seconds = min(seconds, OUTLIER * expected)  # if all steps are slower, the prices still follow
        step = np.array([1.0, tokens, cached_tokens])
        kept = math.exp(-1 / MEMORY_STEPS)
        self._moments = kept * self._moments + np.outer(step, step)
        self._products = kept * self._products + step * seconds
        self._steps = kept * self._steps + 1
        if self._steps >= FEWEST_STEPS * kept**FEWEST_STEPS:
            self._prices = self._fit()

    def expected_seconds(self, tokens: int, cached_tokens: int) -> float | None:
        """What a step will take; None before enough were measured."""
        return None if self._prices is None else float(self._prices @ (1.0, tokens, cached_tokens))

    def spent_seconds(self, on_the_way: Iterable[tuple[int, int]]) -> float:
        """What steps in flight will take beyond their targets.

        ``on_the_way``: tokens and cached tokens of each step with decodes that has no measured time yet.
        """
        expected = [self.expected_seconds(*step) or 0.0 for step in on_the_way]
        return sum([max(seconds - self.target_seconds, 0.0) for seconds in expected])

    def prompt_tokens(self, decodes: int, cached_tokens: int, spent_seconds: float = 0.0) -> int:
        """Tokens that the next step has for prompts next to ``decodes``, which see ``cached_tokens`` keys together.

        ``spent_seconds``: how much of the saved time steps in flight have used up.

        A step without decodes delays no answer and gets the whole budget. Prompts always get the least share, or what
        the decodes leave if that is less, so that the oldest in the queue is served in the end.
        """
        room = max(0, self.max_batched_tokens - decodes)
        if not decodes:
            return room
        if self._prices is None:
            return min(room, self._least_prompt_tokens)
        left = self.target_seconds + max(self.saved_seconds - spent_seconds, 0.0)
        left -= float(self._prices @ (1.0, decodes, cached_tokens))
        price = float(self._prices[1])
        affordable = room if left >= price * room else math.floor(max(left, 0.0) / max(price, 1e-12))
        return min(room, max(affordable, self._least_prompt_tokens))

    def most_sequences(self, decodes: int, cached_tokens: int) -> int | None:
        """How many sequences can decode in one step within the target, each seeing as many keys as these do on average.

        None: no limit is known, or even one alone takes longer, so that waiting would gain nothing.
        """
        if self._prices is None or not decodes:
            return None
        alone, token, cached = (float(price) for price in self._prices)
        each = token + cached * cached_tokens / decodes
        if alone + each > self.target_seconds:
            return None
        return (
            self.max_batched_tokens
            if each <= 0
            else min(self.max_batched_tokens, math.floor((self.target_seconds - alone) / each))
        )

    def _fit(self) -> NDArray[np.float64]:
        """Prices by least squares, none below zero: while one would be, the lowest is left out."""
        scale = np.sqrt(np.maximum(np.diag(self._moments) / self._steps, 1e-30))
        moments = self._moments / np.outer(scale, scale) + PRIOR_WEIGHT * np.eye(3)
        products = self._products / scale
        kept = [0, 1, 2]
        prices = np.zeros(3)
        while kept:
            solved = np.linalg.solve(moments[np.ix_(kept, kept)], products[kept])
            if solved.min() >= 0:
                prices[kept] = solved / scale[kept]
                break
            del kept[int(np.argmin(solved))]
        return prices


def plan_within(
    step_time: StepTime | None,
    limit: PromptLimit,
    scheduler: Scheduler,
    on_the_way: Iterable[tuple[int, int]] = (),
) -> StepPlan | None:
    """The next step, no larger than ``step_time`` and ``limit`` allow; None if no request is waiting or running.

    ``on_the_way``: as for ``StepTime.spent_seconds``.
    """
    heavy_tokens, rest = None, False
    if scheduler.several_groups:
        heavy_tokens, rest = limit.next(), limit.rest(scheduler.heavy_part, others_wait=scheduler.others_wait)
    if step_time is None:
        return scheduler.plan(heavy_prompt_tokens=heavy_tokens, rest=rest)
    decodes, cached = scheduler.decodes, scheduler.cached_tokens
    prompt_tokens = step_time.prompt_tokens(decodes, cached, step_time.spent_seconds(on_the_way))
    return scheduler.plan(prompt_tokens, step_time.most_sequences(decodes, cached), heavy_tokens, rest=rest)
