"""A server's replicas on the nodes of a Ray cluster: what ``rack/cluster.py`` starts, watches and replaces."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from megatoken.engine.checkpoint import open_model
from megatoken.engine.config import REFERENCE, model_folder
from megatoken.errors import UsageError
from megatoken.rack.actor import LEAVE_SECONDS, WorkerActor, WorkerSpec
from megatoken.rack.cluster import Cluster
from megatoken.serve.hub import Hub
from megatoken.serve.opened_engine import OpenedEngine, open_engine, share_engine
from megatoken.serve.options import ServeConfig
from megatoken.serve.rack_plan import slots_on
from megatoken.serve.replica import serve_replica
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
            await serve_replica(options, open_with, (host, port), key, number, asyncio.Event().wait())

        try:
            asyncio.run(serve())
        finally:  # Ray may no longer reach this process
            threading.Timer(LEAVE_SECONDS, os._exit, (0,)).start()


class MockActor(ReplicaActor):
    """The process of one replica that makes tokens up."""

    def _inspect(self) -> dict[str, Any]:
        from megatoken import __version__

        return {"version": __version__, "content_hash": _model(self._spec.model, mock=True).content_hash}

    def _load(self) -> dict[str, Any]:
        return {}


class ReplicaCluster:
    """A hold on a Ray cluster. All methods block."""

    def __init__(self, options: ServeConfig, address: str, key: bytes, note: Callable[[str], None]) -> None:
        """Connects. Raises UsageError: ray is missing, no cluster answers, or another driver holds this one."""
        self._options = options
        self._key = key
        mock = options.engine_kind == "mock"
        self._source = _model(options.model, mock=mock or options.random_weights, seed=options.seed)
        self._cluster = Cluster(address, note, MockActor if mock else ReplicaActor)
        self.host = self._cluster.host

    def serve(self, replicas: ReplicaSet) -> None:
        """Starts a replica on every slot, which connect to ``replicas``; returns when all have.

        Raises:
            MegatokenError: no room, nodes that differ, or a process that failed.
        """
        options, cluster = self._options, self._cluster
        found = cluster.start(slots_on(options, cluster.nodes()), _spec(options))
        if found[0]["content_hash"] != self._source.content_hash:
            raise UsageError("the nodes' checkpoint is not the driver's; copy the same files to every machine")
        cluster.load()
        cluster.serve(replicas, self._key, lambda nodes: slots_on(options, nodes), options.restart)

    def close(self) -> None:
        """Ends all replicas."""
        self._cluster.close()


def _model(name: str, *, mock: bool, seed: int = 0) -> Any:
    return open_model(name, random_weights=mock, seed=seed)


def _spec(options: ServeConfig) -> WorkerSpec:
    folder = model_folder(options.model)
    model = str(folder.absolute()) if options.model != REFERENCE and folder.is_dir() else options.model
    # What replicas need not know stays here: keys, and files of this machine.
    private = {"api_key", "api_keys", "tls_certificate", "tls_key", "chat_template", "engine"}
    return WorkerSpec(
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
