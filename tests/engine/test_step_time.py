"""What steps cost, learnt from steps of known prices; and a queue that is served at the budgets that follow."""

import math
import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatoken.engine.prompt_limit import PromptLimit
from megatoken.engine.scheduler import Scheduler
from megatoken.engine.step_time import LEAST_PROMPT_SHARE, MOST_SAVED, StepTime, plan_within

# Seconds of a step, of a row and of a cached token: 70 B on one H200, 9.5 M on two cores.
PRICES = [(0.018, 1.05e-4, 4e-8), (0.001, 1.5e-4, 1e-7), (0.0, 1e-3, 0.0), (0.02, 0.0, 1e-7)]


def cost(prices: tuple[float, float, float], rows: int, cached_tokens: int) -> float:
    return prices[0] + prices[1] * rows + prices[2] * cached_tokens


def taught(prices: tuple[float, float, float], target: float, noise: float = 0.0, steps: int = 400) -> StepTime:
    rng = random.Random(3)
    learnt = StepTime(target, max_batched_tokens=1536)
    for _ in range(steps):
        rows = rng.randint(1, 1536)
        cached = rng.randint(0, rows * 800)
        learnt.note(rows, cached, cost(prices, rows, cached) * math.exp(rng.gauss(0, noise)), decodes=True)
    learnt.saved_seconds = 0.0
    return learnt


@pytest.mark.parametrize("prices", PRICES)
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_steps_cost_what_they_did(prices: tuple[float, float, float], noise: float) -> None:
    learnt = taught(prices, 0.1, noise)
    for rows, cached in [(64, 20_000), (700, 300_000), (1536, 500_000)]:
        assert learnt.expected_seconds(rows, cached) == pytest.approx(cost(prices, rows, cached), rel=0.01 + noise)


@pytest.mark.parametrize("prices", PRICES)
def test_a_full_step_takes_the_target_and_not_longer(prices: tuple[float, float, float]) -> None:
    for target in (0.05, 0.1, 0.2):
        learnt = taught(prices, target)
        for decodes in (10, 100, 300, 700):
            cached = decodes * 400
            rows = learnt.prompt_tokens(decodes, cached)
            assert 0 < rows <= 1536 - decodes
            least = round(LEAST_PROMPT_SHARE * 1536)
            if rows > least:
                assert cost(prices, decodes + rows, cached) <= 1.01 * target
            if decodes + rows < 1536:
                assert cost(prices, decodes + rows + 16, cached) >= 0.99 * target


def test_what_steps_save_a_prompt_gets_and_debts_it_does_not_pay() -> None:
    """Fifty decodes take 24 of 40 ms; twenty such steps leave room for a step of all rows, but not for three."""
    learnt = taught(PRICES[0], 0.04)
    before = learnt.prompt_tokens(50, 20_000)
    assert before < 200
    for _ in range(20):
        learnt.note(50, 20_000, cost(PRICES[0], 50, 20_000), decodes=True)
    assert learnt.saved_seconds == pytest.approx(20 * (0.04 - cost(PRICES[0], 50, 20_000)))
    rows = learnt.prompt_tokens(50, 20_000)
    assert rows == 1486
    for _ in range(3):
        learnt.note(50 + rows, 20_000 + rows * 700, cost(PRICES[0], 50 + rows, 20_000 + rows * 700), decodes=True)
    assert learnt.saved_seconds < 0
    assert learnt.prompt_tokens(50, 20_000) == pytest.approx(before, abs=2)


@pytest.mark.parametrize("in_flight", [0, 1, 2])
def test_what_was_saved_is_spent_once_however_many_steps_are_on_their_way(in_flight: int) -> None:
    """Prompts without end behind fifty decodes that saved all that can be saved."""
    learnt = taught(PRICES[0], 0.04)
    scheduler = Scheduler(max_batched_tokens=1536, max_sequences=64, page_size=16, num_pages=20_000, max_length=4096)
    for request_id in range(50):
        scheduler.add(request_id, 1, 4000)
    scheduler.plan()
    learnt.saved_seconds = MOST_SAVED * 0.04
    for request_id in range(50, 60):
        scheduler.add(request_id, 4000, 1)
    on_the_way: deque[tuple[int, int]] = deque()
    seconds = []
    for _ in range(12):
        plan = plan_within(learnt, PromptLimit(None, 1), scheduler, on_the_way)
        assert plan is not None
        on_the_way.append((int(plan.count.sum()), int((plan.start + plan.count).sum())))
        seconds.append(cost(PRICES[0], *on_the_way[-1]))
        if len(on_the_way) > in_flight:
            step = on_the_way.popleft()
            learnt.note(*step, cost(PRICES[0], *step), decodes=True)
    assert max(seconds) > 4 * 0.04
    assert sum(seconds) <= (12 + 1.05 * MOST_SAVED) * 0.04


def test_savings_and_debts_have_an_end() -> None:
    learnt = StepTime(0.1, 1024)
    for _ in range(1000):
        learnt.note(1, 10, 0.01, decodes=True)
    assert learnt.saved_seconds == pytest.approx(MOST_SAVED * 0.1)
    learnt.note(1, 10, 3000.0, decodes=True)
    assert learnt.saved_seconds == pytest.approx(-MOST_SAVED * 0.1)


def test_a_step_of_prompts_alone_delays_nobody() -> None:
    """A prompt that comes to an idle machine leaves no debt to the next."""
    learnt = taught(PRICES[0], 0.04)
    before = learnt.prompt_tokens(50, 20_000)
    learnt.note(1536, 1_000_000, 0.25, decodes=False)
    assert learnt.saved_seconds == 0.0
    assert learnt.prompt_tokens(50, 20_000) == pytest.approx(before, rel=0.05)
    learnt.note(1536, 1_000_000, 0.25, decodes=True)
    assert learnt.saved_seconds == pytest.approx(0.04 - 0.25)


