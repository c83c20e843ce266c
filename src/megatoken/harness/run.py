"""``megatoken run`` after preparation: one test, repeats of it, or a search for a rate."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatoken.accuracy.gate import Gate
from megatoken.analysis.repeats import REPEATS, summarise_repeats
from megatoken.config import RunConfig
from megatoken.datasets.requests import Dataset
from megatoken.files import to_json, write_text
from megatoken.harness.find_rate import find_rate
from megatoken.harness.loadgen import TestSettings
from megatoken.harness.prepare import Prepared
from megatoken.harness.progress import Progress
from megatoken.harness.session import TestSession
from megatoken.harness.stop import StopSignals
from megatoken.harness.text_stages import Codec
from megatoken.runs.run import Run, read_run
from megatoken.runs.writer import new_folder, run_name
from megatoken.targets import Target


def run_prepared(prepared: Prepared, config: RunConfig, target: Target, progress: Progress) -> Path:
    """The test of ``megatoken run``, as ``run_scenario``, on what ``prepare`` has checked."""
    data_set, facts = prepared.data_set, prepared.facts()
    return run_scenario(config, data_set, target, facts, progress, prepared.tokenizer, prepared.gate)


def run_scenario(
    config: RunConfig,
    data_set: Dataset,
    target: Target,
    facts: Mapping[str, Any],
    progress: Progress,
    tokenizer: Codec | None = None,
    gate: Gate | None = None,
) -> Path:
    """Warms up, measures and judges. Arguments as those of ``TestSession.start``.

    Returns:
        The run folder, which holds the verdict; of repeats, the folder that holds their run folders.

    Raises:
        StorageError: the run folder cannot be written; it says INTERRUPTED.
    """
    session, settings, offered = TestSession.start(config, data_set, target, facts, progress, tokenizer, gate)
    if config.find_rate:
        return find_rate(session, offered)
    if config.repeat > 1:
        return _repeat(session, settings)
    with StopSignals() as stop:
        folder = session.create_folder(config, settings, config.out, stop=stop)
        session.run(config, settings, folder, stop)
    return folder.path


def _repeat(session: TestSession, settings: TestSettings) -> Path:
    """Runs a test ``config.repeat`` times, each with a run folder; a signal ends the current one and skips the rest."""
    config = session.config
    name = run_name(datetime.now(UTC), config.scenario, config.model)
    runs: list[Run] = []
    with StopSignals() as stop, new_folder(config.out / f"{name}-repeats") as parent:
        while not runs or (len(runs) < config.repeat and not stop.received):
            session.progress.note(f"run {len(runs) + 1} of {config.repeat}")
            folder = session.create_folder(config, settings, parent, f"{len(runs) + 1:03}", stop)
            session.run(config, settings, folder, stop)
            runs.append(read_run(folder.path))
            write_text(parent / REPEATS, to_json(summarise_repeats(runs, config.repeat)))
    return parent
