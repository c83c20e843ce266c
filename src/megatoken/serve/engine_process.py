"""The engine process: loads the model, steps it on a thread, and connects it to the HTTP processes."""

from __future__ import annotations

import asyncio
import os
import socket
import sys

from megatoken.errors import ExitCode, MegatokenError
from megatoken.serve.child import Control, read_settings, run_loop
from megatoken.serve.engine_client import fault
from megatoken.serve.hub import Hub
from megatoken.serve.link import Link
from megatoken.serve.opened_engine import open_engine
from megatoken.serve.options import EngineProcessSettings

SWITCH_SECONDS = 0.0005  # Python's 5 ms would hold up a step that is due while this thread handles the one before
FLUSH_SECONDS = 0.2  # for the last errors to reach the HTTP processes


async def _serve(settings: EngineProcessSettings, control: Control) -> None:
    sys.setswitchinterval(SWITCH_SECONDS)
    loop = asyncio.get_running_loop()
    options = settings.options
    failed = loop.create_future()
    hub = Hub(
        options.max_queued,
        several_tenants=settings.several_tenants,
        restarts=options.restart,
        fail=failed.set_result,
    )
    listener = socket.socket(fileno=settings.listener)  # a collected socket, or server, closes its descriptor
    server = await loop.create_unix_server(lambda: Link(hub), sock=listener)
    watching = loop.create_task(hub.watch())
    try:
        opened = await asyncio.to_thread(open_engine, options, hub.take_step)
    except MegatokenError as error:
        control.leave(str(error), error.exit_code)
    except Exception as error:
        control.leave(fault("the engine cannot be started", error), ExitCode.ERROR)
    opened.note_to(control)
    hub.start(opened.engine, opened.model, opened.sizes, opened.check)
    control.send({"ready": True, "model": opened.model.name})
    stopping = loop.create_task(control.wait_for_stop())
    await asyncio.wait((stopping, failed), return_when=asyncio.FIRST_COMPLETED)
    if failed.done():
        await asyncio.sleep(FLUSH_SECONDS)
        control.leave(failed.result(), ExitCode.ERROR)
    watching.cancel()
    server.close()
    await asyncio.to_thread(opened.close)
    os._exit(0)  # weights and cache go with the process


def main() -> None:
    """Entry of the process."""
    control, settings = read_settings(EngineProcessSettings)
    run_loop(control, _serve(settings, control))


if __name__ == "__main__":
    main()
