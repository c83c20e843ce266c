"""Examining many runs on all cores; few or small ones in this process, since starting others would take longer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import wait

from megatoken.audit.examine import Examined, Job, blank_run, examine, not_examined
from megatoken.files import display

FEW_RUNS = 24
SMALL_BYTES = 64 * 2**20
WAITING_JOBS = 2  # of a worker: the one that it examines, and the next
MOST_AHEAD = 2_000  # runs examined before one that takes long; they wait for it in memory

Progress = Callable[[int, int], None]  # runs done, of how many; 0: not known yet


def examine_all(
    jobs: Sequence[Job], progress: Progress | None = None, workers: int | None = None
) -> Iterator[Examined]:
    """Examines every job, in their order; by default with a process for each core that this one may use."""
    workers = workers or _cores()
    size = sum(job.files.size_bytes for job in jobs)
    if workers >= 2 and len(jobs) >= 2 and (len(jobs) >= FEW_RUNS or size >= SMALL_BYTES):
        yield from _in_processes(jobs, min(workers, len(jobs)), progress)
        return
    for done, job in enumerate(jobs, 1):
        examined = examine(job)
        if progress:
            progress(done, len(jobs))
        yield examined


class _Worker:
    """A process that examines what it is sent, in its own session: Ctrl-C reaches this process, which ends it."""

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        self.started = False
        self.jobs: deque[int] = deque()
        command = [sys.executable, "-P", "-m", "megatoken.audit.worker", str(theirs.fileno())]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        theirs.close()

    def kill(self) -> None:
        """Ends the process at once."""
        self._process.kill()
        self._process.wait()
        self.connection.close()


class _Pool:
    """Jobs, the processes that work on them, and the results that wait for their turn."""

    def __init__(self, jobs: Sequence[Job], progress: Progress | None) -> None:
        self._jobs = jobs
        self._progress = progress
        self._todo = deque(range(len(jobs)))
        self._done: dict[int, Examined] = {}
        self._given = 0
        self.workers: list[_Worker] = []

    def add_worker(self) -> None:
        """Starts one more worker if the system allows it."""
        with suppress(OSError):
            self.workers.append(_Worker())

    def in_order(self) -> Iterator[Examined]:
        """The result of each job, in their order."""
        while self._given < len(self._jobs):
            while self._given not in self._done:
                if not self.workers:  # none could start
                    self._finish(index := self._todo.popleft(), examine(self._jobs[index]))
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
            examined = worker.connection.recv()
        except (EOFError, OSError):
            self._remove(worker)
            return
        if worker.started:
            self._finish(worker.jobs.popleft(), examined)
        worker.started = True
        self._send(worker)

    def _remove(self, worker: _Worker) -> None:
        """Removes a worker that died. Only the run that it was examining is lost."""
        self.workers.remove(worker)
        worker.kill()
        if worker.started and worker.jobs:
            job = self._jobs[index := worker.jobs.popleft()]
            cause = "the process that read it died; is there enough memory?"
            self._finish(index, Examined(blank_run(job), tuple(not_examined(display(job.files.folder), cause))))
            self.add_worker()
        self._todo.extendleft(reversed(worker.jobs))

    def _finish(self, index: int, examined: Examined) -> None:
        self._done[index] = examined
        if self._progress:
            self._progress(self._given + len(self._done), len(self._jobs))

    def _send(self, worker: _Worker) -> None:
        most = self._given + MOST_AHEAD
        while worker.started and len(worker.jobs) < WAITING_JOBS and self._todo and self._todo[0] < most:
            worker.jobs.append(self._todo.popleft())
            with suppress(OSError):  # a worker that died is noticed next
                worker.connection.send(self._jobs[worker.jobs[-1]])


def _in_processes(jobs: Sequence[Job], count: int, progress: Progress | None) -> Iterator[Examined]:
    pool = _Pool(jobs, progress)
    try:
        for _ in range(count):
            pool.add_worker()
        yield from pool.in_order()
    finally:
        for worker in pool.workers:
            worker.kill()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