def test_prompts_alone_get_every_row_and_beside_too_many_decodes_the_least_share() -> None:
    learnt = taught(PRICES[0], 0.03)
    assert learnt.prompt_tokens(0, 0) == 1536
    assert learnt.prompt_tokens(1000, 600_000) == 96
    assert learnt.prompt_tokens(1500, 600_000) == 36
    assert learnt.prompt_tokens(1536, 600_000) == 0


def test_before_anything_is_known_prompts_are_fed_in_small_shares() -> None:
    fresh = StepTime(0.1, 1536)
    assert fresh.prompt_tokens(0, 0) == 1536
    assert fresh.prompt_tokens(5, 100) == 96
    assert fresh.most_sequences(5, 100) is None
    assert fresh.expected_seconds(1, 1) is None


@pytest.mark.parametrize("prices", PRICES[:2])
def test_no_more_sequences_than_decode_within_the_target(prices: tuple[float, float, float]) -> None:
    learnt = taught(prices, 0.04)
    most = learnt.most_sequences(100, 100 * 400)
    assert most is not None
    assert cost(prices, most, most * 400) <= 0.0404
    assert cost(prices, most + 4, (most + 4) * 400) >= 0.0396


def test_a_target_that_one_alone_misses_holds_nobody_up() -> None:
    learnt = taught(PRICES[0], 0.01)
    assert learnt.most_sequences(100, 40_000) is None
    assert learnt.prompt_tokens(100, 40_000) == 96


def test_one_step_that_waited_for_a_compiler_changes_little() -> None:
    learnt = taught(PRICES[0], 0.1)
    before = learnt.prompt_tokens(300, 120_000)
    learnt.note(700, 280_000, 60.0, decodes=True)
    learnt.saved_seconds = 0.0
    assert learnt.prompt_tokens(300, 120_000) == pytest.approx(before, rel=0.05)


def test_prices_follow_a_machine_that_slows_down() -> None:
    learnt = taught(PRICES[0], 0.1)
    rng = random.Random(4)
    for _ in range(1500):
        rows = rng.randint(1, 1536)
        learnt.note(rows, rows * 300, 5 * cost(PRICES[0], rows, rows * 300), decodes=True)
    assert learnt.expected_seconds(800, 240_000) == pytest.approx(5 * cost(PRICES[0], 800, 240_000), rel=0.05)


def test_steps_that_are_all_alike_still_tell_their_own_time() -> None:
    learnt = StepTime(0.1, 64)
    for _ in range(50):
        learnt.note(20, 4_000, 0.03, decodes=True)
    assert learnt.expected_seconds(20, 4_000) == pytest.approx(0.03, rel=0.01)
    assert 0 < learnt.prompt_tokens(20, 4_000) <= 44


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(-3, 4000), st.integers(0, 10**6), st.floats()), max_size=30),
    st.integers(0, 5000),
    st.integers(0, 10**7),
)
def test_whatever_was_seen_the_budget_is_within_bounds(
    steps: list[tuple[int, int, float]], decodes: int, cached: int
) -> None:
    learnt = StepTime(0.1, 1024)
    for rows, tokens, seconds in steps:
        learnt.note(rows, tokens, seconds, decodes=True)
    rows = learnt.prompt_tokens(decodes, cached)
    assert min(1024 - decodes, 64) <= rows <= 1024 or (decodes >= 1024 and rows == 0)
    most = learnt.most_sequences(decodes, cached)
    assert most is None or 1 <= most <= 1024


@pytest.mark.parametrize("size", [(0.0, 5), (-1.0, 5), (float("nan"), 5), (0.1, 0)])
def test_sizes_must_be_positive(size: tuple[float, int]) -> None:
    with pytest.raises(ValueError, match="positive"):
        StepTime(*size)


def test_a_queue_is_served_in_order_and_decodes_stay_within_the_target() -> None:
    """Prompts of 300 tokens and answers of 100 arrive at 90 % of what the machine can do within the target."""
    prices = (0.018, 1.05e-4, 4e-8)
    learnt = StepTime(0.06, 1024)
    rng = random.Random(5)
    now, due, decoding, waits = 0.0, 0.0, [], []
    queue: deque[tuple[float, int]] = deque()
    slow = steps = 0
    while now < 60:
        while due <= now:
            queue.append((due, 300))
            due += rng.expovariate(1.9)
        if not queue and not decoding:
            now = due
            continue
        cached = sum(300 + done for done in decoding)
        budget = learnt.prompt_tokens(len(decoding), cached)
        most = learnt.most_sequences(len(decoding), cached)
        rows, begun = len(decoding), 0
        while budget and queue and (most is None or len(decoding) + begun < most):
            arrived, left = queue.popleft()
            taken = min(budget, left)
            budget, rows = budget - taken, rows + taken
            if taken < left:
                queue.appendleft((arrived, left - taken))
                break
            begun += 1
            waits.append(now - arrived)
        seconds = cost(prices, rows, cached) * math.exp(rng.gauss(0, 0.03))
        learnt.note(rows, cached, seconds, decodes=True)
        now += seconds
        steps += 1
        slow += seconds > 0.066
        decoding = [done + 1 for done in decoding if done < 99] + [0] * begun
    assert steps > 500
    assert slow < 0.02 * steps
    assert max(waits) < 3.0
