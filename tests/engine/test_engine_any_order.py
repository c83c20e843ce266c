"""Submits, cancels, streams and steps in any order, against each request alone."""

from __future__ import annotations

import itertools
from pathlib import Path

import hypothesis.strategies as st
import pytest
from engines import answer_alone, answers, assert_idle, drain, make_engine, request, run_next_to
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from examples import examples
from megatoken.engine import Engine, FinishReason, Request, Sampling, TokenEvent


class AnyOrder(RuleBasedStateMachine):
    """Submits, cancels and steps; tokens are compared with those of the same request alone."""

    directory: Path
    engine: Engine
    alone: dict[int, list[int]]

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[int, int] = {}
        self.open: set[int] = set()
        self.cancelled: set[int] = set()
        self.events: list[TokenEvent] = []
        self.all_told = True

    @initialize(overlap=st.booleans(), max_batched_tokens=st.integers(1, 30), page_size=st.sampled_from([1, 4, 16]))
    def start(self, overlap: bool, max_batched_tokens: int, page_size: int) -> None:
        self.engine = make_engine(
            self.directory, overlap=overlap, max_batched_tokens=max_batched_tokens, page_size=page_size
        )

    @rule(kind=st.integers(0, 7))
    def submit(self, kind: int) -> None:
        request_id = self.engine.submit(request_of_kind(kind))
        assert request_id == len(self.requests)
        self.requests[request_id] = kind
        self.open.add(request_id)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.integers(-1, len(self.requests)))
        self.engine.cancel(request_id)
        if request_id in self.open:
            self.cancelled.add(request_id)
            self.open.discard(request_id)

    @rule(steps=st.integers(1, 8))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.take(self.engine.step())

    @rule(kind=st.integers(0, 7), leave_after=st.integers(0, 6))
    def stream(self, kind: int, leave_after: int) -> None:
        stream = self.engine.stream(request_of_kind(kind))
        tokens = [token for event in itertools.islice(stream, leave_after) for token in event.token_ids]
        stream.close()
        if leave_after:
            self.requests[len(self.requests)] = kind  # its request_id is used up
        assert tokens == self.alone[kind][:leave_after]
        self.all_told = False  # what it brought for the others waits for the next step

    def take(self, events: list[TokenEvent]) -> None:
        self.events += events
        self.open -= {event.request_id for event in events if event.finish_reason}
        self.all_told = True

    @invariant()
    def counters_agree(self) -> None:
        state = self.engine.state()
        assert state.in_flight == len(self.open) or (state.in_flight < len(self.open) and not self.all_told)
        assert 0 <= state.pages_free <= state.pages
        assert state.batched_tokens <= state.max_batched_tokens
        assert state.waiting + state.running <= state.in_flight
        if not self.open:
            assert state.pages_free == state.pages

    def teardown(self) -> None:
        self.take(drain(self.engine))
        assert not self.open
        assert_idle(self.engine)
        for request_id, (tokens, reason) in answers(self.events).items():
            expected = self.alone[self.requests[request_id]]
            if reason == FinishReason.CANCELLED:
                assert request_id in self.cancelled
                assert tokens == expected[: len(tokens)]
            else:
                assert tokens == expected


def request_of_kind(kind: int) -> Request:
    """Short, long and stopping requests, greedy and drawn."""
    return request(
        kind,
        tokens=(1, 3, 30, 60)[kind % 4],
        prompt_tokens=(1, 5, 19, 12)[kind % 4],
        sampling=Sampling(0.0 if kind < 4 else 1.5, seed=kind),
        stop_token_ids=tuple(range(kind, 301, 40)),
        group="flood" if kind % 3 else "light",
    )


def test_any_order_of_submit_cancel_stream_and_step(directory: Path) -> None:
    alone = {kind: answer_alone(directory, request_of_kind(kind)).token_ids for kind in range(8)}
    machine = type("Machine", (AnyOrder,), {"directory": directory, "alone": alone})
    test = machine.TestCase
    test.settings = settings(max_examples=examples(40), stateful_step_count=30)
    test("runTest").runTest()


@pytest.mark.parametrize("overlap", [False, True])
def test_answers_of_a_group_that_rests_are_the_same(directory: Path, overlap: bool) -> None:
    """Long prompts flood the engine; short ones of another group run one after the other, and the flood rests."""
    engine = make_engine(directory, overlap=overlap, max_batched_tokens=16, max_sequences=8, cache_tokens=600)
    flood = [request(kind, tokens=20, prompt_tokens=12, group="flood") for kind in range(24)]
    light = [request(kind, tokens=6, prompt_tokens=4, group="light") for kind in range(20)]
    asked, events, rested_steps = run_next_to(engine, flood, light)
    found = answers([*events, *drain(engine)])
    assert rested_steps > 5
    for request_id, one in asked.items():
        assert found[request_id][0] == answer_alone(directory, one).token_ids
