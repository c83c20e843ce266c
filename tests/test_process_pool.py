"""Tasks in processes of their own: their results, their errors, and those that end the process."""

import operator
import os
import sys
import time
from functools import partial

import pytest

from megatoken.errors import MegatokenError
from megatoken.processes import in_order


def sleep_here(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def test_results_come_in_the_order_of_the_tasks_and_progress_reaches_all() -> None:
    done: list[int] = []
    results = in_order(partial(operator.truediv, 6.0), [1.0, 2.0, 3.0, 4.0], 2, lost=abs, finished=done.append)
    assert list(results) == [6.0, 3.0, 2.0, 1.5]
    assert sorted(done) == [1, 2, 3, 4]


@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_task_raises_is_raised_here(workers: int) -> None:
    with pytest.raises(ZeroDivisionError):
        list(in_order(partial(operator.truediv, 1.0), [1.0, 0.0, 2.0], workers, lost=abs))


def test_large_tasks_with_large_results_do_not_wait_for_each_other() -> None:
    """Each is more than a socket holds."""
    tasks = [bytes([97 + number]) * 1_000_000 for number in range(6)]
    assert list(in_order(bytes.upper, tasks, 2, lost=bytes)) == [task.upper() for task in tasks]


def test_long_tasks_run_side_by_side() -> None:
    """The pid of the process that slept: each of two tasks has one of its own."""
    assert len(set(in_order(sleep_here, [1.0, 1.0], 2, lost=int))) == 2


def test_what_cannot_be_sent_back_is_no_lost_process() -> None:
    with pytest.raises(TypeError, match="cannot pickle"):
        list(in_order(open, [os.devnull, os.devnull], 2, lost=abs))
    with pytest.raises(MegatokenError, match="SystemExit: 3"):  # not an Exception, as a library's panic is none
        list(in_order(sys.exit, [3, 3], 2, lost=abs))


def test_a_task_that_ends_its_process_is_lost_and_no_other() -> None:
    assert list(in_order(os._exit, [3, 4, 5], 2, lost=operator.neg)) == [-3, -4, -5]
