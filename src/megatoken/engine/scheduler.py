"""Which tokens run in the next step: token budget, admission, chunked prefill, preemption.

The scheduler knows lengths, never token values, so it plans a step before the tokens of the previous one have arrived.
A running sequence has ``num_tokens`` tokens (prompt and generated, those in flight included), of which
``num_computed_tokens`` are in the cache; a step computes up to ``num_tokens - num_computed_tokens`` of them. Prefill,
a chunk of it, decode and recomputation after a preemption are that one case.

A request is admitted if the cache can hold it and the running sequences until the last of them ends: at each expected
end, what the remaining sequences will have grown to must fit. Admitting fewer would leave the cache unused, admitting
more would preempt and recompute. The share of its limit that an answer takes is estimated from the answers that ended;
where the estimate is wrong, preemption keeps the cache within its size.

A request belongs to a group, by default all to one. ``fair_share`` says whose prompt is next.

- In a group, requests are admitted oldest first and preempted newest first, so those that run are older than those that
  wait, and at most one, the newest of the group, has a partial prefill.
- A request is admitted only if the token budget has room for one of its tokens, so every running sequence gets a token
  in every step, unless its group rests: a heavy one in some steps of groups that ask for less than their part.
- The oldest of all running requests is never preempted. A request that does not fit holds other groups up once they
  were served a cacheful of tokens more than its own group; then the cache empties until it fits. So every request ends.
- While there are several groups, one in ``RESERVE`` slots and pages is left to groups that hold less than that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatoken.engine.chunks import Chunks
from megatoken.engine.fair_share import RESERVE, TURNS, FairShare, Group, Waiting
from megatoken.engine.page_forecast import AnswerLengths, PageForecast, check_alone
from megatoken.engine.page_table import PageTable
from megatoken.engine.step_plan import StepPlan

_ONE = np.int32(1)


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
        window: int = 0,
        window_pages: int = 0,
    ) -> None:
        """Starts without requests.

        ``max_length``: tokens of the longest request, prompt and generated together. ``prefix_cache``: requests share
        the pages of equal prefixes. ``window_pages``: of layers that see a ``window``, 0 if theirs are those of all.

        Raises:
            ValueError: a size below 1.
        """
        if min(max_batched_tokens, max_sequences, page_size, num_pages, max_length) < 1:
            raise ValueError("every size must be at least 1")
        sizes = max_sequences, -(-max_length // page_size), page_size
        self._pages = PageTable(*sizes, num_pages, window, window_pages, prefix_cache=prefix_cache)
        self.page_table, self.prefixes, self._windows = self._pages.rows, self._pages.prefixes, self._pages.windows
        self.preemptions = self.recomputed_tokens = 0
        self._max_batched_tokens, self._max_length = max_batched_tokens, max_length
        self._page_size, self._num_pages = page_size, num_pages
        self._shares = FairShare(max_sequences, max_batched_tokens)
        # Running sequences, partial prefills last; replaced, never written in place. Each has computed all its tokens
        # but the newest and holds pages for those; a partial prefill has computed fewer and holds the pages of all.
        self._running = np.empty(0, dtype=np.int32)  # slots
        self._num_tokens = np.empty(0, dtype=np.int32)
        self._length = np.empty(0, dtype=np.int32)  # prompt_tokens + max_tokens
        self._partial: dict[Group, int] = {}  # tokens that each partial prefill has computed, in the same order
        self._pages_at_limits = 0  # pages that the running sequences hold if all reach their limits
        self._free_slots = list(range(max_sequences))[::-1]
        self._request_ids = np.zeros(max_sequences, dtype=np.int64)  # by slot
        self._prompt = np.zeros(max_sequences, dtype=np.int64)  # by slot
        self._answers = AnswerLengths()
        self._last_request_id, self._step = -1, 0

    @property
    def waiting(self) -> int:
        """Requests in the queue, preempted ones included."""
        return self._shares.waiting

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
        """Running sequences whose next step is one token: all but partial prefills."""
        return self.running - len(self._partial)

    @property
    def cached_tokens(self) -> int:
        """Tokens in the cache, of all running sequences."""
        decodes = self.decodes
        return int(self._num_tokens[:decodes].sum()) - decodes + sum(self._partial.values())

    @property
    def several_groups(self) -> bool:
        """Whether requests of more than one group came lately."""
        return self._shares.several

    @property
    def heavy_part(self) -> float:
        """The part of the machine's time that groups have a right to which ask for all that they can get."""
        return self._shares.heavy_part

    @property
    def others_wait(self) -> bool:
        """Whether another group has a prompt to compute."""
        return self._shares.others_wait(self._partial)

    def check(self, prompt_tokens: int, max_tokens: int) -> None:
        """Refuse a request that could not be served even alone. Reads only sizes: any thread may call it.

        Raises:
            CapacityError: with the numbers.
        """
        check_alone(prompt_tokens, max_tokens, self._max_length, self._page_size, self._num_pages)

    def add(
        self,
        request_id: int,
        prompt_tokens: int,
        max_tokens: int,
        page_keys: Sequence[bytes] = (),
        share: tuple[str, float] = ("", 1.0),
    ) -> None:
        """Queue a request of ``prompt_tokens`` that ends after at most ``max_tokens`` more.

        ``page_keys``: of the full pages of its prompt, by which the prefix cache finds them (``extend_keys``).
        ``share``: its group, and the weight of that group among others from now on.

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
        request = Waiting(prompt_tokens, prompt_tokens, prompt_tokens + max_tokens, page_keys)
        self._shares.add(share, request_id, request, self._partial)

    def end(self, request_id: int, *, answered: bool) -> bool:
        """Remove a request that stopped early or was cancelled; its slot and pages are free at once.

        Steps run in order, so a later step may write to those pages although one in flight still reads them.

        ``answered``: its answer is whole, so its length counts in the estimate for others.

        Returns:
            True if the request was still active; one that reached its limit has been removed already.
        """
        if self._shares.remove(request_id):
            return True
        gone = (self._request_ids.take(self._running) == request_id).nonzero()[0]
        if len(gone):
            self._remove(gone, answered=answered)
        return len(gone) > 0

    def plan(
        self,
        prompt_tokens: int | None = None,
        most_sequences: int | None = None,
        heavy_prompt_tokens: int | None = None,
        *,
        rest: bool = False,
    ) -> StepPlan | None:
        """Plan the next step as if every token sampled so far had arrived.

        Args:
            prompt_tokens: most tokens in addition to those of the decodes; a partial prefill gets at least one. None:
                as many as ``max_batched_tokens`` leaves.
            most_sequences: admit no request beyond so many running ones; None: beyond ``max_sequences``.
            heavy_prompt_tokens: of these tokens, most for groups that always have a prompt to compute, while another
                asks for less than its part; a partial prefill gets one more. None: no such limit.
            rest: those groups get no token at all if another one has a request that runs.

        Returns:
            The step, its pages already written to ``page_table``; None when no request is waiting or running.
        """
        computed = self._num_tokens - _ONE
        full = self._pages.full(computed[: self.decodes])
        preempted: tuple[int, ...] = ()
        shares = self._shares
        resting: NDArray[np.bool_] | None = None  # of the running sequences
        if rest and shares.several and shares.protects:
            heavy = shares.heavy_ones(self._running)
            still_full = full[~heavy[full]]
            if heavy.any() and not heavy.all() and len(still_full) <= self._pages.free:
                resting, full, heavy_prompt_tokens = heavy, still_full, 0
        if len(full) > self._pages.free:
            preempted, full = self._preempt(full)
            computed = self._num_tokens - _ONE
        decodes, partial = self.decodes, len(self._partial)
        budget = self._max_batched_tokens - decodes
        if prompt_tokens is not None:
            budget = min(budget, max(prompt_tokens, partial, int(not decodes)))
        chunks = self._chunks(self._pages.free - len(full), most_sequences, resting)
        if partial or (shares.waiting and not preempted):
            self._share(chunks, budget - partial, heavy_prompt_tokens, admit=not preempted)
        slot = self._running
        running = len(slot)
        if not running:
            return None

        start, count = np.zeros(running, dtype=np.int32), np.zeros(running, dtype=np.int32)
        start[:decodes], count[:decodes] = computed[:decodes], 1
        if running > decodes:
            start[decodes:], count[decodes:] = chunks.start, chunks.given
        started, tokens = slot[decodes + partial :], self._num_tokens[decodes + partial :].tolist()
        page_slot, page_index, page = self._pages.give(slot[full], computed[full], started, tokens)
        if self._windows is not None:
            growing = np.append(full, np.arange(decodes, running))
            self._windows.give(slot[growing], start[growing], count[growing])
        sample = np.ones(running, dtype=np.bool_)
        unfinished = [decodes + at for at, _ in chunks.unfinished.values()]
        active: slice | NDArray[np.bool_] = slice(None)
        silent, active_decodes = unfinished, decodes
        if resting is not None:
            active = np.ones(running, dtype=np.bool_)
            active[: len(resting)] = ~resting
            resting_decodes = resting[:decodes].nonzero()[0]
            silent, active_decodes = [*unfinished, *resting_decodes.tolist()], decodes - len(resting_decodes)
        # Attention that starts with the longest sequences does not end with some that run alone. 16 bits sort faster.
        planned, start = slot[active].copy(), start[active]
        by_length = np.argsort(65535 - np.minimum(start[:active_decodes], 65535).astype(np.uint16), kind="stable")
        planned[:active_decodes], start[:active_decodes] = planned[by_length], start[by_length]
        groups = shares.groups_of(planned)
        if shares.several:
            shares.note_step(slot, self._ends(), silent, chunks.unfinished)
        else:
            backlog = bool(unfinished) or shares.waiting > 0
            shares.note_step_alone(sum(chunks.given), running - len(unfinished), backlog=backlog)
        self._num_tokens = self._num_tokens + _ONE
        if resting is not None:
            self._num_tokens[resting_decodes] -= _ONE
        self._partial = {group: chunks.start[at] + chunks.given[at] for group, (at, _) in chunks.unfinished.items()}
        if unfinished:
            if unfinished[0] == running - len(unfinished):
                sample[unfinished[0] :] = False
                self._num_tokens[unfinished[0] :] -= _ONE
            else:  # other groups' prompts behind it are complete
                sample[unfinished] = False
                self._num_tokens[unfinished] -= _ONE
                order = np.concatenate((np.delete(np.arange(running), unfinished), unfinished))
                self._running, self._num_tokens = slot[order], self._num_tokens[order]
                self._length = self._length[order]
        plan = StepPlan(
            step=self._step,
            slot=planned,
            request_id=self._request_ids.take(planned),
            start=start,
            count=count[active],
            sample=sample[active],
            decodes=active_decodes,
            preempted=preempted,
            page_slot=page_slot,
            page_index=page_index,
            page=page,
            groups=groups,
            heavy_tokens=chunks.heavy_tokens,
            window_table=None if self._windows is None else self._windows.rows,
        )
        self._step += 1
        if len(done := (self._num_tokens == self._length).nonzero()[0]):
            self._remove(done, answered=True)
        return plan

    def _preempt(self, full: NDArray[np.intp]) -> tuple[tuple[int, ...], NDArray[np.intp]]:
        """Push sequences back to their queues until there is a page for each of the others that is ``full``.

        Returns:
            Ids of the requests pushed back; indices of those of ``full`` that stay.
        """
        free, shares = self._pages.free, self._shares
        preempted: list[int] = []
        gone: list[int] = []
        while len(full) > free:
            at = self.running - len(gone) - 1  # the newest; never the oldest: alone it fits, as ``add`` checked
            if shares.several:
                ids = self._request_ids.take(self._running)
                at = shares.makes_room(self._running, ids, self._num_tokens, gone)
            slot, num_tokens = int(self._running[at]), int(self._num_tokens[at])
            request_id, group = int(self._request_ids[slot]), shares.by_slot[slot]
            request = Waiting(int(self._prompt[slot]), num_tokens, int(self._length[at]), self._pages.keys(slot))
            group.put_back(request_id, request)
            self.recomputed_tokens += num_tokens - 1 if at < self.decodes else self._partial[group]
            preempted.append(request_id)
            full = full[full != at]
            if self.prefixes is None:
                gone.append(at)
                free += self._held([at], [num_tokens])[0]
            else:  # shared pages stay with their other readers
                self._remove(np.array([at]), answered=False)
                full = full - (full > at)
                free = self._pages.free
        self.preemptions += len(preempted)
        if gone:
            gone.sort()
            self._remove(np.array(gone), answered=False)
            full = full - np.searchsorted(gone, full)
        return tuple(preempted), full

    def _chunks(self, spare_pages: int, most_sequences: int | None, resting: NDArray[np.bool_] | None) -> Chunks:
        """The partial prefills, each with one token of the next step; with none if it is ``resting``."""
        most_started = len(self._free_slots)
        if most_sequences is not None:
            most_started = min(most_started, most_sequences - self.running)
        start = list(self._partial.values())
        given = [1] * len(start) if resting is None else (~resting[self.decodes :]).astype(int).tolist()
        chunks = Chunks(start, given, {}, spare_pages, most_started)
        if start:
            tokens = self._num_tokens[self.decodes :].tolist()
            for at, group in enumerate(self._partial):
                if tokens[at] > start[at] + given[at]:
                    chunks.unfinished[group] = at, tokens[at] - start[at] - given[at]
        return chunks

    def _share(self, chunks: Chunks, spare_tokens: int, heavy_tokens: int | None, *, admit: bool) -> None:
        """Give the other prompt tokens of a step to the groups; start waiting requests while slots and pages last."""
        shares, partial, decodes = self._shares, len(self._partial), self.decodes
        several, started, unfinished, given = shares.several, chunks.slots, chunks.unfinished, chunks.given
        most_heavy = heavy_tokens if heavy_tokens is not None else self._max_batched_tokens
        limited = heavy_tokens is not None and several and shares.protects
        if limited and all(group.heavy for group in self._partial):
            chunks.heavy_tokens = 0
        if partial and several:
            for at, group in enumerate(self._partial):
                shares.charge(group, given[at])
        if partial and self.prefixes is not None:
            for at, slot in enumerate(self._running[decodes:].tolist()):
                self._pages.register(slot, chunks.start[at], chunks.start[at] + given[at])
        candidates = shares.candidates(unfinished, admit=admit)
        turn, ceiling = max(1, spare_tokens // TURNS), np.inf
        while candidates and spare_tokens > 0:
            group = candidates[0] if len(candidates) == 1 else shares.next(candidates)
            most = spare_tokens if len(candidates) == 1 else min(turn, spare_tokens)
            if limited and group.heavy:
                most = min(most, most_heavy)
            lacks = None
            if most > 0:
                lacks = unfinished.get(group)
                if lacks is None and group.waiting and admit and group.counter <= ceiling:
                    lacks = self._start(group, chunks)
                    if lacks is None:
                        ceiling = min(ceiling, group.counter + self._num_pages * self._page_size / group.weight)
            if lacks is None:
                candidates.remove(group)
                continue
            at, lacking = lacks
            tokens = lacking if lacking < most else most
            spare_tokens -= tokens
            given[at] += tokens
            if tokens < lacking:
                unfinished[group] = at, lacking - tokens
            elif group in unfinished:
                del unfinished[group]
            if several:
                shares.charge(group, tokens)
                most_heavy -= tokens * group.heavy
                if chunks.heavy_tokens is not None:
                    chunks.heavy_tokens = chunks.heavy_tokens + tokens if group.heavy else None
            if self.prefixes is not None:
                slot = int(self._running[decodes + at]) if at < partial else started[at - partial]
                self._pages.register(slot, chunks.start[at], chunks.start[at] + given[at])
        if started:
            num_tokens, length = [one.num_tokens for one in chunks.started], [one.length for one in chunks.started]
            self._running = np.concatenate((self._running, np.array(started, dtype=np.int32)))
            self._num_tokens = np.concatenate((self._num_tokens, np.array(num_tokens, dtype=np.int32)))
            self._length = np.concatenate((self._length, np.array(length, dtype=np.int32)))

    def _start(self, group: Group, chunks: Chunks) -> tuple[int, int] | None:
        """Start the oldest waiting request of a group if there is a slot for it, and pages for all its tokens.

        The same plan gives all those pages, so a partial prefill never lacks any.

        Returns:
            Its place in ``chunks``, without a token yet, and how many it lacks; None if it has to wait.
        """
        size, prefixes = self._page_size, self.prefixes
        reserved_slots = reserved_pages = 0
        if self._shares.several and self.running + len(chunks.slots):
            reserved_slots, reserved_pages = len(self._prompt) // RESERVE, self._num_pages // RESERVE
            reserved_slots *= group.running >= reserved_slots
            reserved_pages *= group.held_tokens >= reserved_pages * size
        if len(chunks.slots) >= chunks.most_started or len(self._free_slots) <= reserved_slots:
            return None
        request_id, request = group.waiting.popitem(last=False)
        prompt, num_tokens, length, page_keys = request
        found: Sequence[int] = ()
        found_held = shared = 0
        if prefixes is not None:
            found = self._pages.find(page_keys, (num_tokens - 1) // size)
            found_held = prefixes.held(found)
            shared = prefixes.extra_readers + found_held
        spare_pages = chunks.spare_pages + found_held - -(-num_tokens // size)
        pages_at_limits = self._pages_at_limits - (1 - length) // size
        admissible = spare_pages >= 0
        # Otherwise the cache holds any answers they give.
        if admissible and pages_at_limits - shared > self._num_pages - reserved_pages:
            chunks.forecast = chunks.forecast or self._forecast(chunks.slots, chunks.started)
            # True where no sequence runs: alone it fits, as ``add`` checked.
            end = self._answers.end(prompt, num_tokens, length)
            admissible = chunks.forecast.admit(num_tokens, end, found, reserved_pages * size)
        if not admissible:
            group.put_back(request_id, request)
            return None
        chunks.spare_pages = spare_pages
        self._pages_at_limits = pages_at_limits
        slot = self._free_slots.pop()
        self._request_ids[slot], self._prompt[slot] = request_id, prompt
        self._shares.occupy(slot, group, self._answers.end(prompt, num_tokens, length))
        chunks.slots.append(slot)
        chunks.started.append(request)
        if prefixes is not None:
            pages = -(-num_tokens // size)
            self._pages.share(slot, found, pages, page_keys)
            if num_tokens == prompt:
                prefixes.note_prompt(request_id, prompt, len(found) * size)
            if chunks.forecast is not None:
                end = self._answers.end(prompt, num_tokens, length)
                chunks.forecast.hold(self.page_table[slot, :pages], end - num_tokens)
        start = len(found) * size
        chunks.start.append(start)
        chunks.given.append(0)
        return len(chunks.given) - 1, num_tokens - start

    def _forecast(self, slots: Sequence[int], admitted: Sequence[Waiting]) -> PageForecast:
        """The future of the running sequences and of those just ``admitted`` to ``slots``."""
        shared = self._pages.shared(self._running, self._num_tokens)
        tokens = self._num_tokens.astype(np.int64)
        forecast = PageForecast(tokens, self._ends(), self._page_size, self._num_pages, shared)
        for slot, (prompt_tokens, num_tokens, most, _) in zip(slots, admitted, strict=True):
            found = self.page_table[slot, : self._pages.found[slot]]
            end = self._answers.end(prompt_tokens, num_tokens, most)
            forecast.admit(num_tokens, end, found.tolist())
            forecast.hold(self.page_table[slot, : num_tokens // self._page_size], end - num_tokens)
        return forecast

    def _ends(self) -> NDArray[np.int64]:
        """``[running]`` tokens of each running sequence at its expected end."""
        return self._answers.ends(self._prompt.take(self._running), self._num_tokens, self._length)

    def _held(self, running: list[int], num_tokens: list[int]) -> list[int]:
        """Pages that the running sequences at these indices hold, with so many tokens each."""
        decodes, size = self.decodes, self._page_size  # a partial prefill holds the pages of all its tokens
        return [-(-(tokens - (one < decodes)) // size) for one, tokens in zip(running, num_tokens, strict=True)]

    def _remove(self, gone: NDArray[np.intp], *, answered: bool) -> None:
        """Take the running sequences at the indices ``gone`` (ascending) out of their slots and free their pages.

        ``answered``: their answers are whole: they count in the estimate of answer lengths.
        """
        slots, lengths = self._running[gone].tolist(), self._length[gone].tolist()
        num_tokens, size, decodes = self._num_tokens[gone].tolist(), self._page_size, self.decodes
        by_slot = self._shares.by_slot
        computed: list[int] = []
        if self.prefixes is not None:
            for one, tokens, slot in zip(gone.tolist(), num_tokens, slots, strict=True):
                computed.append(tokens - 1 if one < decodes else self._partial[by_slot[slot]])
        self._pages.release(slots, self._held(gone.tolist(), num_tokens), self._request_ids[slots].tolist(), computed)
        self._pages_at_limits -= sum([-(-(length - 1) // size) for length in lengths])
        self._free_slots += slots
        if answered:
            prompts = int(self._prompt[slots].sum())
            self._answers.add(sum(num_tokens) - prompts, sum(lengths) - prompts)
        self._shares.vacate(slots)
        if self._partial and gone[-1] >= decodes:
            for slot in self._running[gone[gone >= decodes]].tolist():
                del self._partial[by_slot[slot]]
        kept = np.ones(self.running, dtype=np.bool_)
        kept[gone] = False
        self._running, self._num_tokens, self._length = self._running[kept], self._num_tokens[kept], self._length[kept]
