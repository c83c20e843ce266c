"""The engine's face: events, ends, cancellation, streams and refusals."""

from __future__ import annotations

import itertools
import math
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from engines import answer_alone, answers, assert_idle, drain, make_engine, request
from over_admission import expect_short_answers
from safetensors.torch import load_file, save_file

from examples import every
from megatoken.engine import Engine, EngineConfig, FinishReason, Grammar, Request, Sampling, TokenEvent
from megatoken.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    MegatokenError,
    NumericsError,
    RequestError,
    ThreadError,
)

CANCELLED, LENGTH, STOP = FinishReason.CANCELLED, FinishReason.LENGTH, FinishReason.STOP
BOTH = pytest.mark.parametrize("overlap", [False, True])


# Events


@BOTH
def test_every_request_streams_its_tokens_and_ends_once(directory: Path, overlap: bool) -> None:
    engine = make_engine(directory, overlap=overlap)
    requests = [request(seed, tokens, prompt) for seed, (tokens, prompt) in enumerate([(1, 1), (12, 40), (30, 9)] * 4)]
    request_ids = [engine.submit(one) for one in requests]
    assert request_ids == list(range(12))
    events = drain(engine)
    assert all(len(event.token_ids) == 1 for event in events)
    answered = answers(events)
    for request_id, one in zip(request_ids, requests, strict=True):
        assert answered[request_id] == (answer_alone(directory, one).token_ids, LENGTH)
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
    request_id = engine.submit(one)
    events = [event for _ in range(steps) for event in engine.step()]
    ended = any(event.finish_reason for event in events)
    engine.cancel(request_id)
    state = engine.state()
    assert (state.in_flight, state.waiting, state.running) == (0, 0, 0)
    assert state.pages_free == state.pages
    engine.cancel(request_id)
    tokens, reason = answers(events + drain(engine))[request_id]
    assert reason == (LENGTH if ended else CANCELLED)
    assert tokens == answer_alone(directory, one).token_ids[: len(tokens)]
    assert_idle(engine)


@BOTH
def test_cancel_spares_the_others(directory: Path, overlap: bool) -> None:
    engine = make_engine(directory, overlap=overlap)
    requests = [request(seed, 25) for seed in range(8)]
    request_ids = [engine.submit(one) for one in requests]
    events = [event for _ in range(9) for event in engine.step()]
    for request_id in request_ids[::2]:
        engine.cancel(request_id)
    answered = answers(events + drain(engine))
    for request_id, one in zip(request_ids, requests, strict=True):
        full = answer_alone(directory, one).token_ids
        tokens, reason = answered[request_id]
        assert reason == (LENGTH if request_id % 2 else CANCELLED)
        assert tokens == full if reason == LENGTH else tokens == full[: len(tokens)]
    assert_idle(engine)


@BOTH
def test_cancel_of_preempted_and_unknown_tickets(directory: Path, overlap: bool) -> None:
    engine = make_engine(directory, overlap=overlap)
    expect_short_answers(engine._scheduler)
    request_ids = [engine.submit(request(seed, 40)) for seed in range(4)]
    events = []
    while not engine.state().preemptions:
        events += engine.step()
    waiting = engine.state().waiting
    engine.cancel(request_ids[-1])  # the newest is the one preempted
    engine.cancel(99)
    engine.cancel(-1)
    assert engine.state().waiting == waiting - 1
    answered = answers(events + drain(engine))
    assert [answered[request_id][1] for request_id in request_ids] == [LENGTH, LENGTH, LENGTH, CANCELLED]
    assert_idle(engine)


# generate() and stream()


