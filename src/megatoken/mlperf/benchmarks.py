"""MLPerf's LLM benchmarks: data set sizes, latency limits, accuracy targets and required scenarios."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

from megatoken.mlperf.rounds import rules

PERCENTILE = 0.99  # of the latency limits
SCENARIOS = {
    "offline": "Offline",
    "server": "Server",
    "interactive": "Interactive",
    "singlestream": "SingleStream",
    "multistream": "MultiStream",
}
"""Scenarios as configurations spell them, and as MLPerf's folders and ``Benchmark`` do."""
DEFAULT_BENCHMARK = "llama2-70b"
BenchmarkName = Literal[
    "llama2-70b", "llama3.1-405b", "llama3.1-8b", "llama3.1-8b-edge", "mixtral-8x7b", "deepseek-r1", "gpt-oss-120b"
]
BENCHMARKS: tuple[BenchmarkName, ...] = get_args(BenchmarkName)
_TARGETS = ("-99", "-99.9")  # accuracy targets: one model, two benchmarks
_TARGET = re.compile(r"-99(?:\.9)?$")


@dataclass(frozen=True, slots=True)
class LatencyLimits:
    """Limits that the 99th percentiles of the time to first token and the time per output token must stay below."""

    ttft_seconds: float
    tpot_seconds: float

    def kept_by(self, ttft_seconds: float, tpot_seconds: float) -> bool:
        """Whether both 99th percentiles stay below their limits."""
        return ttft_seconds < self.ttft_seconds and tpot_seconds < self.tpot_seconds

    @property
    def ttft_ns(self) -> int:
        """As LoadGen logs it."""
        return round(self.ttft_seconds * 1e9)

    @property
    def tpot_ns(self) -> int:
        """As LoadGen logs it."""
        return round(self.tpot_seconds * 1e9)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One benchmark, as the rounds that have it define it. Scenarios are spelled as in submissions: ``SingleStream``.

    Attributes:
        name: Its folder in a submission, such as ``llama2-70b-99.9``; without accuracy target from ``benchmark``.
        rounds: Rounds that have it.
        rows: Rows of its data set, which is also the smallest number of samples of an Offline run.
        accuracy_rows: Rows of the data set of its accuracy run.
        tokens_per_sample: Bounds of the mean answer: the reference's, minus and plus 10 %, the lower one 0 if only
            answers of accuracy runs that are longer fail; None: not bounded.
        gen_len: Bounds of the characters of all answers; None: not bounded.
        accuracy: Score that must be reached, by lower-case metric; empty without an accuracy target.
        compliance: Compliance tests that a submission needs.
        limits: Latency limits by scenario, for the scenarios that have them.
        max_target_latency_ns: Largest target latency of a Server run; None: not bounded.
        required: Scenarios that a submission must show, by type of system; ``A|B``: one of both.
        scenario_rounds: Rounds that have a scenario, for the scenarios that not all of ``rounds`` have.
    """

    name: str
    rounds: tuple[str, ...]
    rows: int
    accuracy_rows: int
    tokens_per_sample: tuple[float, float] | None
    gen_len: tuple[float, float] | None
    accuracy: Mapping[str, float]
    compliance: tuple[str, ...]
    limits: Mapping[str, LatencyLimits]
    max_target_latency_ns: int | None
    required: Mapping[str, tuple[str, ...]]
    scenario_rounds: Mapping[str, tuple[str, ...]]

    @property
    def scenarios(self) -> tuple[str, ...]:
        """Offline, the scenarios with limits, and the scenarios that a submission must show."""
        required = "|".join(chain(*self.required.values())).split("|")
        return tuple(dict.fromkeys(filter(None, ("Offline", *self.limits, *required))))

    def has(self, scenario: str) -> bool:
        """Whether the benchmark has a scenario."""
        return scenario in self.scenarios

    def limits_of(self, scenario: str) -> LatencyLimits | None:
        """The limits of a scenario, in either spelling; None if it has none."""
        return self.limits.get(SCENARIOS.get(scenario, scenario))

    def missing_in(self, round: str) -> Set[str]:
        """Scenarios that the benchmark has in other rounds only."""
        return {scenario for scenario, rounds in self.scenario_rounds.items() if round not in rounds}

    def in_round(self, round: str) -> Benchmark:
        """The benchmark without the scenarios that the round does not have."""
        if not (missing := self.missing_in(round)):
            return self

        def left(choice: str) -> str:
            return "|".join(scenario for scenario in choice.split("|") if scenario not in missing)

        limits = {scenario: limit for scenario, limit in self.limits.items() if scenario not in missing}
        required = {kind: tuple(map(left, choices)) for kind, choices in self.required.items()}
        return replace(self, limits=limits, required=required)

    def loadgen_model(self, scenario: str) -> str:
        """The name by which LoadGen finds limits and token metrics; LoadGen accepts an unknown name without them."""
        name = _TARGET.sub("", self.name).replace("llama3.1", "llama3_1")
        return f"{name}-interactive" if scenario == "interactive" else name


@cache
def benchmarks() -> dict[str, Benchmark]:
    """Benchmarks by the name of their submission folder."""
    return {name: _benchmark(name, entry) for name, entry in rules()["benchmarks"].items()}


def spelled(name: str) -> str:
    """The name with the dot that folders and LoadGen write as an underscore."""
    return name.replace("llama3_1", "llama3.1")


def is_other_benchmark(model: str, round: str | None = None) -> bool:
    """Whether a model's folder is of a benchmark that is not a language model, by MLCommons' spellings.

    Args:
        model: Name of the folder.
        round: One that must have the benchmark; None: any.
    """
    others = rules()["other_benchmarks"]
    official = next((name for part, name in others["spellings"].items() if part in model), model)
    rounds = others["rounds"]
    return any(official in rounds.get(name, ()) for name in (rounds if round is None else (round,)))


def benchmark(name: str) -> Benchmark:
    """The benchmark of that name, one of ``BENCHMARKS``: of all rounds, without an accuracy target."""
    variants = [entry for folder, entry in benchmarks().items() if _TARGET.sub("", folder) == name]
    rounds = tuple(dict.fromkeys(chain.from_iterable(entry.rounds for entry in variants)))
    return replace(variants[-1], name=name, rounds=rounds, accuracy={})


def benchmark_of_model(model: str, scenario: str) -> Benchmark:
    """The benchmark that a model is named after; llama2-70b for all other models, as a yardstick and not a claim.

    Args:
        model: Named shape or directory.
        scenario: The edge benchmark of a model is taken for SingleStream only.
    """
    found = next((name for name in BENCHMARKS if Path(model).name.lower().startswith(name)), DEFAULT_BENCHMARK)
    edge = f"{found}-edge"
    return benchmark(edge if scenario == "singlestream" and edge in BENCHMARKS else found)


def benchmark_of(name: str | None, data_set_rows: int | None, round: str | None = None) -> Benchmark | None:
    """The benchmark that a folder is named after; without a name, the benchmark with that many rows.

    Args:
        name: Of a folder, in any usual spelling; without an accuracy target it may mean several benchmarks.
        data_set_rows: Rows of the data set, for a run that no folder names.
        round: Prefer a benchmark of this round, and return it as that round defines it.
    """
    table = benchmarks()
    if name is not None:
        wanted = spelled(name.lower()).replace("-interactive", "")
        names = [wanted] if wanted in table else [wanted + target for target in _TARGETS]
        found = [table[full] for full in names if full in table]
    else:
        found = [entry for entry in table.values() if entry.rows == data_set_rows]
    chosen = next((entry for entry in found if round in entry.rounds), found[0] if found else None)
    return chosen if chosen is None or round is None else chosen.in_round(round)


def _benchmark(name: str, entry: Mapping[str, Any]) -> Benchmark:
    def window(key: str) -> tuple[float, float] | None:
        return (entry[key][0], entry[key][1]) if key in entry else None

    limits = entry["limits"]
    return Benchmark(
        name=name,
        rounds=tuple(entry["rounds"]),
        rows=entry["rows"],
        accuracy_rows=entry.get("accuracy_rows", entry["rows"]),
        tokens_per_sample=window("tokens_per_sample"),
        gen_len=window("gen_len"),
        accuracy=entry["accuracy"],
        compliance=tuple(entry["compliance"]),
        limits={
            scenario: LatencyLimits(limit["ttft_ms"] / 1000, limit["tpot_ms"] / 1000)
            for scenario, limit in limits.items()
        },
        max_target_latency_ns=entry.get("max_target_latency_ns"),
        required={kind: tuple(names) for kind, names in entry["required"].items()},
        scenario_rounds={scenario: tuple(limit["rounds"]) for scenario, limit in limits.items() if "rounds" in limit},
    )
