"""Sums through shared memory against torch: ranks of one device after each other, whom no flag keeps waiting."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
from gpu_kernels import BF16, DEVICE, E4M3, MARKS, full_size, needs_gpu, normal
from torch import Tensor
from torch.distributed import FileStore, PrefixStore

from megatoken.engine.ops import reference
from megatoken.engine.ops.fused_all_reduce import FusedAllReduce, _Places, _RendezvousStore, own_tokens
from megatoken.errors import MegatokenError

pytestmark = MARKS
EPSILON = 1e-5


def all_ranks(ranks: int, max_rows: int, hidden: int, *, wait: bool = False) -> list[FusedAllReduce]:
    """If they shall not ``wait``, each is told that all others have come and gone long ago."""
    size = _Places.of(max_rows, hidden, ranks).end
    memories = [torch.zeros(size, dtype=torch.uint8, device=DEVICE) for _ in range(ranks)]
    addresses = [memory.data_ptr() for memory in memories]
    together = [FusedAllReduce(memory, addresses, rank, max_rows, hidden) for rank, memory in enumerate(memories)]
    for one in together:
        one._flags.fill_(0 if wait else 1 << 20)
    return together


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_row_is_kept_once(ranks: int, rows: int) -> None:
    kept = [row for rank in range(ranks) for row in range(rows)[own_tokens(rows, rank, ranks)]]
    assert kept == list(range(rows))


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    ("ranks", "rows", "hidden"),
    [(2, 6, 64), (2, 1, 64), (3, 5, 100), (4, 3, 256), full_size(2, 1536, 8192), full_size(4, 1537, 16384)],
)
def test_rows_are_summed_and_normed_for_all(ranks: int, rows: int, hidden: int, scaled: bool) -> None:
    max_rows = rows + 2
    together = all_ranks(ranks, max_rows, hidden)
    parts = [normal(rows, hidden, seed=rank) for rank in range(ranks)]
    residual_TD = normal(rows, hidden, seed=10, spread=3.0)
    weight_D = normal(hidden, seed=11, spread=0.3) + 1
    scale = torch.tensor([0.02], device=DEVICE) if scaled else None
    for one, part in zip(together, parts, strict=True):
        one.products(rows).copy_(part)
    kept = [one.keep(residual_TD) for one in together]
    for one, own_TD in zip(together, kept, strict=True):
        one.add_rms_norm(rows, own_TD, weight_D, EPSILON, scale)
    dtype = BF16 if scale is None else E4M3
    results = [one._inputs[: rows * hidden * dtype.itemsize].view(dtype).view(rows, hidden) for one in together]

    sums_TD = sum(part.float() for part in parts) + residual_TD.float()
    assert torch.equal(torch.cat(kept), sums_TD.to(BF16))
    exact_TD = reference.rms_norm(sums_TD.to(BF16).float(), weight_D.float(), EPSILON)
    exact_TD = exact_TD if scale is None else (exact_TD / scale).clamp(-448, 448)
    for result in results:
        assert torch.equal(result.view(torch.uint8), results[0].view(torch.uint8))
        torch.testing.assert_close(result.float(), exact_TD, rtol=2**-3 if scaled else 2**-7, atol=1e-2)
    for one in together:
        assert one._state.tolist() == [1, 0]
        assert one._flags.view(2, ranks).tolist() == [[1] * ranks] * 2


@pytest.mark.parametrize(("ranks", "rows", "hidden"), [(2, 6, 64), (3, 5, 100), (4, 2, 64), full_size(4, 1537, 16384)])
def test_rows_are_fetched_from_where_they_are_kept(ranks: int, rows: int, hidden: int) -> None:
    together = all_ranks(ranks, rows, hidden)
    x_TD = normal(rows, hidden, seed=1)
    sampled = torch.tensor([rows - 1, 0, rows // 2, 0, 0], dtype=torch.int32, device=DEVICE)
    for one in together:
        one.keep(x_TD)
    found: list[Tensor] = [one.select(sampled, rows) for one in together]
    assert torch.equal(torch.cat(found), x_TD[sampled.long()])


def test_a_process_that_met_others_before_meets_a_new_one(tmp_path: Path) -> None:
    """As PyTorch calls them: through its own classes, with numbers of each process."""
    file = str(tmp_path / "store")
    meetings = [_RendezvousStore(FileStore(file, 2), lambda: None) for _ in range(2)]
    old, new = (PrefixStore("group", meeting) for meeting in meetings)
    for number in range(3):
        old.set(f"exchange/{number + 7}/0", f"old {number}")
        new.set(f"exchange/{number}/1", f"new {number}")
        old.wait([f"exchange/{number + 7}/1"])
        new.wait([f"exchange/{number}/0"], timedelta(seconds=5))
        assert old.get(f"exchange/{number + 7}/1") == f"new {number}".encode()
        assert new.get(f"exchange/{number}/0") == f"old {number}".encode()


def test_a_meeting_to_which_a_rank_will_not_come_is_over_at_once(tmp_path: Path) -> None:
    def check() -> None:
        raise MegatokenError("rank 1 ended")

    meeting = _RendezvousStore(FileStore(str(tmp_path / "store"), 2), check)
    group = PrefixStore("group", meeting)
    with pytest.raises(MegatokenError, match="rank 1 ended"):
        group.wait(["exchange/0/1"])
    group.set("exchange/0/1", "here")
    group.wait(["exchange/0/1"])


def test_kernels_are_counted_past_the_largest_number() -> None:
    together = all_ranks(2, 4, 64)
    weight_D = torch.ones(64, dtype=BF16, device=DEVICE)
    largest = torch.iinfo(torch.int32).max
    for one in together:
        one._state[0] = largest - 1
        one._flags.fill_(-largest - 1)  # which comes after the largest
        one.add_rms_norm(4, one.keep(normal(4, 64, seed=2)), weight_D, EPSILON, None)
        assert one._state.tolist() == [largest, 0]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_run_side_by_side_wait_for_each_other(ranks: int) -> None:
    """In streams of one device, each late in its turn: sums of sums, and a row of each that another rank keeps."""
    rows, hidden, layers = 10, 512, 60
    together = all_ranks(ranks, rows, hidden, wait=True)
    x_TD, weight_D = normal(rows, hidden, seed=1), torch.ones(hidden, dtype=BF16, device=DEVICE)
    sampled = torch.arange(rows - 1, -1, -1, dtype=torch.int32, device=DEVICE)
    streams = [torch.cuda.Stream() for _ in range(ranks)]
    kept, found = [one.keep(x_TD) for one in together], []
    h_TD, exact_TD = x_TD.clone(), x_TD.clone()
    torch.cuda.synchronize()
    for layer in range(layers):
        for rank, (one, stream, own_TD) in enumerate(zip(together, streams, kept, strict=True)):
            with torch.cuda.stream(stream):
                if layer % ranks == rank:
                    torch.cuda._sleep(200_000)
                one.products(rows).copy_(one._inputs.view(BF16).view(rows, hidden) if layer else h_TD)
                one.add_rms_norm(rows, own_TD, weight_D, EPSILON, None)
        exact_TD = (exact_TD.float() + ranks * h_TD.float()).to(BF16)
        h_TD = reference.rms_norm(exact_TD.float(), weight_D.float(), EPSILON).to(BF16)
    for one, stream in zip(together, streams, strict=True):
        with torch.cuda.stream(stream):
            found.append(one.select(sampled, rows))
    torch.cuda.synchronize()
    torch.testing.assert_close(torch.cat(kept).float(), exact_TD.float(), rtol=0.05, atol=0.5)
    assert torch.equal(torch.cat(found), torch.cat(kept).flip(0))
    for one in together:
        assert one._state.tolist() == [layers + 1, 0]


@pytest.mark.gpu
@needs_gpu
def test_a_rank_whose_others_are_gone_comes_to_its_end() -> None:
    """More programs than there is room for, and more kernels than one."""
    rows = 4096
    [one, _] = all_ranks(2, rows, 512, wait=True)
    own_TD, weight_D = one.keep(normal(rows, 512, seed=1)), torch.ones(512, dtype=BF16, device=DEVICE)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            one.add_rms_norm(rows, own_TD, weight_D, EPSILON, None)
    assert not stream.query()
    one.release()
    stream.synchronize()
    assert one._state.tolist() == [3, 0]
