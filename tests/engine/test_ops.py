"""The CPU back end against the written-out operations, on random ragged shapes.

The oracle gets the same numbers in fp32, so what is left is the rounding of the dtype under test: ``ROUNDING`` of the
largest magnitude in play.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from numpy.typing import NDArray
from torch import Tensor

from examples import examples
from megatoken.engine.batch import step_arrays
from megatoken.engine.cache import DUMP_PAGE, LayerCache
from megatoken.engine.config import ModelConfig, Precision
from megatoken.engine.ops import cpu, native, reference
from megatoken.engine.schemes import find_scheme
from megatoken.engine.step_plan import StepPlan

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-7}
POISON = 1e4
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
FP8 = find_scheme("fp8")
SEEDS = st.integers(0, 2**32)
SIZES = st.integers(1, 70)
random_shapes = settings(max_examples=examples(100))
few_shapes = settings(max_examples=examples(60))  # a packed product is compiled for each new shape


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_close(actual: Tensor, expected: Tensor, *, magnitude: Tensor | None = None) -> None:
    """Elementwise within the rounding of ``actual``'s dtype; ``magnitude`` of the terms of a sum that may cancel."""
    scale = expected.abs() if magnitude is None else magnitude
    error = (actual.float() - expected).abs()
    assert actual.shape == expected.shape
    assert (error <= ROUNDING[actual.dtype] * (scale + scale.mean())).all(), (error / scale).max()


# Linear layers


