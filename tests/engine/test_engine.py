"""The engine's face: events, ends, cancellation, streams and refusals."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import answer_alone, answers, assert_idle, drain, make_engine, request
from over_admission import expect_short_answers
from safetensors.torch import load_file, save_file

from megatoken.engine import Engine, EngineConfig, FinishReason, Request, Sampling, TokenEvent
from megatoken.errors import CapacityError, CheckpointError, ConfigError, MegatokenError, NumericsError, RequestError

CANCELLED, LENGTH, STOP = FinishReason.CANCELLED, FinishReason.LENGTH, FinishReason.STOP
BOTH = pytest.mark.parametrize("overlap", [False, True])


# Events


@BOTH
def test_every_request_streams_its_tokens_and_ends_once(directory: Path, overlap: bool) -> None:
    engine = make_engine(directory, overlap=overlap)
    requests = [request(seed, tokens, prompt) for seed, (tokens, prompt) in enumerate([(1, 1), (12, 40), (30, 9)] * 4)]
    tickets = [engine.submit(one) for one in requests]
    assert tickets == list(range(12))
    events = drain(engine)
    assert all(len(event.token_ids) == 1 for event in events)
    told = answers(events)
    for ticket, one in zip(tickets, requests, strict=True):
        assert told[ticket] == (answer_alone(directory, one).token_ids, LENGTH)
    assert_idle(engine)
    state = engine.state()
    assert state.processed_tokens >= sum(len(one.prompt) + one.max_tokens - 1 for one in requests)
    assert state.batched_tokens <= state.max_batched_tokens == 24


def test_an_event_leaves_with_the_step_that_made_it(directory: Path) -> None:
    """Without overlap in the same step; with it, one step later."""
    for overlap, expected in ((False, [1, 1, 1]), (True, [0, 1, 1, 1])):
        engine = make_engine(directory, overlap=overlap)
        engine.submit(request(tokens=3))
        assert [len(engine.step()) for _ in expected] == expected
        assert_idle(engine)


def test_overlap_changes_no_token(directory: Path) -> None:
    requests = [
        request(seed, 5 + seed % 17, 1 + seed % 23, stop_token_ids=tuple(range(0, 301, 9))) for seed in range(30)
    ]
    serial, overlapped = (make_engine(directory, overlap=overlap).generate(requests) for overlap in (False, True))
    assert serial == overlapped
    assert {completion.finish_reason for completion in serial} == {STOP, LENGTH}


def test_counters_follow_a_request(directory: Path) -> None:
    engine = make_engine(directory, max_batched_tokens=4)
    engine.submit(request(tokens=2, prompt_tokens=6))
    seen = [engine.state()]
    while engine.busy:
        engine.step()
        seen.append(engine.state())
    assert [(c.in_flight, c.waiting, c.running, c.processed_tokens, c.batched_tokens, c.steps) for c in seen] == [
        (1, 1, 0, 0, 0, 0),
        (1, 0, 1, 4, 4, 1),
        (1, 0, 1, 6, 2, 2),
        (0, 0, 0, 7, 1, 3),
    ]
    assert [c.pages - c.pages_free for c in seen] == [0, 2, 2, 0]


# Cancellation


@BOTH
@pytest.mark.parametrize("steps", range(6))
def test_cancel_frees_pages_at_once(directory: Path, overlap: bool, steps: int) -> None:
    """From waiting (no step yet) over half a prompt and tokens in flight to just before the last token."""
    engine = make_engine(directory, overlap=overlap, max_batched_tokens=4)
    one = request(tokens=4, prompt_tokens=7)
    ticket = engine.submit(one)
    events = [event for _ in range(steps) for event in engine.step()]
    ended = any(event.finish_reason for event in events)
    engine.cancel(ticket)
    state = engine.state()
    assert (state.in_flight, state.waiting, state.running) == (0, 0, 0)
    assert state.pages_free == state.pages
    engine.cancel(ticket)
    tokens, reason = answers(events + drain(engine))[ticket]
    assert reason == (LENGTH if ended else CANCELLED)
    assert tokens == answer_alone(directory, one).token_ids[: len(tokens)]
    assert_idle(engine)


@BOTH
def test_cancel_spares_the_others(directory: Path, overlap: bool) -> None:
    engine = make_engine(directory, overlap=overlap)
    requests = [request(seed, 25) for seed in range(8)]
    tickets = [engine.submit(one) for one in requests]
    events = [event for _ in range(9) for event in engine.step()]
    for ticket in tickets[::2]:
        engine.cancel(ticket)
    told = answers(events + drain(engine))
    for ticket, one in zip(tickets, requests, strict=True):
        full = answer_alone(directory, one).token_ids
        tokens, reason = told[ticket]
        assert reason == (LENGTH if ticket % 2 else CANCELLED)
        assert tokens == full if reason == LENGTH else tokens == full[: len(tokens)]
    assert_idle(engine)


@BOTH
def test_cancel_of_preempted_and_unknown_tickets(directory: Path, overlap: bool) -> None:
    engine = make_engine(directory, overlap=overlap)
    expect_short_answers(engine._scheduler)
    tickets = [engine.submit(request(seed, 40)) for seed in range(4)]
    events = []
    while not engine.state().preemptions:
        events += engine.step()
    waiting = engine.state().waiting
    engine.cancel(tickets[-1])  # the newest is the one preempted
    engine.cancel(99)
    engine.cancel(-1)
    assert engine.state().waiting == waiting - 1
    told = answers(events + drain(engine))
    assert [told[ticket][1] for ticket in tickets] == [LENGTH, LENGTH, LENGTH, CANCELLED]
    assert_idle(engine)


# generate() and stream()


@BOTH
def test_generate_leaves_the_others_events_to_step(directory: Path, overlap: bool) -> None:
    engine = make_engine(directory, overlap=overlap)
    others = [request(seed, tokens) for seed, tokens in ((1, 30), (2, 3))]
    tickets = [engine.submit(one) for one in others]
    mine = [request(3, 10), request(4, 1)]
    assert engine.generate(mine) == [answer_alone(directory, one) for one in mine]
    told = answers(drain(engine))
    assert told == {
        ticket: (answer_alone(directory, one).token_ids, LENGTH) for ticket, one in zip(tickets, others, strict=True)
    }
    assert engine.generate([]) == []
    assert_idle(engine)


def test_generate_that_is_refused_leaves_nothing_behind(directory: Path) -> None:
    engine = make_engine(directory)
    for wrong in (Request([]), Request([1], 10_000)):
        with pytest.raises(MegatokenError):
            engine.generate([request(), request(1), wrong])
        assert_idle(engine)


@BOTH
def test_stream(directory: Path, overlap: bool) -> None:
    engine = make_engine(directory, overlap=overlap)
    one = request(5, 9)
    events = list(engine.stream(one))
    assert answers(events) == {0: (answer_alone(directory, one).token_ids, LENGTH)}
    assert [event.finish_reason for event in events] == [None] * 8 + [LENGTH]
    drain(engine)
    assert_idle(engine)


@BOTH
def test_a_stream_left_early_is_cancelled_and_loses_nothing_of_the_others(directory: Path, overlap: bool) -> None:
    engine = make_engine(directory, overlap=overlap)
    others = [request(seed, 15) for seed in range(1, 4)]
    tickets = [engine.submit(one) for one in others]
    stream = engine.stream(request(9, 30))
    assert [next(stream).ticket for _ in range(5)] == [3] * 5
    assert engine.state().in_flight == 4
    stream.close()
    assert engine.state().in_flight == 3
    told = answers(drain(engine))
    assert told == {
        ticket: (answer_alone(directory, one).token_ids, LENGTH) for ticket, one in zip(tickets, others, strict=True)
    }
    assert_idle(engine)


@BOTH
def test_streams_side_by_side(directory: Path, overlap: bool) -> None:
    engine = make_engine(directory, overlap=overlap)
    requests = [request(seed, 10 + seed) for seed in range(4)]
    events = [event for turn in itertools.zip_longest(*map(engine.stream, requests)) for event in turn if event]
    assert answers(events) == {
        ticket: (answer_alone(directory, one).token_ids, LENGTH) for ticket, one in enumerate(requests)
    }
    drain(engine)
    assert_idle(engine)


def test_a_stream_that_is_cancelled_says_so(directory: Path) -> None:
    engine = make_engine(directory)
    stream = engine.stream(request(5, 9))
    ticket = next(stream).ticket
    engine.cancel(ticket)
    assert list(stream) == [TokenEvent(ticket, (), CANCELLED)]
    assert_idle(engine)


# Refusals

UNACCEPTABLE = [
    (Request([]), RequestError, "the prompt is empty"),
    (Request([1, -2]), RequestError, "token id -2 is outside the vocabulary of 301"),
    (Request([301, 5]), RequestError, "token id 301 is outside the vocabulary of 301"),
    (Request([2**70]), RequestError, f"token id {2**70} is outside the vocabulary"),
    (Request([1, 2.5]), RequestError, "must be text or token ids"),
    (Request(["1"]), RequestError, "must be text or token ids"),
    (Request(None), RequestError, "must be text or token ids"),
    (Request("text"), RequestError, "has no tokenizer.json"),
    (Request([1], 0), RequestError, "max_tokens is 0"),
    (Request([1], -5), RequestError, "max_tokens is -5"),
    (Request([1], sampling=Sampling(-0.1)), RequestError, "temperature is -0.1"),
    (Request([1], sampling=Sampling(float("nan"))), RequestError, "temperature is nan"),
    (Request([1], sampling=Sampling(float("inf"))), RequestError, "temperature is inf"),
    (Request([1], sampling=Sampling(1.0, top_k=-1)), RequestError, "top_k is -1"),
    (Request([1], sampling=Sampling(1.0, top_p=0.0)), RequestError, "top_p is 0.0"),
    (Request([1], sampling=Sampling(1.0, top_p=1.5)), RequestError, "top_p is 1.5"),
    (Request([1], sampling=Sampling(1.0, top_p=float("nan"))), RequestError, "top_p is nan"),
    (Request([1], 2.0), RequestError, "max_tokens is 2.0; it must be a whole number"),
    (Request([1], sampling=None), RequestError, "sampling is None"),
    (Request([1], sampling=Sampling("1")), RequestError, "temperature is '1'; it must be a number"),
    (Request([1], sampling=Sampling(1.0, top_k=2.5)), RequestError, "top_k is 2.5; it must be a whole number"),
    (Request([1], sampling=Sampling(1.0, top_p=None)), RequestError, "top_p is None; it must be a number"),
    (Request([1], sampling=Sampling(1.0, seed="a")), RequestError, "seed is 'a'; it must be a whole number"),
    (Request([1], sampling=Sampling(1.0, seed=1.5)), RequestError, "seed is 1.5; it must be a whole number"),
    (Request([1], stop_token_ids=5), RequestError, "stop_token_ids is 5; it must be a tuple of token ids"),
    (Request([1], stop_token_ids=("a",)), RequestError, "stop_token_ids is ('a',)"),
    (Request([1] * 70, 11), CapacityError, "80 tokens; lower max_tokens to 10, or raise"),
    (Request([1], 2**70), CapacityError, "a prompt of 1 token and 1"),
    (Request([1] * 80, 1), CapacityError, "80 tokens; shorten the prompt, or raise"),
]


@pytest.mark.parametrize(("wrong", "error", "words"), UNACCEPTABLE, ids=[words for *_, words in UNACCEPTABLE])
def test_a_refused_request_is_named_in_one_line_and_not_queued(
    directory: Path, wrong: Request, error: type[MegatokenError], words: str
) -> None:
    engine = make_engine(directory)
    with pytest.raises(error) as caught:
        engine.submit(wrong)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert_idle(engine)
    assert engine.submit(request()) == 0


def test_the_longest_request_fits(directory: Path) -> None:
    engine = make_engine(directory)
    (completion,) = engine.generate([request(0, 10, 70)])
    assert len(completion.token_ids) == 10


def test_a_prompt_may_be_any_sequence_of_integers(directory: Path) -> None:
    ids = [3, 1, 4, 1, 5]
    prompts = [ids, tuple(ids), range(1, 6), np.array(ids), np.array(ids, dtype=np.uint16), torch.tensor(ids)]
    completions = make_engine(directory).generate([Request(prompt, 5, ignore_end_token=True) for prompt in prompts])
    expected = [answer_alone(directory, Request(list(prompt), 5, ignore_end_token=True)) for prompt in prompts]
    assert completions == expected


def test_models_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no such directory, and not one of the shapes tiny, 125m"):
        Engine(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"config.json: no such file"):
        Engine(tmp_path)
    with pytest.raises(CheckpointError, match="expected a directory or a shape as model, got None"):
        Engine(None)  # type: ignore[arg-type]
    with pytest.raises(CapacityError, match="device cuda: no NVIDIA GPU"):
        Engine("tiny", EngineConfig(device="cuda"))
    with pytest.raises(ConfigError, match="device is gpu; take one of auto, cpu, cuda"):
        Engine("tiny", EngineConfig(device="gpu"))  # type: ignore[arg-type]


# What goes wrong inside a step


@BOTH
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_an_error_not_tokens(
    directory: Path, overlap: bool, temperature: float, tmp_path: Path
) -> None:
    model = shutil.copytree(directory, tmp_path / "model")
    for file in model.glob("*.safetensors"):
        tensors = load_file(file)
        if "model.norm.weight" in tensors:
            save_file({**tensors, "model.norm.weight": torch.full_like(tensors["model.norm.weight"], 3e38)}, file)
    engine = make_engine(model, overlap=overlap)
    engine.submit(request(tokens=1, prompt_tokens=9, sampling=Sampling(temperature)))
    with pytest.raises(NumericsError, match="logits after 9 tokens of a request are no numbers: the weights of"):
        drain(engine)


def test_a_step_that_runs_out_of_gpu_memory_says_what_to_lower(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore")

    engine = make_engine(directory)
    monkeypatch.setattr(engine._runner, "launch", exhausted)
    engine.submit(request(prompt_tokens=9))
    with pytest.raises(CapacityError, match=r"in a step of 9 rows: CUDA out of memory. Tried .* GiB; .*lower memory_"):
        engine.step()


def test_random_weights_for_a_directory_differ_by_seed(directory: Path) -> None:
    config = EngineConfig(precision="fp32", max_length=64)
    first, again, second = (
        Engine(directory, config, random_weights=True, seed=seed).generate([request()]) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != second
    assert Engine("tiny", EngineConfig(max_length=64)).model_config.name == "tiny"
