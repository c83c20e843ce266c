"""The contents of the audited artefacts, with the place of every figure and without judgement.

Runs of one result are nodes for the aggregation. Paths are texts relative to ``Evidence.root``. None means that the
artefacts do not say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from megatoken.analysis.early_stopping import RANKS
from megatoken.analysis.nodes import NodeRow
from megatoken.analysis.published import split_benchmark
from megatoken.files import Damage, display
from megatoken.mlperf.run_figures import RunFigures


@dataclass(frozen=True, slots=True, order=True)
class Where:
    """A file, relative to the audited path, and the line in it, counted from 1; None: the whole file or folder."""

    file: str
    line: int | None = None


def places(*paths: str, line: int | None = None) -> tuple[Where, ...]:
    """Files or folders of the audited tree, or their line, with printable names."""
    return tuple(Where(display(path), line) for path in paths)


class Role(StrEnum):
    """What a run of LoadGen was for, by its folder and its mode."""

    PERFORMANCE = "performance"
    ACCURACY = "accuracy"
    COMPLIANCE = "compliance"
    RANGING = "ranging"


@dataclass(frozen=True, slots=True)
class Run:
    """One folder of LoadGen's logs."""

    path: str
    role: Role
    node: str  # a name that no other run of its kind has: the system's folder, or the node's
    benchmark: str | None  # by folder, else by data set size
    folder_scenario: str | None  # Offline, Server, Interactive, SingleStream, as the folder is called
    division: str | None
    submitter: str | None
    system: str | None  # path of the systems file that describes the machine
    figures: RunFigures
    detail: str | None  # paths of the files
    summary: str | None
    accuracy: str | None
    accuracy_records: int | None  # entries of the accuracy log; 0 is LoadGen's empty list, None: absent or unreadable
    source_lines: Mapping[str, int] = field(default_factory=dict)  # line of each key in the detail log
    beginnings: tuple[float, ...] = ()  # when the log's first parts were written, in ms: no two runs have the same
    accuracy_sha256: str | None = None  # of the accuracy log; None where its middle was cut out, as in submissions
    accuracy_bytes: int | None = None  # of all answers; None as for accuracy_sha256

    def where(self, key: str | None = None) -> Where:
        """The line of the detail log that holds ``key``; without it, or if there is none, the log or the folder."""
        return Where(self.detail or self.path, self.source_lines.get(key) if key else None)

    def to_document(self) -> dict[str, Any]:
        """Plain JSON, with the figures on the same level as the other fields."""
        figures = {
            name: value.isoformat(timespec="milliseconds") if isinstance(value, datetime) else value
            for name, value in asdict(self.figures).items()
        }
        names = ("path", "role", "node", "benchmark", "folder_scenario", "division", "submitter", "system")
        return {name: getattr(self, name) for name in (*names, "accuracy_records")} | figures


@dataclass(frozen=True, slots=True)
class Document:
    """A file of keys and values, with the line of each key."""

    path: str
    values: Mapping[str, Any]
    source_lines: Mapping[str, int]
    damages: tuple[Damage, ...] = ()

    def where(self, key: str | None = None) -> Where:
        """The line of ``key``, or the file."""
        return Where(self.path, self.source_lines.get(key) if key else None)


class Configuration(Document):
    """A run's configuration as published: values from a JSON, YAML, user.conf or Python file, which is never run.

    Keys of any usual spelling have the one name that ``documents`` lists for them.
    """


class System(Document):
    """A system description (systems/<name>.json of MLPerf)."""

    @property
    def name(self) -> str:
        """Name of the file, without .json."""
        return self.path.rpartition("/")[2].removesuffix(".json")

    @property
    def accelerators_per_node(self) -> int | None:
        """As a number; None if it is not a number."""
        return _count(self.values.get("accelerators_per_node"))

    @property
    def nodes(self) -> int | None:
        """``number_of_nodes`` as a number; None if it is not a number."""
        return _count(self.values.get("number_of_nodes"))

    @property
    def accelerator(self) -> str | None:
        """``accelerator_model_name``."""
        name = self.values.get("accelerator_model_name")
        return name if isinstance(name, str) and name.strip() else None


