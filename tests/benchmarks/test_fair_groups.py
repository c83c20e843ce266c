"""A flood of long prompts next to short requests, in a simulated engine: the bars of latency hold."""

from __future__ import annotations

from typing import Any

import fair_groups
from megatoken import EngineConfig

SHAPE, SECONDS = "llama3.1-8b", 3.0


def test_a_flood_hardly_delays_another_group() -> None:
    rate = fair_groups.SHARE * fair_groups.capacity(*fair_groups.engine_of(SHAPE, None, cpu=False))

    def measured(flood: bool) -> dict[str, Any]:
        engine = fair_groups.engine_of(SHAPE, EngineConfig().fair_slowdown, cpu=False)
        return fair_groups.measure(*engine, SECONDS, rate, flood=flood, groups=True)

    alone, flooded = measured(False), measured(True)
    assert flooded["ttft_seconds"]["p99"] <= 1.5 * alone["ttft_seconds"]["p99"]
    assert flooded["itl_seconds"]["p99"] <= 1.35 * alone["itl_seconds"]["p99"]
    assert flooded["flood_answers_per_second"] > 5
