"""What LoadGen draws from its seeds, drawn again: std::mt19937 with the shuffle and distributions of GNU's C++ library.

The order of ``loaded_qsl_set``, the rows of an accuracy log and the arrival times of the Server scenario follow from
the seeds alone (loadgen.cc: GenerateLoadableSets, GenerateQueries), so a log that shows others was not written by a
run with those seeds. GNU's library changed its bounded integers in GCC 11; both are computed (LoadGen's wheels 5.0.10
to 5.0.15 are of the older kind). Clang's library would give yet another order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

MOST_ROWS = 200_000
MOST_ARRIVALS = 5_000_000
MOST_DRAWS = 500_000
_WORD = 2**32

Draw = Callable[[int], int]  # bound -> integer in [0, bound)


@dataclass(frozen=True, slots=True)
class Load:
    """What decides how LoadGen draws rows from its library."""

    scenario: str
    accuracy: bool  # every row once
    permuted: bool  # sample_concatenate_permutation: every row equally often
    min_queries: int  # effective_min_query_count


class Twister:
    """std::mt19937: its 32-bit words, and bounded integers as std::uniform_int_distribution makes of them."""

    def __init__(self, seed: int, before_gcc_11: bool = False) -> None:
        """Starts the sequence; LoadGen's 64-bit seeds are taken modulo 2^32, as the C++ constructor does."""
        generator = np.random.MT19937()
        generator._legacy_seeding(seed % _WORD)  # the seeding that std::mt19937 specifies
        self._generator = generator
        self._words = self._stream()
        self.below: Draw = self._below_before_gcc_11 if before_gcc_11 else self._below

    def words(self, count: int) -> NDArray[np.uint64]:
        """The next ``count`` 32-bit words, if none was taken one by one before."""
        return self._generator.random_raw(count)

    def _stream(self) -> Iterator[int]:
        while True:
            yield from self._generator.random_raw(4096).tolist()

    def _below(self, bound: int) -> int:
        product = next(self._words) * bound
        low = product % _WORD
        if low < bound:
            threshold = -bound % _WORD % bound
            while low < threshold:
                product = next(self._words) * bound
                low = product % _WORD
        return product // _WORD

    def _below_before_gcc_11(self, bound: int) -> int:
        scaling = (_WORD - 1) // bound
        past = bound * scaling
        while (word := next(self._words)) >= past:
            pass
        return word // scaling


def shuffle(values: list[int], draw: Draw) -> None:
    """std::shuffle in place: two positions from one draw while the range is small enough, then one by one."""
    size = len(values)
    if size == 0:
        return
    if (_WORD - 1) // size < size:
        for place in range(1, size):
            other = draw(place + 1)
            values[place], values[other] = values[other], values[place]
        return
    place = 1
    if size % 2 == 0:
        other = draw(2)
        values[1], values[other] = values[other], values[1]
        place = 2
    while place < size:
        both = draw((place + 1) * (place + 2))
        for other in divmod(both, place + 2):
            values[place], values[other] = values[other], values[place]
            place += 1


@lru_cache(maxsize=32)
def library_order(seed: int, rows: int, before_gcc_11: bool = False) -> tuple[int, ...]:
    """All rows of a data set in the order in which ``qsl_rng_seed`` loads them."""
    order = list(range(rows))
    shuffle(order, Twister(seed, before_gcc_11).below)
    return tuple(order)


@lru_cache(maxsize=64)
def issued_rows(
    seed: int, library: tuple[int, ...], load: Load, count: int, before_gcc_11: bool = False
) -> tuple[int, ...]:
    """The row that each of the first ``count`` samples asks for, by sequence id.

    Args:
        seed: sample_index_rng_seed.
        library: the set as loaded; of an accuracy run the only one.
        load: what decides how rows are drawn.
        count: samples.
        before_gcc_11: as in ``library_order``.

    Raises:
        ValueError: too many draws to repeat, or a load that draws otherwise.
    """
    passes = 1 if load.accuracy else math.ceil(load.min_queries / len(library))
    if (
        passes < 1
        or (passes + 3) * len(library) + count > MOST_DRAWS
        or load.scenario not in ("Offline", "Server", "SingleStream")
    ):
        raise ValueError("cannot be drawn again")
    draw = Twister(seed, before_gcc_11).below
    first: list[int] = []
    if load.accuracy:
        first = list(range(len(library)))
        shuffle(first, draw)
    shuffle(list(range(len(library))), draw)  # for unique samples, drawn whether used or not
    equal, order = [], list(range(len(library)))
    for _ in range(passes):
        shuffle(order, draw)
        equal += order
    if load.scenario == "Offline":
        rows: list[int] = []
        while len(rows) < count:
            again = list(library)
            if load.permuted:
                shuffle(again, draw)
            rows += again
        return tuple(rows[:count])
    if load.permuted:
        return tuple(library[equal[place % len(equal)]] for place in range(count))
    if load.accuracy:
        return tuple(library[place] for place in first[:count])
    return tuple(library[draw(len(library))] for _ in range(count))


def arrival_seconds(seed: int, queries_per_second: float, count: int) -> tuple[float, float]:
    """When the last of ``count`` Poisson arrivals is due, and when the one after it would be; the first is due at 0.

    Args:
        seed: schedule_rng_seed.
        queries_per_second: the offered rate.
        count: queries, at most MOST_ARRIVALS.
    """
    twister = Twister(seed)
    last = after = 0
    done = 0
    while done < count:
        size = min(count - done, 500_000)
        words = twister.words(2 * size).astype(np.float64).reshape(size, 2)
        uniform = np.minimum((words[:, 0] + words[:, 1] * _WORD) / 2.0**64, np.nextafter(1.0, 0.0))
        gaps_ns = np.floor(-np.log(1.0 - uniform) / queries_per_second * 1e9)
        after = after + int(gaps_ns.sum())
        last = after - int(gaps_ns[-1])
        done += size
    return last / 1e9, after / 1e9
