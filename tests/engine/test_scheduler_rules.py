"""Each rule of the scheduler by an example small enough to work out by hand."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

from megatoken.engine import pages, scheduler
from megatoken.engine.scheduler import Scheduler, StepPlan
from megatoken.errors import CapacityError


def new_scheduler(**changes: float) -> Scheduler:
    sizes = {"max_rows": 8, "max_sequences": 4, "page_size": 4, "num_pages": 100, "max_length": 64} | changes
    return Scheduler(**sizes)


def rows_of(plan: StepPlan | None) -> list[tuple[int, int, int]]:
    assert plan is not None
    return list(zip(plan.ticket.tolist(), plan.start.tolist(), plan.count.tolist(), strict=True))


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
    assert rows_of(plan) == [(0, 4, 1), (5, 9, 1), (6, 2, 1), (7, 1, 5)]
    assert plan.decodes == 3
    assert [array.dtype for array in (plan.slot, plan.ticket, plan.start, plan.count, plan.sample)] == [
        np.int32, np.int64, np.int32, np.int32, np.bool_
    ]  # fmt: skip
    assert {array.dtype for array in (plan.page_slot, plan.page_index, plan.page)} == {np.dtype(np.int32)}


def test_rows_stay_in_arrival_order_when_slots_are_recycled():
    scheduler = new_scheduler(max_sequences=2)
    for ticket, max_tokens in enumerate([1, 9, 9]):
        scheduler.add(ticket, 1, max_tokens)
    first = scheduler.plan()
    second = scheduler.plan()
    assert second.ticket.tolist() == [1, 2]
    assert second.slot.tolist() == [first.slot[1], first.slot[0]]


def test_a_preempted_sequence_comes_back_as_one_prompt_in_chunks():
    scheduler = new_scheduler(max_rows=4, page_size=2, num_pages=6, reserve=0.0)
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
    scheduler = new_scheduler(num_pages=18, page_size=1, max_rows=20, reserve=0.0)
    for ticket in range(3):
        scheduler.add(ticket, 1, 10)
    assert rows_of(scheduler.plan()) == [(0, 0, 1), (1, 0, 1), (2, 0, 1)]
    scheduler.add(3, 1, 10)
    preempted = [scheduler.plan().preempted for _ in range(9)]
    assert preempted == [()] * 5 + [(2,)] + [()] * 2 + [(1,)], "three times 7 pages are too many, and twice 10"
    assert (scheduler.waiting, scheduler.preemptions, scheduler.recomputed_tokens) == (3, 2, 6 + 9)
    plans = [scheduler.plan() for _ in range(6)]
    assert rows_of(plans[0]) == [(1, 0, 10)], "with the tokens it had generated"
    assert (plans[0].decodes, plans[0].sample.tolist()) == (0, [True])
    assert rows_of(plans[1])[0] == (2, 0, 7)
    assert list(dict.fromkeys(ticket for plan in plans for ticket in plan.ticket.tolist())) == [1, 2, 3]


def test_admission_leaves_the_reserve_free_unless_nothing_is_resident():
    scheduler = new_scheduler(num_pages=10, max_rows=64, reserve=0.2)
    scheduler.add(0, 36, 4)
    scheduler.add(1, 1, 1)
    assert rows_of(scheduler.plan()) == [(0, 0, 36)]
    scheduler.end(0, answered=False)
    scheduler.add(2, 28, 4)
    scheduler.add(3, 1, 1)
    assert rows_of(scheduler.plan()) == [(1, 0, 1), (2, 0, 28)]
    assert scheduler.free_pages == 3, "1 is done, its page is free again"
    assert rows_of(scheduler.plan()) == [(2, 28, 1)], "2 grows by a page, 3 would take one of the last two"
    scheduler.end(2, answered=False)
    assert rows_of(scheduler.plan()) == [(3, 0, 1)]


def test_a_prompt_that_fills_its_pages_takes_another_only_to_go_on():
    scheduler = new_scheduler(num_pages=2, max_length=9)
    scheduler.add(0, 8, 1)
    assert scheduler.plan().page_index.tolist() == [0, 1]
    assert scheduler.plan() is None
    scheduler.add(1, 4, 5)
    assert [scheduler.plan().page_index.tolist() for _ in range(5)] == [[0], [1], [], [], []]
    assert scheduler.plan() is None


def test_what_can_never_fit_is_refused_with_the_numbers():
    scheduler = new_scheduler(num_pages=4, max_length=20)
    with pytest.raises(CapacityError, match=r"prompt of 15 tokens and 6 new .* longest sequence of 20 tokens"):
        scheduler.add(0, 15, 6)
    with pytest.raises(CapacityError, match=r"prompt of 15 tokens and 3 new .* 5 pages of 4 tokens, the cache has 4"):
        scheduler.add(0, 15, 3)
    scheduler.add(0, 15, 2)
    assert scheduler.waiting == 1


@pytest.mark.parametrize(("ticket", "prompt_tokens", "max_tokens"), [(3, 1, 1), (4, 0, 1), (4, 1, 0)])
def test_wrong_use_of_add_is_told(ticket: int, prompt_tokens: int, max_tokens: int):
    scheduler = new_scheduler()
    scheduler.add(3, 1, 1)
    with pytest.raises(ValueError, match="must be above 3"):
        scheduler.add(ticket, prompt_tokens, max_tokens)


def test_ending_what_is_not_there_is_told():
    scheduler = new_scheduler()
    scheduler.add(0, 1, 1)
    scheduler.add(1, 1, 2)
    scheduler.plan()
    assert scheduler.end(1, answered=False)
    assert not any(scheduler.end(ticket, answered=False) for ticket in (0, 1, 2))
    assert scheduler.free_pages == 100
    assert scheduler.free_pages == 100


@pytest.mark.parametrize("change", [{"max_rows": 0}, {"num_pages": 0}, {"reserve": -0.1}, {"reserve": 1.1}])
def test_impossible_sizes_are_refused(change: dict):
    with pytest.raises(ValueError, match="at least 1"):
        new_scheduler(**change)


@pytest.mark.parametrize("module", [pages, scheduler])
def test_no_torch(module):
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(Path(module.__file__).read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert imported <= {"__future__", "collections", "dataclasses", "math", "megatoken", "numpy", "typing"}


def test_admission_counts_residents_halfway_to_their_ends():
    scheduler = new_scheduler(num_pages=20, page_size=4, max_rows=64, max_length=100, reserve=0.0)
    for ticket in range(4):
        scheduler.add(ticket, 4, 40)
    assert rows_of(scheduler.plan()) == [(0, 0, 4), (1, 0, 4), (2, 0, 4)], "each is expected to hold 24 tokens"


def test_admission_learns_how_much_of_its_limit_an_answer_takes():
    sizes = {"num_pages": 20, "page_size": 4, "max_rows": 64, "max_length": 100, "max_sequences": 9, "reserve": 0.0}
    admitted = []
    for answered in (True, False):
        scheduler = new_scheduler(**sizes)
        for ticket in range(200):
            scheduler.add(ticket, 4, 40)
            scheduler.plan()
            scheduler.end(ticket, answered=answered)
        for ticket in range(200, 209):
            scheduler.add(ticket, 4, 40)
        admitted.append(len(scheduler.plan().slot))
    assert admitted == [9, 3], "a cancelled answer says nothing"
