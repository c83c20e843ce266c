"""The fair queue: shares, limits, nothing lost; on made-up arrivals and ends."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatoken.serve.fair_queue import OUTPUT_TOKEN_COST, FairQueue
from megatoken.serve.messages import Busy
from megatoken.serve.tenants import Tenant

LARGE = 10**9


def queue_of(**changes: object) -> FairQueue[object]:
    arguments = {"max_queued": LARGE, "max_running": LARGE, "cache_tokens": LARGE, "reserve": False} | changes
    sizes = [arguments.pop(one, LARGE) for one in ("max_running", "cache_tokens", "max_unstarted_tokens")]
    queue: FairQueue[object] = FairQueue(**arguments)  # type: ignore[arg-type]
    queue.resize(*sizes)  # type: ignore[arg-type]
    return queue


REQUESTS = st.lists(st.tuples(st.integers(1, 500), st.integers(1, 500)), min_size=1, max_size=60)


@given(st.lists(st.tuples(st.floats(0.1, 10), REQUESTS), min_size=2, max_size=5))
def test_tenants_with_work_queued_get_tokens_by_weight(tenants: list[tuple[float, list[tuple[int, int]]]]) -> None:
    """While all have work queued, weighted tokens differ by no more than the largest single request costs."""
    queue = queue_of()
    costs: dict[str, float] = {}
    left = {}
    largest = 0.0
    for number, (weight, requests) in enumerate(tenants):
        tenant = Tenant(f"t{number}", weight)
        costs[tenant.name] = 0.0
        left[tenant.name] = len(requests)
        for prompt, answer in requests:
            queue.add(tenant, (tenant, prompt, answer), prompt, answer, 0.0)
            largest = max(largest, (prompt + OUTPUT_TOKEN_COST * answer) / weight)
    while all(left.values()):
        taken = queue.take()
        assert isinstance(taken, tuple)
        tenant, prompt, answer = taken
        left[tenant.name] -= 1
        costs[tenant.name] += (prompt + OUTPUT_TOKEN_COST * answer) / tenant.weight
        queue.served(tenant, answer)
        queue.ended(tenant, prompt, answer, answer)
        assert max(costs.values()) - min(costs.values()) <= largest * 1.000001


ACTIONS = st.tuples(st.integers(0, 1), st.booleans(), st.integers(1, 500), st.integers(1, 500))


@given(st.lists(ACTIONS, max_size=60), st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), st.data())
def test_after_any_history_tenants_share_from_the_moment_that_both_have_work(
    history: list[tuple[int, bool, int, int]], weights: tuple[float, float], data: st.DataObject
) -> None:
    """Each may start with one request's worth of credit or debt, and a request is not divided."""
    queue = queue_of()
    tenants = [Tenant("a", weights[0]), Tenant("b", weights[1])]

    def cost(which: int, prompt: int, answer: int) -> float:
        return (prompt + OUTPUT_TOKEN_COST * answer) / weights[which]

    def serve() -> tuple[int, float] | None:
        taken = queue.take()
        if taken is None:
            return None
        assert isinstance(taken, tuple)
        which, prompt, answer = taken
        queue.served(tenants[which], answer)
        queue.ended(tenants[which], prompt, answer, answer)
        return which, cost(*taken)

    for which, add, prompt, answer in history:
        if add:
            queue.add(tenants[which], (which, prompt, answer), prompt, answer, 0.0)
        else:
            serve()
    for which in data.draw(st.permutations([0, 1])):
        for _ in range(100):
            queue.add(tenants[which], (which, 500, 500), 500, 500, 0.0)
    largest = max(cost(which, 500, 500) for which in (0, 1))
    served = [0.0, 0.0]
    while all(one.queued for one in queue.tenants()):
        taken = serve()
        assert taken is not None
        served[taken[0]] += taken[1]
        assert abs(served[0] - served[1]) <= 2 * largest * 1.000001


def test_a_tenant_that_had_an_idle_server_for_itself_is_not_starved_by_the_next_one() -> None:
    queue = queue_of()
    first, second = Tenant("first"), Tenant("second")
    for _ in range(1000):
        queue.add(first, "first", 1000, 10, 0.0)
        queue.take()
    for _ in range(50):
        queue.add(second, "second", 1000, 10, 1.0)
        queue.add(first, "first", 1000, 10, 1.0)
    assert 9 <= [queue.take() for _ in range(20)].count("first") <= 11


def test_priorities_order_the_requests_of_one_tenant_and_change_no_share() -> None:
    queue = queue_of()
    for number, priority in enumerate((0, 5, -1, 0, 5, -1)):
        queue.add(Tenant("a"), f"a{number}", 100, 10, 0.0, priority)
    for number in range(6):
        queue.add(Tenant("b"), f"b{number}", 100, 10, 0.0, 9)
    taken = [str(queue.take()) for _ in range(12)]
    assert [one for one in taken if one[0] == "a"] == ["a2", "a5", "a0", "a3", "a1", "a4"]
    assert [one for one in taken if one[0] == "b"] == [f"b{number}" for number in range(6)]
    assert all({taken[at][0], taken[at + 1][0]} == {"a", "b"} for at in range(0, 12, 2))


