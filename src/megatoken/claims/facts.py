"""The facts that formulas may name: values of the artefacts with their places, or the evidence that is missing."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from megatoken.analysis.aggregation import aggregate
from megatoken.analysis.nodes import NodeRow
from megatoken.audit.evidence import Configuration, Evidence, Run, System, Where, node_rows
from megatoken.errors import UsageError
from megatoken.text import suggestion

LOGS = "the detail log of every node"
CLOCKS = "test_datetime, power_begin and power_end in every node's detail log, or one LoadGen log over the whole rack"
ACCURACY = "an accuracy run with the same settings: accuracy.txt with its scores and hash, mlperf_log_accuracy.json"
SERIES = "throughput, clocks, temperature and power over the run, once a second"
POWER = "wall power over the run: the power folder of SPEC PTDaemon, or logged counters of the whole rack"
SYSTEM = "the system description, systems/<name>.json"
CONFIGURATION = "the configuration that was run"
OWN_PERCENTILES = "percentiles per node; their mean or median is not a percentile of all samples"
SELECT = "the artefacts contain several results: choose one with the key runs, a pattern of run folders"

LISTS = {  # fact -> field of a run's figures
    "tokens_per_second": "output_tokens_per_second",
    **{name: name for name in ("samples_per_second", "tokens_per_sample", "samples_issued", "samples_requested")},
    **{name: name for name in ("target_qps", "min_duration_seconds", "duration_seconds", "errors")},
}
LATENCIES = ("latency", "ttft", "tpot")
LATENCY_KEYS = ("mean", "p50", "p90", "p99", "max")
LOG_KEYS = {
    "output_tokens_per_second": ("result_tokens_per_second", "result_completed_tokens_per_second"),
    "samples_issued": ("generated_samples_per_query",),
    "samples_requested": ("effective_samples_per_query",),
    "target_qps": ("effective_target_qps",),
    "min_duration_seconds": ("effective_min_duration_ms",),
    "duration_seconds": ("result_max_latency_ns",),
    "samples_per_second": ("result_samples_per_second",),
}
MISSING = {
    **dict.fromkeys(LISTS, LOGS),
    **{f"{kind}_{key}_seconds": LOGS for kind in LATENCIES for key in LATENCY_KEYS},
    **dict.fromkeys(("nodes", "scenario", "mode", "validity", "loadgen_version", "round", "benchmark"), LOGS),
    **dict.fromkeys(("makespan_tokens_per_second", "accuracy_records"), LOGS),
    **dict.fromkeys(("accelerators", "accelerators_per_node"), SYSTEM),
    "simultaneous": CLOCKS,
    "throughput_drift_percent": SERIES,
    "measured_watts": POWER,
}
GROUPS = {"config": CONFIGURATION, "system": SYSTEM, "accuracy": ACCURACY}


Value = float | str | tuple[float, ...]


class FormulaError(UsageError):
    """The formula is wrong, whatever the evidence."""


class NoResultError(FormulaError):
    """The formula has no result for these facts: a division by zero, the deviation of one value."""


class UnknownFactError(Exception):
    """The artefacts do not contain the fact; ``settle`` is the evidence that would."""

    def __init__(self, name: str, settle: str) -> None:
        super().__init__(name)
        self.name, self.settle = name, settle


@dataclass(frozen=True, slots=True)
class Fact:
    """A value of the artefacts, its places, and the condition under which it is valid."""

    value: Value
    where: tuple[Where, ...] = ()
    condition: str | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of one result by name, and its nodes."""

    values: Mapping[str, Fact] = field(default_factory=dict)
    nodes: tuple[NodeRow, ...] = ()
    accelerator: str | None = None
    division: str | None = None
    missing: Mapping[str, str] = field(default_factory=dict)  # overrides of MISSING

    @property
    def node_count(self) -> int | None:
        """Number of nodes: the runs or, for a single run, the nodes of its system description."""
        nodes = self.values.get("nodes")
        return int(nodes.value) if nodes and isinstance(nodes.value, float) else None

    @property
    def sum_label(self) -> str | None:
        """A label for the sum of node rates if the nodes are not shown to have run at the same time."""
        if len(self.nodes) < 2 or self.values.get("simultaneous", Fact("no")).value == "yes":
            return None
        shown = "shown not to be" if "simultaneous" in self.values else "not shown to be"
        return f"sum of {len(self.nodes)} node rates, {shown} simultaneous"

    def text(self, name: str) -> str | None:
        """The fact ``name``, if it is a text."""
        fact = self.values.get(name)
        return fact.value if fact and isinstance(fact.value, str) else None

    def find(self, name: str) -> Fact:
        """The fact ``name``. Raises UnknownFactError if the artefacts lack it, FormulaError for unknown names."""
        if name in self.values:
            return self.values[name]
        group, dot, _ = name.partition(".")
        settle = self.missing.get(name) or MISSING.get(name) or (GROUPS.get(group) if dot else None)
        if settle is None:
            known = sorted({*MISSING, *self.values})
            raise FormulaError(f"unknown fact {name}; {suggestion(name, known)}")
        raise UnknownFactError(name, settle)


