"""How every run folder of the harness begins, and how an error ends it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatoken.analysis.qualified import machine_of
from megatoken.analysis.summary import summarise_run
from megatoken.config import RunConfig
from megatoken.errors import MegatokenError
from megatoken.files import plain, redact
from megatoken.hardware.inventory import take_inventory
from megatoken.hardware.specification import contradictions, data_sheet
from megatoken.harness.progress import Progress
from megatoken.harness.result import run_notes
from megatoken.runs.plan_hash import part_hashes, plan_of
from megatoken.runs.reasons import Reason, reason
from megatoken.runs.run import QUALIFICATION
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
    facts = dict(facts)
    qualification = facts.pop("qualification_document", None)
    if qualification is not None:
        facts["qualification"] = {name: qualification[name] for name in ("created_at", "device", "verdict", "answer")}
    facts["peaks"] = peaks(config, facts, environment, qualification)
    against = [text for gpu in environment["gpus"] for text in contradictions(gpu)]
    found = [reason("SPECIFICATION", text=text) for text in dict.fromkeys(against)]
    common = {
        "notes": [*run_notes(facts), *found, *notes],
        "mode": config.mode,
        "rules": config.rules,
        "text": config.text,
    }
    values = config.model_dump(mode="json")
    written = redact(plain(values)), plain(facts), plain(environment)  # as the files will say
    plan = plan_of(*written, plain(facts.get("seeds") or {}))
    return RunFolder.create(
        out,
        name or run_name(datetime.now(UTC), scenario, config.model),
        values,
        environment,
        scenario=scenario,
        facts={**facts, **common, "plan_sha256": part_hashes(plan)},
        summarise=summarise_run,
        qualification=qualification,
    )


def peaks(
    config: RunConfig,
    facts: Mapping[str, Any],
    environment: Mapping[str, Any],
    qualification: Mapping[str, Any] | None,
) -> dict[str, Any] | None:
    """What the hardware of a run can do: GPUs by their data sheet, a processor by its qualification; None: unknown."""
    device = (facts.get("memory_plan") or {}).get("device")
    if device == "cuda" and environment["gpus"] and config.rack.simulated_gpu is None:
        sheet = data_sheet(str(environment["gpus"][0]["name"]))
        if sheet is None:
            return None
        gpus = config.engine.tensor_parallel * sum(
            node["replicas"] for node in facts.get("rack_nodes") or [{"replicas": 1}]
        )
        operations = sheet.operations_per_second.get(facts["precision"])
        return {
            "operations_per_second": operations and gpus * operations,
            "memory_bytes_per_second": gpus * sheet.memory_bytes_per_second,
            "source": f"data sheet of {sheet.name}",
        }
    if device == "cpu" and qualification is not None and "rack_nodes" not in facts:
        machine = machine_of(qualification, QUALIFICATION)
        operations = machine.most_operations_per_second(facts["precision"])
        return {
            "operations_per_second": operations,
            "memory_bytes_per_second": machine.read_bytes_per_second,
            "source": QUALIFICATION,
        }
    return None


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
