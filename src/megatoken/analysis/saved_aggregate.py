"""The part of a saved result of ``megatoken aggregate`` that plans start from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatoken.errors import UsageError
from megatoken.files import UnreadableError, read_text
from megatoken.text import is_number

LARGEST_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class SavedAggregate:
    """Rate, size and workload of several nodes; the workload has ``scenario``, ``model`` and ``precision``."""

    sum_of_rates_tokens_per_second: float
    sum_label: str
    accelerators: int | None
    workload: dict[str, str | None]


def read_aggregate(path: Path) -> SavedAggregate:
    """``aggregate.json`` of ``megatoken aggregate --out``. Raises UsageError: the file cannot be read or is none."""
    try:
        document = json.loads(read_text(path, LARGEST_BYTES)[0])
    except (UnreadableError, ValueError) as error:
        raise UsageError(f"{path}: expected a run folder or aggregate.json: {error}") from None
    found = aggregate_in(document) if isinstance(document, dict) else None
    if found is None:
        raise UsageError(f"{path}: expected a run folder, or aggregate.json of megatoken aggregate --out")
    return found


def aggregate_in(document: Mapping[str, Any]) -> SavedAggregate | None:
    """The same of a document, such as the part ``aggregate`` of an audit; None where it is none, or has no rate."""
    rate = document.get("sum_of_rates_tokens_per_second")
    if document.get("kind") != "aggregate" or not is_number(rate) or rate <= 0:
        return None
    workload, accelerators = document.get("workload"), document.get("accelerators")
    stated = workload if isinstance(workload, dict) else {}
    return SavedAggregate(
        sum_of_rates_tokens_per_second=float(rate),
        sum_label=str(document.get("sum_label") or "sum of the rates"),
        accelerators=accelerators if isinstance(accelerators, int) and accelerators > 0 else None,
        workload={name: str(stated[name]) if stated.get(name) else None for name in ("scenario", "model", "precision")},
    )
