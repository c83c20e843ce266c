"""The queue in front of the engine: shares tokens fairly between tenants and holds each to its limits.

Every tenant has a counter of the tokens that it was served, divided by its weight. The engine's own queue is kept
short, and the next request is that of the tenant with the lowest counter, so a tenant that floods waits for itself (the
virtual token counter of Sheng et al., "Fairness in Serving Large Language Models", 2024).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from megatoken.engine.fair_share import OUTPUT_TOKEN_COST, RESERVE
from megatoken.serve.messages import Busy
from megatoken.serve.tenants import Tenant

RETRY_AFTER_SECONDS = 1
MINUTE_SECONDS = 60.0
GROWTH_TOKENS = 256  # by so much an answer may grow before another request of its tenant has to wait for it

Item = TypeVar("Item")


@dataclass(slots=True)
class _Bucket:
    """So much may be taken per minute, at most one minute's worth at once. A debt is paid off first."""

    per_minute: int | None
    level: float = 0.0
    updated: float = 0.0

    def wait_seconds(self, needed: float, now: float) -> float:
        """How long from now until ``needed`` are there."""
        if self.per_minute is None:
            return 0.0
        self.level = min(self.per_minute, self.level + (now - self.updated) * self.per_minute / MINUTE_SECONDS)
        self.updated = now
        return max(0.0, (min(needed, self.per_minute) - self.level) * MINUTE_SECONDS / self.per_minute)


class _Waiting(NamedTuple, Generic[Item]):
    item: Item
    prompt_tokens: int
    footprint: int  # tokens in the cache that it counts for at its start
    priority: int


@dataclass(slots=True)
class TenantQueue(Generic[Item]):
    """What one tenant has queued and running, and was served."""

    tenant: Tenant
    requests: _Bucket
    tokens: _Bucket
    counter: float = 0.0  # tokens served, by cost, divided by the weight
    running: int = 0
    largest: float = 0.0  # most that one of its requests may add to the counter
    unstarted: int = 0  # prompt tokens of its running requests that have no token yet
    footprint: int = 0  # tokens of its running requests in the cache, and room for them to grow
    queued: deque[_Waiting[Item]] = field(default_factory=deque)  # lowest priority first, then in order of arrival


