"""Pages of the layers whose queries see only the last keys: a sequence holds those of its window alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatoken.engine.pages import PageAllocator


def most_window_pages(window: int, page_size: int, max_sequences: int, max_batched_tokens: int) -> int:
    """Pages that are enough for every plan.

    Between steps a sequence holds the pages of the ``window - 1`` keys that its next token sees, which may begin
    anywhere in a page. In a step its n tokens begin at most one page and one for each ``page_size`` tokens more.
    """
    held = 1 - (2 - window) // page_size
    return max_sequences * (held + 1) + max_batched_tokens // page_size


class WindowPages:
    """Pages by slot, of a cache of their own. They stand at the places of their tokens, as other pages do.

    There are always enough (``most_window_pages``), so no request waits for one.

    Attributes:
        rows: ``[slots, most_pages]`` int32, the page of each place; stale but for the places in a slot's window.
    """

    def __init__(self, slots: int, most_pages: int, page_size: int, window: int, num_pages: int) -> None:
        """Starts with free pages only. ``window``: keys that a query sees, itself included."""
        self.rows = np.zeros((slots, most_pages), dtype=np.int32)
        self._page_size, self._window = page_size, window
        self._pages = PageAllocator(num_pages)
        self._first, self._end = np.zeros((2, slots), dtype=np.int32)  # by slot: places of the pages that it holds

    @property
    def free(self) -> int:
        """Pages that no sequence holds."""
        return self._pages.free

    def give(self, slots: NDArray[np.int32], start: NDArray[np.int32], count: NDArray[np.int32]) -> None:
        """Give pages to the ``count`` tokens from ``start`` on of each slot; take those that no later token sees.

        The step of these tokens still reads what is taken, and no page is given twice in one plan.
        """
        computed = start + count
        end = -(-computed // self._page_size)
        places = _places(slots, self._end[slots], end)
        self.rows[places] = self._pages.allocate(len(places[0]))
        first = np.maximum(computed + 1 - self._window, 0) // self._page_size
        self._pages.release(self.rows[_places(slots, self._first[slots], first)])
        self._first[slots], self._end[slots] = first, end

    def release(self, slots: list[int]) -> None:
        """Free the pages of sequences that leave their slots."""
        self._pages.release(self.rows[_places(np.array(slots, dtype=np.int32), self._first[slots], self._end[slots])])
        self._first[slots] = self._end[slots] = 0


def _places(
    slots: NDArray[np.int32], first: NDArray[np.int32], end: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.intp]]:
    """Slot and place of each of the places ``first`` to ``end`` of the slots."""
    count = end - first
    return slots.repeat(count), np.arange(count.sum()) + (end - count.cumsum()).repeat(count)
