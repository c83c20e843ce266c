"""A step's arrays, and the same step in larger sizes."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from examples import examples
from megatoken.engine.batch import StepArrays, StepShape, largest_step, pad_step, step_arrays
from megatoken.engine.scheduler import Scheduler

PAGE_SIZE, WINDOW, WINDOW_PAGES = 16, 50, 200
HEADS, KV_HEADS, HEAD_DIM = 2, 1, 16


def mixed_step(decodes: list[int], prompts: list[int], spare_rows: int, windowed: bool = False) -> StepArrays:
    """Sequences that decode beside prompts, the last of which may be cut, as the scheduler plans them."""
    rows = len(decodes) + max(1, sum(prompts) - spare_rows)
    scheduler = Scheduler(
        max_batched_tokens=max(rows, sum(decodes)),
        max_sequences=32,
        page_size=PAGE_SIZE,
        num_pages=200,
        max_length=512,
        window=WINDOW,
        window_pages=WINDOW_PAGES * windowed,
    )
    for request_id, length in enumerate(decodes):
        scheduler.add(request_id, length, 3)
    scheduler.plan()
    for number, length in enumerate(prompts):
        scheduler.add(len(decodes) + number, length, 3)
    plan = scheduler.plan(prompt_tokens=rows - len(decodes))
    return step_arrays(
        plan,
        scheduler.page_table,
        PAGE_SIZE,
        lambda one, start, count: [one + 1] * count,
        lambda rows: rows,
    )


steps = (
    st.tuples(
        st.lists(st.integers(1, 60) | st.integers(300, 400), max_size=6),
        st.lists(st.integers(1, 40), max_size=4),
        st.integers(0, 30),
        st.booleans(),
    )
    .filter(lambda step: step[0] or step[1])
    .map(lambda step: mixed_step(*step))
    .filter(lambda arrays: arrays.samples)  # others have no last layer to run
)


@st.composite
def steps_and_shapes(draw: st.DrawFn) -> tuple[StepArrays, StepShape]:
    arrays = draw(steps)
    chunks = len(arrays.lengths) - arrays.decodes
    more = st.integers(0, 5)
    tokens, chunks = len(arrays.token_ids) + draw(more), chunks + draw(more)
    return arrays, StepShape(
        tokens=tokens,
        chunks=chunks,
        samples=draw(st.integers(max(arrays.samples, 1), tokens + chunks)),
        longest=int(arrays.lengths.max()) + draw(more),
        pages=arrays.pages.shape[1] + draw(more),
        windowed=arrays.windowed,
    )


@given(steps_and_shapes())
def test_a_padded_step_is_the_same_step(step: tuple[StepArrays, StepShape]) -> None:
    arrays, shape = step
    padded, rows = pad_step(arrays, shape), len(arrays.token_ids)
    for name in ("token_ids", "table_slots", "positions", "cache_slots"):
        np.testing.assert_array_equal(getattr(padded, name)[:rows], getattr(arrays, name))
    assert (padded.table_slots[rows:] == -1).all()
    assert not padded.cache_slots[rows:].any() and not padded.positions[rows:].any()
    if arrays.windowed:
        np.testing.assert_array_equal(padded.window_slots[:rows], arrays.window_slots)
        assert not padded.window_slots[rows:].any()
    np.testing.assert_array_equal(padded.lengths[: arrays.decodes], arrays.lengths[: arrays.decodes])
    assert not padded.lengths[arrays.decodes : shape.tokens].any()
    np.testing.assert_array_equal(padded.lengths[padded.sampled[: arrays.samples]], arrays.lengths[arrays.sampled])
    np.testing.assert_array_equal(padded.sample_indices[: arrays.samples], arrays.sample_indices)
    np.testing.assert_array_equal(padded.sample_slots[: arrays.samples], arrays.sample_slots)
    assert padded.samples == len(padded.sample_indices) == shape.samples
    assert not padded.lengths[padded.sampled[arrays.samples :]].any()
    assert sum(np.diff(padded.chunk_starts)) == sum(np.diff(arrays.chunk_starts))


@given(steps_and_shapes())
def test_sizes_depend_on_the_shape_alone(step: tuple[StepArrays, StepShape]) -> None:
    arrays, shape = step
    padded, largest = pad_step(arrays, shape), largest_step(shape)
    for name in StepArrays.__dataclass_fields__:
        one, other = getattr(padded, name), getattr(largest, name)
        if name == "decodes":
            assert one == other
        else:
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
    assert padded.lengths.max() <= largest.lengths[: shape.tokens].max() == largest.lengths[largest.sampled].max()
    assert np.diff(padded.chunk_starts).max(initial=0) <= np.diff(largest.chunk_starts).max(initial=0)


@settings(max_examples=examples(5))
@given(steps_and_shapes(), st.integers(0, 99))
@example(
    (mixed_step([350, 20], [9], 0), StepShape(tokens=13, chunks=2, samples=5, longest=512, pages=32)), 1
)  # cut into pieces
@example(
    (mixed_step([350, 20], [99], 7, True), StepShape(100, chunks=2, samples=5, longest=512, pages=32, windowed=True)), 1
)
def test_attention_of_a_padded_step(step: tuple[StepArrays, StepShape], seed: int) -> None:
    """With launches that are made for the largest step of the shape, as a recorded one's are."""
    cuda = pytest.importorskip("megatoken.engine.ops.cuda", reason="Triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here, for tensors of a GPU")
    from megatoken.engine.cache import LayerCache

    arrays, shape = step
    draw = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(201, KV_HEADS, PAGE_SIZE, HEAD_DIM, generator=draw).bfloat16() for _ in range(2))
    cache = LayerCache(k, v, False, window=WINDOW if arrays.windowed else None)
    query = torch.randn(len(arrays.token_ids), HEADS, HEAD_DIM, generator=draw).bfloat16()
    rows = len(query)
    padded_query = torch.full((shape.tokens, HEADS, HEAD_DIM), float("nan")).bfloat16()
    padded_query[:rows] = query

    def attended(known: StepArrays, arrays: StepArrays, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = cuda.index_parts(arrays)
        starts = cuda._part_starts(parts)
        packed = torch.zeros(starts[-1], dtype=torch.int32)
        for part, start in zip(parts.values(), starts, strict=False):
            packed[start : start + part.size] = torch.from_numpy(part.reshape(-1))
        batch = cuda.unpack(known, cuda.index_parts(known), packed, torch.zeros(32, dtype=torch.int64))
        batch = batch.windowed or batch
        consumer = cuda.Linear(torch.zeros(1, HEADS * HEAD_DIM), None)
        samples = query.index_select(0, batch.sample_indices)
        return cuda.attention(query, cache, batch, consumer), cuda.sample_attention(samples, cache, batch, consumer)

    expected, expected_samples = attended(arrays, arrays, query)
    found, found_samples = attended(largest_step(shape), pad_step(arrays, shape), padded_query)
    torch.testing.assert_close(found[:rows], expected, rtol=0.02, atol=0.02)
    if arrays.samples:
        torch.testing.assert_close(found_samples[: arrays.samples], expected_samples, rtol=0.02, atol=0.02)