def test_answers_that_may_be_long_run_together() -> None:
    queue = queue_of(max_running=8, cache_tokens=32_000, reserve=True)
    for _ in range(8):
        queue.add(Tenant("chats"), "chat", 100, 30_000, 0.0)
    assert [queue.take() for _ in range(8)] == ["chat"] * 7 + [None]
    queue.ended(Tenant("chats"), 100, 30_000, 0)
    queue.served(Tenant("chats"), 26_000)  # now they hold most of the cache
    assert queue.take() is None


def test_prompts_that_one_tenant_has_in_the_engine_hold_no_other_up() -> None:
    queue = queue_of(max_unstarted_tokens=250)
    for number in range(5):
        queue.add(Tenant("flood"), f"flood {number}", 100, 10, 0.0)
    assert [queue.take() for _ in range(4)] == ["flood 0", "flood 1", "flood 2", None]
    queue.add(Tenant("other"), "other", 100, 10, 1.0)
    assert queue.take() == "other"
    queue.started(Tenant("flood"), 100)
    assert [queue.take() for _ in range(2)] == ["flood 3", None]


def test_a_tenant_that_comes_late_starts_level_and_is_served_next() -> None:
    queue = queue_of()
    flood, late = Tenant("flood"), Tenant("late")
    for number in range(100):
        queue.add(flood, f"flood {number}", 1000, 10, 0.0)
    for _ in range(50):
        queue.take()
    queue.add(late, "late 0", 10, 10, 1.0)
    queue.add(late, "late 1", 10, 10, 1.0)
    taken = [queue.take() for _ in range(3)]
    assert "late 0" in taken[:2]
    assert taken.count("late 0") + taken.count("late 1") <= 2
    counters = {one.tenant.name: one.counter for one in queue.tenants()}
    assert counters["late"] >= 49_000  # being away has saved nothing up


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, 2), st.integers(1, 300)),
            st.tuples(st.just("take"), st.just(0), st.just(0)),
            st.tuples(st.just("end"), st.integers(0, 50), st.just(0)),
            st.tuples(st.just("remove"), st.integers(0, 50), st.just(0)),
        ),
        max_size=200,
    )
)
def test_every_request_leaves_once_in_order_within_the_limits(steps: list[tuple[str, int, int]]) -> None:
    queue = queue_of(max_queued=20, max_running=8, cache_tokens=2000, reserve=True)
    tenants = [Tenant("a"), Tenant("b", max_running=2), Tenant("c", max_queued=3)]
    waiting: list[tuple[int, Tenant, int]] = []
    running: list[tuple[int, Tenant, int]] = []
    for number, (what, which, size) in enumerate(steps):
        if what == "add":
            item = (number, tenants[which], size)
            own = [one for one in waiting if one[1] is tenants[which]]
            full = len(waiting) == 20 or (tenants[which].max_queued is not None and len(own) == 3)
            if full:
                with pytest.raises(Busy):
                    queue.add(tenants[which], item, size, size, 0.0)
            else:
                queue.add(tenants[which], item, size, size, 0.0)
                waiting.append(item)
        elif what == "take":
            taken = queue.take()
            if taken is not None:
                assert isinstance(taken, tuple)
                first = next(one for one in waiting if one[1] is taken[1])
                assert taken is first
                waiting.remove(first)
                running.append(first)
        elif what == "end" and running:
            _, tenant, size = running.pop(which % len(running))
            queue.ended(tenant, size, size, 0)
        elif what == "remove" and waiting:
            item = waiting.pop(which % len(waiting))
            assert queue.remove(item[1], item)
            assert not queue.remove(item[1], item)
        assert queue.waiting == len(waiting)
        assert {one.tenant.name: one.running for one in queue.tenants()} == {
            one.tenant.name: sum(item[1] is one.tenant for item in running) for one in queue.tenants()
        }
        assert sum(item[1] is tenants[1] for item in running) <= 2
        assert all(sum(item[1] is tenant for item in running) <= 7 for tenant in tenants)
    assert sorted(item[0] for item in queue.drain()) == sorted(item[0] for item in waiting)  # type: ignore[index]


def test_the_reserve_leaves_room_for_another_tenant() -> None:
    queue = queue_of(max_running=8, cache_tokens=800, reserve=True)
    flood, other = Tenant("flood"), Tenant("other")
    for _ in range(20):
        queue.add(flood, "flood", 10, 90, 0.0)
    assert [queue.take() for _ in range(8)] == ["flood"] * 7 + [None]
    queue.add(other, "other", 10, 90, 0.0)
    assert queue.take() == "other"


@pytest.mark.parametrize(("limit", "size"), [("requests_per_minute", 1), ("tokens_per_minute", 10)])
def test_limits_per_minute_refill_with_time(limit: str, size: int) -> None:
    queue = queue_of()
    tenant = replace(Tenant("t"), **{limit: 6 * size})
    for _ in range(6):
        queue.add(tenant, "one", size, 1, 0.0)
    with pytest.raises(Busy) as refused:
        queue.add(tenant, "one", size, 1, 0.0)
    assert 9 <= refused.value.retry_after_seconds <= 11
    queue.add(tenant, "one", size, 1, float(refused.value.retry_after_seconds))


def test_tokens_of_answers_count_against_the_limit() -> None:
    queue = queue_of()
    tenant = Tenant("t", tokens_per_minute=100)
    queue.add(tenant, "one", 10, 90, 0.0)
    queue.take()
    queue.served(tenant, 150)
    with pytest.raises(Busy):
        queue.add(tenant, "two", 1, 1, 30.0)
    queue.add(tenant, "two", 1, 1, 60.0)
