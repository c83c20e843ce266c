"""Loads and their phases in simulated time: what is due when, when a point ends and why."""

import itertools

import numpy as np
import pytest

from megatoken.datasets.requests import Dataset
from megatoken.engine.request import Request
from megatoken.errors import UsageError
from megatoken.harness.sweep import point as point_module
from megatoken.harness.sweep.loads import ClosedLoop, OpenLoop, arrival_seconds, passes
from megatoken.harness.sweep.plan import SweepPlan, values_of
from megatoken.harness.sweep.point import EARLY_NS, Phases, PointLoad
from megatoken.harness.sweep.stages import (
    Stage,
    StagedClosedLoop,
    StagesPlan,
    load_at,
    staged_seconds,
    stages_of,
    time_of,
)

SECOND = 10**9


def test_a_closed_loop_sends_one_request_for_each_that_ends() -> None:
    load = ClosedLoop(iter(range(100)), 3)
    load.start(5)
    assert [tuple(arrival) for arrival in load.take_due(6)] == [(5, 0), (5, 1), (5, 2)]
    assert load.take_due(7) == []
    assert load.next_due_ns() is None
    load.ended(1, 9)
    assert load.next_due_ns() == 9
    assert [tuple(arrival) for arrival in load.take_due(11)] == [(9, 3)]


def test_an_open_loop_does_not_wait_for_answers() -> None:
    load = OpenLoop([(0.5, 7), (0.5, 8), (2.0, 9)])
    load.start(SECOND)
    assert load.next_due_ns() == 1.5 * SECOND
    assert load.take_due(SECOND) == []
    assert [arrival.row for arrival in load.take_due(2 * SECOND)] == [7, 8]
    assert [arrival.due_ns for arrival in load.take_due(9 * SECOND)] == [3 * SECOND]
    assert load.next_due_ns() is None


@pytest.mark.parametrize(
    ("kind", "burstiness", "variation"), [("constant", 1.0, 0.0), ("poisson", 1.0, 1.0), ("gamma", 0.25, 2.0)]
)
def test_arrivals_have_their_rate_and_variation(kind: str, burstiness: float, variation: float) -> None:
    times = np.array(list(itertools.islice(arrival_seconds(kind, 20.0, burstiness, (3,)), 40_000)))  # type: ignore[arg-type]
    gaps = np.diff(times, prepend=0.0)
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, abs=0.06)


def test_every_pass_over_a_data_set_has_every_row_once() -> None:
    rows = list(itertools.islice(passes(5, (1,)), 10))
    assert sorted(rows[:5]) == sorted(rows[5:]) == list(range(5))
    assert rows[:5] != rows[5:]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> "Clock":
    made = Clock()
    monkeypatch.setattr(point_module, "time", made)
    return made


