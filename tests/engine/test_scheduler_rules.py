"""Each rule of the scheduler by an example small enough to work out by hand."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from over_admission import expect_short_answers

from examples import examples
from megatoken.engine import page_forecast, pages, scheduler
from megatoken.engine.page_forecast import PRIOR_TOKENS, PageForecast
from megatoken.engine.scheduler import Scheduler
from megatoken.engine.step_plan import StepPlan
from megatoken.errors import CapacityError


def new_scheduler(**changes: float) -> Scheduler:
    sizes = {"max_batched_tokens": 8, "max_sequences": 4, "page_size": 4, "num_pages": 100, "max_length": 64} | changes
    return Scheduler(**sizes)


def rows_of(plan: StepPlan | None) -> list[tuple[int, int, int]]:
    assert plan is not None
    return list(zip(plan.request_id.tolist(), plan.start.tolist(), plan.count.tolist(), strict=True))


def test_decodes_then_the_half_done_prompt_then_arrivals():
    scheduler = new_scheduler()
    scheduler.add(0, 3, 9)
    scheduler.add(5, 9, 9)
    scheduler.add(6, 2, 9)
    scheduler.add(7, 9, 9)
    plan = scheduler.plan()
    assert rows_of(plan) == [(0, 0, 3), (5, 0, 5)]
    assert (plan.decodes, plan.sample.tolist()) == (0, [True, False])
    plan = scheduler.plan()
    assert rows_of(plan) == [(0, 3, 1), (5, 5, 4), (6, 0, 2), (7, 0, 1)]
    assert (plan.decodes, plan.sample.tolist()) == (1, [True, True, True, False])
    plan = scheduler.plan()
    assert rows_of(plan) == [(5, 9, 1), (0, 4, 1), (6, 2, 1), (7, 1, 5)], "decodes longest first"
    assert plan.decodes == 3
    assert [array.dtype for array in (plan.slot, plan.request_id, plan.start, plan.count, plan.sample)] == [
        np.int32, np.int64, np.int32, np.int32, np.bool_
    ]  # fmt: skip
    assert {array.dtype for array in (plan.page_slot, plan.page_index, plan.page)} == {np.dtype(np.int32)}


def test_rows_stay_in_arrival_order_when_slots_are_recycled():
    scheduler = new_scheduler(max_sequences=2)
    for request_id, max_tokens in enumerate([1, 9, 9]):
        scheduler.add(request_id, 1, max_tokens)
    first = scheduler.plan()
    second = scheduler.plan()
    assert second.request_id.tolist() == [1, 2]
    assert second.slot.tolist() == [first.slot[1], first.slot[0]]


def test_a_preempted_sequence_comes_back_as_one_prompt_in_chunks():
    scheduler = new_scheduler(max_batched_tokens=4, page_size=2, num_pages=6)
    expect_short_answers(scheduler)
    scheduler.add(0, 2, 8)
    scheduler.add(1, 2, 7)
    plans = [scheduler.plan() for _ in range(11)]
    assert [rows_of(plan) for plan in plans] == [
        [(0, 0, 2), (1, 0, 2)],
        *([(0, known, 1), (1, known, 1)] for known in range(2, 6)),
        [(0, 6, 1)],
        [(0, 7, 1)],
        [(0, 8, 1)],
        [(1, 0, 4)],
        [(1, 4, 3)],
        [(1, 7, 1)],
    ]
    assert [plan.preempted for plan in plans] == [()] * 5 + [(1,)] + [()] * 5
    assert [plan.decodes for plan in plans] == [0, 2, 2, 2, 2, 1, 1, 1, 0, 0, 1], "rows it knew are no decodes"
    assert [plan.sample.tolist() for plan in plans[8:]] == [[False], [True], [True]]
    assert scheduler.plan() is None


def test_preempted_requests_wait_ahead_of_those_that_never_ran():
    scheduler = new_scheduler(num_pages=18, page_size=1, max_batched_tokens=20, max_sequences=3)
    expect_short_answers(scheduler)
    for request_id in range(3):
        scheduler.add(request_id, 1, 10)
    assert rows_of(scheduler.plan()) == [(0, 0, 1), (1, 0, 1), (2, 0, 1)]
    scheduler.add(3, 1, 10)
    preempted = [scheduler.plan().preempted for _ in range(9)]
    assert preempted == [()] * 5 + [(2,)] + [()] * 2 + [(1,)], "three times 7 pages are too many, and twice 10"
    assert (scheduler.waiting, scheduler.preemptions, scheduler.recomputed_tokens) == (3, 2, 6 + 9)
    plans = [scheduler.plan() for _ in range(6)]
    assert rows_of(plans[0]) == [(1, 0, 10), (2, 0, 7), (3, 0, 1)], "with the tokens they had generated"
    assert (plans[0].decodes, plans[0].sample.tolist()) == (0, [True] * 3)
    assert list(dict.fromkeys(request_id for plan in plans for request_id in plan.request_id.tolist())) == [1, 2, 3]


def test_a_prompt_that_fills_its_pages_takes_another_only_to_go_on():
    scheduler = new_scheduler(num_pages=2, max_length=9)
    scheduler.add(0, 8, 1)
    assert scheduler.plan().page_index.tolist() == [0, 1]
    assert scheduler.plan() is None
    scheduler.add(1, 4, 5)
    assert [scheduler.plan().page_index.tolist() for _ in range(5)] == [[0], [1], [], [], []]
    assert scheduler.plan() is None


def test_who_is_admitted_finds_the_pages_of_all_it_knows_free_at_once():
    """The forecast counts tokens, 24 at the end of the third, which fit; the pages of all prompts are 7 of 6."""
    scheduler = new_scheduler(max_batched_tokens=32, page_size=4, num_pages=6)
    for request_id, (prompt_tokens, max_tokens) in enumerate([(5, 4), (5, 4), (9, 2)]):
        scheduler.add(request_id, prompt_tokens, max_tokens)
    assert rows_of(scheduler.plan()) == [(0, 0, 5), (1, 0, 5)]
    assert scheduler.free_pages == 2


def test_what_can_never_fit_is_refused_with_the_numbers():
    scheduler = new_scheduler(num_pages=4, max_length=20)
    with pytest.raises(CapacityError, match=r"prompt of 15 tokens and 6 new .* longest sequence of 20 tokens"):
        scheduler.add(0, 15, 6)
    with pytest.raises(CapacityError, match=r"prompt of 15 tokens and 3 new .* 5 pages of 4 tokens, the cache has 4"):
        scheduler.add(0, 15, 3)
    scheduler.add(0, 15, 2)
    assert scheduler.waiting == 1


@pytest.mark.parametrize(("request_id", "prompt_tokens", "max_tokens"), [(3, 1, 1), (4, 0, 1), (4, 1, 0)])
def test_wrong_use_of_add_is_told(request_id: int, prompt_tokens: int, max_tokens: int):
    scheduler = new_scheduler()
    scheduler.add(3, 1, 1)
    with pytest.raises(ValueError, match="must be above 3"):
        scheduler.add(request_id, prompt_tokens, max_tokens)


def test_ending_what_is_not_there_is_told():
    scheduler = new_scheduler()
    scheduler.add(0, 1, 1)
    scheduler.add(1, 1, 2)
    scheduler.plan()
    assert scheduler.end(1, answered=False)
    assert not any(scheduler.end(request_id, answered=False) for request_id in (0, 1, 2))
    assert scheduler.free_pages == 100
    assert scheduler.free_pages == 100


@pytest.mark.parametrize("change", [{"max_batched_tokens": 0}, {"num_pages": 0}])
def test_impossible_sizes_are_refused(change: dict):
    with pytest.raises(ValueError, match="at least 1"):
        new_scheduler(**change)


@pytest.mark.parametrize("module", [page_forecast, pages, scheduler])
def test_no_torch(module):
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(Path(module.__file__).read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert imported <= {"__future__", "collections", "dataclasses", "megatoken", "numpy", "typing"}


def test_admission_looks_to_the_end_of_every_resident():
    scheduler = new_scheduler(num_pages=22, page_size=1, max_batched_tokens=64)
    scheduler.add(0, 4, 7)  # holds 10 tokens after 6 more steps
    scheduler.add(1, 8, 3)  # holds 10 after 2, when the first holds 6; the first goes on to 10 alone
    scheduler.add(2, 2, 4)  # with it 6 + 10 + 4 after 2 steps, and 7 + 5 after 3
    scheduler.add(3, 1, 2)  # ends after 1 step, when there are 5 + 9 + 3 + 2
    scheduler.add(4, 2, 3)  # would fit now and after 1 step, not after 2: 6 + 10 + 4 + 4
    assert rows_of(scheduler.plan()) == [(0, 0, 4), (1, 0, 8), (2, 0, 2), (3, 0, 1)]
    assert rows_of(scheduler.plan()) == [(1, 8, 1), (0, 4, 1), (2, 2, 1), (3, 1, 1)]
    assert rows_of(scheduler.plan()) == [(1, 9, 1), (0, 5, 1), (2, 3, 1), (4, 0, 2)]
    while scheduler.plan() is not None:
        pass
    assert scheduler.preemptions == 0


@settings(max_examples=examples(300), deadline=None)
@given(
    page_size=st.integers(1, 5),
    num_pages=st.integers(1, 60),
    sequences=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), max_size=12),
)
def test_what_is_admitted_fits_until_its_end(page_size: int, num_pages: int, sequences: list):
    """To the token; in whole pages a sequence on its way may hold a part of a page more than it counts for."""
    forecast = PageForecast(np.empty(0, np.int64), np.empty(0, np.int64), page_size, num_pages)
    admitted: list[tuple[int, int]] = []

    def held(step: int) -> int:
        return sum(-(-(known + step) // page_size) for known, steps in admitted if step <= steps)

    for known, steps in sequences:
        before = list(admitted)
        admitted.append((known, steps))
        if not forecast.admit(known, known + steps):
            admitted = before
    parts = max(len(admitted) - 1, 0) if page_size > 1 else 0
    assert max(held(step) for step in range(21)) <= num_pages + parts
    known, end = (np.array([k + e * s for k, s in admitted], dtype=np.int64) for e in (0, 1))
    at_once = PageForecast(known, end, page_size, num_pages)
    assert at_once.admit(3, 9) == forecast.admit(3, 9)


def test_admission_learns_how_much_of_its_limit_an_answer_takes():
    admitted = []
    for answered in (True, False):
        scheduler = new_scheduler(num_pages=33, max_batched_tokens=64, max_length=100, max_sequences=9)
        answers = PRIOR_TOKENS // 4
        for request_id in range(answers):
            scheduler.add(request_id, 4, 40)
            scheduler.plan()
            scheduler.end(request_id, answered=answered)
        for request_id in range(answers, answers + 9):
            scheduler.add(request_id, 4, 40)
        admitted.append(len(scheduler.plan().slot))
    assert admitted == [9, 3], "a cancelled answer says nothing"


def test_a_short_answer_that_ends_first_does_not_stand_for_those_still_running():
    scheduler = new_scheduler(num_pages=25_300, max_batched_tokens=4096, max_length=2048, max_sequences=4096)
    for request_id in range(100):
        scheduler.add(request_id, 1, 1000)
    for _ in range(50):
        scheduler.plan()
    for request_id in range(20):
        scheduler.end(request_id, answered=True)  # 50 of 1,000 tokens, but 80 others have as many and go on
    for request_id in range(100, 600):
        scheduler.add(request_id, 1, 1000)
    assert 150 < len(scheduler.plan().slot) - 80 < 300, "all 500 if only what has ended counted"
