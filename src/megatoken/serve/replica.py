"""What a replica of a rack does, in a process of this machine or one that a cluster started: serve the router."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from megatoken.errors import MegatokenError
from megatoken.serve.engine_process import FLUSH_SECONDS, SWITCH_SECONDS
from megatoken.serve.hub import Hub
from megatoken.serve.opened_engine import OpenedEngine
from megatoken.serve.options import ServeConfig
from megatoken.serve.replica_channel import Address, serve_router

MOST_QUEUED = 1_000_000  # the router's queue is the one that has a limit


async def serve_replica(
    options: ServeConfig,
    open_with: Callable[[Hub], Awaitable[OpenedEngine]],
    address: Address,
    key: bytes,
    number: int,
    stop: Coroutine[Any, Any, object],
) -> None:
    """Serve the router at ``address`` until ``stop`` is done, or the router is out of reach for too long.

    ``open_with`` opens the engine whose steps go to a hub. The router knows this replica by ``key`` and ``number``.

    Raises:
        MegatokenError: the engine cannot be opened, or has failed; the router knows.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    loop = asyncio.get_running_loop()
    failed: asyncio.Future[str] = loop.create_future()
    hub = Hub(MOST_QUEUED, several_tenants=False, restarts=options.restart, fail=failed.set_result)
    opened = await open_with(hub)
    hub.start(opened.engine, opened.model, opened.sizes, opened.check)
    ends: list[asyncio.Future[Any]] = [
        loop.create_task(stop),
        failed,
        loop.create_task(serve_router(hub, address, key, number, options.rack.reconnect_seconds)),
    ]
    watching = loop.create_task(hub.watch())
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if failed.done():
        await asyncio.sleep(FLUSH_SECONDS)
        raise MegatokenError(failed.result())
    watching.cancel()
    await asyncio.to_thread(opened.close)
