"""Which pages of the cache each running sequence holds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatoken.engine.page_forecast import SharedPages
from megatoken.engine.pages import PageAllocator
from megatoken.engine.prefix_cache import PrefixCache
from megatoken.engine.window_pages import WindowPages


class PageTable:
    """Pages by slot. With a prefix cache, requests share the pages of equal beginnings.

    Attributes:
        rows: ``[slots, most_pages]`` int32, the page of each place; stale beyond those that a slot holds.
        prefixes: the prefix cache, if there is one.
        page_size: tokens of a page.
        found: ``[slots]`` int32, how many first pages of each slot came from the prefix cache.
        windows: pages of the layers with windows, if they have their own.
    """

    def __init__(
        self,
        slots: int,
        most_pages: int,
        page_size: int,
        num_pages: int,
        window: int = 0,
        window_pages: int = 0,
        *,
        prefix_cache: bool,
    ) -> None:
        """Starts with free pages only; ``window_pages`` of their own for layers with a ``window``, unless 0."""
        self.rows = np.zeros((slots, most_pages), dtype=np.int32)
        self.page_size = page_size
        self.prefixes = PrefixCache(num_pages) if prefix_cache else None
        self.found = np.zeros(slots, dtype=np.int32)
        self.windows: WindowPages | None = None
        if window_pages:
            self.windows = WindowPages(self.rows, page_size, window, window_pages, num_pages, keep=prefix_cache)
        self._pages: PageAllocator | PrefixCache = self.prefixes or PageAllocator(num_pages)
        self._keys: list[Sequence[bytes]] = [()] * slots
        self._places = np.arange(most_pages, dtype=np.int32)

    @property
    def free(self) -> int:
        """Pages that can be given."""
        return self._pages.free

    def keys(self, slot: int) -> Sequence[bytes]:
        """Keys of the pages of the request in a slot, by which the prefix cache finds them."""
        return self._keys[slot]

    def full(self, computed: NDArray[np.int32]) -> NDArray[np.intp]:
        """Indices of the sequences whose pages are full, by their ``computed`` tokens."""
        size = self.page_size
        # For a power of two the lowest bits are the remainder, and five times as fast.
        in_last_page = computed % size if size & (size - 1) else computed & (size - 1)
        full: NDArray[np.intp] = (in_last_page == 0).nonzero()[0]
        return full

    def give(
        self, slots: NDArray[np.int32], computed: NDArray[np.int32], started: NDArray[np.int32], num_tokens: list[int]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """Give a page to each of ``slots``, which hold full pages of ``computed`` tokens, and to those ``started`` all.

        Returns:
            Slot, place in its row, and page of each.
        """
        places = computed // self.page_size
        if not len(started):
            pages = self._pages.allocate(len(slots))
            self.rows[slots, places] = pages
            return slots, places, pages
        counts = [-(-tokens // self.page_size) for tokens in num_tokens]
        page_slot = np.concatenate((slots, started.repeat(counts)))
        page_place = np.concatenate([places, *[self._places[:count] for count in counts]])
        if self.prefixes is None:
            pages = self._pages.allocate(len(page_slot))
            self.rows[page_slot, page_place] = pages
        else:  # those started have theirs, from ``share``
            self.rows[slots, places] = self._pages.allocate(len(slots))
            pages = self.rows[page_slot, page_place]
        return page_slot, page_place, pages

    def find(self, keys: Sequence[bytes], most: int) -> list[int]:
        """The pages that a request with these ``keys`` can begin with, at most ``most``."""
        assert self.prefixes is not None
        found = self.prefixes.find(keys, most)
        return found if self.windows is None else found[: self.windows.reach(found)]

    def share(self, slot: int, found: Sequence[int], count: int, keys: Sequence[bytes]) -> None:
        """Give a request that starts the pages that it ``found``, and new ones, ``count`` in all."""
        assert self.prefixes is not None
        row, first = self.rows[slot], len(found)
        self.prefixes.acquire(found)
        if self.windows is not None:
            self.windows.share(slot, found)
        row[:first] = found
        row[first:count] = self.prefixes.allocate(count - first)
        self.found[slot], self._keys[slot] = first, keys

    def register(self, slot: int, start: int, end: int) -> None:
        """Let other requests find the pages that tokens ``start`` to ``end`` of a slot fill.

        Every layer writes the keys of a step before it reads any, so requests started in the same plan already may.
        """
        assert self.prefixes is not None
        useless = None
        if self.windows is not None:
            self.windows.extend(np.array([slot], dtype=np.int32), np.array([end], dtype=np.int32))
            useless = self.windows.lost
        places = start // self.page_size, end // self.page_size
        self.prefixes.register(self._keys[slot], self.rows[slot], *places, useless)

    def release(self, slots: list[int], held: Sequence[int], request_ids: list[int], computed: list[int]) -> None:
        """Free the pages of sequences that leave their slots.

        Args:
            slots: of the sequences.
            held: pages of each.
            request_ids: of each.
            computed: tokens of each that are in the cache; only the prefix cache needs them.
        """
        if self.windows is not None:
            self.windows.release(slots)
        pages = [self.rows[slot, :count] for slot, count in zip(slots, held, strict=True)]
        if isinstance(self._pages, PageAllocator):
            self._pages.release(np.concatenate(pages))
            return
        for slot, own, request_id, tokens in zip(slots, pages, request_ids, computed, strict=True):
            self._pages.release(request_id, self._keys[slot], own, tokens // self.page_size, int(self.found[slot]))

    def shared(self, slots: NDArray[np.int32], num_tokens: NDArray[np.int32]) -> SharedPages | None:
        """What ``PageForecast`` must know of the running sequences' pages; None if they share none."""
        if self.prefixes is None:
            return None
        held = (num_tokens + (self.page_size - 2)) // self.page_size
        return SharedPages(self.rows, slots, held, self.found.take(slots))