@dataclass
class Case:
    """One input of a linear layer, in the dtype under test and in fp32."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype

    @property
    def expected(self) -> Tensor:
        return reference.linear(
            self.x.float(), reference.pack_linear(self.weight.float(), self._bias(), find_scheme("fp32"))
        )

    @property
    def magnitude(self) -> Tensor:
        bias = None if self.bias is None else self._bias().abs()
        return torch.nn.functional.linear(self.x.float().abs(), self.weight.float().abs(), bias)

    def _bias(self) -> Tensor | None:
        return None if self.bias is None else self.bias.float()

    def packed(self) -> cpu.Linear:
        return cpu.pack_linear(self.weight, self.bias, find_scheme("fp32" if self.dtype == torch.float32 else "bf16"))


@st.composite
def linear_cases(draw: st.DrawFn, outputs: int | None = None) -> Case:
    rows, inputs, seed, dtype = draw(SIZES), draw(SIZES), draw(SEEDS), draw(DTYPES)
    outputs = outputs or draw(SIZES)
    bias = normal(seed + 2, outputs).to(dtype) if draw(st.booleans()) else None
    return Case(normal(seed, rows, inputs).to(dtype), normal(seed + 1, outputs, inputs).to(dtype), bias, dtype)


@few_shapes
@given(linear_cases())
def test_linear(case: Case) -> None:
    actual = cpu.linear(case.x, case.packed())
    assert actual.dtype == case.dtype
    assert_close(actual, case.expected, magnitude=case.magnitude)


@few_shapes
@given(linear_cases(), SEEDS)
def test_linear_add(case: Case, seed: int) -> None:
    residual = normal(seed, *case.expected.shape).to(case.dtype)
    before = residual.clone()
    actual = cpu.linear_add(case.x, case.packed(), residual)
    assert torch.equal(residual, before)
    assert_close(actual, residual.float() + case.expected, magnitude=residual.float().abs() + case.magnitude)


@few_shapes
@given(linear_cases(), SEEDS, st.booleans())
def test_gated(gate: Case, seed: int, biased: bool) -> None:
    outputs, inputs = gate.weight.shape
    bias = normal(seed + 1, outputs).to(gate.dtype) if biased else None
    up = Case(gate.x, normal(seed, outputs, inputs).to(gate.dtype), bias, gate.dtype)
    actual = cpu.gated(gate.x, (gate.packed(), up.packed()))
    expected = torch.nn.functional.silu(gate.expected) * up.expected
    assert_close(actual, expected, magnitude=2 * gate.magnitude * up.magnitude)


@random_shapes
@given(rows=SIZES, inputs=SIZES, outputs=SIZES, seed=SEEDS, biased=st.booleans())
def test_fp8_linear(rows: int, inputs: int, outputs: int, seed: int, biased: bool) -> None:
    """Both back ends round to e4m3 alike, so only sums and the result differ; the rounding itself is bounded too."""
    x = (normal(seed, rows, inputs) * normal(seed + 1, rows, 1).exp()).bfloat16()
    weight = normal(seed + 2, outputs, inputs).bfloat16()
    bias = normal(seed + 3, outputs).bfloat16() if biased else None
    packed, oracle = cpu.pack_linear(weight, bias, FP8), reference.pack_linear(weight, bias, FP8)
    exact = Case(x, weight, bias, torch.bfloat16)
    expected = reference.linear(x.float(), oracle)
    assert_close(cpu.linear(x, packed), expected, magnitude=exact.magnitude)
    assert ((expected - exact.expected).abs() <= 0.13 * exact.magnitude + 1e-3).all()

    residual = normal(seed + 4, rows, outputs).bfloat16()
    assert_close(
        cpu.linear_add(x, packed, residual), residual + expected, magnitude=residual.float().abs() + exact.magnitude
    )
    gated = torch.nn.functional.silu(expected) * expected
    assert_close(cpu.gated(x, (packed, packed)), gated, magnitude=2 * exact.magnitude.square())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_machines_that_cannot_pack_get_the_same(precision: Precision, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    case = Case(normal(0, 9, 33).to(dtype), normal(1, 20, 33).to(dtype), normal(2, 20).to(dtype), dtype)
    residual = normal(3, 9, 20).to(dtype)

    def results() -> list[Tensor]:
        packed = cpu.pack_linear(case.weight, case.bias, find_scheme(precision))
        assert packed.packed.is_mkldnn == cpu.can_pack(dtype)
        return [
            cpu.linear(case.x, packed),
            cpu.linear_add(case.x, packed, residual),
            cpu.gated(case.x, (packed, packed)),
        ]

    here = results()
    monkeypatch.setattr(cpu, "can_pack", lambda dtype: False)
    for actual, expected, magnitude in zip(
        results(), here, [case.magnitude, residual.float().abs() + case.magnitude, case.magnitude**2], strict=True
    ):
        assert_close(actual, expected.float(), magnitude=2 * magnitude)


def test_fp8_rows_do_not_depend_on_the_rows_beside_them() -> None:
    x, weight = normal(0, 8, 48).bfloat16(), normal(1, 32, 48).bfloat16()
    packed = cpu.pack_linear(weight, None, FP8)
    louder = torch.cat((x[:4], 1000 * x[4:]))
    assert torch.equal(cpu.linear(louder, packed)[:4], cpu.linear(x, packed)[:4])
    assert not cpu.linear(torch.zeros_like(x), packed).any()


# Elementwise


@random_shapes
@given(
    rows=SIZES, heads=st.integers(0, 5), size=SIZES, seed=SEEDS, dtype=DTYPES, scale=st.sampled_from([1e-3, 1.0, 1e3])
)
def test_rms_norm(rows: int, heads: int, size: int, seed: int, dtype: torch.dtype, scale: float) -> None:
    shape = (rows, heads, size) if heads else (rows, size)
    x, weight = (scale * normal(seed, *shape)).to(dtype), normal(seed + 1, size).to(dtype)
    for epsilon in (1e-6, 1e-2):
        expected = reference.rms_norm(x.float(), weight.float(), epsilon)
        assert_close(cpu.rms_norm(x, weight, epsilon), expected)


@random_shapes
@given(rows=SIZES, heads=st.integers(1, 9), half=st.integers(1, 64), seed=SEEDS, dtype=DTYPES, strided=st.booleans())
def test_rotate(rows: int, heads: int, half: int, seed: int, dtype: torch.dtype, strided: bool) -> None:
    x = normal(seed, rows, heads + strided, 2 * half).to(dtype)[:, :heads]
    angle = 100 * normal(seed + 1, rows, half)
    cos, sin = angle.cos().repeat(1, 2).to(dtype), torch.cat((-angle.sin(), angle.sin()), -1).to(dtype)
    expected = reference.rotate(x.float(), cos.float(), sin.float())
    magnitude = reference.rotate(x.float().abs(), cos.float().abs(), sin.float().abs())
    assert_close(cpu.rotate(x, cos, sin), expected, magnitude=magnitude)
    length = x.float().square().sum(-1)
    torch.testing.assert_close(expected.square().sum(-1), length, rtol=0.02, atol=1e-6)  # it is a rotation


@random_shapes
@given(rows=st.integers(0, 20), vocabulary=st.integers(1, 2000), different=st.integers(1, 40), seed=SEEDS, dtype=DTYPES)
def test_greedy_takes_the_lowest_id_among_equals(
    rows: int, vocabulary: int, different: int, seed: int, dtype: torch.dtype
) -> None:
    logits = (
        torch.randint(0, different, (rows, vocabulary), generator=torch.Generator().manual_seed(seed)).to(dtype) - 7
    )
    expected = [row.index(max(row)) for row in logits.tolist()]
    for ops in (cpu, reference):
        chosen = ops.greedy(logits)
        assert chosen.dtype == torch.int64
        assert chosen.tolist() == expected


def test_padded_tokens() -> None:
    padded = [cpu.padded_tokens(rows, 0) for rows in range(1, 4097)]
    assert all(rows <= more < 2 * rows for rows, more in enumerate(padded, 1))
    assert padded == sorted(padded)
    assert len(set(padded)) < 150
    assert padded[0] == 1
    large = [cpu.padded_tokens(rows, cpu.EXACT_TOKENS_FROM_BYTES) for rows in range(1, 4097)]
    assert large == [*range(1, 65), *padded[64:]]


# Attention


@dataclass
class Pool:
    """A paged cache in which only what a sequence may see holds ordinary numbers."""

    cache: LayerCache
    pages: NDArray[np.int32]
    lengths: NDArray[np.int32]
    query: Tensor


def make_pool(
    lengths: list[int],
    seed: int,
    *,
    page_size: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    dtype: torch.dtype,
    unused_pages: int,
) -> Pool:
    """Pages are given in random order, and unused ones lie between them; table entries past a length are stale."""
    draw = np.random.default_rng(seed)
    used = [-(-length // page_size) for length in lengths]
    pages = 1 + sum(used) + unused_pages
    order = draw.permutation(np.arange(1, pages)).astype(np.int32)
    table = draw.integers(1, pages, (len(lengths), max(used))).astype(np.int32)
    k, v = (POISON * normal(seed + side, pages, kv_heads, page_size, head_dim) for side in (1, 2))
    k[DUMP_PAGE], v[DUMP_PAGE] = normal(seed + 5, 2, kv_heads, page_size, head_dim)  # padding rows are written there
    for sequence, (length, count) in enumerate(zip(lengths, used, strict=True)):
        table[sequence, :count] = own = order[sum(used[:sequence]) :][:count]
        for side in (k, v):
            held = normal(seed + 10 * sequence + 7, length, kv_heads, head_dim) * (1 if side is k else -2)
            for place, page in enumerate(own):
                part = held[place * page_size : (place + 1) * page_size]
                side[page, :, : len(part)] = part.transpose(0, 1)
    query = normal(seed + 3, len(lengths), kv_heads * group, head_dim).to(dtype)
    return Pool(LayerCache(k.to(dtype), v.to(dtype), False), table, np.array(lengths, dtype=np.int32), query)


def check_decode_attention(pool: Pool, compiled: bool) -> None:
    """What lies beyond a sequence's end, and in pages that no sequence owns, is not even a number."""
    exact = LayerCache(pool.cache.k.float(), pool.cache.v.float(), False)
    table = torch.from_numpy(pool.pages), torch.from_numpy(pool.lengths)
    expected = reference.decode_attention(pool.query.float(), exact, *table)
    for side in (pool.cache.k, pool.cache.v):
        side[side.float().abs() > POISON / 100] = torch.nan
    starts = torch.arange(len(pool.lengths) + 1, dtype=torch.int32)
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(native, "library", lambda: None)
        actual = cpu.paged_attention(pool.query, pool.cache, cpu.PageTable(*table, starts))
    assert actual.dtype == pool.query.dtype
    assert_close(actual, expected, magnitude=torch.full_like(expected, 2.0))


