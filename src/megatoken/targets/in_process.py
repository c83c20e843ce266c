"""The engine of this process: a target whose every poll runs one step, and the backend that loads it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from megatoken.config import RunConfig
from megatoken.engine.checkpoint import open_model
from megatoken.engine.config import DEFAULT_PRECISION
from megatoken.engine.request import Request
from megatoken.engine.state import ReplicaState
from megatoken.engine.tokenizer import Tokenizer
from megatoken.errors import CapacityError
from megatoken.hardware.inventory import cpu
from megatoken.hardware.telemetry import Sensors, Telemetry
from megatoken.runs.identity import ModelFiles
from megatoken.runs.reasons import reason
from megatoken.targets import ReplicaReading, SampleEvent
from megatoken.targets.backend import Reporter, ServedModel, engine_model, model_files, tokenizer_of

if TYPE_CHECKING:
    from megatoken.engine import Engine

_new_event = tuple.__new__  # a named tuple's own constructor takes three times as long, a thousand times in a step
_DEFAULTS = SampleEvent._field_defaults
_ERROR = list(_DEFAULTS).index("error")
_MIDDLE, _END = tuple(_DEFAULTS.values())[1:_ERROR], tuple(_DEFAULTS.values())[_ERROR + 1 :]
THREADS_PER_CORE = 4  # more threads only wait for each other, and a mistyped number hangs the machine


class InProcessBackend:
    """The engine of this process."""

    def __init__(self, config: RunConfig, reporter: Reporter) -> None:
        self._config = config
        self._reporter = reporter
        self._served: ServedModel | None = None
        self._tokenizer: Tokenizer | None = None
        self._files: ModelFiles | None = None

    def close(self) -> None:
        """Ends the reading of files whose hashes were not asked for."""
        if self._files is not None:
            self._files.stop()

    def served(self) -> ServedModel:
        """The model without its weights, and the memory that it would take here."""
        if self._served is None:
            config = self._config
            cores, threads = cpu()["usable_cores"], config.engine.threads
            if threads is not None and threads > THREADS_PER_CORE * cores:
                raise CapacityError(
                    f"engine.threads is {threads:,}, but this process may use {cores} cores; "
                    f"use {cores}, at most {THREADS_PER_CORE * cores}"
                )
            source = open_model(config.model, random_weights=config.random_weights, seed=config.seed)
            self._files = model_files(config, source)
            if self._files is not None:
                self._files.start()  # the import below keeps one core busy for seconds, and others idle
            from megatoken.engine.device import settle  # imports PyTorch, which a simulated rack does without
            from megatoken.hardware.precision import settle_fastest

            # a lone sequence is bound by reading the weights, which are half as large in bf16
            alone = config.scenario == "singlestream"
            settle_here = settle if config.precision or alone else settle_fastest
            settled, memory = settle_here(source, config.engine_config())
            chosen = config.precision is None and settled.precision != DEFAULT_PRECISION
            config = self._config = config.model_copy(update={"precision": settled.precision})
            served = engine_model(config, source, memory, self._files)
            notes = (*served.notes, reason("PRECISION_CHOSEN", precision=settled.precision)) if chosen else served.notes
            self._served = replace(served, notes=notes)
        return self._served

    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's."""
        if self._tokenizer is None:
            self._tokenizer = tokenizer_of(self._config.model)
        return self._tokenizer

    def facts(self) -> Mapping[str, Any]:
        """None beyond those of the inventory."""
        return {}

    @contextmanager
    def load(self) -> Iterator[InProcessTarget]:
        """Loads the weights."""
        from megatoken.engine import Engine
        from megatoken.engine.ops.native import must_build

        served, config = self.served(), self._config
        on_cpu = served.memory is not None and served.memory.device == "cpu"
        compiling = "; compiling its kernels, once" if on_cpu and must_build() else ""
        self._reporter.stage(f"loading {served.name} in {config.precision}{compiling}")
        engine = Engine(
            config.model,
            config.engine_config(),
            random_weights=config.random_weights,
            seed=config.seed,
            tokenizer=self._tokenizer,
        )
        if served.files is not None and not served.files.done:
            self._reporter.stage(f"hashing the files of {served.name}")
            served.files.identity()
        self._served = replace(served, memory=engine.memory_plan, max_running=engine.memory_plan.max_sequences)
        with Sensors(engine.gpu_uuids) as sensors:
            yield InProcessTarget(engine, sensors)


