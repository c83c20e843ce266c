"""A lock that tenants get in turn."""

from __future__ import annotations

import asyncio
from collections import deque


class TenantTurns:
    """One holder at a time. The next is of the tenant that has not had a turn for longest; within one, the first come.

    So a tenant with many waiting holds up another for one turn only.
    """

    def __init__(self) -> None:
        self._held = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._turns = 0
        self._last_turn: dict[str, int] = {}  # by tenant

    async def acquire(self, tenant: str) -> None:
        """Wait for a turn of ``tenant``. Cancelling gives the place up."""
        if not self._held:
            self._begin(tenant)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # its turn came while it was leaving
                self.release()
            raise

    def release(self) -> None:
        """End the turn, and begin the next."""
        self._held = False
        for tenant in sorted(self._waiting, key=lambda one: self._last_turn.get(one, 0)):
            queue = self._waiting[tenant]
            while queue:
                turn = queue.popleft()
                if not turn.done():
                    self._begin(tenant)
                    turn.set_result(None)
                    return
            del self._waiting[tenant]

    def _begin(self, tenant: str) -> None:
        self._held = True
        self._turns += 1
        self._last_turn[tenant] = self._turns
