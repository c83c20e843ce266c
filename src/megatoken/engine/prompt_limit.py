"""What heavy groups get of a step while another group asks for little.

A step with prompt tokens of heavy groups should take at most so many times what it would take without those tokens.
What it takes is measured, not modelled: now and then a step gets no such tokens, and its time is the measure of the
others. If a step took too long, the next ones get fewer tokens, otherwise slowly more. So the limit follows any
machine, also one that others use.

Answers of heavy groups make steps longer too, by an amount that no limit of their prompts undercuts. So these groups
rest, they get nothing of a step, while another one has a request that runs and they had enough of the time lately:
their part by weight, or, in a step with a prompt of another group, the part by which the others may be slowed down.
Steps with prompts are the longest. What heavy groups had is all of a step without the others, and of a step with both
what it takes longer than those of the others alone.

Pure arithmetic: no torch, no clock.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from megatoken.engine.step_plan import StepGroups, StepPlan

PROBE_STEPS = 16  # one step in so many gets no more heavy tokens than it must
PROBES = 8  # of which the median counts: one that waited for another process means nothing
FEWER, MORE = 0.9, 1.03  # balanced where one step in five takes too long: time is noisy
LEAST_TOKENS = 4
WINDOW_SECONDS = 2.0  # of steps, in which time counts 1/e as much as new one
MOST_SHARED_STEPS = 64  # of both kinds of groups, until the others are measured alone again


class PromptLimit:
    """Learns the limit while steps run."""

    def __init__(self, slowdown: float | None, max_batched_tokens: int) -> None:
        """Starts low. ``slowdown``: how many times as long a step may take; None: no limit."""
        self._slowdown = slowdown
        self._most = max_batched_tokens
        self._tokens = float(LEAST_TOKENS)
        self._probes: deque[float] = deque(maxlen=PROBES)
        self._steps = 0
        self._others: deque[float] = deque(maxlen=PROBES)  # seconds of steps of answers of other groups alone
        self._heavy_share = math.inf  # seconds that heavy groups took of the last step of theirs and such answers
        self._shared_steps = 0  # since the last of these
        self._seconds = self._heavy_seconds = 0.0  # of recent steps, and what heavy groups had of them

    def next(self) -> int | None:
        """Most heavy prompt tokens of the next step, at least one, so that every prompt is computed in the end."""
        if self._slowdown is None:
            return None
        self._steps += 1
        return 1 if self._steps % PROBE_STEPS == 0 else int(self._tokens)

    def rest(self, heavy_part: float, *, others_wait: bool) -> bool:
        """Whether heavy groups rest in the next step, if others have a request that runs.

        Args:
            heavy_part: of the time, that they have a right to.
            others_wait: the step has a prompt of another group, so it is long without them.
        """
        if self._slowdown is None:
            return False
        if others_wait:
            heavy_part = min(heavy_part, 1 - 1 / self._slowdown)
        return self._shared_steps >= MOST_SHARED_STEPS or self._heavy_seconds >= heavy_part * self._seconds

    def note(self, plan: StepPlan, seconds: float) -> None:
        """Learn from a step that ran."""
        if self._slowdown is None:
            return
        answers_alone = plan.decodes == len(plan.count) or plan.heavy_tokens is not None  # of the other groups
        heavy_seconds = seconds
        if plan.groups is StepGroups.OTHERS:
            heavy_seconds = 0.0
            if answers_alone:
                self._others.append(seconds)
                self._shared_steps = 0
        elif plan.groups is StepGroups.BOTH:
            self._shared_steps += 1
            if answers_alone and self._others:
                self._heavy_share = max(0.0, seconds - median(self._others))
            heavy_seconds = min(seconds, self._heavy_share)
        kept = math.exp(-seconds / WINDOW_SECONDS)
        self._seconds = self._seconds * kept + seconds
        self._heavy_seconds = self._heavy_seconds * kept + heavy_seconds
        if plan.heavy_tokens is not None and plan.groups is not StepGroups.OTHERS:
            self._note_prompts(plan.heavy_tokens, seconds, self._slowdown)

    def _note_prompts(self, heavy_tokens: int, seconds: float, slowdown: float) -> None:
        """Learn from a step of heavy groups with so many prompt tokens."""
        if heavy_tokens < LEAST_TOKENS:
            self._probes.append(seconds)
        elif self._probes and seconds > slowdown * median(self._probes):
            self._tokens = max(LEAST_TOKENS, self._tokens * FEWER)
        elif self._probes and heavy_tokens >= self._tokens / 2:
            self._tokens = min(self._most, self._tokens * MORE)
