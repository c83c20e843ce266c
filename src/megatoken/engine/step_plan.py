"""What a step computes, as the scheduler plans it and a runner runs it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray


class StepGroups(Enum):
    """Whose tokens a step computes: of groups that ask for all that they can get, of others, or of both."""

    HEAVY = auto()
    OTHERS = auto()
    BOTH = auto()


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """The complete truth about one step of R sequences and N new pages. Decodes come first, then chunks of prompts.

    Pages that a prompt found in the prefix cache are among the new ones, and its first chunk starts behind them.
    A preempted sequence comes back as a prompt of all its tokens, so the tokens that it generated come from the host
    too. It never comes back in the step after the one that preempted it, so with at most one step in flight the host
    has those tokens by then.
    """

    step: int
    slot: NDArray[np.int32]  # [R] slot of each sequence; decodes longest first, prompts of one group oldest first
    request_id: NDArray[np.int64]  # [R]
    start: NDArray[np.int32]  # [R] position of its first token in the step
    count: NDArray[np.int32]  # [R] its tokens in the step; 1 for every decode
    sample: NDArray[np.bool_]  # [R] whether its last token is computed, whose logits yield the next one
    decodes: int  # sequences [0:decodes) take their id from the token table, the others from the host
    preempted: tuple[int, ...]  # ids of the requests that this plan pushed back to the queue, newest first
    page_slot: NDArray[np.int32]  # [N] pages newly given: page_table[page_slot, page_index] = page
    page_index: NDArray[np.int32]  # [N]
    page: NDArray[np.int32]  # [N]
    groups: StepGroups = StepGroups.OTHERS
    heavy_tokens: int | None = None  # of heavy groups, which were limited, if no other group has a prompt in the step
    # page table of layers with windows, if they have pages of their own: what the step writes and sees is up to date
    window_table: NDArray[np.int32] | None = None

    def work(self) -> tuple[int, int, Iterable[tuple[int, int]], int]:
        """What its cost depends on: decodes, keys that they see, first position and length of each chunk, samples."""
        decodes, start = self.decodes, self.start
        chunks = zip(start[decodes:].tolist(), self.count[decodes:].tolist(), strict=True)
        samples = len(self.sample) - (not self.sample[-1])  # at most the newest sequence has prompt left
        return decodes, int(np.add.reduce(start[:decodes])) + decodes, chunks, samples

    @property
    def batched_tokens(self) -> int:
        """Tokens of the step."""
        return self.decodes + int(sum(self.count[self.decodes :].tolist()))