class Clock:
    """Stands in for the module ``time``."""

    def __init__(self) -> None:
        self.now_ns = 0

    def monotonic_ns(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


def drive(load: PointLoad, clock: Clock, serve_seconds: float, servers: int, longest: float = 100.0) -> None:
    """Serves requests first come, first served, each for ``serve_seconds``, until no more come."""
    busy: list[tuple[int, int]] = []
    waiting: list[int] = []
    while not load.all_issued and clock.now_ns < longest * SECOND:
        before = load.issued
        load.take_issued(0.0)
        waiting += range(before, load.issued)
        while waiting and len(busy) < servers:
            busy.append((clock.now_ns + round(serve_seconds * 1e9), waiting.pop(0)))
        for end in [one for one in busy if one[0] <= clock.now_ns]:
            busy.remove(end)
            load.complete(end[1], 10)
        clock.now_ns += SECOND // 100


def test_a_window_begins_when_every_place_has_been_through_an_answer(clock: Clock) -> None:
    load = PointLoad(ClosedLoop(passes(10, (0,)), 4), Phases(1.0, 10.0))
    drive(load, clock, serve_seconds=2.0, servers=4)
    window = load.window_seconds(0)
    assert window is not None
    assert window == pytest.approx((2.0, 12.0), abs=0.05)
    assert load.ended_by is None
    assert clock.now_ns / SECOND == pytest.approx(14.0, abs=2.1)  # until those due in the window have ended


def test_an_open_loop_beyond_what_is_served_ends_early(clock: Clock) -> None:
    arrivals = zip(arrival_seconds("poisson", 20.0, 1.0, (0,)), passes(10, (0,)), strict=False)
    load = PointLoad(OpenLoop(arrivals), Phases(1.0, 30.0))
    drive(load, clock, serve_seconds=0.5, servers=5)  # 10 a second
    assert load.ended_by is not None
    assert load.ended_by["code"] == "OVERLOAD"
    assert clock.now_ns / SECOND < 1.0 + 30.0 + 3 * 30.0
    assert load.all_issued


def test_an_open_loop_that_is_served_runs_to_its_end(clock: Clock) -> None:
    arrivals = zip(arrival_seconds("poisson", 6.0, 1.0, (0,)), passes(10, (0,)), strict=False)
    load = PointLoad(OpenLoop(arrivals), Phases(1.0, 30.0))
    drive(load, clock, serve_seconds=0.5, servers=5)
    assert load.ended_by is None
    window = load.window_seconds(0)
    assert window is not None
    assert window[1] - window[0] == pytest.approx(30.0, abs=0.05)


@pytest.mark.parametrize("step_ns", [SECOND // 1000, SECOND // 40])
def test_requests_given_before_they_are_due_count_in_the_phase_in_which_they_are_due(
    clock: Clock, step_ns: int
) -> None:
    arrivals = zip(arrival_seconds("poisson", 400.0, 1.0, (0,)), passes(10, (0,)), strict=False)
    load = PointLoad(OpenLoop(arrivals), Phases(1.0, 5.0), early=True)
    under_way: list[tuple[int, int]] = []
    due_ns: list[int] = []
    early = 0
    while not load.all_issued:
        now_ns = clock.now_ns
        assert now_ns < 8 * SECOND  # the point ends once those due in the window have
        for one in load.take_issued(0.0):
            assert one.due_ns is not None and one.issued_ns == max(now_ns, one.due_ns)
            assert one.due_ns <= now_ns + EARLY_NS
            early += one.due_ns > now_ns
            under_way.append((one.due_ns + SECOND // 10, len(due_ns)))
            due_ns.append(one.due_ns)
        while under_way and under_way[0][0] <= now_ns:
            load.complete(under_way.pop(0)[1], 10)
        clock.now_ns += step_ns
    assert early > len(due_ns) / 4 and load.ended_by is None
    window = load.window_seconds(0)
    assert window is not None and window[1] - window[0] == pytest.approx(5.0, abs=0.06)
    assert window[1] + 0.1 <= clock.now_ns / SECOND <= window[1] + 0.2  # not before the last of them, nor long after


def test_a_target_that_fails_every_request_is_given_up(clock: Clock) -> None:
    load = PointLoad(ClosedLoop(passes(10, (0,)), 2), Phases(1.0, 10.0))
    while not load.all_issued:
        for number in range(load.issued, load.issued + sum(len(one.rows) for one in load.take_issued(0.0))):
            load.complete(number, 0)
        clock.now_ns += 1000
    assert load.ended_by is not None
    assert load.ended_by["code"] == "FAILING"
    assert load.issued < 40


def test_a_target_that_fails_all_at_once_leaves_no_window_without_length(clock: Clock) -> None:
    load = PointLoad(ClosedLoop(passes(10, (0,)), 32), Phases(1.0, 10.0))
    load.take_issued(0.0)
    clock.now_ns += 2 * SECOND  # the window begins, and the point ends, in the next turn
    for number in range(load.issued):
        load.complete(number, 0)
    load.take_issued(0.0)
    assert load.all_issued and load.ended_by is not None and load.ended_by["code"] == "FAILING"
    assert load.window_seconds(0) is None


def test_a_load_that_ends_ends_the_point(clock: Clock) -> None:
    load = PointLoad(OpenLoop([(0.0, 1), (3.0, 2)]), Phases(0.0, None))
    drive(load, clock, serve_seconds=0.5, servers=1)
    assert load.issued == 2
    assert load.all_issued


@pytest.mark.parametrize(
    ("text", "values"),
    [("1,2,4", (1, 2, 4)), ("1-8", (1, 2, 4, 8)), ("3-10", (3, 6, 10)), ("8,1-2", (1, 2, 8)), ("5", (5,))],
)
def test_values_of_a_flag(text: str, values: tuple[float, ...]) -> None:
    assert values_of("--concurrency", text, whole=True) == values


@pytest.mark.parametrize("text", ["", "0", "a", "1,,2", "8-2", "1.5", "-3", "inf", "nan"])
def test_bad_values_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--concurrency"):
        values_of("--concurrency", text, whole=True)


STAGES = stages_of("--concurrency", "4@2,4-24@10,24-2@4,8@3", whole=True)


def test_stages_hold_a_load_or_change_it_evenly() -> None:
    assert STAGES[1] == Stage(4.0, 24.0, 10.0)
    assert [load_at(STAGES, at) for at in (0, 1.9, 2, 7, 11.999, 12, 14, 16, 100)] == pytest.approx(
        [4, 4, 4, 14, 23.998, 24, 13, 8, 8], abs=1e-2
    )
    assert [time_of(STAGES, load, after) for load, after in ((4, 0), (5, 0), (24, 0), (8, 15.5), (25, 0))] == [
        *(0, 2.5, 12, 16, None)
    ]


@pytest.mark.parametrize(
    "text", ["4", "4@", "@4", "4@0.5", "0@3", "4-0@3", "4.5@3", "4@3,", "4@inf", "4@nan", "4@90000"]
)
def test_bad_stages_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--concurrency"):
        stages_of("--concurrency", text, whole=True)


def test_a_staged_closed_loop_keeps_as_many_requests_under_way_as_asked_for() -> None:
    load, under_way, ends = StagedClosedLoop(passes(10, (0,)), STAGES), 0, []
    load.start(0)
    for moment in range(0, 25 * SECOND, SECOND // 100):
        for end in [one for one in ends if one <= moment]:
            ends.remove(end)
            under_way -= 1
            load.ended(0, end)
        for arrival in load.take_due(moment):
            assert moment - SECOND // 50 <= arrival.due_ns <= moment
            under_way += 1
            ends.append(moment + SECOND // 5)
        lately = [load_at(STAGES, max(0.0, moment / SECOND - ago)) + 1e-6 for ago in np.arange(0, 0.22, 0.005)]
        assert int(lately[0]) <= under_way <= int(max(lately))  # those of before run to their ends
        due = load.next_due_ns()
        assert due is None or due > moment


@pytest.mark.parametrize("kind", ["constant", "poisson"])
def test_staged_arrivals_have_the_rate_of_their_stage(kind: str) -> None:
    stages = stages_of("--rates", "50@20,50-350@40,350-20.5@20,20.5@20", whole=False)
    counts = arrival_seconds(kind, 1.0, 1.0, (3,))  # type: ignore[arg-type]
    times = np.array(list(itertools.islice(staged_seconds(stages, counts), 14_000)))
    assert (np.diff(times) >= 0).all()
    edges = np.arange(0, 100.5, 0.5)
    expected = [(load_at(stages, low) + load_at(stages, high - 1e-9)) / 4 for low, high in itertools.pairwise(edges)]
    found = np.histogram(times, edges)[0]
    assert np.cumsum(found) == pytest.approx(np.cumsum(expected), abs=2 if kind == "constant" else 450)
    assert found.sum() == pytest.approx(1000 + 8000 + 3705 + 410, rel=0.03)


def test_stages_run_on_where_an_open_loop_would_have_been_stopped(clock: "Clock") -> None:
    plan = StagesPlan("rate", stages_of("--rates", "5@10,40@20,5@30", whole=False), "poisson", 1.0)
    rows = np.ones(10, np.int64)
    data_set = Dataset("x", "x", [Request([1])] * 10, "", rows, rows, rows > 0, ())
    load = PointLoad(plan.setup(1.0, data_set, (0,), None).load, plan.phases)
    drive(load, clock, serve_seconds=0.5, servers=5)  # 10 a second
    assert load.ended_by is None
    assert load.window_seconds(0) == pytest.approx((0.0, 60.0), abs=0.05)


def test_a_plan_without_values_doubles_or_takes_shares_of_the_estimate() -> None:
    phases = Phases(1.0, 10.0)
    closed = SweepPlan("concurrency", (), "poisson", 1.0, phases)
    assert list(closed.loads(10.0))[:4] == [1, 2, 4, 8]
    assert closed.finds_its_end
    assert list(SweepPlan("rate", (), "poisson", 1.0, phases).loads(10.0))[:3] == [1.0, 2.0, 4.0]
    assert not SweepPlan("concurrency", (1, 2), "poisson", 1.0, phases).finds_its_end
