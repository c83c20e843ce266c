"""How many samples an Offline run needs: a short warm-up estimates the rate, the user and the rules decide the rest."""

from __future__ import annotations

import itertools
import math
import time

from megatoken.config import RunConfig
from megatoken.harness.datasets import Dataset
from megatoken.harness.loadgen import OfflineSettings
from megatoken.harness.rules import DEFAULT_ROUND, ROUNDS
from megatoken.targets import Target

DEFAULT_DURATION_SECONDS = 15.0
LOADGEN_MARGIN = 1.1  # LoadGen asks for this much more than duration x rate
RULES_MARGIN = 1.2  # on top: a run that ends before the rules' duration is lost, a longer one only takes longer
WARM_UP_QUEUE = 16


def estimate_rate(target: Target, data_set: Dataset, seconds: float) -> float:
    """Runs samples of the data set for about ``seconds``, drops them, and returns samples per second to be expected.

    Tokens of prompts and of answers have different prices. In the first half of the time new samples keep coming; then
    the prompts run out, and steps without any show the price of an answer's token. Taken off the steps with both, it
    leaves the price of the prompts' tokens.
    """
    samples = enumerate(itertools.cycle(data_set.requests))
    answering: set[int] = set()
    both_seconds = answer_seconds = 0.0
    prompt_tokens = answer_tokens_beside_prompts = answer_tokens_alone = 0
    began = ended = time.monotonic()
    processed = target.counters().processed_tokens
    while ended - began < seconds or not prompt_tokens:
        while ended - began <= seconds / 2 and target.counters().waiting < WARM_UP_QUEUE:
            target.submit(*next(samples))
        if not target.counters().in_flight:
            break
        events = target.poll(timeout_seconds=0.1)
        step_seconds, ended = time.monotonic() - ended, time.monotonic()
        answers = sum(event.sample_id in answering for event in events)
        answering.update(event.sample_id for event in events)
        prompts = target.counters().processed_tokens - processed - answers
        processed += prompts + answers
        if prompts > 0:
            both_seconds += step_seconds
            prompt_tokens += prompts
            answer_tokens_beside_prompts += answers
        else:
            answer_seconds += step_seconds
            answer_tokens_alone += answers
    target.cancel_all()
    if answer_tokens_alone:
        answer_price = answer_seconds / answer_tokens_alone
        prompt_price = max(0.0, both_seconds - answer_price * answer_tokens_beside_prompts) / prompt_tokens
    else:
        answer_price = prompt_price = both_seconds / (prompt_tokens + answer_tokens_beside_prompts)
    return float(1 / (prompt_price * data_set.input_tokens.mean() + answer_price * data_set.output_limits.mean()))


def plan_offline(config: RunConfig, rows: int, samples_per_second: float) -> OfflineSettings:
    """What to ask of LoadGen for ``config`` on a data set of ``rows`` rows, at the estimated rate.

    Claimed rules that nothing cuts short leave count and duration to LoadGen, in whole passes over the data set. All
    else issues an exact number of samples: distinct rows drawn by LoadGen when they are fewer than the data set, which
    repeats when they are more. Accuracy mode takes the first rows.
    """
    rules = ROUNDS[config.rules or DEFAULT_ROUND]
    performance = config.mode == "performance"
    if config.rules and performance and (config.samples is None or config.samples >= rows):
        rate = RULES_MARGIN * samples_per_second
        return OfflineSettings(config.mode, rows, rows, config.samples, config.min_duration_seconds, rate, rules.seeds)
    if config.min_duration_seconds is not None:
        seconds = config.min_duration_seconds
    elif config.rules:
        seconds = rules.min_duration_seconds
    else:
        seconds = DEFAULT_DURATION_SECONDS if config.samples is None else 0.0
    samples = config.samples or rows
    if performance and config.samples is None and seconds > 0:
        samples = max(1, math.floor(LOADGEN_MARGIN * seconds * samples_per_second))
    return OfflineSettings(
        mode=config.mode,
        data_set_size=max(rows, samples) if performance else samples,
        subset=samples,
        samples=samples,
        min_duration_seconds=seconds,
        # Low enough that duration x rate asks for no sample more.
        target_samples_per_second=0.9 * samples / max(seconds, 1.0),
        seeds=rules.seeds,
    )
