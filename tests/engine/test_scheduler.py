"""The scheduler drives a simulated engine whose tokens are a function of what its cache really holds.

``SimulatedEngine`` knows nothing of the scheduler but its plans: pages by the deltas, cache contents by page and
offset, the token table by slot, host tokens only as step results are read. A row too many, too few or in the wrong
page gives other tokens than ``reference``, besides breaking the rule that ``check`` states.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from over_admission import expect_short_answers

from examples import every, examples
from megatoken.engine.page_forecast import PRIOR_TOKENS
from megatoken.engine.request import FinishReason
from megatoken.engine.scheduler import Scheduler
from megatoken.engine.step_plan import StepPlan
from megatoken.errors import CapacityError


def prompt_of(request_id: int, prompt_tokens: int) -> list[int]:
    return [hash((request_id, position)) % 997 for position in range(prompt_tokens)]


def next_token(tokens: list[int]) -> int:
    return hash(tuple(tokens)) % 997


def reference(prompt: list[int], max_tokens: int, stop_one_in: int) -> tuple[list[int], FinishReason]:
    """What a request must yield, whatever it is batched with; a token that ``stop_one_in`` divides ends it."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
        if stop_one_in and tokens[-1] % stop_one_in == 0:
            return tokens[len(prompt) :], FinishReason.STOP
    return tokens[len(prompt) :], FinishReason.LENGTH


@dataclass
class Sequence:
    prompt: list[int]
    max_tokens: int
    stop_one_in: int
    host: list[int]  # what the host has read
    known: int
    slot: int | None = None
    computed: int = 0
    from_host: int = 0  # tokens known when it was last admitted
    pages: list[int] = field(default_factory=list)
    reason: FinishReason | None = None


