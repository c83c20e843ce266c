"""The Triton kernels of the memory tests, interpreted: they move what they say."""

from __future__ import annotations

import pytest
import torch

gpu_memory = pytest.importorskip("megatoken.hardware.qualify.gpu_memory", reason="needs Triton")


def test_reads_writes_copies_and_triads_touch_every_number() -> None:
    a, b, c = (torch.rand(3 * gpu_memory.BLOCK) for _ in range(3))
    sums = torch.empty(3)
    gpu_memory.read(a, sums)
    torch.testing.assert_close(sums, a.view(3, -1).sum(1))
    gpu_memory.copy(b, a)
    assert torch.equal(a, b)
    gpu_memory.triad(a, b, c, 3.0)
    torch.testing.assert_close(a, b + 3 * c)
    gpu_memory.write(a, 1.5)
    assert bool((a == 1.5).all())


def test_the_cache_test_reads_all_blocks_in_turn() -> None:
    blocks = torch.rand(5, gpu_memory.CACHE_BLOCK)
    sums = torch.empty(4)
    gpu_memory.reread(blocks.view(-1), sums, passes=7)
    expected = [sum(float(blocks[(program + 4 * number) % 5].sum()) for number in range(7)) for program in range(4)]
    torch.testing.assert_close(sums, torch.tensor(expected), rtol=1e-4, atol=1e-2)