@dataclass(frozen=True, slots=True)
class AccuracyResult:
    """One accuracy.txt: scores by lower-case name (rouge1, tokens_per_sample, ...) and the hash of the full log."""

    path: str
    benchmark: str | None
    scores: Mapping[str, float]
    hash: str | None
    division: str | None = None  # of the submission that it is part of


@dataclass(frozen=True, slots=True)
class Power:
    """Wall power of a run, averaged over power_begin..power_end from spl.txt: SPEC PTDaemon's log."""

    path: str
    run: str  # path of the run
    mean_watts: float
    readings: int


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that was found below one path."""

    root: str
    kind: str  # run (one), nodes (many, same benchmark and scenario), runs (many others), submission, megatoken_run
    round: str | None  # asked for, else that of the runs if they agree
    runs: tuple[Run, ...]  # sorted by natural order of their paths
    systems: tuple[System, ...] = ()
    configurations: tuple[Configuration, ...] = ()
    accuracy_results: tuple[AccuracyResult, ...] = ()
    power: tuple[Power, ...] = ()

    @property
    def performance_runs(self) -> tuple[Run, ...]:
        """Runs whose rate is a result; of a many-node folder these are the nodes."""
        return tuple(run for run in self.runs if run.role is Role.PERFORMANCE)

    def system_of(self, run: Run) -> System | None:
        """The description of the machine of ``run``; the only one there is, if its name fits none."""
        return next((system for system in self.systems if system.path == run.system), None)


def _count(value: Any) -> int | None:
    text = str(value).strip() if isinstance(value, int | str) and not isinstance(value, bool) else ""
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else None


def node_rows(evidence: Evidence, runs: Sequence[Run] | None = None) -> list[NodeRow]:
    """The runs of one result that have a rate and a duration: several are nodes, a single one the whole system."""
    runs = evidence.performance_runs if runs is None else runs
    rows = []
    for run in runs:
        figures = run.figures
        if figures.output_tokens_per_second is None or figures.duration_seconds is None:
            continue
        began = figures.began_at
        rows.append(
            NodeRow(
                node=run.node,
                output_tokens_per_second=figures.output_tokens_per_second,
                duration_seconds=figures.duration_seconds,
                output_tokens=figures.output_tokens,
                samples=figures.samples_issued,
                accelerators=_accelerators(evidence, run, alone=len(runs) == 1),
                started_seconds=began.timestamp() if began and began.tzinfo else None,
                progress=_progress(run),
                scenario=figures.scenario,
                model=split_benchmark(run.benchmark)[0] if run.benchmark else None,
                verdict=figures.validity,
                source=str(Path(evidence.root, run.path)),
            )
        )
    return rows


def _progress(run: Run) -> tuple[tuple[float, float], ...]:
    """Completions of an Offline run by its latency percentiles: one query, so latency is the time of completion."""
    figures = run.figures
    known = [(figures.latency_seconds.get(name), share) for name, share in (*RANKS.items(), ("max", 1.0))]
    times = [figures.latency_seconds.get("min"), *(time for time, _ in known)]
    ordered = all(time is not None for time in times) and times == sorted(times)  # type: ignore[type-var]
    if figures.scenario != "Offline" or not ordered or not figures.output_tokens_per_second:
        return ()
    tokens = figures.output_tokens_per_second * (figures.duration_seconds or 0.0)
    first = (times[0] or 0.0, 0.0)
    return ((0.0, 0.0), first, *((time or 0.0, share * tokens) for time, share in known))


def _accelerators(evidence: Evidence, run: Run, *, alone: bool) -> int | None:
    system = evidence.system_of(run)
    each = system.accelerators_per_node if system else None
    return each * (system.nodes or 1) if system and each and alone else each or None
