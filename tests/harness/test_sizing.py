import itertools
import math
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatoken.config import RunConfig
from megatoken.datasets.lengths import load_lengths
from megatoken.datasets.prompts import load_prompts
from megatoken.datasets.requests import Dataset
from megatoken.engine import Engine, EngineConfig
from megatoken.engine.request import Request
from megatoken.engine.simulated import VirtualClock
from megatoken.engine.state import ReplicaState
from megatoken.engine.thread import Step
from megatoken.hardware.telemetry import Telemetry
from megatoken.harness import sizing
from megatoken.harness.loadgen_plan import library_to_data_set, plan_test, seconds_to_fill
from megatoken.harness.sizing import estimate_rate
from megatoken.rack import replica
from megatoken.rack.wire import STATE, STATE_FIELDS
from megatoken.targets import ReplicaReading, SampleEvent
from megatoken.targets.in_process import InProcessTarget

rows_of_data = st.integers(1, 30_000)
rates = st.floats(1e-3, 1e5)
STALL_SECONDS = 0.2
durations = st.none() | st.floats(0, 3000)


def loadgen_count(minimum: int, seconds: float, rate: float, library_rows: int) -> int:
    """LoadGen's rule, with the numbers as the user.conf rounds them."""
    asked = max(minimum, math.floor(1.1 * round(seconds * 1000) / 1000 * float(f"{rate:.6g}")))
    return -(-asked // library_rows) * library_rows


@given(rows_of_data, rates, st.integers(1, 100_000), durations)
def test_without_rules_exactly_the_samples_asked_for(
    rows: int, rate: float, samples: int, seconds: float | None
) -> None:
    plan = plan_test(RunConfig(samples=samples, min_duration_seconds=seconds), rows, rate)
    assert plan.samples is not None and plan.min_duration_seconds is not None
    count = loadgen_count(plan.samples, plan.min_duration_seconds, plan.rate, plan.library_rows)
    assert count == samples
    assert plan.min_duration_seconds == (seconds or 0)


@given(rows_of_data, rates, durations.filter(lambda seconds: seconds != 0))
def test_without_samples_enough_for_the_duration(rows: int, rate: float, seconds: float | None) -> None:
    plan = plan_test(RunConfig(min_duration_seconds=seconds), rows, rate)
    assert plan.samples is not None
    assert plan.samples == plan.library_rows
    assert plan.samples == pytest.approx(max(1, 1.1 * rate * (15 if seconds is None else 1.2 * seconds)), abs=1)
    assert plan.min_duration_seconds == (seconds or 0)  # nobody asked LoadGen to hold us to the default


def test_no_duration_and_no_samples_is_one_pass() -> None:
    assert plan_test(RunConfig(min_duration_seconds=0), 123, 5.0).samples == 123


@given(rows_of_data, rates, durations)
def test_claimed_rules_leave_count_and_duration_to_loadgen(rows: int, rate: float, seconds: float | None) -> None:
    plan = plan_test(RunConfig(rules="v5.1", min_duration_seconds=seconds), rows, rate)
    assert (plan.library_rows, plan.samples, plan.min_duration_seconds) == (rows, None, seconds)
    assert plan.rate == pytest.approx(1.2 * rate)


@given(rows_of_data, rates, st.integers(1, 100_000), durations)
def test_claimed_rules_cut_short_issue_exactly_the_samples(
    rows: int, rate: float, samples: int, seconds: float | None
) -> None:
    plan = plan_test(RunConfig(rules="v5.1", samples=samples, min_duration_seconds=seconds), rows, rate)
    assert plan.samples == samples
    if samples < max(rows, 24_576):
        assert plan.min_duration_seconds == (600 if seconds is None else seconds)
        count = loadgen_count(samples, plan.min_duration_seconds, plan.rate, plan.library_rows)
        assert count == samples
    else:
        assert (plan.library_rows, plan.min_duration_seconds) == (rows, seconds)


def test_accuracy_takes_every_row_once() -> None:
    assert plan_test(RunConfig(mode="accuracy"), 123, 5.0).library_rows == 123
    assert plan_test(RunConfig(mode="accuracy", rules="v5.1"), 123, 5.0).library_rows == 123
    assert plan_test(RunConfig(mode="accuracy", samples=7), 123, 5.0).library_rows == 7


@given(st.integers(1, 500), st.integers(1, 500))
def test_the_library_is_spread_evenly_over_the_data_set(library_rows: int, rows: int) -> None:
    chosen = library_to_data_set("performance", library_rows, rows)
    counts = np.bincount(chosen, minlength=rows)
    assert len(counts) == rows
    assert counts.max() - counts.min() <= 1
    if library_rows <= rows:
        assert np.diff(chosen, append=rows).max() <= math.ceil(rows / library_rows)
    first = library_to_data_set("accuracy", library_rows, rows)
    assert first.tolist() == [index % rows for index in range(library_rows)]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class ChunkedEngine:
    """A target of ``budget`` rows a step and known prices; time passes only in its steps."""

    def __init__(
        self,
        clock: Clock,
        prompt_price: float,
        answer_price: float,
        budget: int = 64,
        residents: int = 48,
        answer_tokens: Callable[[Request], int] = lambda request: request.max_tokens,
        stalled: Collection[int] = (),
    ) -> None:
        self._stalled = stalled
        self._clock = clock
        self._answer_tokens = answer_tokens
        self._prices = prompt_price, answer_price
        self._budget, self._residents = budget, residents
        self._waiting: deque[tuple[int, int, int]] = deque()
        self._prefilling: list[tuple[int, int, int]] = []
        self._answering: dict[int, int] = {}
        self._processed = 0
        self.steps = 0

    def facts(self) -> dict[str, Any]:
        return {}

    def submit(self, sample_id: int, request: Request) -> None:
        self._waiting.append((sample_id, len(request.prompt), self._answer_tokens(request)))

    def poll(self, timeout_seconds: float) -> list[SampleEvent]:
        self.steps += 1
        ids = list(self._answering)
        room = self._budget - len(ids)
        begun = []
        while room and self._waiting and len(self._answering) + len(begun) < self._residents:
            sample, prompt, answer = self._waiting.popleft()
            rows = min(room, prompt)
            room -= rows
            if rows < prompt:
                self._waiting.appendleft((sample, prompt - rows, answer))
            else:
                begun.append((sample, answer))
        prompts = self._budget - len(ids) - room
        self._processed += prompts + len(ids)
        self._clock.now += STALL_SECONDS if self.steps in self._stalled else 0.0
        self._clock.now += prompts * self._prices[0] + len(ids) * self._prices[1]
        events = []
        self._answering.update(begun)
        for sample in (*ids, *(sample for sample, _ in begun)):
            self._answering[sample] -= 1
            ended = self._answering[sample] == 0
            events.append(SampleEvent(sample, (1,), "length" if ended else None, 0))
            if ended:
                del self._answering[sample]
        return events

    def state(self) -> ReplicaState:
        waiting = len(self._waiting)
        return ReplicaState(
            in_flight=waiting + len(self._answering),
            waiting=waiting,
            max_batched_tokens=self._budget,
            processed_tokens=self._processed,
        )

    def replicas(self) -> list[ReplicaReading]:
        return [ReplicaReading(None, 0, self.state(), Telemetry())]

    def outcome(self, since_ns: int) -> dict[str, Any]:
        return {}

    def cancel_all(self) -> list[SampleEvent]:
        self._waiting.clear()
        self._answering.clear()
        return []

    def close(self) -> None:
        self.cancel_all()


@pytest.fixture
def data_set(tmp_path: Path) -> Dataset:
    path = tmp_path / "lengths.csv"
    path.write_text("input_tokens,output_tokens\n" + "".join(f"{10 + i % 190},{1 + 7 * i % 300}\n" for i in range(500)))
    return load_lengths(path, vocabulary_size=50, max_length=1000)


@pytest.mark.parametrize("prices", [(1e-4, 1e-3), (1e-3, 1e-3), (5e-4, 5e-3), (1e-5, 2e-4)])
def test_the_estimate_finds_the_prices_of_prompts_and_answers(
    monkeypatch: pytest.MonkeyPatch, data_set: Dataset, prices: tuple[float, float]
) -> None:
    clock = Clock()
    monkeypatch.setattr(sizing, "time", clock)
    target = ChunkedEngine(clock, *prices)
    truth = 1 / (prices[0] * data_set.input_tokens.mean() + prices[1] * data_set.output_limits.mean())
    estimate = estimate_rate(target, data_set, seconds=3.0, learning_seconds=100.0)  # there is nothing to learn
    assert estimate == pytest.approx(truth, rel=1e-6)
    assert 1.5 <= clock.now < 4.0
    assert target.state().in_flight == 0


@pytest.mark.parametrize("stalled", [{1}, {1, 4, 19, 20, 33, 47}])
def test_steps_that_had_to_wait_do_not_spoil_the_estimate(
    monkeypatch: pytest.MonkeyPatch, data_set: Dataset, stalled: set[int]
) -> None:
    clock = Clock()
    monkeypatch.setattr(sizing, "time", clock)
    target = ChunkedEngine(clock, 1e-4, 1e-3, stalled=stalled)
    truth = 1 / (1e-4 * data_set.input_tokens.mean() + 1e-3 * data_set.output_limits.mean())
    assert estimate_rate(target, data_set, seconds=3.0, learning_seconds=0.0) == pytest.approx(truth, rel=1e-3)


def test_without_time_one_step_has_to_do(monkeypatch: pytest.MonkeyPatch, data_set: Dataset) -> None:
    clock = Clock()
    monkeypatch.setattr(sizing, "time", clock)
    target = ChunkedEngine(clock, 1e-3, 1e-3)
    mean_tokens = data_set.input_tokens.mean() + data_set.output_limits.mean()
    assert estimate_rate(target, data_set, seconds=0.0, learning_seconds=0.0) == pytest.approx(1000 / mean_tokens)
    assert target.steps == 2


def test_a_target_faster_than_the_clock_still_gets_an_estimate(data_set: Dataset) -> None:
    target: Any = ChunkedEngine(Clock(), 0.0, 0.0, budget=10_000, residents=10_000)
    assert 0 < estimate_rate(target, data_set, seconds=0.05, learning_seconds=0.0) < math.inf


class LateTimes(ChunkedEngine):
    """Tells of the time of its steps once in ``every``, and else of their work alone."""

    every = 5
    told_seconds = 0.0

    def state(self) -> ReplicaState:
        if self.steps % self.every == 0:
            self.told_seconds = self._clock.now
        return replace(super().state(), computed_seconds=self.told_seconds, steps=self.steps)


@pytest.mark.parametrize("every", [5, 10**6])
def test_work_told_apart_from_its_time_still_has_a_price(
    every: int, monkeypatch: pytest.MonkeyPatch, data_set: Dataset
) -> None:
    clock = Clock()
    monkeypatch.setattr(sizing, "time", clock)
    monkeypatch.setattr(LateTimes, "every", every)
    target: Any = LateTimes(clock, 1e-3, 1e-3)
    mean_tokens = data_set.input_tokens.mean() + data_set.output_limits.mean()
    assert estimate_rate(target, data_set, seconds=3.0, learning_seconds=0.0) == pytest.approx(
        1000 / mean_tokens, rel=0.3
    )


def random_lengths(path: Path, input_tokens: int, output_tokens: int) -> Dataset:
    """2,000 rows of about so many tokens."""
    draws = np.random.default_rng(3).uniform(0.2, 1.8, (2000, 2)) * (input_tokens, output_tokens)
    path.write_text("input_tokens,output_tokens\n" + "".join(f"{one:.0f},{other:.0f}\n" for one, other in draws))
    return load_lengths(path, vocabulary_size=32_000, max_length=4096)


def simulated(model: str, clock: VirtualClock, *, stream: bool = False) -> Engine:
    return Engine.simulated(model, EngineConfig("fp8", max_sequences=384), "H200", clock, stream=stream)


def samples_per_second_when_full(model: str, data_set: Dataset) -> float:
    """What an engine computes once twice as many samples have ended as it holds, while samples wait."""
    clock = VirtualClock()
    engine = simulated(model, clock)
    rows, ended = itertools.cycle(np.random.default_rng(5).permutation(len(data_set.requests)).tolist()), 0
    began: tuple[float, int] | None = None
    while ended < 5 * 384:
        for row in itertools.islice(rows, 64 - min(64, engine.state().waiting)):
            engine.submit(data_set.requests[row])
        ended += sum(event.finish_reason is not None for event in engine.step())
        if began is None and ended >= 2 * 384:
            began = clock.now(), engine.state().processed_tokens
    assert began is not None
    rows_per_second = (engine.state().processed_tokens - began[1]) / (clock.now() - began[0])
    return float(rows_per_second / (data_set.input_tokens + data_set.output_limits).mean())


class SteppedByHand:
    """Has the methods of an ``EngineThread``; the test steps the engine in virtual time."""

    failure = None
    step_began_ns = 0

    def __init__(self, engine: Engine, on_step: Callable[[Step], None], *, name: str) -> None:
        self._engine, self._on_step = engine, on_step
        self.submit, self.state = engine.submit, engine.state

    def step(self, clock: VirtualClock) -> None:
        began_ns = int(clock.now() * 1e9)
        events = self._engine.step()
        self._on_step(Step(events, began_ns, int(clock.now() * 1e9)))


class LateReplicas:
    """Replicas of simulated engines that take as many samples as they want, and report four times a second."""

    def __init__(self, model: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = VirtualClock()
        self._clocks = [VirtualClock() for _ in range(count)]
        self._engines = [simulated(model, clock) for clock in self._clocks]
        monkeypatch.setattr(replica, "EngineThread", SteppedByHand)
        options: dict[str, Any] = {"streams": False, "keep_ids": False, "sensors": None, "notify": lambda: None}
        self._replicas = [replica.Replica(one, "", **options) for one in self._engines]
        self._queue: deque[tuple[int, Request]] = deque()

    def facts(self) -> dict[str, Any]:
        return {"memory_plan": asdict(self._engines[0].memory_plan)}

    def submit(self, sample_id: int, request: Request) -> None:
        self._queue.append((sample_id, request))

    def poll(self, timeout_seconds: float) -> list[SampleEvent]:
        self.now.wait_until(self.now.now() + 0.25)
        for one, engine, clock in zip(self._replicas, self._engines, self._clocks, strict=True):
            one.take([self._queue.popleft() for _ in range(min(one.wanted(), len(self._queue)))])
            while engine.busy and clock.now() < self.now.now():
                one._thread.step(clock)
            clock.wait_until(self.now.now())
        ended = [done for one in self._replicas for done in one.take_news()[1]]
        return [SampleEvent(done[0], (), "length", 0, output_tokens=done[1]) for done in ended]

    def state(self) -> ReplicaState:
        states = np.array([one.state(0) for one in self._replicas], STATE)
        total = {name: states[name].sum().item() for name in STATE_FIELDS}
        in_flight, waiting = total["in_flight"] + len(self._queue), len(self._queue)
        return ReplicaState(**total | {"in_flight": in_flight, "waiting": waiting, "replicas": len(states)})

    def replicas(self) -> list[ReplicaReading]:
        return [ReplicaReading(None, 0, self.state(), Telemetry())]

    def cancel_all(self) -> list[SampleEvent]:
        self._queue.clear()
        return []


@pytest.mark.parametrize(
    ("model", "input_tokens", "output_tokens"),
    [("llama2-70b", 294, 283), ("llama3.1-8b", 500, 1000)],
)
def test_three_seconds_tell_what_a_full_gpu_does(
    model: str, input_tokens: int, output_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Far too few to fill it: of the steps without prompts, all have few rows."""
    data_set = random_lengths(tmp_path / "lengths.csv", input_tokens, output_tokens)
    truth, clock = samples_per_second_when_full(model, data_set), VirtualClock()
    monkeypatch.setattr(sizing, "time", SimpleNamespace(monotonic=clock.now))
    one = estimate_rate(
        InProcessTarget(simulated(model, clock, stream=True)), data_set, seconds=3.0, learning_seconds=0.0
    )
    rack: Any = LateReplicas(model, 4, monkeypatch)
    monkeypatch.setattr(sizing, "time", SimpleNamespace(monotonic=rack.now.now))
    four = estimate_rate(rack, data_set, seconds=3.0, learning_seconds=0.0)
    print(f"\n{truth:.2f} samples/s; estimates {one:.2f}, and {four:.2f} of four")
    assert one == pytest.approx(truth, rel=0.15)
    assert four == pytest.approx(4 * truth, rel=0.15)


def answer_by_prompt(request: Request) -> int:
    """From 1 to 300 tokens, about 100 on average, by the first id of the prompt."""
    return 1 + request.prompt[0] ** 2 * 299 // 99**2


@pytest.fixture
def open_ended(tmp_path: Path) -> Dataset:
    """1,000 rows of which nobody knows how long the answers are, the longest first."""
    first_ids = sorted((37 * row % 100 for row in range(1000)), reverse=True)
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt_token_ids": {[first] * 20}, "max_tokens": 300}}\n' for first in first_ids))
    return load_prompts(path, encode=None, vocabulary_size=100, max_length=320)


@pytest.mark.parametrize(("learning_seconds", "at_most"), [(0.0, 9.0), (3.0, 3.0), (1000.0, 1.6)])
@pytest.mark.parametrize("residents", [16, 48])
def test_unknown_answers_never_make_a_run_too_short(
    monkeypatch: pytest.MonkeyPatch, open_ended: Dataset, residents: int, learning_seconds: float, at_most: float
) -> None:
    clock = Clock()
    monkeypatch.setattr(sizing, "time", clock)
    target = ChunkedEngine(clock, 1e-4, 1e-3, residents=residents, answer_tokens=answer_by_prompt)
    mean_answer = np.mean([answer_by_prompt(request) for request in open_ended.requests])
    truth = 1 / (1e-4 * 20 + 1e-3 * mean_answer)
    assert truth <= estimate_rate(target, open_ended, 2.0, learning_seconds) <= at_most * truth
    assert clock.now < 2.2 + learning_seconds
    assert target.state().in_flight == 0


def test_what_chance_made_of_the_answers_seen_is_taken_off(
    monkeypatch: pytest.MonkeyPatch, open_ended: Dataset
) -> None:
    """One answer in five is long. Few or many of them in the warm-up: too low a rate is rare all the same."""
    clock = Clock()
    monkeypatch.setattr(sizing, "time", clock)
    answers = np.array([200, 20, 20, 20, 20] * 200)
    truth = 1 / (1e-4 * 20 + 1e-3 * answers.mean())
    shares = []
    for seed in range(60):
        order = iter(np.random.default_rng(seed).permutation(answers).tolist())
        target = ChunkedEngine(clock, 1e-4, 1e-3, answer_tokens=lambda request, order=order: next(order))
        shares.append(estimate_rate(target, open_ended, 0.5, 1000.0) / truth)
    assert sum(share < 1 for share in shares) <= 6
    assert np.median(shares) < 3


def test_answers_that_never_end_early_cost_no_more_than_the_learning(
    monkeypatch: pytest.MonkeyPatch, open_ended: Dataset
) -> None:
    clock = Clock()
    monkeypatch.setattr(sizing, "time", clock)
    target = ChunkedEngine(clock, 1e-4, 1e-3)
    truth = 1 / (1e-4 * 20 + 1e-3 * 300)
    assert truth <= estimate_rate(target, open_ended, 2.0, 1000.0) <= 1.4 * truth


def test_how_long_the_samples_have_to_last() -> None:
    assert seconds_to_fill(RunConfig(), 10) == 15
    assert seconds_to_fill(RunConfig(min_duration_seconds=40), 10) == 40
    assert seconds_to_fill(RunConfig(min_duration_seconds=0), 10) == 0
    assert seconds_to_fill(RunConfig(samples=5, min_duration_seconds=40), 10) == 0
    assert seconds_to_fill(RunConfig(mode="accuracy"), 10) == 0
    assert seconds_to_fill(RunConfig(rules="v5.1"), 10) == 600
    assert seconds_to_fill(RunConfig(rules="v5.1", samples=5), 10) == 0
    assert seconds_to_fill(RunConfig(rules="v5.1", samples=30_000), 10) == 600
