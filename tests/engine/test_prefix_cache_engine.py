"""Engines with a prefix cache give the tokens of engines without one, and compute far fewer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engines import answers, assert_idle, drain, make_engine
from over_admission import expect_short_answers

from examples import every
from megatoken.engine import Engine, EngineConfig, FinishReason, Request
from megatoken.engine.simulated import VirtualClock

BOTH = pytest.mark.parametrize("overlap", [False, True])


def converse(engine: Engine, users: int, turns: int, system_tokens: int, cancel_one_in: int = 0) -> list[list[int]]:
    """Answers of conversations that begin alike; each turn repeats all that was said before."""
    draw = np.random.default_rng(5)
    vocabulary = engine.model_config.vocabulary_size
    system = draw.integers(3, vocabulary, system_tokens).tolist()
    said = [list(system) for _ in range(users)]
    told = []
    for _ in range(turns):
        for history in said:
            history += draw.integers(3, vocabulary, int(draw.integers(3, 9))).tolist()
        asked = {engine.submit(Request(list(history), 5, ignore_end_token=True)): history for history in said}
        events = engine.step()
        for number in range(cancel_one_in and users):
            extra = engine.submit(Request([*said[number], 1, 2, 3], 5, ignore_end_token=True))
            events += engine.step()
            if number % cancel_one_in == 0:
                engine.cancel(extra)
        answered = answers(events + drain(engine))
        for request_id, history in asked.items():
            history += answered[request_id][0]
            told.append(answered[request_id][0])
        assert_idle(engine)
    return told


@BOTH
def test_conversations_get_the_same_tokens_and_save_their_beginnings(directory: Path, overlap: bool) -> None:
    """A short form of 64 conversations of 8 turns on 2,000 tokens."""
    sizes = {"cache_tokens": 4096, "max_batched_tokens": 64, "max_sequences": 16, "overlap": overlap}
    plain, sharing = (make_engine(directory, **sizes, prefix_cache=on) for on in (False, True))
    assert converse(plain, 12, 4, 120) == converse(sharing, 12, 4, 120)
    off, on = plain.state(), sharing.state()
    assert off.prefix_cache_queries == off.prefix_cache_hits == 0
    assert on.prefix_cache_hits > 0.85 * on.prefix_cache_queries
    assert on.processed_tokens == off.processed_tokens - on.prefix_cache_hits


@pytest.mark.parametrize(("cache_tokens", "overlap"), [(180, True), (320, False), *every((180, False), (320, True))])
def test_cancellations_and_preemptions_in_between_change_no_token(
    directory: Path, overlap: bool, cache_tokens: int
) -> None:
    sizes = {"max_batched_tokens": 48, "max_sequences": 8, "overlap": overlap}
    plain = make_engine(directory, **sizes, cache_tokens=4096)
    pressed = make_engine(directory, **sizes, cache_tokens=cache_tokens, prefix_cache=True)
    expect_short_answers(pressed._scheduler)
    assert converse(plain, 8, 4, 60, cancel_one_in=2) == converse(pressed, 8, 4, 60, cancel_one_in=2)
    state = pressed.state()
    assert state.prefix_cache_hits > 0
    if cache_tokens == 180:
        assert state.preemptions > 0


def test_cached_tokens_stand_in_the_first_event(directory: Path) -> None:
    engine = make_engine(directory, prefix_cache=True)
    request = Request(list(range(3, 20)), 3, ignore_end_token=True)  # 17 tokens, 4 pages and one
    engine.generate([request])
    request_id = engine.submit(request)
    events = [event for event in drain(engine) if event.request_id == request_id]
    assert [event.cached_tokens for event in events] == [16, 0, 0]
    engine.generate([replace(request, prompt=request.prompt[:16])])  # the last token is computed, with its whole page
    assert (engine.state().prefix_cache_queries, engine.state().prefix_cache_hits) == (17 + 17 + 16, 16 + 12)


def test_the_next_turn_finds_the_answer_of_the_last_one(directory: Path) -> None:
    for overlap in (False, True):
        engine = make_engine(directory, prefix_cache=True, overlap=overlap)
        prompt = list(range(3, 13))
        [first] = engine.generate([Request(prompt, 9, ignore_end_token=True)])
        request_id = engine.submit(Request([*prompt, *first.token_ids, 5], 1))
        [event] = [event for event in drain(engine) if event.request_id == request_id]
        assert event.cached_tokens == 16  # of 19 the last has no keys yet, and pages have 4


def test_requests_of_one_step_share_what_it_computes(directory: Path) -> None:
    engine = make_engine(directory, prefix_cache=True)
    request = Request(list(range(3, 20)), 3, ignore_end_token=True)
    alike = engine.generate([request] * 3)
    assert alike[0].token_ids == alike[1].token_ids == alike[2].token_ids
    assert engine.state().prefix_cache_hits == 32
    assert engine.state().steps == 3


def test_other_salts_never_share(directory: Path) -> None:
    engine = make_engine(directory, prefix_cache=True)
    request = Request(list(range(3, 20)), 3, ignore_end_token=True)
    salted = [replace(request, cache_salt=salt) for salt in ("", "a", "b", "\ud800")]
    first = engine.generate(salted)
    assert engine.state().prefix_cache_hits == 0
    again = engine.generate(salted)
    assert [one.token_ids for one in again] == [one.token_ids for one in first]
    assert engine.state().prefix_cache_hits == 4 * 16


def test_a_simulated_engine_shares_as_the_real_one_does(directory: Path) -> None:
    config = EngineConfig(
        precision="bf16",
        max_batched_tokens=48,
        max_sequences=12,
        max_length=256,
        page_size=16,
        cache_tokens=1024,
        overlap=False,
        prefix_cache=True,
    )
    real = Engine("tiny", replace(config, device="cpu", threads=1))
    other = Engine.simulated("tiny", config, "H200", VirtualClock())
    draw = np.random.default_rng(1)
    shared = draw.integers(3, 8000, 70).tolist()
    for number in range(14):
        prompt = [*shared[: int(draw.integers(0, 71))], *draw.integers(3, 8000, draw.integers(1, 30)).tolist()]
        request = Request(prompt, int(draw.integers(1, 40)), ignore_end_token=True, cache_salt="ab"[number % 9 == 0])
        assert real.submit(request) == other.submit(request)
    while real.busy:
        events = [(event.request_id, event.finish_reason, event.cached_tokens) for event in real.step()]
        assert [(event.request_id, event.finish_reason, event.cached_tokens) for event in other.step()] == events
        assert replace(other.state(), computed_seconds=0.0) == replace(real.state(), computed_seconds=0.0)
    assert real.state().prefix_cache_hits > 200


def test_a_request_that_failed_leaves_nothing_to_find(directory: Path) -> None:
    engine = make_engine(directory, prefix_cache=True)
    request = Request(list(range(3, 20)), 3, ignore_end_token=True)
    norm = engine._runner._weights.layers[0].post_norm_D
    sound = norm.clone()
    norm.fill_(float("nan"))
    engine.submit(request)
    assert [event.finish_reason for event in drain(engine)] == [FinishReason.ERROR]
    norm.copy_(sound)
    [answer] = engine.generate([request])
    assert engine.state().prefix_cache_hits == 0
    assert answer.token_ids == make_engine(directory).generate([request])[0].token_ids
    assert_idle(engine)
