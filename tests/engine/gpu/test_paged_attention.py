"""Attention of decodes against its definition in fp32: interpreted on the CPU, compiled and at full size on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_kernels import (
    BF16,
    DEVICE,
    E4M3,
    MARKS,
    ON_GPU,
    assert_same_bits,
    full_size,
    needs_gpu,
    normal,
    tl,
    triton,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import (
    GPT_OSS,
    LLAMA_8B,
    LLAMA_70B,
    TINY,
    Case,
    Shape,
    assert_close,
    both,
    exact_decode,
    forget,
    make_case,
)
from torch import Tensor

from examples import every, examples
from megatoken.engine.ops import paged_attention
from megatoken.engine.ops.paged_attention import MANY, MANY_PROGRAMS, DecodeConfig

pytestmark = MARKS
DEFAULT = DecodeConfig()


def decode(case: Case, q_BHE: Tensor, config: DecodeConfig | None = DEFAULT, **options: Any) -> Tensor:
    out = torch.empty(q_BHE.shape, dtype=BF16 if options.get("out_scale") is None else E4M3, device=DEVICE)
    return paged_attention.decode_attention(
        q_BHE,
        case.k_cache,
        case.v_cache,
        case.table,
        case.lengths_B,
        out,
        softmax_scale=options.pop("softmax_scale", None) or case.shape.head_dim**-0.5,
        max_length=max(case.lengths),
        total_tokens=sum(case.lengths),
        config=config,
        **options,
    )


# Decode


RAGGED = [1, 32, 31, 33, 0, 64, 256, 4096, 1023, 460]
FEW = [5, 128, 0, 1999]


@pytest.mark.parametrize(
    ("shape", "lengths"),
    [
        *((shape, [1, 16, 17, 0, 64, 65]) for shape in both(TINY)),
        *((shape, [31, 100]) for shape in both(Shape(8, 1, 64, 32))),
        *((shape, [33, 5]) for shape in both(Shape(6, 2, 80, 16))),
        (Shape(3, 3, 96, 16), [47]),
        (Shape(12, 1, 64, 128, BF16), [129, 3]),
        *(full_size(shape, RAGGED) for shape in both(LLAMA_70B)),
        full_size(LLAMA_70B, [1]),
        full_size(LLAMA_70B, [60 + 37 * i % 1241 for i in range(900)]),
        full_size(replace(LLAMA_70B, page_size=16), RAGGED),
        full_size(replace(LLAMA_70B, page_size=64, dtype=BF16), RAGGED),
        full_size(replace(LLAMA_70B, page_size=128), RAGGED),
        full_size(LLAMA_8B, [60 + 37 * i % 1241 for i in range(64)]),
        *(full_size(shape, FEW) for shape in both(Shape(128, 8, 128, 32))),
        full_size(Shape(32, 32, 128, 32), FEW),
        full_size(Shape(32, 32, 80, 32), FEW),
        full_size(Shape(48, 8, 96, 64, BF16), FEW),
        full_size(Shape(28, 4, 64, 16), FEW),
        full_size(Shape(8, 1, 256, 32, BF16), FEW),
    ],
)
def test_decode(shape: Shape, lengths: list[int]) -> None:
    case = make_case(shape, lengths)
    q = normal(len(lengths), shape.heads, shape.head_dim, seed=9)
    expected = exact_decode(case, q, shape.head_dim**-0.5)
    out = decode(case, q)
    assert_close(out, expected)
    assert all((out[b] == 0).all() for b, length in enumerate(lengths) if length == 0)


@settings(max_examples=40 if ON_GPU else examples(15))
@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=4),
    page_size=st.sampled_from([16, 32, 64, 128]),
    group=st.integers(1, 16),
    kv_heads=st.integers(1, 2),
    dtype=st.sampled_from([E4M3, BF16]),
    e4m3_scores=st.booleans(),
    split_tokens=st.sampled_from([None, 64]),
    seed=st.integers(0, 100),
)
def test_decode_any_shape(
    lengths: list[int],
    page_size: int,
    group: int,
    kv_heads: int,
    dtype: torch.dtype,
    e4m3_scores: bool,
    split_tokens: int | None,
    seed: int,
) -> None:
    if ON_GPU:
        group, kv_heads, page_size = 5, 2, 32  # every other shape would be a compilation
    shape = Shape(group * kv_heads, kv_heads, 64, page_size, dtype)
    case = make_case(shape, lengths, seed)
    q = normal(len(lengths), shape.heads, 64, seed=seed)
    out = decode(case, q, DecodeConfig(e4m3_scores=e4m3_scores, split_tokens=split_tokens))
    assert_close(out, exact_decode(case, q, 0.125))


SAME = (False, False), (True, True)


@pytest.mark.parametrize(("sinks", "e4m3_scores"), [(False, True), (True, False), *(SAME if ON_GPU else every(*SAME))])
@pytest.mark.parametrize(
    ("shape", "lengths", "window", "piece"),
    [
        *((shape, [1, 19, 20, 21, 0, 150], 20, None) for shape in both(TINY)),
        *((shape, [1, 64, 200, 0, 129], 130, 64) for shape in both(Shape(6, 2, 64, 16))),
        *((shape, [1, 65, 0, 200], None, 64) for shape in both(Shape(8, 1, 64, 32))),
        *(full_size(shape, RAGGED, 128, None) for shape in both(GPT_OSS)),
        *(full_size(shape, [60 + 37 * i % 3000 for i in range(900)], None, None) for shape in both(GPT_OSS)),
        *(full_size(shape, RAGGED, None, 128) for shape in both(GPT_OSS)),
    ],
)
def test_windows_and_sinks(
    shape: Shape, lengths: list[int], window: int | None, piece: int | None, sinks: bool, e4m3_scores: bool
) -> None:
    """Keys before a window are not read at all. A sink counts once, however many pieces there are."""
    case = make_case(shape, lengths)
    q = normal(len(lengths), shape.heads, shape.head_dim, seed=9)
    sinks_H = normal(shape.heads, seed=8, spread=3.0, dtype=torch.float32) if sinks else None
    expected = exact_decode(case, q, shape.head_dim**-0.5, window, sinks_H)
    if window is not None:
        forget(case, [max(length - window, 0) for length in lengths])
    config = DecodeConfig(e4m3_scores=e4m3_scores, split_tokens=piece)
    assert_close(decode(case, q, config, window=window, sinks_H=sinks_H), expected)


@pytest.mark.parametrize(
    ("shape", "lengths", "piece"),
    [
        *((shape, [1, 63, 64, 65, 128, 129, 0, 200], 64) for shape in both(TINY)),
        *(full_size(shape, [1, 127, 128, 129, 0, 4096, 300], 128) for shape in both(LLAMA_70B)),
        full_size(LLAMA_8B, [4096, 2000], 192),
    ],
)
def test_split_sequences_merge(shape: Shape, lengths: list[int], piece: int) -> None:
    case = make_case(shape, lengths)
    q = normal(len(lengths), shape.heads, shape.head_dim, seed=9)
    expected = exact_decode(case, q, shape.head_dim**-0.5)
    config = DecodeConfig(split_tokens=piece)
    out = decode(case, q, config)
    assert_close(out, expected)
    # Sequences that fit into one piece are the same with and without splitting.
    whole = decode(case, q)
    for b, length in enumerate(lengths):
        if length <= piece:
            assert torch.equal(out[b], whole[b])
    assert_close(decode(case, q, config, out_scale=0.02), expected, 0.02)
    # Scores of some hundreds, whose powers no fp32 holds.
    assert_close(decode(case, q, config, softmax_scale=20.0), exact_decode(case, q, 20.0))


@pytest.mark.parametrize("e4m3_scores", [False, True])
@pytest.mark.parametrize("out_scale", [None, 0.04])
@pytest.mark.parametrize("shape", [*both(TINY), *(full_size(shape) for shape in both(LLAMA_70B))])
def test_scales(shape: Shape, out_scale: float | None, e4m3_scores: bool) -> None:
    lengths = [5, 70]
    case = make_case(shape, lengths)
    q = normal(len(lengths), shape.heads, shape.head_dim, seed=9)
    out = decode(
        case, q, DecodeConfig(e4m3_scores=e4m3_scores), softmax_scale=0.2, k_scale=0.5, v_scale=3.0, out_scale=out_scale
    )
    assert_close(out, 3.0 * exact_decode(case, q, 0.1), out_scale or 1.0)


def test_e4m3_outputs_saturate() -> None:
    case = make_case(TINY, [70])
    q = normal(1, TINY.heads, TINY.head_dim, seed=9)
    out = decode(case, q, out_scale=1e-4)
    assert torch.isfinite(out.float()).all()
    assert (out.float().abs() == 448).any()


def test_large_queries_saturate() -> None:
    case = make_case(TINY, [40])
    q = normal(1, TINY.heads, TINY.head_dim, seed=9) * 3e5
    scale = 1e-6
    for config in (DecodeConfig(), DecodeConfig(e4m3_scores=True)):
        out = decode(case, q, config, softmax_scale=scale)
        expected = exact_decode(case, q if config.e4m3_scores else q.clamp(-65504, 65504), scale)
        assert_close(out, expected)


@pytest.mark.parametrize("spread", [1e-3, 1.0, 100.0])
def test_e4m3_scores_keep_what_bf16_queries_hold(spread: float) -> None:
    """Two e4m3 terms hold a bf16 number: the scores agree with fp32 to what the output's rounding hides."""
    case = make_case(TINY, [200])
    q = normal(1, TINY.heads, TINY.head_dim, seed=4) * spread
    q[:, :, ::3] *= 1e-3  # small beside large
    expected = exact_decode(case, q, 0.125 / spread)
    assert_close(
        decode(case, q, DecodeConfig(e4m3_scores=True), softmax_scale=0.125 / spread), expected, tolerance=4e-3
    )


