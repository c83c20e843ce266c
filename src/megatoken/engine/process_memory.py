"""Advice to the operating system on this process's memory: what it may reclaim, what to keep in large pages."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import NamedTuple

HUGE_PAGE_BYTES = 2 << 20
HUGE_PAGES_FROM_BYTES = 1_000_000_000
"""Smaller weights gain nothing measurable, and rounding up to huge pages would break their memory bound."""
MADV_DONTNEED, MADV_COLLAPSE = 4, 25  # linux/mman.h
CODE_FROM_BYTES = 1 << 20


def return_freed_memory() -> None:
    """Give freed heap back to the system, which the C library would keep.

    Loading alternates plain and packed matrices; the holes between them add up to about a third of the weights.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


def collect_garbage_rarely() -> None:
    """Let the garbage collector run after 50,000 new objects instead of some hundreds, and skip all that exists now.

    Otherwise it runs in every step of a thousand events, and its full collections stop a process for 50 ms and more.
    Objects in no cycle are freed without it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def return_idle_code() -> None:
    """Unmap the code that this process has touched; code that is called again comes back from the file cache.

    Importing PyTorch touches 60 MB of code that no step runs.
    """
    for mapping in _mappings():
        if mapping.access == "r-xp" and mapping.path.startswith("/") and mapping.end - mapping.start >= CODE_FROM_BYTES:
            _advise(mapping.start, mapping.end, MADV_DONTNEED)


def use_huge_pages() -> None:
    """Move this process's memory to pages of 2 MB, on Linux 6.1 and later.

    A product reads the packed weights once; with pages of 4 KB it waits for address translation at each page.
    """
    for mapping in _mappings():
        start = -(-mapping.start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        end = mapping.end // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if mapping.access == "rw-p" and mapping.path in ("", "[heap]") and end - start >= 2 * HUGE_PAGE_BYTES:
            for page in range(start, end, HUGE_PAGE_BYTES):  # given one range, Linux stops at the first hole
                _advise(page, page + HUGE_PAGE_BYTES, MADV_COLLAPSE)


class _Mapping(NamedTuple):
    start: int
    end: int
    access: str
    path: str  # empty for anonymous memory


def _mappings() -> list[_Mapping]:
    """This process's mappings; empty on a system without /proc."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    mappings = []
    for line in lines:
        bounds, access, _, _, _, *path = line.split(maxsplit=5)
        start, end = (int(bound, 16) for bound in bounds.split("-"))
        mappings.append(_Mapping(start, end, access, "".join(path)))
    return mappings


def _advise(start: int, end: int, advice: int) -> None:
    """Advise the kernel, which may refuse."""
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)
