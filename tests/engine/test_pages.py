from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatoken.engine.pages import PageAllocator


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def test_every_page_is_given_once():
    allocator = PageAllocator(7)
    given_pages = np.concatenate([allocator.allocate(3), allocator.allocate(0), allocator.allocate(4)])
    assert given_pages.dtype == np.int32
    assert sorted(given_pages) == list(range(7))
    assert allocator.free == 0


@pytest.mark.parametrize("n", [3, -1])
def test_allocating_what_is_not_there_takes_nothing(n: int):
    allocator = PageAllocator(2)
    with pytest.raises(ValueError, match=f"cannot allocate {n} pages: 2 of 2 are free"):
        allocator.allocate(n)
    assert sorted(allocator.allocate(2)) == [0, 1]


@pytest.mark.parametrize(
    ("released", "message"),
    [
        (pages(0, 3), "page 3 is released twice"),
        (pages(1, 0, 1), "page 1 is released twice"),
        (pages(0, 4), "cannot release pages 0..4: the cache has 4 pages"),
        (pages(-1, 0), "cannot release pages -1..0"),
    ],
    ids=["free already", "named twice", "beyond the end", "negative"],
)
def test_releasing_what_is_not_held_changes_nothing(released: np.ndarray, message: str):
    allocator = PageAllocator(4)
    assert sorted(allocator.allocate(3)) == [0, 1, 2]
    with pytest.raises(ValueError, match=message):
        allocator.release(released)
    assert allocator.free == 1
    allocator.release(pages(2, 0, 1))
    assert sorted(allocator.allocate(4)) == [0, 1, 2, 3]


def test_what_was_allocated_is_the_callers_own():
    allocator = PageAllocator(4)
    first = allocator.allocate(2)
    allocator.release(first.copy())
    first[:] = 3
    assert sorted(allocator.allocate(4)) == [0, 1, 2, 3]


@given(num_pages=st.integers(1, 12), actions=st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=60))
def test_free_and_held_pages_are_a_partition(num_pages: int, actions: list[tuple[bool, int]]):
    allocator = PageAllocator(num_pages)
    held: list[int] = []
    for take, n in actions:
        if take and n <= allocator.free:
            held.extend(allocator.allocate(n).tolist())
        elif not take:
            allocator.release(pages(*held[:n]))
            del held[:n]
        assert len(set(held)) == len(held)
        assert set(held) <= set(range(num_pages))
        assert allocator.free == num_pages - len(held)
