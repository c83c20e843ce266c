"""How every run folder of the harness begins, and how an error ends it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatoken.analysis.summary import summarise_run
from megatoken.config import RunConfig
from megatoken.errors import MegatokenError
from megatoken.hardware.inventory import take_inventory
from megatoken.hardware.specification import contradictions
from megatoken.harness.progress import Progress
from megatoken.harness.result import run_notes
from megatoken.runs.reasons import Reason, reason
from megatoken.runs.writer import RunFolder, run_name


def record(
    config: RunConfig,
    facts: Mapping[str, Any],
    out: Path,
    *,
    name: str | None = None,
    scenario: str | None = None,
    notes: Sequence[Reason] = (),
) -> RunFolder:
    """Creates a run folder in ``out``; it says INTERRUPTED until there is a verdict.

    ``config`` is resolved, ``facts`` are fields of ``result.json`` that are known by now, and ``notes`` come after
    theirs. By default ``scenario`` is that of ``config``, and ``name`` follows from the time, the scenario and the
    model.
    """
    scenario = scenario or config.scenario
    environment = take_inventory()
    if "servers" in facts:  # what they say of themselves is part of the environment
        facts = dict(facts)
        environment["servers"] = facts.pop("servers")
    against = [text for gpu in environment["gpus"] for text in contradictions(gpu)]
    found = [reason("SPECIFICATION", text=text) for text in dict.fromkeys(against)]
    common = {
        "notes": [*run_notes(facts), *found, *notes],
        "mode": config.mode,
        "rules": config.rules,
        "text": config.text,
    }
    return RunFolder.create(
        out,
        name or run_name(datetime.now(UTC), scenario, config.model),
        config.model_dump(mode="json"),
        environment,
        scenario=scenario,
        facts={**facts, **common},
        summarise=summarise_run,
    )


@contextmanager
def interrupted_by_errors(folder: RunFolder, progress: Progress, advice: str | None = None) -> Iterator[None]:
    """Ends ``folder`` as INTERRUPTED if an error leaves this context; its message then ends with ``advice``."""
    try:
        yield
    except BaseException as error:
        folder.interrupt(reason("INTERRUPTED", error=type(error).__name__, cause=str(error)))
        if advice is not None and isinstance(error, MegatokenError):
            error.args = (f"{error}; {advice}",)
        raise
    finally:
        progress.clear()
