"""Attention of prompts against its definition in fp32: interpreted on the CPU, compiled and at full size on a GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

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
    triton,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import GPT_OSS, LLAMA_8B, LLAMA_70B, TINY, Case, Shape, assert_close, both, exact, forget, make_case
from torch import Tensor

from examples import examples
from megatoken.engine.ops import prompt_attention
from megatoken.engine.ops.prompt_attention import GATHERED_CHUNKS, PAGED_CHUNKS, ChunkConfig

pytestmark = MARKS


def chunk(
    case: Case,
    q_THE: Tensor,
    starts: list[int],
    config: ChunkConfig | None = None,
    out_scale: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    starts_C1: Tensor | None = None,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    out = torch.empty(q_THE.shape, dtype=BF16 if out_scale is None else E4M3, device=DEVICE)
    return prompt_attention.chunk_attention(
        q_THE,
        case.k_cache,
        case.v_cache,
        case.table,
        torch.tensor(starts, dtype=torch.int32, device=DEVICE) if starts_C1 is None else starts_C1,
        case.lengths_B,
        out,
        softmax_scale=case.shape.head_dim**-0.5,
        longest_chunk=max(after - before for before, after in pairwise(starts)),
        max_context=max(case.lengths),
        k_scale=k_scale,
        v_scale=v_scale,
        out_scale=out_scale,
        window=window,
        sinks_H=sinks_H,
        config=config,
    )


def starts_of(rows: list[int], first: int) -> list[int]:
    return [first + sum(rows[:i]) for i in range(len(rows) + 1)]


def assert_chunks_close(
    case: Case, q: Tensor, starts: list[int], out: Tensor, scale: float, out_scale: float = 1.0, v_scale: float = 1.0
) -> None:
    for c, length in enumerate(case.lengths):
        rows = slice(starts[c], starts[c + 1])
        expected = exact(q[rows], *case.keys_and_values(c, length), scale) * v_scale
        assert_close(out[rows], expected, out_scale)
    untouched = torch.cat((out[: starts[0]], out[starts[-1] :]))
    assert (untouched.view(torch.uint8) == 0xFF).all()


SMALL = ChunkConfig(block_rows=32, block_tokens=32)
SMALL_GATHERED = replace(SMALL, gathered=True)
EITHER_SMALL = (SMALL, SMALL_GATHERED)
PROMPTS = [(1, 1), (222, 222), (64, 64), (1, 4096), (300, 1000), (16, 16), (17, 32), (10, 72), (40, 166)]


@pytest.mark.parametrize(
    ("shape", "chunks", "config"),
    [
        *((shape, [(1, 1), (5, 5), (40, 40)], config) for shape in both(TINY) for config in EITHER_SMALL),
        *((shape, [(16, 16), (1, 70), (20, 53), (5, 35)], config) for shape in both(TINY) for config in EITHER_SMALL),
        *((Shape(3, 1, 64, 32), [(17, 33)], config) for config in EITHER_SMALL),
        (Shape(4, 2, 64, 16), [(7, 150), (31, 31)], SMALL_GATHERED),
        (Shape(16, 1, 64, 16, BF16), [(5, 37), (2, 2)], ChunkConfig(block_rows=16, block_tokens=16)),
        (Shape(4, 2, 80, 128), [(30, 130)], SMALL),
        *(full_size(shape, PROMPTS, PAGED_CHUNKS) for shape in both(LLAMA_70B)),
        *(full_size(shape, PROMPTS, GATHERED_CHUNKS) for shape in both(LLAMA_70B)),
        *(full_size(shape, PROMPTS, ChunkConfig(64, 64, 4, 2)) for shape in both(LLAMA_70B)),
        full_size(LLAMA_70B, PROMPTS, ChunkConfig(128, 128, 8, 2)),
        full_size(LLAMA_70B, PROMPTS, ChunkConfig(128, 64, 8, 3)),
        full_size(replace(LLAMA_70B, page_size=64), [(4096, 4096)], PAGED_CHUNKS),
        full_size(Shape(32, 2, 128, 32), [(1024, 9400), (77, 1100)], GATHERED_CHUNKS),
        *(full_size(LLAMA_8B, [(1000, 2000), (33, 4096)], config) for config in (PAGED_CHUNKS, GATHERED_CHUNKS)),
        full_size(replace(TINY, page_size=128), [(1000, 2000), (1, 1)], GATHERED_CHUNKS),
        full_size(Shape(128, 8, 128, 16, BF16), [(100, 333)], PAGED_CHUNKS),
        full_size(Shape(32, 32, 128, 128), [(100, 333)], PAGED_CHUNKS),
        full_size(Shape(48, 8, 96, 32, BF16), [(100, 333)], PAGED_CHUNKS),
        full_size(Shape(32, 32, 80, 32), [(100, 333)], PAGED_CHUNKS),
        full_size(Shape(28, 4, 64, 32), [(100, 333)], PAGED_CHUNKS),
    ],
)
def test_chunks(shape: Shape, chunks: list[tuple[int, int]], config: ChunkConfig) -> None:
    case = make_case(shape, [context for _, context in chunks])
    starts = starts_of([rows for rows, _ in chunks], first=3)
    q = normal(starts[-1] + 2, shape.heads, shape.head_dim, seed=9)
    assert_chunks_close(case, q, starts, chunk(case, q, starts, config), shape.head_dim**-0.5)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    ("shape", "chunks", "window", "config"),
    [
        *((shape, [(1, 1), (40, 40), (20, 93), (1, 64)], 10, SMALL) for shape in both(TINY)),
        *((shape, [(7, 7), (30, 150)], 70, SMALL) for shape in both(Shape(6, 2, 64, 16))),
        *((TINY, [(20, 33), (5, 5)], None, config) for config in EITHER_SMALL),
        *(full_size(shape, PROMPTS, 128, None) for shape in both(GPT_OSS)),
        *(
            full_size(shape, PROMPTS, None, config)
            for shape in both(GPT_OSS)
            for config in (PAGED_CHUNKS, GATHERED_CHUNKS)
        ),
    ],
)
def test_windows_and_sinks(
    shape: Shape, chunks: list[tuple[int, int]], window: int | None, config: ChunkConfig | None, sinks: bool
) -> None:
    """Keys before the window of a chunk's first token are not read at all."""
    case = make_case(shape, [context for _, context in chunks])
    starts = starts_of([rows for rows, _ in chunks], first=3)
    q = normal(starts[-1], shape.heads, shape.head_dim, seed=9)
    sinks_H = normal(shape.heads, seed=8, spread=3.0, dtype=torch.float32) if sinks else None
    expected = torch.cat(
        [
            exact(q[starts[c] : starts[c + 1]], *case.keys_and_values(c, length), 0.125, window, sinks_H)
            for c, length in enumerate(case.lengths)
        ]
    )
    if window is not None:
        forget(case, [max(context - rows - window + 1, 0) for rows, context in chunks])
    out = chunk(case, q, starts, config, window=window, sinks_H=sinks_H)
    assert_close(out[starts[0] :], expected)


