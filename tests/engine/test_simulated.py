"""The simulated engine: the real scheduler's steps, exact time, answers that depend on the request alone."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatoken.engine import Engine, EngineConfig, FinishReason, Request, Sampling
from megatoken.engine.config import SHAPES
from megatoken.engine.simulated import VirtualClock, WallClock
from megatoken.errors import CapacityError, CheckpointError, ConfigError, RequestError
from megatoken.targets.in_process import InProcessTarget

SMALL = EngineConfig(
    precision="bf16",
    max_batched_tokens=48,
    max_sequences=12,
    max_length=128,
    page_size=16,
    cache_tokens=1024,
    overlap=False,
)
Answers = dict[int, tuple[list[int], FinishReason]]


def requests(count: int, *, forced: bool = True, longest: int = 60, seed: int = 0) -> list[Request]:
    draw = np.random.default_rng(seed)
    return [
        Request(
            draw.integers(3, 8000, draw.integers(1, 60)).tolist(),
            int(draw.integers(1, longest)),
            ignore_end_token=forced,
        )
        for _ in range(count)
    ]


def serve(engine: Engine, wanted: list[Request]) -> Answers:
    request_ids = [engine.submit(request) for request in wanted]
    tokens: dict[int, list[int]] = defaultdict(list)
    reasons = {}
    while engine.busy:
        for event in engine.step():
            assert event.request_id not in reasons
            tokens[event.request_id] += event.token_ids
            if event.finish_reason is not None:
                reasons[event.request_id] = event.finish_reason
    assert sorted(reasons) == request_ids
    return {number: (tokens[request_id], reasons[request_id]) for number, request_id in enumerate(request_ids)}


def simulated(config: EngineConfig = SMALL, **options: object) -> Engine:
    return Engine.simulated("tiny", config, "H200", VirtualClock(), **options)


def test_it_imports_no_pytorch() -> None:
    program = (
        "import sys; from megatoken import Engine; "
        "import megatoken.planning.rack_simulation, megatoken.targets.in_process, megatoken.harness.run; "
        "engine = Engine.simulated('llama2-70b'); "
        "assert 'torch' not in sys.modules and 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize("cache_tokens", [1024, 288])
def test_its_steps_are_those_of_the_real_engine(cache_tokens: int) -> None:
    """Same requests, same sizes: step by step as many rows, residents, free pages and preemptions."""
    config = replace(SMALL, cache_tokens=cache_tokens)
    real, other = Engine("tiny", replace(config, device="cpu", threads=1)), simulated(config)
    assert replace(real.memory_plan, device="", weights_bytes=0, cache_bytes=0, workspace_bytes=0, process_bytes=0) != 0
    for request in requests(14):
        assert real.submit(request) == other.submit(request)
    while real.busy:
        expected = {event.request_id: event.finish_reason for event in real.step()}
        assert {event.request_id: event.finish_reason for event in other.step()} == expected
        assert replace(other.state(), computed_seconds=0.0) == replace(real.state(), computed_seconds=0.0)
    assert not other.busy


def test_pressure_preempts_and_changes_no_answer() -> None:
    wanted = requests(60, longest=68)
    calm, pressed = simulated(replace(SMALL, cache_tokens=4096)), simulated(replace(SMALL, cache_tokens=160))
    pressed._scheduler._answers.limits = 10**12  # as if short answers were all it had ever seen
    assert serve(calm, wanted) == serve(pressed, wanted)
    assert calm.state().preemptions == 0 < pressed.state().preemptions
    assert pressed.state().recomputed_tokens > 0
    assert pressed.state().pages_free == pressed.state().pages


def test_an_answer_depends_on_the_request_alone() -> None:
    wanted = requests(50, forced=False)
    expected = serve(simulated(), wanted)
    for config in (replace(SMALL, max_batched_tokens=17, max_sequences=3), replace(SMALL, overlap=True)):
        assert serve(simulated(config), wanted) == expected
    assert serve(simulated(stream=False), wanted) == expected
    backwards = serve(Engine.simulated("tiny", SMALL, "GB300", VirtualClock()), wanted[::-1])
    assert [backwards[49 - number] for number in range(50)] == list(expected.values())
    alike = serve(simulated(), [replace(wanted[0], max_tokens=50)] * 3)
    assert alike[0] == alike[1] == alike[2]
    assert alike[0][0][:2] != serve(simulated(), [Request([1, 2, 3], 50)])[0][0][:2]


def test_a_seed_that_is_given_counts_where_tokens_are_drawn() -> None:
    greedy = Request([1, 2, 3], 20, ignore_end_token=True)
    drawn = [replace(greedy, sampling=Sampling(temperature=t, seed=s)) for t, s in ((0, 1), (1, 1), (1, 2), (1, None))]
    answers = [serve(simulated(), [request])[0][0] for request in (greedy, *drawn)]
    assert answers[0] == answers[1] == answers[4]
    assert answers[0] != answers[2] != answers[3]


def test_forced_answers_take_their_limit_and_others_end_before() -> None:
    forced = serve(simulated(), requests(30))
    assert all(
        (len(tokens), reason) == (request.max_tokens, FinishReason.LENGTH)
        for (tokens, reason), request in zip(forced.values(), requests(30), strict=True)
    )
    config = replace(SMALL, max_length=2048, cache_tokens=100_000, max_sequences=400, max_batched_tokens=4000)
    wanted = [replace(request, max_tokens=1024) for request in requests(400, forced=False)]
    lengths = []
    for tokens, reason in serve(simulated(config), wanted).values():
        ended = reason is FinishReason.STOP
        assert ended == (len(tokens) < 1024)
        assert (tokens[-1] == 2) == ended
        assert 2 not in tokens[:-1]
        assert all(0 <= token < 8192 for token in tokens)
        lengths.append(len(tokens))
    assert np.mean(lengths) == pytest.approx(294, rel=0.1)  # of 1,024 tokens at most, as the reference's


def test_stop_tokens_end_answers_and_never_stand_inside() -> None:
    stops = tuple(range(0, 8192, 2))
    wanted = [Request([number], 60, stop_token_ids=stops, ignore_end_token=False) for number in range(20)]
    for tokens, reason in serve(simulated(), wanted).values():
        assert (tokens[-1] in stops) == (reason is FinishReason.STOP)
        assert not set(tokens[:-1]) & set(stops)


def test_time_is_the_sum_of_the_steps() -> None:
    clock = VirtualClock(17.0)
    engine = Engine.simulated("llama3.1-8b", EngineConfig(precision="fp8"), "H200", clock)
    costs, step, priced = engine._runner.costs, engine._runner.costs.step, []

    def noted(plan: object) -> object:
        priced.append(step(plan))
        return priced[-1]

    costs.step = noted
    serve(engine, requests(300, longest=60))
    expected = 17.0
    for cost in priced:
        expected += cost.seconds
    assert clock.now() == expected  # to the last bit
    assert len(priced) == engine.state().steps
    clock.wait_until(100.0)
    serve(engine, requests(1))
    assert clock.now() > 100.0  # an idle engine's next step begins when it is asked for


def test_it_runs_one_step_ahead_as_the_real_loop_does() -> None:
    for overlap, behind in ((True, 1), (False, 0)):
        engine = simulated(replace(SMALL, overlap=overlap))
        engine.submit(Request([1], 3, ignore_end_token=True))
        counts = [len(engine.step()) for _ in range(5)]
        assert counts == [0] * behind + [1, 1, 1] + [0] * (2 - behind)
    assert simulated(replace(SMALL, overlap=None)).describe()["steps_in_flight"] == 2


def test_without_streaming_a_request_has_two_events() -> None:
    engine = simulated(stream=False)
    wanted = requests(40, longest=50)
    request_ids = [engine.submit(request) for request in wanted]
    events = defaultdict(list)
    while engine.busy:
        for event in engine.step():
            events[event.request_id].append(len(event.token_ids))
    for request_id, request in zip(request_ids, wanted, strict=True):
        assert events[request_id] == ([1, request.max_tokens - 1] if request.max_tokens > 1 else [1])


def test_cancelling_frees_and_is_told_once() -> None:
    engine = simulated(replace(SMALL, overlap=True))
    request_ids = [engine.submit(Request([1] * 20, 100, ignore_end_token=True)) for _ in range(20)]
    for _ in range(5):
        engine.step()
    for request_id in [*request_ids, 999]:
        engine.cancel(request_id)
    events = [event for _ in range(4) for event in engine.step()]
    assert {event.request_id: event.finish_reason for event in events} == dict.fromkeys(
        request_ids, FinishReason.CANCELLED
    )
    assert not engine.busy
    assert engine.state().pages_free == engine.state().pages
    assert engine.step() == []


def test_a_target_step_time_is_kept() -> None:
    """Without it prompts fill the step; with it steps stay near what is asked for once prices are learnt."""

    def longest(target: float | None) -> float:
        clock = VirtualClock()
        config = EngineConfig(precision="fp8", overlap=False, target_step_seconds=target)
        engine = Engine.simulated("llama2-70b", config, "H200", clock)
        for request in requests(400, longest=400):
            engine.submit(replace(request, prompt=[5] * 900, max_tokens=300))
        steps = []
        while engine.state().steps < 300:
            before = clock.now()
            engine.step()
            steps.append(clock.now() - before)
        return max(steps[100:])

    assert longest(None) > 0.15
    assert longest(0.08) < 0.084


@pytest.mark.timing
def test_real_time_does_not_drift() -> None:
    """Steps of 5 ms: each may end late, their sum may not. Three tries, for a machine that is busy."""
    drifts = []
    for _ in range(3):
        engine = Engine.simulated("llama3.1-8b", EngineConfig(precision="fp8"), "H200", WallClock())
        for _ in range(8):
            engine.submit(Request([1] * 16, 400, ignore_end_token=True))
        began = time.monotonic()
        while engine.busy:
            engine.step()
        elapsed = time.monotonic() - began
        simulated_seconds = engine._runner.free_at - began
        assert simulated_seconds > 0.5
        drifts.append(elapsed / simulated_seconds - 1)
        assert drifts[-1] > -1e-6
        virtual = VirtualClock()
        twin = Engine.simulated("llama3.1-8b", EngineConfig(precision="fp8"), "H200", virtual)
        serve(twin, [Request([1] * 16, 400, ignore_end_token=True)] * 8)
        drifts[-1] = max(drifts[-1], elapsed / virtual.now() - 1)
        if drifts[-1] < 0.01:
            return
    pytest.fail(f"took {min(drifts):.1%} longer than its steps")


@pytest.mark.parametrize(("pause", "lost"), [(0.5, 0.0), (5.0, 4.0)])
def test_a_late_machine_does_not_make_the_engine_late(pause: float, lost: float) -> None:
    """Up to a second: beyond it somebody will notice anyway."""
    ends = []
    for paused in (0.0, pause):
        clock = VirtualClock()
        engine = Engine.simulated("llama2-70b", EngineConfig(precision="fp8"), "H200", clock)
        for request in requests(50, longest=300):
            engine.submit(replace(request, max_tokens=300))
        for _ in range(20):
            engine.step()
        clock.wait_until(clock.now() + paused)
        while engine.busy:
            engine.step()
        ends.append(clock.now())
    assert ends[0] > 2.0
    assert ends[1] - ends[0] == pytest.approx(lost, abs=0.05)


@pytest.mark.timing
def test_waiting_costs_no_processor_time() -> None:
    engine = Engine.simulated("llama2-70b", EngineConfig(precision="fp8"), "H200")
    for _ in range(4):
        engine.submit(Request([1] * 1000, 20, ignore_end_token=True))
    began, used = time.monotonic(), time.process_time()
    while engine.busy:
        engine.step()
    assert time.monotonic() - began > 0.4
    assert time.process_time() - used < 0.2


def test_the_in_process_target_drives_it() -> None:
    target = InProcessTarget(Engine.simulated("tiny", SMALL, "H200", WallClock()))
    for number, request in enumerate(requests(10, longest=10)):
        target.submit(100 + number, request)
    events = []
    while target.state().in_flight:
        events += target.poll(0.1)
    assert sorted(event.sample_id for event in events if event.finish_reason) == list(range(100, 110))
    assert all(event.started_ns for event in events if event.started_ns is not None)
    facts = target.facts()
    assert (facts["target"]["device"], facts["target"]["simulated_gpu"]) == ("simulated H200", "H200")
    assert facts["memory_plan"]["device"] == "cuda"
    assert [one.telemetry.power_watts for one in target.replicas()] == [None]
    target.close()


def test_one_model_has_one_hash() -> None:
    assert simulated().content_hash == simulated(replace(SMALL, max_batched_tokens=17)).content_hash
    other = Engine.simulated(replace(SHAPES["tiny"], layers=7), SMALL, "H200", VirtualClock())
    assert other.content_hash != simulated().content_hash


def test_tensor_parallel_serves_what_one_gpu_cannot_hold() -> None:
    config = EngineConfig(precision="fp8", tensor_parallel=4)
    engine = Engine.simulated("llama3.1-405b", config, "H200", VirtualClock())
    assert engine.memory_plan.weights_bytes < 120e9
    assert engine.describe()["tensor_parallel"] == 4
    with pytest.raises(CapacityError, match="does not fit"):
        Engine.simulated("llama3.1-405b", EngineConfig(precision="fp8"), "H200")
    assert Engine.simulated("llama2-70b", EngineConfig(precision="fp4"), "GB300").memory_plan.weights_bytes < 41e9


def test_what_cannot_be_simulated() -> None:
    with pytest.raises(ConfigError, match="did you mean GB300"):
        Engine.simulated("tiny", SMALL, "GB3000")
    with pytest.raises(CheckpointError, match="named shapes"):
        Engine.simulated("llama", SMALL)
    with pytest.raises(ConfigError, match="bf16, fp8"):
        Engine.simulated("tiny", EngineConfig(precision="fp4"), "H200")
    with pytest.raises(ConfigError, match="max_batched_tokens is 0"):
        Engine.simulated("tiny", EngineConfig(precision="bf16", max_batched_tokens=0))
    engine = simulated()
    for wrong, why in (
        (Request("text", 3), "no tokenizer"),
        (Request([], 3), "empty"),
        (Request([8192], 3), "outside the vocabulary"),
        (Request([1], 0), "at least 1"),
        (Request([1.5], 3), "token ids"),
        ("text", "write Request"),
    ):
        with pytest.raises(RequestError, match=why):
            engine.submit(wrong)
    with pytest.raises(CapacityError, match="exceed"):
        engine.submit(Request([1] * 100, 100))
    assert not engine.busy


def test_fp4_is_for_simulation_only(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'bf16' or 'fp8'; fp4 is supported on simulated GPUs only"):
        Engine("tiny", EngineConfig(precision="fp4"))
