"""Ranks that meet for real: a process each, in memory of the host, whose kernels Triton interprets."""

from __future__ import annotations

import multiprocessing
import random
import time

import pytest
import torch
from gpu_kernels import BF16, ON_GPU
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from examples import ALL, every
from megatoken.engine.ops import reference
from megatoken.engine.ops.fused_all_reduce import FusedAllReduce, _Places

pytestmark = pytest.mark.skipif(ON_GPU, reason="a GPU does so in test_fused_all_reduce.py")
HIDDEN, MOST_ROWS, STEPS, EPSILON = 64, 8, 12 if ALL else 6, 1e-5
NORM = torch.ones(HIDDEN, dtype=BF16)


def steps() -> list[tuple[int, Tensor, Tensor, int]]:
    """Of each its number, embeddings, rows that sample, and layers; some with fewer rows or samples than ranks."""
    draw, generator = random.Random(0), torch.Generator().manual_seed(0)
    drawn = []
    for number in range(STEPS):
        rows, samples, layers = draw.choice([1, 2, 3, 5, 8]), draw.choice([0, 1, 2, 5]), draw.choice([1, 2, 3])
        x_TD = torch.randn(rows, HIDDEN, generator=generator).to(BF16)
        drawn.append((number, x_TD, torch.randint(0, rows, (samples,), generator=generator).int(), layers))
    return drawn


def rank_main(rank: int, memories: list[Tensor], found: Tensor) -> None:
    """One rank; a layer's products are its input times a number of the rank's own, and it is late now and then."""
    torch.set_num_threads(1)
    draw = random.Random(rank)
    shared = FusedAllReduce(memories[rank], [memory.data_ptr() for memory in memories], rank, MOST_ROWS, HIDDEN)
    for number, x_TD, sampled, layers in steps():
        h_TD, own_TD = x_TD, shared.keep(x_TD)
        for layer in range(layers):
            if draw.random() < 0.3:
                time.sleep(0.02 * draw.random())
            if layer == layers - 1:
                if not len(sampled):
                    break
                own_TD, h_TD = shared.select(sampled, len(x_TD)), h_TD[sampled.long()]
            for _ in range(2):
                shared.products(len(h_TD)).copy_(h_TD * (rank + 1 + layer))
                h_TD = shared.add_rms_norm(len(h_TD), own_TD, NORM, EPSILON, None)
        if len(sampled):
            found[rank, number, : len(sampled)] = h_TD.float()


def expected(x_TD: Tensor, sampled: Tensor, layers: int, ranks: int) -> Tensor:
    h_TD = x_TD
    for layer in range(layers):
        if layer == layers - 1:
            x_TD, h_TD = x_TD[sampled.long()], h_TD[sampled.long()]
        for _ in range(2):
            sum_TD = sum((h_TD * (rank + 1 + layer)).float() for rank in range(ranks))
            x_TD = (sum_TD + x_TD.float()).to(BF16)
            h_TD = reference.rms_norm(x_TD.float(), NORM.float(), EPSILON).to(BF16)
    return h_TD.float()


@pytest.mark.parametrize("ranks", [3, *every(2)])
def test_no_rank_reads_too_early_or_writes_too_late(ranks: int) -> None:
    size = _Places.of(MOST_ROWS, HIDDEN, ranks).end
    memories = [torch.zeros(size, dtype=torch.uint8).share_memory_() for _ in range(ranks)]
    found = torch.full((ranks, STEPS, MOST_ROWS, HIDDEN), float("nan")).share_memory_()
    multiprocessing.set_forkserver_preload(["torch", FusedAllReduce.__module__])  # which take seconds
    start_processes(rank_main, (memories, found), nprocs=ranks, start_method="forkserver")
    for number, x_TD, sampled, layers in steps():
        for rank in range(ranks):
            if len(sampled):
                exact = expected(x_TD, sampled, layers, ranks)
                torch.testing.assert_close(found[rank, number, : len(sampled)], exact, rtol=0.02, atol=0.06)
