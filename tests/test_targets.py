import time
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from cli_support import make_overflowing_checkpoint
from megatoken import Engine, EngineConfig, Request
from megatoken.errors import CapacityError, RequestError
from megatoken.targets import SampleEvent
from megatoken.targets.in_process import InProcessTarget

CONFIG = EngineConfig(
    precision="fp32", max_length=64, cache_tokens=640, max_sequences=4, max_batched_tokens=32, threads=1
)
REQUESTS = [Request([3 + index] * (5 + 3 * index), max_tokens=4 + index, ignore_end_token=True) for index in range(8)]


@pytest.fixture
def engine() -> Engine:
    torch.set_num_threads(1)
    return Engine("tiny", CONFIG)


def test_events_are_the_engines_tokens_under_the_callers_ids(engine: Engine) -> None:
    target = InProcessTarget(engine)
    for index, request in enumerate(REQUESTS):
        target.submit(1000 - index, request)
    assert target.state().in_flight == 8
    tokens: dict[int, list[int]] = defaultdict(list)
    ended: dict[int, str] = {}
    times = []
    while target.state().in_flight:
        for event in target.poll(timeout_seconds=0.1):
            assert event == SampleEvent(*event[:4], started_ns=event.started_ns)
            assert event.sample_id not in ended
            tokens[event.sample_id] += event.token_ids
            times.append(event.time_ns)
            if event.finish_reason is not None:
                ended[event.sample_id] = event.finish_reason
    assert ended == dict.fromkeys(range(993, 1001), "length")
    assert times == sorted(times)
    expected = Engine("tiny", CONFIG).generate(REQUESTS)
    assert [tokens[1000 - index] for index in range(8)] == [completion.token_ids for completion in expected]
    counters = target.state()
    prompts_and_answers = sum(len(request.prompt) + request.max_tokens - 1 for request in REQUESTS)
    assert counters.processed_tokens >= prompts_and_answers
    assert counters.pages_free == counters.pages
    assert target.poll(timeout_seconds=0.1) == []


def test_cancelled_samples_are_gone_and_leave_no_event(engine: Engine) -> None:
    target = InProcessTarget(engine)
    for index, request in enumerate(REQUESTS):
        target.submit(index, request)
    for _ in range(3):
        target.poll(timeout_seconds=0.1)
    assert target.state().pages_free < target.state().pages
    target.cancel_all()
    counters = target.state()
    assert (counters.in_flight, counters.waiting) == (0, 0)
    assert counters.pages_free == counters.pages
    target.submit(0, REQUESTS[0])
    events = [event for _ in range(20) for event in target.poll(timeout_seconds=0.1)]
    assert {event.sample_id for event in events} == {0}
    assert sum(len(event.token_ids) for event in events) == 4


def test_what_was_not_begun_is_withdrawn_and_leaves_no_event(engine: Engine) -> None:
    target = InProcessTarget(engine)
    for index, request in enumerate(REQUESTS):
        target.submit(index, request)
    begun = {event.sample_id for event in target.poll(timeout_seconds=0.1)}
    held = 8 - target.state().waiting
    assert begun and 0 < held < 8
    assert target.withdraw() == list(range(held, 8))
    assert target.withdraw() == []
    ended = []
    while target.state().in_flight:
        events = target.poll(timeout_seconds=0.1)
        ended += [event.sample_id for event in events if event.finish_reason is not None]
    assert sorted(ended) == list(range(held))
    assert target.poll(timeout_seconds=0.1) == []


def test_facts_are_the_engines_own(engine: Engine) -> None:
    facts = InProcessTarget(engine).facts()
    assert facts["memory_plan"] == asdict(engine.memory_plan)
    assert facts["target"]["threads"] == 1


def test_a_refused_sample_is_not_in_flight(engine: Engine) -> None:
    target = InProcessTarget(engine)
    with pytest.raises(RequestError):
        target.submit(0, Request([9000]))
    with pytest.raises(CapacityError):
        target.submit(0, Request([5] * 60, max_tokens=60))
    assert target.state().in_flight == 0
    target.close()


def test_a_request_that_fails_is_a_failed_sample_and_the_others_end(tmp_path: Path) -> None:
    model = make_overflowing_checkpoint(tmp_path / "model", "z")
    target = InProcessTarget(Engine(model, EngineConfig(precision="bf16", max_length=64, cache_tokens=640, threads=1)))
    for index, letter in enumerate("azb"):
        target.submit(index, Request(letter, max_tokens=1))
    ended = {}
    while target.state().in_flight:
        ended |= {event.sample_id: event for event in target.poll(0.1) if event.finish_reason is not None}
    assert sorted(ended) == [0, 1, 2]
    assert [ended[index].error is not None for index in range(3)] == [False, True, False]
    assert "not finite" in str(ended[1].error) and ended[1].token_ids == ()


@pytest.mark.parametrize("pages", [640, 96])  # 96: samples are preempted and come back
def test_a_sample_has_started_when_its_first_rows_ran(pages: int) -> None:
    torch.set_num_threads(1)
    engine = Engine("tiny", replace(CONFIG, cache_tokens=pages, page_size=8))
    target = InProcessTarget(engine)
    submitted, started, firsts = {}, {}, {}
    for index, request in enumerate(REQUESTS):
        target.submit(index, request)
        submitted[index] = time.monotonic_ns()
    while target.state().in_flight:
        for event in target.poll(timeout_seconds=0.1):
            if event.sample_id not in firsts:
                started[event.sample_id], firsts[event.sample_id] = event.started_ns, event.time_ns
            else:
                assert event.started_ns is None
    assert sorted(started) == list(range(8))
    for index in range(8):
        assert submitted[index] < started[index] < firsts[index]
    in_order = [started[index] for index in range(8)]
    assert in_order == sorted(in_order)
    assert len(set(in_order)) > 1  # four sequences at most, 32 rows: not all in one step