def gather(evidence: Evidence | None, runs: str | None = None) -> Facts:
    """The facts of the result in ``evidence``; without evidence, no facts.

    ``runs`` is a pattern of the run paths of the result; by default all performance runs. Raises UsageError if it
    matches no run.
    """
    if evidence is None:
        return Facts()
    chosen = [run for run in evidence.performance_runs if runs is None or fnmatch.fnmatch(run.path, runs)]
    if runs is not None and not chosen:
        raise UsageError(f"runs: no run folder below {evidence.root} matches {runs}")
    systems = _distinct(evidence.system_of(run) for run in chosen)
    values = {
        **_group("config", evidence.configurations),
        **_group("system", systems),
        **_scores(evidence, chosen),
    }
    results = {(run.benchmark, run.figures.scenario, run.division) for run in chosen}
    if len(results) > 1 or (runs is None and evidence.kind == "submission" and len(chosen) > 1):
        return Facts(values, missing=dict.fromkeys(MISSING, SELECT))
    if not chosen:
        return Facts(values)
    rows = node_rows(evidence, chosen)
    values |= _log_facts(chosen) | _node_facts(evidence, chosen, rows)
    accelerator = next((system.accelerator for system in systems), None)
    return Facts(values, tuple(rows), accelerator, chosen[0].division)


def _log_facts(runs: Sequence[Run]) -> dict[str, Fact]:
    found: dict[str, Fact] = {}

    def add(name: str, numbers: Sequence[Any], where: Iterable[Where], condition: str | None = None) -> None:
        if None not in numbers:
            found[name] = Fact(tuple(map(float, numbers)), tuple(where), condition)

    of_rates = "; ".join(dict.fromkeys(of for run in runs if (of := run.figures.rates_of)))
    for name, attribute in LISTS.items():
        where = (run.where(_key(run, attribute)) for run in runs)
        add(name, [getattr(run.figures, attribute) for run in runs], where, of_rates if "_per_second" in name else None)
    for kind, key in product(LATENCIES, LATENCY_KEYS):
        numbers = [getattr(run.figures, f"{kind}_seconds").get(key) for run in runs]
        one_each = OWN_PERCENTILES if len(runs) > 1 and key.startswith("p") else None
        add(f"{kind}_{key}_seconds", numbers, map(Run.where, runs), one_each)
    for name in ("scenario", "mode", "validity", "loadgen_version", "round"):
        _add_agreed(found, name, [(getattr(run.figures, name), run.where()) for run in runs])
    _add_agreed(found, "benchmark", [(run.benchmark, run.where()) for run in runs])
    logs = (Where(run.accuracy or run.path) for run in runs)
    add("accuracy_records", [run.accuracy_records for run in runs], logs)
    return found


def _node_facts(evidence: Evidence, runs: Sequence[Run], rows: Sequence[NodeRow]) -> dict[str, Fact]:
    systems = _distinct(evidence.system_of(run) for run in runs)
    where = tuple(system.where("accelerators_per_node") for system in systems)
    nodes = float(len(runs)) if len(runs) > 1 else float(next((system.nodes or 1 for system in systems), 1))
    found = {"nodes": Fact(nodes, tuple(run.where() for run in runs))}
    counts = [row.accelerators for row in rows]
    if counts and None not in counts:
        total = float(sum(count or 0 for count in counts))
        found |= {"accelerators": Fact(total, where), "accelerators_per_node": Fact(total / nodes, where)}
    with suppress(UsageError):  # runs that are not nodes of one result have no makespan and no simultaneity
        result = aggregate(rows if len(rows) == len(runs) else ())
        found["makespan_tokens_per_second"] = Fact(
            result.makespan.output_tokens_per_second or 0.0,
            tuple(run.where(_key(run, "duration_seconds")) for run in runs),
            "if all nodes had started together" if result.makespan.conditional else None,
        )
        if result.overlap_share is not None:
            times = tuple(run.where("power_begin") for run in runs)
            found["simultaneous"] = Fact("yes" if result.evidence_of_simultaneity.shown else "no", times)
    readings = [power for power in evidence.power if power.run in {run.path for run in runs}]
    if len(readings) == len(runs):
        watts = sum(reading.mean_watts for reading in readings)
        found["measured_watts"] = Fact(watts, tuple(Where(reading.path) for reading in readings))
    return found


def _scores(evidence: Evidence, runs: Sequence[Run]) -> dict[str, Fact]:
    benchmarks = {run.benchmark for run in runs}
    results = [result for result in evidence.accuracy_results if result.benchmark in (None, *benchmarks)]
    found: dict[str, Fact] = {}
    for name in sorted({name for result in results for name in result.scores}):
        _add_agreed(found, f"accuracy.{name}", [(result.scores.get(name), Where(result.path)) for result in results])
    return found


def _group(group: str, files: Sequence[Configuration | System]) -> dict[str, Fact]:
    """Scalar values that are equal in all ``files``, as ``group.key``."""
    found: dict[str, Fact] = {}
    for key in sorted({key for file in files for key in file.values}):
        _add_agreed(found, f"{group}.{key}", [(file.values.get(key), file.where(key)) for file in files])
    return found


def _add_agreed(found: dict[str, Fact], name: str, stated: Sequence[tuple[Any, Where]]) -> None:
    values = {value for value, _ in stated if isinstance(value, int | float | str)}
    if len(values) == 1 and len(stated) == sum(value is not None for value, _ in stated):
        (value,) = values
        text = ("yes" if value else "no") if isinstance(value, bool) else value
        found[name] = Fact(text if isinstance(text, str) else float(text), tuple(where for _, where in stated))


def _key(run: Run, attribute: str) -> str | None:
    return next((key for key in LOG_KEYS.get(attribute, ()) if key in run.source_lines), None)


def _distinct(systems: Iterable[System | None]) -> list[System]:
    return list({system.path: system for system in systems if system}.values())
