"""Which pages of the key/value cache are free."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class PageAllocator:
    """A stack of free page numbers 0 .. ``num_pages`` - 1; the page freed last is given first."""

    def __init__(self, num_pages: int) -> None:
        self._stack = np.arange(num_pages, dtype=np.int32)[::-1].copy()
        self._is_free = np.ones(num_pages, dtype=np.bool_)
        self._free = num_pages

    @property
    def free(self) -> int:
        """Pages that can be allocated now."""
        return self._free

    def allocate(self, n: int) -> NDArray[np.int32]:
        """Takes ``n`` pages.

        Returns:
            ``[n]`` int32 page numbers, the caller's own copy.

        Raises:
            ValueError: fewer than ``n`` pages are free, or ``n`` is negative; nothing is taken.
        """
        if not 0 <= n <= self._free:
            raise ValueError(f"cannot allocate {n} pages: {self._free} of {self._stack.size} are free")
        self._free -= n
        pages = self._stack[self._free : self._free + n][::-1].copy()
        self._is_free[pages] = False
        return pages

    def release(self, pages: NDArray[np.int32]) -> None:
        """Gives ``[n]`` pages back.

        Raises:
            ValueError: a page is not of this cache, is free already, or is named twice; nothing is released.
        """
        ordered = np.sort(pages)
        if ordered.size and not 0 <= ordered[0] <= ordered[-1] < self._stack.size:
            raise ValueError(
                f"cannot release pages {ordered[0]}..{ordered[-1]}: the cache has {self._stack.size} pages"
            )
        twice = self._is_free[ordered]
        twice[1:] |= ordered[1:] == ordered[:-1]
        if twice.any():
            raise ValueError(f"page {ordered[twice][0]} is released twice")
        self._is_free[pages] = True
        self._stack[self._free : self._free + pages.size] = pages
        self._free += pages.size
