"""FlashInfer's XQA against attention in fp32, and the lines that say why it cannot run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gpu_kernels import BF16, DEVICE, E4M3, ON_GPU, needs_gpu, normal
from paged_cases import LLAMA_8B, LLAMA_70B, Shape, assert_close, exact_decode, make_case

from xqa import XqaBuffers, xqa_available, xqa_decode

pytestmark = [pytest.mark.gpu] if ON_GPU else []


@pytest.mark.parametrize(
    ("head_dim", "page_size", "group", "dtype", "message"),
    [
        (128, 32, 8, BF16, "e4m3 caches only"),
        (96, 32, 8, E4M3, "not heads of 96"),
        (128, 8, 8, E4M3, "pages of 8"),
        (128, 32, 32, E4M3, "64 heads over 2"),
        (128, 32, 8, E4M3, "Hopper"),
    ],
)
def test_xqa_says_why_not(head_dim: int, page_size: int, group: int, dtype: torch.dtype, message: str) -> None:
    reason = xqa_available(64, 64 // group, head_dim, page_size, dtype, torch.device("cpu"))
    assert reason is not None and message in reason and "\n" not in reason


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "out_scale"),
    [(LLAMA_70B, None), (LLAMA_70B, 0.04), (LLAMA_8B, None), (replace(LLAMA_70B, page_size=64), None)],
)
@pytest.mark.parametrize(
    "lengths", [[1, 32, 33, 4096, 700], [4096], [60 + 37 * i % 1241 for i in range(300)]], ids=["few", "one", "many"]
)
def test_xqa(lengths: list[int], shape: Shape, out_scale: float | None) -> None:
    reason = xqa_available(
        shape.heads, shape.kv_heads, shape.head_dim, shape.page_size, shape.dtype, torch.device("cuda", 0)
    )
    if reason is not None:
        pytest.skip(reason)
    case = make_case(shape, lengths, unused=448.0)
    q = normal(len(lengths), shape.heads, shape.head_dim, seed=9)
    buffers = XqaBuffers.allocate(len(lengths), shape.heads, shape.kv_heads, shape.head_dim, DEVICE)
    buffers.workspace.fill_(0xFF)  # whatever memory holds
    expected = 3.0 * exact_decode(case, q, 0.5 * shape.head_dim**-0.5)
    for _ in range(3):
        out = xqa_decode(
            q,
            case.k_cache,
            case.v_cache,
            case.table,
            case.lengths_B,
            torch.full(q.shape, float("nan"), device=DEVICE).to(BF16 if out_scale is None else E4M3),
            buffers,
            softmax_scale=shape.head_dim**-0.5,
            k_scale=0.5,
            v_scale=3.0,
            out_scale=out_scale,
        )
        # Everything is rounded to e4m3, so one row and head may be a tenth off; the whole is nearer.
        assert_close(out, expected, out_scale or 1.0, tolerance=0.12)
        assert (out.float() * (out_scale or 1.0) - expected).norm() <= 0.05 * expected.norm()
        assert (buffers.semaphores == 0).all()
