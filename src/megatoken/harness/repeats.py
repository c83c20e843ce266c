"""The same test several times: a run folder each, and their summary, in one folder."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from megatoken.analysis.repeats import REPEATS, summarise_repeats
from megatoken.files import to_json, write_text
from megatoken.harness.loadgen import TestSettings
from megatoken.harness.session import TestSession
from megatoken.harness.stop import StopSignals
from megatoken.runs.run import Run, read_run
from megatoken.runs.writer import run_name


def repeat(session: TestSession, settings: TestSettings) -> Path:
    """Runs a test ``config.repeat`` times; a signal ends the current run and skips the rest.

    Returns:
        The folder with the run folders and ``repeats.json``.
    """
    config = session.config
    name = run_name(datetime.now(UTC), config.scenario, config.model)
    parent = config.out / f"{name}-repeats"
    runs: list[Run] = []
    with StopSignals() as stop:
        while not runs or (len(runs) < config.repeat and not stop.received):
            session.progress.note(f"run {len(runs) + 1} of {config.repeat}")
            folder = session.create_folder(config, settings, parent, f"{len(runs) + 1:03}", stop)
            session.run(config, settings, folder, stop)
            runs.append(read_run(folder.path))
            write_text(parent / REPEATS, to_json(summarise_repeats(runs, config.repeat)))
    return parent