@settings(max_examples=30 if ON_GPU else examples(10))
@given(
    chunks=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 40)), min_size=1, max_size=3),
    group=st.integers(1, 5),
    page_size=st.sampled_from([16, 32, 128]),
    dtype=st.sampled_from([E4M3, BF16]),
    gathered=st.booleans(),
    seed=st.integers(0, 100),
)
def test_any_chunks(
    chunks: list[tuple[int, int]], group: int, page_size: int, dtype: torch.dtype, gathered: bool, seed: int
) -> None:
    if ON_GPU:
        group, page_size = 5, 32  # every other shape would be a compilation
    shape = Shape(group, 1, 64, page_size, dtype)
    case = make_case(shape, [rows + before for rows, before in chunks], seed)
    starts = starts_of([rows for rows, _ in chunks], first=seed % 3)
    q = normal(starts[-1], group, 64, seed=seed)
    config = replace(ChunkConfig(64, 64, 4, 2) if ON_GPU else SMALL, gathered=gathered)
    assert_chunks_close(case, q, starts, chunk(case, q, starts, config), 0.125)


@pytest.mark.parametrize(
    ("shape", "chunks", "config"),
    [
        *((TINY, [(20, 33)], config) for config in EITHER_SMALL),
        *(full_size(LLAMA_70B, [(222, 500)], config) for config in (PAGED_CHUNKS, GATHERED_CHUNKS)),
    ],
)
def test_chunk_scales_and_e4m3_output(shape: Shape, chunks: list[tuple[int, int]], config: ChunkConfig) -> None:
    case = make_case(shape, [context for _, context in chunks])
    starts = starts_of([rows for rows, _ in chunks], first=0)
    q = normal(starts[-1], shape.heads, shape.head_dim, seed=9)
    out = chunk(case, q, starts, config, out_scale=0.02, k_scale=0.5, v_scale=3.0)
    assert_chunks_close(case, q, starts, out, 0.5 * shape.head_dim**-0.5, out_scale=0.02, v_scale=3.0)