class FairQueue(Generic[Item]):
    """Requests on their way to the engine. Items are distinguished by identity."""

    def __init__(self, *, max_queued: int, reserve: bool) -> None:
        """Prepares an empty queue. ``resize`` comes before the first ``take``.

        Args:
            max_queued: requests of all tenants that may wait.
            reserve: keep a share of the engine free of any one tenant, so that another finds room at once.
        """
        self._max_unstarted_tokens = 0
        self._max_queued = max_queued
        self._reserve = reserve
        self._most_running: int | None = None
        self._most_footprint: int | None = None
        self._tenants: dict[str, TenantQueue[Item]] = {}
        self._waiting = 0

    def resize(self, max_running: int, cache_tokens: int, max_unstarted_tokens: int) -> None:
        """Feed an engine that runs so many sequences at once, and holds so many tokens in its cache.

        It may hold so many prompt tokens of one tenant without a token of their answers; further requests of that
        tenant wait here.
        """
        self._max_unstarted_tokens = max_unstarted_tokens
        if self._reserve:
            self._most_running = max_running - max(1, max_running // RESERVE) if max_running > 1 else None
            self._most_footprint = cache_tokens - cache_tokens // RESERVE

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return self._waiting

    def tenants(self) -> Iterator[TenantQueue[Item]]:
        """Every tenant that was seen."""
        return iter(self._tenants.values())

    def add(
        self, tenant: Tenant, item: Item, prompt_tokens: int, max_tokens: int, now: float, priority: int = 0
    ) -> None:
        """Queue a request.

        Args:
            tenant: whose it is.
            item: what ``take`` returns.
            prompt_tokens: length of its prompt.
            max_tokens: most tokens of its answer.
            now: seconds on a steady clock.
            priority: the lowest first, among the tenant's own requests; it changes no tenant's share.

        Raises:
            Busy: the queue is full, or the tenant is over one of its limits.
        """
        queue = self._of(tenant, now)
        if self._waiting >= self._max_queued:
            raise Busy(f"{self._waiting:,} requests are waiting already; try again later", RETRY_AFTER_SECONDS)
        if tenant.max_queued is not None and len(queue.queued) >= tenant.max_queued:
            raise Busy(f"this key has {len(queue.queued):,} requests waiting already", RETRY_AFTER_SECONDS)
        for bucket, needed, what in ((queue.requests, 1, "requests"), (queue.tokens, prompt_tokens, "tokens")):
            wait = bucket.wait_seconds(needed, now)
            if wait > 0:
                after = int(wait) + 1
                raise Busy(f"this key is limited to {bucket.per_minute:,} {what} a minute; wait {after} s", after)
        queue.requests.level -= 1
        queue.tokens.level -= prompt_tokens
        queue.largest = max(queue.largest, (prompt_tokens + max_tokens * OUTPUT_TOKEN_COST) / tenant.weight)
        others = [other.counter for other in self._tenants.values() if other.queued]
        if not queue.queued and others:
            # What a tenant did not use is not saved up for it, and what no other wanted is not held against it. Only
            # one request's worth of debt stays, or sending one request at a time would cost nothing.
            level = min(others)
            queue.counter = min(max(queue.counter, level), level + queue.largest)
        place = len(queue.queued)
        while place and queue.queued[place - 1].priority > priority:
            place -= 1
        footprint = _first_footprint(prompt_tokens, max_tokens)
        queue.queued.insert(place, _Waiting(item, prompt_tokens, footprint, priority))
        self._waiting += 1

    def take(self) -> Item | None:
        """The next request for the engine, which counts as running from now on; None while there is none."""
        best = None
        for queue in self._tenants.values():
            if queue.queued and (best is None or queue.counter < best.counter) and self._may_run(queue):
                best = queue
        if best is None:
            return None
        item, prompt_tokens, footprint, _ = best.queued.popleft()
        self._waiting -= 1
        best.running += 1
        best.unstarted += prompt_tokens
        best.footprint += footprint
        best.counter += prompt_tokens / best.tenant.weight
        return item

    def remove(self, tenant: Tenant, item: Item) -> bool:
        """Drop a request that waits; False if it does not."""
        queue = self._tenants.get(tenant.name)
        for at, waiting in enumerate(queue.queued if queue is not None else ()):
            if waiting.item is item:
                assert queue is not None
                del queue.queued[at]
                self._waiting -= 1
                return True
        return False

    def served(self, tenant: Tenant, tokens: int) -> None:
        """Charge tokens of an answer."""
        queue = self._tenants[tenant.name]
        queue.counter += tokens * OUTPUT_TOKEN_COST / tenant.weight
        queue.footprint += tokens
        queue.tokens.level -= tokens

    def started(self, tenant: Tenant, prompt_tokens: int) -> None:
        """A running request has its first token, or has ended without one."""
        self._tenants[tenant.name].unstarted -= prompt_tokens

    def refund(self, tenant: Tenant, tokens: int) -> None:
        """Give back prompt tokens that came from the prefix cache."""
        self._tenants[tenant.name].counter -= tokens / tenant.weight

    def ended(self, tenant: Tenant, prompt_tokens: int, max_tokens: int, generated: int) -> None:
        """A running request has ended, of whose answer so many tokens were charged in all."""
        queue = self._tenants[tenant.name]
        queue.running -= 1
        queue.footprint -= _first_footprint(prompt_tokens, max_tokens) + generated

    def drain(self) -> Iterator[Item]:
        """Remove and yield everything that waits."""
        for queue in self._tenants.values():
            while queue.queued:
                self._waiting -= 1
                yield queue.queued.popleft().item

    def _of(self, tenant: Tenant, now: float) -> TenantQueue[Item]:
        if tenant.name not in self._tenants:
            requests, tokens = (
                _Bucket(rate, rate or 0.0, now) for rate in (tenant.requests_per_minute, tenant.tokens_per_minute)
            )
            self._tenants[tenant.name] = TenantQueue(tenant, requests, tokens)
        return self._tenants[tenant.name]

    def _may_run(self, queue: TenantQueue[Item]) -> bool:
        if queue.unstarted >= self._max_unstarted_tokens:
            return False
        if queue.running == 0:
            return True  # also where a single request is larger than the share
        if queue.tenant.max_running is not None and queue.running >= queue.tenant.max_running:
            return False
        if self._most_running is not None and queue.running >= self._most_running:
            return False
        return self._most_footprint is None or queue.footprint + queue.queued[0].footprint <= self._most_footprint


def _first_footprint(prompt_tokens: int, max_tokens: int) -> int:
    """Tokens in the cache that a request counts for at its start. Few answers are as long as ``max_tokens`` allows."""
    return prompt_tokens + min(max_tokens, GROWTH_TOKENS)
