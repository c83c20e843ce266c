"""What is known of MLPerf's rounds, its benchmarks and LoadGen's releases: ``megatoken/data/loadgen_*.json``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from megatoken.errors import UsageError

DEFAULT_ROUND = "v5.1"
_TARGETS = ("-99", "-99.9")  # of accuracy: one model, two benchmarks


@dataclass(frozen=True, slots=True)
class Limits:
    """99th percentile limits of a scenario, in ns; a result must stay below."""

    ttft_ns: int
    tpot_ns: int


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One benchmark's numbers, for the rounds that have it."""

    name: str
    rounds: tuple[str, ...]
    rows: int
    accuracy_rows: int
    tokens_per_sample: tuple[float, float] | None  # of the reference, minus and plus 10 %
    gen_len: tuple[float, float] | None  # characters of all answers
    accuracy: Mapping[str, float]  # score that must be reached
    compliance: tuple[str, ...]
    limits: Mapping[str, Limits]  # by folder scenario
    max_target_latency_ns: int | None
    required: Mapping[str, tuple[str, ...]]  # scenarios by system type; "A|B": one of them
    scenario_rounds: Mapping[str, tuple[str, ...]]  # that have a folder scenario, where not all of them do

    def has(self, scenario: str) -> bool:
        """Whether it has that folder scenario: Offline, those with limits and those that a system must show."""
        shown = "|".join(name for names in self.required.values() for name in names).split("|")
        return scenario in ("Offline", *self.limits, *shown)

    def missing_in(self, round: str) -> Set[str]:
        """Folder scenarios that it had in other rounds only."""
        return {scenario for scenario, rounds in self.scenario_rounds.items() if round not in rounds}

    def in_round(self, round: str) -> Benchmark:
        """Without the scenarios that the round does not have."""
        if not (missing := self.missing_in(round)):
            return self

        def left(choice: str) -> str:
            return "|".join(scenario for scenario in choice.split("|") if scenario not in missing)

        limits = {scenario: limit for scenario, limit in self.limits.items() if scenario not in missing}
        required = {kind: tuple(map(left, choices)) for kind, choices in self.required.items()}
        return replace(self, limits=limits, required=required)


@dataclass(frozen=True, slots=True)
class Build:
    """One release of LoadGen whose source files are known."""

    version: str
    commit: str
    commit_date: str  # ISO 8601, with a time where the release's own logs tell it
    sha1: Mapping[str, str]  # path below loadgen/ -> SHA-1


@cache
def rules() -> dict[str, Any]:
    """``loadgen_rules.json``."""
    return _table("loadgen_rules.json")


@cache
def round_seeds() -> dict[str, tuple[int, int, int]]:
    """Seeds (library, sample index, schedule) of each round."""
    return {
        name: (entry["seeds"]["qsl"], entry["seeds"]["sample_index"], entry["seeds"]["schedule"])
        for name, entry in rules()["rounds"].items()
    }


def ruled_rounds() -> tuple[str, ...]:
    """Rounds whose rules are known for at least one benchmark; of older ones the seeds are."""
    return tuple(name for name in round_seeds() if any(name in entry.rounds for entry in benchmarks().values()))


def known_round(name: str, among: Sequence[str] | None = None) -> str:
    """``name`` as the tables spell it; UsageError, which lists what can be given, if its rules are not known.

    Args:
        name: as typed.
        among: rounds that can be given; None: all whose rules are known.
    """
    wanted = name.strip().lower()
    wanted = wanted if wanted.startswith("v") else f"v{wanted}"
    if wanted not in ruled_rounds():
        only_seeds = "a round of which only the seeds are known here, not the rules"
        what = only_seeds if wanted in round_seeds() else "not a known MLPerf Inference round"
        raise UsageError(f"--round {name}: {what}; known: {', '.join(among or ruled_rounds())}")
    return wanted


@cache
def benchmarks() -> dict[str, Benchmark]:
    """Benchmarks by the name of their submission folder."""
    return {name: _benchmark(name, entry) for name, entry in rules()["benchmarks"].items()}


def benchmark_of(name: str | None, data_set_rows: int | None, round: str | None = None) -> Benchmark | None:
    """The benchmark a folder is named after, else the only family with that many rows; of several one of ``round``.

    With a round, as it was then.
    """
    table = benchmarks()
    if name is not None:
        wanted = name.lower().replace("llama3_1", "llama3.1").replace("-interactive", "")
        found = (
            [table[wanted]]
            if wanted in table
            else [table[f"{wanted}{end}"] for end in _TARGETS if wanted + end in table]
        )
    else:
        found = [entry for entry in table.values() if entry.rows == data_set_rows]
    chosen = next((entry for entry in found if round in entry.rounds), found[0] if found else None)
    return chosen if chosen is None or round is None else chosen.in_round(round)


@cache
def builds() -> tuple[Build, ...]:
    """Releases of LoadGen whose source hashes are known."""
    table = _table("loadgen_builds.json")
    return tuple(
        Build(entry["version"], entry["commit"], entry["commit_date"], {**table["base"], **entry["differs"]})
        for entry in table["builds"]
    )


@cache
def round_of_build(version: str) -> str | None:
    """The round whose seeds the package mlcommons-loadgen of that version embeds; None if that is not known."""
    of_seed = {seeds[0]: name for name, seeds in round_seeds().items()}
    builds = _table("loadgen_builds.json")["builds"]
    return next((of_seed.get(int(entry["seeds"])) for entry in builds if entry["version"] == version), None)


def source_lines(source: str, sha1: str) -> Mapping[str, list[int]] | None:
    """For each key that this version of a source file logs, the source lines that do; None: version unknown."""
    lines: Mapping[str, Mapping[str, list[int]]] = _table("loadgen_builds.json")["source_lines"]
    return lines.get(f"{source} {sha1}")


def version_number(version: str | None) -> tuple[int, ...]:
    """``5.1.0 @ 47b91b979c`` -> (5, 1, 0); empty if it is no version."""
    found = re.match(r"\s*(\d{1,4}(?:\.\d{1,4}){1,3})", version or "")
    return tuple(int(part) for part in found.group(1).split(".")) if found else ()


def is_known_version(version: str | None) -> bool:
    """Whether the releases examined reach from below to above this one."""
    number = version_number(version)
    known = [version_number(build.version) for build in builds()]
    return min(known) <= number <= max(known)


@cache
def _table(name: str) -> dict[str, Any]:
    text = files("megatoken").joinpath("data", name).read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def _benchmark(name: str, entry: Mapping[str, Any]) -> Benchmark:
    def window(key: str) -> tuple[float, float] | None:
        return (entry[key][0], entry[key][1]) if key in entry else None

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
            scenario: Limits(limits["ttft_ms"] * 1_000_000, limits["tpot_ms"] * 1_000_000)
            for scenario, limits in entry["limits"].items()
        },
        max_target_latency_ns=entry.get("max_target_latency_ns"),
        required={kind: tuple(names) for kind, names in entry["required"].items()},
        scenario_rounds={
            scenario: tuple(limits["rounds"]) for scenario, limits in entry["limits"].items() if "rounds" in limits
        },
    )
