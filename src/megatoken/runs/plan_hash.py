"""Everything that decides a run, by dotted name, and one hash over it: two runs of one plan do the same work."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from megatoken.runs.run import Run

NOT_DECIDING = ("out", "limits", "dollars_per_hour")  # keys of a configuration
IDENTITY = ("weights_sha256", "tokenizer_sha256", "chat_template_sha256", "rows_sha256")
FACTS = ("model", "weights", "precision", "data_set_sha256", "data_set_rows")
PARTS_VERSION = "1"  # of ``part_hashes``: another one where a part has other keys
BYTES_PER_GIB = 2**30


def plan_of_run(run: Run) -> dict[str, str]:
    """The plan of a run folder."""
    return plan_of(run.config, run.result, run.environment, run.result.get("seeds") or {})


def plan_of(
    config: Mapping[str, Any], facts: Mapping[str, Any], environment: Mapping[str, Any], seeds: Mapping[str, Any]
) -> dict[str, str]:
    """Configuration, identity of model and rows, versions of all packages, seeds and class of machine, as text.

    ``facts``: fields of ``result.json``; ``environment``: as in ``environment.json``; ``seeds``: LoadGen's.
    """
    identity = facts.get("identity") or {}
    parts = {
        "config": {key: value for key, value in config.items() if key not in NOT_DECIDING},
        "identity": {
            **{name: facts.get(name) for name in FACTS},
            **{name: identity.get(name) for name in IDENTITY},
        },
        "seeds": dict(seeds),
        "machine": _machine_class(environment),
        "python": environment.get("python"),
        "packages": environment.get("all_packages") or environment.get("packages"),
        "source": (environment.get("source") or {}).get("revision"),
        "variables": environment.get("variables"),
    }
    return dict(sorted((key, value) for key, value in flat("", parts) if value))


def plan_hash(plan: Mapping[str, str]) -> str:
    """SHA-256 over a plan."""
    return hashlib.sha256(json.dumps(dict(sorted(plan.items()))).encode()).hexdigest()


def part_hashes(plan: Mapping[str, str]) -> dict[str, str]:
    """SHA-256 over each part of a plan, which a run keeps so that a later change of its files is noticed.

    ``version`` says which keys the parts have.
    """
    parts: dict[str, dict[str, str]] = {}
    for key, value in plan.items():
        parts.setdefault(key.partition(".")[0], {})[key] = value
    return {"version": PARTS_VERSION, **{part: plan_hash(values) for part, values in sorted(parts.items())}}


def unknown_edits(run: Run) -> str:
    """Why nothing shows whether a run folder's plan was changed after the run began; empty if its hashes do.

    Older versions wrote no hashes, and points of a sweep have none.
    """
    stored = _stored_parts(run)
    if len(stored) == 1:
        return "it has no hashes of what decided the run (plan_sha256)"
    if stored["version"] != PARTS_VERSION:
        return f"its hashes of what decided the run (plan_sha256) have version {stored['version']}, not {PARTS_VERSION}"
    return ""


def _stored_parts(run: Run) -> dict[str, str]:
    return {"version": "1", **(run.result.get("plan_sha256") or {})}  # the first hashes had no version


def changed_parts(run: Run) -> list[dict[str, str | None]]:
    """The parts of a run folder's plan that were changed after the run began, as ``plan_differences``.

    None of a folder of ``unknown_edits``.
    """
    if unknown_edits(run):
        return []
    stored = _stored_parts(run)
    return plan_differences(stored, part_hashes(plan_of_run(run)))


def plan_differences(then: Mapping[str, str], now: Mapping[str, str]) -> list[dict[str, str | None]]:
    """Each key under which two plans differ, with both values; None where one has no such key."""
    return [
        {"key": key, "then": then.get(key), "now": now.get(key)}
        for key in sorted(then.keys() | now.keys())
        if then.get(key) != now.get(key)
    ]


def _machine_class(environment: Mapping[str, Any]) -> dict[str, Any]:
    cpu, memory = environment.get("cpu") or {}, environment.get("memory") or {}
    gpus = [gpu.get("name") for gpu in environment.get("gpus") or ()]
    return {
        "cpu": cpu.get("model"),
        "usable_cores": cpu.get("usable_cores"),
        "instruction_sets": ", ".join(cpu.get("instruction_sets") or ()),
        "memory_gib": round((memory.get("total_bytes") or 0) / BYTES_PER_GIB),
        "gpus": ", ".join(str(name) for name in gpus),
        "operating_system": environment.get("operating_system"),
    }


def flat(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    """The values of nested mappings as text, by dotted name; without those that are None."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from flat(f"{prefix}.{key}" if prefix else str(key), item)
    elif value is not None:
        yield prefix, str(value)
