"""The paged KV cache: tensors and layout."""

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
"""Page 0 belongs to no sequence: padded table entries point to it, so kernels need no mask for them."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer, each [pages, kv_heads, page_size, head_dim]: one page of one head is contiguous.

    e4m3 keys are multiplied by ``k_scale`` when read, e4m3 values by ``v_scale``. ``window``: how many keys a query
    sees, itself included; None for all.
    """

    k: Tensor
    v: Tensor
    round_to_fp8: bool
    k_scale: float = 1.0
    v_scale: float = 1.0
    window: int | None = None

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.k.shape[2]

    def rounded(self, x: Tensor, scale: float = 1.0) -> Tensor:
        """``x`` after a round trip through the cache: for an fp8 cache ``scale`` times e4m3, saturated."""
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
        # Copied head by head, as attention reads it, and viewed by token.
        k, v = (
            side.index_select(0, pages).transpose(0, 1).reshape(kv_heads, len(pages) * page_size, head_dim)
            for side in (self.k, self.v)
        )
        return k.transpose(0, 1)[:length], v.transpose(0, 1)[:length]


def allocate_cache(
    config: ModelConfig,
    scheme: LinearScheme,
    pages: int,
    window_pages: int,
    page_size: int,
    device: torch.device,
    scales: Sequence[tuple[float, float]],
) -> list[LayerCache]:
    """One cache per layer, with its ``scales`` of keys and of values, for ``pages`` usable pages and the dump page.

    Layers with windows have ``window_pages`` instead, unless that is 0.
    Zeroed, because masked attention multiplies the slots beyond a sequence's end too. On the CPU the operating system
    maps the zeros, so a page takes memory when it is first written.
    """
    dtype = scheme.cache_dtype(device)

    def zeros(window: int | None) -> Tensor:
        usable = pages if window is None else window_pages or pages
        shape = (usable + 1, config.kv_heads, page_size, config.head_dim)
        if device.type == "cuda":
            return torch.zeros(shape, dtype=dtype, device=device)
        mapped = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(mapped, dtype=dtype).view(shape)

    round_to_fp8 = scheme.fp8_cache and dtype != torch.float8_e4m3fn
    windows = [config.window(layer) for layer in range(config.layers)]
    return [
        LayerCache(zeros(window), zeros(window), round_to_fp8, *of_layer, window=window)
        for window, of_layer in zip(windows, scales, strict=True)
    ]
