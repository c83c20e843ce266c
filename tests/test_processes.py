"""Tasks in processes of their own: their results, their errors, and those that end the process."""

import operator
import os
from functools import partial

import pytest

from megatoken.processes import in_order


def test_results_come_in_the_order_of_the_tasks_and_progress_reaches_all() -> None:
    done: list[int] = []
    results = in_order(partial(operator.truediv, 6.0), [1.0, 2.0, 3.0, 4.0], 2, lost=abs, finished=done.append)
    assert list(results) == [6.0, 3.0, 2.0, 1.5]
    assert sorted(done) == [1, 2, 3, 4]


@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_task_raises_is_raised_here(workers: int) -> None:
    with pytest.raises(ZeroDivisionError):
        list(in_order(partial(operator.truediv, 1.0), [1.0, 0.0, 2.0], workers, lost=abs))


def test_a_task_that_ends_its_process_is_lost_and_no_other() -> None:
    assert list(in_order(os._exit, [3, 4, 5], 2, lost=operator.neg)) == [-3, -4, -5]
