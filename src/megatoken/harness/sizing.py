"""Estimates the speed of a target in a short warm-up: samples per second when full, seconds of a single sample."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatoken.datasets.requests import Dataset
from megatoken.targets import RemoteTarget, Target
from megatoken.text import count_of

WARM_UP_QUEUE = 16
POLL_SECONDS = 0.1
REFITS = 20
SAME_FIT = 1e-6  # of the time: among fits so close to the best one, the one with the fewest prices wins
LEAST_EXPLAINED = 0.01  # of the time: waits for a compiler or another process are never that much longer than the rest
KNOWN_SHARE = 0.8  # answers are known well enough when the running ones can add at most a quarter
SHOW_SECONDS = 1.0
SILENT_SHARE = 0.5  # of the warm-up without any token, from which a server is silent and not slow
DEVIATIONS = 2.0  # standard errors of the mean: the estimate is too long in 1 of 40 runs


class OwnLoad(NamedTuple):
    """The most that a run puts on its target. The warm-up of a ``RemoteTarget`` stays within it: others pay for it."""

    in_flight: float = math.inf  # samples at once
    samples: float = math.inf  # in all
    rate: float = math.inf  # samples per second


UNLIMITED = OwnLoad()
Waiting = Callable[[int, float], None]
"""Shows the requests in flight, and how many seconds ago one of them was answered; called once a second."""


def _show_nothing(in_flight: int, silent_seconds: float) -> None:
    pass


def estimate_rate(
    target: Target,
    data_set: Dataset,
    seconds: float,
    learning_seconds: float,
    own_load: OwnLoad = UNLIMITED,
    note: Callable[[str], None] = lambda _: None,
    waiting: Waiting = _show_nothing,
) -> float:
    """Runs samples of the data set for about ``seconds``, drops them, and returns the expected samples per second.

    If answers may end before their limit, it runs for at most ``learning_seconds`` more to learn how long they are.
    Answers that are still unknown then count as short: an Offline query cannot grow, so too many samples are better
    than too few. ``note`` is called with a sentence about a server that fell silent.
    """
    warm_up = _WarmUp(target, data_set, waiting)
    if not target.replicas() or isinstance(target, RemoteTarget):
        rate = warm_up.rate(seconds, learning_seconds, own_load, note)
        target.cancel_all()
        return rate
    prices = warm_up.prices(seconds)
    answer_tokens = warm_up.answer_tokens(learning_seconds)
    state = target.state()
    target.cancel_all()
    prompt_tokens = float(data_set.input_tokens.mean())
    rows = state.max_batched_tokens / state.replicas or math.inf
    residents = _residents(target.facts().get("memory_plan"), prompt_tokens, answer_tokens)
    steps = answer_tokens / min(residents, rows * answer_tokens / (prompt_tokens + answer_tokens))
    read_tokens = answer_tokens * (prompt_tokens + answer_tokens / 2)
    work = steps, prompt_tokens + answer_tokens, answer_tokens, read_tokens
    sample_seconds = float(np.dot(work, prices))
    # Zero on a machine so busy that no price could be fitted: then at least one sample took all the warm-up.
    return state.replicas / (sample_seconds or seconds)


def estimate_latency(
    target: Target,
    data_set: Dataset,
    seconds: float,
    own_load: OwnLoad = UNLIMITED,
    waiting: Waiting = _show_nothing,
) -> float:
    """Runs samples one after the other for about ``seconds``, at least one; returns the mean seconds of one."""
    warm_up, began = _WarmUp(target, data_set, waiting), time.monotonic()
    warm_up.one()  # not counted: it includes one-time work, such as compiling
    most = own_load.samples - 1 if isinstance(target, RemoteTarget) else math.inf
    if most < 1:
        return time.monotonic() - began
    samples, began = 0, time.monotonic()
    while not samples or (samples < most and time.monotonic() - began < seconds):
        warm_up.one()
        samples += 1
    return (time.monotonic() - began) / samples


def _residents(plan: Mapping[str, Any] | None, prompt_tokens: float, answer_tokens: float) -> float:
    """Samples that a replica can run at a time, each half answered."""
    if plan is None:
        return math.inf
    sequences, cached_tokens = float(plan["max_sequences"]), float(plan["pages"] * plan["page_size"])
    return min(sequences, cached_tokens / (prompt_tokens + answer_tokens / 2))


class _Work(NamedTuple):
    """Work of a target, of which each kind has its price in seconds.

    A step with few tokens takes as long as reading the weights, and a short warm-up of a large target has hardly any
    other decode steps. So a step has its own price. A decoded token costs at least as much as a prompt token,
    since both go through the same matrix products; late in long answers it reads more context than a warm-up sees.
    """

    steps: int
    rows: int
    answer_rows: int
    read_tokens: int  # by the rows of answers: what is before them


def _fit(work: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Fits prices [4], none below zero, to ``_Work`` [N, 4] and its seconds [N].

    By least absolute deviations, so that a step that waited for a compiler or another process weighs no more than any
    other. If the steps are too alike to separate the prices, the price of a token explains everything.
    """
    fits = []
    kinds_of_work = sorted(_subsets(work.shape[1]), key=lambda kinds: (1 not in kinds, len(kinds)))
    for kinds in map(list, kinds_of_work):
        prices, weights, part = np.zeros(work.shape[1]), np.ones(len(work)), work[:, kinds]
        for _ in range(REFITS):
            prices[kinds], _, rank, _ = np.linalg.lstsq(part * weights[:, None], seconds * weights, rcond=None)
            weights = np.maximum(np.abs(part @ prices[kinds] - seconds), 1e-9) ** -0.5
        if rank == len(kinds) and prices.min() >= 0:
            fits.append((float(np.abs(work @ prices - seconds).sum()), prices))
    enough = min(error for error, _ in fits) + SAME_FIT * seconds.sum()
    prices = next(prices for error, prices in fits if error <= enough)
    if (work @ prices).sum() < LEAST_EXPLAINED * seconds.sum():  # the work came apart from its time
        prices = np.zeros(work.shape[1])
        prices[1] = seconds.sum() / work[:, 1].sum()
    return prices


