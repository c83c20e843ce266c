"""A server's replicas on the nodes of a Ray cluster: what ``rack/cluster.py`` starts, watches and replaces."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from megatoken import __version__
from megatoken.engine.checkpoint import open_model
from megatoken.engine.config import absolute_model
from megatoken.rack.actor import LEAVE_SECONDS, WorkerActor
from megatoken.rack.cluster import Cluster
from megatoken.rack.records import WorkerSpec
from megatoken.serve.engine_process import serve_engine
from megatoken.serve.hub import Hub
from megatoken.serve.opened_engine import OpenedEngine, open_engine, share_engine
from megatoken.serve.options import ReplicaSettings, ServeConfig
from megatoken.serve.rack_plan import slots_on
from megatoken.serve.replica_set import ReplicaSet


class ReplicaActor(WorkerActor):
    """The process of one replica."""

    def serve(self, host: str, port: int, key: bytes, number: int) -> None:
        """Serves the router until it ends or is lost; then this process ends."""
        options = ServeConfig.model_validate_json(self._spec.server)

        async def open_with(hub: Hub) -> OpenedEngine:
            if options.engine_kind == "mock":
                return open_engine(options, hub.take_step)
            return share_engine(options, self._engines[0], hub.take_step)

        async def serve() -> None:
            await serve_engine(options, open_with, ReplicaSettings((host, port), key, number), asyncio.Event().wait())

        try:
            asyncio.run(serve())
        finally:  # Ray may no longer reach this process
            threading.Timer(LEAVE_SECONDS, os._exit, (0,)).start()


class MockActor(ReplicaActor):
    """The process of one replica that makes tokens up."""

    def _inspect(self) -> dict[str, Any]:
        source = open_model(self._spec.model, random_weights=True, seed=self._spec.seed)
        return {"version": __version__, "content_hash": source.content_hash}

    def _load(self) -> dict[str, Any]:
        return {}


def connect(options: ServeConfig, address: str, note: Callable[[str], None]) -> Cluster:
    """A hold on a Ray cluster. Raises UsageError: ray is missing, no cluster answers, or another driver holds it."""
    return Cluster(address, note, MockActor if options.engine_kind == "mock" else ReplicaActor)


def serve_on(cluster: Cluster, options: ServeConfig, key: bytes, replicas: ReplicaSet) -> None:
    """Start a replica on every slot of a cluster, which connect to ``replicas``; returns when all have. Blocks.

    Raises:
        MegatokenError: no room, nodes that differ, or a process that failed.
    """
    made_up = options.engine_kind == "mock" or options.random_weights
    source = open_model(options.model, random_weights=made_up, seed=options.seed)
    # What replicas need not know stays here: keys, and files of this machine.
    private = {"api_key", "api_keys", "tls_certificate", "tls_key", "chat_template", "engine"}
    model = absolute_model(options.model)
    spec = WorkerSpec(
        model=model,
        random_weights=options.random_weights,
        seed=options.seed,
        engine=asdict(options.engine_config()),
        simulated_gpu=None,
        streams=True,
        keep_ids=True,
        dead_after_seconds=options.rack.dead_after_seconds,
        reconnect_seconds=options.rack.reconnect_seconds,
        driver_host=socket.gethostname(),
        server=options.model_copy(update={"model": model}).model_dump_json(exclude=private),
    )
    cluster.start(slots_on(options, cluster.nodes()), spec, source.content_hash)
    cluster.load()
    cluster.serve(replicas, key, lambda nodes: slots_on(options, nodes), options.restart)