PAGED = {
    "page_size": st.sampled_from([1, 2, 4, 16, 32, 64]),
    "kv_heads": st.integers(1, 4),
    "group": st.sampled_from([1, 2, 3, 4, 8]),
    "head_dim": st.sampled_from([2, 8, 20, 32, 64]),
    "dtype": DTYPES,
    "seed": SEEDS,
}


@random_shapes
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=12),
    unused_pages=st.sampled_from([0, 3, 100]),
    compiled=st.booleans(),
    **PAGED,
)
def test_decode_attention(lengths: list[int], unused_pages: int, compiled: bool, seed: int, **shape: object) -> None:
    check_decode_attention(make_pool(lengths, seed, unused_pages=unused_pages, **shape), compiled)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[64], [256], [1, 256], [64] * 5, [256] * 9, [1] * 33, [63, 64, 65, 1]])
def test_decode_attention_at_borders_of_pages(lengths: list[int], dtype: torch.dtype, compiled: bool) -> None:
    """Full pages, one sequence, equal lengths (no padded place in the table) and ragged ones."""
    shape = {"page_size": 16, "kv_heads": 2, "group": 3, "head_dim": 16, "dtype": dtype}
    check_decode_attention(make_pool(lengths, 0, unused_pages=20, **shape), compiled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
@pytest.mark.parametrize("group", [1, 2, 3, 5, 16])
def test_compiled_decode_attention(head_dim: int, group: int, dtype: torch.dtype) -> None:
    """Every instance, with what lies beyond a sequence's end not even a number."""
    pool = make_pool(
        [1, 15, 16, 17, 64, 200, 63],
        group,
        page_size=16,
        kv_heads=2,
        group=group,
        head_dim=head_dim,
        dtype=dtype,
        unused_pages=5,
    )
    if not native.has_attention(pool.query.shape[1], pool.cache.k):
        pytest.skip("no compiler for the kernels")
    table = torch.from_numpy(pool.pages), torch.from_numpy(pool.lengths)
    exact = LayerCache(pool.cache.k.float(), pool.cache.v.float(), False)
    expected = reference.decode_attention(pool.query.float(), exact, *table)
    for side in (pool.cache.k, pool.cache.v):
        side[side.float().abs() > POISON / 100] = torch.nan
    strided = torch.cat((pool.query, pool.query), dim=1)[:, : pool.query.shape[1]]
    starts = torch.arange(len(pool.lengths) + 1, dtype=torch.int32)
    actual = native.attention(strided, pool.cache.k, pool.cache.v, *table, starts)
    assert_close(actual, expected, magnitude=torch.full_like(expected, 2.0))
    assert torch.equal(actual, native.attention(strided, pool.cache.k, pool.cache.v, *table, starts))


@dataclass
class Sequences:
    """What one call of the compiled attention gets: the newest ``counts`` rows of sequences of ``lengths`` keys."""

    pool: Pool
    counts: list[int]
    query: Tensor

    def attention(self, chosen: list[int] | None = None) -> Tensor:
        """Of all sequences, or of the chosen ones alone."""
        chosen = list(range(len(self.counts))) if chosen is None else chosen
        rows = torch.cat([torch.arange(sum(self.counts))[self.rows(sequence)] for sequence in chosen])
        bounds = torch.tensor([0, *(self.counts[sequence] for sequence in chosen)], dtype=torch.int32)
        return native.attention(
            self.query[rows],
            self.pool.cache.k,
            self.pool.cache.v,
            torch.from_numpy(self.pool.pages[chosen]),
            torch.from_numpy(self.pool.lengths[chosen]),
            bounds.cumsum(0, dtype=torch.int32),
        )

    def rows(self, sequence: int) -> slice:
        first = sum(self.counts[:sequence])
        return slice(first, first + self.counts[sequence])

    def expected(self) -> tuple[Tensor, Tensor]:
        """In fp32, and the error of torch's own attention in bf16: both [rows, heads, head size]."""
        k_cache, v_cache = self.pool.cache.k, self.pool.cache.v
        outputs, errors = [], []
        for sequence, length in enumerate(self.pool.lengths):
            used = torch.from_numpy(self.pool.pages[sequence][: -(-length // self.pool.cache.page_size)])
            k, v = LayerCache(k_cache, v_cache, False).read(used, int(length))
            query = self.query[self.rows(sequence)]
            outputs.append(reference.chunk_attention(query.float(), k.float(), v.float()))
            errors.append((cpu.chunk_attention(query, k, v).float() - outputs[-1]).abs())
        return torch.cat(outputs), torch.cat(errors)


def make_sequences(sizes: list[tuple[int, int]], seed: int, *, heads_of: tuple[int, int], **shape: object) -> Sequences:
    """``sizes`` are lengths and counts of rows; ``heads_of`` the key/value heads and the queries of each."""
    kv_heads, group = heads_of
    lengths, counts = ([size[side] for size in sizes] for side in (0, 1))
    pool = make_pool(lengths, seed, kv_heads=kv_heads, group=group, dtype=torch.bfloat16, unused_pages=3, **shape)
    for side in (pool.cache.k, pool.cache.v):  # what no query may see is not even a number
        side[side.float().abs() > POISON / 100] = torch.nan
        side[DUMP_PAGE] = torch.inf
    head_dim = pool.cache.k.shape[3]
    return Sequences(pool, counts, normal(seed + 4, sum(counts), kv_heads * group, head_dim).bfloat16())


needs_kernels = pytest.mark.skipif("native.library() is None", reason="no kernels")
BORDERS = [
    (1, 1),
    (15, 1),
    (16, 16),
    (17, 3),
    (31, 1),
    (32, 1),
    (33, 33),
    (63, 2),
    (64, 1),
    (65, 65),
    (129, 1),
    (200, 70),
]


@needs_kernels
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
@pytest.mark.parametrize("group", range(1, 17))
def test_compiled_attention_in_bf16(group: int, head_dim: int) -> None:
    """Decodes and prompt chunks about the borders of tiles, blocks and pages.

    Weights are rounded to bf16 once, 2^-9 of each and so of the largest value that is averaged, and the output once
    more. torch's own attention in bf16 rounds the same two, so its error is the measure.
    """
    page_size = [16, 32, 48, 64, 80, 256][(group + head_dim // 32) % 6]
    case = make_sequences(BORDERS, group, heads_of=(2, group), page_size=page_size, head_dim=head_dim)
    actual = case.attention()
    expected, torch_error = case.expected()
    error = (actual.float() - expected).abs()
    largest = float(case.pool.cache.v.float().abs().nan_to_num(0, 0).max())
    assert (error <= 2**-8 * expected.abs() + 2**-9 * largest).all()
    assert error.square().mean() <= 1.5 * torch_error.square().mean()


@needs_kernels
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (3, 64), (4, 128), (5, 96), (8, 64), (16, 32)])
def test_a_rows_attention_does_not_depend_on_the_rows_beside_it(group: int, head_dim: int) -> None:
    """The same bits alone and in a batch, and the same again where a prompt comes in other chunks."""
    case = make_sequences(BORDERS, group, heads_of=(2, group), page_size=32, head_dim=head_dim)
    together = case.attention()
    for sequence in range(len(BORDERS)):
        assert torch.equal(case.attention([sequence]), together[case.rows(sequence)])
    order = list(range(len(BORDERS)))[::-1]
    assert torch.equal(case.attention(order), torch.cat([together[case.rows(sequence)] for sequence in order]))

    whole = case.rows(len(BORDERS) - 1)
    rows, pages = case.query[whole], torch.from_numpy(case.pool.pages[-1:])
    length, least = int(case.pool.lengths[-1]), -(-3 // group)  # fewer queries than three have a kernel of their own
    for chunk in (least, 7 + least, 33):
        for first in range(0, len(rows) - chunk, chunk):
            seen = torch.tensor([length - len(rows) + first + chunk], dtype=torch.int32)
            bounds = torch.tensor([0, chunk], dtype=torch.int32)
            part = native.attention(
                rows[first : first + chunk], case.pool.cache.k, case.pool.cache.v, pages, seen, bounds
            )
            assert torch.equal(part, together[whole][first : first + chunk])


@needs_kernels
@pytest.mark.parametrize("rows", [1, 40])
def test_attention_where_scores_are_far_apart(rows: int) -> None:
    """Maxima that grow from block to block, and weights that underflow."""
    case = make_sequences([(200, rows)], 1, heads_of=(1, 8), page_size=32, head_dim=64)
    ramp = torch.linspace(0, 40, 200)
    for key, page in enumerate(np.repeat(case.pool.pages[0], 32)[:200]):
        case.pool.cache.k[int(page), 0, key % 32] = ramp[key]
    case.query[:] = 1
    for sign in (1, -1):
        case.query *= sign
        expected, _ = case.expected()
        torch.testing.assert_close(case.attention().float(), expected, rtol=2**-8, atol=2**-8)


@random_shapes
@given(
    decodes=st.lists(st.integers(0, 70), max_size=5),
    chunks=st.lists(st.tuples(st.sampled_from([0, 0, 16, 37]), st.integers(1, 60), st.booleans()), max_size=4),
    group=st.sampled_from([1, 3, 8]),
    head_dim=st.sampled_from([32, 96]),
    compiled=st.booleans(),
    avx512=st.booleans(),
    seed=SEEDS,
    dtype=DTYPES,
)
def test_attention_of_a_whole_step(
    decodes: list[int],
    chunks: list[tuple[int, int, bool]],
    group: int,
    head_dim: int,
    compiled: bool,
    avx512: bool,
    seed: int,
    dtype: torch.dtype,
) -> None:
    """Decodes, prompt chunks and padding as the scheduler mixes them: each row against the keys up to its own."""
    assume(decodes or chunks)
    sequences = [(start, 1, True) for start in decodes] + chunks
    start, count, sample = (np.array(column) for column in zip(*sequences, strict=True))
    slots = np.arange(len(sequences), dtype=np.int32)
    nothing = np.zeros(0, dtype=np.int32)
    plan = StepPlan(
        *(0, slots, slots.astype(np.int64), start.astype(np.int32), count.astype(np.int32), sample),
        *(len(decodes), (), nothing, nothing, nothing),
    )
    pool = make_pool(
        (start + count).tolist(),
        seed,
        page_size=16,
        kv_heads=2,
        group=group,
        head_dim=head_dim,
        dtype=dtype,
        unused_pages=2,
    )
    exact = LayerCache(pool.cache.k.float(), pool.cache.v.float(), False)
    for side in (pool.cache.k, pool.cache.v):  # what no query may see is not even a number
        side[side.float().abs() > POISON / 100] = torch.nan
    padded_tokens = partial(cpu.padded_tokens, weights_bytes=0)
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(native, "library", lambda: None)
        patch.setattr(native, "has_avx512", lambda: avx512)
        arrays = step_arrays(plan, pool.pages - 1, 16, lambda one, start, count: [0] * count, padded_tokens)
        batch = cpu.prepare(arrays, torch.zeros(len(slots), dtype=torch.int64))
        query = normal(seed, len(arrays.positions), 2 * group, head_dim).to(dtype)
        actual = cpu.attention(query, pool.cache, batch, None)
        sampled = query.index_select(0, batch.sample_indices)
        samples = cpu.sample_attention(sampled, pool.cache, batch, None) if batch.samples else sampled.flatten(1)

    rows = int(count.sum())
    table = torch.from_numpy(np.repeat(pool.pages, count, axis=0)), torch.from_numpy(arrays.positions[:rows] + 1)
    expected = reference.decode_attention(query[:rows].float(), exact, *table).flatten(1)
    assert actual.isfinite().all()
    assert_close(actual[:rows], expected, magnitude=torch.full_like(expected, 2.0))
    expected = expected[batch.sample_indices[: batch.samples]]
    assert_close(samples[: batch.samples], expected, magnitude=torch.full_like(expected, 2.0))


@random_shapes
@given(
    rows=st.integers(1, 40),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 3]),
    head_dim=st.sampled_from([8, 32, 64]),
    page_size=st.sampled_from([4, 16]),
    normed=st.booleans(),
    seed=SEEDS,
    dtype=DTYPES,
    fp8=st.booleans(),
    compiled=st.booleans(),
)
def test_rotate_and_write(
    rows: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    page_size: int,
    normed: bool,
    seed: int,
    dtype: torch.dtype,
    fp8: bool,
    compiled: bool,
) -> None:
    """Queries and both sides of the cache, and nothing else written."""
    draw = np.random.default_rng(seed)
    config = ModelConfig("test", 1, 1, 1, kv_heads * group, kv_heads, head_dim, 1, 1, qk_norm=normed)
    qkv = normal(seed, rows, (group + 2) * kv_heads * head_dim).to(dtype)
    angle = 3 * normal(seed + 1, 50, head_dim // 2)
    tables = angle.cos().repeat(1, 2).to(dtype), torch.cat((-angle.sin(), angle.sin()), -1).to(dtype)
    norms = (normal(seed + 2, head_dim).to(dtype), normal(seed + 3, head_dim).to(dtype)) if normed else None
    positions = torch.from_numpy(draw.integers(0, 50, rows, dtype=np.int32))
    slots = torch.from_numpy(draw.permutation(60 * page_size)[:rows].astype(np.int32))
    before = normal(seed + 4, 2, 60, kv_heads, page_size, head_dim).to(dtype)
    cache, oracle = (LayerCache(*before.to(kind).clone(), fp8) for kind in (dtype, torch.float32))
    no_sequences = cpu.PageTable(slots, slots, slots)
    batch = cpu.Batch(slots, positions, slots, no_sequences, 0, slots, slots, no_sequences)
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(native, "library", lambda: None)
        actual = cpu.rotate_and_write(qkv, norms, tables, cache, batch, config)
    wide = [None if norms is None else (norms[0].float(), norms[1].float()), (tables[0].float(), tables[1].float())]
    arguments = positions.long(), slots.long(), config.heads, config.rms_norm_epsilon
    expected = reference.rotate_and_write(qkv.float(), *wide, oracle, *arguments)
    bound = expected.abs().amax()
    assert_close(actual, expected, magnitude=torch.full_like(expected, 4 * float(bound)))
    for side, exact in ((cache.k, oracle.k), (cache.v, oracle.v)):
        written = slots.long() // page_size, slots.long() % page_size
        tolerance = 0.14 if fp8 else ROUNDING[dtype] * 8
        error = (side.float() - exact).abs()[written[0], :, written[1]]
        assert (error <= tolerance * (exact.abs()[written[0], :, written[1]] + float(bound))).all()
        untouched = torch.ones(60, page_size, dtype=torch.bool)
        untouched[written] = False
        original = before[0] if side is cache.k else before[1]
        assert torch.equal(side.transpose(1, 2)[untouched], original.transpose(1, 2)[untouched])


@random_shapes
@given(
    rows=st.integers(1, 40),
    prefix=st.sampled_from([0, 0, 1, 7, 40]),
    kv_heads=st.integers(1, 4),
    group=st.sampled_from([1, 2, 3, 8]),
    head_dim=st.sampled_from([2, 8, 20, 64]),
    seed=SEEDS,
    dtype=DTYPES,
)
def test_chunk_attention(
    rows: int, prefix: int, kv_heads: int, group: int, head_dim: int, seed: int, dtype: torch.dtype
) -> None:
    query = normal(seed, rows, kv_heads * group + 1, head_dim).to(dtype)[:, : kv_heads * group]
    k, v = (normal(seed + side, prefix + rows, kv_heads, head_dim).to(dtype) for side in (1, 2))
    expected = reference.chunk_attention(query.float(), k.float(), v.float())
    actual = cpu.chunk_attention(query, k, v)
    assert actual.dtype == dtype
    assert_close(actual, expected, magnitude=torch.full_like(expected, 1.0))


def test_reference_attention_is_what_its_formula_says() -> None:
    """The oracle itself, against sums written out in Python."""
    q, k, v = normal(0, 2, 4, 6), normal(1, 5, 2, 6), normal(2, 5, 2, 6)
    actual = reference.chunk_attention(q, k, v)
    for row in range(2):
        for head in range(4):
            seen = range(4 + row)
            scores = [float(q[row, head] @ k[key, head // 2]) / 6**0.5 for key in seen]
            weights = np.exp(scores) / np.exp(scores).sum()
            expected = sum(weight * v[key, head // 2] for weight, key in zip(weights, seen, strict=True))
            torch.testing.assert_close(actual[row, head], expected.float(), rtol=1e-5, atol=1e-6)


# The cache


@random_shapes
@given(st.lists(st.floats(-1e5, 1e5, width=32), min_size=2, max_size=40))
def test_an_fp8_cache_reads_back_what_was_rounded(values: list[float]) -> None:
    head_dim = len(values)
    cache = LayerCache(*torch.zeros(2, 3, 1, 4, head_dim, dtype=torch.bfloat16), True)
    x = torch.tensor(values).bfloat16().view(1, 1, head_dim)
    rounded = cache.rounded(x)
    grid = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    grid = grid[grid.isfinite()]
    distance = (x.float().view(-1, 1).clamp(-448, 448) - grid).abs().min(-1).values
    assert torch.equal((rounded.float() - x.float().clamp(-448, 448)).abs().view(-1), distance)
    assert torch.equal(cache.rounded(rounded), rounded)
    cache.write(rounded, -rounded, torch.tensor([[2 * 4 + 3]]))
    k, v = cache.read(torch.tensor([0, 2]), 8)
    assert torch.equal(k[7], rounded[0])
    assert torch.equal(v[7], -rounded[0])
    assert not k[:7].any()
