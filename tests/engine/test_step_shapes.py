"""Which steps are recorded before the first request, and as what other steps are replayed. No GPU is needed."""

from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatoken.engine.batch import StepShape
from megatoken.engine.config import SHAPES
from megatoken.engine.memory import GRAPH_CHUNKS, GRAPH_TOKENS, graph_tokens
from megatoken.engine.schemes import find_scheme
from megatoken.engine.step_shapes import MOST_GRAPHS, USUAL_LENGTH, ShapeLadder, substitute

PAGE = 32


def room(one: StepShape, other: StepShape) -> bool:
    """Whether a step of the second shape can be padded to the first."""
    pairs = zip(
        (one.tokens, one.chunks, one.samples, one.longest, one.pages),
        (other.tokens, other.chunks, other.samples, other.longest, other.pages),
        strict=True,
    )
    return all(mine >= wanted for mine, wanted in pairs)


@st.composite
def steps(draw: st.DrawFn) -> tuple[int, int, int, bool, int, int, int]:
    """Most tokens, sequences and length of an engine, and a step that it may have to compute."""
    budget, max_length = draw(st.integers(1, 2100)), draw(st.sampled_from([64, 512, 700, 2048, 8192, 131_072]))
    tokens = draw(st.integers(1, min(budget, GRAPH_TOKENS[-1])))
    decodes = draw(st.integers(0, tokens))
    prompts = decodes < tokens
    samples = decodes + draw(st.integers(0, min(GRAPH_CHUNKS, tokens - decodes)))
    length = draw(st.integers(1, min(max_length, USUAL_LENGTH)))
    return budget, max_length, tokens, prompts, decodes, samples, length


@given(steps())
def test_every_step_of_usual_length_is_replayed_from_the_first_request_on(
    step: tuple[int, int, int, bool, int, int, int],
) -> None:
    budget, max_length, tokens, prompts, decodes, samples, length = step
    ladder = ShapeLadder(GRAPH_TOKENS[: bisect_left(GRAPH_TOKENS, min(budget, GRAPH_TOKENS[-1])) + 1], PAGE)
    first = ladder.first(budget, max_length)
    assert len(first) == len(set(first)) <= MOST_GRAPHS
    shape = ladder.shape(tokens, decodes=decodes, prompts=prompts, samples=samples, length=length)
    found = substitute(shape, first)
    assert found is not None and room(found, shape) and found.tokens == shape.tokens
    cheaper = [one for one in first if room(one, shape) and one.tokens == shape.tokens and one.longest < found.longest]
    assert not cheaper


@pytest.mark.parametrize(("model", "precision"), [("llama3.1-8b", "fp8"), ("llama2-70b", "fp8"), ("1.1b", "bf16")])
def test_a_request_that_is_alone_meets_steps_of_its_own_shape(model: str, precision: str) -> None:
    """Prompts of any length that is recorded at all, and decodes, also after a long beginning that is cached."""
    sizes = graph_tokens(SHAPES[model], find_scheme(precision), 2048)
    ladder = ShapeLadder(sizes, PAGE)
    first = ladder.first(1536, 8192)
    for tokens in sizes:
        prompt = ladder.shape(tokens, decodes=0, prompts=True, samples=1, length=USUAL_LENGTH)
        assert prompt in first
        assert prompt.samples == GRAPH_CHUNKS  # not the head of all its tokens
    for length in (USUAL_LENGTH, 8192):
        assert ladder.shape(1, decodes=1, prompts=False, samples=1, length=length) in first
        assert ladder.shape(50, decodes=0, prompts=True, samples=1, length=length) in first


def test_what_can_never_come_is_not_recorded() -> None:
    sizes = [size for size in GRAPH_TOKENS if size <= 512]
    first = ShapeLadder(sizes, PAGE).first(20, 1024)
    assert max(one.tokens for one in first if not one.chunks) == 32
    assert max(one.longest for one in first) == USUAL_LENGTH


def test_a_step_is_never_replayed_as_one_that_has_no_room_for_it() -> None:
    ladder = ShapeLadder(GRAPH_TOKENS, PAGE)
    decodes = ladder.shape(16, decodes=16, prompts=False, samples=16, length=400)
    mixed = ladder.shape(16, decodes=12, prompts=True, samples=16, length=400)
    longer = ladder.shape(16, decodes=16, prompts=False, samples=16, length=3000)
    more = ladder.shape(20, decodes=20, prompts=False, samples=20, length=400)
    assert substitute(decodes, [more]) is None
    assert substitute(mixed, [decodes, longer]) is None
    assert substitute(longer, [decodes, mixed]) is None
    assert substitute(decodes, [longer, mixed]) == mixed  # a little attention of no prompt, not that of 8,192 keys
