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
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatoken.engine.page_forecast import PageForecast
from megatoken.engine.pages import PageAllocator
from megatoken.errors import CapacityError

Tokens = TypeVar("Tokens", int, NDArray[np.int32])

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
        max_rows: int,
        max_sequences: int,
        page_size: int,
        num_pages: int,
        max_length: int,
    ) -> None:
        """Starts with nothing to do.

        Args:
            max_rows: rows (tokens) in a step.
            max_sequences: slots for resident sequences.
            page_size: tokens in a page of cache.
            num_pages: pages of cache.
            max_length: tokens of the longest request, prompt and generated together.

        Raises:
            ValueError: a size below 1.
        """
        if min(max_rows, max_sequences, page_size, num_pages, max_length) < 1:
            raise ValueError("every size must be at least 1")
        self.page_table = np.zeros((max_sequences, -(-max_length // page_size)), dtype=np.int32)
        self._max_rows = max_rows
        self._page_size = page_size
        self._num_pages = num_pages
        self._max_length = max_length
        self._pages = PageAllocator(num_pages)
        self._waiting: OrderedDict[int, _Waiting] = OrderedDict()  # by ticket, oldest first
        self._residents = np.empty(0, dtype=np.int32)  # slots, oldest first; replaced, never written in place
        self._half_done = False  # the newest resident has computed only a part of what it knew when it was admitted
        self._free_slots = list(range(max_sequences))[::-1]
        self._ticket = np.zeros(max_sequences, dtype=np.int64)  # this and the next four: by slot
        self._known = np.zeros(max_sequences, dtype=np.int32)
        self._computed = np.zeros(max_sequences, dtype=np.int32)
        self._length = np.zeros(max_sequences, dtype=np.int32)  # prompt_tokens + max_tokens
        self._held = np.zeros(max_sequences, dtype=np.int32)  # pages
        self._prompt = np.zeros(max_sequences, dtype=np.int32)
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
        request = f"a prompt of {prompt_tokens} tokens and {max_tokens} new ones"
        if length > self._max_length:
            raise CapacityError(f"{request} exceed the longest sequence of {self._max_length} tokens; lower max_tokens")
        pages = self._pages_for(length - 1)  # nothing attends to the last token
        if pages > self._num_pages:
            raise CapacityError(
                f"{request} need {pages} pages of {self._page_size} tokens, the cache has {self._num_pages}; "
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
        gone = self._ticket[self._residents] == ticket
        if not gone.any():
            return False
        if answered:
            self._learn(self._residents[gone])
        self._remove(gone)
        return True

    @property
    def decodes(self) -> int:
        """Residents whose next row is one token: all but the newest where its prompt is half done."""
        return self.resident - self._half_done

    @property
    def cached_tokens(self) -> int:
        """Tokens whose keys are in the cache, of all residents."""
        return int(self._computed[self._residents].sum())

    def plan(self, prompt_rows: int | None = None, most_sequences: int | None = None) -> StepPlan | None:
        """Plans the next step as if every token sampled so far were there.

        Args:
            prompt_rows: most rows beside those of the decodes; a prompt that is half done gets one at least. None: as
                many as ``max_rows`` leaves.
            most_sequences: nobody is admitted beyond as many residents; None: beyond ``max_sequences``.

        Returns:
            The step, its pages already written to ``page_table``; None when nothing waits or is resident.
        """
        short = self._pages_for(self._known[self._residents]) - self._held[self._residents]
        preempted = self._preempt(short)
        decodes = self.decodes
        max_rows = self._max_rows
        if prompt_rows is not None:
            max_rows = min(max_rows, decodes + max(prompt_rows, int(self._half_done), int(not decodes)))
        if self._waiting and not preempted:
            self._admit(self._pages.free - int(short.sum()), max_rows, most_sequences)
        slot = self._residents
        if not len(slot):
            return None

        start, known = self._computed[slot], self._known[slot]
        count = known - start
        excess = int(count.sum()) - max_rows
        self._half_done = excess > 0
        if self._half_done:
            count[-1] -= excess
        end = start + count
        sample = end == known
        page_slot, page_index, page = self._give_pages(slot, self._pages_for(known) - self._held[slot])
        known += sample
        self._computed[slot], self._known[slot] = end, known
        plan = StepPlan(
            step=self._step,
            slot=slot,
            ticket=self._ticket[slot],
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
        done = known == self._length[slot]
        if done.any():
            self._learn(slot[done])
            self._remove(done)
        return plan

    def _pages_for(self, tokens: Tokens) -> Tokens:
        return -(-tokens // self._page_size)

    def _preempt(self, short: NDArray[np.int32]) -> tuple[int, ...]:
        """Pushes the newest residents back to the queue until the others get the ``short`` pages they lack.

        The oldest is never reached: alone it fits, which ``add`` made sure of.
        """
        lacking, free, keep = int(short.sum()), self._pages.free, self.resident
        preempted: list[int] = []
        while lacking > free:
            keep -= 1
            slot = self._residents[keep]
            lacking -= int(short[keep])
            free += int(self._held[slot])
            ticket = int(self._ticket[slot])
            self._waiting[ticket] = _Waiting(int(self._prompt[slot]), int(self._known[slot]), int(self._length[slot]))
            self._waiting.move_to_end(ticket, last=False)
            self._recomputed_tokens += int(self._computed[slot])
            preempted.append(ticket)
        if preempted:
            self._preemptions += len(preempted)
            self._remove(np.arange(self.resident) >= keep)
        return tuple(preempted)

    def _admit(self, spare_pages: int, max_rows: int, most_sequences: int | None) -> None:
        """Makes waiting requests resident, oldest first, while a row, a slot and the pages for all they know are left.

        The pages are given whole in the same plan, so a half-done prompt never lacks any.
        """
        spare_rows = max_rows - int((self._known[self._residents] - self._computed[self._residents]).sum())
        spare_slots = len(self._free_slots)
        if most_sequences is not None:
            spare_slots = min(spare_slots, most_sequences - self.resident)
        if spare_rows <= 0 or spare_slots <= 0:
            return
        resident, limits = self._residents, self._answer_limits
        prompt, known, length = (
            column[resident].astype(np.int64) for column in (self._prompt, self._known, self._length)
        )
        # Residents count with what they have so far: short answers are the first to end, and would seem to be all.
        taken = min(self._answered_tokens + int((known - prompt).sum()), limits)
        end = prompt + (length - prompt) * taken // limits - 1  # nothing attends to the last token
        forecast = PageForecast(known, np.maximum(known, end), self._page_size, self._num_pages)
        admitted: list[tuple[int, int, int, int]] = []
        while self._waiting and spare_rows > 0 and len(admitted) < spare_slots:
            ticket, request = next(iter(self._waiting.items()))
            spare_rows -= request.known
            spare_pages -= self._pages_for(request.known)
            own_end = request.prompt + (request.length - request.prompt) * taken // limits - 1
            if spare_pages < 0 or not forecast.admit(request.known, max(request.known, own_end)):
                break  # never where nothing is resident: alone it fits, which ``add`` made sure of
            del self._waiting[ticket]
            admitted.append((ticket, *request))
        if not admitted:
            return
        slot = np.array([self._free_slots.pop() for _ in admitted], dtype=np.int32)
        columns = np.array(admitted, dtype=np.int64).T
        self._ticket[slot], self._prompt[slot], self._known[slot], self._length[slot] = columns
        self._computed[slot] = 0
        self._residents = np.concatenate((self._residents, slot))

    def _give_pages(
        self, slot: NDArray[np.int32], more: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """Gives each slot ``more`` pages; returns slot, index in its row of the table, and page of each."""
        page = self._pages.allocate(int(more.sum()))
        page_slot, index = _enumerate(slot, more)
        page_index = index + self._held[page_slot]
        self.page_table[page_slot, page_index] = page
        self._held[slot] += more
        return page_slot, page_index, page

    def _learn(self, slot: NDArray[np.int32]) -> None:
        """Notes how much of their limits whole answers took."""
        prompt = self._prompt[slot]
        self._answered_tokens += int((self._known[slot] - prompt).sum())
        self._answer_limits += int((self._length[slot] - prompt).sum())

    def _remove(self, gone: NDArray[np.bool_]) -> None:
        """Takes the residents marked in ``gone`` ``[resident]`` out of their slots and frees their pages."""
        slot = self._residents[gone]
        self._pages.release(self.page_table[_enumerate(slot, self._held[slot])])
        self._held[slot] = 0
        self._free_slots.extend(slot.tolist())
        self._half_done = self._half_done and not gone[-1]
        self._residents = self._residents[~gone]


def _enumerate(slot: NDArray[np.int32], count: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Repeats each slot ``count`` times, beside 0 .. count - 1."""
    repeated = np.repeat(slot, count)
    first = np.repeat(np.cumsum(count, dtype=np.int32) - count, count)
    return repeated, np.arange(repeated.size, dtype=np.int32) - first
