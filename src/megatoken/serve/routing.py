"""Which replica of a rack computes a request: the one that has most of its prompt in the cache, then the least loaded.

The router never asks a replica what it has cached. It remembers which pages it has sent to each, as the keys of their
chains (``engine/prefix_cache.py``): equal keys are equal tokens behind equal tokens, of the same salt, which no two API
keys share. A replica's memory of keys is as long as its cache and forgets in the same order, least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatoken.engine.prefix_cache import extend_keys

MOST_KEYS = 1 << 18  # of one replica: 32 MiB
LEAST_SLACK, MOST_SLACK = 4, 32
SLACK_SHARE = 8  # one in so many sequences


@dataclass(frozen=True, slots=True)
class Load:
    """What a replica holds now, and how much it takes: requests, and sequences that it runs at once."""

    requests: int
    max_sequences: int

    @property
    def share(self) -> float:
        """Requests for each sequence."""
        return self.requests / self.max_sequences

    @property
    def slack(self) -> int:
        """By so many requests it may be ahead of the least loaded and still get those whose prefix it has."""
        return min(MOST_SLACK, max(LEAST_SLACK, self.max_sequences // SLACK_SHARE))


class PrefixRouter:
    """Remembers which prefixes each replica has seen. Pure: no clock, no input or output."""

    def __init__(self, page_tokens: int) -> None:
        """``page_tokens``: tokens of a cache page; 0: no replica caches prefixes, so only loads count."""
        self._page_tokens = page_tokens
        self._sent: dict[int, OrderedDict[bytes, None]] = {}  # keys by replica, least recently used first
        self._capacity: dict[int, int] = {}

    def add(self, replica: int, cache_tokens: int) -> None:
        """A replica has joined with an empty cache of so many tokens."""
        pages = cache_tokens // self._page_tokens if self._page_tokens else 0
        self._capacity[replica] = min(MOST_KEYS, pages)
        self._sent[replica] = OrderedDict()

    def remove(self, replica: int) -> None:
        """A replica was lost, and its cache with it."""
        del self._capacity[replica], self._sent[replica]

    def keys(self, prompt: Sequence[int], salt: str) -> list[bytes]:
        """The keys of the full pages of a prompt."""
        keys: list[bytes] = []
        if self._page_tokens:
            extend_keys(keys, prompt, self._page_tokens, salt)
        return keys

    def cached_pages(self, replica: int, keys: Sequence[bytes]) -> int:
        """How many pages of the chain, from its start, the replica has seen."""
        sent = self._sent[replica]
        return next((at for at, key in enumerate(keys) if key not in sent), len(keys))

    def choose(self, keys: Sequence[bytes], loads: Mapping[int, Load]) -> int:
        """The replica for a prompt with these keys, among those of ``loads``, of which there is at least one."""
        least = min(load.requests for load in loads.values())
        near = [replica for replica, load in loads.items() if load.requests - least <= load.slack]
        best = min(near, key=lambda one: (-self.cached_pages(one, keys), loads[one].share, one))
        if self.cached_pages(best, keys):
            return best
        return min(loads, key=lambda one: (loads[one].share, len(self._sent[one]), one))

    def sent(self, replica: int, keys: Sequence[bytes]) -> None:
        """The replica has got a prompt with these keys."""
        sent, capacity = self._sent[replica], self._capacity[replica]
        for key in reversed(keys[:capacity]):  # the end of a chain, useless without its beginning, is forgotten first
            sent[key] = None
            sent.move_to_end(key)
        while len(sent) > capacity:
            sent.popitem(last=False)
