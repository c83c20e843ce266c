"""Pages of the layers whose queries see only the last keys: a sequence holds those of its window alone.

A request that begins with pages of the prefix cache also needs those of the window behind which it starts. So a page
that no sequence holds any more keeps its keys until its memory is needed, and is known by the page that holds the same
tokens in the other layers: where that one is found, so is this one, unless its memory was needed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from megatoken.engine.pages import PageAllocator


def most_window_pages(window: int, page_size: int, max_sequences: int, max_batched_tokens: int) -> int:
    """Pages that are enough for every plan.

    Between steps a sequence holds the pages of the ``window - 1`` keys that its next token sees, which may begin
    anywhere in a page. In a step its n tokens begin at most one page and one for each ``page_size`` tokens more.
    """
    return max_sequences * _of_sequence(window, page_size) + max_batched_tokens // page_size


def sequences_of_window_pages(pages: int, window: int, page_size: int, max_batched_tokens: int) -> int:
    """The most sequences for which ``pages`` are enough, at least one."""
    return max(1, (pages - max_batched_tokens // page_size) // _of_sequence(window, page_size))


def _of_sequence(window: int, page_size: int) -> int:
    """Pages of a sequence that computes one token."""
    return 2 - (2 - window) // page_size


class WindowPages:
    """Pages by slot, of a cache of their own. They stand at the places of their tokens, as other pages do.

    There are always enough (``most_window_pages``), so no request waits for one.

    Attributes:
        rows: ``[slots, most_pages]`` int32, the page of each place; stale but for the places in a slot's window.
    """

    def __init__(
        self, table: NDArray[np.int32], page_size: int, window: int, num_pages: int, others: int, *, keep: bool
    ) -> None:
        """Starts with free pages only.

        Args:
            table: ``[slots, most_pages]`` int32, pages of the other layers by slot and place.
            page_size: tokens of a page.
            window: keys that a query sees, itself included.
            num_pages: pages of the layers with windows.
            others: pages of the other layers.
            keep: pages without a reader keep their keys, see above.
        """
        self.rows = np.zeros_like(table)
        self._table, self._page_size, self._window = table, page_size, window
        self._pages = _Pages(num_pages, others, keep=keep)
        self._first, self._end = np.zeros((2, len(table)), dtype=np.int32)  # by slot: places of the pages that it holds

    @property
    def free(self) -> int:
        """Pages that no sequence holds."""
        return self._pages.free

    def give(self, slots: NDArray[np.int32], start: NDArray[np.int32], count: NDArray[np.int32]) -> None:
        """Give pages to the ``count`` tokens from ``start`` on of each slot; take those that no later token sees.

        The step of these tokens still reads what is taken, so this is the last that a plan asks for.
        """
        computed = start + count
        self.extend(slots, computed)
        first = self._first_seen(computed)
        self._pages.release(self.rows[_places(slots, self._first[slots], first)])
        self._first[slots] = first

    def extend(self, slots: NDArray[np.int32], computed: NDArray[np.int32]) -> None:
        """Give pages to all tokens before ``computed`` of each slot that have none. The others' are there already."""
        end = -(-computed // self._page_size)
        places = _places(slots, self._end[slots], end)
        self.rows[places] = self._pages.allocate(self._table[places])
        self._end[slots] = end

    def reach(self, found: Sequence[int]) -> int:
        """How many of the first pages of a request, ``found`` in the prefix cache, it can begin with."""
        known = self._pages.of(found) >= 0
        places = np.arange(len(found), dtype=np.int32)
        last_gap = np.maximum.accumulate(np.where(known, -1, places))
        seen = self._first_seen((places + 1) * self._page_size)
        return int((last_gap < seen).nonzero()[0].max(initial=-1)) + 1

    def lost(self, other: int) -> bool:
        """Whether no page has the tokens of this one of the other layers any more."""
        return int(self._pages.of([other])[0]) < 0

    def share(self, slot: int, found: Sequence[int]) -> None:
        """Give a request that starts those of the pages it ``found``, as many as it can begin with, that it sees."""
        end = len(found)
        [first] = self._first_seen(np.array([end * self._page_size], dtype=np.int32)).tolist()
        self.rows[slot, first:end] = pages = self._pages.of(found[first:])
        self._pages.acquire(pages)
        self._first[slot], self._end[slot] = first, end

    def release(self, slots: list[int]) -> None:
        """Take the pages of sequences that leave their slots."""
        self._pages.release(self.rows[_places(np.array(slots, dtype=np.int32), self._first[slots], self._end[slots])])
        self._first[slots] = self._end[slots] = 0

    def _first_seen(self, computed: NDArray[np.int32]) -> NDArray[np.int32]:
        """Place of the first page that a sequence's next token sees."""
        first: NDArray[np.int32] = np.maximum(computed + 1 - self._window, 0) // self._page_size
        return first


class _Pages:
    """Pages with readers, and the pages of the other layers that have the same tokens."""

    def __init__(self, num_pages: int, others: int, *, keep: bool) -> None:
        self._keep = keep
        self._empty = PageAllocator(num_pages)
        self._readers = np.zeros(num_pages, dtype=np.int32)
        self._idle: OrderedDict[int, None] = OrderedDict()  # without a reader, the one left first of all first
        self._other = np.zeros(num_pages, dtype=np.int32)  # page of the other layers, by page
        self._page_of = np.full(others, -1, dtype=np.int32)  # page by page of the other layers; -1 for none

    @property
    def free(self) -> int:
        return self._empty.free + len(self._idle)

    def of(self, others: Sequence[int]) -> NDArray[np.int32]:
        return self._page_of[list(others)] if others else self._page_of[:0]

    def allocate(self, others: NDArray[np.int32]) -> NDArray[np.int32]:
        """One page, for one reader, for each page of the other layers."""
        lacking = max(0, len(others) - self._empty.free)
        gone = np.array(list(islice(self._idle, lacking)), dtype=np.int32)
        for page in gone.tolist():
            del self._idle[page]
        others_gone = self._other[gone]
        self._page_of[others_gone[self._page_of[others_gone] == gone]] = -1  # they may have got new ones
        self._empty.release(gone)
        pages = self._empty.allocate(len(others))
        self._readers[pages], self._other[pages], self._page_of[others] = 1, others, pages
        return pages

    def acquire(self, pages: NDArray[np.int32]) -> None:
        for page in pages.tolist():
            self._idle.pop(page, None)
        self._readers[pages] += 1

    def release(self, pages: NDArray[np.int32]) -> None:
        """Take away one reader for each time that a page is named."""
        np.subtract.at(self._readers, pages, 1)
        assert self._readers[pages].min(initial=0) >= 0
        left = pages[self._readers[pages] == 0]
        if self._keep:
            self._idle.update(dict.fromkeys(left.tolist()))
        else:
            self._empty.release(left)


def _places(
    slots: NDArray[np.int32], first: NDArray[np.int32], end: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.intp]]:
    """Slot and place of each of the places ``first`` to ``end`` of the slots."""
    count = end - first
    return slots.repeat(count), np.arange(count.sum()) + (end - count.cumsum()).repeat(count)
