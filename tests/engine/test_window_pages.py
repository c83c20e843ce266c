"""Pages of layers with windows: what a step sees is what was written, and answers are those of transformers."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import MIXTURES, is_greedy, make_checkpoint
from engines import SIZES, answers, assert_idle, drain, make_engine, request, run_next_to
from hypothesis import given, settings
from hypothesis import strategies as st
from over_admission import expect_short_answers
from test_prefix_cache_engine import converse
from transformers import PreTrainedModel

from examples import ALL, every, examples
from megatoken.engine import Engine, EngineConfig, Request, memory
from megatoken.engine.config import SHAPES
from megatoken.engine.memory import plan_memory_of
from megatoken.engine.prefix_cache import extend_keys
from megatoken.engine.scheduler import Scheduler
from megatoken.engine.step_plan import StepPlan
from megatoken.engine.window_pages import most_window_pages

WINDOWED = {"max_length": 250, "max_sequences": 4, "max_batched_tokens": 24, "cache_tokens": 400}
"""Sequences of forty windows of 6 tokens."""


# Plans


class Cache:
    """Which token's key each place of a layer with windows holds, as plans write it."""

    def __init__(self, scheduler: Scheduler, window: int, page_size: int, pages: int) -> None:
        self.windows = scheduler._windows
        self.window, self.page_size, self.pages = window, page_size, pages
        self.keys: dict[int, tuple[int, int]] = {}

    def run(self, plan: StepPlan) -> None:
        """All keys of a step are written before any is read."""
        columns = (column.tolist() for column in (plan.slot, plan.request_id, plan.start, plan.count))
        steps = list(zip(*columns, strict=True))
        written = set()
        for slot, request_id, start, count in steps:
            for position in range(start, start + count):
                place = self.place(plan, slot, position)
                assert place not in written
                written.add(place)
                self.keys[place] = request_id, position
        for slot, request_id, start, count in steps:
            for position in range(max(0, start - self.window + 1), start + count):
                assert self.keys[self.place(plan, slot, position)] == (request_id, position)

    def place(self, plan: StepPlan, slot: int, position: int) -> int:
        page = int(plan.window_table[slot, position // self.page_size])
        assert 0 <= page < self.pages
        return page * self.page_size + position % self.page_size


@settings(max_examples=examples(60))
@given(
    st.integers(1, 40),
    st.sampled_from([1, 3, 4, 16]),
    st.integers(1, 40),
    st.integers(1, 6),
    st.integers(0, 2**32),
)
def test_a_step_sees_the_keys_that_were_written(
    window: int, page_size: int, max_batched_tokens: int, max_sequences: int, seed: int
) -> None:
    """With chunks, several groups, preemptions and requests that end early; no plan needs more pages than there are."""
    draw = random.Random(seed)
    pages = most_window_pages(window, page_size, max_sequences, max_batched_tokens)
    scheduler = Scheduler(
        max_batched_tokens=max_batched_tokens,
        max_sequences=max_sequences,
        page_size=page_size,
        num_pages=-(-120 // page_size) * draw.randint(1, 3),
        max_length=120,
        window=window,
        window_pages=pages,
    )
    if draw.random() < 0.5:
        expect_short_answers(scheduler)
    cache, active, held = Cache(scheduler, window, page_size, pages), set(), 1 - (2 - window) // page_size
    for request_id in range(12):
        scheduler.add(request_id, draw.randint(1, 90), draw.randint(1, 30), share=(draw.choice("abc"), 1.0))
        active.add(request_id)
        for _ in range(draw.randint(0, 12)):
            step(scheduler, cache, draw)
            assert pages - cache.windows.free <= held * scheduler.running
        if draw.random() < 0.2:
            scheduler.end(draw.randint(0, request_id), answered=False)
    while step(scheduler, cache, draw):
        assert pages - cache.windows.free <= held * scheduler.running
    assert cache.windows.free == pages
    assert scheduler.free_pages == scheduler._num_pages


def step(scheduler: Scheduler, cache: Cache, draw: random.Random) -> bool:
    plan = scheduler.plan(prompt_tokens=draw.choice((None, 1, 5)))
    if plan is not None:
        cache.run(plan)
    return plan is not None


# Answers


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    directory = tmp_path_factory.mktemp("gpt-oss")
    return directory, make_checkpoint(directory, "GptOss", **MIXTURES["GptOss"])


def windowed_engine(directory: Path, **changes: object) -> Engine:
    engine = make_engine(directory, **{**WINDOWED, **changes})
    assert 0 < engine.memory_plan.window_pages < engine.memory_plan.pages
    return engine


@pytest.mark.parametrize(
    "changes",
    [
        {"max_batched_tokens": 1, "page_size": 1},
        {"max_batched_tokens": 7, "overlap": True},
        {"max_batched_tokens": 64, "max_sequences": 2},
        {"tensor_parallel": 2, "overlap": True},
    ],
    ids=["one token", "chunks", "prompts in one step", "two ranks"],
)
def test_tokens_are_those_of_transformers(gpt_oss: tuple[Path, PreTrainedModel], changes: dict[str, object]) -> None:
    directory, model = gpt_oss
    engine = windowed_engine(directory, **changes)
    tokens = 40 if ALL else 20
    requests = [request(seed, tokens, length) for seed, length in enumerate((3, 60, 151, 5, 90, 29))]
    for one, completion in zip(requests, engine.generate(requests), strict=True):
        assert len(completion.token_ids) == tokens
        assert is_greedy(model, one.prompt, completion.token_ids)
    assert_idle(engine)
    assert engine._scheduler._windows.free == engine.memory_plan.window_pages
    engine.close()


def test_preempted_requests_answer_as_alone(gpt_oss: tuple[Path, PreTrainedModel]) -> None:
    directory, model = gpt_oss
    engine = windowed_engine(directory, cache_tokens=200, max_sequences=4, max_length=180)
    expect_short_answers(engine._scheduler)
    requests = [request(seed, 60, 3 + seed * 17 % 70) for seed in range(8)]
    for one, completion in zip(requests, engine.generate(requests), strict=True):
        assert is_greedy(model, one.prompt, completion.token_ids)
    assert engine.state().preemptions > 0
    assert engine._scheduler._windows.free == engine.memory_plan.window_pages


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_other_precisions_answer_as_with_all_keys(
    gpt_oss: tuple[Path, PreTrainedModel], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [request(seed, 30, 100) for seed in range(3)]
    answers = [windowed_engine(gpt_oss[0], precision=precision).generate(requests)]
    monkeypatch.setattr(memory, "_own_window", lambda model: 0)
    engine = make_engine(gpt_oss[0], **WINDOWED, precision=precision)
    assert engine.memory_plan.window_pages == 0
    assert engine.generate(requests) == answers[0]


@pytest.mark.parametrize("overlap", [True, *every(False)])
def test_conversations_find_what_they_said(gpt_oss: tuple[Path, PreTrainedModel], overlap: bool) -> None:
    """Twelve windows of a common beginning, and answers that end in other pages."""
    sizes = {"cache_tokens": 1600, "max_sequences": 8, "max_batched_tokens": 48, "overlap": overlap}
    plain, sharing = (windowed_engine(gpt_oss[0], **sizes, prefix_cache=on) for on in (False, True))
    assert converse(plain, 6, 4, 72) == converse(sharing, 6, 4, 72)
    off, on = plain.state(), sharing.state()
    assert on.prefix_cache_hits > 0.8 * on.prefix_cache_queries
    assert on.processed_tokens == off.processed_tokens - on.prefix_cache_hits


def test_pressed_conversations_get_the_same_tokens(gpt_oss: tuple[Path, PreTrainedModel]) -> None:
    """Pages of both kinds are taken while others look for them."""
    plain = windowed_engine(gpt_oss[0], cache_tokens=1600, max_sequences=8)
    pressed = windowed_engine(gpt_oss[0], cache_tokens=124, max_sequences=8, prefix_cache=True, max_length=124)
    expect_short_answers(pressed._scheduler)
    assert converse(plain, 8, 4, 60, cancel_one_in=2) == converse(pressed, 8, 4, 60, cancel_one_in=2)
    assert pressed.state().preemptions > 0
    assert pressed.state().prefix_cache_hits > 0


@pytest.mark.parametrize("overlap", [False, *every(True)])
def test_a_flood_that_rests_and_is_preempted_finds_its_beginnings(
    gpt_oss: tuple[Path, PreTrainedModel], overlap: bool
) -> None:
    """Chunks of 15 tokens, of whose prompts most end in a chunk of few, next to short requests of another group."""
    directory, model = gpt_oss
    sizes = {"max_batched_tokens": 16, "max_sequences": 8, "cache_tokens": 160, "max_length": 120, "overlap": overlap}
    engine = windowed_engine(directory, **sizes, prefix_cache=True)
    expect_short_answers(engine._scheduler)
    begin = request(7, prompt_tokens=32).prompt
    flood = [request_after(begin, kind, 20, 14 + kind % 3, "flood") for kind in range(16)]
    light = [request_after(begin, kind, 6, 1 + kind % 4, "light") for kind in range(16, 28)]
    asked, events, rested_steps = run_next_to(engine, flood, light)
    found = answers([*events, *drain(engine)])
    state = engine.state()
    assert rested_steps > 5 and state.preemptions > 0 and state.prefix_cache_hits > 0
    for request_id, one in asked.items():
        assert is_greedy(model, one.prompt, found[request_id][0])
    assert_idle(engine)
    assert engine._scheduler._windows.free == engine.memory_plan.window_pages


def request_after(begin: list[int], kind: int, tokens: int, prompt_tokens: int, group: str) -> Request:
    own = request(kind, prompt_tokens=prompt_tokens).prompt
    return Request([*begin, *own], tokens, ignore_end_token=True, group=group)


def test_equal_requests_share_what_one_step_computes(gpt_oss: tuple[Path, PreTrainedModel]) -> None:
    engine = windowed_engine(gpt_oss[0], prefix_cache=True, max_batched_tokens=64)
    alike = engine.generate([Request(list(range(3, 50)), 9, ignore_end_token=True)] * 4)
    assert len({tuple(answer.token_ids) for answer in alike}) == 1
    assert engine.state().prefix_cache_hits == 3 * 44


def test_a_beginning_without_its_window_is_computed_again() -> None:
    """Others' prompts push the window of the first one out of its pages, while its other pages stay."""
    scheduler = Scheduler(
        max_batched_tokens=16,
        max_sequences=1,
        page_size=4,
        num_pages=200,
        max_length=64,
        prefix_cache=True,
        window=6,
        window_pages=most_window_pages(6, 4, 1, 16),
    )
    found = []
    for request_id, first in enumerate((0, 0, 100, 200, 0, 0)):
        keys: list[bytes] = []
        extend_keys(keys, range(first, first + 33), 4, "")
        scheduler.add(request_id, 33, 1, keys)
        while scheduler.running or scheduler.waiting:
            scheduler.plan()
        scheduler.prefixes.keep(request_id)
        found.append(scheduler.prefixes.cached_tokens.pop(request_id))
    assert found == [0, 32, 0, 0, 0, 32]


# Memory


def test_the_plan_counts_what_windows_hold() -> None:
    shape, sizes = SHAPES["gpt-oss-120b"], {"max_batched_tokens": 4096, "max_length": 2304, "max_sequences": 640}
    available = 149_557_477_376
    plan, whole = (
        plan_memory_of(one, EngineConfig("fp8", **sizes), "cuda", available)
        for one in (shape, replace(shape, windows=()))
    )
    page = 2 * 8 * 64 * 32 * 18  # bytes of half of the layers
    assert plan.window == 128
    assert plan.window_pages == 640 * 6 + 4096 // 32
    assert plan.cache_bytes == (plan.pages + plan.window_pages + 2) * page
    assert whole.cache_bytes == (whole.pages + 1) * 2 * page
    assert plan.cache_tokens > 1.7 * whole.cache_tokens
    assert available - 10**6 < plan.total_bytes <= available
    assert whole.window_pages == 0


def test_many_sequences_do_not_crowd_out_the_layers_that_see_everything() -> None:
    """Unless they are asked for."""
    available, page = 149_557_477_376, 2 * 8 * 64 * 32 * 18
    plan, asked = (
        plan_memory_of(
            SHAPES["gpt-oss-120b"], EngineConfig("fp8", max_batched_tokens=4096, max_sequences=most), "cuda", available
        )
        for most in (None, 3072)
    )
    assert plan.window_pages * page == pytest.approx(plan.cache_bytes / 4, rel=0.01)
    assert plan.window_pages == most_window_pages(128, 32, plan.max_sequences, 4096)
    assert asked.max_sequences == 3072
    assert plan.cache_tokens > 1.4 * asked.cache_tokens
    small = EngineConfig("fp8", max_batched_tokens=4096, cache_tokens=60_000)
    assert plan_memory_of(SHAPES["gpt-oss-120b"], small, "cuda", available).max_sequences == 3072


def test_few_pages_are_shared_by_all_layers(gpt_oss: tuple[Path, PreTrainedModel]) -> None:
    """Windows of 6 slots may need more pages than the cache has."""
    assert make_engine(gpt_oss[0], **{**SIZES, "max_batched_tokens": 24}).memory_plan.window_pages == 0
