"""What LoadGen draws from its seeds: std::mt19937 with the shuffle and the distributions of GNU's C++ library.

The order of ``loaded_qsl_set``, the rows of an accuracy log and the arrival times of the Server scenario follow from
the seeds alone (loadgen.cc: GenerateLoadableSets, GenerateQueries), so a log with another order or other times was not
written by a run with those seeds. LoadGen does not log when a query was due. GNU's library changed its bounded integers
in GCC 11; both kinds are computed (LoadGen's wheels 5.0.10 to 5.0.15 have the older kind). Clang's library has another
order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

MOST_ROWS = 200_000
MOST_ARRIVALS = 5_000_000
MOST_DRAWS = 500_000
_WORD = 2**32
_LEAST_BLOCK, _MOST_BLOCK = 4096, 500_000  # arrivals that are drawn at a time
_MOST_NS = 2**61  # of a schedule; later queries are due then

Draw = Callable[[int], int]  # bound -> integer in [0, bound)


@dataclass(frozen=True, slots=True)
class Load:
    """What decides how LoadGen draws rows from its library."""

    scenario: str
    accuracy: bool  # every row once
    permuted: bool  # sample_concatenate_permutation: every row equally often
    min_queries: int  # effective_min_query_count


class Twister:
    """std::mt19937: its 32-bit words, and the integers that std::uniform_int_distribution makes from them."""

    def __init__(self, seed: int, before_gcc_11: bool = False) -> None:
        """Starts the sequence. The C++ constructor takes LoadGen's 64-bit seeds modulo 2^32."""
        generator = np.random.MT19937()
        generator._legacy_seeding(seed % _WORD)  # the seeding that std::mt19937 specifies
        self._generator = generator
        self._words = self._stream()
        self.below: Draw = self._below_before_gcc_11 if before_gcc_11 else self._below

    def words(self, count: int) -> NDArray[np.uint64]:
        """The next ``count`` 32-bit words; not to be mixed with ``below``, which draws words in blocks."""
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


def issued_rows(
    seed: int, library: tuple[int, ...], load: Load, count: int, before_gcc_11: bool = False
) -> tuple[int, ...]:
    """The row that each of the first ``count`` samples asks for, by sequence id.

    Args:
        seed: ``sample_index_rng_seed``.
        library: The set of rows as loaded; the only set of an accuracy run.
        load: What decides how rows are drawn.
        count: Samples.
        before_gcc_11: As in ``library_order``.

    Raises:
        ValueError: Too many draws to repeat, or another scenario.
    """
    passes = 1 if load.accuracy else math.ceil(load.min_queries / len(library))
    if (
        passes < 1
        or (passes + 3) * len(library) + count > MOST_DRAWS
        or load.scenario not in ("Offline", "Server", "SingleStream")
    ):
        raise ValueError("these draws cannot be repeated")
    drawn = max(count, len(library)) if load.accuracy else count  # so that logs cut at any place share one draw
    return _issued_rows(seed, library, replace(load, min_queries=0), passes, drawn, before_gcc_11)[:count]


@lru_cache(maxsize=64)
def _issued_rows(
    seed: int, library: tuple[int, ...], load: Load, passes: int, count: int, before_gcc_11: bool
) -> tuple[int, ...]:
    """The rows of the first ``count`` samples, where every row is issued equally often after ``passes``."""
    if load.scenario == "Offline" and not load.permuted:
        return library * math.ceil(count / len(library))
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
            shuffle(again, draw)
            rows += again
        return tuple(rows)
    if load.permuted:
        return tuple(library[equal[place % len(equal)]] for place in range(count))
    if load.accuracy:
        return tuple(library[place] for place in first[:count])
    return tuple(library[draw(len(library))] for _ in range(count))


class PoissonSchedule:
    """When each query of LoadGen's Server scenario is due, in ns from the start of the test; the first is due at 0.

    Gaps are exponential: -ln(1 - u) / rate, where u is a canonical number made of two words of std::mt19937, cut to
    whole nanoseconds. So another rate only stretches or compresses the same arrivals.
    """

    def __init__(self, seed: int, queries_per_second: float) -> None:
        """Starts the schedule of ``schedule_rng_seed`` at the rate that is offered."""
        self._twister = Twister(seed)
        self._rate = queries_per_second
        self._due_ns: NDArray[np.int64] = np.zeros(1, np.int64)

    def due_ns(self, query: int) -> int:
        """When ``query``, counted from 0, is due."""
        while query >= len(self._due_ns):
            self._extend()
        return int(self._due_ns[query])

    def queries_until(self, seconds: float) -> int:
        """The smallest number of queries of which the last is due at ``seconds`` or later."""
        while self._due_ns[-1] < seconds * 1e9:
            self._extend()
        return int(np.searchsorted(self._due_ns, seconds * 1e9)) + 1

    def mean_rate(self, queries: int) -> float:
        """Queries per second of the first ``queries``, two or more; by chance it differs from the rate offered."""
        return (queries - 1) / self.due_ns(queries - 1) * 1e9

    def _extend(self) -> None:
        count = min(max(_LEAST_BLOCK, len(self._due_ns)), _MOST_BLOCK)
        words = self._twister.words(2 * count).astype(np.float64).reshape(-1, 2)
        canonical = np.minimum((words[:, 0] + words[:, 1] * _WORD) / 2.0**64, np.nextafter(1.0, 0.0))
        with np.errstate(over="ignore"):  # a log may state any rate
            gaps_ns = np.clip(-np.log(1.0 - canonical) / self._rate * 1e9, 0, _MOST_NS / count)
        due_ns = np.minimum(self._due_ns[-1] + np.cumsum(gaps_ns.astype(np.int64)), _MOST_NS)
        self._due_ns = np.concatenate((self._due_ns, due_ns))