class SimulatedEngine:
    def __init__(self, lookahead: int = 0, *, hopeful: bool = False, **sizes: int) -> None:
        self.scheduler = Scheduler(**sizes)
        self.max_batched_tokens, self.max_sequences = sizes["max_batched_tokens"], sizes["max_sequences"]
        self.page_size, self.num_pages, self.max_length = sizes["page_size"], sizes["num_pages"], sizes["max_length"]
        self.lookahead = lookahead
        self.all: dict[int, Sequence] = {}
        self.live: dict[int, Sequence] = {}  # in the scheduler: neither done by length nor ended; oldest first
        self.owner: dict[int, int] = {}  # page -> request_id
        self.cache: dict[tuple[int, int], tuple[int, int, int]] = {}  # page, offset -> request_id, position, token
        self.token_table: dict[int, int] = {}
        self.in_flight: deque[list[tuple[int, int]]] = deque()
        self.steps = self.preemptions = self.recomputed = 0
        self.answered_tokens = self.answer_limits = PRIOR_TOKENS
        if hopeful:
            self.answer_limits = expect_short_answers(self.scheduler)

    def peak_pages(self, request_ids: list[int], residents: list[int]) -> int:
        """The most pages that ``request_ids`` are expected to hold at any step to come, step by step."""
        taken = self.answered_tokens + sum(
            self.live[request_id].known - len(self.live[request_id].prompt) for request_id in residents
        )
        sequences = []
        for s in (self.live[request_id] for request_id in request_ids):
            expected = len(s.prompt) + s.max_tokens * min(taken, self.answer_limits) // self.answer_limits - 1
            end = max(s.known, expected)
            empty = math.ceil(end / self.page_size) * self.page_size - end
            sequences.append((s.known + empty, end - s.known))
        steps = range(max((steps for _, steps in sequences), default=0) + 1)
        held = [sum(tokens + step for tokens, steps in sequences if step <= steps) for step in steps]
        return math.ceil(max(held) / self.page_size)

    def add(self, prompt_tokens: int, max_tokens: int, stop_one_in: int = 0) -> None:
        request_id = len(self.all)
        length = prompt_tokens + max_tokens
        if length > self.max_length or length - 1 > self.num_pages * self.page_size:
            with pytest.raises(CapacityError):
                self.scheduler.add(request_id, prompt_tokens, max_tokens)
            return
        self.scheduler.add(request_id, prompt_tokens, max_tokens)
        prompt = prompt_of(request_id, prompt_tokens)
        self.all[request_id] = self.live[request_id] = Sequence(
            prompt, max_tokens, stop_one_in, list(prompt), prompt_tokens
        )

    def step(self) -> StepPlan | None:
        plan = self.scheduler.plan()
        assert (plan is None) == (not self.live)
        if plan is not None:
            self.check(plan)
            self.in_flight.append(self.execute(plan))
            self.check_counters()
        while len(self.in_flight) > (self.lookahead if plan is not None else 0):
            self.read(self.in_flight.popleft())
        return plan

    def act(self, actions: list) -> None:
        """Each of ``ACTION``: a step, another request, or the end of one that has not ended."""
        for action in actions:
            unfinished = [request_id for request_id, s in self.all.items() if s.reason is None]
            if action is None:
                self.step()
            elif isinstance(action, tuple):
                self.add(*action)
            elif unfinished:
                self.end(unfinished[action % len(unfinished)], FinishReason.CANCELLED)

    def drain(self) -> None:
        while self.step() is not None:
            pass
        assert self.steps <= sum(len(s.prompt) + s.max_tokens - 1 for s in self.all.values()), "the oldest stood still"
        assert not self.owner
        self.check_counters()
        for sequence in self.all.values():
            tokens, reason = reference(sequence.prompt, sequence.max_tokens, sequence.stop_one_in)
            output = sequence.host[len(sequence.prompt) :]
            if sequence.reason is FinishReason.CANCELLED:
                assert output == tokens[: len(output)]
            else:
                assert (output, sequence.reason) == (tokens, reason)

    def check(self, plan: StepPlan) -> None:
        """The rules of a plan, and its pages applied."""
        assert plan.step == self.steps
        residents = [request_id for request_id, s in self.live.items() if s.slot is not None]
        self.check_preemption(plan, residents)
        residents = residents[: len(residents) - len(plan.preempted)]
        request_ids = plan.request_id.tolist()
        admitted = request_ids[len(residents) :]
        queue = [request_id for request_id, s in self.live.items() if s.slot is None]
        longest_first = plan.start[: plan.decodes].tolist()
        assert longest_first == sorted(longest_first, reverse=True)
        by_age = sorted(request_ids[: plan.decodes], key=residents.index) + request_ids[plan.decodes :]
        assert by_age[: len(residents)] == residents, "every resident has rows, prompts oldest first"
        assert admitted == queue[: len(admitted)], "first come, first served"
        assert not (plan.preempted and admitted)
        if admitted:
            assert self.peak_pages(by_age, residents) <= self.num_pages
        one_more = by_age + queue[len(admitted) :][:1]
        crowded = self.peak_pages(one_more, residents) > self.num_pages
        for request_id, slot in zip(request_ids, plan.slot.tolist(), strict=True):
            sequence = self.live[request_id]
            if request_id in admitted:
                assert slot in range(self.max_sequences)
                assert slot not in [s.slot for s in self.live.values()]
                sequence.slot, sequence.from_host = slot, sequence.known
            assert sequence.slot == slot
        self.check_pages(plan)
        rows = int(plan.count.sum())
        assert 0 < rows <= self.max_batched_tokens
        for i, request_id in enumerate(request_ids):
            sequence = self.live[request_id]
            start, end = int(plan.start[i]), int(plan.start[i] + plan.count[i])
            assert start == sequence.computed < end <= sequence.known
            assert end == sequence.known or (i == len(request_ids) - 1 and rows == self.max_batched_tokens), (
                "cut for no reason"
            )
            assert plan.sample[i] == (end == sequence.known)
            assert (i < plan.decodes) == (start >= sequence.from_host)
        free = self.num_pages - len(self.owner)
        if (
            rows < self.max_batched_tokens
            and not plan.preempted
            and len(request_ids) < self.max_sequences
            and queue[len(admitted) :]
        ):
            head = self.live[queue[len(admitted)]]
            scarce = free < math.ceil(head.known / self.page_size)
            assert scarce or crowded, "rows left unused"

    def check_preemption(self, plan: StepPlan, residents: list[int]) -> None:
        preempted = list(plan.preempted)
        assert preempted == residents[::-1][: len(preempted)], "newest first"
        assert preempted != residents[::-1] or not residents, "the oldest stays"
        if preempted:
            free = self.num_pages - len(self.owner) + sum(len(self.live[one].pages) for one in preempted[:-1])
            kept = [self.live[request_id] for request_id in residents[: len(residents) - len(preempted) + 1]]
            lacking = sum(math.ceil(s.known / self.page_size) - len(s.pages) for s in kept)
            assert lacking > free, "preempted for no reason"
        for request_id in preempted:
            self.preemptions += 1
            self.recomputed += self.live[request_id].computed
            self.release(request_id)

    def check_pages(self, plan: StepPlan) -> None:
        ticket_of_slot = dict(zip(plan.slot.tolist(), plan.request_id.tolist(), strict=True))
        for slot, index, page in zip(plan.page_slot, plan.page_index, plan.page, strict=True):
            request_id = ticket_of_slot[int(slot)]
            assert page in range(self.num_pages)
            assert int(page) not in self.owner, "one owner per page"
            assert index == len(self.live[request_id].pages)
            self.owner[int(page)] = request_id
            self.live[request_id].pages.append(int(page))
        for request_id in plan.request_id.tolist():
            sequence = self.live[request_id]
            assert len(sequence.pages) == math.ceil(sequence.known / self.page_size)
            assert self.scheduler.page_table[sequence.slot, : len(sequence.pages)].tolist() == sequence.pages

    def check_counters(self) -> None:
        assert self.scheduler.waiting == sum(s.slot is None for s in self.live.values())
        assert self.scheduler.running == len(self.live) - self.scheduler.waiting
        assert self.scheduler.free_pages == self.num_pages - len(self.owner)
        assert self.scheduler.preemptions == self.preemptions
        assert self.scheduler.recomputed_tokens == self.recomputed

    def execute(self, plan: StepPlan) -> list[tuple[int, int]]:
        """Writes all rows to the cache, then samples from what the cache holds."""
        self.steps += 1
        sequences = [self.live[request_id] for request_id in plan.request_id.tolist()]
        for i, (request_id, s) in enumerate(zip(plan.request_id.tolist(), sequences, strict=True)):
            for position in range(s.computed, s.computed + int(plan.count[i])):
                token = self.token_table[s.slot] if i < plan.decodes else s.host[position]
                self.cache[self.place(s, position)] = (request_id, position, token)
            s.computed += int(plan.count[i])
        sampled = []
        for i, (request_id, s) in enumerate(zip(plan.request_id.tolist(), sequences, strict=True)):
            if not plan.sample[i]:
                continue
            seen = [self.cache[self.place(s, position)] for position in range(s.computed)]
            assert [entry[:2] for entry in seen] == [(request_id, position) for position in range(s.computed)]
            self.token_table[s.slot] = next_token([entry[2] for entry in seen])
            sampled.append((request_id, self.token_table[s.slot]))
            s.known += 1
            if s.known == len(s.prompt) + s.max_tokens:
                self.learn(s)
                self.release(request_id)
                del self.live[request_id]
        return sampled

    def place(self, sequence: Sequence, position: int) -> tuple[int, int]:
        return sequence.pages[position // self.page_size], position % self.page_size

    def read(self, sampled: list[tuple[int, int]]) -> None:
        for request_id, token in sampled:
            s = self.all[request_id]
            if s.reason is not None:
                continue
            s.host.append(token)
            if s.stop_one_in and token % s.stop_one_in == 0:
                self.end(request_id, FinishReason.STOP)
            elif len(s.host) == len(s.prompt) + s.max_tokens:
                s.reason = FinishReason.LENGTH

    def end(self, request_id: int, reason: FinishReason) -> None:
        self.all[request_id].reason = reason
        if request_id in self.live:
            s = self.live[request_id]
            answered = reason is FinishReason.STOP
            if answered and s.slot is not None:
                self.learn(s)
            self.scheduler.end(request_id, answered=answered)
            self.release(request_id)
            del self.live[request_id]
            self.check_counters()

    def learn(self, sequence: Sequence) -> None:
        self.answered_tokens += sequence.known - len(sequence.prompt)
        self.answer_limits += sequence.max_tokens

    def release(self, request_id: int) -> None:
        sequence = self.live[request_id]
        for page in sequence.pages:
            assert self.owner.pop(page) == request_id
        sequence.pages, sequence.slot, sequence.computed = [], None, 0


SIZES = st.fixed_dictionaries(
    {
        "max_batched_tokens": st.integers(1, 20),
        "max_sequences": st.integers(1, 8),
        "page_size": st.integers(1, 5),
        "num_pages": st.integers(1, 30),
        "max_length": st.integers(2, 40),
        "lookahead": st.integers(0, 1),
        "hopeful": st.booleans(),
    }
)
REQUEST = st.tuples(st.integers(1, 20), st.integers(1, 15), st.sampled_from([0, 0, 4, 11]))
ACTION = st.one_of(st.none(), st.none(), REQUEST, REQUEST, REQUEST, st.integers(0, 9))  # step, arrival, cancellation


@settings(max_examples=examples(1000), deadline=None)
@given(sizes=SIZES, actions=st.lists(ACTION, max_size=60))
def test_every_request_gets_its_tokens_whatever_happens(sizes: dict, actions: list):
    engine = SimulatedEngine(**sizes)
    engine.act(actions)
    engine.drain()


@pytest.mark.parametrize(
    ("page_size", "num_pages", "lookahead"),
    [(1, 120, 1), (4, 40, 0), (16, 14, 1), *every((1, 120, 0), (4, 40, 1), (16, 14, 0))],
)
def test_every_request_gets_its_tokens_under_pressure(page_size: int, num_pages: int, lookahead: int):
    random = np.random.default_rng(page_size)
    engine = SimulatedEngine(
        lookahead,
        hopeful=True,
        max_batched_tokens=32,
        max_sequences=12,
        page_size=page_size,
        num_pages=num_pages,
        max_length=80,
    )
    for _ in range(200):
        engine.add(int(random.integers(1, 25)), int(random.integers(1, 56)), int(random.choice([0, 0, 23])))
    while engine.live:
        engine.step()
        if random.random() < 0.05 and engine.live:
            engine.end(int(random.choice(list(engine.live))), FinishReason.CANCELLED)
    engine.drain()
    assert engine.preemptions > 20
    assert {s.reason for s in engine.all.values()} == set(FinishReason) - {FinishReason.ERROR}


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize(
    "sizes",
    [
        {"max_batched_tokens": 1, "max_sequences": 4, "page_size": 4, "num_pages": 12, "max_length": 16},
        {"max_batched_tokens": 9, "max_sequences": 4, "page_size": 15, "num_pages": 1, "max_length": 16},
        {"max_batched_tokens": 9, "max_sequences": 1, "page_size": 1, "num_pages": 15, "max_length": 16},
        {"max_batched_tokens": 4096, "max_sequences": 64, "page_size": 4, "num_pages": 4096, "max_length": 16},
    ],
    ids=["one row", "one page", "one slot, longest request fills the cache", "all at once"],
)
def test_extreme_sizes(sizes: dict, lookahead: int):
    engine = SimulatedEngine(lookahead, **sizes)
    lengths = [(p, m) for p in range(1, 16) for m in (1, 2, 16 - p) if p + m <= 16]
    for prompt_tokens, max_tokens in lengths:
        engine.add(prompt_tokens, max_tokens)
    engine.drain()
    assert len(engine.all) == len(lengths)
    assert all(s.reason is FinishReason.LENGTH for s in engine.all.values())
