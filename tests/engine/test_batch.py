"""A step's arrays."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatoken.engine.batch import StepArrays, pad_decodes, step_arrays
from megatoken.engine.scheduler import Scheduler

PAGE_SIZE = 4


def decodes(lengths: list[int]) -> StepArrays:
    """A step in which every one of some sequences decodes, as the scheduler plans it."""
    scheduler = Scheduler(max_rows=400, max_sequences=16, page_size=PAGE_SIZE, num_pages=400, max_length=64)
    for ticket, length in enumerate(lengths):
        scheduler.add(ticket, length, 3)
    scheduler.plan()
    plan = scheduler.plan()
    return step_arrays(plan, scheduler.page_table, PAGE_SIZE, lambda *_: pytest.fail("a prompt"), lambda rows: rows)


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12), more=st.integers(0, 5), wider=st.integers(0, 3))
def test_added_decodes_read_and_write_nothing_of_the_others(lengths: list[int], more: int, wider: int) -> None:
    arrays = decodes(lengths)
    rows, width = len(lengths) + more, arrays.pages.shape[1] + wider
    padded = pad_decodes(arrays, rows, width)
    for name in ("token_ids", "table_slots", "positions", "cache_slots", "lengths", "sample_rows", "sample_slots"):
        values = getattr(padded, name)
        assert values.dtype == np.int32 and len(values) == rows
        np.testing.assert_array_equal(values[: len(lengths)], getattr(arrays, name))
    np.testing.assert_array_equal(padded.pages[: len(lengths), : arrays.pages.shape[1]], arrays.pages)
    assert padded.pages.shape == (rows, width)
    assert padded.decodes == padded.samples == padded.chunk_rows[-1] == rows
    added = slice(len(lengths), None)
    assert (padded.table_slots[added] == -1).all()
    assert not padded.lengths[added].any() and not padded.cache_slots[added].any() and not padded.pages[added].any()
