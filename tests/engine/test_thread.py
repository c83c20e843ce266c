"""An engine shared by threads: the same answers as alone, one message a step, and failures that reach every request."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from engines import make_engine, request

from examples import ALL, every
from megatoken.engine import Completion, Engine, EngineConfig, EngineThread, FinishReason, Request, Sampling
from megatoken.engine.simulated import VirtualClock
from megatoken.engine.thread import Step, WakeUp
from megatoken.errors import CapacityError, MegatokenError, RequestError, ThreadError

THREADS, ROUNDS = 12, 12 if ALL else 5


@pytest.fixture(scope="module")
def asked(directory: Path) -> tuple[list[Request], list[Completion]]:
    """Requests with seeds of their own, and their answers by a plain engine."""
    draw = random.Random(1)
    requests = [
        request(
            seed, draw.randrange(1, 25), draw.randrange(1, 30), sampling=Sampling(draw.choice((0.0, 0.9)), seed=seed)
        )
        for seed in range(40)
    ]
    return requests, make_engine(directory, threads=1).generate(requests)


@pytest.mark.parametrize("overlap", [True, *every(False)])
def test_twelve_threads_get_the_answers_of_one(
    directory: Path, asked: tuple[list[Request], list[Completion]], overlap: bool
) -> None:
    """They stream, submit and cancel at random; pages are short, so requests are preempted too."""
    requests, expected = asked
    steps: list[Step] = []
    engine = make_engine(directory, overlap=overlap, threads=1)
    shared = EngineThread(engine, steps.append)
    submitted: dict[int, int] = {}  # which request an id stands for
    problems: list[BaseException] = []

    def use(seed: int) -> None:
        draw = random.Random(seed)
        try:
            for _ in range(ROUNDS):
                which = draw.randrange(len(requests))
                match draw.randrange(3):
                    case 0:
                        found = [token for event in shared.stream(requests[which]) for token in event.token_ids]
                        assert found == expected[which].token_ids
                    case 1:
                        submitted[shared.submit(requests[which])] = which
                    case _:
                        stream = shared.stream(requests[which])
                        first = next(stream)
                        assert first.token_ids[0] == expected[which].token_ids[0]
                        stream.close()
                        request_id = shared.submit(requests[which])
                        submitted[request_id] = which
                        shared.cancel(request_id)
                        shared.cancel(10**9)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shared.close(drain=True)
    assert not problems
    assert shared.dead and shared.failure is None
    tokens: dict[int, list[int]] = defaultdict(list)
    reasons: dict[int, FinishReason] = {}
    for step in steps:
        assert step.began_ns <= step.ended_ns
        for event in step.events:
            assert event.request_id not in reasons
            tokens[event.request_id] += event.token_ids
            if event.finish_reason is not None:
                reasons[event.request_id] = event.finish_reason
    assert reasons.keys() == submitted.keys()
    assert FinishReason.LENGTH in reasons.values()
    for request_id, reason in reasons.items():
        answer = expected[submitted[request_id]].token_ids
        assert tokens[request_id] == (answer if reason is FinishReason.LENGTH else answer[: len(tokens[request_id])])
    state = shared.state()
    assert (state.in_flight, state.pages_free) == (0, state.pages)
    assert len(steps) >= state.steps
    assert engine.generate(requests[:3]) == expected[:3]  # the engine is free again


def test_an_event_loop_gets_one_message_a_step(directory: Path, asked: tuple[list[Request], list[Completion]]) -> None:
    requests, expected = asked

    async def serve() -> dict[int, list[int]]:
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue[Step]()
        tokens: dict[int, list[int]] = defaultdict(list)
        with EngineThread(
            make_engine(directory, threads=1), lambda step: loop.call_soon_threadsafe(arrived.put_nowait, step)
        ) as shared:
            open_ids = {shared.submit(one) for one in requests[:8]}
            while open_ids:
                for event in (await arrived.get()).events:
                    tokens[event.request_id] += event.token_ids
                    if event.finish_reason is not None:
                        open_ids.remove(event.request_id)
        return tokens

    assert list(asyncio.run(serve()).values()) == [one.token_ids for one in expected[:8]]


def test_refusals_reach_the_caller_and_nobody_else(directory: Path) -> None:
    engine = make_engine(directory, threads=1)
    with EngineThread(engine) as shared:
        with pytest.raises(RequestError, match="temperature is 1000"):
            shared.submit(Request([1], sampling=Sampling(10**400)))
        with pytest.raises(CapacityError, match="80 tokens"):
            shared.stream(Request([1] * 80, 1))
        assert shared.state().in_flight == 0
        assert len(list(shared.stream(request(tokens=3)))) == 3
        with pytest.raises(ThreadError, match="share it through an EngineThread"):
            engine.generate([request()])
    with pytest.raises(MegatokenError, match="the engine's thread is closed"):
        shared.submit(request())
    assert len(engine.generate([request()])) == 1


def test_closing_cancels_what_is_open_and_draining_waits_for_it(directory: Path) -> None:
    for drain, reason in ((False, FinishReason.CANCELLED), (True, FinishReason.LENGTH)):
        reasons = []

        def collect(step: Step, into: list[FinishReason | None] = reasons, slow: bool = not drain) -> None:
            into.extend(one.finish_reason for one in step.events)
            if slow:  # so that all are open when the thread is closed, however busy the machine
                time.sleep(0.02)

        shared = EngineThread(make_engine(directory, threads=1), collect)
        for seed in range(10):
            shared.submit(request(seed, tokens=50))
        shared.close(drain=drain)
        assert [one for one in reasons if one is not None] == [reason] * 10


def test_an_error_of_the_engine_reaches_every_open_request(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(directory, threads=1)
    step, steps = engine._runner._compute, itertools.count()

    def fail_after_the_first(*arguments: object, **options: object) -> object:
        if next(steps):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(*arguments, **options)

    monkeypatch.setattr(engine._runner, "_compute", fail_after_the_first)
    ended = []
    shared = EngineThread(engine, lambda step: ended.extend(one for one in step.events if one.finish_reason))
    stream = shared.stream(request(tokens=40))
    next(stream)
    with pytest.raises(CapacityError, match="ran out of memory in a step"):
        list(stream)
    deadline = time.monotonic() + 60
    while not shared.dead:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(CapacityError, match="ran out of memory in a step"):
        shared.submit(request())
    assert isinstance(shared.failure, CapacityError)
    assert all(one.finish_reason is FinishReason.ERROR and one.error is shared.failure for one in ended)
    shared.close()


def test_a_busy_engine_is_not_taken(directory: Path) -> None:
    engine = make_engine(directory, threads=1)
    engine.submit(request())
    with pytest.raises(MegatokenError, match="requests in flight"):
        EngineThread(engine)


@pytest.mark.timing
def test_an_idle_thread_wakes_at_once_and_uses_no_processor() -> None:
    with EngineThread(Engine.simulated("tiny", EngineConfig(), "H200", VirtualClock())) as shared:
        waits = []
        for _ in range(50):
            time.sleep(0.002)
            began = time.perf_counter()
            next(shared.stream(Request([1], 1, ignore_end_token=True)))
            waits.append(time.perf_counter() - began)
        assert sorted(waits)[len(waits) // 10] < 0.001  # of a look every 10 ms, a tenth of all waits would be shorter
        used = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - used < 0.05


def test_a_stream_that_is_dropped_before_its_first_event_is_cancelled(directory: Path) -> None:
    with EngineThread(make_engine(directory, threads=1)) as shared:
        stream = shared.stream(request(1, 5, 30))
        del stream
        deadline = time.monotonic() + 60
        while shared.state().in_flight and time.monotonic() < deadline:
            time.sleep(0.005)
        state = shared.state()
        assert state.in_flight == 0 and state.output_tokens < 30


def test_a_ring_before_the_wait_is_kept_and_two_are_one() -> None:
    wake = WakeUp()
    wake.ring()
    wake.ring()
    began = time.monotonic()
    wake.wait(60)
    assert time.monotonic() - began < 30
    began = time.monotonic()
    wake.wait(0.02)
    assert time.monotonic() - began >= 0.02
    threading.Timer(0.01, wake.ring).start()
    began = time.monotonic()
    wake.wait(60)
    assert time.monotonic() - began < 30
