"""One function of many tasks on all cores, results in order; a process that dies costs only the task that it had.

``python -m megatoken.processes FD`` is one of these processes: it receives the function, then tasks, and returns their
results until the connection is closed. It imports the function's module, and not that of the program, which may lack
the guard that other ways to start processes need.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any, Generic, TypeVar

from megatoken.errors import MegatokenError

MOST_AHEAD = 2_000  # tasks done before one that takes long; their results wait for it in memory

Task = TypeVar("Task")
Result = TypeVar("Result")


def usable_cores() -> int:
    """How many cores this process may use."""
    return len(usable_core_numbers())


def usable_core_numbers() -> set[int]:
    """Those cores, as the kernel numbers them."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def allow_many_files() -> None:
    """Raises this process's soft limit of open files: a connection is a file, and 1,024 are the usual limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def in_order(
    function: Callable[[Task], Result],
    tasks: Sequence[Task],
    workers: int,
    lost: Callable[[Task], Result],
    finished: Callable[[int], None] | None = None,
) -> Iterator[Result]:
    """The result of each task, in their order. What ``function`` raises is raised here.

    Args:
        function: A function of a module, or a ``partial`` of one.
        tasks: Each goes to one process.
        workers: Processes. With fewer than two, or where none can start, this process does the work.
        lost: Gives the result of a task whose process died, or raises.
        finished: Called with the number of tasks that are done, whenever it grows.
    """
    pool = _Pool(function, tasks, lost, finished)
    try:
        for _ in range(min(workers, len(tasks)) if workers > 1 else 0):
            pool.add_worker()
        yield from pool.in_order()
    finally:
        for worker in pool.workers:
            worker.kill()


class _Worker:
    """A process that does what it is sent, in its own session: Ctrl-C reaches this process, which ends it."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.connection, theirs = Pipe()
        self.started = False  # its first message says so: one that cannot start was not killed by a task
        self.task: int | None = None  # one at a time: a process that sends a result reads no task, and both would wait
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "megatoken.processes", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        theirs.close()
        self.send(function)

    def send(self, message: object) -> None:
        """Sends a message; a process that died is noticed when the connection is read."""
        with suppress(OSError):
            self.connection.send(message)

    def kill(self) -> None:
        """Ends the process at once."""
        self._process.kill()
        self._process.wait()
        self.connection.close()


class _Pool(Generic[Task, Result]):
    """Tasks, the processes that work on them, and the results that wait for their turn."""

    def __init__(
        self,
        function: Callable[[Task], Result],
        tasks: Sequence[Task],
        lost: Callable[[Task], Result],
        finished: Callable[[int], None] | None,
    ) -> None:
        self._function, self._tasks, self._lost, self._finished = function, tasks, lost, finished
        self._todo = deque(range(len(tasks)))
        self._done: dict[int, Result] = {}
        self._given = 0
        self.workers: list[_Worker] = []

    def add_worker(self) -> None:
        """Starts one more worker if the system allows it."""
        with suppress(OSError):
            self.workers.append(_Worker(self._function))

    def in_order(self) -> Iterator[Result]:
        """The result of each task, in their order."""
        while self._given < len(self._tasks):
            while self._given not in self._done:
                if not self.workers:
                    self._finish(index := self._todo.popleft(), self._function(self._tasks[index]))
                    continue
                ready = wait([worker.connection for worker in self.workers])
                for worker in [worker for worker in self.workers if worker.connection in ready]:
                    self._receive(worker)
            self._given += 1
            yield self._done.pop(self._given - 1)
            for worker in self.workers:
                self._send(worker)

    def _receive(self, worker: _Worker) -> None:
        try:
            result, error = worker.connection.recv()
        except (EOFError, OSError):
            self._remove(worker)
            return
        if error is not None:
            raise error
        if worker.task is not None:
            self._finish(worker.task, result)
            worker.task = None
        worker.started = True
        self._send(worker)

    def _remove(self, worker: _Worker) -> None:
        """Removes a worker that died, and takes the task that it was working on for lost."""
        self.workers.remove(worker)
        worker.kill()
        if worker.task is not None:
            self._finish(worker.task, self._lost(self._tasks[worker.task]))
            self.add_worker()

    def _finish(self, index: int, result: Result) -> None:
        self._done[index] = result
        if self._finished:
            self._finished(self._given + len(self._done))

    def _send(self, worker: _Worker) -> None:
        if worker.started and worker.task is None and self._todo and self._todo[0] < self._given + MOST_AHEAD:
            worker.task = self._todo.popleft()
            worker.send(self._tasks[worker.task])


def serve(connection: Connection) -> None:
    """Does tasks until the connection is closed."""
    try:
        function = connection.recv()
        connection.send((None, None))
        while True:
            connection.send_bytes(_outcome(function, connection.recv()))
    except (EOFError, OSError):
        return


def _outcome(function: Callable[[Any], Any], task: object) -> bytes:
    """The pickled result and error of a task; a panic of a library, which is no ``Exception``, becomes one."""
    try:
        return bytes(ForkingPickler.dumps((function(task), None)))
    except BaseException as error:
        with suppress(Exception):
            if isinstance(error, Exception):
                return bytes(ForkingPickler.dumps((None, error)))
        return bytes(ForkingPickler.dumps((None, MegatokenError(f"{type(error).__name__}: {error}"))))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
