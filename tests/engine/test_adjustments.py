"""Penalties, biases and masks: their formulas, transformers' definitions, and what they must not change."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from engines import answer_alone, answers, assert_idle, drain, make_engine, request
from hypothesis import given, settings
from over_admission import expect_short_answers
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.logits_process import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

from examples import examples
from megatoken.engine import Completion, Engine, EngineConfig, FinishReason, Grammar, GrammarKind, Request, Sampling
from megatoken.engine.active_request import ActiveRequest, activate
from megatoken.engine.adjustments import BadWords
from megatoken.engine.config import find_shape
from megatoken.engine.ops import NO_TOKEN, NOTHING_LEFT
from megatoken.engine.sampling import sample
from megatoken.errors import RequestError

VOCABULARY = 24
SHAPE = replace(find_shape("tiny"), vocabulary_size=VOCABULARY, end_token_ids=(2, 3))
OVERLAP = pytest.mark.parametrize("overlap", [False, True])


def defined_logits(logits: list[float], asked: Request, answer: list[int]) -> np.ndarray:
    """The definition, token by token in float64; ``answer``: all tokens so far, those on the device included."""
    sampling, adjusted = asked.sampling, np.array(logits, dtype=np.float64)
    for token in range(len(logits)):
        adjusted[token] += sampling.logit_bias.get(token, 0.0)
        ends = token in asked.stop_token_ids or (token in SHAPE.end_token_ids and not asked.ignore_end_token)
        if ends and len(answer) < asked.min_tokens:
            adjusted[token] = -np.inf
        if asked.allowed_token_ids and token not in asked.allowed_token_ids:
            adjusted[token] = -np.inf
        if token in asked.prompt or token in answer:
            factor = sampling.repetition_penalty
            adjusted[token] = adjusted[token] / factor if adjusted[token] > 0 else adjusted[token] * factor
        adjusted[token] -= sampling.frequency_penalty * answer.count(token)
        adjusted[token] -= sampling.presence_penalty * (token in answer)
    return adjusted


def choose(
    logits: torch.Tensor, requests: list[ActiveRequest], positions: list[int], last_tokens: list[int]
) -> list[int]:
    chosen = torch.tensor([row.index(max(row)) for row in logits.tolist()])
    slots = np.arange(len(requests), dtype=np.int32)
    failed: dict[int, Exception] = {}
    sample(logits, requests, np.array(positions), slots, torch.tensor(last_tokens), chosen, failed)
    assert not failed
    return chosen.tolist()


tokens = st.integers(0, VOCABULARY - 1)
reals = st.floats(-2, 2)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.0, 0.5, 2.0]),
    top_k=st.sampled_from([0, 5]),
    min_p=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 2**63),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.7, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.3]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-100.0, -1.5, 2.0]), max_size=4),
)
requests = st.builds(
    Request,
    st.lists(tokens, min_size=1, max_size=12),
    st.just(40),
    samplings,
    st.lists(tokens, max_size=2).map(tuple),
    st.booleans(),
    st.integers(0, 8),
    allowed_token_ids=st.one_of(st.just(()), st.lists(tokens, max_size=3).map(tuple)),
)


@settings(max_examples=examples(150))
@given(data=st.data())
def test_rows_follow_the_definition_and_do_not_depend_on_the_batch(data: st.DataObject) -> None:
    """Also where the last token of an answer is only on the device, and where an answer grew since the last step."""
    asked = data.draw(st.lists(requests, min_size=1, max_size=20))
    answer = [data.draw(st.lists(tokens, max_size=70)) for _ in asked]
    in_flight = [bool(one) and data.draw(st.booleans()) for one in answer]
    logits = torch.randn(len(asked), VOCABULARY, generator=torch.Generator().manual_seed(0)).double() * 3
    active = []
    for one, generated, flying in zip(asked, answer, in_flight, strict=True):
        active.append(activate(one, list(one.prompt), SHAPE))
        known = generated[:-1] if flying else generated
        active[-1].generated.extend(known[: len(known) // 2])
        if active[-1].adjustments is not None and active[-1].adjustments.counts is not None:
            active[-1].adjustments.counts.up_to_date(active[-1].generated)
        active[-1].generated.extend(known[len(known) // 2 :])
    positions = [len(one.prompt) + len(generated) for one, generated in zip(asked, answer, strict=True)]
    last = [generated[-1] if generated else 0 for generated in answer]
    together = choose(logits, active, positions, last)
    for row, one in enumerate(asked):
        alone = choose(logits[row : row + 1], active[row : row + 1], positions[row : row + 1], last[row : row + 1])
        assert alone == [together[row]]
        defined = defined_logits(logits[row].tolist(), one, answer[row])
        # Without options left, the tested draw of the defined logits must be the same.
        options = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": {}}
        bare = activate(Request([0], 1, replace(one.sampling, **options)), [0] * positions[row], SHAPE)
        expected = int(defined.argmax())
        if one.sampling.temperature > 0:
            [expected] = choose(torch.tensor(defined)[None], [bare], positions[row : row + 1], [0])
        assert together[row] == (expected if np.isfinite(defined.max()) else NOTHING_LEFT)


def test_formulas_equal_those_of_transformers() -> None:
    """In float32, row by row: the repetition penalty's logits and what min-p keeps."""
    logits = torch.randn(30, 500, generator=torch.Generator().manual_seed(1)) * 4
    draws = random.Random(0)
    for row in range(30):
        ids = [draws.randrange(500) for _ in range(40)]
        factor = draws.choice([0.7, 1.1, 2.0])
        theirs = RepetitionPenaltyLogitsProcessor(factor)(torch.tensor([ids]), logits[row : row + 1])
        one = Request(ids[:10], 50, Sampling(repetition_penalty=factor))
        active = activate(one, ids[:10], replace(SHAPE, vocabulary_size=500))
        active.generated.extend(ids[10:])
        assert choose(logits[row : row + 1], [active], [40], [0]) == [int(theirs.argmax())]
        temperature = draws.choice([0.5, 1.0, 3.0])
        kept = MinPLogitsWarper(0.1)(torch.tensor([ids]), logits[row : row + 1] / temperature)[0].isfinite()
        sampling = Sampling(temperature, min_p=0.1)
        drawn = [activate(Request([0], 1, replace(sampling, seed=seed)), [0] * 9, SHAPE) for seed in range(100)]
        found = set(choose(logits[row].expand(100, -1), drawn, [9] * 100, [0] * 100))
        assert found <= set(kept.nonzero()[:, 0].tolist())


