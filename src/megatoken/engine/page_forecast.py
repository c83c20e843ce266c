"""Whether the cache can hold sequences until the last of them ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatoken.errors import CapacityError

PRIOR_TOKENS = 4096
"""Weight, in tokens of answers, of the assumption that an answer takes all of its limit."""


class SharedPages(NamedTuple):
    """Which pages N sequences hold, for sequences that share some of them.

    Only pages that a sequence found in the prefix cache are shared. They are its first.
    """

    table: NDArray[np.int32]  # pages by slot and place
    slot: NDArray[np.int32]  # [N]
    held: NDArray[np.int32]  # [N] pages of each sequence
    found: NDArray[np.int32]  # [N] of these, those found in the prefix cache


class AnswerLengths:
    """What share of their limits answers take: learnt from those that ended."""

    def __init__(self) -> None:
        """Starts with the assumption that an answer takes all of its limit."""
        self.limits = self._answered = self._taken = PRIOR_TOKENS

    def add(self, tokens: int, limits: int) -> None:
        """Count whole answers of so many tokens together, which might have taken as many as ``limits``."""
        self._answered += tokens
        self.limits += limits

    def ends(
        self, prompt: NDArray[np.int64], num_tokens: NDArray[np.int32], length: NDArray[np.int32]
    ) -> NDArray[np.int64]:
        """``[N]`` tokens of each running sequence at its expected end.

        They count with their answers so far, here and in ``end``: short answers end first, and would seem to be all.
        """
        self._taken = min(self._answered + int((num_tokens - prompt).sum()), self.limits)
        # No token attends to the last one.
        ends: NDArray[np.int64] = np.maximum(num_tokens, prompt + (length - prompt) * self._taken // self.limits - 1)
        return ends

    def end(self, prompt: int, num_tokens: int, length: int) -> int:
        """The same for one more sequence."""
        return max(num_tokens, prompt + (length - prompt) * self._taken // self.limits - 1)


class PageForecast:
    """The future of N sequences that have ``num_tokens`` now and grow by one a step, up to ``end`` tokens.

    Between two ends the total only grows, so its highest value is found at an end. When sequence i ends, those still
    running are i and all that end later: together they hold the sum of their tokens now, plus what each has grown by
    then. Sorted by end, that is a running sum from behind: N log N once, N for one more sequence.

    Pages are counted as tokens; each sequence with the empty places that its last page will have at its end. A shared
    page counts for the one of its readers that ends last.
    """

    def __init__(
        self,
        num_tokens: NDArray[np.int64],
        end: NDArray[np.int64],
        page_size: int,
        num_pages: int,
        shared: SharedPages | None = None,
    ) -> None:
        """Starts with sequences of ``num_tokens`` ``[N]`` and ``end`` ``[N]`` tokens in a cache of ``num_pages``."""
        self._page_size, self._capacity_tokens = page_size, num_pages * page_size
        order = np.argsort(end - num_tokens)
        tokens = (num_tokens + -end % page_size)[order]
        self._steps = (end - num_tokens)[order]  # [N] until the end, ascending
        self._shared = shared
        if shared is not None:
            self._shared = shared._replace(slot=shared.slot[order], held=shared.held[order])
            self._first_steps = self._steps
            self._until = np.full(num_pages, -1, dtype=np.int64)  # by page: steps until its last reader ends
            self._columns = 0
            tokens -= self._look_at(int(shared.found.max(initial=0))) * page_size
        self._tokens_from = np.append(np.cumsum(tokens[::-1])[::-1], 0)  # [N + 1] held now by i and all after it
        self._peaks = self._tokens_from[:-1] + np.arange(len(order), 0, -1) * self._steps  # [N] held when i ends

    def admit(self, num_tokens: int, end: int, found: Sequence[int] = (), reserved_tokens: int = 0) -> bool:
        """Count one more sequence in, if the total stays within the cache at every end, its own included.

        ``found``: its first pages if it found them in the prefix cache. ``reserved_tokens``: of the cache, that stay
        free.
        """
        tokens, steps = num_tokens + -end % self._page_size, end - num_tokens
        before, tokens_from = self._peaks, self._tokens_from
        if found:
            until = self._until_end_of(found)
            tokens -= int(np.count_nonzero(until >= steps)) * self._page_size
            before, tokens_from = self._without(until[(until >= 0) & (until < steps)])
        place = int(np.searchsorted(self._steps, steps))
        earlier, later = self._steps[:place], self._steps[place:]
        peaks = before[:place] + (tokens + earlier)
        own = int(tokens_from[place]) + tokens + (len(later) + 1) * steps
        if max(own, peaks.max(initial=0)) > self._capacity_tokens - reserved_tokens:
            return False
        self._steps = np.concatenate((earlier, [steps], later))
        self._peaks = np.concatenate((peaks, [own], before[place:]))
        self._tokens_from = np.concatenate((tokens_from[: place + 1] + tokens, tokens_from[place:]))
        if found:
            self.hold(np.array(found, dtype=np.int32), steps)
        return True

    def hold(self, pages: NDArray[np.int32], steps: int) -> None:
        """Note that an admitted sequence that ends in so many steps has ``pages``, which later ones may find."""
        if self._shared is not None:
            self._until[pages] = np.maximum(self._until[pages], steps)

    def _until_end_of(self, found: Sequence[int]) -> NDArray[np.int64]:
        """Steps until the last reader of each of these pages ends; -1 without a reader."""
        if len(found) > self._columns:
            self._look_at(len(found))
        return self._until[list(found)]

    def _without(self, until: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Peaks and tokens if these pages, each held for so many steps, no longer counted for their last readers."""
        if not len(until):
            return self._peaks, self._tokens_from
        places = np.searchsorted(self._steps, until, side="right")
        pages = np.bincount(places, minlength=len(self._steps) + 1)[::-1].cumsum()[::-1][1:]
        tokens = pages * self._page_size
        return self._peaks - tokens, self._tokens_from - np.append(tokens, 0)

    def _look_at(self, columns: int) -> NDArray[np.int64]:
        """Note the readers of the first so many pages of the sequences that it started with.

        Returns:
            ``[N]`` how many of its pages each sequence shares with one that ends later.
        """
        assert self._shared is not None
        table, slot, held, _ = self._shared
        live = np.arange(self._columns, columns) < held[:, None]
        page, sequence = table[slot, self._columns : columns][live], live.nonzero()[0]
        last = np.full(len(self._until), -1)
        np.maximum.at(last, page, sequence)
        last_of_page = last[page]
        self._until[page] = self._first_steps[last_of_page]
        self._columns = columns
        return np.bincount(sequence[last_of_page != sequence], minlength=len(slot))


def check_alone(prompt_tokens: int, max_tokens: int, max_length: int, page_size: int, num_pages: int) -> None:
    """Refuse a request that could not be served even alone; lengths in tokens.

    Raises:
        CapacityError: with the numbers.
    """
    length = prompt_tokens + max_tokens
    pages = -(-(length - 1) // page_size)  # no token attends to the last one
    if length <= max_length and pages <= num_pages:
        return
    request = f"a prompt of {_tokens(prompt_tokens)} and {max_tokens} new one{'s' * (max_tokens != 1)}"
    if length > max_length:
        room = max_length - prompt_tokens
        fix = f"lower max_tokens to {room}" if room > 0 else "shorten the prompt"
        longest = f"the longest sequence of {_tokens(max_length)}"
        raise CapacityError(f"{request} exceed {longest}; {fix}, or raise max_length or cache_tokens")
    raise CapacityError(
        f"{request} need {pages} pages of {_tokens(page_size)}, the cache has {num_pages}; "
        "lower max_tokens or enlarge the cache"
    )


def _tokens(count: int) -> str:
    return f"{count} token{'s' * (count != 1)}"
