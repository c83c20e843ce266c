"""The parent process of a server: opens the port, starts engine and HTTP processes, watches them, stops them."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatoken.addresses import is_loopback
from megatoken.engine.config import model_folder
from megatoken.errors import ExitCode, MegatokenError, UsageError, need_packages
from megatoken.framing import first_message
from megatoken.processes import allow_many_files
from megatoken.rack.address import find_cluster
from megatoken.rack.placement import Slot
from megatoken.rack.wire import KEY_BYTES
from megatoken.serve.access_log import AccessLog
from megatoken.serve.child import STOP
from megatoken.serve.folder import server_folder
from megatoken.serve.options import (
    EngineProcessSettings,
    HttpProcessSettings,
    ReplicaSettings,
    RouterProcessSettings,
    ServeConfig,
)
from megatoken.serve.rack_plan import VISIBLE, slots_on, this_machine, visible_gpus
from megatoken.serve.tenants import KEY_VARIABLE, Keys, load_keys
from megatoken.serve.tls import tls_context
from megatoken.signals import handle_stop_signals

BACKLOG = 4096
MOST_QUICK_DEATHS = 5
QUICK_SECONDS = 10.0
AGAIN_SECONDS = 0.5
ERRORS_SECONDS = 2.0  # how long HTTP processes may take to write the last errors when the engine has failed


def serve(options: ServeConfig) -> int:
    """Serve until a signal comes; the exit code.

    Raises:
        UsageError: the port cannot be opened, the keys cannot be used, or a package is missing.
        MegatokenError: the engine cannot be started, or has failed.
    """
    need_packages("megatoken serve", "serve", "httptools", "jinja2", "uvloop")
    keys = load_keys(options.api_key, options.api_keys)
    _check_model_files(options)
    tls_context(options.tls_certificate, options.tls_key)
    allow_many_files()
    with server_folder() as folder:
        sockets = _listen(options)
        rack = None if options.rack.cluster is None else _plan_rack(options, folder / "replicas.sock")
        supervisor = _Supervisor(options, keys, sockets, folder / "engine.sock", rack)
        # The handlers of the command raise KeyboardInterrupt, or do so by SIGALRM after an import. Raised in the event
        # loop, that ends a task but not its process, for which the loop then waits.
        early: list[int] = []
        numbers = [*handle_stop_signals(lambda number, _: early.append(number)), signal.SIGALRM]
        signal.signal(signal.SIGALRM, lambda number, _: early.append(number))
        return asyncio.run(supervisor.run(numbers, early))


@dataclass(frozen=True)
class _Rack:
    """Where replicas come from: processes of this machine, or the cluster at an address."""

    path: Path  # Unix socket for processes of this machine
    key: bytes
    cluster: str
    slots: Sequence[Slot] = ()
    gpus: Sequence[str] = ()  # of this machine, shared out in the order of the slots


@dataclass(eq=False)
class _Child:
    """A process and the socket to it."""

    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    started: float

    async def messages(self, take: Callable[[dict[str, object]], None]) -> None:
        """Hand every report to ``take`` until the process has ended."""
        with suppress(ConnectionError):
            while line := await self.reader.readline():
                take(json.loads(line))
        await self.process.wait()

    def stop(self) -> None:
        """Ask it to end in order."""
        with suppress(ConnectionError, OSError):
            self.writer.write(STOP)

    def kill(self) -> None:
        """End it at once."""
        with suppress(ProcessLookupError):
            self.process.kill()


class _Supervisor:
    def __init__(
        self,
        options: ServeConfig,
        keys: Keys,
        listeners: list[socket.socket],
        path: Path,
        rack: _Rack | None = None,
    ) -> None:
        self._options = options
        self._keys = keys
        self._listeners = listeners
        self._path = path
        self._rack = rack
        self._replicas: dict[int, _Child] = {}  # processes of this machine, by number
        self._replicas_left = 0
        self._engine_listener = socket.socket(socket.AF_UNIX)
        self._engine_listener.bind(str(path))
        self._engine_listener.listen(BACKLOG)
        self._children: set[_Child] = set()
        self._http: set[_Child] = set()
        self._ready_http: set[int] = set()
        self._model: str | None = None
        self._announced = False
        self._stopping = asyncio.Event()
        self._failure: MegatokenError | None = None
        self._ended_at_once = False
        self._began = time.monotonic()
        self._log = AccessLog(as_json=options.json_logs, quiet=False)  # never waits for the reader of standard error

    async def run(self, signals: Sequence[int], early: Sequence[int]) -> int:
        """Serve until one of ``signals`` comes; ``early`` came before the event loop could handle them."""
        loop = asyncio.get_running_loop()
        for number in signals:
            loop.add_signal_handler(number, self._on_signal)
        self._warn()
        self._log.note(f"loading {self._options.model}, to serve it on {self._url()}")
        for _ in early:
            self._on_signal()
        keeping = [loop.create_task(self._keep_engine())]
        if self._rack is not None:
            self._replicas_left = len(self._rack.slots)
            keeping += [loop.create_task(self._keep_replica(number)) for number in range(self._replicas_left)]
        keeping += [loop.create_task(self._keep_http(at)) for at in range(len(self._listeners))]
        await self._stopping.wait()
        if self._announced or self._failure is not None or self._rack is not None:
            await self._drain()
        for child in list(self._children):
            child.kill()
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)
        await asyncio.gather(*(child.process.wait() for child in self._children))
        self._log.close()
        if self._failure is not None:
            raise self._failure
        return ExitCode.INTERRUPTED if self._ended_at_once or not self._announced else ExitCode.OK

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            self._ended_at_once = True
            self._log.note("ended at once; any answer still open was cut off")
            for child in list(self._children):
                child.kill()
            return
        answers = "open answers are finished first; " if self._announced else ""
        self._log.note(f"stopping: {answers}another signal ends at once")
        self._stopping.set()

    def _warn(self) -> None:
        options = self._options
        if not self._keys.entries and not is_loopback(options.host):
            self._log.note(
                f"WARNING: without a key, every client that reaches {options.host}:{self._port()} may use this server; "
                f"give --api-key or {KEY_VARIABLE}, or listen on 127.0.0.1"
            )

    async def _drain(self) -> None:
        for child in self._http:
            child.stop()
        answering = self._announced and self._failure is None
        if not answering:  # the process in front of replicas sends every open answer its error
            for child in self._children - self._http:
                child.stop()
        seconds = self._options.drain_seconds if answering else ERRORS_SECONDS
        deadline = time.monotonic() + seconds
        while self._http and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        if self._http and answering:
            self._log.note(f"any answer still open after {seconds:g} s (--drain-seconds) was cut off")
        for child in self._children - self._http:
            child.stop()
        deadline = time.monotonic() + ERRORS_SECONDS
        while self._children - self._http and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    async def _keep_engine(self) -> None:
        """Run the process that HTTP processes talk to; again with --restart, once the first one was ready."""
        module, settings = self._front()
        what = module.replace("_", " ")
        was_ready, quick = False, 0
        while True:
            reported: dict[str, object] = {}
            child = await self._start(module, settings, [self._engine_listener.fileno()])

            def take(message: dict[str, object], reported: dict[str, object] = reported) -> None:
                if "note" in message:
                    self._log.note(str(message["note"]))
                elif "give_up" in message:
                    self._replicas[int(str(message["give_up"]))].kill()
                else:
                    reported.update(message)
                if message.get("ready"):
                    self._model = str(message["model"])
                    self._announce()

            await child.messages(take)
            self._children.discard(child)
            if self._stopping.is_set():
                return
            code = child.process.returncode or 0
            why = str(reported.get("error") or f"the {what} was ended by {_ending(code)}")
            ready = bool(reported.get("ready"))
            was_ready |= ready
            quick = quick + 1 if not ready or time.monotonic() - child.started < QUICK_SECONDS else 0
            if not self._options.restart or not was_ready or quick >= MOST_QUICK_DEATHS:
                again = f", {quick} times in a row; the server gives up" if quick > 1 else ""
                self._failure = MegatokenError(why + again)
                self._failure.exit_code = ExitCode(int(str(reported.get("exit_code", ExitCode.ERROR))))
                self._stopping.set()
                return
            ended = "; open answers ended with an error" if ready else ""
            self._log.note(f"{why}{ended}; the engine is started again")
            if quick:
                await asyncio.sleep(AGAIN_SECONDS * quick)

    def _front(self) -> tuple[str, object]:
        """Which process is in front of the engine, or is the engine's, and its settings."""
        options, rack, listener = self._options, self._rack, self._engine_listener.fileno()
        several = len(self._keys.entries) > 1
        if rack is None:
            return "engine_process", EngineProcessSettings(options, listener, several)
        replicas = len(rack.slots)
        return "router_process", RouterProcessSettings(
            options, listener, several, rack.key, str(rack.path), replicas, rack.cluster
        )

    async def _keep_replica(self, number: int) -> None:
        """Run one replica of this machine; again with --restart, once the server was ready."""
        assert self._rack is not None
        rack, slot = self._rack, self._rack.slots[number]
        router = ReplicaSettings(str(rack.path), rack.key, number, slot.threads, slot.neighbours)
        settings = EngineProcessSettings(self._options, router, several_tenants=False)
        gpus = rack.gpus[number * slot.gpus : (number + 1) * slot.gpus]
        environment = {VISIBLE: ",".join(gpus)} if gpus else {}
        quick = 0
        while True:
            reported: dict[str, object] = {}
            child = await self._start("engine_process", settings, [], environment)
            self._replicas[number] = child

            def take(message: dict[str, object], reported: dict[str, object] = reported) -> None:
                if "note" in message:
                    self._log.note(f"replica {number}: {message['note']}")
                else:
                    reported.update(message)

            await child.messages(take)
            self._children.discard(child)
            if self._stopping.is_set():
                return
            why = str(reported.get("error") or f"ended by {_ending(child.process.returncode or 0)}")
            quick = quick + 1 if time.monotonic() - child.started < QUICK_SECONDS else 0
            if not self._announced or not self._options.restart or quick >= MOST_QUICK_DEATHS:
                self._replicas_left -= 1
                if self._announced and self._replicas_left:
                    again = f" {quick} times in a row" if quick > 1 else ""
                    self._log.note(f"replica {number}: {why}{again}; it is not started again")
                    return
                self._failure = MegatokenError(why if not self._announced else f"no replica is left; the last: {why}")
                self._failure.exit_code = ExitCode(int(str(reported.get("exit_code", ExitCode.ERROR))))
                self._stopping.set()
                return
            self._log.note(f"replica {number}: {why}; it is started again")
            if quick:
                await asyncio.sleep(AGAIN_SECONDS * quick)

    async def _keep_http(self, at: int) -> None:
        """Keep one HTTP process running."""
        listener = self._listeners[at]
        settings = HttpProcessSettings(self._options, self._keys, str(self._path), listener.fileno())
        quick = 0
        while True:
            child = await self._start("http_process", settings, [listener.fileno()])
            self._http.add(child)

            def take(message: dict[str, object]) -> None:
                if message.get("ready"):
                    self._ready_http.add(at)
                    self._announce()

            await child.messages(take)
            self._children.discard(child)
            self._http.discard(child)
            if self._stopping.is_set():
                return
            quick = quick + 1 if time.monotonic() - child.started < QUICK_SECONDS else 0
            what = f"an HTTP process was ended by {_ending(child.process.returncode or 0)}"
            if quick >= MOST_QUICK_DEATHS:
                self._failure = MegatokenError(f"{what}, {quick} times in a row; its messages above say why")
                self._stopping.set()
                return
            self._log.note(f"{what}; it is started again")
            if quick > 1:
                await asyncio.sleep(AGAIN_SECONDS)

    async def _start(
        self, module: str, settings: object, descriptors: list[int], more: Mapping[str, str] | None = None
    ) -> _Child:
        """Start a process; ``more``: of its environment."""
        ours, theirs = socket.socketpair()
        environment = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE} | dict(more or {})
        if module == "engine_process":  # killed, it leaves files of its ranks, which go with the server's folder
            environment["TMPDIR"] = str(self._path.parent)
        reader, writer = await asyncio.open_connection(sock=ours)
        with theirs:  # a process whose start is cancelled is killed by asyncio, and no later wait can be cancelled
            # -P: modules of the working directory are not imported.
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-P", "-m", f"megatoken.serve.{module}", str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), *descriptors),
                process_group=0,  # a Ctrl-C in the terminal is for this process
                env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        child = _Child(process, reader, writer, time.monotonic())
        self._children.add(child)
        writer.write(first_message(settings))
        if self._stopping.is_set():
            child.stop()  # it did not exist yet when the others were stopped
        return child

    def _announce(self) -> None:
        ready = self._model is not None and len(self._ready_http) == len(self._listeners)
        if not ready or self._announced or self._stopping.is_set():
            return
        self._announced = True
        seconds = time.monotonic() - self._began
        made_up = f"; tokens are made up: {stand_in}" if (stand_in := self._options.stand_in) else ""
        self._log.note(f"serving {self._model} on {self._url()} (ready in {seconds:.1f} s{made_up})")

    def _url(self) -> str:
        scheme = "https" if self._options.tls_certificate is not None else "http"
        host = f"[{self._options.host}]" if ":" in self._options.host else self._options.host
        return f"{scheme}://{host}:{self._port()}"

    def _port(self) -> int:
        return int(self._listeners[0].getsockname()[1])


