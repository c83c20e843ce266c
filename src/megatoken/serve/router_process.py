"""The process in front of a rack's replicas: takes the requests of all HTTP processes and routes them."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import redirect_stdout, suppress
from pathlib import Path

from megatoken.errors import ExitCode, MegatokenError
from megatoken.rack.cluster import Cluster
from megatoken.rack.records import Place
from megatoken.serve.child import Control, read_settings, run_loop
from megatoken.serve.engine_process import FLUSH_SECONDS
from megatoken.serve.hub import Hub
from megatoken.serve.link import Link
from megatoken.serve.options import RouterProcessSettings
from megatoken.serve.rack_cluster import connect, serve_on
from megatoken.serve.replica_channel import accept_replicas, listen_at
from megatoken.serve.replica_set import ReplicaSet


async def _serve(settings: RouterProcessSettings, control: Control) -> None:
    loop = asyncio.get_running_loop()
    options = settings.options
    failed: asyncio.Future[str] = loop.create_future()
    hub = Hub(
        options.max_queued,
        several_tenants=settings.several_tenants,
        restarts=options.restart,
        fail=failed.set_result,
        rack=True,
    )
    cluster: Cluster | None = None

    def give_up(number: int) -> None:
        if cluster is None:  # a cluster notices it itself
            control.send({"give_up": number})

    def changed(serving: int, expected: int) -> None:
        if serving == expected and hub.model is not None:
            control.send({"ready": True, "model": hub.model.name})

    replicas = ReplicaSet(
        hub,
        options,
        note=lambda line: loop.call_soon_threadsafe(control.send, {"note": line}),  # type: ignore[arg-type]
        give_up=give_up,
        on_change=changed,
    )
    server = await loop.create_unix_server(lambda: Link(hub), sock=socket.socket(fileno=settings.listener))
    running = [loop.create_task(hub.watch()), loop.create_task(replicas.watch())]
    try:
        if settings.local_replicas:
            for number in range(settings.local_replicas):
                replicas.register(number, [Place(socket.gethostname(), number)])
            with suppress(FileNotFoundError):
                Path(settings.replicas_path).unlink()  # of a router that has ended
            listener = listen_at(settings.replicas_path)
            running.append(loop.create_task(accept_replicas(listener, settings.key, replicas.admit)))
        else:
            cluster = await asyncio.to_thread(connect, options, settings.cluster, replicas.note)
            listener = listen_at((cluster.host, 0))
            replicas.address = listener.getsockname()[:2]
            running.append(loop.create_task(accept_replicas(listener, settings.key, replicas.admit)))
            await asyncio.to_thread(serve_on, cluster, options, settings.key, replicas)
    except MegatokenError as error:
        if cluster is not None:
            await asyncio.to_thread(cluster.close)
        control.leave(str(error), error.exit_code)
    stopping = loop.create_task(control.wait_for_stop())
    await asyncio.wait((stopping, failed), return_when=asyncio.FIRST_COMPLETED)
    hub.end_all("the server has stopped")
    await asyncio.sleep(FLUSH_SECONDS)
    if cluster is not None:
        await asyncio.to_thread(cluster.close)
    if failed.done():
        control.leave(failed.result(), ExitCode.ERROR)
    server.close()
    for task in running:
        task.cancel()
    os._exit(0)


def main() -> None:
    """Entry of the process."""
    control, settings = read_settings(RouterProcessSettings)
    # Ray prints messages of its daemons on standard output.
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        run_loop(control, _serve(settings, control))


if __name__ == "__main__":
    main()
