"""The process of a replica on this machine."""

from __future__ import annotations

import asyncio
import os

from megatoken.errors import ExitCode, MegatokenError
from megatoken.rack.actor import share_node
from megatoken.serve.child import Control, read_settings, run_loop
from megatoken.serve.engine_client import fault
from megatoken.serve.hub import Hub
from megatoken.serve.opened_engine import OpenedEngine, open_engine
from megatoken.serve.options import ReplicaProcessSettings, ServeEngineSection
from megatoken.serve.replica import serve_replica


async def _serve(settings: ReplicaProcessSettings, control: Control) -> None:
    engine = settings.options.engine.model_dump()
    share_node(engine, settings.threads, settings.neighbours)
    options = settings.options.model_copy(update={"engine": ServeEngineSection(**engine)})

    async def open_with(hub: Hub) -> OpenedEngine:
        opened = await asyncio.to_thread(open_engine, options, hub.take_step)
        opened.note_to(control)
        return opened

    try:
        address, key, number = settings.router_path, settings.key, settings.number
        await serve_replica(options, open_with, address, key, number, control.wait_for_stop())
    except MegatokenError as error:
        control.leave(str(error), error.exit_code)
    except Exception as error:
        control.leave(fault("a replica has failed", error), ExitCode.ERROR)
    os._exit(0)  # weights and cache go with the process


def main() -> None:
    """Entry of the process."""
    control, settings = read_settings(ReplicaProcessSettings)
    run_loop(control, _serve(settings, control))


if __name__ == "__main__":
    main()
