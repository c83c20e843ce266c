"""Whether the cache will bear sequences until the last of them has ended."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class PageForecast:
    """The future of N sequences that hold ``known`` tokens now and grow by one a step, up to ``end`` tokens.

    Between two ends what is held only grows, so its highest value is found at an end. At the end of sequence i those
    still there are i and all that end later: together they hold the sum of their tokens now, and as many more as each
    has grown until then. Sorted by end, that is a running sum from behind: N log N once, N for one sequence more.

    Pages are counted as tokens; each sequence with the empty places that its last page will have at its end.
    """

    def __init__(self, known: NDArray[np.int64], end: NDArray[np.int64], page_size: int, num_pages: int) -> None:
        """Starts with sequences of ``known`` ``[N]`` and ``end`` ``[N]`` tokens in a cache of ``num_pages``."""
        self._page_size, self._capacity_tokens = page_size, num_pages * page_size
        order = np.argsort(end - known)
        tokens = (known + -end % page_size)[order]
        self._steps = (end - known)[order]  # [N] until the end, ascending
        self._tokens_from = np.append(np.cumsum(tokens[::-1])[::-1], 0)  # [N + 1] held now by i and all after it
        self._peaks = self._tokens_from[:-1] + np.arange(len(order), 0, -1) * self._steps  # [N] held when i ends

    def admit(self, known: int, end: int) -> bool:
        """Counts one more sequence in, if what is held stays within the cache at every end, its own included."""
        tokens, steps = known + -end % self._page_size, end - known
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