def _subsets(count: int) -> Iterator[tuple[int, ...]]:
    return itertools.chain.from_iterable(itertools.combinations(range(count), size) for size in range(1, count + 1))


class _WarmUp:
    """Runs samples of a data set on a target and records their answers."""

    def __init__(self, target: Target, data_set: Dataset, waiting: Waiting) -> None:
        self._target = target
        self._waiting = waiting
        self._data_set = data_set
        rows = np.random.default_rng(0).permutation(len(data_set.requests))  # a file may be sorted
        self._samples = zip(itertools.count(-1, -1), itertools.cycle(rows.tolist()), strict=False)  # ids no query has
        self._rows: dict[int, int] = {}
        self._answered: dict[int, int] = {}  # tokens
        self._ended: set[int] = set()
        self._last_event = -math.inf  # when it came
        self._shown = self._silent_since = time.monotonic()

    def prices(self, seconds: float) -> NDArray[np.float64]:
        """Runs for about ``seconds`` and fits the prices.

        Steps with different shares of prompts and answers are needed to separate the prices, so new samples come in the
        first half of the time only.
        """
        self._fill()
        self._poll()  # not counted: it includes one-time work, such as compiling
        work: list[_Work] = []
        work_seconds: list[float] = []
        began = ended = time.monotonic()
        computed = self._computed_seconds()
        while ended - began < seconds or not work:
            if ended - began <= seconds / 2:
                self._fill()
            if not self._target.state().in_flight:
                break
            done = self._poll()
            previous, ended = ended, time.monotonic()
            seconds_taken, before = ended - previous, computed
            computed = self._computed_seconds()
            if computed is not None:  # the replicas' own time, which they report together with their work
                seconds_taken = computed - (before or 0.0)
            if done.rows:
                work.append(done)
                work_seconds.append(seconds_taken)
        if not any(work_seconds):  # none reported yet: at most all the time that passed
            rows, passed = sum(done.rows for done in work), (ended - began) * self._target.state().replicas
            work_seconds = [passed * done.rows / rows for done in work]
        return _fit(np.asarray(work, np.float64), np.asarray(work_seconds))

    def rate(self, seconds: float, learning_seconds: float, own_load: OwnLoad, note: Callable[[str], None]) -> float:
        """Samples per second of a target that shows nothing of its replicas, kept full for about ``seconds``.

        A target is full at ``own_load``. Samples still running count by the share of their limit that has been
        answered, so the rate is too low, if anything. It goes on until one sample has ended, for at most
        ``learning_seconds`` more. Without any ``seconds`` it is that of one sample alone.
        """
        began = time.monotonic()
        if not seconds:
            self.one()
            return 1.0 / (time.monotonic() - began)
        while (passed := time.monotonic() - began) < seconds + learning_seconds:
            due = min(own_load.samples, 1 + own_load.rate * passed)
            if passed < seconds:
                self._fill(min(own_load.in_flight - self._target.state().in_flight, due - len(self._rows)))
            more_come = passed < seconds and len(self._rows) < own_load.samples
            if (passed >= seconds and self._ended) or not (self._target.state().in_flight or more_come):
                break
            next_due = len(self._rows) / own_load.rate - passed if more_come else math.inf
            # one that is due already waits for room, which an event gives
            self._poll(next_due if 0 < next_due < POLL_SECONDS else POLL_SECONDS)
        limits = self._data_set.output_limits
        done = sum(
            1.0 if sample in self._ended else self._answered.get(sample, 0) / int(limits[row])
            for sample, row in self._rows.items()
        )
        ended = time.monotonic()
        silent_seconds, unanswered = ended - max(began, self._last_event), len(self._rows) - len(self._answered)
        if unanswered and silent_seconds > SILENT_SHARE * (ended - began):
            note(
                f"{unanswered} of {count_of(len(self._rows), 'request')} of the warm-up had no answer, and the server "
                f"sent nothing in its last {silent_seconds:.1f} s"
            )
        return max(done, 1.0) / (ended - began)

    def answer_tokens(self, learning_seconds: float) -> float:
        """Mean answer length of the data set's rows; if answers may end early, a low estimate.

        Runs until the running samples can change little, for at most ``learning_seconds``. Samples still running then
        count as if they ended there, and the statistical error of the mean is subtracted.
        """
        limits, fills = self._data_set.output_limits, self._data_set.fills_limit
        if fills.all():
            return float(limits.mean())
        deadline = time.monotonic() + learning_seconds
        while True:
            tokens, most, limit = self._answers()
            done = tokens.sum() >= KNOWN_SHARE * most.sum() or time.monotonic() >= deadline
            if done or not self._target.state().in_flight:
                break
            self._poll()
        if not len(tokens):
            return float(np.where(fills, limits, 1).mean())
        share = tokens.sum() / limit.sum()  # of the limit: rows with other limits have other answers
        share -= DEVIATIONS * np.std(tokens - share * limit) / (math.sqrt(len(tokens)) * limit.mean())
        return float(np.where(fills, limits, np.maximum(1, share * limits)).mean())

    def one(self) -> None:
        """Runs one sample to its end."""
        self._submit(1)
        while self._target.state().in_flight:
            self._poll()

    def _answers(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """For every sample submitted that may end early: its tokens now, the most that it can reach, its limit."""
        samples = [sample for sample, row in self._rows.items() if not self._data_set.fills_limit[row]]
        tokens = np.array([self._answered.get(sample, 0) for sample in samples], np.int64)
        limits = self._data_set.output_limits[[self._rows[sample] for sample in samples]]
        ended = np.array([sample in self._ended for sample in samples], np.bool_)
        return tokens, np.where(ended, tokens, limits), limits

    def _computed_seconds(self) -> float | None:
        state = self._target.state()
        return state.computed_seconds if state.steps else None

    def _fill(self, most: float = math.inf) -> None:
        """Submits enough samples for the next step of every replica, at most ``most``."""
        state = self._target.state()
        step = math.ceil(state.max_batched_tokens / max(1.0, self._data_set.input_tokens.mean()))
        self._submit(max(WARM_UP_QUEUE * state.replicas, step), most)

    def _submit(self, queue: int, most: float = math.inf) -> None:
        new = min(queue - self._target.state().waiting, most)
        for sample, row in itertools.islice(self._samples, max(0, math.floor(new))):
            self._target.submit(sample, self._data_set.requests[row])
            self._rows[sample] = row

    def _poll(self, longest_seconds: float = POLL_SECONDS) -> _Work:
        """Polls once; returns the work done."""
        before = self._target.state()
        events = self._target.poll(longest_seconds)
        now = time.monotonic()
        if events:
            self._last_event = now
        if events or not before.in_flight:
            self._silent_since = now
        if now - self._shown >= SHOW_SECONDS:
            self._shown = now
            self._waiting(before.in_flight, now - self._silent_since)
        going_on = [event.sample_id for event in events if event.sample_id in self._answered]
        read = sum(self._answered[one] + int(self._data_set.input_tokens[self._rows[one]]) for one in going_on)
        for event in events:
            tokens = self._answered.get(event.sample_id, 0) + len(event.token_ids)
            self._answered[event.sample_id] = tokens if event.output_tokens is None else event.output_tokens
            if event.finish_reason is not None or event.error is not None:
                self._ended.add(event.sample_id)
        after = self._target.state()
        rows = after.processed_tokens - before.processed_tokens
        if not after.steps:
            return _Work(1, rows, len(going_on), read)
        return _Work(
            after.steps - before.steps,
            rows,
            after.decoded_tokens - before.decoded_tokens,
            after.context_tokens - before.context_tokens,
        )
