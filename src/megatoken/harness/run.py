"""``megatoken run`` once everything is checked: warm up, plan, then one test, repeats of it, or a search for a rate."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatoken.accuracy.gate import Gate
from megatoken.config import RunConfig
from megatoken.datasets.requests import Dataset
from megatoken.harness.bench import Bench
from megatoken.harness.client_limit import measure_client_limit
from megatoken.harness.find_rate import find_rate
from megatoken.harness.loadgen import TestSettings
from megatoken.harness.loadgen_plan import OFFERED_SHARES, learning_seconds, plan_test, run_limits
from megatoken.harness.progress import Progress
from megatoken.harness.repeats import repeat
from megatoken.harness.sizing import estimate_latency, estimate_rate
from megatoken.harness.stop import StopSignals
from megatoken.harness.text_stages import Codec, TextStages
from megatoken.targets import Target


def run_scenario(
    config: RunConfig,
    data_set: Dataset,
    target: Target,
    facts: Mapping[str, Any],
    progress: Progress,
    tokenizer: Codec | None = None,
    gate: Gate | None = None,
) -> Path:
    """Warms up, measures and judges.

    Args:
        config: what to run.
        data_set: its requests; every one can be served.
        target: what serves them; nobody else may use it meanwhile.
        facts: what is known of model and data set, for ``result.json``; the target adds its own.
        progress: where to say how far it is.
        tokenizer: of the model; only ``config.text`` needs it.
        gate: what the answers are held against before there is a verdict.

    Returns:
        The run folder, which holds the verdict; of repeats the folder that holds theirs.

    Raises:
        StorageError: the run folder cannot be written; what is there says INTERRUPTED.
    """
    bench, settings, offered = make_bench(config, data_set, target, facts, progress, tokenizer, gate)
    if config.find_rate:
        return find_rate(bench, offered)
    if config.repeat > 1:
        return repeat(bench, settings)
    with StopSignals() as stop:
        folder = bench.create_folder(config, settings, config.out)
        stop.parting_words = f"stopped at once; {folder.path} says INTERRUPTED and keeps what was done"
        stop.write_seconds = folder.write_seconds
        bench.run(config, settings, folder, stop)
    return folder.path


def make_bench(
    config: RunConfig,
    data_set: Dataset,
    target: Target,
    facts: Mapping[str, Any],
    progress: Progress,
    tokenizer: Codec | None = None,
    gate: Gate | None = None,
) -> tuple[Bench, TestSettings, float]:
    """Warms up and plans, as ``run_scenario`` does.

    Returns:
        What all tests share, what to ask of LoadGen, and samples per second to be offered.
    """
    gc.collect()
    gc.freeze()  # a collection during the run walks what the run has made, not every module
    text = None
    if config.text and tokenizer is not None:
        progress.stage("making the text of every prompt")
        text = TextStages(tokenizer, data_set)
    rate = _warm_up(config, data_set, target, progress)
    offered = config.rate or OFFERED_SHARES.get(config.scenario, 1.0) * rate
    settings = plan_test(config, len(data_set.requests), offered)
    client = None
    if run_limits(config) is not None:
        progress.stage("measuring what the client can do alone")
        client = measure_client_limit(settings, data_set)
    facts = {**facts, "estimated_samples_per_second": rate}
    bench = Bench(config, data_set, target, facts, progress, text, client, gate)
    return bench, settings, offered


def _warm_up(config: RunConfig, data_set: Dataset, target: Target, progress: Progress) -> float:
    """Samples per second to be expected of the target: full, or in SingleStream one after the other."""
    if config.scenario == "singlestream":
        progress.stage(f"warming up for {config.warm_up_seconds:g} s")
        return 1 / estimate_latency(target, data_set, config.warm_up_seconds)
    learning = learning_seconds(config, len(data_set.requests))
    at_least = "at least " if learning and not data_set.fills_limit.all() else ""
    progress.stage(f"warming up for {at_least}{config.warm_up_seconds:g} s")
    return estimate_rate(target, data_set, config.warm_up_seconds, learning)
