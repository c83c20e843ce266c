"""How many samples an Offline run needs: a short warm-up estimates the rate, the user and the rules decide the rest."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
from numpy.typing import NDArray

from megatoken.config import RunConfig
from megatoken.harness.datasets import Dataset
from megatoken.harness.loadgen import OfflineSettings
from megatoken.harness.rules import DEFAULT_ROUND, ROUNDS
from megatoken.targets import Target

DEFAULT_DURATION_SECONDS = 15.0
DURATION_MARGIN = 1.2  # a run that ends before the duration asked for is lost, a longer one only takes longer
LOADGEN_MARGIN = 1.1  # LoadGen's own, on top
WARM_UP_QUEUE = 16


def estimate_rate(target: Target, data_set: Dataset, seconds: float) -> float:
    """Runs samples of the data set for about ``seconds``, drops them, and returns samples per second to be expected.

    Tokens of prompts and of answers have different prices; steps with different shares of them tell the two apart. So
    new samples keep coming in the first half of the time only.
    """
    samples = zip(itertools.count(-1, -1), itertools.cycle(data_set.requests), strict=False)  # ids no query has
    answering: set[int] = set()
    steps: list[tuple[int, int]] = []  # tokens of prompts, tokens of answers
    step_seconds: list[float] = []
    began = ended = time.monotonic()
    processed = target.counters().processed_tokens
    while ended - began < seconds or not np.any(steps):
        if ended - began <= seconds / 2:
            for sample_id, request in itertools.islice(samples, max(0, WARM_UP_QUEUE - target.counters().waiting)):
                target.submit(sample_id, request)
        if not target.counters().in_flight:
            break
        events = target.poll(timeout_seconds=0.1)
        previous, ended = ended, time.monotonic()
        answers = sum(event.sample_id in answering for event in events)
        answering.update(event.sample_id for event in events)
        previously, processed = processed, target.counters().processed_tokens
        steps.append((processed - previously - answers, answers))
        step_seconds.append(ended - previous)
    target.cancel_all()
    prices = np.linalg.lstsq(np.asarray(steps, np.float64), np.asarray(step_seconds), rcond=None)[0]
    if prices.min() <= 0:  # the steps were too alike
        prices[:] = sum(step_seconds) / np.sum(steps)
    return float(1 / (prices @ (data_set.input_tokens.mean(), data_set.output_limits.mean())))


def plan_offline(config: RunConfig, rows: int, samples_per_second: float) -> OfflineSettings:
    """What to ask of LoadGen for ``config`` on a data set of ``rows`` rows, at the estimated rate.

    Claimed rules that nothing cuts short leave count and duration to LoadGen, in whole passes over the data set. All
    else issues an exact number of samples, each a row of the library once; ``library_to_data_set`` says which.
    """
    rules = ROUNDS[config.rules or DEFAULT_ROUND]
    performance = config.mode == "performance"
    cut_short = config.samples is not None and config.samples < max(rows, rules.min_samples)
    if config.rules and performance and not cut_short:
        rate = DURATION_MARGIN * samples_per_second
        return OfflineSettings(config.mode, rows, config.samples, config.min_duration_seconds, rate, rules.seeds)
    seconds = config.min_duration_seconds
    if seconds is None:
        seconds = rules.min_duration_seconds if config.rules else 0.0
    samples = config.samples or rows
    if performance and config.samples is None and config.min_duration_seconds != 0:
        sized_for_seconds = DURATION_MARGIN * seconds or DEFAULT_DURATION_SECONDS
        samples = max(1, math.floor(LOADGEN_MARGIN * sized_for_seconds * samples_per_second))
    # The rate is low enough that duration x rate asks for no sample more.
    return OfflineSettings(config.mode, samples, samples, seconds, 0.9 * samples / max(seconds, 1.0), rules.seeds)


def library_to_data_set(mode: str, library_rows: int, rows: int) -> NDArray[np.int64]:
    """The data set row behind each row of LoadGen's library [library_rows].

    A smaller library is spread evenly over the data set, which may be sorted by origin; in accuracy mode it is the
    first rows, so that LoadGen's indices stay those of the data set. A larger one repeats the data set.
    """
    index = np.arange(library_rows)
    return index * rows // library_rows if library_rows < rows and mode == "performance" else index % rows
