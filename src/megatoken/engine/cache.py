"""The paged KV cache: tensors and layout, nothing else."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatoken.engine.config import ModelConfig
from megatoken.engine.schemes import LinearScheme
from megatoken.engine.schemes.fp8_weight import E4M3_MAX

DUMP_PAGE = 0
"""Page 0 is never given to a sequence: padded table entries point to it, so no kernel needs a mask for them."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer, each [pages, kv_heads, page_size, head_dim]: one page of one head is contiguous.

    e4m3 keys stand for ``k_scale`` times their value, e4m3 values for ``v_scale`` times theirs.
    """

    k: Tensor
    v: Tensor
    round_to_fp8: bool
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.k.shape[2]

    def rounded(self, x: Tensor, scale: float = 1.0) -> Tensor:
        """``x`` as it reads back from the cache: for an fp8 cache ``scale`` times e4m3, saturating."""
        if not self.round_to_fp8:
            return x
        values = (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        return (values.float() * scale).to(x.dtype)

    def write(self, k_TKE: Tensor, v_TKE: Tensor, rows_TK: Tensor) -> None:
        """Store already rounded keys and values at ``rows_TK``, indices into [pages * kv_heads * page_size] rows."""
        head_dim = self.k.shape[3]
        rows = rows_TK.view(-1)
        self.k.view(-1, head_dim).index_copy_(0, rows, k_TKE.reshape(-1, head_dim))
        self.v.view(-1, head_dim).index_copy_(0, rows, v_TKE.reshape(-1, head_dim))

    def read(self, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """The first ``length`` keys and values of a sequence, both [length, kv_heads, head_dim], given its page ids."""
        _, kv_heads, page_size, head_dim = self.k.shape
        gathered = (
            side.index_select(0, pages).transpose(1, 2).reshape(len(pages) * page_size, kv_heads, head_dim)[:length]
            for side in (self.k, self.v)
        )
        k, v = gathered
        return k, v


def allocate_cache(
    config: ModelConfig,
    scheme: LinearScheme,
    pages: int,
    page_size: int,
    device: torch.device,
    scales: Sequence[tuple[float, float]],
) -> list[LayerCache]:
    """One cache per layer, with its ``scales`` of keys and of values, for ``pages`` usable pages and the dump page.

    Zeroed, because masked attention still multiplies what a page holds beyond its sequence's end. On the CPU the zeros
    are mapped from the operating system, not cleared: a page costs memory when it is first written.
    """
    shape = (pages + 1, config.kv_heads, page_size, config.head_dim)
    dtype = scheme.cache_dtype(device)

    def zeros() -> Tensor:
        if device.type == "cuda":
            return torch.zeros(shape, dtype=dtype, device=device)
        mapped = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(mapped, dtype=dtype).view(shape)

    round_to_fp8 = scheme.fp8_cache and dtype != torch.float8_e4m3fn
    return [LayerCache(zeros(), zeros(), round_to_fp8, *of_layer) for of_layer in scales]
