"""Several groups of requests in one scheduler: who gets the tokens of a step, and that one group changes nothing."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from over_admission import expect_short_answers
from test_scheduler import ACTION, SIZES, SimulatedEngine

from examples import every, examples
from megatoken.engine.fair_share import OUTPUT_TOKEN_COST, RESERVE
from megatoken.engine.prefix_cache import extend_keys
from megatoken.engine.prompt_limit import PromptLimit
from megatoken.engine.request import FinishReason
from megatoken.engine.scheduler import Scheduler
from megatoken.engine.step_plan import StepGroups, StepPlan
from megatoken.engine.step_time import plan_within

PLANS_BEFORE_GROUPS = "3dbf7ace22340c3f70910aca7cb537570e320b2eea301cccfdfdb688a8595052"
"""Of the scheduler that knew no groups (commit 0a48f03), by ``plans_of_one_group``. Its decodes were oldest first."""


def test_plans_of_one_group_are_those_of_a_scheduler_without_groups() -> None:
    total = hashlib.sha256()
    preemptions = 0
    for seed in range(60):
        digest, preempted = plans_of_one_group(seed)
        total.update(digest.encode())
        preemptions += preempted
    assert preemptions > 300
    assert total.hexdigest() == PLANS_BEFORE_GROUPS


def plans_of_one_group(seed: int) -> tuple[str, int]:
    """Digest of all plans of random requests with limits of steps and ends at random moments; how many preemptions."""
    random = np.random.default_rng(seed)

    def draw(low: int, high: int) -> int:
        return int(random.integers(low, high))

    page_size, prefix_cache = draw(1, 6), seed % 3 == 0
    max_length = draw(8, 60)
    scheduler = Scheduler(
        max_batched_tokens=draw(1, 48),
        max_sequences=draw(1, 14),
        page_size=page_size,
        num_pages=-(-max_length // page_size) + draw(0, 30),
        max_length=max_length,
        prefix_cache=prefix_cache,
    )
    if seed % 2:
        expect_short_answers(scheduler)
    total, added = hashlib.sha256(), 0
    left: dict[int, int] = {}  # tokens of each request that has not ended
    stem = random.integers(0, 3, max_length).tolist()
    while added < 80 or left:
        while added < 80 and random.random() < 0.5:
            prompt = draw(1, max_length)
            most = draw(1, max_length - prompt + 1)
            keys: list[bytes] = []
            if prefix_cache:
                shared = draw(0, prompt + 1)
                extend_keys(keys, stem[:shared] + random.integers(0, 3, prompt - shared).tolist(), page_size, "")
            scheduler.add(added, prompt, most, keys)
            left[added] = most
            added += 1
        limit = draw(0, 60) if random.random() < 0.3 else None
        most_sequences = draw(0, 14) if random.random() < 0.1 and scheduler.running else None
        plan = scheduler.plan(limit, most_sequences)
        if plan is None:
            continue
        total.update(contents(plan))
        ended = []
        for request_id in sorted(plan.request_id[plan.sample].tolist()):
            left[request_id] -= 1
            if not left[request_id]:
                ended.append(request_id)
        if left and random.random() < 0.2:
            request_id = int(random.choice(list(left)))
            scheduler.end(request_id, answered=bool(random.random() < 0.5))
            ended.append(request_id)
        for request_id in ended:
            left.pop(request_id, None)
        if scheduler.prefixes is not None:
            for request_id in (*plan.preempted, *ended):
                scheduler.prefixes.keep(request_id)
    return total.hexdigest(), scheduler.preemptions


def contents(plan: StepPlan) -> bytes:
    oldest_first = np.argsort(plan.request_id)
    arrays = [one[oldest_first] for one in (plan.slot, plan.request_id, plan.start, plan.count, plan.sample)]
    pages = (plan.page_slot, plan.page_index, plan.page)
    numbers = [int(one) for array in (*arrays, *pages) for one in (len(array), *array)]
    return repr([plan.step, plan.decodes, *plan.preempted, *numbers]).encode()


class EngineOfGroups(SimulatedEngine):
    """The simulated engine of ``test_scheduler``, which computes tokens from what its cache really holds."""

    WEIGHTS = (1.0, 1.0, 3.0, 0.5)

    def __init__(self, lookahead: int = 0, *, rests: bool = False, **sizes: int) -> None:
        """``rests``: heavy groups rest in two of three steps, if another one asks for little."""
        super().__init__(lookahead, **sizes)
        self.group_of: dict[int, int] = {}
        self.rested_steps = 0
        if rests:
            own_plan = self.scheduler.plan
            self.scheduler.plan = lambda: own_plan(None, None, 3, rest=self.steps % 3 > 0)  # type: ignore[method-assign]

    def add(self, prompt_tokens: int, max_tokens: int, stop_one_in: int = 0) -> None:
        group = hash((prompt_tokens, max_tokens)) % len(self.WEIGHTS)
        own_add = self.scheduler.add
        share = f"group {group}", self.WEIGHTS[group]
        self.scheduler.add = lambda *lengths: own_add(*lengths, share=share)  # type: ignore[method-assign]
        self.group_of[len(self.all)] = group
        super().add(prompt_tokens, max_tokens, stop_one_in)
        self.scheduler.add = own_add  # type: ignore[method-assign]

    def drain(self) -> None:
        most = 50 * sum(len(s.prompt) + s.max_tokens for s in self.all.values())
        while self.step() is not None:
            assert self.steps < most, "a request never ends"
        super().drain()

    def check(self, plan: StepPlan) -> None:
        running = [request_id for request_id, s in self.live.items() if s.slot is not None]
        if plan.preempted:
            assert min(running) not in plan.preempted, "the oldest that runs stays"
        for request_id in plan.preempted:
            self.preemptions += 1
            self.recomputed += self.live[request_id].computed
            self.release(request_id)
            running.remove(request_id)
        request_ids = plan.request_id.tolist()
        admitted = [one for one in request_ids if one not in running]
        resting = {self.group_of[one] for one in set(running) - set(request_ids)}
        assert not resting & {self.group_of[one] for one in request_ids}, "a group rests as a whole"
        running = [one for one in running if self.group_of[one] not in resting]
        assert sorted(request_ids) == sorted(running + admitted), "every other running request is in the step"
        assert running or not resting, "a group rests for another one that runs"
        self.rested_steps += bool(resting)
        assert not (plan.preempted and admitted)
        for group in range(len(self.WEIGHTS)):
            waiting = [one for one, s in self.live.items() if s.slot is None and self.group_of[one] == group]
            own = [one for one in admitted if self.group_of[one] == group]
            assert own == waiting[: len(own)], "in a group, first come, first served"
        for request_id, slot in zip(request_ids, plan.slot.tolist(), strict=True):
            sequence = self.live[request_id]
            if request_id in admitted:
                assert slot not in [s.slot for s in self.live.values()]
                sequence.slot, sequence.from_host = slot, sequence.known
            assert sequence.slot == slot
        self.check_pages(plan)
        assert 0 < int(plan.count.sum()) <= self.max_batched_tokens
        partial = []
        for i, request_id in enumerate(request_ids):
            sequence = self.live[request_id]
            start, end = int(plan.start[i]), int(plan.start[i] + plan.count[i])
            assert start == sequence.computed < end <= sequence.known
            assert plan.sample[i] == (end == sequence.known)
            assert (i < plan.decodes) == (start >= sequence.from_host)
            if end < sequence.known:
                partial.append(self.group_of[request_id])
        assert len(set(partial)) == len(partial), "a group computes one prompt after the other"


@settings(max_examples=examples(300), deadline=None)
@given(sizes=SIZES, actions=st.lists(ACTION, max_size=60), rests=st.booleans())
def test_every_request_of_every_group_gets_its_tokens(sizes: dict, actions: list, rests: bool) -> None:
    engine = EngineOfGroups(**sizes, rests=rests)
    engine.act(actions)
    engine.drain()


@pytest.mark.parametrize(
    ("page_size", "num_pages", "lookahead"),
    [(1, 120, 0), (4, 40, 1), (16, 14, 1), *every((1, 120, 1), (4, 40, 0), (16, 14, 0))],
)
@pytest.mark.parametrize("rests", [False, True])
def test_groups_under_pressure(page_size: int, num_pages: int, lookahead: int, rests: bool) -> None:
    random = np.random.default_rng(page_size)
    sizes = {"max_batched_tokens": 32, "max_sequences": 12, "page_size": page_size, "max_length": 80}
    engine = EngineOfGroups(lookahead, hopeful=True, num_pages=num_pages, rests=rests, **sizes)
    for _ in range(200):
        engine.add(int(random.integers(1, 25)), int(random.integers(1, 56)), int(random.choice([0, 0, 23])))
    while engine.live:
        engine.step()
        if random.random() < 0.05 and engine.live:
            engine.end(int(random.choice(list(engine.live))), FinishReason.CANCELLED)
    engine.drain()
    assert engine.preemptions > 20 and (engine.rested_steps > 20) == rests


@settings(max_examples=examples(30))
@given(
    kinds=st.lists(st.tuples(st.floats(0.2, 5), st.integers(8, 60), st.integers(1, 8)), min_size=2, max_size=4),
    budget=st.integers(16, 128),
)
def test_groups_that_always_wait_are_served_by_weight(kinds: list[tuple[float, int, int]], budget: int) -> None:
    """Kinds of requests, each of a group: weight, prompt, answer. The counters stay within what may be under way."""
    sequences, steps = 200, 300
    scheduler = Scheduler(
        max_batched_tokens=budget, max_sequences=sequences, page_size=4, num_pages=20_000, max_length=80
    )
    served = [0.0] * len(kinds)
    waiting = [0] * len(kinds)
    owner: list[int] = []
    # What a group may have under way when its turn comes, of which the counters say nothing yet; the paper's bound.
    bound = 2 * max(
        (budget + OUTPUT_TOKEN_COST * (budget // prompt + 2) * answer) / weight for weight, prompt, answer in kinds
    )
    for _ in range(steps):
        for group, (weight, prompt, answer) in enumerate(kinds):
            for _ in range(waiting[group], budget // 8 + 2):
                scheduler.add(len(owner), prompt, answer, share=(str(group), weight))
                owner.append(group)
                waiting[group] += 1
        plan = scheduler.plan()
        assert plan is not None
        new = plan.start == 0
        for i, request_id in enumerate(plan.request_id.tolist()):
            group = owner[request_id]
            prompts = int(plan.count[i]) if i >= plan.decodes else 0
            served[group] += (prompts + OUTPUT_TOKEN_COST * plan.sample[i]) / kinds[group][0]
            waiting[group] -= bool(new[i])
        assert max(served) - min(served) <= bound
    assert min(served) > 0


@settings(max_examples=examples(30))
@given(
    flood=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    light=st.tuples(st.integers(1, 30), st.integers(1, 10)),
    between=st.integers(8, 40),
    pages=st.integers(150, 400),
)
def test_a_flood_holds_another_group_up_for_two_steps_at_most(
    flood: tuple[int, int], light: tuple[int, int], between: int, pages: int
) -> None:
    """The other group's requests fit into what is reserved for it, and take less than half of a step."""
    budget, sequences, size = 64, 32, 4
    scheduler = Scheduler(
        max_batched_tokens=budget, max_sequences=sequences, page_size=size, num_pages=pages, max_length=600
    )
    asked = {1: 0}  # step in which each request of the light group came that has no token yet
    light_left = {1: light[1]}  # tokens that each lacks
    scheduler.add(0, *flood, share=("flood", 1.0))
    scheduler.add(1, *light, share=("light", 1.0))
    number = 2
    for step in range(150):
        while scheduler.waiting < 4:
            scheduler.add(number, *flood, share=("flood", 1.0))
            number += 1
        unfinished = sum(left > 0 for left in light_left.values())
        fits = (unfinished + 1) * math.ceil(sum(light) / size) <= pages // RESERVE and unfinished < sequences // RESERVE
        if step % between == 0 and not asked and fits:
            scheduler.add(number, *light, share=("light", 1.0))
            asked[number], light_left[number] = step, light[1]
            number += 1
        plan = scheduler.plan()
        assert plan is not None
        for request_id in plan.request_id[plan.sample].tolist():
            asked.pop(request_id, None)
            if request_id in light_left:
                light_left[request_id] -= 1
        assert all(step - since < 2 for since in asked.values())