@BOTH
def test_generate_leaves_the_others_events_to_step(directory: Path, overlap: bool) -> None:
    engine = make_engine(directory, overlap=overlap)
    others = [request(seed, tokens) for seed, tokens in ((1, 30), (2, 3))]
    request_ids = [engine.submit(one) for one in others]
    mine = [request(3, 10), request(4, 1)]
    assert engine.generate(mine) == [answer_alone(directory, one) for one in mine]
    answered = answers(drain(engine))
    assert answered == {
        request_id: (answer_alone(directory, one).token_ids, LENGTH)
        for request_id, one in zip(request_ids, others, strict=True)
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
    request_ids = [engine.submit(one) for one in others]
    stream = engine.stream(request(9, 30))
    assert [next(stream).request_id for _ in range(5)] == [3] * 5
    assert engine.state().in_flight == 4
    stream.close()
    assert engine.state().in_flight == 3
    answered = answers(drain(engine))
    assert answered == {
        request_id: (answer_alone(directory, one).token_ids, LENGTH)
        for request_id, one in zip(request_ids, others, strict=True)
    }
    assert_idle(engine)


@BOTH
def test_streams_side_by_side(directory: Path, overlap: bool) -> None:
    engine = make_engine(directory, overlap=overlap)
    requests = [request(seed, 10 + seed) for seed in range(4)]
    events = [event for turn in itertools.zip_longest(*map(engine.stream, requests)) for event in turn if event]
    assert answers(events) == {
        request_id: (answer_alone(directory, one).token_ids, LENGTH) for request_id, one in enumerate(requests)
    }
    drain(engine)
    assert_idle(engine)


def test_a_stream_that_is_cancelled_says_so(directory: Path) -> None:
    engine = make_engine(directory)
    stream = engine.stream(request(5, 9))
    request_id = next(stream).request_id
    engine.cancel(request_id)
    assert list(stream) == [TokenEvent(request_id, (), CANCELLED)]
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
    (Request([10**5000]), RequestError, "token id an integer of thousands of digits is outside the vocabulary"),
    (Request([1], 10**5000), RequestError, "max_tokens is an integer of thousands of digits"),
    (Request([1], True), RequestError, "max_tokens is True; it must be a whole number"),
    (Request([1], sampling=Sampling(10**400)), RequestError, "temperature is 1000"),
    (Request([1], sampling=Sampling(-(10**400))), RequestError, "it must be finite and not negative"),
    (Request([1], sampling=Sampling(True)), RequestError, "temperature is True; it must be a number"),
    (Request([1], sampling=Sampling(1.0, top_k=10**400)), RequestError, "it must be at most 2,147,483,647"),
    (Request([1], sampling=Sampling(1.0, top_k=False)), RequestError, "top_k is False; it must be a whole number"),
    (Request([1], sampling=Sampling(1.0, top_p=10**400)), RequestError, "it must be above 0 and at most 1"),
    (Request([1], sampling=Sampling(1.0, seed=10**400)), RequestError, "it must be at most 9,223,372,036,854,775,807"),
    (Request([1], sampling=Sampling(1.0, min_p=1.5)), RequestError, "min_p is 1.5"),
    (Request([1], sampling=Sampling(repetition_penalty=0)), RequestError, "repetition_penalty is 0; it must be finite"),
    (Request([1], sampling=Sampling(repetition_penalty=10**400)), RequestError, "repetition_penalty is 1000"),
    (Request([1], sampling=Sampling(presence_penalty=2.5)), RequestError, "presence_penalty is 2.5"),
    (Request([1], sampling=Sampling(frequency_penalty="1")), RequestError, "frequency_penalty is '1'"),
    (Request([1], sampling=Sampling(logit_bias=[1])), RequestError, "logit_bias is [1]; it must map token ids"),
    (Request([1], sampling=Sampling(logit_bias={"1": 1})), RequestError, "logit_bias's token id is '1'"),
    (Request([1], sampling=Sampling(logit_bias={-1: 1})), RequestError, "logit_bias's token id is -1"),
    (Request([1], sampling=Sampling(logit_bias={1: 200})), RequestError, "logit_bias of token id 1 is 200"),
    (Request([1], sampling=Sampling(logit_bias={1: float("nan")})), RequestError, "logit_bias of token id 1 is nan"),
    (Request([1], sampling=Sampling(logit_bias={301: 1})), RequestError, "token id 301, outside the vocabulary of 301"),
    (Request([1], 5, min_tokens=6), RequestError, "min_tokens is 6; it must be at most 5"),
    (Request([1], min_tokens=-1), RequestError, "min_tokens is -1; it must be 0 or more"),
    (Request([1], logprobs=21), RequestError, "logprobs is 21; it must be at most 20"),
    (Request([1], logprobs=True), RequestError, "logprobs is True; it must be a whole number"),
    (Request([1], prompt_logprobs=-1), RequestError, "prompt_logprobs is -1"),
    (Request([1], stop="end"), RequestError, "stop is 'end'; it must be a tuple of strings"),
    (Request([1], stop=("",)), RequestError, "stop is ('',); it must be a tuple of strings that are not empty"),
    (Request([1], cache_salt=5), RequestError, "cache_salt is 5; it must be a string"),
    (Request([1], grammar="[0-9]"), RequestError, "grammar is '[0-9]'; write Grammar("),
    (Request([1], grammar=Grammar("xml", "<a>")), RequestError, "the kind of grammar is 'xml'; it must be one of json"),
    (Request([1], grammar=Grammar("regex")), RequestError, "a grammar of kind regex needs a text"),
    (Request([1], grammar=Grammar("json_object", "{}")), RequestError, "a grammar of kind json_object needs no text"),
    (Request([1], grammar=Grammar("regex", 5)), RequestError, "the text of the grammar is 5; it must be a string"),
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


@pytest.fixture(scope="module", params=["torch", "compiled"])
def own(request: pytest.FixtureRequest, directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose attention the compiled kernels do not take, and one whose attention they do."""
    if request.param == "torch":
        return directory
    path = tmp_path_factory.mktemp("wide")
    make_checkpoint(path, hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    return path


def poisoned_engine(directory: Path, token: int, **sizes: object) -> Engine:
    """With one token whose embedding is not finite: no token that attends to it is finite either."""
    engine = make_engine(directory, **sizes)
    engine._runner._weights.embedding_VD[token] = math.nan
    return engine


@BOTH
@pytest.mark.parametrize(
    ("temperature", "prompt_tokens"),  # in one step, and in chunks
    [(0.0, 6), (1.0, 40), *every((0.0, 40), (1.0, 6))],
)
def test_logits_that_are_not_finite_end_their_request_alone(
    own: Path, overlap: bool, temperature: float, prompt_tokens: int
) -> None:
    """Neighbours get the tokens that they get without it, one a step; and so do those that get its pages."""
    sizes = {"overlap": overlap, "max_batched_tokens": 12, "cache_tokens": 400, "page_size": 16}
    sampling = Sampling(temperature, seed=3)
    others = [request(seed, tokens=12, sampling=sampling) for seed in range(1, 9)]
    expected = [one.token_ids for one in make_engine(own, **sizes).generate(others)]
    unseen = set(range(301)).difference(*expected, *(one.prompt for one in others))
    prompt = [7, 8, max(unseen), *range(100)][:prompt_tokens]
    engine = poisoned_engine(own, max(unseen), **sizes)
    request_ids = [engine.submit(one) for one in others[:3]]
    failed = engine.submit(Request(prompt, 9, sampling, ignore_end_token=True))
    request_ids += [engine.submit(one) for one in others[3:]]
    tokens: dict[int, list[int]] = {one: [] for one in request_ids}
    last_step: dict[int, int] = {}
    steps = 0
    while engine.busy:
        steps += 1
        for event in engine.step():
            if event.request_id == failed:
                assert (event.token_ids, event.finish_reason) == ((), FinishReason.ERROR)
                assert isinstance(event.error, NumericsError)
                assert f"logits after {prompt_tokens} tokens of a request are not finite" in str(event.error)
                continue
            assert event.error is None
            assert last_step.get(event.request_id, steps - 1) == steps - 1, "no gap"
            last_step[event.request_id] = steps
            tokens[event.request_id] += event.token_ids
    assert list(tokens.values()) == expected
    assert_idle(engine)


@BOTH
def test_generate_raises_the_error_of_a_request_and_leaves_none(directory: Path, overlap: bool) -> None:
    engine = poisoned_engine(directory, 300, overlap=overlap)
    other = engine.submit(request(tokens=3))
    with pytest.raises(NumericsError, match="logits after 6 tokens of a request are not finite: the weights of"):
        engine.generate([request(seed=1), Request([7, 300, 9, 10, 11, 12], 3), request(seed=2)])
    with pytest.raises(NumericsError, match="not finite"):
        list(engine.stream(Request([7, 300, 9, 10, 11, 12], 3)))
    assert {event.request_id for event in drain(engine)} <= {other}
    assert_idle(engine)


def test_a_row_that_cannot_be_sampled_ends_its_request_alone(directory: Path) -> None:
    """What ``submit`` let through nonetheless: here a value that changed behind its back."""
    engine = make_engine(directory)
    others = [request(seed, sampling=Sampling(0.8, seed=5)) for seed in range(3)]
    request_ids = [engine.submit(one) for one in others]
    bad = engine.submit(request(seed=9, sampling=(broken := Sampling(0.8, seed=5))))
    object.__setattr__(broken, "temperature", 10**400)
    events = drain(engine)
    (event,) = [one for one in events if one.request_id == bad]
    assert event.finish_reason is FinishReason.ERROR and "no token could be drawn after 6 tokens" in str(event.error)
    found = answers([one for one in events if one.request_id != bad])
    assert [found[one][0] for one in request_ids] == [answer_alone(directory, one).token_ids for one in others]


def test_a_second_thread_is_refused_and_nothing_is_lost(directory: Path) -> None:
    engine = make_engine(directory)
    wanted = [request(seed) for seed in range(6)]
    expected = engine.generate(wanted)
    refused = []

    def generate() -> None:
        try:
            assert engine.generate(wanted) == expected
        except ThreadError as error:
            refused.append(str(error))

    for _ in range(5):
        threads = [threading.Thread(target=generate) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert refused and set(refused) == {
        "two threads call one Engine at the same time; share it through an EngineThread"
    }
    assert engine.generate(wanted) == expected
    assert_idle(engine)


def test_a_model_whose_logits_are_never_finite_names_its_weights(directory: Path, tmp_path: Path) -> None:
    model = shutil.copytree(directory, tmp_path / "model")
    for file in model.glob("*.safetensors"):
        tensors = load_file(file)
        if "model.norm.weight" in tensors:
            save_file({**tensors, "model.norm.weight": torch.full_like(tensors["model.norm.weight"], 3e38)}, file)
    with pytest.raises(NumericsError, match="overflow in fp32; check the checkpoint or use another precision"):
        make_engine(model).generate([request(tokens=1, prompt_tokens=9)])


def test_a_step_that_runs_out_of_gpu_memory_says_what_to_lower(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore")

    engine = make_engine(directory)
    monkeypatch.setattr(engine._runner, "_compute", exhausted)
    engine.submit(request(prompt_tokens=9))
    with pytest.raises(
        CapacityError, match=r"in a step of 9 tokens: CUDA out of memory. Tried .* GiB; .*lower memory_"
    ):
        engine.step()


def test_random_weights_for_a_directory_differ_by_seed(directory: Path) -> None:
    config = EngineConfig(precision="fp32", max_length=64)
    first, again, second = (
        Engine(directory, config, random_weights=True, seed=seed).generate([request()]) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != second
    assert Engine("tiny", EngineConfig(max_length=64)).model_config.name == "tiny"
