"""How the benchmark of LoadGen through an endpoint compares its two sides."""

from __future__ import annotations

from typing import Any

import pytest

import endpoint_in_process


def side(ttft: float, tpot: float) -> dict[str, Any]:
    return {
        name: {"p50": value / 2, "p99": value}
        for name, value in zip(endpoint_in_process.FIGURES, (ttft, tpot, 1.0), strict=True)
    }


def test_differences_are_those_of_the_medians_of_the_turns() -> None:
    turns = [
        {"in_process": side(0.100 + late, 0.020), "endpoint": side(0.104 - late, 0.0201)} for late in (0.0, 0.5, -0.05)
    ]
    found = endpoint_in_process.apart(turns)
    assert found["ttft_p99_difference_ms"] == pytest.approx(4.0)
    assert found["ttft_p50_difference_ms"] == pytest.approx(2.0)
    assert found["tpot_p99_difference_percent"] == pytest.approx(0.5)
    assert found["medians"]["in_process"]["tpot_seconds"] == {"p50": 0.01, "p99": 0.02}
