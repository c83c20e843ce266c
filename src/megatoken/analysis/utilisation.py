"""How much of the machine a run used: operations and bytes of its model against what the hardware can do.

MFU (model FLOPS utilisation) counts the operations that the model needs, whatever the engine computes; MBU (memory
bandwidth utilisation) counts weights once a step, and cached keys and values of decodes. Attention of prompts is in
neither, because the series does not count its pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from megatoken.analysis.series import totals_over_time

if TYPE_CHECKING:
    import pyarrow as pa

COUNTED = ("steps", "processed_tokens", "output_tokens", "context_tokens", "recomputed_tokens")


def utilisation(result: Mapping[str, Any], series: pa.Table) -> dict[str, float | None]:
    """``mfu_share`` and ``mbu_share`` of a run with the facts ``work`` and ``peaks``; empty without them."""
    work, peaks = result.get("work"), result.get("peaks")
    if not work or not peaks or not len(series):
        return {}
    times, *totals = totals_over_time(series, list(COUNTED))
    last = dict(zip(COUNTED, (float(column[-1]) for column in totals), strict=True))
    seconds = float(times[-1])
    if seconds <= 0 or not all(map(np.isfinite, last.values())) or not last["steps"]:
        return {}
    operations = (
        (last["processed_tokens"] - last["recomputed_tokens"]) * work["token_operations"]
        + last["output_tokens"] * work["sample_operations"]
        + last["context_tokens"] * work["pair_operations"]
    )
    moved = last["context_tokens"] * work["cached_token_bytes"] + last["steps"] * (work["weights_bytes"] or 0.0)
    most_operations, most_bytes = (peaks[f"{name}_per_second"] for name in ("operations", "memory_bytes"))
    return {
        "mfu_share": operations / seconds / most_operations if most_operations else None,
        "mbu_share": moved / seconds / most_bytes if most_bytes and work["weights_bytes"] else None,
    }