@pytest.mark.parametrize(
    ("shape", "chunks", "config"),
    [
        *((shape, [(20, 33)], config) for shape in both(TINY) for config in EITHER_SMALL),
        *(
            full_size(shape, [(222, 500), (1, 9)], config)
            for shape in both(LLAMA_70B)
            for config in (PAGED_CHUNKS, GATHERED_CHUNKS)
        ),
    ],
)
def test_chunks_give_the_same_bits_again(shape: Shape, chunks: list[tuple[int, int]], config: ChunkConfig) -> None:
    case = make_case(shape, [context for _, context in chunks])
    starts = starts_of([rows for rows, _ in chunks], first=0)
    q = normal(starts[-1], shape.heads, shape.head_dim, seed=9)
    assert_same_bits(lambda: [chunk(case, q, starts, config)])


@pytest.mark.parametrize("config", [PAGED_CHUNKS, GATHERED_CHUNKS] if ON_GPU else EITHER_SMALL)
def test_e4m3_outputs_saturate(config: ChunkConfig) -> None:
    case = make_case(TINY, [70])
    q = normal(70, TINY.heads, TINY.head_dim, seed=9)
    out = chunk(case, q, [0, 70], config, out_scale=1e-4)
    assert torch.isfinite(out.float()).all()
    assert (out.float().abs() == 448).any()


@needs_gpu
@pytest.mark.gpu
def test_steps_compile_nothing_new() -> None:
    """Rows, contexts, table widths and buffer offsets change from step to step: none may cost a compilation."""
    compiled: list[object] = []

    def run(rows: int, context: int, width: int, offset: int) -> None:
        case = make_case(LLAMA_70B, [context])
        packed = torch.zeros(offset + width + 4, dtype=torch.int32, device=DEVICE)
        table = packed[offset : offset + width].view(1, width)
        table[:, : case.table.shape[1]] = case.table
        contexts, starts = packed[offset + width :][:1], packed[offset + width + 1 :][:2]
        contexts.copy_(case.lengths_B)
        starts[1] = rows
        q = normal(rows, LLAMA_70B.heads, LLAMA_70B.head_dim, seed=9)
        for config in (PAGED_CHUNKS, GATHERED_CHUNKS):
            chunk(replace(case, table=table, lengths_B=contexts), q, [0, rows], config, starts_C1=starts)

    run(3, 300, 16, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **details: compiled.append(details))
        for arguments in ((1, 1, 3, 1), (16, 512, 18, 2), (5, 31, 17, 3), (160, 1024, 48, 0)):
            run(*arguments)
    assert not compiled
