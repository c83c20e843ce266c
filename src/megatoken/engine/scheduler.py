"""Which tokens run in the next step: budget, admission, chunking, preemption.

The scheduler knows lengths, never token values, so a step can be planned before the tokens of the one before it are
known. Every resident sequence has ``known`` tokens (prompt and generated, those in flight included) and ``computed``
tokens; a step gives it up to ``known - computed`` rows. Prompt, chunk of a prompt, decode and recomputation after a
preemption are that one case.

A request is admitted if the cache will bear it and the residents until the last of them has ended: at each expected
end, what those still there will have grown to by then must fit. Fewer would idle, more would be preempted and computed
again. How much of its limit an answer is expected to take is learnt from those that ended; where it took less or more
than that, preemption keeps the promise.

Two facts follow from the rules and keep the code short:

- Requests are admitted oldest first and preempted newest first, so every resident is older than every waiting request:
  admission appends to the residents, preemption pushes to the front of the queue, and both stay in ticket order.
- A request is admitted only into a row that is left over, so residents never outnumber the rows of a step: every
  resident gets a row in every step, and at most one, the newest, has its prompt half done.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatoken.engine.page_forecast import PageForecast
from megatoken.engine.pages import PageAllocator
from megatoken.errors import CapacityError

_ONE = np.int32(1)
PRIOR_TOKENS = 4096
"""Weight, in tokens of answers, of the assumption that an answer takes all of its limit."""


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """The complete truth about one step of R sequences and N new pages. Decodes come first, then chunks of prompts.

    A sequence that was preempted comes back as a prompt of all it knew, so the tokens it had generated come from the
    host too. It is never back in the step after the one that preempted it, so with at most one step in flight the host
    has those tokens by then.
    """

    step: int
    slot: NDArray[np.int32]  # [R] resident slot of each sequence, oldest first
    ticket: NDArray[np.int64]  # [R]
    start: NDArray[np.int32]  # [R] position of the first row
    count: NDArray[np.int32]  # [R] rows; 1 for every decode
    sample: NDArray[np.bool_]  # [R] the last row completes what is known, so its logits yield a token
    decodes: int  # rows [0:decodes) take their id from the token table, the others from the host
    preempted: tuple[int, ...]  # tickets pushed back to the queue by this plan, newest first
    page_slot: NDArray[np.int32]  # [N] pages newly given: page_table[page_slot, page_index] = page
    page_index: NDArray[np.int32]  # [N]
    page: NDArray[np.int32]  # [N]


class _Waiting(NamedTuple):
    """Tokens of a request in the queue; more are known than its prompt if it was preempted."""

    prompt: int
    known: int
    length: int


class Scheduler:
    """Continuous batching of requests under a budget of rows per step and pages of cache.

    Attributes:
        page_table: ``[max_sequences, ceil(max_length / page_size)]`` int32, the page of each position by slot; what
            lies beyond a sequence's known tokens is stale.
    """

    def __init__(
        self,
        *,
        max_batched_tokens: int,
        max_sequences: int,
        page_size: int,
        num_pages: int,
        max_length: int,
    ) -> None:
        """Starts with nothing to do.

        Args:
            max_batched_tokens: rows (tokens) in a step.
            max_sequences: slots for resident sequences.
            page_size: tokens in a page of cache.
            num_pages: pages of cache.
            max_length: tokens of the longest request, prompt and generated together.

        Raises:
            ValueError: a size below 1.
        """
        if min(max_batched_tokens, max_sequences, page_size, num_pages, max_length) < 1:
            raise ValueError("every size must be at least 1")
        self.page_table = np.zeros((max_sequences, -(-max_length // page_size)), dtype=np.int32)
        self._max_batched_tokens = max_batched_tokens
        self._page_size = page_size
        self._page_indices = np.arange(self.page_table.shape[1], dtype=np.int32)
        self._num_pages = num_pages
        self._max_length = max_length
        self._pages = PageAllocator(num_pages)
        self._waiting: OrderedDict[int, _Waiting] = OrderedDict()  # by ticket, oldest first
        # By resident, oldest first; replaced, never written in place. All but a half-done one have computed what they
        # know but for the newest token, and hold the pages of what they have computed.
        self._residents = np.empty(0, dtype=np.int32)  # slots
        self._known = np.empty(0, dtype=np.int32)
        self._length = np.empty(0, dtype=np.int32)  # prompt_tokens + max_tokens
        self._half_done = False  # the newest resident has computed only a part of what it knew when it was admitted,
        self._half_done_computed = 0  # so many tokens, but holds the pages of all
        self._pages_at_limits = 0  # that the residents hold if all take all of their lengths
        self._free_slots = list(range(max_sequences))[::-1]
        self._ticket = np.zeros(max_sequences, dtype=np.int64)  # by slot
        self._prompt = [0] * max_sequences  # by slot
        self._answered_tokens = self._answer_limits = (
            PRIOR_TOKENS  # of all whole answers: what they took and might have
        )
        self._last_ticket = -1
        self._step = 0
        self._preemptions = 0
        self._recomputed_tokens = 0

    @property
    def waiting(self) -> int:
        """Requests in the queue, preempted ones included."""
        return len(self._waiting)

    @property
    def resident(self) -> int:
        """Sequences that hold a slot and pages."""
        return len(self._residents)

    @property
    def free_pages(self) -> int:
        """Pages that the next plan can give."""
        return self._pages.free

    @property
    def preemptions(self) -> int:
        """Sequences pushed back to the queue so far."""
        return self._preemptions

    @property
    def recomputed_tokens(self) -> int:
        """Computed tokens thrown away by preemptions so far."""
        return self._recomputed_tokens

    def add(self, ticket: int, prompt_tokens: int, max_tokens: int) -> None:
        """Queues a request of ``prompt_tokens`` that ends after ``max_tokens`` more at the latest.

        Raises:
            CapacityError: the request could not be served even alone.
            ValueError: ``ticket`` is not higher than every one before it, or a length is below 1.
        """
        if ticket <= self._last_ticket or prompt_tokens < 1 or max_tokens < 1:
            raise ValueError(
                f"ticket {ticket} must be above {self._last_ticket}, "
                f"prompt_tokens {prompt_tokens} and max_tokens {max_tokens} at least 1"
            )
        length = prompt_tokens + max_tokens
        request = f"a prompt of {_tokens(prompt_tokens)} and {max_tokens} new one{'s' * (max_tokens != 1)}"
        if length > self._max_length:
            longest = f"the longest sequence of {_tokens(self._max_length)}"
            room = self._max_length - prompt_tokens
            mend = f"lower max_tokens to {room}" if room > 0 else "shorten the prompt"
            raise CapacityError(f"{request} exceed {longest}; {mend}, or raise max_length or cache_tokens")
        pages = -(-(length - 1) // self._page_size)  # nothing attends to the last token
        if pages > self._num_pages:
            raise CapacityError(
                f"{request} need {pages} pages of {_tokens(self._page_size)}, the cache has {self._num_pages}; "
                "lower max_tokens or enlarge the cache"
            )
        self._last_ticket = ticket
        self._waiting[ticket] = _Waiting(prompt_tokens, prompt_tokens, length)

    def end(self, ticket: int, *, answered: bool) -> bool:
        """Forgets a request that stopped early or was cancelled; its slot and pages are free at once.

        Steps run in order, so a later step may write to those pages although one in flight still reads them.

        Args:
            ticket: of the request.
            answered: its answer is whole, so that its length says something about others.

        Returns:
            Whether it was there: one done by length has ended by itself.
        """
        if self._waiting.pop(ticket, None) is not None:
            return True
        gone = (self._ticket.take(self._residents) == ticket).nonzero()[0]
        if not len(gone):
            return False
        self._remove(gone, answered=answered)
        return True

    @property
    def decodes(self) -> int:
        """Residents whose next row is one token: all but the newest where its prompt is half done."""
        return self.resident - self._half_done

    @property
    def cached_tokens(self) -> int:
        """Tokens whose keys are in the cache, of all residents."""
        decodes = self.decodes
        return int(self._known[:decodes].sum()) - decodes + self._half_done * self._half_done_computed

    def plan(self, prompt_rows: int | None = None, most_sequences: int | None = None) -> StepPlan | None:
        """Plans the next step as if every token sampled so far were there.

        Args:
            prompt_rows: most rows beside those of the decodes; a prompt that is half done gets one at least. None: as
                many as ``max_batched_tokens`` leaves.
            most_sequences: nobody is admitted beyond as many residents; None: beyond ``max_sequences``.

        Returns:
            The step, its pages already written to ``page_table``; None when nothing waits or is resident.
        """
        computed = self._known - _ONE
        full = self._full(computed)
        preempted: tuple[int, ...] = ()
        if len(full) > self._pages.free:
            preempted, full = self._preempt(full)
            computed = self._known - _ONE
        decodes, half_done = self.decodes, int(self._half_done)
        max_batched_tokens = self._max_batched_tokens
        if prompt_rows is not None:
            max_batched_tokens = min(max_batched_tokens, decodes + max(prompt_rows, half_done, int(not decodes)))
        if self._waiting and not preempted:
            self._admit(self._pages.free - len(full), max_batched_tokens, most_sequences)
        slot, known = self._residents, self._known
        residents = len(slot)
        if not residents:
            return None

        start = np.zeros(residents, dtype=np.int32)
        start[:decodes] = computed[:decodes]
        if half_done:
            start[decodes] = self._half_done_computed
        count = known - start
        excess = decodes + sum(count[decodes:].tolist()) - max_batched_tokens
        self._half_done = excess > 0
        page_slot, page_index, page = self._give_pages(full, computed, decodes + half_done)
        sample = np.ones(residents, dtype=np.bool_)
        self._known = known + _ONE
        if self._half_done:
            count[-1] -= excess
            sample[-1] = False
            self._known[-1] -= 1
            self._half_done_computed = int(start[-1] + count[-1])
        plan = StepPlan(
            step=self._step,
            slot=slot,
            ticket=self._ticket.take(slot),
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
        done = (self._known == self._length).nonzero()[0]
        if len(done):
            self._remove(done, answered=True)
        return plan

    def _preempt(self, full: NDArray[np.intp]) -> tuple[tuple[int, ...], NDArray[np.intp]]:
        """Pushes the newest residents back to the queue until the others get a page for each that is ``full``.

        The oldest is never reached: alone it fits, which ``add`` made sure of.

        Returns:
            Tickets of those pushed back, newest first; those of ``full`` that stay.
        """
        lacking, free, keep = len(full), self._pages.free, self.resident
        preempted: list[int] = []
        while lacking > free:
            keep -= 1
            slot = self._residents[keep]
            lacking = int(np.searchsorted(full, keep))
            ticket, known = int(self._ticket[slot]), int(self._known[keep])
            free += self._held([keep], [known])[0]
            self._waiting[ticket] = _Waiting(self._prompt[slot], known, int(self._length[keep]))
            self._waiting.move_to_end(ticket, last=False)
            self._recomputed_tokens += self._half_done_computed if keep == self.decodes else known - 1
            preempted.append(ticket)
        self._preemptions += len(preempted)
        self._remove(np.arange(keep, self.resident), answered=False)
        return tuple(preempted), full[:lacking]

    def _admit(self, spare_pages: int, max_batched_tokens: int, most_sequences: int | None) -> None:
        """Makes waiting requests resident, oldest first, while a row, a slot and the pages for all they know are left.

        The pages are given whole in the same plan, so a half-done prompt never lacks any.
        """
        size, spare_rows = self._page_size, max_batched_tokens - self.decodes
        if self._half_done:
            spare_rows -= int(self._known[-1]) - self._half_done_computed
        spare_slots = len(self._free_slots)
        if most_sequences is not None:
            spare_slots = min(spare_slots, most_sequences - self.resident)
        slots: list[int] = []
        admitted: list[_Waiting] = []
        bears: Callable[[_Waiting], bool] | None = None
        while self._waiting and spare_rows > 0 and len(admitted) < spare_slots:
            ticket, request = self._waiting.popitem(last=False)
            spare_rows -= request.known
            spare_pages -= -(-request.known // size)
            pages_at_limits = self._pages_at_limits - (1 - request.length) // size
            fits = spare_pages >= 0
            if fits and pages_at_limits > self._num_pages:  # otherwise the cache bears them whatever they take
                bears = bears or self._forecast(admitted)
                fits = bears(request)  # true where nothing is resident: alone it fits, which ``add`` made sure of
            if not fits:
                self._waiting[ticket] = request
                self._waiting.move_to_end(ticket, last=False)
                break
            self._pages_at_limits = pages_at_limits
            slot = self._free_slots.pop()
            self._ticket[slot], self._prompt[slot] = ticket, request.prompt
            slots.append(slot)
            admitted.append(request)
        if admitted:
            known, length = [request.known for request in admitted], [request.length for request in admitted]
            self._residents = np.concatenate((self._residents, np.array(slots, dtype=np.int32)))
            self._known = np.concatenate((self._known, np.array(known, dtype=np.int32)))
            self._length = np.concatenate((self._length, np.array(length, dtype=np.int32)))

    def _forecast(self, admitted: Iterable[_Waiting]) -> Callable[[_Waiting], bool]:
        """Whether the cache will bear one more until all have ended, beside the residents and what was ``admitted``.

        Whoever it will bear counts from then on.
        """
        limits = self._answer_limits
        known, length = self._known.astype(np.int64), self._length.astype(np.int64)
        prompt = np.array([self._prompt[slot] for slot in self._residents.tolist()], dtype=np.int64)
        # Residents count with what they have so far: short answers are the first to end, and would seem to be all.
        taken = min(self._answered_tokens + int((known - prompt).sum()), limits)
        end = prompt + (length - prompt) * taken // limits - 1  # nothing attends to the last token
        forecast = PageForecast(known, np.maximum(known, end), self._page_size, self._num_pages)

        def bears(request: _Waiting) -> bool:
            end = request.prompt + (request.length - request.prompt) * taken // limits - 1
            return forecast.admit(request.known, max(request.known, end))

        for request in admitted:
            bears(request)
        return bears

    def _give_pages(
        self, full: NDArray[np.intp], computed: NDArray[np.int32], first_admitted: int
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """Gives a page to each resident in ``full``, of those that have ``computed``, and to those just admitted all.

        Returns:
            Slot, index in its row of the table, and page of each.
        """
        admitted = self._residents[first_admitted:]
        pages = [-(-known // self._page_size) for known in self._known[first_admitted:].tolist()]
        page_slot = np.concatenate((self._residents[full], admitted.repeat(pages)))
        page_index = np.concatenate(
            [computed[full] // self._page_size, *[self._page_indices[:count] for count in pages]]
        )
        page = self._pages.allocate(len(page_slot))
        self.page_table[page_slot, page_index] = page
        return page_slot, page_index, page

    def _full(self, computed: NDArray[np.int32]) -> NDArray[np.intp]:
        """Those decoding residents, of which each has ``computed`` so much, that lack a page for their next row."""
        computed = computed[: self.decodes]
        size = self._page_size
        # Of a power of two the lowest bits are the remainder, and five times as fast.
        in_last_page = computed % size if size & (size - 1) else computed & (size - 1)
        full: NDArray[np.intp] = (in_last_page == 0).nonzero()[0]
        return full

    def _held(self, residents: list[int], known: list[int]) -> list[int]:
        """Pages of these residents, which know so many tokens."""
        half_done, size = self.decodes, self._page_size  # a half-done one, the newest, holds the pages of all it knows
        return [-(-(tokens - (one != half_done)) // size) for one, tokens in zip(residents, known, strict=True)]

    def _remove(self, gone: NDArray[np.intp], *, answered: bool) -> None:
        """Takes these residents, in order, out of their slots and frees their pages.

        Args:
            gone: their places among the residents.
            answered: their answers are whole: how much of their limits they took is noted.
        """
        slots, lengths = self._residents[gone].tolist(), self._length[gone].tolist()
        knowns, size = self._known[gone].tolist(), self._page_size
        held = zip(slots, self._held(gone.tolist(), knowns), strict=True)
        self._pages.release(np.concatenate([self.page_table[slot, :pages] for slot, pages in held]))
        self._pages_at_limits -= sum([-(-(length - 1) // size) for length in lengths])
        self._free_slots += slots
        if answered:
            prompts = sum([self._prompt[slot] for slot in slots])
            self._answered_tokens += sum(knowns) - prompts
            self._answer_limits += sum(lengths) - prompts
        self._half_done = self._half_done and int(gone[-1]) != self.resident - 1
        kept = np.ones(self.resident, dtype=np.bool_)
        kept[gone] = False
        self._residents, self._known, self._length = self._residents[kept], self._known[kept], self._length[kept]


def _tokens(count: int) -> str:
    return f"{count} token{'s' * (count != 1)}"
