"""The process that Ray starts on a node: it opens the model, reports what it found, loads it and serves the driver.

Answers are JSON text. An error that the user can fix is an answer too, so that its message reaches the driver.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import psutil

from megatoken import __version__
from megatoken.errors import MegatokenError
from megatoken.rack.records import WorkerSpec

if TYPE_CHECKING:
    from megatoken.engine import Engine

NICENESS_NEXT_TO_DRIVER = 5  # added where replicas compute on the driver's own machine: dispatch comes first
LEAVE_SECONDS = 2.0


class WorkerActor:
    """The process of one worker. Methods are called in the order in which they are defined."""

    def __init__(self, spec: str, engines: int, threads: int | None, neighbours: int) -> None:
        """Stores what to start.

        Args:
            spec: a ``WorkerSpec`` as JSON.
            engines: replicas in this process.
            threads: CPU threads of one engine; None leaves it to the engine.
            neighbours: replicas that share this node's main memory; 1 if each has a GPU.
        """
        self._spec = WorkerSpec(**json.loads(spec))
        self._count = engines
        share_node(self._spec.engine, threads, neighbours)
        if socket.gethostname() == self._spec.driver_host:
            os.nice(NICENESS_NEXT_TO_DRIVER)

    def inspect(self) -> str:
        """Reports what this node would serve: version, checkpoint, memory plan. Reads no weights."""
        return json_answer(self._inspect)

    def load(self) -> str:
        """Loads the weights and reports what the engines run on."""
        return json_answer(self._load)

    def serve(self, host: str, port: int, key: bytes, number: int) -> None:
        """Serves the driver until it ends or is lost; then this process ends."""
        from megatoken.engine.process_memory import collect_garbage_rarely
        from megatoken.rack.worker import Worker

        collect_garbage_rarely()
        try:
            worker = Worker(self._engines, number, self._spec)
            worker.serve((host, port), key)
        finally:  # Ray may no longer reach this process
            threading.Timer(LEAVE_SECONDS, os._exit, (0,)).start()

    def _inspect(self) -> dict[str, Any]:
        from megatoken.engine.config import EngineConfig
        from megatoken.hardware.inventory import take_inventory

        spec, config = self._spec, EngineConfig(**self._spec.engine)
        facts = {"version": __version__, "process_id": os.getpid(), "inventory": take_inventory()}
        if spec.simulated_gpu is not None:
            from megatoken.engine import Engine

            engine = Engine.simulated(spec.model, config, spec.simulated_gpu)
            return {**facts, "content_hash": engine.content_hash, "memory_plan": asdict(engine.memory_plan)}

        from megatoken.engine.checkpoint import open_model
        from megatoken.engine.device import settle

        source = open_model(spec.model, random_weights=spec.random_weights, seed=spec.seed)
        _, plan = settle(source, config)
        return {**facts, "content_hash": source.content_hash, "memory_plan": asdict(plan)}

    def _load(self) -> dict[str, Any]:
        from megatoken.engine.config import model_folder
        from megatoken.engine.tensor_files import weight_files
        from megatoken.runs.identity import ModelFiles

        folder, spec = model_folder(self._spec.model), self._spec
        weights = spec.simulated_gpu is None and not spec.random_weights and folder.is_dir()
        files = ModelFiles(folder, weight_files(folder)) if weights else None
        if files is not None:
            files.start()
        self._engines = [self._engine() for _ in range(self._count)]
        found = files.identity()["weights_sha256"] if files is not None else None
        plan, target = asdict(self._engines[0].memory_plan), self._engines[0].describe()
        return {"memory_plan": plan, "target": target, "weights_sha256": found}

    def _engine(self) -> Engine:
        from megatoken.engine import Engine, EngineConfig

        spec, config = self._spec, EngineConfig(**self._spec.engine)
        if spec.simulated_gpu is not None:
            return Engine.simulated(spec.model, config, spec.simulated_gpu, stream=spec.streams)
        return Engine(spec.model, config, random_weights=spec.random_weights, seed=spec.seed)


def share_node(engine: dict[str, Any], threads: int | None, neighbours: int) -> None:
    """Sets what fields of ``EngineConfig`` leave open to an engine's part of its node; arguments as of the actor."""
    if threads is not None and engine.get("threads") is None:
        engine["threads"] = threads
    if neighbours > 1 and engine.get("memory_bytes") is None:
        engine["memory_bytes"] = psutil.virtual_memory().available // neighbours


def json_answer(question: Callable[[], dict[str, Any]]) -> str:
    """The answer to a driver's question as JSON; an error that it should read is one too."""
    try:
        return json.dumps(question())
    except MegatokenError as error:
        return json.dumps({"error": str(error), "exit_code": int(error.exit_code)})