@OVERLAP
def test_answers_equal_those_of_transformers(directory: Path, overlap: bool) -> None:
    """Whole greedy answers in fp32, with the options that transformers' ``generate`` has too."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    prompts = [request(seed, prompt_tokens=9).prompt for seed in range(2)]
    engine = make_engine(directory, cache_tokens=400, overlap=overlap)
    plain = engine.generate([Request(prompt, 20, ignore_end_token=True) for prompt in prompts])
    for prompt, without in zip(prompts, plain, strict=True):
        end = without.token_ids[3]
        expected = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            generation_config=GenerationConfig(
                max_new_tokens=20,
                min_new_tokens=9,
                repetition_penalty=1.2,
                sequence_bias=[[[11], 1.5], [[17], -2.0]],
                eos_token_id=end,
                pad_token_id=0,
                bos_token_id=1,
            ),
        )[0, len(prompt) :].tolist()
        sampling = Sampling(repetition_penalty=1.2, logit_bias={11: 1.5, 17: -2.0})
        asked = Request(prompt, 20, sampling, (end,), ignore_end_token=True, min_tokens=9)
        [found] = engine.generate([asked])
        assert found.token_ids == expected
        assert found.token_ids != without.token_ids[: len(expected)]


OPTIONS = [
    {"sampling": Sampling(repetition_penalty=1.4)},
    {"sampling": Sampling(1.2, seed=1, presence_penalty=0.8, frequency_penalty=-0.5)},
    {"sampling": Sampling(logit_bias={5: 3.0, 9: -100.0, 250: 1.0})},
    {"sampling": Sampling(1.5, seed=2, min_p=0.1, repetition_penalty=0.8), "min_tokens": 9, "stop_token_ids": (7, 8)},
    {"sampling": Sampling(frequency_penalty=2.0), "min_tokens": 4, "stop_token_ids": tuple(range(0, 301, 3))},
    {},
    {"sampling": Sampling(0.9, seed=3)},
]


MIXED = [request(seed, tokens=11 + seed % 5, **OPTIONS[seed % len(OPTIONS)]) for seed in range(14)]


@pytest.fixture(scope="module")
def mixed_alone(directory: Path) -> list[Completion]:
    """The answer to each request of ``MIXED`` alone."""
    return [answer_alone(directory, one) for one in MIXED]


@pytest.mark.parametrize(
    "sizes",
    [
        {"overlap": False},
        {"overlap": True},
        {"overlap": True, "cache_tokens": 60, "max_batched_tokens": 9},
        {"overlap": True, "max_batched_tokens": 1, "page_size": 1},
    ],
    ids=str,
)
def test_neighbours_batches_and_preemptions_change_no_token(
    directory: Path, mixed_alone: list[Completion], sizes: dict[str, int]
) -> None:
    assert mixed_alone[0] != answer_alone(directory, replace(MIXED[0], sampling=Sampling()))
    engine = make_engine(directory, **sizes)
    expect_short_answers(engine._scheduler)
    assert engine.generate(MIXED) == mixed_alone
    assert engine.state().preemptions or "cache_tokens" not in sizes
    assert_idle(engine)


@OVERLAP
def test_min_tokens_keeps_every_end_out(directory: Path, overlap: bool) -> None:
    free = answer_alone(directory, request(3, tokens=20)).token_ids
    engine = make_engine(directory, overlap=overlap)
    stops = tuple(free[4:6])
    [early] = engine.generate([request(3, tokens=20, stop_token_ids=stops)])
    assert early.finish_reason is FinishReason.STOP and len(early.token_ids) <= 5
    for least in (0, 3, 8, 20):
        [found] = engine.generate([request(3, tokens=20, stop_token_ids=stops, min_tokens=least)])
        assert not set(found.token_ids[:least]) & set(stops)
        assert found.token_ids[:least] == free[: min(least, free.index(stops[0]), free.index(stops[1]))] or least > 4


@OVERLAP
def test_options_that_leave_no_token_end_their_request_alone(directory: Path, overlap: bool) -> None:
    engine = make_engine(directory, overlap=overlap)
    others = [request(seed) for seed in range(3)]
    request_ids = [engine.submit(one) for one in others[:2]]
    bad = engine.submit(request(9, stop_token_ids=tuple(range(301)), min_tokens=2))
    request_ids.append(engine.submit(others[2]))
    events = drain(engine)
    [event] = [one for one in events if one.request_id == bad]
    assert event.finish_reason is FinishReason.ERROR and isinstance(event.error, RequestError)
    assert "no token is left to choose after 6 tokens of a request" in str(event.error)
    found = answers([one for one in events if one.request_id != bad])
    assert [found[one][0] for one in request_ids] == [answer_alone(directory, one).token_ids for one in others]
    assert_idle(engine)


@OVERLAP
def test_absurd_values_end_at_most_their_request(directory: Path, overlap: bool) -> None:
    """The largest and smallest values that are accepted; others in the same steps get their own tokens."""
    absurd = [
        Sampling(1e308, repetition_penalty=1e308, presence_penalty=2, frequency_penalty=2, seed=1),
        Sampling(5e-324, repetition_penalty=5e-324, seed=1),
        Sampling(repetition_penalty=5e-324),
        Sampling(1.0, min_p=1.0, top_p=5e-324, seed=2**63 - 1, logit_bias=dict.fromkeys(range(301), -100)),
        Sampling(1.0, top_k=2**31 - 1, seed=-(2**63), logit_bias=dict.fromkeys(range(301), 100)),
    ]
    engine = make_engine(directory, overlap=overlap, cache_tokens=400)
    others = [request(seed, sampling=Sampling(0.8, seed=seed)) for seed in range(3)]
    request_ids = [engine.submit(one) for one in others[:1]]
    bad = {engine.submit(request(seed, sampling=sampling)) for seed, sampling in enumerate(absurd)}
    request_ids += [engine.submit(one) for one in others[1:]]
    events = drain(engine)
    assert all(isinstance(event.error, RequestError) for event in events if event.error is not None)
    assert {event.request_id for event in events if event.error is not None} <= bad
    found = answers(events)
    assert [found[one][0] for one in request_ids] == [answer_alone(directory, one).token_ids for one in others]
    assert_idle(engine)


def test_a_row_without_numbers_stays_marked() -> None:
    logits = torch.randn(2, VOCABULARY, dtype=torch.float64)
    logits[0, 3] = float("nan")
    active = [activate(Request([1], 5, Sampling(repetition_penalty=2.0)), [1], SHAPE) for _ in range(2)]
    chosen = torch.tensor([NO_TOKEN, 0])
    sample(logits, active, np.array([1, 1]), np.zeros(2, dtype=np.int32), torch.zeros(1, dtype=torch.int64), chosen, {})
    assert chosen[0] == NO_TOKEN and chosen[1] >= 0


def test_plain_requests_cost_a_step_nothing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No call into sampling at all while every request is plain, and again once the others have ended."""
    calls = []
    monkeypatch.setattr("megatoken.engine.runner.sample", lambda *_, **arrays: calls.append(arrays))
    engine = make_engine(directory)
    engine.generate([request(1), request(2)])
    assert not calls
    engine.generate([request(1), request(2, sampling=Sampling(1.0))])
    assert calls
    calls.clear()
    engine.generate([request(1), request(2)])
    assert not calls


