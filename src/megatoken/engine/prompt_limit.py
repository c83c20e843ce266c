"""How many prompt tokens of heavy groups a step may hold while another group asks for little.

Such a step should take at most so many times what it would take without those tokens. What it takes is measured, not
modelled: now and then a step gets no such tokens, and its time is the measure of the others. If a step took too long,
the next ones get fewer tokens, otherwise slowly more. So the limit follows any machine, also one that others use.

Pure arithmetic: no torch, no clock.
"""

from __future__ import annotations

from collections import deque
from statistics import median

PROBE_STEPS = 16  # one step in so many gets no more heavy tokens than it must
PROBES = 8  # of which the median counts: one that waited for another process means nothing
FEWER, MORE = 0.9, 1.03  # balanced where one step in five takes too long: time is noisy
LEAST_TOKENS = 4


class PromptLimit:
    """Learns the limit while steps run."""

    def __init__(self, slowdown: float | None, max_batched_tokens: int) -> None:
        """Starts low. ``slowdown``: how many times as long a step may take; None: no limit."""
        self._slowdown = slowdown
        self._most = max_batched_tokens
        self._tokens = float(LEAST_TOKENS)
        self._probes: deque[float] = deque(maxlen=PROBES)
        self._steps = 0

    def next(self) -> int | None:
        """Most heavy prompt tokens of the next step, at least one, so that every prompt is computed in the end."""
        if self._slowdown is None:
            return None
        self._steps += 1
        return 1 if self._steps % PROBE_STEPS == 0 else int(self._tokens)

    def note(self, heavy_tokens: int | None, seconds: float) -> None:
        """Learn from a step with so many heavy tokens; None: it was not limited, or other groups had prompts too."""
        if self._slowdown is None or heavy_tokens is None:
            return
        if heavy_tokens < LEAST_TOKENS:
            self._probes.append(seconds)
        elif self._probes and seconds > self._slowdown * median(self._probes):
            self._tokens = max(LEAST_TOKENS, self._tokens * FEWER)
        elif self._probes and heavy_tokens >= self._tokens / 2:
            self._tokens = min(self._most, self._tokens * MORE)
