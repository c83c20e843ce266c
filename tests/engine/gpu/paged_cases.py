"""Sequences in paged caches, and their attention in fp32."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from gpu_kernels import BF16, DEVICE, E4M3, normal
from torch import Tensor

TOLERANCE = {BF16: 0.008, E4M3: 0.06}
"""Largest distance from fp32, relative to the length of the output vector of one row and head, by output dtype."""


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype = E4M3


LLAMA_70B = Shape(64, 8, 128, 32)
LLAMA_8B = Shape(32, 8, 128, 32)
GPT_OSS = Shape(64, 8, 64, 32)
TINY = Shape(2, 1, 64, 16)


def both(shape: Shape) -> list[Shape]:
    """With either kind of cache."""
    return [shape, replace(shape, dtype=BF16)]


@dataclass(frozen=True)
class Case:
    """Sequences in a cache whose every unused slot is NaN (or ``unused``), on pages in random order.

    Table entries past a sequence's last page name pages far outside the cache.
    """

    shape: Shape
    lengths: list[int]
    k_cache: Tensor
    v_cache: Tensor
    table: Tensor
    lengths_B: Tensor

    def keys_and_values(self, sequence: int, length: int) -> tuple[Tensor, Tensor]:
        """fp32 [L, H, E], each key/value head repeated for its query heads."""
        shape = self.shape
        pages = self.table[sequence, : -(-length // shape.page_size)].long()
        group = shape.heads // shape.kv_heads
        k, v = (
            side[pages].transpose(1, 2).reshape(-1, shape.kv_heads, shape.head_dim)[:length].float()
            for side in (self.k_cache, self.v_cache)
        )
        return k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)


def make_case(shape: Shape, lengths: list[int], seed: int = 0, unused: float = float("nan")) -> Case:
    page_size = shape.page_size
    used = [-(-length // page_size) for length in lengths]
    width = max([*used, 1]) + 2
    pages = sum(used) + 3
    order = torch.randperm(pages - 1, generator=torch.Generator().manual_seed(seed)).add_(1).to(torch.int32)
    table = torch.full((len(lengths), width), 2**30, dtype=torch.int32)
    live = torch.zeros(pages, page_size, dtype=torch.bool)
    for sequence, (count, length) in enumerate(zip(used, lengths, strict=True)):
        mine, order = order[:count], order[count:]
        table[sequence, :count] = mine
        live[mine.long()] = (torch.arange(count * page_size) < length).view(count, page_size)
    where = live.to(DEVICE)[:, None, :, None]
    caches = []
    for side in (1, 2):
        values = normal(pages, shape.kv_heads, page_size, shape.head_dim, seed=3 * seed + side)
        caches.append(torch.where(where, values, unused).to(shape.dtype))
    lengths_B = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    return Case(shape, lengths, caches[0], caches[1], table.to(DEVICE), lengths_B)


def exact(
    q_THE: Tensor,
    k_LHE: Tensor,
    v_LHE: Tensor,
    scale: float,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """fp32 [T, H, E]; the rows are the last of the positions. Keys that none of them sees may be NaN."""
    rows, keys = len(q_THE), len(k_LHE)
    first = 0 if window is None else max(keys - rows - window + 1, 0)
    k_LHE, v_LHE, keys = k_LHE[first:], v_LHE[first:], keys - first
    scores = torch.einsum("the,lhe->htl", q_THE.float(), k_LHE) * scale
    seen = torch.ones(rows, keys, dtype=torch.bool, device=DEVICE).tril(keys - rows)
    if window is not None:
        seen = seen.triu(keys - rows - window + 1)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks_H is not None:
        scores = torch.cat((scores, sinks_H[:, None, None].expand(-1, rows, 1)), -1)
    return torch.einsum("htl,lhe->the", scores.softmax(-1)[..., :keys], v_LHE)


def forget(case: Case, tokens: list[int]) -> None:
    """The first ``tokens`` of each sequence become NaN, and whole pages of them are out of the cache."""
    page_size = case.shape.page_size
    for sequence, count in enumerate(tokens):
        pages = case.table[sequence]
        whole = count // page_size
        for side in (case.k_cache, case.v_cache):
            side.view(torch.uint8)[pages[:whole].long()] = 0x7F if side.itemsize == 1 else 0xFF
            if rest := count % page_size:
                side.view(torch.uint8)[int(pages[whole]), :, :rest] = 0x7F if side.itemsize == 1 else 0xFF
        pages[:whole] = 2**30


def exact_decode(
    case: Case, q_BHE: Tensor, scale: float, window: int | None = None, sinks_H: Tensor | None = None
) -> Tensor:
    return torch.cat(
        [
            exact(q_BHE[b : b + 1], *case.keys_and_values(b, length), scale, window, sinks_H)
            if length
            else torch.zeros_like(q_BHE[:1])
            for b, length in enumerate(case.lengths)
        ]
    )


def assert_close(actual: Tensor, expected: Tensor, out_scale: float = 1.0, tolerance: float | None = None) -> None:
    limit = tolerance or TOLERANCE[actual.dtype]
    difference = (actual.float() * out_scale - expected.float()).norm(dim=-1)
    assert torch.isfinite(actual.float()).all()
    assert (difference <= limit * expected.float().norm(dim=-1)).all(), (difference / expected.norm(dim=-1)).max()
