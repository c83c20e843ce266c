"""One test in a process of its own: it can hang or crash without taking the others along.

The processes are forked from a server that has loaded PyTorch and started no thread and no GPU, so each starts within
milliseconds and with nothing of the one before.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import forkserver, get_context, resource_tracker
from multiprocessing.connection import Connection

from megatoken.errors import CapacityError, MegatokenError
from megatoken.hardware.core_wait import CoreWait
from megatoken.hardware.qualify.catalog import HardwareTest
from megatoken.hardware.qualify.values import NotRun, Outcome, Setting

PRELOADED = [
    "numpy",
    "torch",
    "megatoken.hardware.qualify.processes",  # else each process imports the package of this module to find ``_work``
    "megatoken.hardware.qualify.cpu_tests",
    "megatoken.hardware.qualify.engine_steps",
]
GRACE_SECONDS = 5.0
CPU_ALLOCATOR = "DefaultCPUAllocator: "
"""In PyTorch's message before what it could not allocate."""
STARVED = 0.3
"""A test that waited for cores this share of its limit was not slow by itself."""


@dataclass(frozen=True, slots=True)
class Returned:
    """One outcome, and the share of the time that it took in which threads waited for a core; None: unknown."""

    outcome: Outcome
    core_wait_share: float | None


@dataclass(frozen=True, slots=True)
class Ended:
    """How a test ended: its outcomes so far, its seconds, and what went wrong if anything."""

    returned: tuple[Returned, ...]
    seconds: float
    fault: str | None


def start_server() -> None:
    """Start the process that others are forked from, unless it runs: it loads PyTorch while the caller goes on."""
    get_context("forkserver").set_forkserver_preload(PRELOADED)
    resource_tracker.ensure_running()  # its start would end the block
    # Ctrl-C also reaches the server, which would print a traceback while it loads PyTorch: it inherits the block.
    with _ctrl_c_later():
        forkserver.ensure_running()


@contextmanager
def _ctrl_c_later() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class RunningTest:
    """A test whose function runs in a process of its own, which is ended after the limit.

    ``gpu``: the only one that the process sees, as CUDA_VISIBLE_DEVICES names it; None: all.
    """

    def __init__(self, test: HardwareTest, setting: Setting, limit_seconds: float, gpu: str | None = None) -> None:
        start_server()
        context = get_context("forkserver")
        self._test, self._limit_seconds = test, limit_seconds
        self._ours, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_work, args=(test, setting, limit_seconds, theirs, gpu), daemon=True)
        with _ctrl_c_later():  # a process that gets half of what it is sent prints a traceback
            self._process.start()
        self._began = time.monotonic()  # the first start waits until the server has loaded PyTorch
        self._starved = CoreWait(self._process.pid)
        theirs.close()

    def ended(self) -> Ended:
        """Wait for its end; to be called once.

        A test that was slow because it waited for cores is not at fault: it did not run.
        """
        test, process = self._test, self._process
        returned: list[Returned] = []
        fault: str | None = None
        finished = False
        try:
            while not finished:
                if not self._ours.poll(max(0.0, self._began + self._limit_seconds - time.monotonic())):
                    waited = self._starved.waited_seconds()
                    stopped = f"did not end within {self._limit_seconds:.0f} s and was stopped"
                    if waited > STARVED * self._limit_seconds:
                        enable = "stop other work and repeat"
                        reason = f"{stopped}: it waited {waited:.0f} s for cores"
                        returned.append(Returned(NotRun(test.name, test.title, reason, enable), None))
                    else:
                        fault = stopped
                    break
                match self._ours.recv():
                    case Returned() as one:
                        returned.append(one)
                    case str() | None as fault:
                        finished = True
        except EOFError:
            process.join(GRACE_SECONDS)
            fault = f"its process {ending_of(process.exitcode)}"
        finally:
            if not finished:  # before its pipe closes: otherwise it can still print that the pipe is broken
                process.kill()
            process.join(GRACE_SECONDS)
            self._ours.close()
        return Ended(tuple(returned), time.monotonic() - self._began, fault)

    def stop(self) -> None:
        """End it, if it has not ended, and forget what it returned."""
        self._process.kill()
        self._process.join(GRACE_SECONDS)
        self._ours.close()


def ending_of(exit_code: int | None) -> str:
    """How a process ended, in words; None: it did not."""
    if exit_code is None or exit_code >= 0:
        return f"ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    return f"was ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def _work(test: HardwareTest, setting: Setting, limit_seconds: float, connection: Connection, gpu: str | None) -> None:
    """The test's process. Ctrl-C reaches the parent, which ends this one; the alarm does if the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limit_seconds + GRACE_SECONDS)
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    os.dup2(2, 1)  # standard output belongs to the result
    module, _, name = test.function.partition(":")
    fault: str | None = None

    def send(message: Returned | str | None) -> None:
        try:
            connection.send(message)
        except BrokenPipeError:  # the parent was interrupted, perhaps while it started this process
            os._exit(0)

    try:
        run = getattr(import_module(module), name)
        wait = CoreWait()
        for outcome in run(setting):
            send(Returned(outcome, wait.share()))
            wait = CoreWait()
    except Exception as error:
        enable, (words, *_) = _advice_on_memory(error), str(error).splitlines() or [""]
        if enable is not None:
            reason = words.rpartition(CPU_ALLOCATOR)[2] or "not enough memory"
            send(Returned(NotRun(test.name, test.title, reason, enable), None))
        else:
            fault = str(error) if isinstance(error, MegatokenError) else f"{type(error).__name__}: {words}"
    send(fault)
    connection.close()
    sys.stderr.flush()
    os._exit(0)  # a GPU that hangs while it is torn down must not keep the result


def _advice_on_memory(error: Exception) -> str | None:
    """What to do about an error for want of memory; None of any other error."""
    if type(error).__name__ == "OutOfMemoryError":  # PyTorch's on a GPU, which this module does not import
        return "stop other work on the GPU"
    # On a CPU PyTorch raises a RuntimeError.
    if isinstance(error, CapacityError | MemoryError) or CPU_ALLOCATOR in str(error):
        return "free memory, or stop other work"
    return None
