"""Examining many runs on all cores; few or small ones in this process, where starting others would cost more."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

from megatoken.audit.examine import Examined, Job, blank_run, examine, not_examined
from megatoken.audit.reading import display

FEW_RUNS = 24
SMALL_BYTES = 64 * 2**20
CHUNK = 8

Progress = Callable[[int, int], None]  # done, of how many; of 0: how many is not known yet


def examine_all(
    jobs: Sequence[Job], progress: Progress | None = None, workers: int | None = None
) -> Iterator[Examined]:
    """Examines every job, in their order.

    Args:
        jobs: the runs.
        progress: told after each run.
        workers: processes; by default one for each core this process may use.
    """
    workers = workers or _cores()
    size = sum(job.files.size_bytes for job in jobs)
    alone = workers < 2 or len(jobs) < 2 or (len(jobs) < FEW_RUNS and size < SMALL_BYTES)
    results = map(examine, jobs) if alone else _in_processes(jobs, workers)
    for done, result in enumerate(results, 1):
        if progress:
            progress(done, len(jobs))
        yield result


def _in_processes(jobs: Sequence[Job], workers: int) -> Iterator[Examined]:
    """Spawned, not forked: a progress display has threads. A worker that dies costs the runs it had, not the audit."""
    done = 0
    chunk = CHUNK if len(jobs) > 4 * CHUNK * workers else 1
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_ignore_interrupts) as pool:
        try:
            for result in pool.map(examine, jobs, chunksize=chunk):
                done += 1
                yield result
        except BrokenProcessPool:
            pass
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if done == 0:  # no worker could start, as under an interpreter that reads its program from a pipe
        yield from map(examine, jobs)
        return
    for job in jobs[done:]:
        observation = not_examined(display(job.files.folder), "the process that read it died; is there enough memory?")
        yield Examined(blank_run(job), (observation,))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
