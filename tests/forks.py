"""Processes that begin with everything imported, so that a test of a whole process does not wait seconds for imports.

``python forks.py FD`` imports PyTorch and the rest once. Then it becomes, fork by fork, any command that a test starts:
a process of its own, with its own signals, streams, limits, and end of the interpreter. How a process starts from
nothing is for tests that start ``python`` themselves.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

IMPORTED = (
    *("torch", "pyarrow.parquet", "tokenizers", "safetensors.torch", "rich.progress", "psutil", "pandas"),
    *("megatoken.cli.application", "megatoken.cli.run", "megatoken.harness.command", "megatoken.harness.soak"),
    *("megatoken.targets.in_process", "megatoken.engine.model", "megatoken.engine.ops.cpu", "megatoken.report.page"),
    *("megatoken.harness.run", "megatoken.runs.writer", "mlperf_loadgen", "pytest"),
)
CLIENT_SAMPLES = 2_000  # that a run with limits measures its client with, in place of 20,000
MOST_BYTES = 2**20  # of one request: a command line and an environment


class Process:
    """A process that another one forked, with what tests use of ``subprocess.Popen``."""

    def __init__(
        self, command: Sequence[str], environment: dict[str, str], before: Callable[[], object] | None
    ) -> None:
        self.args = command
        self.returncode: int | None = None
        (out, child_out), (err, child_err), (self._status, child_status) = (os.pipe() for _ in range(3))
        request = pickle.dumps((command, environment, str(Path.cwd()), before))
        socket.send_fds(_server(), [request], [child_out, child_err, child_status])
        for descriptor in (child_out, child_err, child_status):
            os.close(descriptor)
        self.stdout, self.stderr = os.fdopen(out), os.fdopen(err)
        self.pid = self._read_number()

    def _read_number(self) -> int:
        number = os.read(self._status, 8)
        if not number:
            raise RuntimeError(f"the process that forks others has ended; {self.args} is lost")
        return int.from_bytes(number, "little", signed=True)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(list(self.args), timeout or 0)
            self.returncode = self._read_number()
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(timeout=0)
        except subprocess.TimeoutExpired:
            return None

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        with ThreadPoolExecutor(2) as pool:
            out, err = (pool.submit(stream.read) for stream in (self.stdout, self.stderr))
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
            return out.result(), err.result()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        self.stdout.close()
        self.stderr.close()
        self.wait()
        os.close(self._status)


@contextmanager
def forked(
    *command: object, environment: dict[str, str], before: Callable[[], object] | None = None
) -> Iterator[Process]:
    """``python COMMAND`` of a script, of ``-m`` and a module, or ``-c`` and a program; it does not outlive the block.

    Args:
        command: words of the command line after ``python``.
        environment: all variables of the process.
        before: called in the process first; must be picklable.
    """
    process = Process(list(map(str, command)), environment, before)
    try:
        yield process
    finally:
        process.kill()
        process.close()


@functools.cache
def _server() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, __file__, str(theirs.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,  # so that its streams, which its forks inherit, have buffers as those of a pipe do
        stderr=subprocess.PIPE,
        pass_fds=[theirs.fileno()],
        env=environment,
    )
    theirs.close()

    def end() -> None:
        ours.close()
        process.communicate()

    atexit.register(end)
    return ours


def _serve(requests: socket.socket) -> tuple[list[str], Callable[[], object] | None]:
    """Returns in each fork, with its command line and what to call first; the server itself ends in here."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, MOST_BYTES, 3)
        if not request:
            sys.exit()
        if os.fork():
            for descriptor in descriptors:
                os.close(descriptor)
            while _reap():
                pass
            continue
        # A fork that waits for the process proper, because only a parent learns how it ended.
        requests.close()
        *streams, status = descriptors
        process = os.fork()
        if process:
            for descriptor in (*streams, 0, 1, 2):
                os.close(descriptor)
            signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP})
            os.write(status, process.to_bytes(8, "little"))
            code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            os.write(status, code.to_bytes(8, "little", signed=True))
            os._exit(0)
        os.close(status)
        for number, stream in enumerate(streams, 1):
            os.dup2(stream, number)
            os.close(stream)
        command, environment, folder, before = pickle.loads(request)
        sys.dont_write_bytecode = True  # where no file may be large, Python would leave half a module for all others
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        return command, before


def _reap() -> bool:
    """Whether a fork had ended, which is forgotten then."""
    try:
        return os.waitpid(-1, os.WNOHANG)[0] > 0
    except ChildProcessError:
        return False


def _run(command: list[str]) -> None:
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    elif command[0] == "-c":
        sys.argv = ["-c", *command[2:]]
        sys.path[0] = ""
        exec(command[1], {"__name__": "__main__"})
    else:
        sys.argv = command
        sys.path[0] = str(Path(command[0]).parent)
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    for module in IMPORTED:
        importlib.import_module(module)
    sys.modules["megatoken.harness.client_capacity"].SAMPLES = CLIENT_SAMPLES  # type: ignore[attr-defined]
    gc.freeze()  # or every fork copies what its collector looks at
    requested, first = _serve(socket.socket(fileno=int(sys.argv[1])))
    if first is not None:
        first()
    _run(requested)
