"""``megatoken run`` after preparation: one test, repeats of it, or a search for a rate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatoken.accuracy.gate import Gate
from megatoken.config import RunConfig
from megatoken.datasets.requests import Dataset
from megatoken.harness.find_rate import find_rate
from megatoken.harness.progress import Progress
from megatoken.harness.repeats import repeat
from megatoken.harness.session import TestSession
from megatoken.harness.stop import StopSignals
from megatoken.harness.text_stages import Codec
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
        return repeat(session, settings)
    with StopSignals() as stop:
        folder = session.create_folder(config, settings, config.out, stop=stop)
        session.run(config, settings, folder, stop)
    return folder.path
