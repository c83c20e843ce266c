"""Whether the cache can hold sequences until the last of them ends."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class PageForecast:
    """The future of N sequences that have ``num_tokens`` now and grow by one a step, up to ``end`` tokens.

    Between two ends the total only grows, so its highest value is found at an end. When sequence i ends, those still
    running are i and all that end later: together they hold the sum of their tokens now, plus what each has grown by
    then. Sorted by end, that is a running sum from behind: N log N once, N for one more sequence.

    Pages are counted as tokens; each sequence with the empty places that its last page will have at its end.
    """

    def __init__(self, num_tokens: NDArray[np.int64], end: NDArray[np.int64], page_size: int, num_pages: int) -> None:
        """Starts with sequences of ``num_tokens`` ``[N]`` and ``end`` ``[N]`` tokens in a cache of ``num_pages``."""
        self._page_size, self._capacity_tokens = page_size, num_pages * page_size
        order = np.argsort(end - num_tokens)
        tokens = (num_tokens + -end % page_size)[order]
        self._steps = (end - num_tokens)[order]  # [N] until the end, ascending
        self._tokens_from = np.append(np.cumsum(tokens[::-1])[::-1], 0)  # [N + 1] held now by i and all after it
        self._peaks = self._tokens_from[:-1] + np.arange(len(order), 0, -1) * self._steps  # [N] held when i ends

    def admit(self, num_tokens: int, end: int) -> bool:
        """Count one more sequence in, if the total stays within the cache at every end, its own included."""
        tokens, steps = num_tokens + -end % self._page_size, end - num_tokens
        place = int(np.searchsorted(self._steps, steps))
        earlier, later = self._steps[:place], self._steps[place:]
        peaks = self._peaks[:place] + (tokens + earlier)
        own = int(self._tokens_from[place]) + tokens + (len(later) + 1) * steps
        if max(own, peaks.max(initial=0)) > self._capacity_tokens:
            return False
        self._steps = np.concatenate((earlier, [steps], later))
        self._peaks = np.concatenate((peaks, [own], self._peaks[place:]))
        self._tokens_from = np.concatenate((self._tokens_from[: place + 1] + tokens, self._tokens_from[place:]))
        return True
