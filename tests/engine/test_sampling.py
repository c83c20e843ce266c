"""Draws: the random numbers, the distribution they are drawn from, and what must not change them."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from over_admission import expect_short_answers
from transformers import AutoModelForCausalLM

from examples import ALL, every, examples
from megatoken.engine import Engine, EngineConfig, FinishReason, Request, Sampling
from megatoken.engine import sampling as sampling_module
from megatoken.engine.active_request import ActiveRequest, activate
from megatoken.engine.config import find_shape
from megatoken.engine.ops import NO_TOKEN
from megatoken.engine.sampling import sample, uniform

GREEDY = Sampling()
DRAWS = 6000 if ALL else 3000


def chi_square_threshold(freedom: int) -> float:
    """What a chi-square variable exceeds once in 100,000 times (Wilson and Hilferty's approximation)."""
    return freedom * (1 - 2 / (9 * freedom) + 4.265 * math.sqrt(2 / (9 * freedom))) ** 3


def assert_frequencies(counts: np.ndarray, probabilities: np.ndarray) -> None:
    """Pearson's test; cells with few expected counts are joined."""
    assert not counts[probabilities == 0].any(), "a token was drawn that must not be"
    expected = probabilities * counts.sum()
    order = np.argsort(expected)
    joined = np.minimum(np.cumsum(expected[order]) // 8, len(expected)).astype(int)
    cells = [(counts[order][joined == cell].sum(), expected[order][joined == cell].sum()) for cell in np.unique(joined)]
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells if mean > 0)
    assert statistic < chi_square_threshold(max(len(cells) - 1, 1))


SHAPE = replace(find_shape("tiny"), vocabulary_size=2**31)


def active(sampling: Sampling, position: int) -> ActiveRequest:
    """A request that is to sample the token at ``position``."""
    return activate(Request([0], 1, sampling), [0] * position, SHAPE)


def draw(logits: torch.Tensor, samplings: list[Sampling], positions: list[int]) -> list[int]:
    """What the engine does with the sampled rows of a step."""
    chosen = torch.tensor([row.index(max(row)) for row in logits.tolist()])
    requests = [active(sampling, position) for sampling, position in zip(samplings, positions, strict=True)]
    choose(logits, requests, positions, chosen)
    return chosen.tolist()


def choose(
    logits: torch.Tensor,
    requests: list[ActiveRequest],
    positions: list[int],
    chosen: torch.Tensor,
    last_tokens: list[int] | None = None,
) -> None:
    """``last_tokens``: of each row, on the device."""
    failed: dict[int, Exception] = {}
    table = torch.tensor(last_tokens or [0] * len(requests))
    sample(logits, requests, np.array(positions), np.arange(len(requests), dtype=np.int32), table, chosen, failed)
    assert not failed


def some_logits(rows: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2


# Random numbers


def mixed(value: int) -> int:
    """SplitMix64's finaliser in plain integers."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


def expected_uniform(seed: int, position: int) -> float:
    state = mixed((seed + 0x9E3779B97F4A7C15) % 2**64)
    state = mixed(state ^ (position * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15) % 2**64)
    return (state >> 11) / 2**53


def test_uniform_known_answers() -> None:
    assert mixed(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # the published generator's first number from seed 0
    seeds, positions = np.array([0, 0, 1, 2**64 - 1], dtype=np.uint64), np.array([0, 1, 0, 2**31], dtype=np.uint64)
    expected = [0.01403302919427496, 0.34900447795685763, 0.8662403237905675, 0.7746107615613291]
    assert uniform(seeds, positions).tolist() == expected


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40))
def test_uniform_is_its_definition(seed: int, position: int) -> None:
    value = uniform(np.array([seed], dtype=np.uint64), np.array([position], dtype=np.uint64))[0]
    assert value == expected_uniform(seed, position)
    assert 0 <= value < 1


@pytest.mark.parametrize("along", ["seeds", "positions", "diagonal"])
def test_uniform_is_uniform(along: str) -> None:
    """Neighbouring seeds, neighbouring positions, and both at once, alone and in pairs of successors."""
    steps = np.arange(200_000, dtype=np.uint64)
    constant = np.full_like(steps, 7)
    values = uniform(constant if along == "positions" else steps, constant if along == "seeds" else steps)
    assert_frequencies(np.bincount((values * 100).astype(int), minlength=100), np.full(100, 0.01))
    pairs = (values[:-1] * 20).astype(int) * 20 + (values[1:] * 20).astype(int)
    assert_frequencies(np.bincount(pairs, minlength=400), np.full(400, 1 / 400))
    assert len(np.unique(values)) == len(values)


# Distribution


def defined_probabilities(logits: list[float], sampling: Sampling) -> np.ndarray:
    """The definition, token by token in float64: best first, the lowest id among equals; cut at min-p, k, then p."""
    best_first = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    weight = {token: math.exp((logits[token] - logits[best_first[0]]) / sampling.temperature) for token in best_first}
    likely = [token for token in best_first if weight[token] >= sampling.min_p]
    kept = likely[: sampling.top_k or len(logits)]
    weights = [weight[token] for token in kept]
    needed, held = sampling.top_p * math.fsum(weights), 0.0
    probabilities = np.zeros(len(logits))
    for token, weight in zip(kept, weights, strict=True):
        if held >= needed:
            break
        held += weight
        probabilities[token] = weight
    return probabilities / probabilities.sum()


SAMPLINGS = [
    Sampling(1.0),
    Sampling(2.0, top_k=7),
    Sampling(0.7, top_p=0.9),
    Sampling(2.0, min_p=0.05, top_k=5, top_p=0.8),
    Sampling(0.4),
    Sampling(3.0),
    Sampling(1.0, top_k=2),
    Sampling(1.0, top_k=1000),
    Sampling(1.0, top_p=0.5),
    Sampling(2.0, top_k=12, top_p=0.8),
    Sampling(1.5, top_k=3, top_p=0.99),
    Sampling(1.0, min_p=0.1),
    Sampling(3.0, min_p=0.3, top_p=0.9),
]
"""The first four leave out in every way."""


@pytest.mark.parametrize(
    ("sampling", "dtype"),
    [
        *((sampling, torch.float32) for sampling in SAMPLINGS),
        *((sampling, torch.bfloat16) for sampling in (*SAMPLINGS[:4], *every(*SAMPLINGS[4:]))),
    ],
    ids=str,
)
def test_frequencies_are_those_of_the_definition(sampling: Sampling, dtype: torch.dtype) -> None:
    logits = some_logits(1, 40).to(dtype)
    settings_of = [replace(sampling, seed=seed) for seed in range(DRAWS)]
    tokens = draw(logits.expand(DRAWS, -1), settings_of, [11] * DRAWS)
    counts = np.bincount(tokens, minlength=40)
    assert_frequencies(counts, defined_probabilities(logits[0].tolist(), sampling))


def test_one_seed_draws_anew_at_every_position() -> None:
    logits = some_logits(1, 12)
    tokens = draw(logits.expand(DRAWS, -1), [Sampling(1.0, seed=5)] * DRAWS, list(range(DRAWS)))
    assert_frequencies(np.bincount(tokens, minlength=12), defined_probabilities(logits[0].tolist(), Sampling(1.0)))


@settings(max_examples=examples(100))
@given(data=st.data())
def test_a_draw_inverts_the_cumulative_distribution(data: st.DataObject) -> None:
    """Every row of a mixed batch is the first token, in order of ids, at which the defined distribution passes u."""
    vocabulary = data.draw(st.integers(1, 30))
    logit = st.integers(-6, 6).map(lambda steps: steps / 2)  # equal logits are common
    row = st.tuples(
        st.lists(logit, min_size=vocabulary, max_size=vocabulary),
        st.floats(0.05, 50),
        st.integers(0, 40),
        st.one_of(st.just(1.0), st.floats(1e-6, 1)),
        st.integers(-(2**63), 2**64 - 1),
        st.one_of(st.just(0.0), st.floats(1e-6, 1)),
        st.integers(1, 10_000),
    )
    rows = data.draw(st.lists(row, min_size=1, max_size=40))
    samplings = [Sampling(*options) for _, *options, _ in rows]
    positions = [position for *_, position in rows]
    tokens = draw(torch.tensor([logits for logits, *_ in rows]), samplings, positions)
    for (logits, *_), sampling, position, token in zip(rows, samplings, positions, tokens, strict=True):
        probabilities = defined_probabilities(logits, sampling)
        below, above = probabilities[:token].sum(), probabilities[: token + 1].sum()
        number = expected_uniform(sampling.seed % 2**64, position)
        assert probabilities[token] > 0
        assert below - 1e-12 <= number <= above + 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "narrow",
    [
        {"top_k": 1},
        {"top_p": 1e-9},
        {"top_p": 5e-324},
        {"top_k": 1, "top_p": 0.5},
        {"top_k": 5, "top_p": 1e-12},
        {"min_p": 1.0, "top_k": 1},
        {"temperature": 1e-9},
        {"temperature": 5e-324},
    ],
    ids=str,
)
def test_what_leaves_one_token_is_greedy(narrow: dict[str, float], dtype: torch.dtype) -> None:
    """Ties are common in bf16, and then greedy means the lowest id; a low temperature alone leaves all of a tie."""
    logits = some_logits(200, 500, seed=1).to(dtype)
    if narrow.get("temperature"):
        logits[torch.arange(200), logits.argmax(-1)] += 0.125
    elif dtype == torch.bfloat16:
        assert ((logits == logits.amax(-1, keepdim=True)).sum(-1) > 1).any()
    greedy = draw(logits, [GREEDY] * 200, [3] * 200)
    samplings = [Sampling(**{"temperature": 30.0, "seed": seed, **narrow}) for seed in range(200)]
    assert draw(logits, samplings, [3] * 200) == greedy


@pytest.mark.parametrize(
    ("number", "expected"), [(0.0, 1), (0.25 - 2**-54, 1), (0.25, 2), (0.5, 4), (0.75, 5), (1 - 2**-53, 5)]
)
def test_random_numbers_on_a_boundary(number: float, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interval of a token includes its lower end; tokens that are left out, at either end too, have none."""
    monkeypatch.setattr(sampling_module, "uniform", lambda seeds, positions: np.full(len(seeds), number))
    logits = torch.tensor([[-9.0, 1.0, 1.0, -9.0, 1.0, 1.0, -9.0]])
    assert draw(logits, [Sampling(1.0, top_k=4, seed=0)], [0]) == [expected]


def test_top_p_keeps_no_more_than_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_module, "uniform", lambda seeds, positions: np.full(len(seeds), 1 - 2**-53))
    logits, samplings = torch.zeros(3, 4), [Sampling(1.0, top_p=share, seed=0) for share in (0.5, 0.5 + 1e-9, 0.75)]
    assert draw(logits, samplings, [0] * 3) == [1, 2, 2]


def test_the_largest_random_number_draws_the_last_token_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its product with any total, which is 1 at least, is below the total."""
    monkeypatch.setattr(sampling_module, "uniform", lambda seeds, positions: np.full(len(seeds), 1 - 2**-53))
    logits = some_logits(500, 300)
    kept = logits.topk(7).indices.amax(-1).tolist()
    assert draw(logits, [Sampling(1.0, top_k=7, seed=0)] * 500, [0] * 500) == kept


def test_extreme_temperatures_and_logits() -> None:
    logits = torch.tensor([[-3e38, 0.0, 3e38, 3e38, 1.0]])
    tied = draw(logits.expand(64, -1), [Sampling(1e-3, seed=seed) for seed in range(64)], [0] * 64)
    assert set(tied) == {2, 3}
    flat = draw(some_logits(1, 4).expand(400, -1), [Sampling(1e300, seed=seed) for seed in range(400)], [0] * 400)
    assert_frequencies(np.bincount(flat, minlength=4), np.full(4, 0.25))


# What must not matter


def test_a_draw_does_not_depend_on_the_rows_beside_it() -> None:
    logits = some_logits(60, 300)
    draws = random.Random(0)
    samplings = [
        Sampling(draws.choice([0, 0.2, 3]), draws.choice([0, 1, 5, 400]), draws.choice([1.0, 0.6]), seed)
        for seed in range(60)
    ]
    positions = [draws.randrange(1000) for _ in range(60)]
    together = draw(logits, samplings, positions)
    for row in range(60):
        assert draw(logits[row : row + 1], samplings[row : row + 1], positions[row : row + 1]) == [together[row]]
    order = draws.sample(range(60), 60)
    shuffled = draw(logits[order], [samplings[row] for row in order], [positions[row] for row in order])
    assert shuffled == [together[row] for row in order]


def test_answers_do_not_depend_on_batch_order_preemption_or_overlap(directory: Path) -> None:
    draws = random.Random(1)
    kinds = [GREEDY, Sampling(1.5, seed=3), Sampling(1.0, 20, 0.9, seed=4), Sampling(2.0, top_p=0.7, seed=-5)]
    requests = [
        Request(
            [draws.randrange(301) for _ in range(draws.randint(1, 20))],
            draws.randint(12, 16),
            kinds[number % 4],
            ignore_end_token=True,
        )
        for number in range(12)
    ]

    def answers(config: EngineConfig, order: list[int]) -> list[list[int]]:
        engine = Engine(directory, config)
        expect_short_answers(engine._scheduler)
        completions = dict(zip(order, engine.generate([requests[place] for place in order]), strict=True))
        assert engine.state().preemptions or not config.cache_tokens
        return [completions[place].token_ids for place in range(12)]

    expected = answers(EngineConfig(precision="fp32"), list(range(12)))
    assert len({token for answer in expected for token in answer}) > 100
    for config in (
        EngineConfig(precision="fp32", max_batched_tokens=1, page_size=1),
        EngineConfig(precision="fp32", page_size=4, cache_tokens=60, max_batched_tokens=30),
        EngineConfig(precision="fp32", page_size=4, cache_tokens=60, max_batched_tokens=11, overlap=True),
        EngineConfig(precision="fp32", max_sequences=2, overlap=True),
    ):
        assert answers(config, draws.sample(range(12), 12)) == expected


def test_without_a_seed_equal_prompts_differ_and_a_repeated_run_does_not(directory: Path) -> None:
    def answers(sampling: Sampling) -> list[list[int]]:
        engine = Engine(directory, EngineConfig(precision="fp32"))
        completions = engine.generate([Request([1, 2, 3], 8, sampling, ignore_end_token=True)] * 20)
        return [completion.token_ids for completion in completions]

    unseeded = answers(Sampling(2.0))
    assert len(set(map(tuple, unseeded))) == 20
    assert answers(Sampling(2.0)) == unseeded
    assert len(set(map(tuple, answers(Sampling(2.0, seed=4))))) == 1


def test_first_tokens_of_an_engine_follow_its_logits(directory: Path) -> None:
    """The whole way from request to token: frequencies of first tokens over seeds, against transformers' logits."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([[5, 9, 2]])).logits[0, -1].tolist()
    sampling = Sampling(1.5, top_k=30, top_p=0.95)
    requests = [Request([5, 9, 2], 1, Sampling(1.5, 30, 0.95, seed), ignore_end_token=True) for seed in range(2000)]
    completions = Engine(directory, EngineConfig(precision="fp32", max_batched_tokens=256)).generate(requests)
    assert {completion.finish_reason for completion in completions} == {FinishReason.LENGTH}
    counts = np.bincount([completion.token_ids[0] for completion in completions], minlength=301)
    assert_frequencies(counts, defined_probabilities(logits, sampling))


@pytest.mark.parametrize(
    "sampling", [Sampling(0.7, seed=1), Sampling(0.7, top_k=3, seed=1), Sampling(0.7, top_p=0.5, seed=1)]
)
def test_a_row_without_numbers_stays_marked_and_spoils_no_other(sampling: Sampling) -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    alone = draw(logits, [sampling] * 5, [3] * 5)
    spoilt = logits.clone()
    spoilt[1], spoilt[3, 7] = math.nan, math.inf
    chosen = torch.tensor([0, NO_TOKEN, 0, NO_TOKEN, 0])
    choose(spoilt, [active(sampling, 3)] * 5, [3] * 5, chosen)
    assert chosen.tolist() == [alone[0], NO_TOKEN, alone[2], NO_TOKEN, alone[4]]
