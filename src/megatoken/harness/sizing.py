"""How fast a target is, from a short warm-up: samples per second when it is full, seconds of a sample alone."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
from numpy.typing import NDArray

from megatoken.datasets.requests import Dataset
from megatoken.targets import Target

WARM_UP_QUEUE = 16
REFITS = 20
KNOWN_SHARE = 0.8  # answers are known well enough when the running ones could add no more than a quarter
DEVIATIONS = 2.0  # of the mean of a sample: too long an estimate in 1 of 40 runs


def estimate_rate(target: Target, data_set: Dataset, seconds: float, learning_seconds: float) -> float:
    """Runs samples of the data set for about ``seconds``, drops them, and returns samples per second to be expected.

    Where answers may end before their limit, it goes on for at most ``learning_seconds`` to see how long they are. What
    is unknown then is taken as short: a query cannot grow, so a run must have rather too many samples than too few.
    """
    warm_up = _WarmUp(target, data_set)
    prompt_price, answer_price = warm_up.prices(seconds)
    answer_tokens = warm_up.answer_tokens(learning_seconds)
    replicas = target.counters().replicas
    target.cancel_all()
    return float(replicas / (prompt_price * data_set.input_tokens.mean() + answer_price * answer_tokens))


def estimate_latency(target: Target, data_set: Dataset, seconds: float) -> float:
    """Runs samples of the data set one after the other for about ``seconds``; mean seconds of one, at least one."""
    warm_up = _WarmUp(target, data_set)
    warm_up.one()  # not counted: it pays for what is compiled or touched once
    samples, began = 0, time.monotonic()
    while not samples or time.monotonic() - began < seconds:
        warm_up.one()
        samples += 1
    return (time.monotonic() - began) / samples


def _fit(steps: NDArray[np.float64], step_seconds: NDArray[np.float64]) -> tuple[float, float]:
    """Prices of two kinds of tokens, from steps [N, 2] and their times [N], by least absolute deviations.

    So a step that had to wait for a compiler or a neighbour counts no more than any other.
    """
    weights = np.ones(len(steps))
    for _ in range(REFITS):
        prices, _, rank, _ = np.linalg.lstsq(steps * weights[:, None], step_seconds * weights, rcond=None)
        weights = np.maximum(np.abs(steps @ prices - step_seconds), 1e-9) ** -0.5
    if rank < 2 or prices.min() <= 0:  # the steps were too alike
        tokens = steps.sum(axis=1)
        prices[:] = np.median(step_seconds[tokens > 0] / tokens[tokens > 0])
    return float(prices[0]), float(prices[1])


class _WarmUp:
    """Samples of a data set on their way through a target."""

    def __init__(self, target: Target, data_set: Dataset) -> None:
        self._target = target
        self._data_set = data_set
        rows = np.random.default_rng(0).permutation(len(data_set.requests))  # a file may be sorted
        self._samples = zip(itertools.count(-1, -1), itertools.cycle(rows.tolist()), strict=False)  # ids no query has
        self._rows: dict[int, int] = {}
        self._answered: dict[int, int] = {}  # tokens
        self._ended: set[int] = set()

    def prices(self, seconds: float) -> tuple[float, float]:
        """Runs for about ``seconds``; seconds that a token of a prompt and one of an answer cost.

        Steps with different shares of the two tell their prices apart. So new samples keep coming in the first half of
        the time only.
        """
        self._fill()
        self._poll()  # not counted: it pays for what is compiled or touched once
        steps: list[tuple[int, int]] = []  # tokens of prompts, tokens of answers
        step_seconds: list[float] = []
        began = ended = time.monotonic()
        computed = self._computed_seconds()
        while ended - began < seconds or not np.any(steps):
            if ended - began <= seconds / 2:
                self._fill()
            if not self._target.counters().in_flight:
                break
            steps.append(self._poll())
            previous, ended = ended, time.monotonic()
            seconds_taken, before = ended - previous, computed
            computed = self._computed_seconds()
            if computed is not None and before is not None:  # by the replicas, told with what they did, late or early
                seconds_taken = computed - before
            step_seconds.append(seconds_taken)
        return _fit(np.asarray(steps, np.float64), np.asarray(step_seconds))

    def answer_tokens(self, learning_seconds: float) -> float:
        """Mean answer of the data set's rows; where they may end early, rather too low than too high.

        Goes on until the running samples leave little open, for at most ``learning_seconds``. Those still running then
        count as if they ended there, and what chance may have made of the samples seen is taken off.
        """
        limits, fills = self._data_set.output_limits, self._data_set.fills_limit
        if fills.all():
            return float(limits.mean())
        deadline = time.monotonic() + learning_seconds
        while True:
            tokens, most, limit = self._answers()
            done = tokens.sum() >= KNOWN_SHARE * most.sum() or time.monotonic() >= deadline
            if done or not self._target.counters().in_flight:
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
        while self._target.counters().in_flight:
            self._poll()

    def _answers(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Of every sample submitted that may end early: tokens now, most tokens it can come to, its limit."""
        samples = [sample for sample, row in self._rows.items() if not self._data_set.fills_limit[row]]
        tokens = np.array([self._answered.get(sample, 0) for sample in samples], np.int64)
        limits = self._data_set.output_limits[[self._rows[sample] for sample in samples]]
        ended = np.array([sample in self._ended for sample in samples], np.bool_)
        return tokens, np.where(ended, tokens, limits), limits

    def _computed_seconds(self) -> float | None:
        return self._target.counters().computed_seconds

    def _fill(self) -> None:
        self._submit(WARM_UP_QUEUE * self._target.counters().replicas)

    def _submit(self, queue: int) -> None:
        for sample, row in itertools.islice(self._samples, max(0, queue - self._target.counters().waiting)):
            self._target.submit(sample, self._data_set.requests[row])
            self._rows[sample] = row

    def _poll(self) -> tuple[int, int]:
        """Polls once; tokens of prompts and of answers that were computed."""
        before = self._target.counters()
        events = self._target.poll(timeout_seconds=0.1)
        answers = sum(event.sample_id in self._answered for event in events)
        for event in events:
            tokens = self._answered.get(event.sample_id, 0) + len(event.token_ids)
            self._answered[event.sample_id] = tokens if event.output_tokens is None else event.output_tokens
            if event.finish_reason is not None:
                self._ended.add(event.sample_id)
        after = self._target.counters()
        if after.decoded_tokens is not None and before.decoded_tokens is not None:
            answers = after.decoded_tokens - before.decoded_tokens
        return after.processed_tokens - before.processed_tokens - answers, answers