def test_prompts_of_others_are_limited_while_a_group_asks_for_little() -> None:
    scheduler = Scheduler(max_batched_tokens=256, max_sequences=16, page_size=4, num_pages=4000, max_length=1000)
    owner = []

    def add(group: str, prompt: int, answer: int) -> None:
        scheduler.add(len(owner), prompt, answer, share=(group, 1.0))
        owner.append(group)

    def prompt_tokens(plan: StepPlan | None) -> dict[str, int]:
        assert plan is not None
        tokens = {"flood": 0, "light": 0}
        for request_id, count in zip(plan.request_id[plan.decodes :], plan.count[plan.decodes :], strict=True):
            tokens[owner[request_id]] += int(count)
        return tokens

    for _ in range(500):
        add("flood", 900, 10)
    for _ in range(5):
        assert sum(prompt_tokens(scheduler.plan(None, None, 8)).values()) > 200  # alone it may have all
    add("light", 30, 5)
    assert prompt_tokens(scheduler.plan(None, None, 8)) == {"flood": 9, "light": 30}
    assert prompt_tokens(scheduler.plan(None, None, 8)) == {"flood": 9, "light": 0}
    for step in range(100):
        if step % 10 == 0:
            add("light", 40, 5)
        tokens = prompt_tokens(scheduler.plan(None, None, 8))
        assert tokens == {"flood": 9, "light": 40 if step % 10 == 0 else 0}
    for step in range(100):  # a group is light that gets more than the flood does, because the flood is limited
        if step % 5 == 0:
            add("light", 60, 5)
        tokens = prompt_tokens(scheduler.plan(None, None, 2))
        assert tokens == {"flood": 3, "light": 60 if step % 5 == 0 else 0}
    for _ in range(1500):  # the other group floods too, so no group is light, and steps are full
        for _ in range(3):
            add("light", 100, 5)
        tokens = prompt_tokens(scheduler.plan(None, None, 8))
    assert sum(tokens.values()) > 200