def test_engine_config_is_not_needed_for_options(directory: Path, mixed_alone: list[Completion]) -> None:
    assert Engine(directory, EngineConfig(precision="fp32")).generate(MIXED) == mixed_alone


@OVERLAP
def test_bad_words_are_not_generated(overlap: bool) -> None:
    """Words of one token and of several, with and without a space in front, also next to requests without any."""
    engine = Engine("reference", EngineConfig(precision="fp32", threads=1, overlap=overlap))
    assert engine.tokenizer is not None
    prompts = [
        "Sort the words.\npear, apple, plum, fig\nAnswer:\n",
        "Write the date like 14/03/2021.\nJune 27, 2027\nAnswer:\n",
    ]
    plain = engine.generate([Request(prompt, 30) for prompt in prompts])
    words = [("plum", "fig"), ("1027",)]
    lengths = {len(engine.tokenizer.encode(one, add_special=False)) for word in words for one in word}
    assert max(lengths) > 1 and all(word in one.text for one, (word, *_) in zip(plain, words, strict=True))
    asked = [Request(prompt, 30, bad_words=word) for prompt, word in zip(prompts, words, strict=True)]
    drawn = Request(prompts[0], 30, Sampling(1.0, seed=3, repetition_penalty=1.1), bad_words=words[0])
    found = engine.generate([asked[0], Request(prompts[0], 30), asked[1], drawn])
    assert found[1] == plain[0]
    for completion, word in ((found[0], words[0]), (found[2], words[1]), (found[3], words[0])):
        ids = completion.token_ids
        for spelling in [space + one for one in word for space in ("", " ")]:
            bad = engine.tokenizer.encode(spelling, add_special=False)
            assert all(ids[at : at + len(bad)] != bad for at in range(len(ids)))
    assert found[0].token_ids != plain[0].token_ids and found[2].token_ids != plain[1].token_ids


def test_bad_words_mask_the_last_token_only_where_the_others_match() -> None:
    bad = BadWords([(5,), (7, 8), (1, 2, 3), (9, 2, 4)])
    assert bad.single.tolist() == [5] and bad.need_tokens and not BadWords([(5,)]).need_tokens
    answers_and_masks = [([], []), ([7], [8]), ([2], []), ([1, 2], [3]), ([4, 9, 2], [4]), ([1, 9], []), ([7, 1], [])]
    assert [(answer, bad.last_tokens(answer)) for answer, _ in answers_and_masks] == answers_and_masks


def test_bad_words_that_cannot_be_kept_out_are_refused(directory: Path) -> None:
    with pytest.raises(RequestError, match="no tokenizer"):
        make_engine(directory).submit(request(bad_words=("word",)))
    for other in ({"bad_words": ("word",)}, {"allowed_token_ids": (5,)}):
        with pytest.raises(RequestError, match="exclude each other"):
            make_engine(directory).submit(request(**other, grammar=Grammar(GrammarKind.REGEX, "a")))
    with pytest.raises(RequestError, match="bad_words is"):
        make_engine(directory).submit(request(bad_words=("",)))
