"""Groups of requests, such as those of one API key: whose prompt a step computes next, and what each may hold.

Every group has a counter of the tokens that were computed for it, by cost, divided by its weight. Prompt tokens of a
step go to the group with the lowest counter among those that have a prompt to compute, so two groups that always have
one get tokens in the ratio of their weights (the virtual token counter of Sheng et al., "Fairness in Serving Large
Language Models", 2024). Within a group, requests begin in order of arrival. With one group, nothing is counted and its
requests simply follow each other.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatoken.engine.step_plan import StepGroups

OUTPUT_TOKEN_COST = 2.0  # of one token of an answer, in prompt tokens; the paper's value
RESERVE = 8  # one in so many sequences and pages is left to groups that hold less than that
REMEMBERED_STEPS = 2_000  # a group without requests counts for so long: its next one is probably on its way
RECENT_BUDGETS = 4.0  # token budgets: what a group was served counts 1/e after as many were served to all
MOST_BACKLOG = 0.5  # of what was served lately: a group that had a backlog all this time asks for all that it can get
TURNS = 8  # a group gets at most one in so many of the prompt tokens of a step before the counters are compared


class Waiting(NamedTuple):
    """Lengths of a request in the queue; ``num_tokens`` is above ``prompt`` if it was preempted."""

    prompt: int
    num_tokens: int
    length: int
    page_keys: Sequence[bytes]


@dataclass(slots=True, eq=False)
class Group:
    """Requests that share one part of the engine."""

    number: int  # of the group among the known ones, from 0
    weight: float  # its part, relative to those of other groups
    waiting: OrderedDict[int, Waiting] = field(default_factory=OrderedDict)  # its queue by request id, oldest first
    running: int = 0  # how many of its requests run
    held_tokens: int = 0  # what they will have at their expected ends, while there are several groups
    counter: float = 0.0  # tokens computed for it, by cost, divided by its weight
    recent: float = 0.0  # the same, as far as it is recent
    # share of recent tokens, of all groups, that were computed while it had a prompt left to compute
    backlog: float = 0.0
    heavy: bool = False  # it asks for all that it can get: it nearly always has a backlog
    light: bool = False  # others are active too, and it asks for less than its part
    last_step: int = 0  # the last step in which it had a request

    def put_back(self, request_id: int, request: Waiting) -> None:
        """Make a request the first in the queue."""
        self.waiting[request_id] = request
        self.waiting.move_to_end(request_id, last=False)


class FairShare:
    """The groups that have requests, or had some in the last ``REMEMBERED_STEPS`` steps."""

    def __init__(self, max_sequences: int, max_batched_tokens: int) -> None:
        """Starts without groups."""
        self._budget = max_batched_tokens
        self._recent_tokens = RECENT_BUDGETS * max_batched_tokens
        self._asked = 0.0  # what all groups asked for lately, by cost; of a heavy one all that a step has room for
        self.several = False  # whether there is more than one
        self.by_slot: list[Group] = [Group(0, 1.0)] * max_sequences  # the group of each running request
        self._number_by_slot = np.zeros(max_sequences, dtype=np.int64)
        self._groups: dict[str, Group] = {}
        self._level = 0.0  # the lowest counter of a group with a prompt to compute; it never falls
        self._charged = 0  # prompt tokens since the last step
        self._step = 0

    @property
    def waiting(self) -> int:
        """Requests in all queues."""
        return sum([len(group.waiting) for group in self._groups.values()])

    @property
    def heavy_part(self) -> float:
        """The part of the machine's time that heavy groups have a right to, next to those that have requests."""
        groups = [one for one in self._groups.values() if one.heavy or one.waiting or one.running]
        return sum([one.weight for one in groups if one.heavy]) / max(sum([one.weight for one in groups]), 1e-9)

    def others_wait(self, computing: Collection[Group]) -> bool:
        """Whether a group that is not heavy has a prompt to compute; ``computing``: groups with a partial prefill."""
        return any(not one.heavy and (one.waiting or one in computing) for one in self._groups.values())

    @property
    def protects(self) -> bool:
        """Whether a group asks for less than its part, so that heavy ones should hardly delay it."""
        return any(group.light for group in self._groups.values())

    # the queues

    def add(self, share: tuple[str, float], request_id: int, request: Waiting, computing: Collection[Group]) -> None:
        """Queue a request; ``share``: name and weight of its group; ``computing``: groups with a partial prefill."""
        name, weight = share
        group = self._groups.get(name)
        if group is None:
            number = next(number for number in count() if number not in {one.number for one in self._groups.values()})
            group = Group(number, weight, light=bool(self._groups), last_step=self._step)
            self._groups[name] = group
            self.several = len(self._groups) > 1
        group.weight = weight
        if not group.waiting and group not in computing:
            # What it did not use is not saved up for it.
            backlogged = [one.counter for one in self._groups.values() if one.waiting or one in computing]
            group.counter = max(group.counter, min(backlogged, default=self._level))
        group.waiting[request_id] = request

    def remove(self, request_id: int) -> bool:
        """Take a request out of its queue; False if it does not wait."""
        return any(group.waiting.pop(request_id, None) is not None for group in self._groups.values())

    # slots

    def occupy(self, slot: int, group: Group, end: int) -> None:
        """A request begins to run that is expected to have ``end`` tokens at its end."""
        self.by_slot[slot] = group
        self._number_by_slot[slot] = group.number
        group.running += 1
        group.held_tokens += end

    def vacate(self, slots: Sequence[int]) -> None:
        """Requests no longer run."""
        for slot in slots:
            self.by_slot[slot].running -= 1

    def makes_room(
        self, slots: NDArray[np.int32], request_ids: NDArray[np.int64], tokens: NDArray[np.int32], gone: list[int]
    ) -> int:
        """Which of the running requests gives its pages up: the newest of the group that holds most for its weight.

        The oldest of all never does, so it ends, and then the next one.

        Args:
            slots: ``[R]`` of the running requests.
            request_ids: ``[R]``.
            tokens: ``[R]`` that each holds.
            gone: indices of those that give theirs up already.

        Returns:
            Its index.
        """
        left = np.ones(len(slots), dtype=np.bool_)
        left[gone] = False
        number = self._number_by_slot[slots]
        held = np.bincount(number[left], weights=tokens[left], minlength=self._numbers)
        for group in self._groups.values():
            held[group.number] /= group.weight
        left[request_ids.argmin()] = False
        candidates = left.nonzero()[0]
        largest = number[candidates][held[number[candidates]].argmax()]
        own = candidates[number[candidates] == largest]
        return int(own[request_ids[own].argmax()])

    def heavy_ones(self, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        """``[R]`` whether each of the running requests is of a heavy group."""
        heavy = np.zeros(self._numbers, dtype=np.bool_)
        for group in self._groups.values():
            heavy[group.number] = group.heavy
        return heavy[self._number_by_slot[slots]]

    def groups_of(self, slots: NDArray[np.int32]) -> StepGroups:
        """Whose tokens a step of these requests computes."""
        if not self.several:
            return StepGroups.HEAVY if self.by_slot[int(slots[0])].heavy else StepGroups.OTHERS
        heavy = self.heavy_ones(slots)
        return StepGroups.OTHERS if not heavy.any() else StepGroups.HEAVY if heavy.all() else StepGroups.BOTH

    # turns

    def candidates(self, computing: Collection[Group], *, admit: bool) -> list[Group]:
        """The groups that may have a prompt to compute; without ``admit`` only those that have begun with it."""
        groups = list(self._groups.values())
        if self.several:
            groups = [one for one in groups if one in computing or (admit and one.waiting)]
        return groups

    @staticmethod
    def next(candidates: list[Group]) -> Group:
        """The group whose turn it is."""
        return min(candidates, key=_counter)

    def charge(self, group: Group, prompt_tokens: int) -> None:
        """Count prompt tokens."""
        self._charged += prompt_tokens
        served = prompt_tokens / group.weight
        group.counter += served
        group.recent += served

    def note_step(
        self,
        slots: NDArray[np.int32],  # ``[R]`` of the running sequences
        ends: NDArray[np.int64],  # ``[R]`` tokens of each at its expected end
        unfinished: list[int],  # indices of those that yield no token
        computing: Collection[Group],  # the groups of these
    ) -> None:
        """Count the answers' tokens of a step of several groups, and forget groups that were idle for long."""
        self._step += 1
        number, size = self._number_by_slot[slots], self._numbers
        outputs = (np.bincount(number, minlength=size) - np.bincount(number[unfinished], minlength=size)).tolist()
        held = np.bincount(number, weights=ends, minlength=size).tolist()
        asked = self._charged + sum(outputs) * OUTPUT_TOKEN_COST
        if any(one.heavy and (one.waiting or one in computing) for one in self._groups.values()):
            # Else a heavy group that is limited would seem to ask for so little that no other asks for less.
            asked = max(asked, self._budget)
        kept = self._keep(asked)
        self._charged = 0
        weights = 0.0
        for name, group in list(self._groups.items()):
            if group.waiting or group.running:
                group.last_step = self._step
            elif self._step - group.last_step > REMEMBERED_STEPS:
                del self._groups[name]
                continue
            group.held_tokens = round(held[group.number])
            served = outputs[group.number] * OUTPUT_TOKEN_COST / group.weight
            group.counter += served
            group.recent = (group.recent + served) * kept
            group.backlog = group.backlog * kept + bool(group.waiting or group in computing) * (1 - kept)
            weights += group.weight
        self.several = len(self._groups) > 1
        backlogged = [one.counter for one in self._groups.values() if one.waiting or one in computing]
        self._level = max(self._level, min(backlogged, default=self._level))
        for group in self._groups.values():
            group.heavy = group.backlog >= MOST_BACKLOG
            group.light = self.several and not group.heavy and group.recent * weights <= self._asked

    def note_step_alone(self, prompt_tokens: int, output_tokens: int, *, backlog: bool) -> None:
        """The same for a step of the only group: what it was served matters when another one comes."""
        served = prompt_tokens + output_tokens * OUTPUT_TOKEN_COST
        kept = self._keep(served)
        for group in self._groups.values():
            group.recent = (group.recent + served / group.weight) * kept
            group.backlog = group.backlog * kept + backlog * (1 - kept)
            group.heavy = group.backlog >= MOST_BACKLOG

    def _keep(self, asked: float) -> float:
        """Count what was asked for in a step; how much of what was before still counts."""
        kept = math.exp(-asked / self._recent_tokens)
        self._asked = (self._asked + asked) * kept
        return kept

    @property
    def _numbers(self) -> int:
        return 1 + max([group.number for group in self._groups.values()])


def _counter(group: Group) -> float:
    return group.counter
