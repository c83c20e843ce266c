"""Memory of the CPU: read, write, copy and triad on all cores, as STREAM counts them; the same in a core's cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatoken.hardware.qualify.processor import last_level_cache_bytes, usable_cores
from megatoken.hardware.qualify.timing import call_seconds, rates
from megatoken.hardware.qualify.values import Bound, Outcomes, Setting, Value

CACHED_BYTES = 96 * 2**10
"""Of each buffer of the bound: three of them stay in the second-level cache of a core."""
PATTERNS: dict[str, tuple[str, int, Callable[[Tensor, Tensor, Tensor], object]]] = {
    "read": ("Memory read", 1, lambda a, b, c: a.sum()),
    "write": ("Memory write", 1, lambda a, b, c: a.fill_(1.0)),
    "copy": ("Memory copy", 2, lambda a, b, c: a.copy_(b)),
    "triad": ("Memory triad", 3, lambda a, b, c: torch.add(b, c, alpha=3.0, out=a)),
}
"""Title, buffers that are read or written, and the work on three buffers."""


@torch.inference_mode()
def memory(setting: Setting) -> Outcomes:
    """Four patterns on buffers larger than all caches. Bytes that a write reads first do not count, as in STREAM."""
    cores = usable_cores()
    size = max(setting.buffer_bytes, 4 * last_level_cache_bytes()) if setting.buffer_bytes > 2**24 else 2**24
    large, cached = (tuple(torch.ones(count // 4) for _ in range(3)) for count in (size, CACHED_BYTES))
    for name, (title, buffers, run) in PATTERNS.items():
        torch.set_num_threads(1)
        of_core = rates(buffers * CACHED_BYTES / 1e9, call_seconds(lambda run=run: run(*cached), setting))  # type: ignore[misc]
        torch.set_num_threads(cores)
        rate = rates(buffers * size / 1e9, call_seconds(lambda run=run: run(*large), setting))  # type: ignore[misc]
        bound = Bound(cores * max(of_core), f"{cores} cores x {max(of_core):.0f} GB/s, the same in a core's cache")
        yield Value(f"memory_{name}", title, "GB/s", rate, bound=bound)
        yield Value(f"cache_{name}", f"{title.replace('Memory', 'Cache')}, one core", "GB/s", of_core, "")
