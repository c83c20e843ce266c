"""Random token ids by number, the same on every machine and in every release of NumPy."""

from __future__ import annotations

import threading

import numpy as np


class RandomIds:
    """Ids below ``vocabulary_size`` that depend on ``seed`` and a number alone."""

    def __init__(self, vocabulary_size: int, seed: int) -> None:
        self._vocabulary_size = np.uint64(vocabulary_size)
        # A generator is only set back, which takes a tenth of the time of making one: ids are drawn while a load runs.
        self._generator = np.random.Philox(key=np.array([seed, 0], dtype=np.uint64))
        self._start = self._generator.state
        self._lock = threading.Lock()

    def draw(self, number: int, count: int) -> list[int]:
        """``count`` ids; fewer are the first of more."""
        with self._lock:
            self._start["state"]["key"][1] = number
            self._generator.state = self._start
            raw = self._generator.random_raw(count)  # the counter's raw output does not change between releases
        return (raw % self._vocabulary_size).tolist()  # type: ignore[no-any-return]
