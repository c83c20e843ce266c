"""How much a step may hold so that it takes no longer than a target: learnt from the steps that were measured.

A step reads the weights once, computes rows, and reads the cached keys and values of every sequence in it. So it takes
close to a + b x rows + c x cached tokens, at prices that differ by machine, model and precision. They are fitted to the
steps seen, younger ones counting more. What the decodes of the next step leave of the target goes to prompts, and no
more sequences are taken in than can decode together within the target.

A user's time per token is a mean over an answer, so what steps stay below the target is saved for later ones: a prompt
is read at once, not by and by while others arrive behind it. Any n tokens come within n + ``MOST_SAVED`` targets, as
far as steps take what they are expected to and prompts more than the least share.

Pure arithmetic: no torch, no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from megatoken.engine.scheduler import Scheduler, StepPlan

MEMORY_STEPS = 256.0  # a step counts 1/e of a new one after as many others
FEWEST_STEPS = 8
LONGEST_SECONDS = 3600.0  # no step takes this long
OUTLIER = 3.0  # times the expected: most that a step which waited for a compiler or a neighbour counts
PRIOR_WEIGHT = (
    1e-3  # of the assumption that a price is zero, in typical steps: keeps prices of what never varied finite
)
MOST_SAVED = 10  # targets: an answer of 100 tokens has a tenth more time for each than the target
LEAST_PROMPT_SHARE = 1 / 16  # of all rows: the oldest prompt moves on however full the step is


class StepTime:
    """Learns what steps cost and says what the next one may hold.

    Attributes:
        target_seconds: that steps should take at most, on average over dozens of them.
        max_batched_tokens: rows that a step may have at most, whatever they cost.
        saved_seconds: by the steps seen that somebody's next token waited for, of their targets; below zero what later
            ones have to make up for.
    """

    def __init__(self, target_seconds: float, max_batched_tokens: int) -> None:
        """Starts without knowledge: the first steps get the least share of rows for prompts, and any sequences.

        Raises:
            ValueError: a size that is not positive.
        """
        if not target_seconds > 0 or max_batched_tokens < 1:
            raise ValueError(
                f"target_seconds {target_seconds} and max_batched_tokens {max_batched_tokens} must be positive"
            )
        self.target_seconds = target_seconds
        self.max_batched_tokens = max_batched_tokens
        self._least_prompt_rows = max(1, round(LEAST_PROMPT_SHARE * max_batched_tokens))
        self._moments = np.zeros((3, 3))  # of (1, rows, cached tokens), younger steps counting more
        self._products = np.zeros(3)  # of the same with seconds
        self._steps = 0.0
        self._prices: NDArray[np.float64] | None = None
        self.saved_seconds = 0.0

    def note(self, rows: int, cached_tokens: int, seconds: float, *, decodes: bool) -> None:
        """Takes the time of a step that ran; one without rows or of no plausible time is ignored.

        Args:
            rows: tokens computed.
            cached_tokens: keys that its sequences saw, summed.
            seconds: that it took, from when the one before it had ended.
            decodes: whether it had any; one of prompts alone saves and owes nothing.
        """
        if rows < 1 or not 0 < seconds < LONGEST_SECONDS:
            return
        if decodes:
            most = MOST_SAVED * self.target_seconds
            self.saved_seconds = min(max(self.saved_seconds + self.target_seconds - seconds, -most), most)
        expected = self.expected_seconds(rows, cached_tokens)
        if expected is not None and expected > 0:
            seconds = min(seconds, OUTLIER * expected)  # if all steps are slower, the prices still follow
        step = np.array([1.0, rows, cached_tokens])
        kept = math.exp(-1 / MEMORY_STEPS)
        self._moments = kept * self._moments + np.outer(step, step)
        self._products = kept * self._products + step * seconds
        self._steps = kept * self._steps + 1
        if self._steps >= FEWEST_STEPS * kept**FEWEST_STEPS:
            self._prices = self._fit()

    def expected_seconds(self, rows: int, cached_tokens: int) -> float | None:
        """What a step will take; None before enough were seen."""
        return None if self._prices is None else float(self._prices @ (1.0, rows, cached_tokens))

    def spent_seconds(self, on_the_way: Iterable[tuple[int, int]]) -> float:
        """What steps with decodes that are planned, but not noted yet, will take beyond their targets.

        ``on_the_way``: rows and cached tokens of each.
        """
        expected = [self.expected_seconds(*step) or 0.0 for step in on_the_way]
        return sum([max(seconds - self.target_seconds, 0.0) for seconds in expected])

    def prompt_rows(self, decodes: int, cached_tokens: int, spent_seconds: float = 0.0) -> int:
        """Rows that the next step has for prompts beside ``decodes``, which see ``cached_tokens`` keys together.

        ``spent_seconds`` of what was saved are not there any more.

        A step without decodes delays nobody and gets all rows. Prompts always get the least share, or all rows that the
        decodes leave if those are fewer, so that the oldest in the queue is served in the end.
        """
        room = max(0, self.max_batched_tokens - decodes)
        if not decodes:
            return room
        if self._prices is None:
            return min(room, self._least_prompt_rows)
        left = self.target_seconds + max(self.saved_seconds - spent_seconds, 0.0)
        left -= float(self._prices @ (1.0, decodes, cached_tokens))
        price = float(self._prices[1])
        affordable = room if left >= price * room else math.floor(max(left, 0.0) / max(price, 1e-12))
        return min(room, max(affordable, self._least_prompt_rows))

    def most_sequences(self, decodes: int, cached_tokens: int) -> int | None:
        """How many sequences can decode in one step within the target, each seeing as many keys as these do on average.

        None: no limit is known, or even one alone takes longer, so that nothing would be gained by waiting.
        """
        if self._prices is None or not decodes:
            return None
        alone, row, cached = (float(price) for price in self._prices)
        each = row + cached * cached_tokens / decodes
        if alone + each > self.target_seconds:
            return None
        return (
            self.max_batched_tokens
            if each <= 0
            else min(self.max_batched_tokens, math.floor((self.target_seconds - alone) / each))
        )

    def _fit(self) -> NDArray[np.float64]:
        """Prices by least squares, none below zero: the lowest that would be is left out, the others fitted again."""
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
    step_time: StepTime | None, scheduler: Scheduler, on_the_way: Iterable[tuple[int, int]] = ()
) -> StepPlan | None:
    """The next step, no larger than ``step_time`` lets it be; None if there is nothing to do.

    ``on_the_way``: rows and cached tokens of steps with decodes that were planned, but not noted yet.
    """
    if step_time is None:
        return scheduler.plan()
    decodes, cached = scheduler.decodes, scheduler.cached_tokens
    prompt_rows = step_time.prompt_rows(decodes, cached, step_time.spent_seconds(on_the_way))
    return scheduler.plan(prompt_rows, step_time.most_sequences(decodes, cached))