def test_a_group_that_is_gone_for_long_is_forgotten() -> None:
    scheduler = Scheduler(max_batched_tokens=8, max_sequences=16, page_size=4, num_pages=4000, max_length=9000)
    scheduler.add(0, 4, 8000, share=("busy", 1.0))
    assert not scheduler.several_groups
    scheduler.add(1, 4, 2, share=("gone", 1.0))
    for step in range(2100):
        scheduler.plan()
        assert scheduler.several_groups == (step < 2002), step


def test_the_limit_follows_what_steps_take_on_the_machine() -> None:
    """A step takes 5 ms and 1 ms for each token; one in twenty waits for another process. The machine gets slower."""
    random = np.random.default_rng(0)
    limit = PromptLimit(2.0, 2048)
    for price in (0.001, 0.00025, 0.004):
        steps = []
        for _ in range(2000):
            tokens = limit.next()
            assert tokens is not None
            seconds = 0.005 + tokens * price
            limit.note(step_of(StepGroups.HEAVY, tokens), seconds * (5 if random.random() < 0.05 else 1))
            steps.append(seconds)
        assert 0.7 < np.mean(steps[1000:]) / (2 * 0.005) < 1.2 or price == 0.004
    assert tokens <= 4, "the least, although it takes too long"
    assert PromptLimit(None, 2048).next() is None