@triton.jit
def _pairs_kernel(words, even, odd, INTERPRETED: tl.constexpr) -> None:
    i = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    first, second = paged_attention._e4m3_pairs(tl.load(words + i), INTERPRETED)
    tl.store(even + i, first)
    tl.store(odd + i, second)


def test_every_word_comes_apart_into_its_two_values() -> None:
    words = torch.arange(-(2**15), 2**15, device=DEVICE).to(torch.int16)
    even, odd = (torch.empty(2**16, dtype=torch.float16, device=DEVICE) for _ in range(2))
    _pairs_kernel[(64,)](words, even, odd, not ON_GPU)
    expected = words.view(E4M3).view(-1, 2).half()
    assert torch.equal(even.nan_to_num(777), expected[:, 0].nan_to_num(777))
    assert torch.equal(odd.nan_to_num(777), expected[:, 1].nan_to_num(777))


@settings(deadline=None)
@given(
    kv_heads=st.integers(1, 64),
    max_length=st.integers(0, 200_000),
    sequences=st.integers(1, 2000),
    mean=st.floats(0, 1),
)
def test_pieces_are_few_and_worth_a_program(kv_heads: int, max_length: int, sequences: int, mean: float) -> None:
    total = max_length + int((sequences - 1) * mean * max_length)
    piece = paged_attention.split_tokens(kv_heads, max_length, total)
    if piece > max_length:
        return
    assert piece % 64 == 0 and piece >= paged_attention.SHORTEST_SPLIT
    assert -(-max_length // piece) <= paged_attention.MAX_SPLITS


def test_a_full_batch_of_short_sequences_is_not_split_and_a_lone_one_is() -> None:
    assert paged_attention.split_tokens(8, 1300, 900 * 460) > 1300
    assert paged_attention.split_tokens(8, 2000, 2000) == paged_attention.SHORTEST_SPLIT
    assert paged_attention.split_tokens(8, 1300, 64 * 460) == 192


def test_a_slice_of_a_wider_table_is_read_by_its_rows() -> None:
    case = make_case(TINY, [40, 20])
    q = normal(2, TINY.heads, TINY.head_dim, seed=9)
    wide = torch.full((2, 50), 2**30, dtype=torch.int32, device=DEVICE)
    wide[:, 7 : 7 + case.table.shape[1]] = case.table
    strided = replace(case, table=wide[:, 7 : 7 + case.table.shape[1]])
    assert torch.equal(decode(strided, q), decode(case, q))


def test_no_sequences() -> None:
    case = make_case(TINY, [5])
    empty = replace(case, table=case.table[:0], lengths_B=case.lengths_B[:0])
    assert decode(empty, normal(0, TINY.heads, TINY.head_dim, seed=1)).shape == (0, TINY.heads, TINY.head_dim)


@pytest.mark.parametrize(
    ("shape", "lengths"),
    [
        *((shape, [70, 3]) for shape in both(TINY)),
        *(full_size(shape, [4096, 1, 460, 32] + [100 + i for i in range(200)]) for shape in both(LLAMA_70B)),
    ],
)
@pytest.mark.parametrize(
    "config", [DecodeConfig(), DecodeConfig(split_tokens=256), DecodeConfig(e4m3_scores=True)], ids=str
)
def test_decode_gives_the_same_bits_again(config: DecodeConfig, shape: Shape, lengths: list[int]) -> None:
    case = make_case(shape, lengths)
    q = normal(len(lengths), shape.heads, shape.head_dim, seed=9)
    assert_same_bits(lambda: [decode(case, q, config)])


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(
    "config",
    [DecodeConfig(64, 4, 1), DecodeConfig(64, 4, 3), DecodeConfig(128, 4, 2), DecodeConfig(128, 8, 2)]
    + [DecodeConfig(64, 4, stages, e4m3_scores=True) for stages in (1, 2, 3)]
    + [MANY_PROGRAMS, DecodeConfig(32, 1, 3)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [E4M3, BF16])
def test_decode_configurations(config: DecodeConfig, dtype: torch.dtype) -> None:
    lengths = [1, 32, 127, 128, 129, 1000, 4096]
    case = make_case(replace(LLAMA_70B, dtype=dtype), lengths)
    q = normal(len(lengths), LLAMA_70B.heads, LLAMA_70B.head_dim, seed=9)
    assert_close(decode(case, q, config), exact_decode(case, q, LLAMA_70B.head_dim**-0.5))


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("group", [4, 8, 16])
@pytest.mark.parametrize("dtype", [E4M3, BF16])
def test_many_sequences(dtype: torch.dtype, group: int) -> None:
    """So many that the engine takes programs of one warp; some sequences are cut into pieces."""
    shape = replace(LLAMA_70B, dtype=dtype, heads=group * LLAMA_70B.kv_heads)
    lengths = sorted([1, 32, 33, 127, 4096] + [70 + i for i in range(MANY // LLAMA_70B.kv_heads)], reverse=True)
    case = make_case(shape, lengths)
    q = normal(len(lengths), shape.heads, shape.head_dim, seed=9)
    assert_close(decode(case, q, None), exact_decode(case, q, shape.head_dim**-0.5))


@needs_gpu
@pytest.mark.gpu
def test_steps_compile_nothing_new() -> None:
    """Lengths, table widths, batch sizes and buffer offsets change from step to step: none may cost a compilation."""
    compiled: list[object] = []

    def run(sequences: int, length: int, width: int, offset: int, piece: int | None) -> None:
        case = make_case(LLAMA_70B, [length] * sequences)
        packed = torch.zeros(offset + sequences * width + sequences, dtype=torch.int32, device=DEVICE)
        table = packed[offset : offset + sequences * width].view(sequences, width)
        table[:, : case.table.shape[1]] = case.table
        lengths = packed[offset + sequences * width :]
        lengths.copy_(case.lengths_B)
        q = normal(sequences, LLAMA_70B.heads, LLAMA_70B.head_dim, seed=9)
        decode(replace(case, table=table, lengths_B=lengths), q, DecodeConfig(split_tokens=piece))

    run(3, 300, 16, 0, 128)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **details: compiled.append(details))
        for arguments in ((1, 1, 3, 1, None), (16, 512, 18, 2, 128), (5, 31, 17, 3, 64), (16, 1024, 48, 0, 64)):
            run(*arguments)
    assert not compiled


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.float32}, "got queries torch.float32"),
        ({"v_cache": torch.bfloat16}, "v_cache torch.bfloat16"),
        ({"out": torch.float8_e4m3fn}, "out torch.float8_e4m3fn .* out_scale None"),
        ({"lengths": torch.int64}, "index 1 torch.int64"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, torch.dtype], message: str) -> None:
    case = make_case(TINY, [5])
    q = normal(1, TINY.heads, TINY.head_dim, seed=1).to(change.get("q", BF16))
    with pytest.raises(ValueError, match=message):
        paged_attention.decode_attention(
            q,
            case.k_cache,
            case.v_cache.to(change.get("v_cache", E4M3)),
            case.table,
            case.lengths_B.to(change.get("lengths", torch.int32)),
            torch.empty(q.shape, dtype=change.get("out", BF16), device=DEVICE),
            softmax_scale=0.1,
            max_length=5,
            total_tokens=5,
        )