def _plan_rack(options: ServeConfig, path: Path) -> _Rack:
    """A Ray cluster, if there is one; otherwise processes of this machine.

    Raises:
        UsageError: the cluster that was named cannot be used.
        CapacityError: more replicas than this machine has GPUs or cores for.
    """
    assert options.rack.cluster is not None
    cluster = find_cluster(options.rack.cluster, lambda line: print(f"megatoken: {line}", file=sys.stderr, flush=True))
    key = secrets.token_bytes(KEY_BYTES)
    if cluster is not None:
        return _Rack(path, key, cluster)
    return _Rack(path, key, "", slots_on(options, [this_machine(options)]), visible_gpus(options))


def _listen(options: ServeConfig) -> list[socket.socket]:
    """A listening socket for each HTTP process, all on one port.

    With several, the kernel shares connections out between them by hash. This process keeps them open, so that no
    connection is lost while an HTTP process is started again.
    """
    try:
        kind, _, _, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise UsageError(f"--host: {options.host} is not an address of this machine: {error.strerror}") from error
    several = options.http_processes > 1
    sockets: list[socket.socket] = []
    try:
        first = _bound(kind, address, shared=False)  # fails where another program has the port, shared or not
        if several:
            address = (address[0], first.getsockname()[1], *address[2:])
            first.close()
            sockets += [_bound(kind, address, shared=True) for _ in range(options.http_processes)]
        else:
            sockets.append(first)
        for one in sockets:
            one.listen(BACKLOG)
    except OSError as error:
        why = error.strerror or str(error)
        flag = "host" if error.errno == errno.EADDRNOTAVAIL else "port"
        problem = f"cannot listen on {options.host}:{options.port}: {why}"
        raise UsageError(f"--{flag}: {problem}; give another {flag}") from error
    return sockets


def _bound(kind: int, address: tuple[object, ...], *, shared: bool) -> socket.socket:
    one = socket.socket(kind, socket.SOCK_STREAM)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        one.bind(address)
    except OSError:
        one.close()
        raise
    return one


def _check_model_files(options: ServeConfig) -> None:
    """Refuse a chat template that cannot be used before a weight is loaded."""
    from megatoken.serve.context import model_files

    folder = model_folder(options.model)
    model_files(folder if folder.is_dir() else None, options)


def _ending(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