def step_of(groups: StepGroups, heavy_tokens: int | None = None) -> StepPlan:
    nothing = np.zeros(0, dtype=np.int32)
    return StepPlan(
        *(0, nothing, nothing.astype(np.int64), nothing, nothing, nothing.astype(np.bool_), 0, ()),
        *(nothing, nothing, nothing, groups, heavy_tokens),
    )


@pytest.mark.parametrize("between", [12, 0, *every(40)])
def test_a_flood_rests_for_streams_that_take_less_than_their_part_of_the_time(between: int) -> None:
    """A step takes 4 ms, and 5 ms more for each answer of the flood in it, of which there are four at most.

    ``between``: steps from one stream of 8 tokens to the next; 0: one always runs, so the flood gets half of the time.
    """
    scheduler = Scheduler(max_batched_tokens=64, max_sequences=8, page_size=4, num_pages=4000, max_length=1000)
    limit = PromptLimit(1.15, 64)
    number = 0
    light: set[int] = set()
    flood: set[int] = set()
    flood_seconds = seconds = 0.0
    alone = shared = since = 0
    for step in range(6000):
        while len(flood) < 4 or scheduler.waiting < 2:
            scheduler.add(number, 30, 20, share=("flood", 1.0))
            flood.add(number)
            number += 1
        if not light and since >= between:
            scheduler.add(number, 8, 8, share=("light", 1.0))
            light.add(number)
            number += 1
            since = -1
        plan = plan_within(None, limit, scheduler)
        assert plan is not None
        own = [one for one in plan.request_id[: plan.decodes].tolist() if one in light]
        of_flood = sum(one in flood for one in plan.request_id.tolist())
        took = 0.004 + 0.005 * of_flood
        limit.note(plan, took)
        if step > 1000:
            seconds += took
            flood_seconds += took if not own else 0.005 * of_flood
            alone += bool(own) and not of_flood
            shared += bool(own) and of_flood > 0
        running = set(scheduler._request_ids[scheduler._running].tolist())
        ended = {one for one in plan.request_id.tolist() if one not in running}
        light -= ended
        flood -= ended
        since += not light
    assert alone > 50
    if between:
        assert shared <= 0.01 * alone, "its streams do not see the flood"
    assert flood_seconds > 0.45 * seconds, "which has its part of the time"
    assert between or flood_seconds < 0.65 * seconds
