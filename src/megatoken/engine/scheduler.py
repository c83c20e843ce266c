"""Which tokens run in the next step: token budget, admission, chunked prefill, preemption.

The scheduler knows lengths, never token values, so it plans a step before the tokens of the previous one have arrived.
A running sequence has ``num_tokens`` tokens (prompt and generated, those in flight included), of which
``num_computed_tokens`` are in the cache; a step computes up to ``num_tokens - num_computed_tokens`` of them. Prefill,
a chunk of it, decode and recomputation after a preemption are that one case.

A request is admitted if the cache can hold it and the running sequences until the last of them ends: at each expected
end, what the remaining sequences will have grown to must fit. Admitting fewer would leave the cache unused, admitting
more would preempt and recompute. The share of its limit that an answer takes is estimated from the answers that ended;
where the estimate is wrong, preemption keeps the cache within its size.

Two facts follow from the rules and keep the code short:

- Requests are admitted oldest first and preempted newest first, so every running request is older than every waiting
  one: admission appends to the running sequences, preemption pushes to the front of the queue, and both stay in the
  order of their ids.
- A request is admitted only if the token budget has room for one of its tokens, so every running sequence gets a token
  in every step, and at most one, the newest, has a partial prefill.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatoken.engine.page_forecast import PageForecast, SharedPages
from megatoken.engine.pages import PageAllocator
from megatoken.engine.prefix_cache import PrefixCache
from megatoken.errors import CapacityError

_ONE = np.int32(1)
PRIOR_TOKENS = 4096
"""Weight, in tokens of answers, of the assumption that an answer takes all of its limit."""


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """The complete truth about one step of R sequences and N new pages. Decodes come first, then chunks of prompts.

    Pages that a prompt found in the prefix cache are among the new ones, and its first chunk starts behind them.
    A preempted sequence comes back as a prompt of all its tokens, so the tokens that it generated come from the host
    too. It never comes back in the step after the one that preempted it, so with at most one step in flight the host
    has those tokens by then.
    """

    step: int
    slot: NDArray[np.int32]  # [R] slot of each sequence, oldest first
    request_id: NDArray[np.int64]  # [R]
    start: NDArray[np.int32]  # [R] position of its first token in the step
    count: NDArray[np.int32]  # [R] its tokens in the step; 1 for every decode
    sample: NDArray[np.bool_]  # [R] whether its last token is computed, whose logits yield the next one
    decodes: int  # sequences [0:decodes) take their id from the token table, the others from the host
    preempted: tuple[int, ...]  # ids of the requests that this plan pushed back to the queue, newest first
    page_slot: NDArray[np.int32]  # [N] pages newly given: page_table[page_slot, page_index] = page
    page_index: NDArray[np.int32]  # [N]
    page: NDArray[np.int32]  # [N]

    @property
    def batched_tokens(self) -> int:
        """Tokens of the step."""
        return self.decodes + int(sum(self.count[self.decodes :].tolist()))


class _Waiting(NamedTuple):
    """Lengths of a request in the queue; ``num_tokens`` is above ``prompt`` if it was preempted."""

    prompt: int
    num_tokens: int
    length: int
    page_keys: Sequence[bytes]


class Scheduler:
    """Continuous batching of requests under a budget of tokens per step and pages of cache.

    Attributes:
        page_table: ``[max_sequences, ceil(max_length / page_size)]`` int32, the page of each position by slot; stale
            beyond a sequence's ``num_tokens``.
        preemptions: sequences pushed back to the queue so far.
        recomputed_tokens: computed tokens dropped by preemptions so far.
        prefixes: the prefix cache, if there is one. The caller must call its ``keep`` or ``discard`` for every request
            that has ended, and for those that a plan preempted.
    """

    def __init__(
        self,
        *,
        max_batched_tokens: int,
        max_sequences: int,
        page_size: int,
        num_pages: int,
        max_length: int,
        prefix_cache: bool = False,
    ) -> None:
        """Starts without requests.

        ``max_length``: tokens of the longest request, prompt and generated together. ``prefix_cache``: requests share
        the pages of equal prefixes.

        Raises:
            ValueError: a size below 1.
        """
        if min(max_batched_tokens, max_sequences, page_size, num_pages, max_length) < 1:
            raise ValueError("every size must be at least 1")
        self.page_table = np.zeros((max_sequences, -(-max_length // page_size)), dtype=np.int32)
        self.preemptions = 0
        self.recomputed_tokens = 0
        self._max_batched_tokens = max_batched_tokens
        self._page_size = page_size
        self._page_indices = np.arange(self.page_table.shape[1], dtype=np.int32)
        self._num_pages = num_pages
        self._max_length = max_length
        self.prefixes = PrefixCache(num_pages) if prefix_cache else None
        self._pages: PageAllocator | PrefixCache = self.prefixes or PageAllocator(num_pages)
        self._waiting: OrderedDict[int, _Waiting] = OrderedDict()  # by request id, oldest first
        # Running sequences, oldest first; replaced, never written in place. Each has computed all its tokens but the
        # newest and holds pages for those; a partial prefill has computed fewer and holds the pages of all.
        self._running = np.empty(0, dtype=np.int32)  # slots
        self._num_tokens = np.empty(0, dtype=np.int32)
        self._length = np.empty(0, dtype=np.int32)  # prompt_tokens + max_tokens
        self._partial_prefill = False  # the newest one has computed only a part of its prompt:
        self._partial_computed = 0  # so many tokens
        self._pages_at_limits = 0  # pages that the running sequences hold if all reach their limits
        self._free_slots = list(range(max_sequences))[::-1]
        self._request_ids = np.zeros(max_sequences, dtype=np.int64)  # by slot
        self._prompt = [0] * max_sequences  # by slot
        self._page_keys: list[Sequence[bytes]] = [()] * max_sequences  # by slot
        self._found_pages = np.zeros(max_sequences, dtype=np.int32)  # by slot: taken from the prefix cache
        # Of all whole answers: what they took, and what they might have taken.
        self._answered_tokens = self._answer_limits = self._taken = PRIOR_TOKENS
        self._last_request_id = -1
        self._step = 0

    @property
    def waiting(self) -> int:
        """Requests in the queue, preempted ones included."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Sequences that hold a slot and pages."""
        return len(self._running)

    @property
    def free_pages(self) -> int:
        """Pages that the next plan can give."""
        return self._pages.free

    @property
    def decodes(self) -> int:
        """Running sequences whose next step is one token: all but a partial prefill."""
        return self.running - self._partial_prefill

    @property
    def cached_tokens(self) -> int:
        """Tokens in the cache, of all running sequences."""
        decodes = self.decodes
        return int(self._num_tokens[:decodes].sum()) - decodes + self._partial_prefill * self._partial_computed

    def check(self, prompt_tokens: int, max_tokens: int) -> None:
        """Refuse a request that could not be served even alone. Reads only sizes: any thread may call it.

        Raises:
            CapacityError: with the numbers.
        """
        length = prompt_tokens + max_tokens
        pages = -(-(length - 1) // self._page_size)  # no token attends to the last one
        if length <= self._max_length and pages <= self._num_pages:
            return
        request = f"a prompt of {_tokens(prompt_tokens)} and {max_tokens} new one{'s' * (max_tokens != 1)}"
        if length > self._max_length:
            longest = f"the longest sequence of {_tokens(self._max_length)}"
            room = self._max_length - prompt_tokens
            fix = f"lower max_tokens to {room}" if room > 0 else "shorten the prompt"
            raise CapacityError(f"{request} exceed {longest}; {fix}, or raise max_length or cache_tokens")
        raise CapacityError(
            f"{request} need {pages} pages of {_tokens(self._page_size)}, the cache has {self._num_pages}; "
            "lower max_tokens or enlarge the cache"
        )

    def add(self, request_id: int, prompt_tokens: int, max_tokens: int, page_keys: Sequence[bytes] = ()) -> None:
        """Queue a request of ``prompt_tokens`` that ends after at most ``max_tokens`` more.

        ``page_keys``: of the full pages of its prompt, by which the prefix cache finds them (``extend_keys``).

        Raises:
            CapacityError: as ``check``.
            ValueError: ``request_id`` is not above every one before it, or a length is below 1.
        """
        if request_id <= self._last_request_id or prompt_tokens < 1 or max_tokens < 1:
            raise ValueError(
                f"request_id {request_id} must be above {self._last_request_id}, "
                f"prompt_tokens {prompt_tokens} and max_tokens {max_tokens} at least 1"
            )
        self.check(prompt_tokens, max_tokens)
        self._last_request_id = request_id
        self._waiting[request_id] = _Waiting(prompt_tokens, prompt_tokens, prompt_tokens + max_tokens, page_keys)

    def end(self, request_id: int, *, answered: bool) -> bool:
        """Remove a request that stopped early or was cancelled; its slot and pages are free at once.

        Steps run in order, so a later step may write to those pages although one in flight still reads them.

        ``answered``: its answer is whole, so its length counts in the estimate for others.

        Returns:
            True if the request was still active; one that reached its limit has been removed already.
        """
        if self._waiting.pop(request_id, None) is not None:
            return True
        gone = (self._request_ids.take(self._running) == request_id).nonzero()[0]
        if not len(gone):
            return False
        self._remove(gone, answered=answered)
        return True

    def plan(self, prompt_tokens: int | None = None, most_sequences: int | None = None) -> StepPlan | None:
        """Plan the next step as if every token sampled so far had arrived.

        Args:
            prompt_tokens: most tokens in addition to those of the decodes; a partial prefill gets at least one. None:
                as many as ``max_batched_tokens`` leaves.
            most_sequences: admit no request beyond so many running ones; None: beyond ``max_sequences``.

        Returns:
            The step, its pages already written to ``page_table``; None when no request is waiting or running.
        """
        computed = self._num_tokens - _ONE
        full = self._full(computed)
        preempted: tuple[int, ...] = ()
        if len(full) > self._pages.free:
            preempted, full = self._preempt(full)
            computed = self._num_tokens - _ONE
        decodes, partial = self.decodes, int(self._partial_prefill)
        budget = self._max_batched_tokens
        if prompt_tokens is not None:
            budget = min(budget, decodes + max(prompt_tokens, partial, int(not decodes)))
        if self.prefixes is not None and partial:
            newest, first = self._running[-1], self._partial_computed
            end = min(int(self._num_tokens[-1]), first + budget - decodes)
            row, size = self.page_table[newest], self._page_size
            self.prefixes.register(self._page_keys[newest], row, first // size, end // size)
        if self._waiting and not preempted:
            self._admit(self._pages.free - len(full), budget, most_sequences)
        slot, num_tokens = self._running, self._num_tokens
        running = len(slot)
        if not running:
            return None

        start = np.zeros(running, dtype=np.int32)
        start[:decodes] = computed[:decodes]
        if partial:
            start[decodes] = self._partial_computed
        if self.prefixes is not None and running > decodes + partial:
            start[decodes + partial :] = self._found_pages.take(slot[decodes + partial :]) * self._page_size
        count = num_tokens - start
        excess = decodes + sum(count[decodes:].tolist()) - budget
        self._partial_prefill = excess > 0
        page_slot, page_index, page = self._give_pages(full, computed, decodes + partial)
        sample = np.ones(running, dtype=np.bool_)
        self._num_tokens = num_tokens + _ONE
        if self._partial_prefill:
            count[-1] -= excess
            sample[-1] = False
            self._num_tokens[-1] -= 1
            self._partial_computed = int(start[-1] + count[-1])
        plan = StepPlan(
            step=self._step,
            slot=slot,
            request_id=self._request_ids.take(slot),
            start=start,
            count=count,
            sample=sample,
            decodes=decodes,
            preempted=preempted,
            page_slot=page_slot,
            page_index=page_index,
            page=page,
        )
        self._step += 1
        done = (self._num_tokens == self._length).nonzero()[0]
        if len(done):
            self._remove(done, answered=True)
        return plan

    def _preempt(self, full: NDArray[np.intp]) -> tuple[tuple[int, ...], NDArray[np.intp]]:
        """Push the newest sequences back to the queue until there is a page for each of the others that is ``full``.

        The oldest is never reached: alone it fits, as ``add`` checked.

        Returns:
            Ids of the requests pushed back, newest first; those of ``full`` that stay.
        """
        lacking, free, keep = len(full), self._pages.free, self.running
        preempted: list[int] = []
        while lacking > free:
            keep -= 1
            slot = self._running[keep]
            lacking = int(np.searchsorted(full, keep))
            request_id, num_tokens = int(self._request_ids[slot]), int(self._num_tokens[keep])
            request = _Waiting(self._prompt[slot], num_tokens, int(self._length[keep]), self._page_keys[slot])
            self._waiting[request_id] = request
            self._waiting.move_to_end(request_id, last=False)
            self.recomputed_tokens += self._partial_computed if keep == self.decodes else num_tokens - 1
            preempted.append(request_id)
            if self.prefixes is None:
                free += self._held([keep], [num_tokens])[0]
            else:  # shared pages stay with their other readers
                self._remove(np.array([keep]), answered=False)
                free = self._pages.free
        self.preemptions += len(preempted)
        if self.prefixes is None:
            self._remove(np.arange(keep, self.running), answered=False)
        return tuple(preempted), full[:lacking]

    def _admit(self, spare_pages: int, budget: int, most_sequences: int | None) -> None:
        """Start waiting requests, oldest first, while budget, slots and pages for all their tokens last.

        The same plan gives all those pages, so a partial prefill never lacks any.
        """
        size, spare_tokens = self._page_size, budget - self.decodes
        if self._partial_prefill:
            spare_tokens -= int(self._num_tokens[-1]) - self._partial_computed
        spare_slots = len(self._free_slots)
        if most_sequences is not None:
            spare_slots = min(spare_slots, most_sequences - self.running)
        prefixes = self.prefixes
        slots: list[int] = []
        admitted: list[_Waiting] = []
        forecast: PageForecast | None = None
        found: Sequence[int] = ()
        found_held = shared = 0
        while self._waiting and spare_tokens > 0 and len(admitted) < spare_slots:
            request_id, request = self._waiting.popitem(last=False)
            if prefixes is not None:
                found = prefixes.find(request.page_keys, (request.num_tokens - 1) // size)
                found_held = prefixes.held(found)
                shared = prefixes.extra_readers + found_held
            prompt_tokens = spare_tokens
            spare_tokens -= request.num_tokens - len(found) * size
            spare_pages -= -(-request.num_tokens // size) - found_held
            pages_at_limits = self._pages_at_limits - (1 - request.length) // size
            admissible = spare_pages >= 0
            # Otherwise the cache holds any answers they give.
            if admissible and pages_at_limits - shared > self._num_pages:
                forecast = forecast or self._forecast(slots, admitted)
                # True where no sequence runs: alone it fits, as ``add`` checked.
                admissible = forecast.admit(request.num_tokens, self._expected_end(request), found)
            if not admissible:
                self._waiting[request_id] = request
                self._waiting.move_to_end(request_id, last=False)
                break
            self._pages_at_limits = pages_at_limits
            slot = self._free_slots.pop()
            self._request_ids[slot], self._prompt[slot] = request_id, request.prompt
            slots.append(slot)
            admitted.append(request)
            if prefixes is not None:
                self._share_pages(slot, request, found, prompt_tokens, forecast)
        if admitted:
            tokens, length = [request.num_tokens for request in admitted], [request.length for request in admitted]
            self._running = np.concatenate((self._running, np.array(slots, dtype=np.int32)))
            self._num_tokens = np.concatenate((self._num_tokens, np.array(tokens, dtype=np.int32)))
            self._length = np.concatenate((self._length, np.array(length, dtype=np.int32)))

    def _share_pages(
        self, slot: int, request: _Waiting, found: Sequence[int], spare_tokens: int, forecast: PageForecast | None
    ) -> None:
        """Give an admitted request the pages that it ``found``, and new ones for its other tokens.

        Every layer writes the keys of a step before it reads any, so requests admitted in the same plan already find
        the pages that ``spare_tokens`` allow this one to fill.
        """
        assert self.prefixes is not None
        size, row, first = self._page_size, self.page_table[slot], len(found)
        pages = -(-request.num_tokens // size)
        self.prefixes.acquire(found)
        row[:first] = found
        row[first:pages] = self.prefixes.allocate(pages - first)
        self._found_pages[slot], self._page_keys[slot] = first, request.page_keys
        if request.num_tokens == request.prompt:
            self.prefixes.note_prompt(int(self._request_ids[slot]), request.prompt, first * size)
        full = min(request.num_tokens, first * size + spare_tokens) // size
        self.prefixes.register(request.page_keys, row, first, full)
        if forecast is not None:
            forecast.hold(row[:pages], self._expected_end(request) - request.num_tokens)

    def _forecast(self, slots: Sequence[int], admitted: Sequence[_Waiting]) -> PageForecast:
        """The future of the running sequences and of those just ``admitted`` to ``slots``."""
        limits, size = self._answer_limits, self._page_size
        tokens, length = self._num_tokens.astype(np.int64), self._length.astype(np.int64)
        prompt = np.array([self._prompt[slot] for slot in self._running.tolist()], dtype=np.int64)
        # Running answers count with their tokens so far: short answers end first, and would seem to be all.
        self._taken = taken = min(self._answered_tokens + int((tokens - prompt).sum()), limits)
        end = np.maximum(tokens, prompt + (length - prompt) * taken // limits - 1)  # no token attends to the last one
        shared = None
        if self.prefixes is not None:
            held = (self._num_tokens + (size - 2)) // size
            shared = SharedPages(self.page_table, self._running, held, self._found_pages.take(self._running))
        forecast = PageForecast(tokens, end, size, self._num_pages, shared)
        for slot, request in zip(slots, admitted, strict=True):
            found = self.page_table[slot, : self._found_pages[slot]]
            end_of_request = self._expected_end(request)
            forecast.admit(request.num_tokens, end_of_request, found.tolist())
            forecast.hold(self.page_table[slot, : request.num_tokens // size], end_of_request - request.num_tokens)
        return forecast

    def _expected_end(self, request: _Waiting) -> int:
        """Its tokens at its end, by the share of its limit that an answer takes."""
        end = request.prompt + (request.length - request.prompt) * self._taken // self._answer_limits - 1
        return max(request.num_tokens, end)

    def _give_pages(
        self, full: NDArray[np.intp], computed: NDArray[np.int32], first_admitted: int
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """Give a page to each sequence in ``full``, by its ``computed`` tokens, and all pages to those just admitted.

        Returns:
            Slot, index in its row of the table, and page of each.
        """
        admitted = self._running[first_admitted:]
        pages = [-(-tokens // self._page_size) for tokens in self._num_tokens[first_admitted:].tolist()]
        page_slot = np.concatenate((self._running[full], admitted.repeat(pages)))
        page_index = np.concatenate(
            [computed[full] // self._page_size, *[self._page_indices[:count] for count in pages]]
        )
        if self.prefixes is None or first_admitted == self.running:
            page = self._pages.allocate(len(page_slot))
            self.page_table[page_slot, page_index] = page
        else:  # those just admitted have theirs
            given = len(full)
            self.page_table[page_slot[:given], page_index[:given]] = self._pages.allocate(given)
            page = self.page_table[page_slot, page_index]
        return page_slot, page_index, page

    def _full(self, computed: NDArray[np.int32]) -> NDArray[np.intp]:
        """Indices of the decoding sequences whose pages are full, by their ``computed`` tokens."""
        computed = computed[: self.decodes]
        size = self._page_size
        # For a power of two the lowest bits are the remainder, and five times as fast.
        in_last_page = computed % size if size & (size - 1) else computed & (size - 1)
        full: NDArray[np.intp] = (in_last_page == 0).nonzero()[0]
        return full

    def _held(self, running: list[int], num_tokens: list[int]) -> list[int]:
        """Pages that the running sequences at these indices hold, with so many tokens each."""
        partial, size = self.decodes, self._page_size  # a partial prefill is the newest; it holds the pages of all
        return [-(-(tokens - (one != partial)) // size) for one, tokens in zip(running, num_tokens, strict=True)]

    def _remove(self, gone: NDArray[np.intp], *, answered: bool) -> None:
        """Take the running sequences at the indices ``gone`` (ascending) out of their slots and free their pages.

        ``answered``: their answers are whole: they count in the estimate of answer lengths.
        """
        slots, lengths = self._running[gone].tolist(), self._length[gone].tolist()
        num_tokens, size = self._num_tokens[gone].tolist(), self._page_size
        held = zip(slots, self._held(gone.tolist(), num_tokens), strict=True)
        pages = [self.page_table[slot, :count] for slot, count in held]
        if isinstance(self._pages, PageAllocator):
            self._pages.release(np.concatenate(pages))
        else:
            for one, slot, tokens, own in zip(gone.tolist(), slots, num_tokens, pages, strict=True):
                full = (self._partial_computed if one == self.decodes else tokens - 1) // size
                request_id, found = int(self._request_ids[slot]), int(self._found_pages[slot])
                self._pages.release(request_id, self._page_keys[slot], own, full, found)
        self._pages_at_limits -= sum([-(-(length - 1) // size) for length in lengths])
        self._free_slots += slots
        if answered:
            prompts = sum([self._prompt[slot] for slot in slots])
            self._answered_tokens += sum(num_tokens) - prompts
            self._answer_limits += sum(lengths) - prompts
        self._partial_prefill = self._partial_prefill and int(gone[-1]) != self.running - 1
        kept = np.ones(self.running, dtype=np.bool_)
        kept[gone] = False
        self._running, self._num_tokens, self._length = self._running[kept], self._num_tokens[kept], self._length[kept]


def _tokens(count: int) -> str:
    return f"{count} token{'s' * (count != 1)}"
