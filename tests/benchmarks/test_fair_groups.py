"""A flood of long prompts next to short requests, in a simulated engine: the bars of latency hold."""

from __future__ import annotations

import fair_groups
from megatoken import EngineConfig

SHAPE, SECONDS = "llama3.1-8b", 3.0


def test_a_flood_hardly_delays_another_group() -> None:
    rate = fair_groups.SHARE * fair_groups.capacity(SHAPE)
    slowdown = EngineConfig().fair_slowdown
    alone = fair_groups.measure(SHAPE, SECONDS, rate, flood=False, groups=True, slowdown=slowdown)
    flooded = fair_groups.measure(SHAPE, SECONDS, rate, flood=True, groups=True, slowdown=slowdown)
    assert flooded["ttft_seconds"]["p99"] <= 2 * alone["ttft_seconds"]["p99"]
    assert flooded["itl_seconds"]["p99"] <= 1.5 * alone["itl_seconds"]["p99"]
    assert flooded["flood_answers_per_second"] > 5