class InProcessTarget:
    """Drives ``engine``, which takes requests from this target only."""

    def __init__(self, engine: Engine, sensors: Sensors | None = None) -> None:
        """Takes an engine, and the sensors of its machine where they are to be read."""
        self.engine = engine
        self._sensors = sensors
        self._samples: dict[int, int] = {}  # by request id
        self._unstarted: deque[int] = deque()  # ids of requests that were never in a step, oldest first
        self._started_ns: dict[int, int] = {}  # by request id, until its first event

    def facts(self) -> dict[str, Any]:
        """The memory plan and the description of the engine."""
        return {"memory_plan": asdict(self.engine.memory_plan), "target": self.engine.describe()}

    def submit(self, sample_id: int, request: Request) -> None:
        """Queues a sample. Raises RequestError or CapacityError if it can never be served."""
        request_id = self.engine.submit(request)
        self._samples[request_id] = sample_id
        self._unstarted.append(request_id)

    def poll(self, timeout_seconds: float) -> list[SampleEvent]:
        """Runs one step, however long it takes, and reports its tokens at the time it ended."""
        began_ns = time.monotonic_ns()
        events = self.engine.step()
        now_ns = time.monotonic_ns()
        self._note_started(began_ns)
        samples, started = self._samples, self._started_ns
        seen: list[SampleEvent] = []
        for event in events:
            request_id, ids, reason, error = event[:4]
            sample_id = samples.get(request_id) if reason is None else samples.pop(request_id, None)
            if sample_id is not None:  # else it was withdrawn
                began = started.pop(request_id, None) if started else None
                failed = None if error is None else str(error)
                seen.append(_new_event(SampleEvent, (sample_id, ids, reason, now_ns, began, *_MIDDLE, failed, *_END)))
        return seen

    def state(self) -> ReplicaState:
        """The engine's state now."""
        return self.engine.state()

    def replicas(self) -> list[ReplicaReading]:
        """The engine's state and the sensors of its GPUs and of this machine."""
        telemetry = self._sensors.read() if self._sensors else Telemetry()
        return [ReplicaReading(None, 0, self.engine.state(), telemetry)]

    def outcome(self, since_ns: int) -> dict[str, Any]:
        """What the sensors cost; an engine in this process is lost only together with it."""
        return {"sensors_core_share": self._sensors.core_share()} if self._sensors else {}

    def withdraw(self) -> list[int]:
        """Drops the samples that were never in a step; returns their ids."""
        request_ids = list(self._unstarted)
        self._unstarted.clear()
        for request_id in request_ids:
            self.engine.cancel(request_id)
        return [self._samples.pop(request_id) for request_id in request_ids]

    def cancel_all(self) -> list[SampleEvent]:
        """Drops every sample in flight and steps until the engine has reported their ends."""
        for request_id in self._samples:
            self.engine.cancel(request_id)
        while self.engine.busy:
            self.engine.step()
        self._samples.clear()
        self._unstarted.clear()
        self._started_ns.clear()
        return []  # ``poll`` has reported every token

    def _note_started(self, began_ns: int) -> None:
        """Notes which samples the step began: the engine admits in order, and after a preemption no new request.

        So the requests that wait are the newest, and a preempted one is older than all that never ran.
        """
        waiting = self.engine.state().waiting
        while len(self._unstarted) > waiting:
            self._started_ns[self._unstarted.popleft()] = began_ns

    def close(self) -> None:
        """Frees pages and queue; the engine itself belongs to the caller."""
        self.cancel_all()
