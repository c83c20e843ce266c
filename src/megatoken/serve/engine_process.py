"""The process of an engine: loads the model, steps it on a thread, and serves HTTP processes, or a rack's router."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from megatoken.errors import ExitCode, MegatokenError
from megatoken.rack.actor import share_node
from megatoken.serve.child import Control, read_settings, run_loop
from megatoken.serve.engine_client import fault
from megatoken.serve.hub import Hub
from megatoken.serve.link import Link
from megatoken.serve.opened_engine import OpenedEngine, open_engine
from megatoken.serve.options import EngineProcessSettings, ReplicaSettings, ServeConfig, ServeEngineSection
from megatoken.serve.replica_channel import serve_router

SWITCH_SECONDS = 0.0005  # Python's 5 ms would hold up a step that is due while this thread handles the one before
FLUSH_SECONDS = 0.2  # for the last errors to reach the HTTP processes
MOST_QUEUED = 1_000_000  # of a replica: the router's queue is the one that has a limit


async def serve_engine(
    options: ServeConfig,
    open_with: Callable[[Hub], Awaitable[OpenedEngine]],  # opens the engine whose steps go to a hub
    clients: socket.socket | ReplicaSettings,  # where HTTP processes connect, or the router to serve
    stop: Coroutine[Any, Any, object],
    *,
    several_tenants: bool = False,
) -> None:
    """Serve until ``stop`` is done, or the router is out of reach for too long.

    Raises:
        MegatokenError: the engine cannot be opened, or has failed; the clients know.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    loop = asyncio.get_running_loop()
    failed: asyncio.Future[str] = loop.create_future()
    replica = clients if isinstance(clients, ReplicaSettings) else None
    most_queued = options.max_queued if replica is None else MOST_QUEUED
    hub = Hub(most_queued, several_tenants=several_tenants, restarts=options.restart, fail=failed.set_result)
    server = None  # a collected one would close its descriptor
    if isinstance(clients, socket.socket):
        server = await loop.create_unix_server(lambda: Link(hub), sock=clients)
    watching = loop.create_task(hub.watch())
    opened = await open_with(hub)
    hub.start(opened.engine, opened.model, opened.sizes, opened.check)
    ends: list[asyncio.Future[Any]] = [loop.create_task(stop), failed]
    if replica is not None:
        serving = serve_router(hub, replica.router, replica.key, replica.number, options.rack.reconnect_seconds)
        ends.append(loop.create_task(serving))
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if failed.done():
        await asyncio.sleep(FLUSH_SECONDS)
        raise MegatokenError(failed.result())
    watching.cancel()
    if server is not None:
        server.close()
    await asyncio.to_thread(opened.close)


async def _serve(settings: EngineProcessSettings, control: Control) -> None:
    options, clients = settings.options, settings.clients
    if isinstance(clients, ReplicaSettings):
        engine = options.engine.model_dump()
        share_node(engine, clients.threads, clients.neighbours)
        options = options.model_copy(update={"engine": ServeEngineSection(**engine)})

    async def open_with(hub: Hub) -> OpenedEngine:
        opened = await asyncio.to_thread(open_engine, options, hub.take_step)
        opened.note_to(control)
        message = {"ready": True, "model": opened.model.name}
        asyncio.get_running_loop().call_soon(control.send, message)  # when the hub has started
        return opened

    try:
        where = socket.socket(fileno=clients) if isinstance(clients, int) else clients
        await serve_engine(options, open_with, where, control.wait_for_stop(), several_tenants=settings.several_tenants)
    except MegatokenError as error:
        control.leave(str(error), error.exit_code)
    except Exception as error:
        control.leave(fault("the process of the engine failed", error), ExitCode.ERROR)
    os._exit(0)  # weights and cache go with the process


def main() -> None:
    """Entry of the process."""
    control, settings = read_settings(EngineProcessSettings)
    run_loop(control, _serve(settings, control))


if __name__ == "__main__":
    main()
