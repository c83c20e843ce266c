"""Releases of LoadGen: source hashes, embedded seeds, source lines that log each key, and the keys that a log has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from megatoken.mlperf.detail_log import DetailLog
from megatoken.mlperf.rounds import load_csv, load_table, round_seeds

GENERATED = "/mlperf_conf.h"  # made from mlperf.conf at build time
MODES = ("PerformanceOnly", "AccuracyOnly")
_BY_RELEASE = ("requested_accuracy_sample_count_override", "effective_accuracy_sample_count", "num_errors")
# Of the one percentile that the scenario's target is about, such as "99th percentile first token latency (ns)".
_TARGET_PERCENTILE = re.compile(r"(\d+(?:\.\d)?)th (first token )?percentile latency \(ns\)")


@dataclass(frozen=True, slots=True)
class Build:
    """One release of LoadGen whose source files are known."""

    version: str
    commit: str
    commit_date: str  # ISO 8601, with a time where the release's own logs state it
    sha1: Mapping[str, str]  # path below loadgen/ -> SHA-1

    def differing(self, sources: Mapping[str, object]) -> list[str]:
        """Of logged source files, those with another hash, and C++ files that only one side has."""
        known, cpp = self.sha1, ".cc"
        names = [name for name, sha1 in sources.items() if name in known and name != GENERATED and sha1 != known[name]]
        names += [name for name in sources if name.endswith(cpp) and name not in known and "generated" not in name]
        return sorted((*names, *(name for name in known if name.endswith(cpp) and name not in sources)))


@cache
def builds() -> tuple[Build, ...]:
    """Releases of LoadGen whose source hashes are known."""
    table = _table()
    return tuple(
        Build(entry["version"], entry["commit"], entry["commit_date"], {**table["base"], **entry["differs"]})
        for entry in table["builds"]
    )


def build_of(commit: str) -> Build | None:
    """The known release of a commit."""
    return next((build for build in builds() if commit and build.commit == commit[:10]), None)


def nearest_build(sources: Mapping[str, object], version: str) -> tuple[Build, list[str]]:
    """The release whose C++ files are most like the logged ones, those of that version first, and what differs."""
    code = {path: sha1 for path, sha1 in sources.items() if path.endswith((".cc", ".h")) and path != GENERATED}
    ordered = sorted(builds(), key=lambda build: build.version != version)
    nearest = min(ordered, key=lambda build: len(build.differing(code)))
    return nearest, nearest.differing(code)


@cache
def round_of_build(version: str) -> str | None:
    """The round whose seeds the package mlcommons-loadgen of that version embeds; None if that is not known."""
    of_seed = {seeds.qsl: name for name, seeds in round_seeds().items()}
    return next((of_seed.get(int(entry["seeds"])) for entry in _table()["builds"] if entry["version"] == version), None)


def source_lines(source: str, sha1: str) -> Mapping[str, list[int]] | None:
    """For each key that this version of a source file logs, the source lines that log it; None: version unknown."""
    lines: Mapping[str, Mapping[str, list[int]]] = _table()["source_lines"]
    return lines.get(f"{source} {sha1}")


def version_number(version: str | None) -> tuple[int, ...]:
    """``5.1.0 @ 47b91b979c`` -> (5, 1, 0); empty if it is not a version."""
    found = re.match(r"\s*(\d{1,4}(?:\.\d{1,4}){1,3})", version or "")
    return tuple(int(part) for part in found.group(1).split(".")) if found else ()


def is_known_version(version: str | None) -> bool:
    """Whether the version lies between the oldest and the newest release whose sources are known."""
    oldest, newest = _known_versions()
    return oldest <= version_number(version) <= newest


def is_older(version: str | None) -> bool:
    """Whether the version is older than all whose sources are known: what follows from those does not apply to it."""
    return () < version_number(version) < _known_versions()[0]


@cache
def _known_versions() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The oldest and the newest release whose sources are known."""
    known = [version_number(build.version) for build in builds()]
    return min(known), max(known)


@cache
def _table() -> dict[str, Any]:
    return load_table("loadgen_builds.json")


@cache
def _keys(scenario: str, mode: str, token_latencies: str, validity: str) -> tuple[str, ...]:
    facts = {"scenarios": scenario, "mode": mode, "token_latencies": token_latencies, "validity": validity}
    rows = load_csv("loadgen_detail_keys.csv")
    return tuple(
        row["key"] for row in rows if all(not row[name] or fact in row[name].split() for name, fact in facts.items())
    )


def log_keys(log: DetailLog) -> list[str]:
    """The keys that this LoadGen writes for this scenario and mode, in order; empty for modes of several runs."""
    tokens = "yes" if log.get("requested_use_token_latencies") is True else "no"
    validity = "VALID" if log.get("result_validity") == "VALID" else "INVALID"
    scenario, mode = log.text("effective_scenario"), log.text("effective_test_mode")
    if scenario not in ("Offline", "Server", "SingleStream", "MultiStream") or mode not in MODES:
        return []
    return [key for key in _keys(scenario, mode, tokens, validity) if _written_by_release(log, key) is not False]


def optional_keys(log: DetailLog) -> set[str]:
    """Keys that only some releases write, if the release is not known."""
    return {key for key in _BY_RELEASE if _written_by_release(log, key) is None}


def _written_by_release(log: DetailLog, key: str) -> bool | None:
    """Whether the LoadGen of this log writes ``key``; None if its source files are not known."""
    if key not in _BY_RELEASE:
        return True
    sources = log.get("loadgen_file_sha1")
    name = "results.cc" if key == "num_errors" else "test_settings_internal.cc"
    sha1 = sources.get(f"/{name}") if isinstance(sources, dict) else None
    lines = source_lines(name, sha1) if isinstance(sha1, str) else None
    return None if lines is None else key in lines


@cache
def summary_rows(scenario: str | None) -> tuple[Mapping[str, str], ...]:
    """The labelled lines of the summary in this scenario, in order: label, key of the detail log, required."""
    rows = load_csv("loadgen_summary_labels.csv")
    return tuple(row for row in rows if not row["scenarios"] or (scenario or "") in row["scenarios"].split())


def usual_label(label: str) -> str:
    """Releases before 5.1.1 print "Min Time to Output Token"."""
    return label.replace("Time to Output Token", "Time per Output Token")


def key_of_label(label: str, scenario: str | None) -> str | None:
    """The key of the detail log whose value a label shows; None for a label that LoadGen does not print."""
    if found := _TARGET_PERCENTILE.fullmatch(label):
        first_token, percent = "first_token_" if found.group(2) else "", f"{float(found.group(1)):.2f}"
        per_query = "per_query_" if scenario == "MultiStream" and not first_token else ""
        return f"result_{first_token}{percent}_percentile_{per_query}latency_ns"
    usual = usual_label(label)
    return next((row["key"] for row in summary_rows(scenario) if row["label"] == usual), None)
