"""When LoadGen's Server scenario has each query due: its Poisson arrivals, drawn again from the seed.

LoadGen tells nobody when a query was due, only issues it (loadgen.cc: GenerateQueries; test of this module: its trace).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_BLOCK = 4096
_WORD = 2.0**32


class PoissonSchedule:
    """Nanoseconds from the start of the test to each query; the first is due at 0.

    Gaps are exponential with GNU's C++ library: minus the logarithm of one less a canonical number, of two words of
    std::mt19937 each, over the rate, cut to whole nanoseconds. A rate only stretches the same arrivals.
    """

    def __init__(self, seed: int, queries_per_second: float) -> None:
        """Starts the sequence for ``schedule_rng_seed``, of which the C++ generator takes the lowest 32 bits."""
        self._generator = np.random.MT19937()
        self._generator._legacy_seeding(seed % 2**32)  # the seeding that std::mt19937 specifies
        self._rate = queries_per_second
        self._due_ns = np.zeros(1, np.int64)

    def due_ns(self, query: int) -> int:
        """When ``query``, counted from 0, is due."""
        while query >= len(self._due_ns):
            self._extend()
        return int(self._due_ns[query])

    def queries_until(self, seconds: float) -> int:
        """Fewest queries of which the last is due at ``seconds`` or later."""
        while self._due_ns[-1] < seconds * 1e9:
            self._extend()
        return int(np.searchsorted(self._due_ns, seconds * 1e9)) + 1

    def mean_rate(self, queries: int) -> float:
        """Queries per second of the first ``queries``, two or more: chance leaves it beside the rate asked."""
        return (queries - 1) / self.due_ns(queries - 1) * 1e9

    def _extend(self) -> None:
        words = self._generator.random_raw(2 * max(_BLOCK, len(self._due_ns))).astype(np.float64).reshape(-1, 2)
        canonical = np.minimum((words[:, 0] + words[:, 1] * _WORD) / _WORD**2, np.nextafter(1.0, 0.0))
        gaps: NDArray[np.int64] = (-np.log(1.0 - canonical) / self._rate * 1e9).astype(np.int64)
        self._due_ns = np.concatenate((self._due_ns, self._due_ns[-1] + np.cumsum(gaps)))
