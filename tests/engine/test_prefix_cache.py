"""The prefix cache: what requests share, what they never share, and which pages are given up first."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from over_admission import expect_short_answers

from examples import examples
from megatoken.engine.page_forecast import PageForecast, SharedPages
from megatoken.engine.prefix_cache import PrefixCache, extend_keys
from megatoken.engine.scheduler import Scheduler
from megatoken.engine.step_plan import StepPlan
from megatoken.engine.window_pages import most_window_pages


def next_token(tokens: list[int]) -> int:
    return hash(tuple(tokens)) % 3


@dataclass
class Sequence:
    prompt: list[int]
    max_tokens: int
    salt: str
    keys: list[bytes]
    host: list[int]  # tokens that the host has read
    num_tokens: int
    slot: int | None = None
    computed: int = 0
    found: int = 0  # tokens found in the cache when it was last admitted
    pages: list[int] = field(default_factory=list)
    done: bool = False


class Sharing(RuleBasedStateMachine):
    """A device that knows of every place in its cache which salt and tokens it holds, and a loop that serves requests.

    Nothing of the scheduler is used but its plans, so a page in a wrong place or a wrong role shows up as a read of
    something else, or as a write to what somebody reads.
    """

    @initialize(
        page_size=st.integers(1, 4),
        num_pages=st.integers(8, 24),
        max_batched_tokens=st.integers(3, 40),
        max_sequences=st.integers(2, 6),
        lookahead=st.integers(0, 1),
        hopeful=st.booleans(),
        window=st.sampled_from([0, 1, 2, 5, 9, 30]),
    )
    def start(
        self,
        page_size: int,
        num_pages: int,
        max_batched_tokens: int,
        max_sequences: int,
        lookahead: int,
        hopeful: bool,
        window: int,
    ) -> None:
        self.page_size, self.num_pages, self.lookahead = page_size, num_pages, lookahead
        self.max_length = num_pages * page_size
        max_sequences, self.window, self.window_pages = min(max_sequences, max_batched_tokens), window, 0
        if window:
            self.window_pages = most_window_pages(window, page_size, max_sequences, max_batched_tokens)
        self.scheduler = Scheduler(
            max_batched_tokens=max_batched_tokens,
            max_sequences=max_sequences,
            page_size=page_size,
            num_pages=num_pages,
            max_length=self.max_length,
            prefix_cache=True,
            window=window,
            window_pages=self.window_pages,
        )
        assert self.scheduler.prefixes is not None
        self.prefixes: PrefixCache = self.scheduler.prefixes
        if hopeful:
            expect_short_answers(self.scheduler)
        self.all: dict[int, Sequence] = {}
        self.live: dict[int, Sequence] = {}
        self.content: dict[tuple[int, int], tuple[int, int]] = {}  # by page and offset
        self.chains: dict[tuple[int, int], int] = {}  # the same of layers with windows, without the token
        self.writer: dict[int, int] = {}  # by held page: the request that may write to it
        self.token_table: dict[int, int] = {}
        self.in_flight: deque[list[tuple[int, int]]] = deque()
        self.parent: dict[bytes, bytes | None] = {}
        self.failures = 0

    @rule(
        origin=st.integers(0, 20),
        share=st.floats(0, 1),
        more=st.lists(st.integers(0, 2), max_size=9),
        max_tokens=st.integers(1, 12),
        salt=st.sampled_from(["", "", "tenant"]),
    )
    def add(self, origin: int, share: float, more: list[int], max_tokens: int, salt: str) -> None:
        """A request that begins like an earlier one and its answer, or not."""
        earlier = self.all[origin].host if origin in self.all else [1] * 30
        prompt = [*earlier[: round(share * len(earlier))], *more]
        max_tokens = min(max_tokens, self.max_length - 1)
        prompt = prompt[: self.max_length - max_tokens] or [0]
        request_id, keys = len(self.all), []
        extend_keys(keys, prompt, self.page_size, salt)
        self.learn_parents(keys)
        sequence = Sequence(prompt, max_tokens, salt, keys, list(prompt), len(prompt))
        self.all[request_id] = self.live[request_id] = sequence
        group = "ab"[len(more) % 2] if self.window else ""  # of several, prompts are computed next to each other
        self.scheduler.add(request_id, len(prompt), max_tokens, keys, (group, 1.0))

    @rule(steps=st.integers(1, 6))
    def steps(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    @rule(number=st.integers(0, 30), fails=st.booleans())
    def end(self, number: int, fails: bool) -> None:
        running = [request_id for request_id, one in self.all.items() if not one.done]
        if running:
            self.failures += fails
            self.leave(running[number % len(running)], keeps=not fails)

    def step(self) -> bool:
        plan = self.scheduler.plan()
        if plan is not None:
            self.follow(plan)
        while len(self.in_flight) > (self.lookahead if plan is not None else 0):
            for request_id, token in self.in_flight.popleft():
                one = self.all[request_id]
                if not one.done:
                    one.host.append(token)
                    assert one.host[-1] == next_token(one.host[:-1]), "as if it were alone"
                    if len(one.host) == len(one.prompt) + one.max_tokens:
                        self.leave(request_id)
        return plan is not None

    def follow(self, plan: StepPlan) -> None:
        for request_id in plan.preempted:
            self.drop(request_id)
            self.name(request_id)
        request_ids = plan.request_id.tolist()
        slots = dict(zip(plan.slot.tolist(), request_ids, strict=True))
        starts = dict(zip(request_ids, plan.start.tolist(), strict=True))
        given = (array.tolist() for array in (plan.page_slot, plan.page_index, plan.page))
        for slot, index, page in zip(*given, strict=True):
            request_id = slots[slot]
            one = self.live[request_id]
            if one.slot is None:
                one.slot, one.computed = slot, starts[request_id]
                one.found = one.computed
                assert one.computed % self.page_size == 0
                if one.num_tokens == len(one.prompt) and request_id in self.prefixes.cached_tokens:
                    assert self.prefixes.cached_tokens.pop(request_id) in range(0, len(one.prompt))
            assert index == len(one.pages)
            one.pages.append(page)
            if index * self.page_size >= one.computed:
                assert page not in self.writer or not self.readers()[page] - 1, "given to one"
                self.writer[page] = request_id
                for offset in range(self.page_size):
                    self.content.pop((page, offset), None)
        sequences = [self.live[request_id] for request_id in request_ids]
        for i, (request_id, one) in enumerate(zip(request_ids, sequences, strict=True)):
            assert self.scheduler.page_table[one.slot, : len(one.pages)].tolist() == one.pages
            assert one.computed == plan.start[i]
            _, chain = self.seen(one)
            for position in range(one.computed, one.computed + int(plan.count[i])):
                token = self.token_table[one.slot] if i < plan.decodes else one.host[position]
                page, offset = one.pages[position // self.page_size], position % self.page_size
                assert self.writer[page] == request_id, "a write to another request's page"
                assert (page, offset) not in self.content, "a second write"
                chain = hash((chain, token))
                self.content[page, offset] = (token, chain)
                if plan.window_table is not None:
                    self.chains[int(plan.window_table[one.slot, position // self.page_size]), offset] = chain
            one.computed += int(plan.count[i])
        for start, one in zip(plan.start.tolist(), sequences, strict=True):
            for position in range(max(0, start - self.window + 1), one.computed) if self.window else ():
                place, offset = position // self.page_size, position % self.page_size
                chain = self.chains[int(plan.window_table[one.slot, place]), offset]
                assert chain == self.content[one.pages[place], offset][1], "another beginning in the window"
        sampled = []
        for i, (request_id, one) in enumerate(zip(request_ids, sequences, strict=True)):
            if plan.sample[i]:
                token = self.token_table[one.slot] = next_token(self.seen(one)[0])
                sampled.append((request_id, token))
                one.num_tokens += 1
                if one.num_tokens == len(one.prompt) + one.max_tokens:
                    self.drop(request_id)
                    del self.live[request_id]
        self.in_flight.append(sampled)

    def seen(self, one: Sequence) -> tuple[list[int], int]:
        """A sequence's computed tokens as its pages hold them, and the hash that chains them to its salt."""
        tokens, chain = [], hash(one.salt)
        for position in range(one.computed):
            token, actual = self.content[one.pages[position // self.page_size], position % self.page_size]
            chain = hash((chain, token))
            assert actual == chain, "another salt or another beginning"
            tokens.append(token)
        return tokens, chain

    def leave(self, request_id: int, *, keeps: bool = True) -> None:
        """As the loop does at the end of a request, which may have left the scheduler before."""
        one = self.all[request_id]
        one.done = True
        self.scheduler.end(request_id, answered=False)
        if self.live.pop(request_id, None) is not None:
            self.drop(request_id)
        self.prefixes.cached_tokens.pop(request_id, None)
        if keeps:
            self.name(request_id)
        else:
            self.prefixes.discard(request_id)

    def name(self, request_id: int) -> None:
        one = self.all[request_id]
        extend_keys(one.keys, one.host[len(one.keys) * self.page_size :], self.page_size, one.salt)
        self.learn_parents(one.keys)
        self.prefixes.keep(request_id)

    def drop(self, request_id: int) -> None:
        one = self.all[request_id]
        one.slot, one.computed, one.pages = None, 0, []

    def learn_parents(self, keys: list[bytes]) -> None:
        for index, key in enumerate(keys):
            parent = keys[index - 1] if index else None
            assert self.parent.setdefault(key, parent) == parent

    def readers(self) -> Counter[int]:
        return Counter(page for one in self.live.values() for page in one.pages)

    @invariant()
    def every_page_has_one_role(self) -> None:
        prefixes, readers = self.prefixes, self.readers()
        assert {page: count for page, count in enumerate(prefixes._readers.tolist()) if count} == readers
        assert prefixes.extra_readers == sum(readers.values()) - len(readers)
        empty = set(prefixes._empty._stack[: prefixes._empty.free].tolist())
        assert empty.isdisjoint(readers) and empty.isdisjoint(prefixes._idle)
        assert readers.keys().isdisjoint(prefixes._idle)
        assert len(empty) + len(prefixes._idle) + len(readers) == self.num_pages
        assert self.scheduler.free_pages == self.num_pages - len(readers)

    @invariant()
    def windows_hold_no_other_pages(self) -> None:
        windows = self.scheduler._windows
        if windows is None:
            return
        held = 1 - (2 - self.window) // self.page_size
        slots = {one.slot for one in self.live.values() if one.slot is not None}
        rows = {slot: windows.rows[slot, windows._first[slot] : windows._end[slot]].tolist() for slot in slots}
        assert all(len(pages) <= held for pages in rows.values())
        assert int((windows._end - windows._first).sum()) == sum(map(len, rows.values()))
        readers = Counter(page for pages in rows.values() for page in pages)
        pages = windows._pages
        assert {page: count for page, count in enumerate(pages._readers.tolist()) if count} == readers
        assert readers.keys().isdisjoint(pages._idle)
        assert windows.free == self.window_pages - len(readers)

    @invariant()
    def what_can_be_found_is_there(self) -> None:
        prefixes = self.prefixes
        assert {page: key for key, page in prefixes._page_of.items()} == {
            page: key for page, key in enumerate(prefixes._key_of) if key is not None
        }
        assert set(prefixes._left_by) == {page for page in prefixes._idle if prefixes._key_of[page] is None}
        assert not set(prefixes._page_of.values()) & set(prefixes._empty._stack[: prefixes._empty.free].tolist())

    @invariant()
    def ends_of_chains_go_first(self) -> None:
        """Whatever is evicted next, no page that stays loses the way to it. (Failed requests take their pages out.

        And where a window was lost, a request computes again what is in the cache, and lets that be evicted.)
        """
        if self.failures or self.window:
            return
        prefixes = self.prefixes
        place = {page: number for number, page in enumerate(prefixes._idle)}
        for page, number in place.items():
            key = prefixes._key_of[page]
            parent = None if key is None else self.parent[key]
            if parent is not None:
                assert parent in prefixes._page_of, "its parent was evicted before it"
                assert place.get(prefixes._page_of[parent], self.num_pages) > number

    def teardown(self) -> None:
        if hasattr(self, "scheduler"):
            while self.step():
                pass
            assert all(one.done for one in self.all.values())
            assert self.scheduler.free_pages == self.num_pages
            assert not self.prefixes._left and not self.prefixes._left_by


def test_any_order_of_requests_steps_and_ends() -> None:
    test = Sharing.TestCase
    test.settings = settings(max_examples=examples(100), stateful_step_count=30)
    test("runTest").runTest()


@pytest.mark.parametrize("window", [0, 5])
def test_under_pressure_requests_share_find_their_own_pages_again_and_get_their_tokens(window: int) -> None:
    """The same machine with fewer pages than its requests want: every way through the cache comes up many times."""
    random = np.random.default_rng(3)
    machine = Sharing()
    sizes = {"page_size": 2, "num_pages": 24, "max_batched_tokens": 12, "max_sequences": 6}
    machine.start(**sizes, lookahead=1, hopeful=True, window=window)
    found_again = evictions = 0
    make_empty = machine.prefixes._make_empty

    def counted(pages: list[int]) -> None:
        nonlocal evictions
        evictions += sum(machine.prefixes._key_of[page] is not None for page in pages)
        make_empty(pages)

    machine.prefixes._make_empty = counted
    for _ in range(1500):
        if machine.scheduler.waiting < 8:
            machine.add(
                origin=int(random.integers(0, 21)),
                share=float(random.random()),
                more=random.integers(0, 3, random.integers(0, 10)).tolist(),
                max_tokens=int(random.integers(1, 13)),
                salt=str(random.choice(["", "tenant"])),
            )
        preempted = {one for one in machine.live if machine.live[one].num_tokens > len(machine.live[one].prompt)}
        waiting = {one for one in preempted if machine.live[one].slot is None}
        machine.step()
        found_again += sum(machine.live[one].found > 0 for one in waiting if one in machine.live)
        if random.random() < 0.05:
            machine.end(int(random.integers(0, 31)), fails=False)
        machine.every_page_has_one_role()
        machine.windows_hold_no_other_pages()
        machine.what_can_be_found_is_there()
        machine.ends_of_chains_go_first()
    machine.teardown()
    prefixes = machine.prefixes
    assert machine.scheduler.preemptions > 50
    assert evictions > 200
    assert found_again > 20
    assert 0.1 * prefixes.queried_tokens < prefixes.found_tokens < prefixes.queried_tokens


@dataclass
class Shared:
    """Sequences that share beginnings, the last of them not admitted yet."""

    size: int
    table: np.ndarray
    found: np.ndarray
    num_tokens: list[int]
    end: list[int]

    def peak(self, count: int, last_step: int = 1000) -> int:
        """Most tokens in distinct pages, with the empty places that each last page has at its sequence's end."""
        steps = [end - tokens for end, tokens in zip(self.end, self.num_tokens, strict=True)][:count]
        most = 0
        for step in {one for one in steps if one <= last_step}:
            running = [slot for slot in range(count) if steps[slot] >= step]
            tokens = sum(self.num_tokens[slot] + step + -self.end[slot] % self.size for slot in running)
            pages = [self.table[slot, : self.num_tokens[slot] // self.size].tolist() for slot in running]
            most = max(most, tokens - self.size * (sum(map(len, pages)) - len(set().union(*pages))))
        return most


def draw_shared(random: np.random.Generator) -> Shared:
    size, count = int(random.integers(1, 4)), int(random.integers(2, 9))
    drawn = Shared(size, np.zeros((count, 12), dtype=np.int32), np.zeros(count, dtype=np.int32), [], [])
    next_page = 0
    for slot in range(count):
        tokens, other = int(random.integers(1, 8 * size)), int(random.integers(0, slot + 1))
        if other < slot:
            drawn.found[slot] = random.integers(0, min((tokens - 1) // size, drawn.num_tokens[other] // size) + 1)
        found, pages = drawn.found[slot], -(-tokens // size)
        drawn.table[slot, :found] = drawn.table[other, :found]
        drawn.table[slot, found:pages] = np.arange(next_page, next_page + pages - found)
        next_page += int(pages - found)
        drawn.num_tokens.append(tokens)
        drawn.end.append(tokens + int(random.integers(0, 10)))
    return drawn


def test_a_shared_page_counts_once_until_its_last_reader_ends() -> None:
    """Against distinct pages counted at every step to come; the newest sequence is admitted or not."""
    random = np.random.default_rng(9)
    fitted = refused = 0
    for _ in range(500):
        drawn = draw_shared(random)
        size, old = drawn.size, len(drawn.num_tokens) - 1
        num_pages = int(drawn.table.max()) + 1 + int(random.integers(0, 12))
        tokens, end = np.array(drawn.num_tokens[:old]), np.array(drawn.end[:old])
        slots, held = np.arange(old, dtype=np.int32), (-(-tokens // size)).astype(np.int32)
        shared = SharedPages(drawn.table, slots, held, drawn.found[:old])
        forecast = PageForecast(tokens, end, size, num_pages, shared)
        assert forecast._peaks.max() == drawn.peak(old)
        newest, newest_end = drawn.num_tokens[old], drawn.end[old]
        fits = forecast.admit(newest, newest_end, drawn.table[old, : drawn.found[old]].tolist())
        assert fits == (drawn.peak(old + 1, newest_end - newest) <= num_pages * size)
        if fits:
            assert forecast._peaks.max() == drawn.peak(old + 1)
        fitted, refused = fitted + fits, refused + (not fits)
    assert min(fitted, refused) > 30


def keys_of(tokens: list[int], page_size: int, salt: str = "") -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, tokens, page_size, salt)
    return keys


def test_pages_that_are_found_without_a_reader_are_not_free_twice() -> None:
    """Two idle pages are all that is free; a prompt of three pages that begins with them has to wait."""
    scheduler = Scheduler(
        max_batched_tokens=32, max_sequences=4, page_size=4, num_pages=6, max_length=64, prefix_cache=True
    )
    prompt = list(range(9))
    scheduler.add(0, 8, 1, keys_of(prompt[:8], 4))
    scheduler.plan()
    scheduler.prefixes.keep(0)
    for request_id, prompt_tokens, max_tokens, keys in ((1, 5, 4, []), (2, 5, 4, []), (3, 9, 2, keys_of(prompt, 4))):
        scheduler.add(request_id, prompt_tokens, max_tokens, keys)
    assert scheduler.plan().request_id.tolist() == [1, 2]
    assert scheduler.free_pages == 2
    plans = [scheduler.plan() for _ in range(4)]
    assert (plans[3].request_id.tolist(), plans[3].start.tolist(), plans[3].count.tolist()) == ([3], [8], [1])


def test_keys_depend_on_salt_beginning_and_order() -> None:
    keys = keys_of([1, 2, 3, 4, 5], 2)
    assert len(keys) == 2
    assert keys_of([1, 2, 3, 4], 2) == keys
    assert not set(keys) & set(keys_of([1, 2, 3, 4], 2, "a"))
    assert keys_of([2, 1, 3, 4], 2)[1] != keys[1]
    longer = list(keys)
    extend_keys(longer, [5, 6], 2, "")
    assert longer == keys_of([1, 2, 3, 4, 5, 6], 2)
