"""Pages of the key/value cache that requests with the same beginning share.

Keys and values of a page depend on its tokens and on all tokens before them. So the key of a page is a hash of its
tokens and the key of the page before; that of the first page depends on the request's salt. The hash is BLAKE2b of 256
bits. To find two different beginnings with one hash takes about 2^128 attempts, so no request gets a page of other
tokens or of another salt, although tokens are not compared. Salts and pages are hashed with different
personalisations, so that no choice of a salt can continue a chain that began with another one.

Only full pages are shared, and a request starts to compute behind the pages that it found. So nothing writes to a
shared page. Pages without a reader stay in the cache until their memory is needed.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatoken.engine.pages import PageAllocator

HASH_BYTES = 32


def extend_keys(keys: list[bytes], tokens: Sequence[int], page_size: int, salt: str) -> None:
    """Append the keys of the full pages of ``tokens``, which follow the pages of ``keys``."""
    if keys:
        parent = keys[-1]
    else:
        parent = blake2b(salt.encode(errors="surrogatepass"), digest_size=HASH_BYTES, person=b"salt").digest()
    data, size = array("i", tokens).tobytes(), page_size * array("i").itemsize
    for end in range(size, len(data) + 1, size):
        parent = blake2b(parent + data[end - size : end], digest_size=HASH_BYTES, person=b"page").digest()
        keys.append(parent)


class _Left(NamedTuple):
    """What a request left in the cache."""

    keys: Sequence[bytes]
    pages: list[int]  # its full pages in order
    found: int  # the first of them, which it did not compute itself


class PrefixCache:
    """Pages 0 .. ``num_pages`` - 1 by reader and by content.

    A page is empty, held by one or more requests, or idle: without a reader, but with content worth finding. Idle pages
    count as free and are taken, least recently used first, when no page is empty. A request's last page is released
    before the pages in front of it, so the end of a chain is taken before its beginning, without which it could not be
    found.

    Attributes:
        extra_readers: readers of all held pages, less one for each such page.
        queried_tokens: prompt tokens of all requests admitted so far.
        found_tokens: of these, those that were in the cache.
        cached_tokens: prompt tokens found, by request; the caller removes a request when it has reported them.
    """

    def __init__(self, num_pages: int) -> None:
        """Starts with empty pages."""
        self.extra_readers = self.queried_tokens = self.found_tokens = 0
        self.cached_tokens: dict[int, int] = {}
        self._empty = PageAllocator(num_pages)
        self._readers = np.zeros(num_pages, dtype=np.int32)
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._page_of: dict[bytes, int] = {}
        self._key_of: list[bytes | None] = [None] * num_pages
        # Requests end before the host has their last tokens. Until ``keep`` says what their other pages hold:
        self._left: dict[int, _Left] = {}  # by request
        self._left_by: dict[int, int] = {}  # request by idle page without a key

    @property
    def free(self) -> int:
        """Pages that can be allocated now."""
        return self._empty.free + len(self._idle)

    def find(self, keys: Sequence[bytes], most: int) -> list[int]:
        """The pages of the longest prefix of ``keys`` in the cache, at most ``most``."""
        pages = []
        for key in keys[:most]:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def held(self, pages: Sequence[int]) -> int:
        """How many of ``pages`` have a reader."""
        return int(np.count_nonzero(self._readers[list(pages)])) if pages else 0

    def acquire(self, pages: Sequence[int]) -> None:
        """Add a reader to each of ``pages``, which ``find`` returned."""
        readers = self._readers[list(pages)] if pages else self._readers[:0]
        for page, held in zip(pages, readers.tolist(), strict=True):
            if held:
                self.extra_readers += 1
            else:
                del self._idle[page]
            self._readers[page] = held + 1

    def allocate(self, n: int) -> NDArray[np.int32]:
        """Take ``n`` pages for one reader each, empty pages first.

        Returns:
            ``[n]`` int32 page numbers, the caller's own copy.

        Raises:
            ValueError: fewer than ``n`` pages are free, or ``n`` is negative; nothing is taken.
        """
        lacking = n - self._empty.free
        if 0 < lacking <= len(self._idle):
            self._make_empty(list(islice(self._idle, lacking)))
        pages = self._empty.allocate(n)
        self._readers[pages] = 1
        return pages

    def register(
        self,
        keys: Sequence[bytes],
        pages: NDArray[np.int32],
        first: int,
        end: int,
        useless: Callable[[int], bool] | None = None,
    ) -> None:
        """Let others find ``pages[first:end]`` of a request, which are full once the planned step has run.

        ``useless``: whether a page that has the same content is to be found no more, and this one instead.
        """
        for key, page in zip(keys[first:end], pages[first:end].tolist(), strict=False):
            known = self._page_of.get(key)
            if known is not None and useless is not None and useless(known):
                if known in self._idle:
                    self._make_empty([known])
                else:
                    self._key_of[known] = None
                    del self._page_of[key]
            if key not in self._page_of:
                self._page_of[key], self._key_of[page] = page, key

    def release(self, request_id: int, keys: Sequence[bytes], pages: NDArray[np.int32], full: int, found: int) -> None:
        """Remove a request from the readers of its pages, all free at once; then call ``keep`` or ``discard``.

        Args:
            request_id: of the request.
            keys: of its pages. The caller may append to them before ``keep``.
            pages: ``[P]`` int32, in order.
            full: how many of them are full and computed.
            found: how many of them the request found in the cache.

        Raises:
            ValueError: a page has no reader; nothing is released.
        """
        readers = self._readers[pages] - 1
        if readers.min(initial=0) < 0:
            raise ValueError(f"page {pages[readers < 0][0]} is released twice")
        self._readers[pages] = readers
        numbers, left, unneeded = pages.tolist(), readers.tolist(), []
        for index in range(len(numbers) - 1, -1, -1):
            page = numbers[index]
            if left[index]:
                self.extra_readers -= 1
                continue
            known = index < len(keys) and self._key_of[page] is None and keys[index] in self._page_of
            if index >= full or known:
                unneeded.append(page)
                if known:
                    self._touch(keys[index])
                continue
            self._idle[page] = None
            if self._key_of[page] is None:
                self._left_by[page] = request_id
        self._empty.release(np.array(unneeded, dtype=np.int32))
        self._left[request_id] = _Left(keys, numbers[:full], found)

    def keep(self, request_id: int) -> None:
        """Let others find what a released request left in the cache, as far as its keys go. Unknown requests pass."""
        left = self._left.pop(request_id, None)
        if left is None:
            return
        reachable = 0
        for key, page in zip(left.keys, left.pages, strict=False):
            if key not in self._page_of and self._left_by.get(page) != request_id:
                break
            reachable += 1
        unneeded = []
        for index in range(len(left.pages) - 1, -1, -1):
            page = left.pages[index]
            own = self._left_by.get(page) == request_id
            if index < reachable:
                key = left.keys[index]
                if key not in self._page_of:
                    del self._left_by[page]
                    self._page_of[key], self._key_of[page] = page, key
                    self._idle.move_to_end(page)
                    continue
                self._touch(key)
            if own:
                unneeded.append(page)
        self._make_empty(unneeded)

    def discard(self, request_id: int) -> None:
        """Let no other request find what a released request computed: it failed. Unknown requests pass."""
        left = self._left.pop(request_id, None)
        if left is None:
            return
        unneeded = [page for page in left.pages if self._left_by.get(page) == request_id]
        for key, page in zip(left.keys[left.found :], left.pages[left.found :], strict=False):
            if self._page_of.get(key) != page:
                continue
            if page in self._idle:
                unneeded.append(page)
            else:  # its readers go on; they fail in the same way
                self._key_of[page] = None
                del self._page_of[key]
        self._make_empty(unneeded)

    def note_prompt(self, request_id: int, prompt_tokens: int, found_tokens: int) -> None:
        """Count an admitted prompt. One that was preempted before its first token counts once."""
        if request_id not in self.cached_tokens:
            self.cached_tokens[request_id] = found_tokens
            self.queried_tokens += prompt_tokens
            self.found_tokens += found_tokens

    def _touch(self, key: bytes) -> None:
        """Make the page of a key, which another request may have computed, later than pages that follow it."""
        page = self._page_of[key]
        if page in self._idle:
            self._idle.move_to_end(page)

    def _make_empty(self, pages: Sequence[int]) -> None:
        """Forget the content of idle pages."""
        for page in pages:
            del self._idle[page]
            key = self._key_of[page]
            if key is None:
                del self._left_by[page]
            else:
                self._key_of[page] = None
                del self._page_of[key]
        self._empty.release(np.array(pages, dtype=np.int32))
