"""MLPerf's LLM benchmarks: the names, data set sizes and latency limits that a scenario is held against.

The numbers are those of ``mlperf.rounds``: ``data/loadgen_rules.json`` (loadgen/mlperf.conf of mlcommons/inference).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path

from megatoken.mlperf.rounds import Benchmark as BenchmarkFacts
from megatoken.mlperf.rounds import benchmarks

PERCENTILE = 0.99  # of the limits
_ACCURACY_TARGET = re.compile(r"-99(?:\.9)?$")


@dataclass(frozen=True, slots=True)
class LatencyLimits:
    """What the 99th percentiles of the time to first token and of the time per output token must stay below."""

    ttft_seconds: float
    tpot_seconds: float


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One benchmark; accuracy targets do not tell benchmarks apart here. Scenarios are named as configurations do.

    Attributes:
        name: As submission folders spell it, without the accuracy target: ``llama3.1-8b``.
        rounds: That have it.
        facts: Of one of its accuracy targets.
    """

    name: str
    rounds: tuple[str, ...]
    facts: BenchmarkFacts

    @property
    def rows(self) -> int:
        """Of its data set, and fewest samples of an Offline run."""
        return self.facts.rows

    @property
    def limits(self) -> dict[str, LatencyLimits]:
        """By scenario; empty where it has none."""
        return {
            scenario.lower(): LatencyLimits(limit.ttft_ns / 1e9, limit.tpot_ns / 1e9)
            for scenario, limit in self.facts.limits.items()
        }

    @property
    def scenarios(self) -> tuple[str, ...]:
        """It has no other."""
        required = "|".join(chain(*self.facts.required.values())).lower()
        return tuple(dict.fromkeys(filter(None, ("offline", *self.limits, *required.split("|")))))

    @property
    def scenario_rounds(self) -> dict[str, tuple[str, ...]]:
        """That have a scenario, where not all of them do."""
        return {scenario.lower(): rounds for scenario, rounds in self.facts.scenario_rounds.items()}

    def in_round(self, name: str) -> Benchmark:
        """Without the scenarios that the round does not have."""
        return replace(self, facts=self.facts.in_round(name))

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
    for folder, entry in benchmarks().items():
        name = _ACCURACY_TARGET.sub("", folder)
        before = table[name].rounds if name in table else ()
        table[name] = Benchmark(name, tuple(dict.fromkeys((*before, *entry.rounds))), entry)
    return table
