"""MLPerf's LLM benchmarks: the names, data set sizes and latency limits that a scenario is held against.

The numbers are those of ``data/loadgen_rules.json`` (loadgen/mlperf.conf of mlcommons/inference).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any

PERCENTILE = 0.99  # of the limits
_ACCURACY_TARGET = re.compile(r"-99(?:\.9)?$")


@dataclass(frozen=True, slots=True)
class LatencyLimits:
    """What the 99th percentiles of the time to first token and of the time per output token must stay below."""

    ttft_seconds: float
    tpot_seconds: float


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One benchmark; accuracy targets do not tell benchmarks apart here.

    Attributes:
        name: As submission folders spell it, without the accuracy target: ``llama3.1-8b``.
        rows: Of its data set, and fewest samples of an Offline run.
        limits: By scenario; empty where it has none.
        scenarios: It has no other.
        rounds: That have it.
        scenario_rounds: That have a scenario, where not all of them do.
    """

    name: str
    rows: int
    limits: Mapping[str, LatencyLimits]
    scenarios: tuple[str, ...]
    rounds: tuple[str, ...]
    scenario_rounds: Mapping[str, tuple[str, ...]]

    def in_round(self, name: str) -> Benchmark:
        """Without the scenarios that the round does not have."""
        had = tuple(one for one in self.scenarios if name in self.scenario_rounds.get(one, (name,)))
        return replace(self, scenarios=had, limits={one: self.limits[one] for one in self.limits if one in had})

    def loadgen_model(self, scenario: str) -> str:
        """LoadGen's name, by which it finds limits and token metrics; an unknown one would switch them off."""
        name = self.name.replace("llama3.1", "llama3_1")
        return f"{name}-interactive" if scenario == "interactive" else name


DEFAULT_BENCHMARK = "llama2-70b"
BENCHMARKS = ("llama2-70b", "llama3.1-405b", "llama3.1-8b", "llama3.1-8b-edge", "deepseek-r1")


def benchmark(name: str) -> Benchmark:
    """The benchmark of that name, one of ``BENCHMARKS``."""
    return _benchmarks()[name]


def benchmark_of_model(model: str, scenario: str) -> Benchmark:
    """The benchmark that a model is named after, llama2-70b for all others: a yardstick, not a claim.

    Args:
        model: named shape or directory.
        scenario: the edge benchmark of a model is taken only for SingleStream.
    """
    found = next((name for name in BENCHMARKS if Path(model).name.lower().startswith(name)), DEFAULT_BENCHMARK)
    edge = f"{found}-edge"
    return benchmark(edge if scenario == "singlestream" and edge in BENCHMARKS else found)


@cache
def _benchmarks() -> dict[str, Benchmark]:
    table: dict[str, Benchmark] = {}
    for folder, entry in rules_table()["benchmarks"].items():
        name = _ACCURACY_TARGET.sub("", folder)
        limits = {
            scenario.lower(): LatencyLimits(limit["ttft_ms"] / 1000, limit["tpot_ms"] / 1000)
            for scenario, limit in entry["limits"].items()
        }
        required = "|".join(chain(*entry["required"].values())).lower()
        scenarios = tuple(dict.fromkeys(filter(None, ("offline", *limits, *required.split("|")))))
        before = table[name].rounds if name in table else ()
        rounds = tuple(dict.fromkeys((*before, *entry["rounds"])))
        later = {
            scenario.lower(): tuple(limit["rounds"]) for scenario, limit in entry["limits"].items() if "rounds" in limit
        }
        table[name] = Benchmark(name, entry["rows"], limits, scenarios, rounds, later)
    return table


@cache
def rules_table() -> dict[str, Any]:
    """``data/loadgen_rules.json``."""
    text = files("megatoken").joinpath("data", "loadgen_rules.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table
